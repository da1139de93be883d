"""Drafters that run a network once per level of a tree: a row of the network for each of a few nodes, the lanes.

A block drafter knows all levels after one pass. EAGLE-3 or a language model has to be run again below every token that it
proposes. `LaneExpander` does this for any tree builder: a lane is one node with the path above it, whose keys and values
lie in a scratch of the lane's own, so that no cache is written before the verifier has judged the tree.

What a drafter provides is one function, its `step`:

    step(shared, row) -> Below

`shared` is a pytree that all lanes read: weights, the cache of the committed text, temperatures. `row` (`Row`) is one token
per lane with what was carried down to it. The step runs its network over these w rows, whose queries see the committed
prefix, the rows above on their own paths and themselves, and returns (`Below`) the children of each row, what is carried
down to them, and the keys and values to be kept. `row.seen_bwx` is the mask that `tree_attention` takes, and
`row.joined(earlier, new)` its keys or values:

    k_bxke = row.joined(row.earlier["keys"], k_bwke)     # `earlier` has the structure of Below.rows
    mixed_bwhe = tree_attention(q_bwhe, k_bxke, v_bxke, row.seen_bwx, prefix, length_b)

Networks without attention have nothing to keep: `kept` and Below.rows are then ().

The last stage of such a drafter returns the expander (EAGLE-3 and language models have this one stage only, "draft"):

    LaneExpander(
        shared, state.context.length_b, first, step=step, kept=kept_of(state.context), num_depths=inputs.depths
    )

`first` is a Below of one lane [b, 1, ...]: what follows the anchor. Its `rows` are not read.
`children_of` makes the children of rows of hidden states; it maps the ids of a draft vocabulary to the verifier's.

Shape suffixes: b batch, w lanes, c children kept, i scratch slots of a lane (one per level that is run), x = w i + w keys
that rows may see, k key/value heads, e head dim, d model, v vocabulary, z draft vocabulary.

Source: EAGLE-2 (arXiv 2406.16858) and EAGLE-3 (arXiv 2503.01840), tree drafting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treeflash_jax import mesh as meshes
from treeflash_jax import vocab
from treeflash_jax.params import Spec
from treeflash_jax.trees import BUILDERS
from treeflash_jax.verifiers.cache import KVCache


@struct.dataclass
class Row:
    """One row of the network in every lane.

    Attributes:
      carry: what the step above left, each array [b, w, ...].
      earlier: keys and values of earlier rows, each array [b, w i, ...]: lane by lane, level by level.
      seen_bwx: True where a row sees an earlier row (the first w i) or one of the w rows (itself).
    """

    token_bw: jax.Array
    position_bw: jax.Array
    carry: Any
    earlier: Any
    seen_bwx: jax.Array

    def joined(self, earlier_bx: jax.Array, new_bw: jax.Array) -> jax.Array:
        """Keys or values [b, x, ...] of earlier rows followed by those of the rows themselves."""
        return jnp.concatenate([earlier_bx, new_bw.astype(earlier_bx.dtype)], axis=1)


@struct.dataclass
class Below:
    """What a step leaves for the level below.

    Attributes:
      carry: any arrays [b, w, ...], such as hidden states.
      rows: keys and values of the rows, each array [b, w, ...] as `kept` says.
      tokens_bwc: children, likeliest first: ids of the verifier.
      log_probs_bwc: their log-probabilities, at most 0; -inf where there is none.
    """

    carry: Any
    rows: Any
    tokens_bwc: jax.Array
    log_probs_bwc: jax.Array


Step = Callable[[Any, Row], Below]


@dataclass(frozen=True, kw_only=True)
class LaneSettings:
    """Static sizes of a draft in lanes: what `choose` of such a drafter returns.

    Attributes:
      rows: that the network runs in a level: the lanes of best-first search, 1 of a chain, all nodes of a sampled tree.
    """

    children: int
    depths: int
    rows: int

    @staticmethod
    def of(config: Any, options: Any) -> LaneSettings:
        """Of a call with these options (`settings.GenerateConfig`), with a drafter of this config."""
        builder = BUILDERS[options.builder or "best-first"] if options.builder != "none" else None
        nodes = config.num_nodes if options.nodes in (None, "auto") else options.nodes
        if builder is None or builder.is_chain:
            rows = 1
        else:
            rows = nodes if builder.draws else min(options.lanes or config.lanes or nodes, max(nodes - 1, 1))
        return LaneSettings(children=options.children, depths=config.num_depths, rows=rows)


@struct.dataclass
class LaneExpander:
    """An `Expander` whose `follow` runs a network; see the module.

    The network is not run below the deepest level, whose nodes offer no children.

    Attributes:
      shared: what the step reads besides its rows.
      position_b: position of the first drafted token's row: the length of the drafter's own context.
      first: what follows the anchor, of one lane.
      step: static; equal steps share a program.
      kept: a tree of Spec, the arrays that Below.rows has for one row: shape and axes without batch and lanes, and dtype.
      num_depths: the deepest level drafted; static.
    """

    shared: Any
    position_b: jax.Array
    first: Below
    step: Step = struct.field(pytree_node=False)
    kept: Any = struct.field(pytree_node=False)
    num_depths: int = struct.field(pytree_node=False)

    @property
    def is_table(self) -> bool:
        return False

    def start(self, width: int) -> Below:
        """The children of the anchor in every lane, and an empty scratch."""
        shape = self.position_b.shape[0], width

        def wide(x_b1: jax.Array) -> jax.Array:
            return jnp.broadcast_to(x_b1, (*shape, *x_b1.shape[2:]))

        def empty(spec: Spec) -> jax.Array:
            return jnp.zeros((*shape, self.num_depths - 1, *spec.shape), spec.dtype)

        return jax.tree.map(wide, self.first.replace(rows=())).replace(rows=jax.tree.map(empty, self.kept))

    def children(self, depth: jax.Array, state_bw: Below) -> tuple[jax.Array, jax.Array]:
        return state_bw.tokens_bwc, state_bw.log_probs_bwc

    def continues(self, depth: jax.Array, state_bw: Below) -> jax.Array:
        return jnp.broadcast_to(depth + 1 < self.num_depths, state_bw.tokens_bwc.shape)

    def follow(self, depth: jax.Array, state_bw: Below, child_bw: jax.Array) -> Below:
        """Runs the network for the chosen child of each lane."""
        if self.num_depths == 1:
            return state_bw
        with jax.named_scope("level"):
            return lax.cond(
                depth + 1 < self.num_depths, self._level, lambda depth, same, _: same, depth, state_bw, child_bw
            )

    def _level(self, depth: jax.Array, state_bw: Below, child_bw: jax.Array) -> Below:
        width, slots = child_bw.shape[1], jnp.arange(self.num_depths - 1)
        own_ww = jnp.eye(width, dtype=bool)
        earlier_wx = (own_ww[:, :, None] & (slots < depth)).reshape(width, -1)
        seen_wx = jnp.concatenate([earlier_wx, own_ww], axis=1)
        row = Row(
            token_bw=jnp.take_along_axis(state_bw.tokens_bwc, child_bw[..., None], axis=2)[..., 0],
            position_bw=jnp.broadcast_to(self.position_b[:, None] + depth, child_bw.shape),
            carry=state_bw.carry,
            earlier=jax.tree.map(lambda x_bwi: x_bwi.reshape(x_bwi.shape[0], -1, *x_bwi.shape[3:]), state_bw.rows),
            seen_bwx=jnp.broadcast_to(seen_wx, (child_bw.shape[0], *seen_wx.shape)),
        )
        below = self.step(self.shared, row)

        def keep(spec: Spec, scratch_bwi: jax.Array, new_bw: jax.Array) -> jax.Array:
            new_bw1 = new_bw[:, :, None].astype(scratch_bwi.dtype)
            scratch_bwi = lax.dynamic_update_slice_in_dim(scratch_bwi, new_bw1, depth, axis=2)
            return meshes.constrain(scratch_bwi, ("batch", None, None, *spec.axes))

        kept = jax.tree.map(keep, self.kept, state_bw.rows, below.rows, is_leaf=lambda x: isinstance(x, Spec))
        same = jax.tree.map(lambda new, old: new.astype(old.dtype), below.replace(rows=()), state_bw.replace(rows=()))
        return same.replace(rows=kept)


def kept_of(context: KVCache) -> tuple[tuple[tuple[Spec, Spec], ...], ...]:
    """`LaneExpander.kept` of a network with this cache: keys and values by group and layer, as `cache.NewRows`."""

    def one(slots_bkse: jax.Array) -> Spec:
        heads, _, size = slots_bkse.shape[1:]
        return Spec((heads, size), ("kv_heads", None), dtype=slots_bkse.dtype)

    return tuple(tuple((one(layer.keys_bkse), one(layer.values_bkse)) for layer in group) for group in context.groups)


def children_of(
    table_vd: jax.Array,
    hidden_bwd: jax.Array,
    children: int,
    temperature_b: jax.Array,
    ids_z: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The likeliest tokens after each row, and their log-probabilities, [b, w, c] each.

    Args:
      hidden_bwd: what it multiplies, after any norm.
      children: how many; all tokens where the vocabulary has fewer.
      temperature_b: of the law, above 0.
      ids_z: the verifier's ids of a draft vocabulary; None: the table's rows are the verifier's tokens.
    """
    kept = min(children, table_vd.shape[0])
    tokens_bwc, log_probs_bwc = vocab.likeliest(table_vd, hidden_bwd, kept, temperature_b)
    tokens_bwc = tokens_bwc if ids_z is None else ids_z[tokens_bwc]
    return tokens_bwc.astype(jnp.int32), log_probs_bwc
