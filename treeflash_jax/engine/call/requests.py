"""Requests: one for every answer of a call, with the settings of its sampling."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from treeflash_jax.constraints.compilation import Constraint, answer_constraint, find_constraint
from treeflash_jax.constraints.tables import AutomatonTable
from treeflash_jax.core.checks import NoRoom, WrongValue, coerce, expect
from treeflash_jax.core.error_text import quoted
from treeflash_jax.core.settings import changed
from treeflash_jax.drafters import Drafter
from treeflash_jax.engine.settings.defaults import choose_drafter_temperature
from treeflash_jax.engine.settings.generate_config import LIST_SETTINGS, GenerateConfig
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.models.config import ModelConfig

GREEDY_BELOW = 1e-5  # smaller temperatures are greedy, as in the published code; logits / T would overflow


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and the settings of one answer.

    Attributes:
      ids: token ids of the prompt.
      settings: settings of the call with one value each, and the stops and temperatures that apply.
      constraint: constraint of the whole answer, thoughts included; None if there is none.
      automaton: automaton of the tokens that the constraint allows; None without a constraint, or before it is compiled.
      index: number that the random key depends on; by default the index of the prompt in its call.
      sample: index of the answer among those to the same prompt.
      number: index of the answer in its call.
    """

    ids: list[int]
    settings: GenerateConfig = field(default_factory=partial(GenerateConfig, drafter_temperature=1.0, stop_ids=()))
    constraint: Constraint | None = None
    automaton: AutomatonTable | None = None
    index: int = 0
    sample: int = 0
    number: int = 0


def make_requests(
    prompts: list[list[int]],
    config: GenerateConfig,
    verifier: ModelConfig,
    drafter: Drafter | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    stop_ids: Sequence[int] = (),
    indices: Sequence[int] | None = None,
) -> list[Request]:
    """Makes one request per prompt and sample, prompt by prompt. Their constraints are not compiled.

    Args:
      tokenizer: tokenizer of the verifier; needed for stop strings and constraints only.
      stop_ids: ids that end an answer unless the settings have `stop_ids`.
      indices: one index per prompt for its random key; None counts from 0, or is 0 with a list of seeds.

    Raises ValueError for no prompts, ids outside the vocabulary, more tokens than the context, lists of the wrong length,
    and `min_new_tokens` above `max_new_tokens`. It also raises the errors of `find_stops` for stops, and those of
    `find_constraint` and `answer_constraint` for constraints.
    """
    if not prompts:
        raise ValueError("got no prompts, expected at least one")
    if indices is None:
        indices = [0] * len(prompts) if isinstance(config.seed, Sequence) else range(len(prompts))
    indices = coerce(Sequence[int], indices, "indices", least=0, below=2**32)
    if len(indices) != len(prompts):
        raise ValueError(f"got {len(indices)} indices for {len(prompts)} prompts, expected one per prompt")
    requests: list[Request] = []
    for number, (ids, index, settings) in enumerate(zip(prompts, indices, _split(config, len(prompts)), strict=True)):
        _check_prompt(number, ids, settings, verifier)
        temperature = 0.0 if settings.temperature < GREEDY_BELOW else settings.temperature
        end_ids = stop_ids if settings.stop_ids is None else settings.stop_ids
        stop, end_ids = find_stops(settings.stop, end_ids, tokenizer, verifier.vocab_size)
        constraint = find_constraint(settings)
        if constraint is not None:
            constraint = answer_constraint(constraint, tokenizer, ids)
            end_ids = tuple(dict.fromkeys((*end_ids, *stop_ids)))  # an automaton allows `stop_ids` after a whole answer
        drafter_temperature = settings.drafter_temperature
        if drafter_temperature is None:
            drafter_temperature = choose_drafter_temperature(drafter, temperature)
        settings = replace(
            settings, temperature=temperature, drafter_temperature=drafter_temperature, stop=stop, stop_ids=end_ids
        )
        request = Request(ids=ids, settings=settings, constraint=constraint, index=index)
        requests += [replace(request, sample=j, number=len(requests) + j) for j in range(config.samples)]
    return requests


def _split(config: GenerateConfig, num_prompts: int) -> list[GenerateConfig]:
    """Returns the settings of each prompt, with single values instead of lists.

    Raises ValueError for a list that has not one value per prompt.
    """
    lists = {}
    for name, values in changed(config).items():
        is_shared = name in LIST_SETTINGS and all(isinstance(value, str | int) for value in values)
        if is_shared or type(values) is not tuple:
            continue
        if len(values) != num_prompts:
            raise ValueError(f"got {len(values)} values of {name} for {num_prompts} prompts, expected one per prompt")
        lists[name] = values
    if not lists:
        return [config] * num_prompts
    return [replace(config, **{name: lists[name][i] for name in lists}) for i in range(num_prompts)]


def check_ids(number: int, ids: Sequence[int], vocab_size: int) -> None:
    """Raises ValueError if the prompt with this number has an id outside the vocabulary."""
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise ValueError(f"prompt {number}: got id {quoted(outside[0])}, expected 0 to {vocab_size - 1}")


def _check_prompt(number: int, ids: list[int], settings: GenerateConfig, verifier: ModelConfig) -> None:
    check_ids(number, ids, verifier.vocab_size)
    where = f"prompt {number}"
    least, most = settings.min_new_tokens, settings.max_new_tokens
    if len(ids) + most > verifier.max_positions:
        raise NoRoom(
            f"{where}: got {len(ids)} prompt tokens + {most} new tokens, "
            f"expected at most {verifier.max_positions} together (the verifier's context)"
        )
    expect(least <= most, "min_new_tokens", least, f"at most {most}", where)
    for token in settings.logit_bias or ():
        expect(0 <= token < verifier.vocab_size, "logit_bias of id", token, f"0 to {verifier.vocab_size - 1}", where)


def find_stops(
    stop: Sequence[str], stop_ids: Sequence[int], tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns the strings and the token ids that end an answer.

    If a stop string is a special token, its id is returned instead, because texts contain no special tokens.

    Raises ValueError for strings without a tokenizer, and for ids outside the vocabulary.
    """
    for value in stop_ids:
        expect(value < vocab_size, "stop id", value, f"0 to {vocab_size - 1}")
    if not stop:
        return (), tuple(stop_ids)
    if tokenizer is None:
        raise WrongValue("stop", "strings, but the verifier's folder has no tokenizer.json; give stop_ids instead")
    special = tokenizer.special_tokens
    ids = [i for i, text in special.items() if text in stop]
    return tuple(text for text in stop if text not in special.values()), (*stop_ids, *ids)
