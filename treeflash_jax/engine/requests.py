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
PENALTIES = "repetition_penalty presence_penalty frequency_penalty".split()
EACH = ["max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "stop_ids", *PENALTIES]
EACH += ["logit_bias", "min_new_tokens"]


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
    vocabulary, context = verifier.vocab_size, verifier.max_positions

    def each(name: str, values: Any) -> Sequence[Any]:
        is_shared = name in ("stop", "stop_ids") and all(isinstance(value, str | int) for value in values or ())
        if is_shared or not isinstance(values, Sequence):
            return [values] * len(prompts)
        if len(values) != len(prompts):
            what = "indices" if name == "indices" else f"values of {name}"
            raise ValueError(f"got {len(values)} {what} for {len(prompts)} prompts, expected one per prompt")
        return values

    if indices is None:
        indices = [0] * len(prompts) if isinstance(config.seed, Sequence) else range(len(prompts))
    indices = each("indices", fit(Sequence[int], indices, "indices", least=0, below=2**32))
    columns = zip(*(each(name, getattr(config, name)) for name in EACH), strict=True)
    given = {name for name in EACH if getattr(config, name) != getattr(GenerateConfig, name)}
    requests: list[Request] = []
    for number, (ids, index, values) in enumerate(zip(prompts, indices, columns, strict=True)):
        outside = [i for i in ids if not 0 <= i < vocabulary]
        if outside:
            raise ValueError(f"prompt {number}: got id {quoted(outside[0])}, expected 0 to {vocabulary - 1}")
        settings = dict(zip(EACH, values, strict=True))
        most = settings["max_new_tokens"]
        if len(ids) + most > context:
            raise ValueError(
                f"prompt {number}: got {len(ids)} prompt tokens + {most} new tokens, "
                f"expected at most {context} together (the verifier's context)"
            )
        if settings["temperature"] < GREEDY_BELOW:
            settings["temperature"] = 0.0
        stops = settings["stop"], stop_ids if settings["stop_ids"] is None else settings["stop_ids"]
        settings["stop"], settings["stop_ids"] = find_stops(*stops, tokenizer, vocabulary)
        penalties, biases = tuple(settings.pop(name) for name in PENALTIES), settings.pop("logit_bias") or {}
        for token in biases:
            expect(0 <= token < vocabulary, "logit_bias of id", token, f"0 to {vocabulary - 1}")
        expect(settings["min_new_tokens"] <= most, "min_new_tokens", settings["min_new_tokens"], f"at most {most}")
        settings |= {
            "ids": ids,
            "index": index,
            "drafter_temperature": choose_drafter_temperature(config, drafter, settings["temperature"]),
            "penalties": penalties if given & {*PENALTIES} else None,
            "logit_bias": tuple(biases.items()) if "logit_bias" in given else None,
            "min_new_tokens": settings["min_new_tokens"] if "min_new_tokens" in given else None,
        }
        requests += [Request(**settings, sample=j, number=len(requests) + j) for j in range(config.samples)]
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
