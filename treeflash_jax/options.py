"""What a caller may ask for, checked before any compute: settings of a call, and the rows they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from treeflash_jax.acceptance import RULES, check_lawful
from treeflash_jax.attention import IMPLEMENTATIONS
from treeflash_jax.builders import SAMPLED, TreeShape, law_of
from treeflash_jax.config import DrafterConfig, HeadName, ModelConfig
from treeflash_jax.state import BUILDER_OF_METHOD, Method

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
DRAFTING = "nodes block_size candidates children shortlist head builder acceptance".split()
DRAFTING += "branches trunk skeleton leaves drafter_temperature".split()
NO_DRAFTER = "no drafter is loaded"


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Settings of one call.

    Example:
      >>> model.generate(prompts, GenerateConfig(temperature=0.7, top_p=0.9), max_new_tokens=256)

    Attributes:
      max_new_tokens: at most so many generated tokens, the stop token included.
      method: "tree", "walk" (greedy chain), "chain" (the published rank-0 chain), "ar" (one token at a time). None: "tree"
        with a drafter, "ar" without one.
      nodes: verified rows a round, root included; if None, the drafter's default for a tree, the whole block for a chain.
        "auto": every round takes what pays best by `treeflash calibrate`, and drafting pauses where none does; best-first
        trees and sample-and-match alone.
      block_size: drafted block, anchor included; None: the drafter's. A shorter one is faster; on the demo's prompts trees
        of 8 rows lose nothing by blocks of 8 in place of 16.
      candidates: previous tokens per depth (M).
      children: children kept per transition row (K).
      shortlist: the second stage of a conditional head scores so many tokens per depth, those of all depths together,
        instead of the vocabulary; 0 scores all of it.
      head: "mlp", "linear" or "marginal"; the drafter's own if None.
      builder: of a tree: "best-first", or one whose nodes are drawn at random: "paths", "delayed",
        "without-replacement", "hybrid". None: "best-first", but "hybrid" for rows at whose temperature that was measured to
        be better for this drafter (`DrafterConfig.sampled_above`), unless `acceptance` is given.
      acceptance: what is kept of a tree; None: "sample-and-match" for best-first trees, "block" for one sampled path,
        "traversal" for other sampled trees. All keep the verifier's distribution; sample-and-match even gives the answer
        of one-token decoding with the same seed.
      branches: sampled paths, or sampled children per node at most.
      trunk: nodes before the branches ("delayed").
      skeleton: share of the nodes that are not sampled ("hybrid").
      leaves: also draw tokens that end their branch ("paths", "delayed", "without-replacement", "hybrid").
      temperature: of the verifier; 0 is greedy. One value, or one per prompt.
      top_k: keep the k likeliest tokens; 0 keeps all. One value, or one per prompt.
      top_p: keep the likeliest tokens of this mass; 1 keeps all. One value, or one per prompt.
      drafter_temperature: sharpens or flattens the draft, never the output. None: the drafter's default, or the row's
        temperature where that is higher (up to 1): a draft is best about as sharp as what it has to match.
      seed: one value, or one per prompt. Prompt i draws from fold_in(seed, i).
      samples: answers per prompt; sample j is what seed + j gives.
      stop_ids: ids that end an answer; None: the model's own.
      stop: strings that end an answer; the text ends before them.
      batch_size: rows decoded together; None: all, 8 at most.
      attention: implementation; None: as measured for the backend. "xla" reads whole caches, "streamed", "pallas-gpu" and
        "pallas-tpu" what is filled of them: for contexts past 4k. The kernels were never timed on an accelerator.
      log_probs: keep the verifier's log-probability of every token.
      expected_lengths: keep what every round was expected to commit, its coins averaged out.
    """

    max_new_tokens: int = 128
    method: Method | None = None
    nodes: int | Literal["auto"] | None = None
    block_size: int | None = None
    candidates: int = 16
    children: int = 16
    shortlist: int = 0
    head: HeadName | None = None
    builder: str | None = None
    acceptance: str | None = None
    branches: int = TreeShape.branches
    trunk: int = TreeShape.trunk
    skeleton: float = TreeShape.skeleton
    leaves: bool = TreeShape.leaves
    temperature: float | Sequence[float] = 0.0
    top_k: int | Sequence[int] = 0
    top_p: float | Sequence[float] = 1.0
    drafter_temperature: float | None = None
    seed: int | Sequence[int] = 0
    samples: int = 1
    stop_ids: Sequence[int] | None = None
    stop: Sequence[str] = ()
    batch_size: int | None = None
    attention: str | None = None
    log_probs: bool = False
    expected_lengths: bool = False


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
    config: GenerateConfig | None, settings: dict[str, Any], verifier: ModelConfig, drafter: DrafterConfig | None
) -> GenerateConfig:
    """`config` with single settings replaced, checked against the loaded pair.

    Raises:
      ValueError: a setting that is unknown, refused by name, or out of range.
    """
    known = [field.name for field in fields(GenerateConfig)]
    for name in settings:
        if name in REFUSED:
            raise ValueError(f"{name} is not supported: {REFUSED[name]}")
        if name not in known:
            raise ValueError(f"got unknown setting {name!r}, expected one of {', '.join(known)}")
    config = replace(config or GenerateConfig(), **settings)
    if config.method is None and drafter is None:
        _refuse_drafting(config)
    config = replace(config, method=method_of(config, drafter))
    if isinstance(config.stop, str):
        config = replace(config, stop=(config.stop,))
    vocabulary = verifier.vocab_size

    def expect(ok: bool, what: str, got: Any, expected: str) -> None:
        if not ok:
            raise ValueError(f"got {what} {got}, expected {expected}")

    expect(config.max_new_tokens >= 1, "max_new_tokens", config.max_new_tokens, "at least 1")
    methods = ("ar", *BUILDER_OF_METHOD)
    expect(config.method in methods, "method", repr(config.method), f"one of {methods}")
    if config.method != "ar":
        expect(drafter is not None, "method", repr(config.method), f"'ar': {NO_DRAFTER}")
        auto = config.nodes == "auto"
        is_count = config.nodes is None or (isinstance(config.nodes, int) and config.nodes >= 1)
        expect(auto or is_count, "nodes", repr(config.nodes), "at least 1 (the root counts), or 'auto'")
        trained, size = drafter.block_size, config.block_size
        expect(size is None or 2 <= size <= trained, "block_size", size, f"2 to {trained}, as the drafter was trained")
        for name in ("candidates", "children"):
            value = getattr(config, name)
            expect(1 <= value <= vocabulary, name, value, f"1 to {vocabulary} (the vocabulary)")
        listed = config.shortlist
        expect(0 <= listed <= vocabulary, "shortlist", listed, f"0 (all tokens) to {vocabulary} (the vocabulary)")
        heads = ("marginal", drafter.head)
        expect(config.head in (None, *heads), "head", repr(config.head), f"one of {heads}, what this drafter has")
        known_builders = ("best-first", *SAMPLED) if config.method == "tree" else (BUILDER_OF_METHOD[config.method],)
        builder, rule, shape = drafting(config)
        expect(builder in known_builders, "builder", repr(builder), f"one of {known_builders} (method {config.method!r})")
        expect(rule in RULES, "acceptance", repr(rule), f"one of {tuple(RULES)}")
        expect(shape.branches >= 1, "branches", shape.branches, "at least 1")
        expect(shape.trunk >= 0, "trunk", shape.trunk, "0 or more")
        expect(0 <= shape.skeleton <= 1, "skeleton", shape.skeleton, "0 to 1, a share of the nodes")
        expect(builder not in SAMPLED or config.nodes != 1, "nodes", config.nodes, "at least 2 with a sampled tree")
        check_lawful(rule, law_of(builder, shape))
        if auto:  # a budget that looks at drawn nodes would not be lossless; those of a chain are no tree's first
            only = "with nodes 'auto'"
            expect(builder == "best-first", "builder", repr(builder), f"'best-first' {only}")
            expect(rule == "sample-and-match", "acceptance", repr(rule), f"'sample-and-match' {only}")
        t = config.drafter_temperature
        expect(t is None or t > 0, "drafter_temperature", t, "above 0")
    expect(config.samples >= 1, "samples", config.samples, "at least 1")
    expect(config.batch_size is None or config.batch_size >= 1, "batch_size", config.batch_size, "at least 1")
    known = sorted(IMPLEMENTATIONS)
    expect(config.attention in (None, *known), "attention", repr(config.attention), f"one of {', '.join(known)}")
    for value in values(config.temperature):
        expect(value >= 0 and np.isfinite(value), "temperature", value, "0 (greedy) or more")
    for value in values(config.top_k):
        expect(value >= 0, "top_k", value, "0 (all tokens) or more")
    for value in values(config.top_p):
        expect(0 < value <= 1, "top_p", value, "above 0 and at most 1")
    for value in values(config.seed):
        expect(0 <= value < 2**32, "seed", value, "0 to 2**32 - 1")
    for value in config.stop_ids or ():
        expect(0 <= value < vocabulary, "stop id", value, f"0 to {vocabulary - 1}")
    expect(all(config.stop), "stop", list(config.stop), "strings that are not empty")
    return config


def method_of(config: GenerateConfig, drafter: DrafterConfig | None) -> Method:
    """What is decoded by: the method that was asked for; else trees if there is a drafter, one token at a time if not."""
    return config.method or ("ar" if drafter is None else "tree")


def _refuse_drafting(config: GenerateConfig) -> None:
    """Refuses settings of drafting that were changed from their defaults: without a drafter they would do nothing."""
    defaults = GenerateConfig()
    for name in DRAFTING:
        value = getattr(config, name)
        if value != getattr(defaults, name):
            raise ValueError(f"got {name} {value!r}, expected its default: {NO_DRAFTER}")


def drafting(config: GenerateConfig) -> tuple[str, str, TreeShape]:
    """Builder, acceptance rule and sizes of the sampled part, defaults filled in."""
    builder = config.builder or BUILDER_OF_METHOD[config.method or "tree"]
    shape = TreeShape(branches=config.branches, trunk=config.trunk, skeleton=config.skeleton, leaves=config.leaves)
    usual = {"deterministic": "sample-and-match", "one path": "block"}.get(law_of(builder, shape), "traversal")
    return builder, config.acceptance or usual, shape


def with_builder(config: GenerateConfig, drafter: DrafterConfig | None, temperature: float) -> GenerateConfig:
    """The settings of a row of this temperature: with a sampled tree where none was asked for and one is better."""
    crossover = None if drafter is None else drafter.sampled_above
    is_free = method_of(config, drafter) == "tree" and config.builder is None and config.acceptance is None
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
            raise ValueError(f"prompt {index}: got id {outside[0]}, expected 0 to {vocabulary - 1}")
        if len(ids) + config.max_new_tokens > context:
            raise ValueError(
                f"prompt {index}: got {len(ids)} prompt tokens + {config.max_new_tokens} new tokens, "
                f"expected at most {context} together (the verifier's context)"
            )
        temperature = temperature if temperature >= GREEDY_BELOW else 0.0
        for sample in range(config.samples):
            rows.append(Row(index, ids, temperature, top_k, top_p, (seed + sample) % 2**32))
    return rows


def values(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence | np.ndarray) else [value]
