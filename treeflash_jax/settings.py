"""What a caller may ask for, checked before any compute: settings of a call, and the rows they become."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, Literal, TypedDict, TypeVar

import numpy as np

from treeflash_jax.acceptance import RULES, check_lawful
from treeflash_jax.checks import Bounds, bounded, checked, clipped, fit, quoted
from treeflash_jax.config import MOST_NODES, DrafterConfig, HeadName, ModelConfig
from treeflash_jax.suggest import suggesting, suggestion
from treeflash_jax.trees.builders import BUILDERS, SAMPLED, TreeShape, law_of
from treeflash_jax.verifiers.attention import IMPLEMENTATIONS

Function = TypeVar("Function", bound=Callable[..., Any])
MOST_ROWS = 2**16  # answers of a prompt, or decoded together; more is a slip
GREEDY_BELOW = 1e-5  # smaller temperatures are greedy, as in the published code; logits / T would overflow
# Named so that asking for them is an answer, not a silent difference.
REFUSED = {
    "repetition_penalty": "penalties change the verifier's distribution with every token",
    "presence_penalty": "penalties change the verifier's distribution with every token",
    "frequency_penalty": "penalties change the verifier's distribution with every token",
    "num_beams": "beam search does not sample from the verifier",
    "grammar": "constrained decoding needs a mask per tree node",
    "min_p": "only temperature, top-k and top-p are implemented",
}
# Fields of GenerateConfig that say how to draft.
DRAFTING = "nodes block_size candidates children shortlist head acceptance".split()
DRAFTING += "branches trunk skeleton leaves drafter_temperature".split()
NO_DRAFTER = "no drafter is loaded"
METHODS = {"tree": "best-first", "walk": "walk", "chain": "chain", "ar": "none"}  # what `builder` was in the first edition
logger = logging.getLogger("treeflash_jax")


OF_LOAD = "verifier drafter dtype quantize mesh revision local_files_only budget".split()  # no settings of a call


def renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, or those of a record, whose `method` of the first edition is turned into `builder`."""
    rest = dict(settings)
    method = rest.pop("method", None)
    if method is None:
        return rest
    builder = METHODS.get(method) if isinstance(method, str) else None
    if builder is None:
        raise ValueError(f"got method {quoted(method)}, expected one of {tuple(METHODS)}; it is called builder now")
    if method != "tree" or rest.get("builder") is None:
        rest["builder"] = builder
    return rest


def without_method(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a call with `builder` for `method`, which works for one more release and says so."""
    found = renamed(settings)
    if settings.get("method") is not None:
        if settings.get("builder") not in (None, found["builder"]):
            raise ValueError(
                f"got builder {quoted(settings['builder'])} and method {settings['method']!r}, expected one of them"
            )
        logger.warning(
            f"method {settings['method']!r} is now builder {found['builder']!r}; the old name ends with the next release"
        )
    return found


def takes_method(cls: type) -> type:
    """A class of settings that also accepts `method`."""
    init = cls.__init__

    @wraps(init)
    def made(self: Any, **settings: Any) -> None:
        init(self, **without_method(settings))

    cls.__init__ = made
    return cls


@takes_method
@suggesting
@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Settings of a call to `generate`, `generate_each`, `stream` or `warmup`.

    Settings of drafting affect the speed, never the distribution of the output.

    Example:
      >>> model.generate(prompts, GenerateConfig(temperature=0.7, top_p=0.9), max_new_tokens=256)

    Attributes:
      max_new_tokens: maximum number of generated tokens, the stop token included.
      nodes: tree nodes verified per round, root included. The default is the drafter's for a tree, and the whole block for
        a chain. With "auto", every round verifies the number of nodes that is fastest according to `treeflash calibrate`,
        and drafting pauses while it does not pay; this needs best-first trees and sample-and-match.
      block_size: length of the drafted block, anchor included, at most the length the drafter was trained for (the
        default). Shorter blocks make rounds cheaper and trees shallower.
      candidates: candidate tokens per depth (M).
      children: children kept per candidate token (K).
      shortlist: number of tokens per depth that the second stage of a conditional head scores, taken over all depths
        together. 0 scores the whole vocabulary.
      head: "mlp", "linear" or "marginal". The default is the drafter's own head.
      builder: what is drafted: a tree that is deterministic ("best-first") or whose nodes are sampled ("paths", "delayed",
        "without-replacement" or "hybrid"); "walk", a greedy chain; "chain", the chain of the DFlash paper; or "none", one
        token at a time. The default is "none" without a drafter and "best-first" with one, but sequences at temperatures
        where "hybrid" was measured to be better for this drafter (`DrafterConfig.sampled_above`) get that, unless
        `acceptance` is given.
      acceptance: rule that decides which nodes are kept. The default is "sample-and-match" for best-first trees, "block"
        for one sampled path, and "traversal" for other sampled trees. Every rule keeps the verifier's distribution;
        "sample-and-match" also gives the same answer as one-token decoding with the same seed.
      branches: number of sampled paths, or maximum number of sampled children per node.
      trunk: number of nodes before the first branching of a "delayed" tree.
      skeleton: share of the nodes of a "hybrid" tree that are chosen by best-first search.
      leaves: whether sampled trees may contain tokens that end their branch.
      temperature: sampling temperature of the verifier; 0 is greedy. One value, or one per prompt.
      top_k: sample from the k most likely tokens; 0 keeps all. One value, or one per prompt.
      top_p: sample from the most likely tokens of this total probability; 1 keeps all. One value, or one per prompt.
      drafter_temperature: temperature of the draft. The default is the larger of the drafter's own and the sequence's
        temperature, the latter counted up to 1: a draft works best when it is about as sharp as the verifier.
      seed: one value, or one per prompt. Prompt i uses the key fold_in(seed, i).
      samples: number of answers per prompt. Sample j is the answer that seed + j gives.
      stop_ids: token ids that end an answer. The default is the model's own.
      stop: strings that end an answer; the text ends before them.
      batch_size: number of sequences decoded together. The default is all, at most 8.
      attention: attention implementation. "xla" reads whole caches; "streamed", "pallas-gpu" and "pallas-tpu" read only the
        filled part. The default depends on the device and dtype. The Pallas kernels were never run on an accelerator.
      log_probs: whether to return the verifier's log-probability of every token.
      expected_lengths: whether to return how many tokens each round was expected to commit, given its tree.
    """

    max_new_tokens: int = bounded(128, least=1)
    nodes: int | Literal["auto"] | None = bounded(
        None, least=1, most=MOST_NODES, says=f"at least 1 (the root counts) and at most {MOST_NODES:,}, or 'auto'"
    )
    block_size: int | None = bounded(None, least=2)
    candidates: int = bounded(16, least=1)
    children: int = bounded(16, least=1)
    shortlist: int = bounded(0, least=0)
    head: HeadName | None = None
    builder: str | None = None
    acceptance: str | None = None
    branches: int = bounded(TreeShape.branches, least=1, most=MOST_NODES)
    trunk: int = bounded(TreeShape.trunk, least=0, most=MOST_NODES)
    skeleton: float = bounded(TreeShape.skeleton, least=0, most=1, says="0 to 1, a share of the nodes")
    leaves: bool = TreeShape.leaves
    temperature: float | Sequence[float] = bounded(0.0, least=0, says="0 (greedy) or more; one number, or one per prompt")
    top_k: int | Sequence[int] = bounded(0, least=0, says="0 (all tokens) to 2**31 - 1; one, or one per prompt")
    top_p: float | Sequence[float] = bounded(1.0, above=0, most=1, says="above 0 and at most 1; one, or one per prompt")
    drafter_temperature: float | None = bounded(None, above=0)
    seed: int | Sequence[int] = bounded(0, least=0, most=2**32 - 1, says="0 to 2**32 - 1; one, or one per prompt")
    samples: int = bounded(1, least=1, most=MOST_ROWS)
    stop_ids: Sequence[int] | None = bounded(None, least=0)
    stop: Sequence[str] = bounded((), nonempty=True, says="strings that are not empty")
    batch_size: int | None = bounded(None, least=1, most=MOST_ROWS)
    attention: str | None = None
    log_probs: bool = False
    expected_lengths: bool = False


class Settings(TypedDict, total=False):
    """The fields of GenerateConfig as keyword arguments, written out for editors and type checkers.

    GenerateConfig says what they mean, checks them and has their defaults; a test keeps the two alike.
    """

    max_new_tokens: int
    nodes: int | Literal["auto"] | None
    block_size: int | None
    candidates: int
    children: int
    shortlist: int
    head: HeadName | None
    builder: str | None
    acceptance: str | None
    branches: int
    trunk: int
    skeleton: float
    leaves: bool
    temperature: float | Sequence[float]
    top_k: int | Sequence[int]
    top_p: float | Sequence[float]
    drafter_temperature: float | None
    seed: int | Sequence[int]
    samples: int
    stop_ids: Sequence[int] | None
    stop: Sequence[str]
    batch_size: int | None
    attention: str | None
    log_probs: bool
    expected_lengths: bool


def takes_settings(function: Function) -> Function:
    """Shows the fields of GenerateConfig in the signature of a function that takes them as **settings.

    `help` and the completion of notebooks read that signature; calls are not affected.
    """
    signature = inspect.signature(function)
    own = [parameter for parameter in signature.parameters.values() if parameter.kind != parameter.VAR_KEYWORD]
    settings = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in fields(GenerateConfig)
    ]
    function.__signature__ = signature.replace(parameters=own + settings)
    return function


@dataclass(frozen=True)
class Row:
    """One answer to be made: a prompt and its own sampling settings."""

    index: int
    ids: list[int]
    temperature: float
    top_k: int
    top_p: float
    seed: int

    @property
    def length(self) -> int:
        return len(self.ids)


def resolve(
    config: GenerateConfig | None, settings: Settings, verifier: ModelConfig, drafter: DrafterConfig | None
) -> GenerateConfig:
    """`config` with single settings replaced, checked against the loaded pair.

    Raises:
      ValueError: a setting that is unknown, refused by name, or out of range.
    """
    settings = without_method(settings)
    for name in settings:
        _check_name(name)
    config = replace(fit(GenerateConfig | None, config, "config") or GenerateConfig(), **settings)
    if isinstance(config.stop, str):
        config = replace(config, stop=(config.stop,))
    config = checked(config)
    if config.builder is None and drafter is None:
        _refuse_drafting(config)
        config = replace(config, builder="none")
    vocabulary = verifier.vocab_size

    def expect(ok: bool, what: str, got: Any, expected: str) -> None:
        if not ok:
            raise ValueError(f"got {what} {quoted(got)}, expected {expected}")

    known = ("none", *BUILDERS)
    expect(config.builder in (None, *known), "builder", config.builder, f"one of {known}")
    if config.builder != "none":
        expect(drafter is not None, "builder", config.builder, f"'none': {NO_DRAFTER}")
        auto = config.nodes == "auto"
        trained, size = drafter.block_size, config.block_size
        expect(size is None or size <= trained, "block_size", size, f"2 to {trained}, as the drafter was trained")
        for name in ("candidates", "children"):
            value = getattr(config, name)
            expect(value <= vocabulary, name, value, f"1 to {vocabulary} (the vocabulary)")
        listed = config.shortlist
        expect(listed <= vocabulary, "shortlist", listed, f"0 (all tokens) to {vocabulary} (the vocabulary)")
        heads = ("marginal", drafter.head)
        expect(config.head in (None, *heads), "head", config.head, f"one of {heads}, what this drafter has")
        builder, rule, shape = drafting(config)
        expect(rule in RULES, "acceptance", rule, f"one of {tuple(RULES)}")
        expect(builder not in SAMPLED or config.nodes != 1, "nodes", config.nodes, "at least 2 with a sampled tree")
        check_lawful(rule, law_of(builder, shape))
        if auto:  # a budget that looks at drawn nodes would not be lossless; those of a chain are no tree's first
            only = "with nodes 'auto'"
            expect(builder == "best-first", "builder", builder, f"'best-first' {only}")
            expect(rule == "sample-and-match", "acceptance", rule, f"'sample-and-match' {only}")
    known = sorted(IMPLEMENTATIONS)
    expect(config.attention in (None, *known), "attention", config.attention, f"one of {', '.join(known)}")
    for value in config.stop_ids or ():
        expect(value < vocabulary, "stop id", value, f"0 to {vocabulary - 1}")
    return config


def _check_name(name: str) -> None:
    known = [field.name for field in fields(GenerateConfig)]
    if name in REFUSED:
        raise ValueError(f"{name} is not supported: {REFUSED[name]}")
    if name in known:
        return
    meant = name if name in OF_LOAD else suggestion(name, [*known, *OF_LOAD])
    if meant in OF_LOAD:
        raise ValueError(f"got unknown setting {name!r}; {meant} is an argument of tf.load")
    hint = f"; did you mean {meant}?" if meant else f", expected one of {clipped(', '.join(known), 200)}"
    raise ValueError(f"got unknown setting {quoted(name)}{hint}")


def builder_of(config: GenerateConfig, drafter: DrafterConfig | None) -> str:
    """The builder that was asked for; else best-first trees if there is a drafter, one token at a time if not."""
    return config.builder or ("none" if drafter is None else "best-first")


def _refuse_drafting(config: GenerateConfig) -> None:
    """Refuses settings of drafting that were changed from their defaults: without a drafter they would do nothing."""
    defaults = GenerateConfig()
    for name in DRAFTING:
        value = getattr(config, name)
        if value != getattr(defaults, name):
            raise ValueError(f"got {name} {quoted(value)}, expected its default: {NO_DRAFTER}")


def drafting(config: GenerateConfig) -> tuple[str, str, TreeShape]:
    """Builder, acceptance rule and sizes of the sampled part, defaults filled in."""
    builder = config.builder or "best-first"
    shape = TreeShape(branches=config.branches, trunk=config.trunk, skeleton=config.skeleton, leaves=config.leaves)
    usual = {"deterministic": "sample-and-match", "one path": "block"}.get(law_of(builder, shape), "traversal")
    return builder, config.acceptance or usual, shape


def with_builder(config: GenerateConfig, drafter: DrafterConfig | None, temperature: float) -> GenerateConfig:
    """The settings of a row of this temperature: with a sampled tree where none was asked for and one is better."""
    crossover = None if drafter is None else drafter.sampled_above
    is_free = drafter is not None and config.builder is None and config.acceptance is None
    is_free &= config.nodes not in (1, "auto")
    if is_free and crossover is not None and temperature >= crossover and config.head in (None, drafter.head):
        return replace(config, builder="hybrid")
    return config


def draft_temperature(config: GenerateConfig, drafter: DrafterConfig | None, temperature: float) -> float:
    """At what temperature a row's draft is made: as asked for, else by the rule of GenerateConfig."""
    if config.drafter_temperature is not None or drafter is None:
        return config.drafter_temperature or 1.0
    return max(drafter.drafter_temperature, min(temperature, 1.0))


def rows_of(prompts: list[list[int]], config: GenerateConfig, verifier: ModelConfig) -> list[Row]:
    """One row per prompt and sample, prompt by prompt.

    Raises:
      ValueError: no prompts, ids outside the vocabulary, more tokens than the context holds, lists of the wrong length.
    """
    if not prompts:
        raise ValueError("got no prompts, expected at least one")
    vocabulary, context = verifier.vocab_size, verifier.max_positions

    def each(value: Any, name: str) -> list[Any]:
        if not isinstance(value, Sequence | np.ndarray):
            return [value] * len(prompts)
        if len(value) != len(prompts):
            raise ValueError(f"got {len(value)} values of {name} for {len(prompts)} prompts, expected one per prompt")
        return list(value)

    settings = zip(*(each(getattr(config, n), n) for n in ("temperature", "top_k", "top_p", "seed")), strict=True)
    rows = []
    for index, (ids, (temperature, top_k, top_p, seed)) in enumerate(zip(prompts, settings, strict=True)):
        outside = [i for i in ids if not 0 <= i < vocabulary]
        if outside:
            raise ValueError(f"prompt {index}: got id {quoted(outside[0])}, expected 0 to {vocabulary - 1}")
        if len(ids) + config.max_new_tokens > context:
            raise ValueError(
                f"prompt {index}: got {len(ids)} prompt tokens + {config.max_new_tokens} new tokens, "
                f"expected at most {context} together (the verifier's context)"
            )
        temperature = temperature if temperature >= GREEDY_BELOW else 0.0
        for sample in range(config.samples):
            rows.append(Row(index, ids, temperature, top_k, top_p, (seed + sample) % 2**32))
    return rows


def with_indices(rows: list[Row], indices: Sequence[int] | None, num_prompts: int) -> list[Row]:
    """Rows that draw from the given index of their prompt, where there are such.

    Raises:
      ValueError: another number of indices than of prompts, or what is no index.
    """
    if indices is None:
        return rows
    found = fit(Sequence[int], indices, "indices", Bounds(least=0, most=2**32 - 1))
    if len(found) != num_prompts:
        raise ValueError(f"got {len(found)} indices for {num_prompts} prompts, expected one per prompt")
    return [replace(row, index=found[row.index]) for row in rows]


def values(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence | np.ndarray) else [value]
