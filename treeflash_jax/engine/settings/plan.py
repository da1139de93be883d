"""Plans of the compiled programs from the settings of a call, a pair and a device.

Compiled code sees only the plan.
"""

import hashlib
from dataclasses import fields, replace

import jax.numpy as jnp
from jax.typing import DTypeLike

from treeflash_jax.acceptance import check_lossless, default_rule
from treeflash_jax.core.checks import expect
from treeflash_jax.core.devices import Device
from treeflash_jax.core.error_text import quoted
from treeflash_jax.core.settings import changed, field_names
from treeflash_jax.decoding.state import DecodePlan, SharedPlan
from treeflash_jax.drafters import Drafter
from treeflash_jax.engine.settings import defaults
from treeflash_jax.engine.settings.generate_config import GenerateConfig
from treeflash_jax.formats import tree_selector_folder
from treeflash_jax.models import kernels
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.trees import BUILDERS, Builder, TreeShape
from treeflash_jax.trees.sampled.tree_selector import TreeSelectorConfig
from treeflash_jax.trees.tree_inputs import MAX_NODES

NO_DRAFTER_ADVICE = (
    "no drafter is loaded; try drafter 'ngram' (--drafter ngram), a published drafter (README.md lists them), or train one "
    "(python -m train.pair)"
)
DRAFTING = field_names(GenerateConfig, "drafting")  # settings of drafters; each kind takes some of them


def resolve(
    config: GenerateConfig,
    verifier: ModelConfig,
    drafter: Drafter | None,
    *,
    dtype: DTypeLike,
    device: Device,
    sequences: int = 1,
) -> DecodePlan:
    """Returns the plan of the programs that a call runs.

    Args:
      config: checked settings.
      drafter: the drafter that is loaded; None decodes one token at a time.
      dtype: dtype of weights and caches.
      device: device that runs the programs; it need not be present.
      sequences: number of sequences decoded together; on a mesh, by each data-parallel group (`sharding.per_shard`).

    Reads no file but a tree selector's config. Raises ValueError for a setting that the pair, the builder or the device
    does not support.
    """
    head_dims = verifier.head_dims + (drafter.head_dims if drafter else ())
    kernels.check_device("attention", config.attention, device)
    kernels.check_device("kernels", config.kernels, device)
    attention = config.attention or defaults.choose_attention(device, dtype, head_dims)
    table = defaults.find_defaults(device, dtype)
    shared = SharedPlan(
        verifier=verifier,
        prefill_attention=config.attention or table.prefill_attention,
        prefill_chunk=defaults.choose_prefill_chunk(device),
        prefill_passes=table.prefill_passes,
        kernels=config.kernels,
        stacks_cache=attention in kernels.KERNELS["attention"],
        residual_dtype=defaults.choose_residual_dtype(device, dtype),
        log_probs=config.wants_log_probs,
        top_log_probs=config.top_log_probs,
        expected_lengths=config.expected_lengths,
    )
    plan = DecodePlan(shared=shared, attention=attention)
    if config.builder == "none":
        return plan
    if reason := _why_plain(config, drafter, dtype, device, sequences):
        return replace(plan, why_plain=reason)
    name = config.builder or "best-first"
    builder = BUILDERS[name]
    _check_settings(config, drafter, name, builder)
    shape, rule, requested = _choose_tree(config, verifier, drafter, builder)
    # The most nodes: as requested; otherwise as many as the device verifies fast, but at least a child and the lanes.
    usual = MAX_NODES if builder.is_chain else defaults.choose_nodes(drafter, table)  # `size` cuts a chain
    limit = requested or max(2, defaults.limit_nodes(device, usual, sequences), 1 + (config.lanes or 0))
    expect((config.lanes or 0) < limit, "lanes", config.lanes, f"at most {limit - 1}: the nodes below the root")
    if "lanes" in builder.reads and config.lanes is None:
        shape = replace(shape, lanes=defaults.choose_lanes(drafter, limit, table))
    values = {setting: getattr(config, setting) for setting in drafter.settings}
    by_call = {setting: value for setting, value in values.items() if value is not None}
    by_device = defaults.draft_settings(drafter, verifier.vocab_size, builder, limit, table)
    configured = drafter.configured(**by_device | by_call)
    num_nodes = builder.size(configured.num_depths, limit, shape)
    shared = replace(shared, loaded_drafter=drafter)
    return replace(
        plan, shared=shared, configured_drafter=configured, builder=name, num_nodes=num_nodes, shape=shape, rule=rule
    )


def _why_plain(
    config: GenerateConfig, drafter: Drafter | None, dtype: DTypeLike, device: Device, sequences: int
) -> str | None:
    """Returns the reason why a call drafts nothing although its builder is not "none"; None if it drafts.

    Raises ValueError if the call has settings of drafting and there is no drafter.
    """
    requested = [name for name in (*field_names(GenerateConfig, "tree"), *DRAFTING) if name in changed(config)]
    if drafter is None:
        _refuse(config, requested, NO_DRAFTER_ADVICE)
        return NO_DRAFTER_ADVICE
    # With a drafter that may offer nothing (n-grams), a CPU's round without a draft is a one-token step.
    costs_nothing = device.is_cpu and drafter.may_offer_nothing
    if requested or costs_nothing or defaults.drafting_pays(device, dtype, drafter.tau, sequences):
        return None
    where = f"this CPU in {jnp.dtype(dtype).name}" if device.is_cpu else device.kind
    together = f" for {sequences} sequences at a time" if defaults.drafting_pays(device, dtype, drafter.tau) else ""
    return f"drafting does not pay on {where}{together}; nodes=8 (--nodes 8) drafts anyway"


def _check_settings(config: GenerateConfig, drafter: Drafter, name: str, builder: Builder) -> None:
    """Raises ValueError for settings that the drafter or the builder would ignore."""
    unsupported = [setting for setting in DRAFTING if setting not in drafter.settings]
    _refuse(config, unsupported, f"drafters of kind {drafter.kind!r} have no such setting; leave it out")
    for setting in (field.name for field in fields(TreeShape) if field.name not in builder.reads):
        readers = " or ".join(repr(other) for other in BUILDERS if setting in BUILDERS[other].reads)
        _refuse(config, [setting], f"builder {name!r} does not use it; leave it out, or use builder {readers}")
    expect(not builder.draws or config.nodes != 1, "nodes", config.nodes, "at least 2 with a sampled tree")
    why = f"0 with builder {name!r}; use 'walk', whose tokens follow the path"
    expect(builder.takes_ngrams or not config.ngrams, "ngrams", config.ngrams, why)


def _choose_tree(
    config: GenerateConfig, verifier: ModelConfig, drafter: Drafter, builder: Builder
) -> tuple[TreeShape, str, int | None]:
    """Returns the shape of the tree, the acceptance rule, and the number of nodes; None: the default number.

    Raises ValueError for a rule that would not be lossless, or a tree selector that does not fit the call.
    """
    sizes = {field.name: getattr(config, field.name) for field in fields(TreeShape) if field.name != "selector"}
    selector = None if config.selector is None else _read_tree_selector(config, digest_pair(verifier, drafter))
    shape = TreeShape(**sizes, selector=selector)
    distribution = builder.distribution_for(shape)
    if selector is None:
        rule = config.acceptance or default_rule(distribution)
        nodes = config.nodes
    else:
        rule, nodes = selector.rule, selector.num_nodes
    check_lossless(rule, distribution)
    return shape, rule, nodes


def digest_pair(verifier: ModelConfig, drafter: Drafter) -> str:
    """Returns a digest of a pair's configs, by which a tree selector states the pair that it was trained for."""
    return hashlib.sha256(repr((verifier, drafter)).encode()).hexdigest()[:16]


def _read_tree_selector(config: GenerateConfig, pair: str) -> TreeSelectorConfig:
    """Reads the config of a call's tree selector.

    Raises ValueError if it was trained for another pair or rule, or if the call gives settings that the selector chooses.
    """
    _refuse(config, ["trunk", "branches"], "the selector chooses it; leave it out")
    selector = tree_selector_folder.read_config(config.selector)
    trained = "one that python -m train.selector trained for this verifier and drafter, with this version of the library"
    expect(selector.pair == pair, "selector", config.selector, trained)
    for name, value in {"acceptance": selector.rule, "nodes": selector.num_nodes}.items():
        expect(getattr(config, name) in (None, value), name, getattr(config, name), f"{quoted(value)}, the selector's")
    return selector


def _refuse(config: GenerateConfig, names: list[str], why: str) -> None:
    """Raises ValueError for the first of these settings that is given."""
    for name in names:
        if name in changed(config):
            raise ValueError(f"got {name} {quoted(getattr(config, name))}, but {why}")
