"""Rotary position embeddings in config.json: `rope_parameters` (transformers 5), or `rope_theta` + `rope_scaling`."""

from __future__ import annotations

from typing import Any

from treeflash_jax.checks import quoted
from treeflash_jax.formats.keys import Keys
from treeflash_jax.verifiers.config import ModelConfig, Rope

KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rope_interleaved")
_KEYS_OF_KIND = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "factor", "attention_factor", "original_max_position_embeddings"),
}


def read(keys: Keys, head_dim: int) -> Rope:
    """The rotation that a config asks for, in either spelling.

    Raises:
      ValueError: a kind, key or value that is not implemented, or two spellings that disagree.
    """
    keys.check_only({"partial_rotary_factor": (1.0, None), "rope_interleaved": (False, None)})
    old, new = keys.table("rope_scaling").raw, keys.table("rope_parameters").raw
    if old and new and old != new:
        raise ValueError(f"{keys.where}: got rope_scaling beside other rope_parameters, expected one of them")
    settings = Keys({**old, **new}, keys.where)
    settings.check_only({"partial_rotary_factor": (1.0, None)})
    thetas = {one.number("rope_theta") for one in (keys, settings) if "rope_theta" in one}
    if len(thetas) > 1:
        raise ValueError(f"{keys.where}: got rope_theta both {' and '.join(map(str, sorted(thetas)))}, expected one")
    theta = thetas.pop() if thetas else 10_000.0
    kind = settings.raw.get("rope_type", settings.raw.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KEYS_OF_KIND:
        raise ValueError(f"{keys.where}: got rope type {quoted(kind)}, expected one of {list(_KEYS_OF_KIND)}")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_KEYS_OF_KIND[kind]}
    Keys(settings.raw, f"{keys.where}: rope settings of type {kind!r}").check_known(known)
    if kind == "longrope":
        return Rope(theta=theta, kind="longrope", divisors=_divisors(settings, head_dim))
    return _llama3(settings, theta) if kind == "llama3" else Rope(theta=theta)


def write(config: ModelConfig) -> dict[str, Any]:
    """The keys of a rotation, in both spellings as far as they go together."""
    rope = config.rope
    raw: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind == "llama3":
        raw |= {key: getattr(rope, key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
        raw["original_max_position_embeddings"] = rope.original_max_positions
    if rope.kind == "longrope":
        divisors = list(rope.divisors)
        raw |= {"short_factor": divisors, "long_factor": divisors, "factor": 1.0, "attention_factor": 1.0}
        raw["original_max_position_embeddings"] = config.max_positions
    return {"rope_theta": rope.theta, "rope_parameters": raw}


def _llama3(keys: Keys, theta: float) -> Rope:
    low, high = keys.number("low_freq_factor"), keys.number("high_freq_factor")
    if low >= high:
        raise ValueError(
            f"{keys.where}: got low_freq_factor {low} and high_freq_factor {high}, expected the low one to be lower"
        )
    return Rope(
        theta=theta,
        kind="llama3",
        factor=keys.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=keys.whole("original_max_position_embeddings"),
    )


def _divisors(keys: Keys, head_dim: int) -> tuple[float, ...]:
    """Of `longrope` where it is the same at every length, as GGUF files have it."""
    divisors = keys.value(tuple[float, ...], "short_factor", None, "a list of numbers above 0", above=0)
    if keys.raw.get("long_factor") != keys.raw["short_factor"] or keys.raw.get("attention_factor") != 1.0:
        raise ValueError(
            f"{keys.where}: rope type 'longrope' is implemented only with long_factor = short_factor "
            "and attention_factor 1.0"
        )
    if len(divisors) != head_dim // 2:
        raise ValueError(f"{keys.where}: got {len(divisors)} divisors in short_factor, expected {head_dim // 2}")
    return divisors
