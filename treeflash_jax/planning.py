"""From what was asked for to what is decoded: settings checked against a pair, the plan of the compiled program, and the
answers to be made. Nothing here reads a weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from treeflash_jax import devices, drafters
from treeflash_jax.acceptance import check_lawful
from treeflash_jax.checks import Bounds, checked, clipped, fit, quoted
from treeflash_jax.decoding.state import DecodePlan
from treeflash_jax.devices import Device
from treeflash_jax.drafters import DrafterSizes
from treeflash_jax.settings import (
    NO_DRAFTER,
    OF_LOAD,
    REFUSED,
    DraftConfig,
    GenerateConfig,
    Settings,
    TreeConfig,
    without_method,
)
from treeflash_jax.suggest import suggestion
from treeflash_jax.trees import BUILDERS, TreeShape
from treeflash_jax.verifiers.config import ModelConfig

GREEDY_BELOW = 1e-5  # smaller temperatures are greedy, as in the published code; logits / T would overflow


def resolve(
    config: GenerateConfig | None, settings: Settings, verifier: ModelConfig, drafter: DrafterSizes | None
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
        _refuse_changed(config, [one.name for one in (*fields(DraftConfig), *fields(TreeConfig))], NO_DRAFTER)
        config = replace(config, builder="none")
    vocabulary = verifier.vocab_size

    def expect(ok: bool, what: str, got: Any, expected: str) -> None:
        if not ok:
            raise ValueError(f"got {what} {quoted(got)}, expected {expected}")

    if config.builder != "none":
        expect(drafter is not None, "builder", config.builder, f"'none': {NO_DRAFTER}")
        auto = config.nodes == "auto"
        own = drafters.of(drafter)
        known = (*own.OPTIONS, "drafter_temperature")
        unknown = [one.name for one in fields(DraftConfig) if one.name not in known]
        _refuse_changed(config, unknown, f"drafters of kind {drafter.kind!r} do not have it")
        own.choose(drafter, config)
        builder, rule, shape = drafting(config)
        expect(not BUILDERS[builder].draws or config.nodes != 1, "nodes", config.nodes, "at least 2 with a sampled tree")
        check_lawful(rule, BUILDERS[builder].law_of(shape))
        if config.selector is not None:
            only = "with a selector, which chooses it"
            expect(config.builder == "delayed", "builder", config.builder, "'delayed' with a selector")
            _refuse_changed(config, ("trunk", "branches"), only)
        if auto:  # a budget that looks at drawn nodes would not be lossless; those of a chain are no tree's first
            only = "with nodes 'auto'"
            expect(builder == "best-first", "builder", builder, f"'best-first' {only}")
            expect(rule == "sample-and-match", "acceptance", rule, f"'sample-and-match' {only}")
            expect(config.lanes is None, "lanes", config.lanes, f"None {only}: a calibration measures whole trees")
        if config.lanes is not None:
            expect(builder == "best-first", "lanes", config.lanes, f"None with builder {builder!r}")
            most = (config.nodes or _usual_nodes(drafter, devices.here())) - 1
            expect(config.lanes <= most, "lanes", config.lanes, f"at most {most}: the nodes below the root")
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


def builder_of(config: GenerateConfig, drafter: DrafterSizes | None) -> str:
    """The builder that was asked for; else best-first trees if there is a drafter, one token at a time if not."""
    return config.builder or ("none" if drafter is None else "best-first")


def why_plain(
    config: GenerateConfig, drafter: DrafterSizes | None, device: Device, dtype: Any, sequences: int = 1
) -> str | None:
    """Why nothing is drafted where no builder was asked for, in words; None where drafting is the default."""
    if drafter is None:
        return NO_DRAFTER
    defaults = GenerateConfig()
    names = [one.name for one in (*fields(DraftConfig), *fields(TreeConfig))]
    is_asked = any(getattr(config, name) != getattr(defaults, name) for name in names)
    # Where n-grams offer nothing, a round is a one-token step.
    if is_asked or drafters.may_offer_nothing(drafter) or device.drafting_pays(dtype, sequences):
        return None
    together = f" for {sequences} sequences at a time" if device.drafting_pays(dtype) else ""
    return f"drafting does not pay on this CPU in {jnp.dtype(dtype).name}{together} (nodes=16 drafts anyway)"


def _usual_nodes(drafter: DrafterSizes, device: Device) -> int:
    """Nodes of a tree by default."""
    # Of a drafter that may offer nothing, trees cost what it offers.
    return drafter.num_nodes if drafters.may_offer_nothing(drafter) else device.tree_nodes(drafter.num_nodes)


def _refuse_changed(config: GenerateConfig, names: Sequence[str], why: str) -> None:
    """Refuses settings that were changed from their defaults although they would do nothing."""
    defaults = GenerateConfig()
    for name in names:
        if getattr(config, name) != getattr(defaults, name):
            raise ValueError(f"got {name} {quoted(getattr(config, name))}, expected its default: {why}")


def drafting(config: GenerateConfig) -> tuple[str, str, TreeShape]:
    """Builder, acceptance rule and sizes of the sampled part, defaults filled in."""
    builder = config.builder or "best-first"
    shape = TreeShape(**{one.name: getattr(config, one.name) for one in fields(TreeShape)})
    law = "deterministic" if builder == "none" else BUILDERS[builder].law_of(shape)
    usual = {"deterministic": "sample-and-match", "one path": "block"}.get(law, "traversal")
    return builder, config.acceptance or usual, shape


def with_builder(config: GenerateConfig, drafter: DrafterSizes | None, temperature: float) -> GenerateConfig:
    """The settings of a row of this temperature: with a sampled tree where none was asked for and one is better."""
    crossover = None if drafter is None else drafter.sampled_above
    is_free = drafter is not None and config.builder is None and config.acceptance is None
    is_free &= config.nodes not in (1, "auto")
    if (
        is_free
        and crossover is not None
        and temperature >= crossover
        and config.head in (None, getattr(drafter, "head", None))
    ):
        return replace(config, builder="hybrid")
    return config


def draft_temperature(config: GenerateConfig, drafter: DrafterSizes | None, temperature: float) -> float:
    """At what temperature a row's draft is made: as asked for, else by the rule of GenerateConfig."""
    if config.drafter_temperature is not None or drafter is None:
        return config.drafter_temperature or 1.0
    return max(drafter.drafter_temperature, min(temperature, 1.0))


def plan_of(
    config: GenerateConfig,
    verifier: ModelConfig,
    drafter: DrafterSizes | None,
    dtype: Any,
    device: devices.Device | None = None,
) -> DecodePlan:
    """What `generate` compiles for these settings.

    Args:
      config: checked settings; `nodes` "auto" counts as None, since its buckets come from a calibration.
      drafter: sizes of the drafter; None decodes one token at a time.
      device: that the program is for; None: the devices at hand.
    """
    device = device or devices.here()
    shared: dict[str, Any] = {
        "verifier": verifier,
        "log_probs": config.log_probs,
        "expected_lengths": config.expected_lengths,
        "attention": config.attention or device.attention(dtype),
        "prefill_attention": config.attention or device.prefill_attention,
        "prefill_chunk": device.prefill_chunk,
    }
    if builder_of(config, drafter) == "none":
        return DecodePlan(builder="none", num_nodes=1, **shared)
    if config.shortlist is None:
        config = replace(config, shortlist=device.shortlist(verifier.vocab_size))
    if config.candidates is None:
        config = replace(config, candidates=device.candidates)
    builder, rule, shape = drafting(config)
    is_chain = BUILDERS[builder].is_chain
    if config.nodes is None and not is_chain:
        config = replace(config, nodes=_usual_nodes(drafter, device))
    sizes, draft = drafters.of(drafter).choose(drafter, config)
    longest = 1 + sizes.num_depths
    nodes = drafter.num_nodes if config.nodes == "auto" else config.nodes or longest
    lanes = sizes.lanes if shape.lanes is None and builder == "best-first" else shape.lanes
    return DecodePlan(
        drafter=sizes,
        num_nodes=min(nodes, longest) if is_chain else nodes,
        draft=draft,
        builder=builder,
        shape=shape if BUILDERS[builder].draws else TreeShape(lanes=lanes),
        rule=rule,
        **shared,
    )


@dataclass(frozen=True)
class Row:
    """One answer to be made: a prompt and its own sampling settings."""

    index: int
    ids: list[int]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    sample: int = 0

    @property
    def length(self) -> int:
        return len(self.ids)


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
            rows.append(Row(index, ids, temperature, top_k, top_p, seed, sample))
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
