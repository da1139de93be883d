"""Mixture of experts: every row goes through the few experts that its router prefers, and their results are added up.

The sum has three forms, equal but for rounding. The number of rows, which is static, decides which one is compiled:

- "gather" reads the matrices of a row's own experts, one assignment after the other. Nothing is copied: a GPU reduces over
  gathered matrices in one kernel, TPUs multiply by slices, CPUs take a few input rows of all chosen matrices in turn.
- "dense" runs all rows through all experts and weighs the results; every matrix is read once.
- "sorted" orders the assignments by expert and runs ragged products. Only TPUs have a native one: XLA pads it to E times
  the work on GPUs and CPUs, where "dense" is compiled in its place, BLOCK rows at a time.

CPUs also gather in place of "dense" where a row chooses few of the experts (SPARSE).

On a mesh every device does this for its own rows with the experts, or the slices of all experts, that it holds, and the
partial sums are added over the mesh. No weight travels.

Source: Qwen3-MoE as transformers computes it.

Shape suffixes: b batch, t tokens, n = b t rows of a device, d model, x experts, f ffn of an expert, k experts of a row,
a = n k assignments, m either of d and f, z = x f.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from treeflash_jax import mesh as meshes
from treeflash_jax import quantized
from treeflash_jax.params import Spec, is_spec
from treeflash_jax.quantized import Quantized
from treeflash_jax.verifiers.config import ModelConfig

MANY_ROWS = 64  # above it most experts serve several rows, and sorting saves more work than it costs
TURN = 8  # input rows of a matrix that a CPU adds up at a time
BLOCK = 256  # rows that "dense" runs at a time: beyond it the products, not the weights, take the time
SPARSE = 4  # CPUs gather for any number of rows where there are as many times the experts of a row


Form = Callable[[dict[str, Any], jax.Array, jax.Array, jax.Array], jax.Array]


def specs(config: ModelConfig) -> dict[str, Spec]:
    """Weights of the experts of one layer and of their router, which is never quantised."""
    d, x, f = config.hidden_size, config.num_experts, config.expert_size
    into, back = ("experts", "embed", "expert_ffn"), ("experts", "expert_ffn", "embed")
    return {
        "router": Spec((d, x), ("embed", None), inputs=(0,), can_quantize=False),
        "expert_gate": Spec((x, d, f), into, inputs=(1,)),
        "expert_up": Spec((x, d, f), into, inputs=(1,)),
        "expert_down": Spec((x, f, d), back, inputs=(1,)),
    }


def mixture(params: dict[str, Any], config: ModelConfig, x_btd: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The feed-forward part of a sparse layer: sum over a row's experts of weight * down(silu(gate x) * up x).

    Args:
      x_btd: normed residual stream.

    Returns:
      The sum [b, t, d] in the dtype of x, and the experts of every row [b, t, k] in order of decreasing weight.
    """
    weights = {name: params[name] for name in specs(config)}
    mesh = meshes.current()
    names = set() if mesh is None else set(mesh.axis_names) - meshes.manual_axes(mesh)
    with jax.named_scope("experts"):
        if not names:
            return _of_device(weights, x_btd, config)
        own = quantized.specs(specs(config), quantized.scheme_of(weights))
        places = jax.tree.map(lambda spec: _place(spec, mesh), own, is_leaf=is_spec)
        experts, _, ffn = _place(specs(config)["expert_gate"], mesh)
        rows = meshes.partition(("batch", None, None), x_btd.shape, mesh)
        run = partial(_of_device, config=config, experts=experts, ffn=ffn)
        sizes = {"in_specs": (places, rows), "out_specs": (rows, rows)}
        return jax.shard_map(run, mesh=mesh, **sizes, axis_names=names, check_vma=False)(weights, x_btd)


def route(router: jax.Array, config: ModelConfig, x_nd: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The experts of every row and their weights, both [n, k], largest weight first, lower expert first among equals.

    The product is one of the compute dtype; probabilities over all experts are float32 at least, and weights are rounded
    to the compute dtype at the end.
    """
    logits_nx = quantized.product("nd,dx->nx", x_nd, router)
    probs_nx = jax.nn.softmax(logits_nx.astype(_wide(x_nd)), axis=-1)
    weight_nk, ids_nk = lax.top_k(probs_nx, config.experts_per_token)
    if config.normalize_experts:
        weight_nk = weight_nk / jnp.sum(weight_nk, axis=-1, keepdims=True)
    return weight_nk.astype(x_nd.dtype), ids_nk


def form_of(rows: int, per_row: int, held: int) -> str:
    """The form that reads fewest bytes, or does least work where there are many rows."""
    if 2 * rows * per_row <= held:
        return "gather"
    return "dense" if rows <= MANY_ROWS else "sorted"


def distinct(ids_btk: jax.Array, experts: int, shards: int = 1) -> jax.Array:
    """How many experts the rows of one device go through, on average over the devices that split the batch."""
    ids_ya = ids_btk.reshape(shards, -1)
    is_read_yx = jnp.any(ids_ya[..., None] == jnp.arange(experts), axis=1)
    return jnp.sum(is_read_yx) / shards


def _of_device(
    weights: dict[str, Any], x_btd: jax.Array, config: ModelConfig, experts: str | None = None, ffn: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """`mixture` on one device.

    Args:
      experts, ffn: mesh axis that splits the experts, or the width of each; None: it holds them all.
    """
    if quantized.scheme_of(weights):  # as in `quantized.product`: no wide copy outlives its layer
        x_btd, weights = lax.optimization_barrier((x_btd, weights))
    batch, tokens, _ = x_btd.shape
    x_nd, held = x_btd.reshape(batch * tokens, -1), weights["expert_gate"].shape[0]
    weight_nk, ids_nk = route(weights["router"], config, x_nd)
    own_nk = ids_nk - lax.axis_index(experts) * held if experts else ids_nk
    is_own_nk = (own_nk >= 0) & (own_nk < held)
    weight_nk = jnp.where(is_own_nk, weight_nk.astype(_wide(x_nd)), 0)
    y_nd = FORMS[form_of(*ids_nk.shape, held)](weights, x_nd, weight_nk, jnp.where(is_own_nk, own_nk, held))
    if over := tuple(name for name in (experts, ffn) if name):
        y_nd = lax.psum(y_nd, over)
    return y_nd.astype(x_btd.dtype).reshape(x_btd.shape), ids_nk.reshape(batch, tokens, -1)


# The forms. Each is given the weights, the rows, the weight of every assignment in float32 at least (0 where the device
# does not hold the expert) and its expert (then the number of experts held), and returns the sum before it is rounded.


def _gather(weights: dict[str, Any], x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array) -> jax.Array:
    held = weights["expert_gate"].shape[0]
    arrays = weights, x_nd, weight_nk, jnp.minimum(ids_nk, held - 1)
    return lax.platform_dependent(*arrays, cpu=in_turns, tpu=one_by_one, default=reduced)


def one_by_one(weights: dict[str, Any], x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array) -> jax.Array:
    """An assignment at a time, each multiplied by slices of the weights: TPUs read such slices in place."""
    per_row = ids_nk.shape[1]

    def step(a: jax.Array, y_nd: jax.Array) -> jax.Array:
        row = a // per_row
        matrices = jax.tree.map(partial(_slice_of, index=ids_nk.reshape(-1)[a]), _experts(weights))
        x_1d = lax.dynamic_slice_in_dim(x_nd, row, 1)
        h_1f = _gated(*(_product("nd,df->nf", x_1d, matrices[name]) for name in ("expert_gate", "expert_up")))
        more_1d = weight_nk.reshape(-1)[a] * _product("nf,fd->nd", h_1f, matrices["expert_down"], narrow=False)
        return lax.dynamic_update_slice_in_dim(y_nd, lax.dynamic_slice_in_dim(y_nd, row, 1) + more_1d, row, 0)

    start = jnp.zeros(x_nd.shape, weight_nk.dtype)
    return lax.fori_loop(0, ids_nk.size, step, start, unroll=per_row)


def in_turns(weights: dict[str, Any], x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array) -> jax.Array:
    """A few input rows of all chosen matrices at a time: a CPU compiles each turn to one loop that reads them in place.

    On two cores, one to four rows take 0.8 to 1.3 times as long as plain products with as many float32 weights; multiplying
    by slices takes 2 to 3.5 times as long.
    """
    wide, ids_a = weight_nk.dtype, ids_nk.reshape(-1)

    def products(names: tuple[str, ...], x_am: jax.Array, narrow: bool = True) -> list[jax.Array]:
        parts = [_parts(weights[name]) for name in names]
        held, inputs, outputs = parts[0][0].shape
        turn = math.gcd(inputs, TURN)
        by_turn = [values.reshape(held, inputs // turn, turn, outputs) for values, _ in parts]

        def step(i: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
            # Tied to the turn: XLA would convert bfloat16 values of all experts to float32 ahead of the loop.
            i, *matrices = lax.optimization_barrier((i, *by_turn))
            x_ar = lax.dynamic_slice_in_dim(x_am, i * turn, turn, axis=1).astype(wide)
            for at, matrix in enumerate(matrices):
                values_arm = matrix.at[ids_a, i].get(mode="promise_in_bounds").astype(wide)
                sums[at] += sum(x_ar[:, r, None] * values_arm[:, r] for r in range(turn))
            return sums

        sums = lax.fori_loop(0, inputs // turn, step, [jnp.zeros((ids_a.size, outputs), wide) for _ in parts])
        dtype = x_nd.dtype if narrow else wide
        return [_scaled(y_am, None if of is None else of[ids_a], dtype) for y_am, (_, of) in zip(sums, parts, strict=True)]

    h_af = _gated(*products(("expert_gate", "expert_up"), jnp.repeat(x_nd, ids_nk.shape[1], axis=0)))
    (y_ad,) = products(("expert_down",), h_af, narrow=False)
    return jnp.sum(y_ad.reshape(*ids_nk.shape, -1) * weight_nk[..., None], axis=1)


def reduced(weights: dict[str, Any], x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array) -> jax.Array:
    """Sums over gathered matrices instead of products with them: a GPU compiles each to one kernel that stores no copy."""
    wide = weight_nk.dtype
    taken = jax.tree.map(lambda weight: jnp.take(weight, ids_nk, axis=0, mode="clip"), _experts(weights))

    def product(name: str, x_nkm: jax.Array, narrow: bool = True) -> jax.Array:
        values, scale = _parts(taken[name])
        y_nkm = jnp.sum(x_nkm.astype(wide)[..., None] * values.astype(wide), axis=2)
        return _scaled(y_nkm, scale, x_nd.dtype if narrow else wide)

    h_nkf = _gated(*(product(name, x_nd[:, None]) for name in ("expert_gate", "expert_up")))
    return jnp.sum(product("expert_down", h_nkf, narrow=False) * weight_nk[..., None], axis=1)


def _dense(weights: dict[str, Any], x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array) -> jax.Array:
    arrays, whole = (weights, x_nd, weight_nk, ids_nk), partial(_by_blocks, all_experts)
    if SPARSE * ids_nk.shape[1] > weights["expert_gate"].shape[0]:
        return whole(*arrays)
    return lax.platform_dependent(*arrays, cpu=partial(_by_blocks, _gather), default=whole)


def _by_blocks(form: Form, weights: dict[str, Any], x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array) -> jax.Array:
    rows = x_nd.shape[0]
    if rows <= BLOCK:
        return form(weights, x_nd, weight_nk, ids_nk)
    blocks = -(-rows // BLOCK)
    spare = ((0, blocks * BLOCK - rows), (0, 0))
    arrays = [jnp.pad(array, spare).reshape(blocks, BLOCK, -1) for array in (x_nd, weight_nk, ids_nk)]
    y_and = lax.map(lambda block: form(weights, *block), arrays)
    return y_and.reshape(blocks * BLOCK, -1)[:rows]


def all_experts(weights: dict[str, Any], x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array) -> jax.Array:
    """Every row through every expert. The rows are an operand per expert: as one for all, a GPU would copy the weights."""
    held, rows = weights["expert_gate"].shape[0], x_nd.shape[0]
    weight_xn = jnp.sum(jnp.where(ids_nk == jnp.arange(held)[:, None, None], weight_nk, 0), axis=-1)
    x_xnd = jnp.broadcast_to(x_nd, (held, *x_nd.shape))
    h_xnf = _gated(*(_product("xnd,xdf->xnf", x_xnd, weights[name]) for name in ("expert_gate", "expert_up")))
    down, wide = weights["expert_down"], weight_xn.dtype
    if isinstance(down, Quantized):  # its scales differ by expert, so the sum over the experts comes after them
        return jnp.sum(_product("xnf,xfd->xnd", h_xnf, down, narrow=False) * weight_xn[..., None], axis=0)
    h_xnf = (h_xnf.astype(wide) * weight_xn[..., None]).astype(x_nd.dtype)
    h_nz = jnp.swapaxes(h_xnf, 0, 1).reshape(rows, -1)
    return _product("nz,zd->nd", h_nz, down.reshape(h_nz.shape[1], -1), narrow=False)


def _sorted(weights: dict[str, Any], x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array) -> jax.Array:
    return lax.platform_dependent(weights, x_nd, weight_nk, ids_nk, tpu=ragged, default=_dense)


def ragged(weights: dict[str, Any], x_nd: jax.Array, weight_nk: jax.Array, ids_nk: jax.Array) -> jax.Array:
    """Rows in order of their experts, each expert's through its matrices. Assignments to experts elsewhere come last."""
    held, (rows, per_row) = weights["expert_gate"].shape[0], ids_nk.shape
    ids_a = ids_nk.reshape(-1)
    order_a = jnp.argsort(ids_a)
    sizes_x = jnp.sum(ids_a[:, None] == jnp.arange(held), axis=0, dtype=jnp.int32)
    expert_a = jnp.minimum(ids_a[order_a], held - 1)

    def product(x_am: jax.Array, weight: jax.Array | Quantized, narrow: bool = True) -> jax.Array:
        values, scale = _parts(weight)
        wide = weight_nk.dtype
        y_am = lax.ragged_dot(x_am, values.astype(x_am.dtype), sizes_x, preferred_element_type=wide)
        return _scaled(y_am, None if scale is None else scale[expert_a], x_am.dtype if narrow else wide)

    x_ad = x_nd[order_a // per_row]
    h_af = _gated(*(product(x_ad, weights[name]) for name in ("expert_gate", "expert_up")))
    y_ad = product(h_af, weights["expert_down"], narrow=False)
    weight_a = weight_nk.reshape(-1)[order_a]
    y_ad = jnp.where(weight_a[:, None] > 0, y_ad * weight_a[:, None], 0)  # rows outside every group hold anything
    return jnp.sum(y_ad[jnp.argsort(order_a)].reshape(rows, per_row, -1), axis=1)


FORMS = {"gather": _gather, "dense": _dense, "sorted": _sorted}


def _experts(weights: dict[str, Any]) -> dict[str, Any]:
    return {name: weight for name, weight in weights.items() if name != "router"}


def _slice_of(weight: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(weight, index, 0, keepdims=False)


def _gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _product(equation: str, x: jax.Array, weight: jax.Array | Quantized, narrow: bool = True) -> jax.Array:
    """An einsum summed in float32 at least; `narrow` rounds it to the dtype of x. A scale has the weight's outer axes."""
    values, scale = _parts(weight)
    y = jnp.einsum(equation, x, values.astype(x.dtype), preferred_element_type=_wide(x))
    if scale is not None and y.ndim == 3:
        scale = scale[:, None]
    return _scaled(y, scale, x.dtype if narrow else y.dtype)


def _parts(weight: jax.Array | Quantized) -> tuple[jax.Array, jax.Array | None]:
    return (weight.values, weight.scale) if isinstance(weight, Quantized) else (weight, None)


def _scaled(y: jax.Array, scale: jax.Array | None, dtype: Any) -> jax.Array:
    return (y if scale is None else y * scale.astype(y.dtype)).astype(dtype)


def _wide(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _place(spec: Spec, mesh: Any) -> PartitionSpec:
    """Where a weight lies while rows run through it: whole along the model width, however it is stored."""
    return meshes.partition(tuple(None if axis == "embed" else axis for axis in spec.axes), spec.shape, mesh)
