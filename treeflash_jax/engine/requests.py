"""Requests: one for every answer of a call, with the settings of its sampling."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from treeflash_jax.core.checks import expect, fit, quoted
from treeflash_jax.drafters import DrafterConfig
from treeflash_jax.engine.generate_config import GenerateConfig
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.trees.containers import NO_TOKEN

GREEDY_BELOW = 1e-5  # smaller temperatures are greedy, as in the published code; logits / T would overflow


# Settings of an answer that may have a value per prompt.
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
EACH = (
    "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "stop_ids", *PENALTIES, "logit_bias",
    "min_new_tokens",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and the sampling settings of one answer.

    The last three settings are None if no prompt of the call has them. Lists have one length in all requests of a call.

    Attributes:
      ids: token ids of the prompt.
      stop: strings that end the answer.
      stop_ids: ids of the tokens that end the answer; -1 pads.
      index: part of the random key; index of the prompt in its call unless prompts have their own seeds.
      sample: index of the answer among those to the same prompt.
      number: index of the answer in its call.
      penalties: repetition, presence and frequency penalties.
      logit_bias: ids of tokens with what is added to their logits; `NO_TOKEN` pads.
    """

    ids: list[int]
    max_new_tokens: int = 1
    temperature: float = 0.0
    drafter_temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    index: int = 0
    sample: int = 0
    number: int = 0
    penalties: tuple[float, ...] | None = None
    logit_bias: tuple[tuple[int, float], ...] | None = None
    min_new_tokens: int | None = None

    @property
    def length(self) -> int:
        return len(self.ids)


def make_requests(
    prompts: list[list[int]],
    config: GenerateConfig,
    verifier: ModelConfig,
    drafter: DrafterConfig | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    stop_ids: Sequence[int] = (),
    indices: Sequence[int] | None = None,
) -> list[Request]:
    """Makes one request per prompt and sample, prompt by prompt.

    Args:
      tokenizer: tokenizer of the verifier; needed for stop strings only.
      stop_ids: ids that end an answer unless the settings have `stop_ids`.
      indices: one index per prompt for its random key; None counts from 0, or is 0 with a list of seeds.

    Raises ValueError for no prompts, ids outside the vocabulary, more tokens than the context, lists of the wrong length,
    and stops as `find_stops` does.
    """
    if not prompts:
        raise ValueError("got no prompts, expected at least one")
    if indices is None:
        indices = [0] * len(prompts) if isinstance(config.seed, Sequence) else range(len(prompts))
    indices = fit(Sequence[int], indices, "indices", least=0, below=2**32)
    if len(indices) != len(prompts):
        raise ValueError(f"got {len(indices)} indices for {len(prompts)} prompts, expected one per prompt")
    columns = zip(*(_each(name, getattr(config, name), len(prompts)) for name in EACH), strict=True)
    given = {name for name in EACH if getattr(config, name) != getattr(GenerateConfig, name)}
    requests: list[Request] = []
    for number, (ids, index, values) in enumerate(zip(prompts, indices, columns, strict=True)):
        settings = dict(zip(EACH, values, strict=True))
        _check_prompt(number, ids, settings["max_new_tokens"], verifier)
        if settings["temperature"] < GREEDY_BELOW:
            settings["temperature"] = 0.0
        settings["drafter_temperature"] = choose_drafter_temperature(config, drafter, settings["temperature"])
        stops = settings["stop"], stop_ids if settings["stop_ids"] is None else settings["stop_ids"]
        settings["stop"], settings["stop_ids"] = find_stops(*stops, tokenizer, verifier.vocab_size)
        settings |= _processing(settings, given, verifier.vocab_size)
        settings = {name: value for name, value in settings.items() if name not in PENALTIES}
        requests += [
            Request(ids=ids, index=index, sample=j, number=len(requests) + j, **settings) for j in range(config.samples)
        ]
    return _padded(requests)


def _each(name: str, values: Any, num_prompts: int) -> Sequence[Any]:
    """Returns the value of a setting for each prompt. Raises ValueError for a list of another length."""
    is_shared = name in ("stop", "stop_ids") and all(isinstance(value, str | int) for value in values or ())
    if is_shared or not isinstance(values, Sequence):
        return [values] * num_prompts
    if len(values) != num_prompts:
        raise ValueError(f"got {len(values)} values of {name} for {num_prompts} prompts, expected one per prompt")
    return values


def _check_prompt(number: int, ids: list[int], max_new_tokens: int, verifier: ModelConfig) -> None:
    outside = [i for i in ids if not 0 <= i < verifier.vocab_size]
    if outside:
        raise ValueError(f"prompt {number}: got id {quoted(outside[0])}, expected 0 to {verifier.vocab_size - 1}")
    if len(ids) + max_new_tokens > verifier.max_positions:
        raise ValueError(
            f"prompt {number}: got {len(ids)} prompt tokens + {max_new_tokens} new tokens, "
            f"expected at most {verifier.max_positions} together (the verifier's context)"
        )


def _processing(settings: dict[str, Any], given: set[str], vocab_size: int) -> dict[str, Any]:
    """Returns the fields of a Request that process logits, None for those that no prompt of the call has."""
    least, most, biases = settings["min_new_tokens"], settings["max_new_tokens"], settings["logit_bias"] or {}
    expect(least <= most, "min_new_tokens", least, f"at most {most}")
    for token in biases:
        expect(0 <= token < vocab_size, "logit_bias of id", token, f"0 to {vocab_size - 1}")
    return {
        "penalties": tuple(settings[name] for name in PENALTIES) if given & {*PENALTIES} else None,
        "logit_bias": tuple(biases.items()) if "logit_bias" in given else None,
        "min_new_tokens": least if "min_new_tokens" in given else None,
    }


def _padded(requests: list[Request]) -> list[Request]:
    """Returns the requests with lists of one length each."""
    for name, padding in (("stop_ids", -1), ("logit_bias", (NO_TOKEN, 0.0))):
        longest = max(len(getattr(request, name) or ()) for request in requests)
        for number, request in enumerate(requests):
            if (values := getattr(request, name)) is not None:
                requests[number] = replace(request, **{name: values + (padding,) * (longest - len(values))})
    return requests


def choose_drafter_temperature(config: GenerateConfig, drafter: DrafterConfig | None, temperature: float) -> float:
    """Returns the temperature of the draft for a sampling temperature: the requested one, or the default."""
    if config.drafter_temperature is not None or drafter is None:
        return config.drafter_temperature or 1.0
    return max(drafter.drafter_temperature, min(temperature, 1.0))


def find_stops(
    stop: Sequence[str], stop_ids: Sequence[int], tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns the strings and the token ids that end an answer.

    A special token among the strings becomes an id, since it is not part of the text.

    Raises ValueError for strings without a tokenizer, and for ids outside the vocabulary.
    """
    for value in stop_ids:
        expect(value < vocab_size, "stop id", value, f"0 to {vocab_size - 1}")
    if not stop:
        return (), tuple(stop_ids)
    if tokenizer is None:
        raise ValueError("got stop strings, but the verifier's folder has no tokenizer.json; give stop_ids instead")
    special = {token.content: i for i, token in tokenizer.inner.added_tokens_decoder.items() if token.special}
    ids = [special[text] for text in stop if text in special]
    return tuple(text for text in stop if text not in special), (*stop_ids, *ids)
