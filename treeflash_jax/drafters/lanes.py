"""Drafters that run a network once per level of a tree, for a few nodes of each level. These nodes are called lanes.

A block drafter knows all levels after one pass. EAGLE-3 or a language model must be run again below every token that it
proposes. `LaneExpander` does this for any tree builder. A lane is a node with the path above it. Keys and values of the
path are in a scratch, so no cache is written before the tree is verified.

Such a drafter provides a function `step`. Its `draft` returns a `LaneExpander` with this step (see `LaneDrafter.expand`):

    step(shared, level) -> LaneState

`shared` is a pytree that all lanes read, such as `SharedInputs`: weights, the cache of the committed text, temperatures.
`level` (`Level`) has a token per lane, and the carry of the step above. The step runs its network over these w tokens.
Their queries see the committed prefix, the tokens above on their paths, and themselves. The step returns (`LaneState`) the
children of each token, the carry, and the keys and values to keep. `level.seen_bwx` is the mask for `tree_attention`, and
`level.join` makes its keys and values:

    k_bxke = level.join(level.earlier["keys"], k_bwke)     # `earlier` has the structure of LaneState.kv
    mixed_bwhe = tree_attention(q_bwhe, k_bxke, v_bxke, level.seen_bwx, prefix, length_b)

If a network keeps no keys and values of lanes, `scratch` and LaneState.kv are ().

Shape suffixes: b batch, w lanes, c children kept, i scratch slots of a lane (one per level that is run), x = w i + w keys
that tokens may see, n layers of an array, k key/value heads, s cache slots, e head dim.

Source: EAGLE-2 (arXiv 2406.16858) and EAGLE-3 (arXiv 2503.01840), tree drafting.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.typing import DTypeLike

from treeflash_jax.core import sharding
from treeflash_jax.core.checks import expect
from treeflash_jax.core.parameters import Params, Spec, is_spec
from treeflash_jax.drafters.ngram_join import join_ngrams
from treeflash_jax.drafters.protocol import ContextState, Drafter, Inputs
from treeflash_jax.models import caches
from treeflash_jax.models.caches import Cache
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.kv_cache import LayerKV
from treeflash_jax.trees import Expander


@struct.dataclass
class Level:
    """One token per lane: the input of a step.

    Attributes:
      depth: depth of the tokens; 0 for the anchor's children.
      carry: the carry of the step above, each array [b, w, ...].
      earlier: keys and values of the levels above, each array [b, w i, ...], ordered by lane, then by level.
      seen_bwx: True if a token sees an earlier token (the first w i entries) or one of the w tokens (only itself).
    """

    token_bw: jax.Array
    depth: jax.Array
    position_bw: jax.Array
    carry: Any
    earlier: Any
    seen_bwx: jax.Array

    def join(self, earlier_bx: jax.Array, new_bw: jax.Array) -> jax.Array:
        """Returns keys or values [b, x, ...]: first of earlier tokens, then of this level."""
        return jnp.concatenate([earlier_bx, new_bw.astype(earlier_bx.dtype)], axis=1)


@struct.dataclass
class SharedInputs:
    """Inputs of a step that are the same at every level.

    Attributes:
      params: weights of the drafter.
      tables: arrays of the verifier that the drafter reads, by name.
      context: committed positions.
      temperature_b: drafting temperatures.
    """

    params: Params
    tables: Params
    context: Any
    temperature_b: jax.Array


@struct.dataclass
class LaneState:
    """State of every lane after a step.

    Attributes:
      carry: any arrays [b, w, ...], such as hidden states.
      kv: keys and values of the step's tokens, each array [b, w, ...] as `LaneExpander.scratch` specifies.
      tokens_bwc: children, likeliest first, as ids of the verifier.
      log_probs_bwc: log-probabilities of the children, at most 0; -inf for no child.
    """

    carry: Any
    kv: Any
    tokens_bwc: jax.Array
    log_probs_bwc: jax.Array


Step = Callable[[Any, Level], LaneState]


@struct.dataclass
class LaneExpander(Expander):
    """An `Expander` whose `follow_token` runs a network; see the module's docstring.

    The network is not run below the deepest level, whose nodes offer no children.

    Attributes:
      shared: pytree that the step reads besides its level, such as `SharedInputs`.
      position_b: position of the first drafted token, which is the length of the drafter's context.
      first: children of the anchor, in a single lane, [b, 1, ...]; its `kv` is not read.
      step: the step; static. Equal steps share a program.
      scratch: tree with a Spec for each array of LaneState.kv: shape and axes without batch and lanes, and dtype.
      num_depths: deepest level that is drafted; static.
    """

    shared: Any
    position_b: jax.Array
    first: LaneState
    step: Step = struct.field(pytree_node=False)
    scratch: Any = struct.field(pytree_node=False)
    num_depths: int = struct.field(pytree_node=False)

    def start(self, width: int) -> LaneState:
        """Returns the children of the anchor in every lane, and an empty scratch."""
        shape = self.position_b.shape[0], width

        def repeat(x_b1: jax.Array) -> jax.Array:
            return jnp.broadcast_to(x_b1, (*shape, *x_b1.shape[2:]))

        def empty(spec: Spec) -> jax.Array:
            return jnp.zeros((*shape, self.num_depths - 1, *spec.shape), spec.dtype)

        return jax.tree.map(repeat, self.first.replace(kv=())).replace(kv=jax.tree.map(empty, self.scratch))

    def children(self, depth: jax.Array, state_bw: LaneState) -> tuple[jax.Array, jax.Array]:
        return state_bw.tokens_bwc, state_bw.log_probs_bwc

    def follow_token(self, depth: jax.Array, state_bw: LaneState, token_bw: jax.Array) -> LaneState:
        """Runs the network for one token in each lane."""
        if self.num_depths == 1:
            return state_bw
        with jax.named_scope("level"):
            return lax.cond(depth + 1 < self.num_depths, self._run, lambda depth, same, _: same, depth, state_bw, token_bw)

    def _run(self, depth: jax.Array, state_bw: LaneState, token_bw: jax.Array) -> LaneState:
        width, slots = token_bw.shape[1], jnp.arange(self.num_depths - 1)
        self_ww = jnp.eye(width, dtype=bool)
        earlier_wx = (self_ww[:, :, None] & (slots < depth)).reshape(width, -1)
        seen_wx = jnp.concatenate([earlier_wx, self_ww], axis=1)
        level = Level(
            token_bw=token_bw,
            depth=depth,
            position_bw=jnp.broadcast_to(self.position_b[:, None] + depth, token_bw.shape),
            carry=state_bw.carry,
            earlier=jax.tree.map(lambda x_bwi: x_bwi.reshape(x_bwi.shape[0], -1, *x_bwi.shape[3:]), state_bw.kv),
            seen_bwx=jnp.broadcast_to(seen_wx, (token_bw.shape[0], *seen_wx.shape)),
        )
        below = self.step(self.shared, level)

        def keep(spec: Spec, scratch_bwi: jax.Array, new_bw: jax.Array) -> jax.Array:
            new_bw1 = new_bw[:, :, None].astype(scratch_bwi.dtype)
            scratch_bwi = lax.dynamic_update_slice_in_dim(scratch_bwi, new_bw1, depth, axis=2)
            return sharding.constrain(scratch_bwi, ("batch", None, None, *spec.axes))

        kv = jax.tree.map(keep, self.scratch, state_bw.kv, below.kv, is_leaf=is_spec)
        same = jax.tree.map(lambda new, old: new.astype(old.dtype), below.replace(kv=()), state_bw.replace(kv=()))
        return same.replace(kv=kv)


def scratch_specs(context: Cache) -> tuple[tuple[Spec, Spec], ...]:
    """Returns `LaneExpander.scratch` for a network with this cache, in the structure of `decoder.Output.new`."""

    def specs(layer: LayerKV | None) -> tuple[Spec, Spec] | None:
        if layer is None:  # the layer reads another layer's keys and values
            return None
        heads, size = layer.keys_bnkse.shape[2], layer.keys_bnkse.shape[4]
        spec = Spec((heads, size), ("kv_heads", None), dtype=layer.keys_bnkse.dtype)
        return spec, spec

    return tuple(map(specs, context.layers))


def extended(state: ContextState, new: tuple[Any, ...], hidden_b1d: jax.Array, count_b: jax.Array) -> ContextState:
    """Returns the state after the first `count_b` of the new positions.

    Args:
      new: `decoder.Output.new` of the drafter's network.
      hidden_b1d: hidden state at the last of these positions; not read if `count_b` is 0.
    """
    hidden_bd = hidden_b1d[:, 0]
    return state.replace(
        context=caches.commit(state.context, new, caches.count_after(count_b, hidden_bd[:, 0])),
        hidden_bd=jnp.where((count_b > 0)[:, None], hidden_bd, state.hidden_bd).astype(state.hidden_bd.dtype),
    )


@dataclass(frozen=True, kw_only=True)
class LaneDrafter(Drafter):
    """A drafter whose network runs once per level. Its state is a `ContextState` with a hidden state, or has no cache.

    A subclass also has `draft_vocab_size`, the number of tokens that a step scores; 0 or the verifier's size: all.

    Attributes:
      layers: sizes of the network; `vocab_size` is the verifier's.
      children: number of likeliest next tokens kept below every token.
      ngrams: number of matches of the text's last tokens whose continuations join the tree (`ngram_join`).
    """

    settings: ClassVar[tuple[str, ...]] = ("children", "depths", "ngrams")
    reads_tokens: ClassVar[bool] = True

    layers: ModelConfig
    children: int = 16
    ngrams: int = 0

    @property
    def head_dims(self) -> tuple[int, ...]:
        return self.layers.head_dims

    @property
    def max_positions(self) -> int:
        return self.layers.max_positions

    def configured(self, *, depths: int | None = None, **settings: Any) -> Self:
        drafter = replace(self, num_depths=depths or self.num_depths, **settings)
        most = self.draft_vocab_size or self.layers.vocab_size
        expect(drafter.children <= most, "children", drafter.children, f"1 to {most} (the drafter's vocabulary)")
        return drafter

    def init(self, batch: int, capacity: int, dtype: DTypeLike) -> ContextState:
        # Sessions cut the context, and `init` is not told whether there is one.
        context = caches.allocate(self.layers, batch, capacity, dtype, can_cut=True)
        return ContextState(context, jnp.zeros((batch, self.layers.hidden_size), dtype))

    def expand(self, inputs: Inputs, shared: SharedInputs, step: Any) -> Expander:
        """Returns the children of the anchor, and the network that continues below them.

        Args:
          step: a `Step` with a method `offer(shared, hidden_bwd, kv) -> LaneState`, which returns the children below hidden
            states.
        """
        context = inputs.state.context
        first = step.offer(shared, inputs.state.hidden_bd[:, None], ())
        scratch = scratch_specs(context)
        lanes = LaneExpander(shared, context.length_b, first, step=step, scratch=scratch, num_depths=inputs.depths)
        return join_ngrams(lanes, inputs, self.ngrams)
