"""What a training step is made of: trained weights, optimiser and metric sums on a mesh, and the update of them.

Weights are float32 and lie over fsdp and model; a step casts them to the compute dtype and gathers fsdp where they are
read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import struct
from jax import lax

from train.config import OptimizerConfig
from train.data import Rows
from treeflash_jax import mesh as meshes
from treeflash_jax import params as parameters

# A metric is (sum, weight): sums add up over chunks, parts of a step, steps and devices; their quotient is the mean.
Sums = dict[str, tuple[jax.Array, jax.Array]]
SumsOf = Callable[[Any, Any, Rows, jax.Array], Sums]


@struct.dataclass
class TrainState:
    """What a checkpoint holds.

    Attributes:
      step: optimiser steps done.
      params: float32 masters.
      optimizer: state of the optimiser, laid out as its parameters.
      window: metric sums since the last log line.
      bad_step: the first step whose loss or gradient was not finite; -1 for none. From then on nothing changes.
    """

    step: jax.Array
    params: Any
    optimizer: Any
    window: Sums
    bad_step: jax.Array


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a stage hands to the loop.

    Attributes:
      specs: of the trained weights.
      frozen_specs: of the weights that are only read.
      sums: metric sums of some rows; "loss" is minimised.
      compute_dtype: of activations and of the weights a step reads.
      flops: of one step, by the definition of the stage; for MFU.
      held_out_sums: those of held-out rows, where they are not the same.
    """

    specs: Any
    frozen_specs: Any
    sums: SumsOf
    compute_dtype: Any
    flops: float
    held_out_sums: SumsOf | None = None


def schedule(config: OptimizerConfig, steps: int, peak: float) -> optax.Schedule:
    warmup = max(1, round(config.warmup * steps))
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(steps, warmup + 1), end_value=config.final * peak)


def make_optimizer(config: OptimizerConfig, steps: int, specs: Any) -> optax.GradientTransformation:
    """Returns clipping, then AdamW, or Muon on the weights whose specs have outputs and AdamW on the others.

    Weights decay if their specs have inputs. Muon's updates are scaled to a root mean square of 0.2 times the rate. On the
    shipped pair it reached AdamW's loss in half the steps.
    """

    def from_specs(value: Callable[[parameters.Spec], Any]) -> Any:
        return jax.tree.map(value, specs, is_leaf=parameters.is_spec)

    decays = from_specs(lambda spec: bool(spec.inputs))
    peak = schedule(config, steps, config.learning_rate)
    if config.name == "adamw":
        rule = optax.adamw(peak, config.b1, config.b2, weight_decay=config.weight_decay, mask=decays)
    else:
        axes = optax.contrib.MuonDimensionNumbers
        muon = optax.contrib.muon(
            peak,
            weight_decay=config.weight_decay,
            weight_decay_mask=decays,
            adam_b1=config.b1,
            adam_b2=config.b2,
            adam_learning_rate=schedule(config, steps, config.adam_learning_rate),
            adam_weight_decay=config.weight_decay,
            muon_weight_dimension_numbers=from_specs(
                lambda spec: axes(spec.inputs, spec.outputs) if spec.outputs else None
            ),
            consistent_rms=0.2,
        )

        def update(grads: Any, memory: Any, params: Any) -> tuple[Any, Any]:
            """Its AdamW takes no mask; weights are read for the decay alone, and that of zeros is zero."""
            return muon.update(
                grads, memory, jax.tree.map(lambda decays, x: x if decays else jnp.zeros_like(x), decays, params)
            )

        rule = optax.GradientTransformation(muon.init, update)
    return optax.chain(optax.clip_by_global_norm(config.clip), rule)


def initial_state(stage: Stage, transform: optax.GradientTransformation, params: Any, batch: Any) -> TrainState:
    """The state before the first step. `batch`, of shapes alone, tells what the metrics look like."""
    frozen = parameters.abstract(stage.frozen_specs, stage.compute_dtype)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch.tokens_rt.shape[0]))
    compute = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, stage.compute_dtype), params)
    shapes = jax.eval_shape(stage.sums, compute, frozen, batch, keys)
    window = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), _with_norm(shapes, jnp.zeros(())))
    return TrainState(jnp.int32(0), params, transform.init(params), window, jnp.int32(-1))


def abstract_rows(batch: int, row_tokens: int, mesh: jax.sharding.Mesh | None = None) -> Rows:
    """Shapes of a batch, placed on `mesh` where one is given."""
    sharding = None if mesh is None else meshes.sharding(("batch", None), (batch, row_tokens), mesh)
    kinds = (jnp.int32, jnp.int32, jnp.int32, jnp.float32)
    return Rows(*(jax.ShapeDtypeStruct((batch, row_tokens), kind, sharding=sharding) for kind in kinds))


def abstract_state(
    stage: Stage, transform: optax.GradientTransformation, rows: Rows, mesh: jax.sharding.Mesh
) -> TrainState:
    """Shapes and shardings of the state: what a checkpoint is read into, and a step compiled for."""
    params = parameters.abstract(stage.specs, jnp.float32)
    shapes = jax.eval_shape(lambda params: initial_state(stage, transform, params, rows), params)
    places = state_shardings(shapes, stage.specs, mesh)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)


def state_shardings(abstract: TrainState, specs: Any, mesh: jax.sharding.Mesh) -> TrainState:
    """A sharding for every leaf: weights by their specs, the optimiser's memory of a weight as the weight itself."""
    leaves = jax.tree_util.tree_flatten_with_path(specs, is_leaf=parameters.is_spec)[0]
    by_path = {jax.tree_util.keystr(path): spec for path, spec in leaves}
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def place(path: tuple[Any, ...], leaf: Any) -> jax.sharding.NamedSharding:
        for start in range(len(path)):
            spec = by_path.get(jax.tree_util.keystr(path[start:]))
            if spec is not None and spec.shape == leaf.shape:
                return meshes.sharding(spec.axes, spec.shape, mesh)
        return everywhere

    return jax.tree_util.tree_map_with_path(place, abstract)


def make_update(
    stage: Stage, transform: optax.GradientTransformation, *, accumulate: int, seed: int, log_every: int
) -> Callable[[TrainState, Any, Rows], TrainState]:
    """The step: gradients of the mean loss over all parts of a batch, one update, metrics added to the window.

    Every group of devices that shares rows works on its own until its gradients are summed, once a part: left to automatic
    partitioning, each chunk of anchors would reduce the gradient of every weight.
    """

    def gradients(params: Any, frozen: Any, batch: Rows, keys_b: jax.Array) -> tuple[Any, Sums]:
        frozen = gather(frozen, stage.frozen_specs, stage.compute_dtype)

        def loss(params: Any, part: tuple[Rows, jax.Array]) -> tuple[jax.Array, Sums]:
            sums = stage.sums(gather_trained(params, stage.specs, stage.compute_dtype), frozen, *part)
            return sums["loss"][0], sums

        grads_of = jax.grad(loss, has_aux=True)
        if accumulate == 1:
            grads, sums = grads_of(params, (batch, keys_b))
        else:
            parts = jax.tree.map(lambda x: parts_of(x, accumulate), (batch, keys_b))
            first = jax.tree.map(lambda x: x[0], parts)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(grads_of, params, first))
            grads, sums = lax.scan(
                lambda total, part: (jax.tree.map(jnp.add, total, grads_of(params, part)), None), zeros, parts
            )[0]
        return total_gradients(grads, stage.specs), lax.psum(sums, shared_axes())

    def update(state: TrainState, frozen: Any, batch: Rows) -> TrainState:
        step_key = jax.random.fold_in(jax.random.key(seed), state.step)
        keys_b = jax.vmap(jax.random.fold_in, (None, 0))(step_key, jnp.arange(batch.tokens_rt.shape[0]))
        grads, sums = by_batch(gradients, stage, scatters=True)(state.params, frozen, batch, keys_b)
        weight = jnp.maximum(sums["loss"][1], 1e-6)
        grads = jax.tree.map(lambda x: x / weight, grads)
        norm = optax.tree.norm(grads)
        fine = jnp.isfinite(sums["loss"][0]) & jnp.isfinite(norm) & (state.bad_step < 0)
        updates, memory = transform.update(grads, state.optimizer, state.params)
        new = optax.apply_updates(state.params, updates), memory
        params, memory = jax.tree.map(lambda x, old: jnp.where(fine, x, old), new, (state.params, state.optimizer))
        fresh = state.step % log_every == 0
        window = jax.tree.map(lambda x, s: jnp.where(fresh, 0, x) + s, state.window, _with_norm(sums, norm))
        bad_step = jnp.where(fine | (state.bad_step >= 0), state.bad_step, state.step)
        return TrainState(state.step + 1, params, memory, window, bad_step)

    return update


def by_batch(function: Callable[..., Any], stage: Stage, *, scatters: bool = False) -> Callable[..., Any]:
    """`function(params, frozen, rows, keys)` on each device group's own rows and own fsdp slices of weights.

    Its result is whole, or where `scatters`, a pair of slices like those of the parameters and something whole. With a
    model axis everything is left to automatic partitioning: XLA (jax 0.10) cannot split heads and vocabulary inside.
    """
    mesh, whole = meshes.current(), jax.sharding.PartitionSpec()
    if mesh.shape["model"] > 1:
        return function
    names = tuple(name for name in meshes.RULES["batch"] if name in mesh.axis_names)
    rows = jax.sharding.PartitionSpec(names)
    params, frozen = (
        jax.tree.map(_fsdp_spec, specs, is_leaf=parameters.is_spec) for specs in (stage.specs, stage.frozen_specs)
    )
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(params, frozen, rows, rows),
        out_specs=(params, whole) if scatters else whole,
        axis_names=set(names),
        check_vma=False,
    )


def shared_axes() -> tuple[str, ...]:
    """Axes along which the enclosing `by_batch` gave every device group rows of its own."""
    return tuple(sorted(meshes.manual_axes(meshes.current())))


def gather(tree: Any, specs: Any, dtype: Any) -> Any:
    """Weights in the compute dtype, whole along fsdp: what the maths reads."""

    def leaf(spec: parameters.Spec, x: jax.Array) -> jax.Array:
        x = x.astype(spec.dtype_in(dtype))
        at = _fsdp_axis(spec)
        if at is not None and "fsdp" in shared_axes():
            return lax.all_gather(x, "fsdp", axis=at, tiled=True)
        return meshes.constrain(x, tuple(None if axis == "embed" else axis for axis in spec.axes))

    return jax.tree.map(leaf, specs, tree, is_leaf=parameters.is_spec)


def gather_trained(tree: Any, specs: Any, dtype: Any) -> Any:
    """As `gather`, the values held in float32: chunks and devices then add up gradients in float32.

    What reads them casts them back, which loses nothing. The gradient of a gathered weight is scattered over fsdp.
    """

    def leaf(spec: parameters.Spec, x: jax.Array) -> jax.Array:
        at = _fsdp_axis(spec)

        @jax.custom_vjp
        def whole(x: jax.Array) -> jax.Array:
            return gather([x], [spec], dtype)[0].astype(jnp.float32)

        def backward(_: None, grad: jax.Array) -> tuple[jax.Array]:
            if at is None or "fsdp" not in shared_axes():
                return (grad,)
            return (lax.psum_scatter(grad, "fsdp", scatter_dimension=at, tiled=True),)

        whole.defvjp(lambda x: (whole(x), None), backward)
        return whole(x)

    return jax.tree.map(leaf, specs, tree, is_leaf=parameters.is_spec)


def total_gradients(grads: Any, specs: Any) -> Any:
    """Sums over the devices that share rows; where a weight was gathered, its gradient is summed over fsdp already."""

    def leaf(spec: parameters.Spec, x: jax.Array) -> jax.Array:
        return lax.psum(x, tuple(name for name in shared_axes() if name != "fsdp" or _fsdp_axis(spec) is None))

    return jax.tree.map(leaf, specs, grads, is_leaf=parameters.is_spec)


def _fsdp_axis(spec: parameters.Spec) -> int | None:
    """Which axis of a weight lies over fsdp."""
    mesh = meshes.current()
    size = 1 if mesh is None else mesh.shape.get("fsdp", 1)
    at = spec.axes.index("embed") if "embed" in spec.axes else None
    return at if size > 1 and at is not None and spec.shape[at] % size == 0 else None


def _fsdp_spec(spec: parameters.Spec) -> jax.sharding.PartitionSpec:
    at = _fsdp_axis(spec)
    return jax.sharding.PartitionSpec(*("fsdp" if axis == at else None for axis in range(len(spec.shape))))


def place(tree: Any, specs: Any, mesh: jax.sharding.Mesh, dtype: Any) -> Any:
    """Weights on the mesh as their specs say; every process holds the same values beforehand."""

    def leaf(spec: parameters.Spec, x: Any) -> jax.Array:
        sharding = meshes.sharding(spec.axes, spec.shape, mesh)
        kind = spec.dtype_in(dtype)
        if isinstance(x, jax.Array) and x.dtype == kind and x.sharding == sharding:
            return x
        host = np.asarray(x).astype(kind)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(leaf, specs, tree, is_leaf=parameters.is_spec)


def _with_norm(sums: Sums, norm: jax.Array) -> Sums:
    return sums | {"grad_norm": (norm, jnp.ones_like(norm))}


def parts_of(x: jax.Array, count: int) -> jax.Array:
    """[b, ...] -> [count, b / count, ...], every device's rows dealt out to all parts."""
    return jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0)
