"""One training step: trained weights, optimiser state and metric sums on a mesh, and their update.

Weights are float32, and are sharded over the mesh axes fsdp and model. Before a step reads them, it casts them to the
compute dtype and gathers them along fsdp.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import struct
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from train.data.packing import PackedBatch
from train.runtime.run_config import OptimizerConfig
from treeflash_jax.core import parameters, sharding
from treeflash_jax.core.parameters import Params, Spec

# A metric is (sum, weight). Both add up over chunks, parts of a step, steps and devices; sum / weight is the mean.
Sums = dict[str, tuple[jax.Array, jax.Array]]
SumsFunction = Callable[[Params, Params, PackedBatch, jax.Array], Sums]  # (trained weights, frozen weights, batch, keys_b)


@struct.dataclass
class TrainState:
    """Contents of a checkpoint.

    Attributes:
      step: number of optimiser steps done.
      params: float32 weights.
      optimizer: state of the optimiser, laid out like the weights.
      window: metric sums since the last log line.
    """

    step: jax.Array
    params: Params
    optimizer: optax.OptState
    window: Sums


@dataclass(frozen=True, kw_only=True)
class TrainTask:
    """The part of a stage that the loop needs.

    Attributes:
      specs: specs of the trained weights.
      frozen_specs: specs of the weights that are only read.
      sums: function that returns the metric sums of a batch; "loss" is minimised.
      compute_dtype: dtype of activations and of the weights that a step reads.
      flops: number of floating-point operations of one step, for MFU (`flops.step_flops`).
      held_out_sums: function that returns the metric sums of held-out batches; None: `sums`.
    """

    specs: Any
    frozen_specs: Any
    sums: SumsFunction
    compute_dtype: DTypeLike
    flops: float
    held_out_sums: SumsFunction | None = None


_map_specs = partial(jax.tree.map, is_leaf=parameters.is_spec)


def schedule(config: OptimizerConfig, steps: int, peak: float) -> optax.Schedule:
    warmup = max(1, round(config.warmup * steps))
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(steps, warmup + 1), end_value=config.final * peak)


def make_optimizer(config: OptimizerConfig, steps: int, specs: Any) -> optax.GradientTransformation:
    """Returns an optimiser that clips gradients, then uses AdamW, or Muon for weights whose specs have outputs.

    With Muon, other weights use AdamW. Weights decay if their specs have inputs. Muon's updates are scaled to a root mean
    square of 0.2 times the learning rate.
    """
    decays = _map_specs(lambda spec: bool(spec.inputs), specs)
    peak = schedule(config, steps, config.learning_rate)
    if config.name == "adamw":
        rule = optax.adamw(peak, config.b1, config.b2, weight_decay=config.weight_decay, mask=decays)
        return optax.chain(optax.clip_by_global_norm(config.clip), rule)
    axes = optax.contrib.MuonDimensionNumbers
    muon = optax.contrib.muon(
        peak,
        weight_decay=config.weight_decay,
        weight_decay_mask=decays,
        adam_b1=config.b1,
        adam_b2=config.b2,
        adam_learning_rate=schedule(config, steps, config.adam_learning_rate),
        adam_weight_decay=config.weight_decay,
        muon_weight_dimension_numbers=_map_specs(lambda s: axes(s.inputs, s.outputs) if s.outputs else None, specs),
        consistent_rms=0.2,
    )

    def update(grads: Params, memory: optax.OptState, params: Params) -> tuple[Params, optax.OptState]:
        """Hides weights that do not decay. Muon's AdamW takes no mask, but reads weights only for their decay."""
        hidden = jax.tree.map(lambda decays, x: x if decays else jnp.zeros_like(x), decays, params)
        return muon.update(grads, memory, hidden)

    return optax.chain(optax.clip_by_global_norm(config.clip), optax.GradientTransformation(muon.init, update))


def initial_state(
    task: TrainTask, transform: optax.GradientTransformation, params: Params, batch: PackedBatch
) -> TrainState:
    """Returns the state before the first step. The shapes of metrics follow from the shapes of `batch`."""
    frozen = parameters.abstract(task.frozen_specs, task.compute_dtype)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch.tokens_bt.shape[0]))
    compute = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, task.compute_dtype), params)
    shapes = jax.eval_shape(task.sums, compute, frozen, batch, keys) | {"grad_norm": (jnp.zeros(()),) * 2}
    window = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return TrainState(jnp.int32(0), params, transform.init(params), window)


def abstract_batch(batch_size: int, length: int, mesh: Mesh | None = None) -> PackedBatch:
    """Returns the shapes of a batch, with shardings if there is a mesh."""
    shape = (batch_size, length)
    layout = None if mesh is None else sharding.sharding(("batch", None), shape, mesh)
    dtypes = (jnp.int32, jnp.int32, jnp.int32, jnp.float32)
    return PackedBatch(*(jax.ShapeDtypeStruct(shape, dtype, sharding=layout) for dtype in dtypes))


def abstract_state(task: TrainTask, transform: optax.GradientTransformation, batch: PackedBatch, mesh: Mesh) -> TrainState:
    """Returns shapes and shardings of the state: weights by their specs, and the optimiser's state like its weights."""
    params = parameters.abstract(task.specs, jnp.float32)
    shapes = jax.eval_shape(lambda params: initial_state(task, transform, params, batch), params)
    leaves = jax.tree.leaves_with_path(task.specs, is_leaf=parameters.is_spec)
    by_path = {jax.tree_util.keystr(path): spec for path, spec in leaves}
    replicated = NamedSharding(mesh, PartitionSpec())

    def place(path: tuple[Any, ...], leaf: Any) -> jax.ShapeDtypeStruct:
        specs = (by_path.get(jax.tree_util.keystr(path[start:])) for start in range(len(path)))
        spec = next((spec for spec in specs if spec is not None and spec.shape == leaf.shape), None)
        layout = replicated if spec is None else sharding.sharding(spec.axes, spec.shape, mesh)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout)

    return jax.tree_util.tree_map_with_path(place, shapes)


def sum_chunks(function: Callable[[Any], Any], chunks: Any) -> Any:
    """Adds up `function(chunk)` over the leading axis of `chunks`, one chunk at a time."""
    shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], chunks))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return lax.scan(lambda total, chunk: (jax.tree.map(jnp.add, total, function(chunk)), None), zeros, chunks)[0]


def split_chunks(tree: Any, size: int) -> Any:
    """Splits [b, n, ...] into [n / size, b, size, ...], for `sum_chunks`."""
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0), tree)


def sum_parts(function: Callable[[Any], Any], batch: Any, count: int) -> Any:
    """Adds up `function(part)` over `count` parts of a batch [b, ...]. Each part has sequences of every device."""
    if count == 1:
        return function(batch)
    return sum_chunks(function, jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0), batch))


def make_update(
    task: TrainTask, transform: optax.GradientTransformation, *, steps: int, accumulate: int, seed: int, log_every: int
) -> Callable[[TrainState, Params, PackedBatch], TrainState]:
    """Builds the step: gradients of the mean loss over all parts of a batch, one update, and metrics added to the window.

    Every group of devices that shares sequences computes alone. Gradients are summed over groups once per part. With
    automatic partitioning, they would be summed for each chunk of anchors.
    """

    def gradients(params: Params, frozen: Params, batch: PackedBatch, keys_b: jax.Array) -> tuple[Params, Sums]:
        frozen = gather(frozen, task.frozen_specs, task.compute_dtype)

        def loss(params: Params, part: tuple[PackedBatch, jax.Array]) -> tuple[jax.Array, Sums]:
            sums = task.sums(gather_trained(params, task.specs, task.compute_dtype), frozen, *part)
            return sums["loss"][0], sums

        grads, sums = sum_parts(partial(jax.grad(loss, has_aux=True), params), (batch, keys_b), accumulate)
        return total_gradients(grads, task.specs), lax.psum(sums, shared_axes())

    def update(state: TrainState, frozen: Params, batch: PackedBatch) -> TrainState:
        step_key = jax.random.fold_in(jax.random.key(seed), state.step)
        keys_b = jax.vmap(jax.random.fold_in, (None, 0))(step_key, jnp.arange(batch.tokens_bt.shape[0]))
        batch = replace(batch, progress_b=jnp.full(keys_b.shape, state.step / steps))
        grads, sums = by_batch(gradients, task, scatters=True)(state.params, frozen, batch, keys_b)
        weight = jnp.maximum(sums["loss"][1], 1e-6)
        grads = jax.tree.map(lambda x: x / weight, grads)
        norm = optax.tree.norm(grads)
        with jax.named_scope("update"):
            updates, memory = transform.update(grads, state.optimizer, state.params)
            params = optax.apply_updates(state.params, updates)
        fresh = state.step % log_every == 0
        sums |= {"grad_norm": (norm, jnp.ones_like(norm))}
        window = jax.tree.map(lambda x, s: jnp.where(fresh, 0, x) + s, state.window, sums)
        return TrainState(state.step + 1, params, memory, window)

    return update


def by_batch(function: Callable[..., Any], task: TrainTask, *, scatters: bool = False) -> Callable[..., Any]:
    """Runs `function(params, frozen, batch, keys_b)` per device group, on its sequences and its fsdp slices of weights.

    The result is replicated. If `scatters`, it is a pair of slices like those of the parameters, and a replicated value.
    With a model axis, everything is partitioned automatically, because XLA (jax 0.10) cannot split heads and vocabulary
    inside a group.
    """
    mesh, whole = sharding.current(), PartitionSpec()
    if mesh.shape["model"] > 1:
        return function
    names = tuple(name for name in sharding.RULES["batch"] if name in mesh.axis_names)
    split = PartitionSpec(names)
    params = _map_specs(_fsdp_partition, task.specs)
    frozen = _map_specs(_fsdp_partition, task.frozen_specs)
    parts = {"in_specs": (params, frozen, split, split), "out_specs": (params, whole) if scatters else whole}
    return jax.shard_map(function, mesh=mesh, **parts, axis_names=set(names), check_vma=False)


def shared_axes() -> tuple[str, ...]:
    """Returns the mesh axes over which the enclosing `by_batch` splits the batch."""
    return tuple(sorted(sharding.manual_axes(sharding.current())))


def gather(tree: Any, specs: Any, dtype: DTypeLike) -> Any:
    """Returns weights in the compute dtype, gathered along fsdp."""

    def leaf(spec: Spec, x: jax.Array) -> jax.Array:
        x = x.astype(spec.dtype_in(dtype))
        axis = _fsdp_axis(spec)
        if axis is not None and "fsdp" in shared_axes():
            return lax.all_gather(x, "fsdp", axis=axis, tiled=True)
        return sharding.constrain(x, tuple(None if name == "embed" else name for name in spec.axes))

    return _map_specs(leaf, specs, tree)


def gather_trained(tree: Params, specs: Any, dtype: DTypeLike) -> Params:
    """Gathers like `gather`, but returns float32, so that chunks and devices add up gradients in float32.

    Readers cast the weights back to the compute dtype, which loses nothing. The gradient of a gathered weight is scattered
    over fsdp.
    """

    def leaf(spec: Spec, x: jax.Array) -> jax.Array:
        axis = _fsdp_axis(spec)

        @jax.custom_vjp
        def gather_float32(x: jax.Array) -> jax.Array:
            return gather([x], [spec], dtype)[0].astype(jnp.float32)

        def backward(_: None, grad: jax.Array) -> tuple[jax.Array]:
            if axis is None or "fsdp" not in shared_axes():
                return (grad,)
            return (lax.psum_scatter(grad, "fsdp", scatter_dimension=axis, tiled=True),)

        gather_float32.defvjp(lambda x: (gather_float32(x), None), backward)
        return gather_float32(x)

    return _map_specs(leaf, specs, tree)


def total_gradients(grads: Params, specs: Any) -> Params:
    """Sums gradients over the devices that share the batch. Those of gathered weights are already summed over fsdp."""

    def leaf(spec: Spec, x: jax.Array) -> jax.Array:
        return lax.psum(x, tuple(name for name in shared_axes() if name != "fsdp" or _fsdp_axis(spec) is None))

    return _map_specs(leaf, specs, grads)


def _fsdp_axis(spec: Spec) -> int | None:
    """Returns the axis of a weight that is split over fsdp; None if there is none."""
    mesh = sharding.current()
    size = 1 if mesh is None else mesh.shape.get("fsdp", 1)
    axis = spec.axes.index("embed") if "embed" in spec.axes else None
    return axis if size > 1 and axis is not None and spec.shape[axis] % size == 0 else None


def _fsdp_partition(spec: Spec) -> PartitionSpec:
    return PartitionSpec(*("fsdp" if axis == _fsdp_axis(spec) else None for axis in range(len(spec.shape))))


def place_weights(tree: Any, specs: Any, mesh: Mesh, dtype: DTypeLike) -> Any:
    """Puts weights on the mesh by their specs. Every process must hold the same values."""

    def leaf(spec: Spec, x: Any) -> jax.Array:
        layout = sharding.sharding(spec.axes, spec.shape, mesh)
        if isinstance(x, jax.Array) and x.dtype == spec.dtype_in(dtype) and x.sharding == layout:
            return x
        host = np.asarray(x).astype(spec.dtype_in(dtype))
        return jax.make_array_from_callback(host.shape, layout, lambda index: host[index])

    return _map_specs(leaf, specs, tree)
