"""Checks of settings against a pair, plans of the compiled programs, and requests: one per answer."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import jax.numpy as jnp

from treeflash_jax.acceptance import check_lossless
from treeflash_jax.core import devices
from treeflash_jax.core.checks import expect, fit, quoted
from treeflash_jax.core.devices import Device
from treeflash_jax.core.settings import field_names
from treeflash_jax.decoding.state import DecodePlan
from treeflash_jax.drafters import DrafterConfig
from treeflash_jax.engine.defaults import default_lanes, draft_defaults
from treeflash_jax.engine.generate_config import GenerateConfig
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.trees import BUILDERS, TreeShape
from treeflash_jax.trees.shape import MAX_NODES

DEFAULT_BATCH_SIZE = 8  # largest number of sequences decoded together by default
GREEDY_BELOW = 1e-5  # smaller temperatures are greedy, as in the published code; logits / T would overflow
NO_DRAFTER = "no drafter is loaded"
DRAFTING = field_names(GenerateConfig, "drafting", "tree")


def resolve(
    config: GenerateConfig | None, settings: dict[str, Any], verifier: ModelConfig, drafter: DrafterConfig | None
) -> GenerateConfig:
    """Replaces `settings` in `config` and checks all against the pair. Raises ValueError for a wrong setting."""
    expect(isinstance(config, GenerateConfig | None), "config", config, "a GenerateConfig; settings are given by name")
    config = (config or GenerateConfig()).updated(**settings)
    if config.builder is None and drafter is None:
        _refuse_changed(config, DRAFTING, NO_DRAFTER)
        config = replace(config, builder="none")

    if config.builder != "none":
        expect(drafter is not None, "builder", config.builder, f"'none': {NO_DRAFTER}")
        others = [name for name in field_names(GenerateConfig, "drafting") if name not in drafter.settings]
        _refuse_changed(config, others, f"drafters of kind {drafter.kind!r} do not have it")
        draft = configured(drafter, config, verifier.vocab_size, devices.here())
        builder, rule, shape = choose_tree(config)
        reads = BUILDERS[builder].reads
        if config.builder is None and draft.sampled_above is not None:
            reads |= BUILDERS["hybrid"].reads  # by `choose_builder`
        _refuse_changed(
            config, [x.name for x in fields(TreeShape) if x.name not in reads], f"builder {builder!r} ignores it"
        )
        expect(not BUILDERS[builder].draws or config.nodes != 1, "nodes", config.nodes, "at least 2 with a sampled tree")
        check_lossless(rule, BUILDERS[builder].distribution_for(shape))
        if config.lanes is not None:
            most = (config.nodes or _default_nodes(drafter, devices.here())) - 1
            expect(config.lanes <= most, "lanes", config.lanes, f"at most {most}: the nodes below the root")
    for value in config.stop_ids or ():
        expect(value < verifier.vocab_size, "stop id", value, f"0 to {verifier.vocab_size - 1}")
    return config


def explain_plain(
    config: GenerateConfig, drafter: DrafterConfig | None, device: Device, dtype: Any, sequences: int = 1
) -> str | None:
    """Returns the reason why the default builder drafts nothing; None if it drafts. `sequences` is per data shard."""
    if drafter is None:
        return NO_DRAFTER
    is_requested = any(_is_changed(config, name) for name in DRAFTING)
    # With a drafter that may offer nothing (n-grams), a CPU's round without a draft is a one-token step.
    is_free, tau = device.is_cpu and drafter.may_offer_nothing, drafter.tau
    if is_requested or is_free or device.drafting_pays(dtype, sequences, tau):
        return None
    where = f"this CPU in {jnp.dtype(dtype).name}" if device.is_cpu else device.kind
    together = f" for {sequences} sequences at a time" if device.drafting_pays(dtype, tau=tau) else ""
    return f"drafting does not pay on {where}{together} (nodes=8 drafts anyway)"


def _default_nodes(drafter: DrafterConfig, device: Device) -> int:
    # A drafter that may offer nothing fills only the nodes it has tokens for, so larger trees cost no more.
    return drafter.num_nodes if drafter.may_offer_nothing else device.tree_nodes(drafter.num_nodes)


def fit_nodes(config: GenerateConfig, drafter: DrafterConfig | None, device: Device, sequences: int) -> GenerateConfig:
    """Lowers the default number of nodes to the device's ridge, so that drafting is not slower than one-token decoding.

    At least 2 nodes remain, and more than the requested lanes: `explain_plain` decides whether to draft at all.

    Args:
      sequences: number of sequences decoded together, on a mesh per index of its data axis.
    """
    if drafter is None or config.builder == "none" or config.nodes is not None:
        return config
    is_chain = BUILDERS[config.builder or "best-first"].is_chain
    usual = MAX_NODES if is_chain else drafter.num_nodes  # the plan cuts a chain to the drafter's block
    nodes = device.nodes_within_ridge(usual, sequences)
    return config if nodes == usual else replace(config, nodes=max(nodes, (config.lanes or 1) + 1))


def _is_changed(config: GenerateConfig, name: str) -> bool:
    return getattr(config, name) != getattr(GenerateConfig, name)


def _refuse_changed(config: GenerateConfig, settings: Sequence[str], why: str) -> None:
    for name in settings:
        expect(not _is_changed(config, name), name, getattr(config, name), f"its default: {why}")


def choose_tree(config: GenerateConfig) -> tuple[str, str, TreeShape]:
    """Returns builder, acceptance rule and tree shape, with defaults filled in."""
    builder = config.builder or "best-first"
    shape = TreeShape(**{field.name: getattr(config, field.name) for field in fields(TreeShape)})
    distribution = "deterministic" if builder == "none" else BUILDERS[builder].distribution_for(shape)
    default_rule = {"deterministic": "sample-and-match", "one path": "block"}.get(distribution, "traversal")
    return builder, config.acceptance or default_rule, shape


def configured(drafter: DrafterConfig, config: GenerateConfig, vocab_size: int, device: Device) -> DrafterConfig:
    """Returns the drafter with the settings of a call. Raises ValueError for settings that it does not support."""
    builder = BUILDERS[config.builder or "best-first"]
    why = "0 with builder 'chain'; use 'walk', whose tokens follow the path"
    expect(config.builder != "chain" or not config.ngrams, "ngrams", config.ngrams, why)
    settings = draft_defaults(drafter, vocab_size, builder, config.nodes is not None, device)
    return drafter.configured(**settings | given_settings(drafter, config))


def given_settings(drafter: DrafterConfig, config: GenerateConfig) -> dict[str, Any]:
    """Returns the settings of a call that the drafter takes, without those left to their defaults."""
    settings = {name: getattr(config, name) for name in drafter.settings}
    return {name: value for name, value in settings.items() if value is not None}


def choose_builder(config: GenerateConfig, drafter: DrafterConfig | None, temperature: float) -> str | None:
    """Returns the requested builder, or "hybrid" if none is requested and sampled trees are better at this temperature."""
    if drafter is None or config.builder is not None or config.acceptance is not None or config.nodes == 1:
        return config.builder
    if config.lanes is not None:  # of best-first trees
        return None
    sampled_above = drafter.configured(**given_settings(drafter, config)).sampled_above
    return None if sampled_above is None or temperature < sampled_above else "hybrid"


def draft_temperature(config: GenerateConfig, drafter: DrafterConfig | None, temperature: float) -> float:
    """Returns the temperature of the draft for a sampling temperature: the requested one, or the default."""
    if config.drafter_temperature is not None or drafter is None:
        return config.drafter_temperature or 1.0
    return max(drafter.drafter_temperature, min(temperature, 1.0))


def make_plan(
    config: GenerateConfig, verifier: ModelConfig, drafter: DrafterConfig | None, dtype: Any, device: Device | None = None
) -> DecodePlan:
    """Makes the plan of the programs that `generate` compiles for checked settings."""
    device = (device or devices.here()).in_dtype(dtype)
    head_dims = {layers.head_dim for layers in (verifier, getattr(drafter, "layers", verifier))}
    shared: dict[str, Any] = {
        "verifier": verifier,
        "log_probs": config.log_probs,
        "expected_lengths": config.expected_lengths,
        "attention": device.attention(dtype, config.attention, head_dims),
        "prefill_attention": config.attention or device.prefill_attention,
        "prefill_chunk": device.prefill_chunk,
        "residual_dtype": device.residual_dtype(dtype),
    }
    if drafter is None or config.builder == "none":
        return DecodePlan(builder="none", num_nodes=1, **shared)
    builder, rule, shape = choose_tree(config)
    is_chain = BUILDERS[builder].is_chain
    draft = configured(drafter, config, verifier.vocab_size, device)
    longest = 1 + draft.num_depths
    usual = longest if is_chain else _default_nodes(drafter, device)
    nodes = config.nodes or usual
    lanes = shape.lanes
    if lanes is None and builder == "best-first":
        lanes = default_lanes(drafter, config.nodes is not None, device)
    return DecodePlan(
        drafter=drafter,
        num_nodes=BUILDERS[builder].size(draft.num_depths, nodes, shape),
        draft=draft,
        builder=builder,
        shape=shape if BUILDERS[builder].draws else TreeShape(lanes=lanes),
        rule=rule,
        **shared,
    )


@dataclass(frozen=True)
class Request:
    """A prompt and the sampling settings of one answer.

    Attributes:
      index: index of the prompt in its call; part of the random key.
      sample: index of the answer among those to the same prompt.
      number: index of the answer in its call.
    """

    index: int
    ids: list[int]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    sample: int = 0
    number: int = 0

    @property
    def length(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Call:
    """A validated `generate` call.

    Attributes:
      requests: one per prompt and sample.
      batch_size: number of sequences decoded together.
    """

    requests: list[Request]
    config: GenerateConfig
    batch_size: int

    def by_builder(self, drafter: DrafterConfig | None) -> list[Self]:
        """Splits the call by the builder of the trees, which may depend on a request's temperature."""
        members: dict[str | None, list[Request]] = {}
        for request in self.requests:
            members.setdefault(choose_builder(self.config, drafter, request.temperature), []).append(request)
        return [
            type(self)(part, replace(self.config, builder=name), default_batch_size(self.config, len(part)))
            for name, part in members.items()
        ]


def default_batch_size(config: GenerateConfig, num_requests: int) -> int:
    return config.batch_size or min(DEFAULT_BATCH_SIZE, num_requests)


def make_requests(
    prompts: list[list[int]], config: GenerateConfig, verifier: ModelConfig, indices: Sequence[int] | None = None
) -> list[Request]:
    """Makes one request per prompt and sample, prompt by prompt.

    Random keys of prompts contain their `indices`; None counts from 0. Raises ValueError for no prompts, ids outside the
    vocabulary, more tokens than the context, lists of the wrong length.
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
    settings = zip(*(each(f"values of {name}", getattr(config, name)) for name in names), strict=True)
    requests = []
    for number, (ids, (temperature, top_k, top_p, seed)) in enumerate(zip(prompts, settings, strict=True)):
        outside = [i for i in ids if not 0 <= i < vocabulary]
        if outside:
            raise ValueError(f"prompt {number}: got id {quoted(outside[0])}, expected 0 to {vocabulary - 1}")
        if len(ids) + config.max_new_tokens > context:
            raise ValueError(
                f"prompt {number}: got {len(ids)} prompt tokens + {config.max_new_tokens} new tokens, "
                f"expected at most {context} together (the verifier's context)"
            )
        temperature = temperature if temperature >= GREEDY_BELOW else 0.0
        shared = indices[number], ids, temperature, top_k, top_p, seed
        requests += [Request(*shared, sample, len(requests) + sample) for sample in range(config.samples)]
    return requests
