"""Rotary position embeddings in config.json: `rope_parameters` (transformers 5), or `rope_theta` + `rope_scaling`."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from treeflash_jax.formats.keys import Keys, find_key
from treeflash_jax.models.config import ModelConfig, Rope

_ORIGINAL = "original_max_position_embeddings"
KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rope_interleaved", _ORIGINAL)
_KIND_KEYS = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "proportional": (),
    "longrope": ("short_factor", "long_factor", "factor", "attention_factor", _ORIGINAL),
    "yarn": ("factor", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate", _ORIGINAL),
}


def read(keys: Keys, head_dim: int, max_positions: int, fraction: float, theta: float, usual: Mapping[str, Any]) -> Rope:
    """Returns the rotary embedding of a config, in either spelling. Raises ValueError if it is not implemented.

    Args:
      fraction: the family's default of `partial_rotary_factor`; 1: the family always rotates whole heads.
      theta: the family's default of `rope_theta`.
      usual: the family's other settings, for files without `rope_parameters` and `rope_scaling`.
    """
    keys.check_only({"rope_interleaved": (False, None)})
    old, new = keys.table("rope_scaling").raw, keys.table("rope_parameters").raw
    if new and {**new, **old} != new:
        raise ValueError(f"{keys.where}: got rope_scaling beside other rope_parameters, expected one of them")
    is_stated = bool(old) or "rope_parameters" in keys
    settings = Keys({**old, **new} if is_stated else usual, keys.where)
    fraction = _fraction(keys, settings, head_dim, fraction)
    head_dim = int(head_dim * fraction)
    table, key = find_key((keys, "rope_theta"), (settings, "rope_theta"))
    theta = table.number(key) if key in table else theta
    table, key = find_key((settings, "rope_type"), (settings, "type"))
    kind = table.raw[key] if key in table else "default"
    keys.expect(isinstance(kind, str) and kind in _KIND_KEYS, "rope type", kind, f"one of {list(_KIND_KEYS)}")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_KIND_KEYS[kind]}
    known |= set() if fraction == 1 else {"mrope_section", "mrope_interleaved"}  # for positions in images
    Keys(settings.raw, f"{keys.where}: rope settings of type {kind!r}").check_known(known)
    if _ORIGINAL in keys:  # transformers prefers this key outside the rope settings
        settings = Keys({**settings.raw, _ORIGINAL: keys.raw[_ORIGINAL]}, keys.where)
    rope = Rope(theta=theta)
    if kind == "longrope":
        rope = Rope(theta=theta, kind="longrope", divisors=_divisors(settings, head_dim))
    elif kind == "yarn":
        rope = _yarn(settings, theta, max_positions)
    elif kind == "llama3":
        rope = _llama3(settings, theta)
    elif kind == "proportional":
        rope = Rope(theta=theta, kind="proportional")
    return replace(rope, fraction=fraction)


def _fraction(keys: Keys, settings: Keys, head_dim: int, default: float) -> float:
    """Returns the share of a head that is rotated."""
    if default == 1:
        for table in (keys, settings):
            table.check_only({"partial_rotary_factor": (1.0, None)})
        return 1.0
    table, key = find_key((keys, "partial_rotary_factor"), (settings, "partial_rotary_factor"))
    fraction = table.number(key) if key in table else default
    size = head_dim * fraction
    is_even = fraction <= 1 and size == int(size) and size % 2 == 0
    keys.expect(is_even, "partial_rotary_factor", fraction, f"one that rotates an even number of the {head_dim} elements")
    return fraction


def write(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys of a rotary embedding in both spellings, since many programs read only one of them."""
    rope, original = config.rope, config.rope.original_max_positions
    scaling: dict[str, Any] = {key: getattr(rope, key) for key in _KIND_KEYS[rope.kind] if hasattr(rope, key)}
    if rope.kind == "longrope":
        divisors, original = list(rope.divisors), config.max_positions
        scaling = {"short_factor": divisors, "long_factor": divisors, "factor": 1.0, "attention_factor": 1.0}
    if rope.kind != "default":
        scaling = {"rope_type": rope.kind, **scaling, _ORIGINAL: original}
    raw = {"rope_type": rope.kind, "rope_theta": rope.theta, **scaling}
    if rope.fraction != 1:
        raw["partial_rotary_factor"] = rope.fraction
    return {"rope_theta": rope.theta, **({"rope_scaling": scaling} if scaling else {}), "rope_parameters": raw}


def _llama3(keys: Keys, theta: float) -> Rope:
    low, high = keys.number("low_freq_factor"), keys.number("high_freq_factor")
    keys.expect(low < high, "low_freq_factor", low, f"less than high_freq_factor {high}")
    return Rope(
        theta=theta,
        kind="llama3",
        factor=keys.number("factor", least=1),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=keys.integer(_ORIGINAL),
    )


def attention_growth(factor: float, scale: float = 1.0) -> float:
    """Returns the factor of cosines and sines for a context `factor` times as long. Source: YaRN, section 3.4."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _yarn(keys: Keys, theta: float, max_positions: int) -> Rope:
    """Computes YaRN as transformers 5 does. Null means the default; for `factor`, null means the ratio of the contexts."""
    original = keys.integer(_ORIGINAL) if _ORIGINAL in keys else max_positions
    factor = max_positions / original
    if keys.raw.get("factor", 0) is not None:
        factor = keys.number("factor", least=1)
    keys.expect(factor >= 1, "yarn factor", factor, "a number of at least 1")
    scales = [keys.number(key, least=0) for key in ("mscale", "mscale_all_dim") if key in keys]
    growth = attention_growth(factor)
    if "attention_factor" in keys:
        growth = keys.number("attention_factor")
    elif len(scales) == 2 and all(scales):
        growth = attention_growth(factor, scales[0]) / attention_growth(factor, scales[1])
    fast = keys.number("beta_fast") if "beta_fast" in keys else 32.0
    slow = keys.number("beta_slow") if "beta_slow" in keys else 1.0
    keys.expect(fast > slow, "beta_fast", fast, f"more than beta_slow {slow}")
    keys.expect(theta > 1, "rope_theta", theta, "a number above 1 with yarn")
    return Rope(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_positions=original,
        attention_factor=growth,
        beta_fast=fast,
        beta_slow=slow,
        truncate=keys.truth("truncate", True),
    )


def _divisors(keys: Keys, head_dim: int) -> tuple[float, ...]:
    """Returns the divisors of `longrope`, which must have equal factors for every length, as in GGUF files."""
    divisors = keys.value(list[float], "short_factor", None, "a list of numbers above 0", above=0)
    is_constant = keys.raw.get("long_factor") == keys.raw["short_factor"] and keys.raw.get("attention_factor") == 1.0
    keys.expect(is_constant, "rope type", "longrope", "one with long_factor = short_factor and attention_factor 1.0")
    keys.expect(len(divisors) == head_dim // 2, "number of divisors in short_factor", len(divisors), str(head_dim // 2))
    return tuple(divisors)
