"""The gated delta rule and its convolution over new positions: a chunk, a tree, a chain or one token, as a mask says.

Along a path of positions, with log decays g <= 0 and strengths beta in (0, 1), the state S [e, f] of a head follows

    S <- exp(g) S;   u = beta (v - S^T k);   S <- S + k u^T;   output = S^T q

A pass over a tree needs no state per node. With G_n the sum of g over position n and its ancestors, the recurrence is

    u_n = beta_n (v_n - exp(G_n) S_0^T k_n - sum over strict ancestors m of exp(G_n - G_m) (k_m . k_n) u_m)

This is a triangular system, since ancestors precede their descendants. It is solved by substitution. The power series of
its matrix has the same sum, but loses all digits if keys resemble each other. Passes read the committed state and never
write it. `NewDelta` holds what a commit needs of the new positions.

Source: Gated Delta Networks (arXiv 2412.06464).

Shape suffixes: b batch, t new positions, u new positions as keys, x positions of window and pass, p committed positions,
j inputs of the convolution, c its channels, h value heads, g key heads, r value heads of one key head, e key dim, f value
dim, z = r f.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.typing import DTypeLike

from treeflash_jax.core import sharding
from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.models.backend.indexing import pick
from treeflash_jax.models.config import DeltaSizes

BLOCK = 64  # positions of texts solved together; longer chunks carry the state from block to block

einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


@struct.dataclass
class DeltaState:
    """The state of a layer after the committed positions. Its size does not depend on their number.

    Attributes:
      window_bjc: inputs of the convolution at the last j - 1 positions, oldest first; 0 before the first token. Channels
        are ordered as by `delta_layer.by_shard`.
      state_bgez: states S of the value heads of each key head, side by side; float32 at least. Products with keys read and
        write them in this layout.
    """

    window_bjc: jax.Array
    state_bgez: jax.Array


@struct.dataclass
class NewDelta:
    """The results of a pass with which a commit can compute the state after any path.

    Attributes:
      inputs_btc: inputs of the convolution.
      keys_btge: keys, as they enter the state.
      updates_bthf: the solutions u.
      decay_bth: log decays g.
    """

    inputs_btc: jax.Array
    keys_btge: jax.Array
    updates_bthf: jax.Array
    decay_bth: jax.Array


def init(sizes: DeltaSizes, batch: int, dtype: DTypeLike) -> DeltaState:
    """Returns the state before the first token; `dtype` is the activations' dtype."""
    window_bjc = jnp.zeros((batch, sizes.conv_width - 1, sizes.channels), dtype)
    width = sizes.value_heads // sizes.key_heads * sizes.value_dim
    shape = batch, sizes.key_heads, sizes.key_dim, width
    return DeltaState(window_bjc, jnp.zeros(shape, at_least_float32(dtype)))


def convolve(
    x_btc: jax.Array,
    window_bjc: jax.Array,
    weight_cj: jax.Array,
    positions_bt: jax.Array,
    mask_btu: jax.Array,
    length_b: jax.Array,
) -> jax.Array:
    """Returns the depthwise causal convolution along each position's path, float32 at least.

    The last column of the weight multiplies the position itself, the column before it its parent, and so on.

    Args:
      length_b: number of committed positions; the window holds the last of them.
    """
    before, num_inputs = window_bjc.shape[1], weight_cj.shape[1]
    wide = at_least_float32(x_btc.dtype)
    positions_bt = jnp.broadcast_to(positions_bt, x_btc.shape[:2])
    committed_bx = jnp.asarray(length_b)[:, None] - before + jnp.arange(before)
    positions_bx = jnp.concatenate([jnp.broadcast_to(committed_bx, (x_btc.shape[0], before)), positions_bt], axis=1)
    sees_btj = jnp.broadcast_to(mask_btu[:, :, :1], (*mask_btu.shape[:2], before))
    is_visible_btx = jnp.concatenate([sees_btj, mask_btu], axis=2)
    steps_btx = jnp.where(is_visible_btx, positions_bt[:, :, None] - positions_bx[:, None], num_inputs)
    is_ancestor_btjx = steps_btx[:, :, None] == num_inputs - 1 - jnp.arange(num_inputs)[:, None]
    inputs_bxc = jnp.concatenate([window_bjc.astype(x_btc.dtype), x_btc], axis=1)
    ancestors_btjc = pick(inputs_bxc, jnp.argmax(is_ancestor_btjx, axis=-1))
    weight_btjc = jnp.where(jnp.any(is_ancestor_btjx, axis=-1)[..., None], weight_cj.T.astype(wide), 0)
    return jnp.sum(ancestors_btjc.astype(wide) * weight_btjc, axis=2)


def attend(
    q_btge: jax.Array,
    k_btge: jax.Array,
    v_bthf: jax.Array,
    decay_bth: jax.Array,
    beta_bth: jax.Array,
    state_bgez: jax.Array,
    mask_btu: jax.Array,
    is_tree: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns outputs and updates u of the new positions, [b, t, h, f] each.

    A key head serves h / g consecutive value heads. A position sees the state if it sees the first new position; positions
    of other texts in the same chunk do not. Texts of more than BLOCK positions run block by block, which carries the state.

    Args:
      q_btge, k_btge: normed queries and keys. Queries are already scaled.
      decay_bth: log decays, at most 0.
      beta_bth: strengths of the updates.
      mask_btu: True if new position t is position u or descends from it; ancestors precede their descendants.
      is_tree: whether the positions are a tree, which is solved whole; otherwise they are texts, one after the other.
    """
    batch, size = mask_btu.shape[:2]
    if is_tree or size <= BLOCK:
        return _attend_block(q_btge, k_btge, v_bthf, decay_bth, beta_bth, state_bgez, mask_btu, mask_btu[:, :, 0])[:2]
    blocks = -(-size // BLOCK)
    padding = blocks * BLOCK - size

    def by_block(x_bt: jax.Array) -> jax.Array:
        x_bt = jnp.pad(x_bt, ((0, 0), (0, padding)) + ((0, 0),) * (x_bt.ndim - 2))
        return jnp.moveaxis(x_bt.reshape(batch, blocks, BLOCK, *x_bt.shape[2:]), 1, 0)

    def run(state_bgez: jax.Array, block: tuple) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        index, mask_btu, *arrays = block
        mask_btu = jnp.pad(mask_btu, ((0, 0), (0, 0), (0, padding)))
        sees_bt1 = lax.dynamic_slice_in_dim(mask_btu, jnp.maximum(index * BLOCK - 1, 0), 1, axis=2)
        mask_btu = lax.dynamic_slice_in_dim(mask_btu, index * BLOCK, BLOCK, axis=2)
        out, updates, state_bgez = _attend_block(*arrays, state_bgez, mask_btu, sees_bt1[:, :, 0])
        return state_bgez, (out, updates)

    arrays = (mask_btu, q_btge, k_btge, v_bthf, decay_bth, beta_bth)
    _, results = lax.scan(run, state_bgez, (jnp.arange(blocks), *map(by_block, arrays)))
    joined = (jnp.moveaxis(x, 0, 1).reshape(batch, blocks * BLOCK, *x.shape[3:])[:, :size] for x in results)
    return tuple(joined)


def on_each_device(
    run: Callable[..., Any],
    q_btge: jax.Array,
    k_btge: jax.Array,
    v_bthf: jax.Array,
    decay_bth: jax.Array,
    beta_bth: jax.Array,
    state_bgez: jax.Array,
    mask_btu: jax.Array,
) -> Any:
    """Runs a kernel with the arguments of `attend` on every device of a mesh, for the device's sequences and key heads."""
    sizes = batch, _, groups, _ = k_btge.shape
    heads, per_head = (("batch", None, "heads", None), sizes), (("batch", None, "heads"), sizes[:3])
    state = ("batch", "heads", None, None), (batch, groups, 1, 1)
    layouts = heads, heads, heads, per_head, per_head, state, (("batch", None, None), mask_btu.shape)
    return sharding.over_mesh(run, (q_btge, k_btge, v_bthf, decay_bth, beta_bth, state_bgez, mask_btu), layouts)


def _attend_block(
    q_btge: jax.Array,
    k_btge: jax.Array,
    v_bthf: jax.Array,
    decay_bth: jax.Array,
    beta_bth: jax.Array,
    state_bgez: jax.Array,
    mask_btu: jax.Array,
    sees_bt: jax.Array,
):
    """Returns outputs, updates, and the state after the last position.

    Args:
      sees_bt: whether a position sees the state; False for a text that begins after it.
    """
    (batch, size, groups, _), heads = q_btge.shape, v_bthf.shape[2]
    q_btge = q_btge.astype(state_bgez.dtype)
    k_btge = k_btge.astype(state_bgez.dtype)
    v_bthf = v_bthf.astype(state_bgez.dtype)
    decay_bth = decay_bth.astype(state_bgez.dtype)
    beta_bth = beta_bth.astype(state_bgez.dtype)

    def read(x_btge: jax.Array) -> jax.Array:
        """Returns S_0^T x with all decays up to each position, [b, h, t, f]."""
        read_bgtrf = einsum("bgez,btge->bgtz", state_bgez, x_btge).reshape(batch, groups, size, heads // groups, -1)
        read_bhtf = jnp.swapaxes(read_bgtrf, 2, 3).reshape(batch, heads, size, -1)
        return read_bhtf * jnp.where(sees_bt[:, None], jnp.exp(total_bht), 0)[..., None]

    def faded(scores_bgtu: jax.Array) -> jax.Array:
        """Returns products with keys of ancestors, multiplied by the decays in between, [b, h, t, u]."""
        return jnp.repeat(scores_bgtu, heads // groups, axis=1) * fade_bhtu

    total_bht = einsum("btu,buh->bht", mask_btu.astype(decay_bth.dtype), decay_bth)
    gap_bhtu = total_bht[:, :, :, None] - total_bht[:, :, None]
    fade_bhtu = jnp.exp(jnp.where(mask_btu[:, None], gap_bhtu, -jnp.inf))
    beta_bht1 = jnp.swapaxes(beta_bth, 1, 2)[..., None]
    updates_bhtf = beta_bht1 * (jnp.swapaxes(v_bthf, 1, 2) - read(k_btge))
    if size > 1:
        system_bhtu = beta_bht1 * faded(einsum("btge,buge->bgtu", k_btge, k_btge))
        updates_bhtf = lax.linalg.triangular_solve(
            system_bhtu, updates_bhtf, left_side=True, lower=True, unit_diagonal=True
        )
    out_bhtf = read(q_btge) + einsum("bhtu,bhuf->bhtf", faded(einsum("btge,buge->bgtu", q_btge, k_btge)), updates_bhtf)
    out_bthf, updates_bthf = jnp.swapaxes(out_bhtf, 1, 2), jnp.swapaxes(updates_bhtf, 1, 2)
    kept_bh = jnp.where(sees_bt[:, -1:], jnp.exp(total_bht[:, :, -1]), 0)
    return out_bthf, updates_bthf, _add(state_bgez, kept_bh, k_btge, updates_bthf, jnp.swapaxes(fade_bhtu[:, :, -1], 1, 2))


def _add(state_bgez: jax.Array, kept_bh: jax.Array, k_btge: jax.Array, updates_bthf: jax.Array, fade_bth: jax.Array):
    """Returns kept * S + sum over t of fade * k u^T."""
    batch, size, groups = k_btge.shape[:3]
    faded_btgz = (updates_bthf * fade_bth[..., None]).reshape(batch, size, groups, -1)
    kept_bgz = jnp.repeat(kept_bh, updates_bthf.shape[-1], axis=1).reshape(batch, groups, -1)
    return kept_bgz[:, :, None] * state_bgez + einsum("btge,btgz->bgez", k_btge, faded_btgz)


def commit(state: DeltaState, new: NewDelta, count_b: jax.Array, path_bp: jax.Array | None = None) -> DeltaState:
    """Returns the state after the first `count_b` of the new positions, in order, or the first `count_b` of `path_bp`.

    These positions follow each other along one path. Other positions of the pass have no effect.
    """
    if path_bp is not None:
        new = jax.tree.map(lambda x_bt: pick(x_bt, path_bp), new)
    window_bxc = jnp.concatenate([state.window_bjc, new.inputs_btc.astype(state.window_bjc.dtype)], axis=1)
    last_bj = count_b[:, None] + jnp.arange(state.window_bjc.shape[1])
    window_bjc = pick(window_bxc, last_bj)
    size = new.decay_bth.shape[1]
    is_kept_bt1 = (jnp.arange(size) < count_b[:, None])[..., None]
    decay_bth = jnp.where(is_kept_bt1, new.decay_bth, 0)
    # Sums of decays start at the last position: differences between sums that start at the first one would lose digits.
    later_bth = einsum("tu,buh->bth", jnp.triu(jnp.ones((size, size), decay_bth.dtype), 1), decay_bth)
    fade_bth = jnp.where(is_kept_bt1, jnp.exp(later_bth), 0)
    kept_bh = jnp.exp(jnp.sum(decay_bth, axis=1))
    return DeltaState(window_bjc, _add(state.state_bgez, kept_bh, new.keys_btge, new.updates_bthf, fade_bth))
