"""What a stage cannot be faster than: the bytes and FLOPs of one device over rates measured on the same machine.

Bytes of a stage, on one device of the mesh:

- weights that the stage uses, read once. The vocabulary table counts once per reduction over it that has to wait for an
  earlier one: twice in the second stage of a conditional head, which needs its candidates first.
- keys and values of the `context` committed rows, read once; new rows that are kept, written once. Slots of the cache
  beyond the context are nobody's need, though an implementation may read them.
- what a stage hands to the next one (block, transition table, logits, features, new keys and values), where it is timed as
  a program of its own: written once by the one, read once by the other. A whole round need not move any of it, so its floor
  leaves that out: a round's floor lies below the sum of its stages' floors.

Activations inside a stage, embedding rows, positions and masks count as nothing.

FLOPs are those of matrix products, two per multiply-add: every weight with every row it meets, queries with the context
and with the row itself. Other new rows (ancestors, half a prompt) are counted for prefill and the drafter's block only.

Floor = max(bytes / copy rate, FLOPs / matmul rate). Collectives count as nothing.

Shape suffixes: b batch, n tree nodes, q block slots, m previous-token rows, p rows of an accepted path.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from treeflash_jax import devices, drafters, products
from treeflash_jax import mesh as meshes
from treeflash_jax.decoding.loops import DecodePlan
from treeflash_jax.drafters.block.heads import HEADS
from treeflash_jax.params import Spec, is_spec
from treeflash_jax.verifiers import cache as caches
from treeflash_jax.verifiers import forward as verifier
from treeflash_jax.verifiers.config import ModelConfig

STAGES = ("draft", "expand", "tree", "verify", "accept", "commit")  # of a round, in order


@dataclass(frozen=True)
class Ceilings:
    """Rates of one device. Bytes of a copy count twice: read and written."""

    copy_bytes_per_second: float
    matmul_flops_per_second: float


@dataclass(frozen=True)
class Work:
    """The least a device has to do."""

    bytes: float = 0
    flops: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def over(self, parts: float) -> Work:
        return Work(self.bytes / parts, self.flops / parts)

    def seconds(self, ceilings: Ceilings) -> float:
        return max(self.bytes / ceilings.copy_bytes_per_second, self.flops / ceilings.matmul_flops_per_second)


def measure_ceilings(dtype: Any) -> Ceilings:
    """The rates of the first device: of a large pass that reads and writes every byte once, and of a large matrix product.

    Medians of warm samples; on a CPU with small arrays, in about a second.

    Args:
      dtype: of the matrix product, on random numbers: zeros multiply faster. It runs in the form that the model's products
        have on this device, at JAX's ambient precision.
    """
    size, side, calls = (2**27, 1024, 1) if devices.here().is_cpu else (2**30, 8192, 8)
    negate = jax.jit(jnp.negative, donate_argnums=0)  # in place, so that a CPU does not spend the time on fresh pages
    numbers = jax.jit(lambda: jnp.arange(size // 4, dtype=jnp.float32))()
    left, right = (jax.random.normal(jax.random.key(i), (side, side), dtype) for i in range(2))
    multiply = jax.jit(partial(products.product, "ri,io->ro"))
    return Ceilings(
        copy_bytes_per_second=2 * size / _seconds(negate, numbers, calls),
        matmul_flops_per_second=2 * side**3 / _seconds(lambda _: multiply(left, right), None, calls),
    )


def _seconds(step: Callable[[Any], Any], carry: Any, calls: int, samples: int = 8) -> float:
    """Median seconds of one of `calls` steps in a row; the first sample is warm-up."""
    seconds = []
    for _ in range(samples):
        since = time.perf_counter()
        for _ in range(calls):
            carry = step(carry)
        jax.block_until_ready(carry)
        seconds.append((time.perf_counter() - since) / calls)
    return statistics.median(seconds[1:])


def stage_work(
    plan: DecodePlan, *, batch: int, context: int, dtype: Any, mesh: Any = None, quantize: str | None = None
) -> dict[str, Work]:
    """The work of every stage of a plan that drafts; see the module for what counts.

    Args:
      plan: sizes, nodes, candidates and children.
      batch: rows decoded together.
      context: committed rows of each of them.
      dtype: of weights, caches and activations.
      mesh: sizes of one device's share; None: one device.
      quantize: scheme of the verifier's matrices.

    Returns:
      By name: those of STAGES, "round", "step" (one token without drafting) and "prefill" (one token of a prompt of
      `context` tokens, all rows of the batch counted).
    """
    count = _Counter(batch, context, dtype, mesh)
    model, drafter = plan.verifier, plan.drafter
    nodes, block, path = plan.num_nodes, drafter.block_size, plan.path_rows
    depths, rows = drafter.num_depths, 1 if plan.draft.head == "marginal" else plan.draft.candidates
    specs, own = verifier.specs(model, quantize), drafters.of(drafter).specs(drafter)["backbone"]
    body = {name: spec for name, spec in specs.items() if name not in ("embed", "unembed")}
    table = specs["embed"]
    features = len(drafter.target_layer_ids) * model.hidden_size
    keys_values = [{name: layer[name] for name in ("k", "v")} for group in own["groups"] for layer in group]
    context_weights = {"fc": own["fc"], "norm": own["hidden_norm"], "layers": keys_values}

    def extend(rows: float) -> Work:
        return count.weights(context_weights, rows) + count.new_rows(drafter.layers, rows)

    def verify(rows: float, seen: float) -> Work:
        return count.weights(body, rows) + count.attention(model, rows, seen)

    head = HEADS[plan.draft.head].specs(drafter)
    slots = {name: spec for name, spec in head.items() if name.startswith("hidden")}  # computed once a slot
    second = count.weights(table, depths)
    if plan.draft.head != "marginal":
        pairs = 1 + (depths - 1) * rows
        listed = plan.draft.shortlist
        second = count.weights(table, depths if listed else depths - 1) + count.weights(slots, depths)
        second += count.listed(model, depths * listed, pairs) if listed else count.weights(table, pairs)
        second += count.weights({name: spec for name, spec in head.items() if name not in slots}, pairs)

    hidden = count.numbers((None, None), (block, model.hidden_size))
    transitions = Work(count.rows * depths * rows * plan.draft.children * 12)  # token, log-probability and next row
    logits = count.numbers((None, "vocab"), (nodes, model.vocab_size))
    drafted = count.weights({name: own[name] for name in ("groups", "norm")}, block)
    need = {
        "draft": drafted + count.attention(drafter.layers, block, context + block) + count.read_context(drafter.layers),
        "expand": second,
        "tree": Work(),
        "verify": verify(nodes, context + 1) + count.read_context(model) + count.weights(table, nodes),
        "accept": Work(),
        "commit": extend(path) + count.new_rows(model, path),
    }
    handed = {
        "draft": hidden,
        "expand": hidden + transitions,
        "tree": transitions,
        "verify": logits + count.numbers((None, None), (nodes, features)) + count.new_rows(model, nodes),
        "accept": logits,
        "commit": count.numbers((None, None), (path, features)) + count.new_rows(model, path),
    }
    step = verify(1, context + 1) + count.read_context(model) + count.weights(table, 1) + count.new_rows(model, 1)
    prompt = verify(context, (context + 1) / 2) + count.weights(table, 1) + count.new_rows(model, context) + extend(context)
    return {
        **{stage: need[stage] + handed[stage] for stage in STAGES},
        "round": sum(need.values(), Work()),
        "step": step,
        "prefill": prompt.over(batch * context),
    }


@dataclass(frozen=True)
class _Counter:
    """Counts what one device holds of arrays whose first axis is the batch, and of weights."""

    batch: int
    context: int
    dtype: Any
    mesh: Any

    @property
    def width(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def rows(self) -> int:
        return self.local(("batch",), (self.batch,))

    def local(self, axes: meshes.Axes, shape: tuple[int, ...]) -> int:
        shard = shape if self.mesh is None else meshes.sharding(axes, shape, self.mesh).shard_shape(shape)
        return math.prod(shard)

    def numbers(self, axes: meshes.Axes, shape: tuple[int, ...]) -> Work:
        """An array of every sequence, moved once."""
        return Work(self.width * self.local(("batch", *axes), (self.batch, *shape)))

    def weights(self, specs: Any, rows: float) -> Work:
        """Weights read once, and their products with so many rows of every sequence."""
        leaves = jax.tree.leaves(specs, is_leaf=is_spec)
        sizes: list[tuple[Spec, int]] = [(spec, self.local(spec.axes, spec.shape)) for spec in leaves]
        products = sum(size for spec, size in sizes if len(spec.shape) > 1 and spec.init != "ones")  # no norms, no scales
        read = sum(size * spec.dtype_in(self.dtype).itemsize for spec, size in sizes)
        return Work(read, 2 * self.rows * rows * products)

    def listed(self, config: ModelConfig, tokens: int, rows: float) -> Work:
        """So many tokens' rows of the vocabulary table for every sequence, and their products with so many rows of it."""
        return Work(
            self.width * self.rows * tokens * config.hidden_size, 2 * self.rows * rows * tokens * config.hidden_size
        )

    def attention(self, config: ModelConfig, rows: float, seen: float) -> Work:
        """Both products of so many queries a sequence with the rows that each sees, in all layers."""
        heads = self.local(("batch", "heads"), (self.batch, config.num_heads))
        return Work(0, 4 * config.num_layers * heads * config.head_dim * rows * seen)

    def read_context(self, config: ModelConfig) -> Work:
        return self.new_rows(config, self.context)

    def new_rows(self, config: ModelConfig, rows: float) -> Work:
        """Keys and values of so many rows a sequence, moved once, in all layers."""
        shape = (self.batch, config.num_kv_heads, 1, config.head_dim)
        return Work(2 * config.num_layers * rows * self.width * self.local(caches.AXES, shape))
