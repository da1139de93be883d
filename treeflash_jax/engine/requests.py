"""Requests: one for every answer of a call, with the settings of its sampling."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treeflash_jax.core.checks import expect, fit, quoted
from treeflash_jax.drafters import DrafterConfig
from treeflash_jax.engine.generate_config import GenerateConfig
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.models.config import ModelConfig

GREEDY_BELOW = 1e-5  # smaller temperatures are greedy, as in the published code; logits / T would overflow


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and the sampling settings of one answer.

    Attributes:
      ids: token ids of the prompt.
      stop_ids: ids of the tokens that end the answer.
      index: index of the prompt in its call; part of the random key.
      sample: index of the answer among those to the same prompt.
      number: index of the answer in its call.
    """

    ids: list[int]
    max_new_tokens: int = 1
    temperature: float = 0.0
    drafter_temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    index: int = 0
    sample: int = 0
    number: int = 0

    @property
    def length(self) -> int:
        return len(self.ids)


def make_requests(
    prompts: list[list[int]],
    config: GenerateConfig,
    verifier: ModelConfig,
    drafter: DrafterConfig | None = None,
    *,
    stop_ids: Sequence[int] = (),
    indices: Sequence[int] | None = None,
) -> list[Request]:
    """Makes one request per prompt and sample, prompt by prompt.

    Args:
      stop_ids: ids that end an answer, from `find_stops`.
      indices: one index per prompt for its random key; None counts from 0.

    Raises ValueError for no prompts, ids outside the vocabulary, more tokens than the context, lists of the wrong length.
    """
    if not prompts:
        raise ValueError("got no prompts, expected at least one")
    vocabulary, context = verifier.vocab_size, verifier.max_positions

    def each(name: str, values: Any) -> Sequence[Any]:
        if not isinstance(values, Sequence):
            return [values] * len(prompts)
        if len(values) != len(prompts):
            raise ValueError(f"got {len(values)} {name} for {len(prompts)} prompts, expected one per prompt")
        return values

    indices = range(len(prompts)) if indices is None else fit(Sequence[int], indices, "indices", least=0, below=2**32)
    indices, names = each("indices", indices), ("temperature", "top_k", "top_p", "seed")
    sampled = zip(*(each(f"values of {name}", getattr(config, name)) for name in names), strict=True)
    requests: list[Request] = []
    for number, (ids, index, values) in enumerate(zip(prompts, indices, sampled, strict=True)):
        outside = [i for i in ids if not 0 <= i < vocabulary]
        if outside:
            raise ValueError(f"prompt {number}: got id {quoted(outside[0])}, expected 0 to {vocabulary - 1}")
        if len(ids) + config.max_new_tokens > context:
            raise ValueError(
                f"prompt {number}: got {len(ids)} prompt tokens + {config.max_new_tokens} new tokens, "
                f"expected at most {context} together (the verifier's context)"
            )
        settings = dict(zip(names, values, strict=True))
        if settings["temperature"] < GREEDY_BELOW:
            settings["temperature"] = 0.0
        settings |= {"ids": ids, "index": index, "stop_ids": tuple(stop_ids), "max_new_tokens": config.max_new_tokens}
        settings["drafter_temperature"] = choose_drafter_temperature(config, drafter, settings["temperature"])
        requests += [Request(**settings, sample=j, number=len(requests) + j) for j in range(config.samples)]
    return requests


def choose_drafter_temperature(config: GenerateConfig, drafter: DrafterConfig | None, temperature: float) -> float:
    """Returns the temperature of the draft for a sampling temperature: the requested one, or the default."""
    if config.drafter_temperature is not None or drafter is None:
        return config.drafter_temperature or 1.0
    return max(drafter.drafter_temperature, min(temperature, 1.0))


def find_stops(
    config: GenerateConfig, tokenizer: Tokenizer | None, usual: Sequence[int], vocab_size: int
) -> tuple[tuple[str, ...], list[int]]:
    """Returns the strings and the token ids that end an answer.

    A special token among the strings is an id, since it is not part of the text.

    Args:
      usual: ids that end an answer unless the settings have `stop_ids`.

    Raises ValueError for strings without a tokenizer, and for ids outside the vocabulary.
    """
    for value in config.stop_ids or ():
        expect(value < vocab_size, "stop id", value, f"0 to {vocab_size - 1}")
    ids = list(usual if config.stop_ids is None else config.stop_ids)
    if not config.stop:
        return (), ids
    if tokenizer is None:
        raise ValueError("got stop strings, but the verifier's folder has no tokenizer.json; give stop_ids instead")
    special = {token.content: i for i, token in tokenizer.inner.added_tokens_decoder.items() if token.special}
    ids += [special[text] for text in config.stop if text in special]
    return tuple(text for text in config.stop if text not in special), ids
