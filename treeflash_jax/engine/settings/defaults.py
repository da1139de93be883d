"""Defaults that depend on the device or the drafter: a table per kind of device, and rules that a table cannot hold.

Other defaults are constants of `GenerateConfig` or of a drafter. Defaults of drafting depend on the number of nodes, given
or default. Measurements of CPUs: notebooks/results/latency_smollm2.md#defaults-of-cpus.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from treeflash_jax.core.devices import BFLOAT16_INSTRUCTIONS, MATRIX_INSTRUCTIONS, Device
from treeflash_jax.drafters import Drafter
from treeflash_jax.models.kernels import HOPPER
from treeflash_jax.models.quantized import SCALE_BLOCK
from treeflash_jax.trees import Builder

# Smallest tau at which trees of 8 nodes beat one-token decoding of SmolLM2, on the worst of four prompt sets (tau /
# speedup). Keys: the instructions that compute matrix products, then the number of sequences decoded together.
BREAK_EVEN_TAU = {"bfloat16": {1: 1.75, 2: 2.2, 4: 3.3}, "float32": {1: 2.15, 2: 2.2, 4: 3.2}}
USUAL_TAU = 2.0  # assumed if a drafter states none
LARGE_VOCABULARY = 2**14  # least size for which heads score a shortlist


@dataclass(frozen=True, kw_only=True)
class DeviceDefaults:
    """Defaults of one kind of device. None: the drafter's default, or no limit.

    Attributes:
      slots: number of answers that a server decodes together. Rounds compute all slots, held or not.
      prefill_attention: attention implementation of prefill, which reads only the filled part of a cache.
      prefill_chunk: number of prompt tokens per prefill pass; None: about the ridge of the device, or 128.
      prefill_passes: number of prefill passes per dispatch; Ctrl-C waits for the end of a dispatch.
      ngrams: number of matches of n-grams that join a tree.
      shortlist: number of tokens per depth that a head scores if the vocabulary is large.
      nodes: largest default number of tree nodes; a block is then no longer than the tree.
      fewest_nodes: smallest default number of tree nodes for one sequence.
      tokens: most default nodes of all trees of a batch; None: the ridge of the device.
      candidates: most likely tokens per depth of a block drafter.
      depths, lanes: sizes of trees of up to `nodes` nodes, for drafters whose network runs once per level.
    """

    slots: int
    prefill_attention: str
    prefill_chunk: int | None
    prefill_passes: int
    ngrams: int | None
    shortlist: int | None
    nodes: int | None
    fewest_nodes: int = 1
    tokens: int | None = None
    candidates: int | None
    depths: int | None
    lanes: int | None


# CPUs without matrix instructions for products: every further token makes a pass longer.
PLAIN_CPU = DeviceDefaults(
    slots=1,  # with more, a single client waits for empty slots: notebooks/results/serve_smollm2.md
    prefill_attention="streamed",
    prefill_chunk=64,  # with 128, long prompts are faster and short ones slower
    prefill_passes=1,  # a pass takes long, and Ctrl-C waits for its end
    ngrams=8,
    shortlist=32,  # the whole vocabulary takes several times as long, at equal tau
    nodes=8,  # faster than 5 for most prompts: notebooks/results/README.md#speed-of-smollm2-on-a-cpu
    candidates=8,  # more are slower, at equal tau
    depths=4,  # with two lanes faster than the drafters' usual trees: notebooks/results/drafters_smollm2.md#number-of-nodes
    lanes=2,
)
MATRIX_CPU = replace(PLAIN_CPU, slots=8, nodes=None, candidates=None, depths=None, lanes=None)
ACCELERATOR = DeviceDefaults(
    slots=8,
    # A chunk's logits over all of a long cache would take gigabytes; a short one is read as by "xla".
    prefill_attention="blocked",
    prefill_chunk=None,
    prefill_passes=16,
    ngrams=None,  # never timed
    shortlist=None,  # the vocabulary table is read once for all contexts of a head's second stage
    nodes=None,
    candidates=None,
    depths=None,
    lanes=None,
)
# By the compiler's estimate, never measured: notebooks/results/tpu_estimates.md#number-of-nodes.
TPU = replace(ACCELERATOR, fewest_nodes=64, tokens=128)


def find_defaults(device: Device, dtype: DTypeLike = jnp.bfloat16) -> DeviceDefaults:
    """Returns the table of a device that computes with weights of `dtype`."""
    if not device.is_cpu:
        return TPU if device.backend == "tpu" else ACCELERATOR
    return PLAIN_CPU if pays_per_token(device, dtype) else MATRIX_CPU


def choose_dtype(device: Device) -> jnp.dtype:
    """Returns the dtype of weights, caches and activations: bfloat16 if the device computes with it.

    Without such instructions, XLA would convert every weight to float32 in every product.
    """
    has_bfloat16 = not device.is_cpu or device.features & BFLOAT16_INSTRUCTIONS
    return jnp.dtype(jnp.bfloat16 if has_bfloat16 else jnp.float32)


def pays_per_token(device: Device, dtype: DTypeLike) -> bool:
    """Returns whether every further token makes a pass longer. It does on CPUs without matrix instructions."""
    return device.is_cpu and not (device.features & MATRIX_INSTRUCTIONS and jnp.dtype(dtype) == jnp.bfloat16)


def drafting_pays(device: Device, dtype: DTypeLike, tau: float | None = None, sequences: int = 1) -> bool:
    """Returns whether drafting a small tree is expected to be faster than one-token decoding.

    On an accelerator, drafting is expected to pay if a tree of two nodes is within the device's limit
    (`limit_nodes`). On a CPU on which every token costs time, tau must exceed the number in BREAK_EVEN_TAU for
    `sequences`, rounded up to a number in that table. With more sequences than the table has, drafting never pays.

    Args:
      tau: mean number of tokens that a round adds (`Drafter.tau`); None: USUAL_TAU.
      sequences: number of sequences decoded together; on a mesh, by each data-parallel group (`sharding.per_shard`).
    """
    if not pays_per_token(device, dtype):
        return limit_nodes(device, 2, sequences) == 2
    is_bfloat16 = jnp.dtype(dtype) == jnp.bfloat16 and device.features & BFLOAT16_INSTRUCTIONS
    needed = BREAK_EVEN_TAU["bfloat16" if is_bfloat16 else "float32"]
    return (tau or USUAL_TAU) > min((least for count, least in needed.items() if count >= sequences), default=math.inf)


def limit_nodes(device: Device, usual: int, sequences: int) -> int:
    """Returns the usual number of tree nodes, or fewer if nodes x sequences would exceed a limit; 0 if none fits.

    The limit is the ridge of the device unless its table has another. Up to the ridge, a verify pass is limited by reading
    all weights, like a pass over one token. A round also drafts, and takes longer than a one-token step: "Time of a round"
    in notebooks/results/README.md.
    """
    most = find_defaults(device).tokens or device.ridge
    return usual if most is None else min(usual, most // sequences)


def choose_nodes(drafter: Drafter, table: DeviceDefaults) -> int:
    """Returns the number of nodes of a tree for one sequence."""
    usual = max(drafter.num_nodes, table.fewest_nodes)
    return min(usual, table.nodes or usual)


def draft_settings(
    drafter: Drafter, vocab_size: int, builder: Builder, nodes: int, table: DeviceDefaults
) -> dict[str, Any]:
    """Returns the settings of a draft (`Drafter.settings`) whose defaults the device changes.

    Args:
      vocab_size: number of the verifier's tokens.
      nodes: number of tree nodes, root included.
    """
    defaults: dict[str, Any] = {"candidates": table.candidates and min(table.candidates, vocab_size)}
    if not builder.is_chain:
        defaults["ngrams"] = table.ngrams
    if vocab_size >= LARGE_VOCABULARY:
        defaults["shortlist"] = table.shortlist
    if table.nodes and "block_size" in drafter.settings:
        defaults["block_size"] = max(2, min(drafter.block_size, nodes))  # a tree is at most nodes - 1 deep
    if nodes <= (table.nodes or 0) and drafter.lanes is not None and not builder.is_chain and not builder.draws:
        defaults["depths"] = min(drafter.num_depths, table.depths)
    return {name: value for name, value in defaults.items() if name in drafter.settings and value is not None}


def choose_drafter_temperature(drafter: Drafter | None, temperature: float) -> float:
    """Returns the temperature of the draft for a sampling temperature. Without a drafter, the value has no effect."""
    return 1.0 if drafter is None else max(drafter.drafter_temperature, min(temperature, 1.0))


def describe_drafter_temperature(drafter: Drafter) -> str:
    """Returns the formula of `choose_drafter_temperature` for records; T is the sampling temperature."""
    return f"max({drafter.drafter_temperature:g}, min(T, 1))"


def choose_lanes(drafter: Drafter, nodes: int, table: DeviceDefaults) -> int | None:
    """Returns the number of nodes per level that a best-first tree of `nodes` nodes may expand; None: all."""
    is_small = drafter.lanes is not None and nodes <= (table.nodes or 0)
    return table.lanes if is_small else drafter.lanes


def choose_attention(device: Device, dtype: DTypeLike, head_dims: Collection[int] = ()) -> str:
    """Returns the attention implementation for caches of `dtype` and heads of these sizes.

    CPUs use "streamed" in float32. In bfloat16 they use "xla", because copying a part of the cache takes longer than it
    saves. Hopper GPUs use the kernel in bfloat16, for head sizes of 16, 32, 64 and 128.
    """
    # With the kernel, rounds take less time, most with many nodes and long texts: notebooks/results/latency_h200.md.
    if device.kind.startswith(HOPPER) and jnp.dtype(dtype) == jnp.bfloat16:
        return "pallas-gpu" if all(16 <= size <= 128 and size.bit_count() == 1 for size in head_dims) else "xla"
    return "streamed" if device.is_cpu and jnp.dtype(dtype) != jnp.bfloat16 else "xla"


def choose_prefill_chunk(device: Device) -> int:
    """Returns the number of prompt tokens per prefill pass: the table's, about the ridge of a known accelerator, or 128.

    With fewer tokens, prefill is bound by memory. With more, short prompts would need more padding.
    """
    ridge = device.ridge
    return find_defaults(device).prefill_chunk or (128 if ridge is None else 2 ** round(math.log2(ridge)))


def choose_residual_dtype(device: Device, dtype: DTypeLike) -> jnp.dtype | None:
    """Returns the dtype of the verifier's residual stream and logits for weights of `dtype`; None: the same.

    On CPUs, float32 keeps more answers equal to one-token decoding, at the same speed. On accelerators, it would add memory
    traffic; its benefit there was never measured.
    """
    return jnp.dtype(jnp.float32) if device.is_cpu and jnp.dtype(dtype).itemsize < 4 else None


def merges_weights(device: Device) -> bool:
    """Returns whether matrices of the verifier that read the same input are stored as one array (`decoder.merge`).

    Rounds are then faster on GPUs: notebooks/results/latency_h200.md#launches.
    """
    return not device.is_cpu


def keeps_fp8(device: Device, dtype: DTypeLike, tokens: int) -> bool:
    """Returns whether passes move fewer bytes with the weights of an FP8 file as they are than expanded to `dtype`.

    With weights kept in blocks of 128 x 128, a product reads them once, but writes and reads its inputs once per block of
    outputs (`backend.block_products`; kernels do not need to). CPUs always expand the weights, since they convert FP8
    slowly.

    Args:
      tokens: number of tokens of a pass over one sequence: the nodes of a tree.
    """
    size = jnp.dtype(dtype).itemsize
    return not device.is_cpu and 1 + 2 * tokens * size / SCALE_BLOCK < size


def keeps_groups(device: Device, dtype: DTypeLike, tokens: int, fits: bool) -> bool:
    """Returns whether weights with a scale per group of inputs are kept as the file has them, instead of expanded.

    CPUs are faster with expanded weights (`notebooks/results/four_bits.md`). With kept weights, GPUs write and read sums
    over groups of 128 inputs (`backend.group_products`); they expand weights if these sums have more bytes than are saved.

    Args:
      tokens: number of tokens of a pass over one sequence: the nodes of a tree.
      fits: whether devices have room for the expanded weights.
    """
    if not fits:
        return True
    if device.is_cpu:
        return False
    return device.backend == "tpu" or 1 / 2 + 2 * 4 * tokens / SCALE_BLOCK < jnp.dtype(dtype).itemsize
