"""EAGLE-3 drafters: one decoder layer, run once per level of the tree on what the verifier saw and what was drafted.

This module is what `drafters.Drafter` describes; layer.py has the maths of the layer. Row t of the layer pairs the features
of the verifier at position t with the token at t + 1, so after a commit its context is as long as the verifier's cache, and
the output of its last row is what the first drafted token is read from.

Shape suffixes: b batch, t rows, w lanes, j tapped layers x verifier width, d drafter width, x keys that a lane may see.

Source: EAGLE-3 (arXiv 2503.01840); EAGLE-2 (arXiv 2406.16858) for the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from treeflash_jax import devices
from treeflash_jax.checks import quoted
from treeflash_jax.drafters.eagle3 import layer
from treeflash_jax.drafters.eagle3.config import EagleConfig
from treeflash_jax.drafters.eagle3.costs import extend_work, work
from treeflash_jax.drafters.eagle3.layer import specs
from treeflash_jax.drafters.inputs import Inputs
from treeflash_jax.drafters.lanes import Below, LaneExpander, LaneSettings, Row, children_of, kept_of
from treeflash_jax.verifiers import cache as caches
from treeflash_jax.verifiers.attention import tree_attention

OPTIONS = ("depths", "children")
READS_TOKENS = True
DIALECT = "speculators"


@struct.dataclass
class EagleState:
    """What the drafter remembers between rounds.

    Attributes:
      context: keys and values of its one layer.
      hidden_bd: the layer's output at the last row.
    """

    context: caches.KVCache
    hidden_bd: jax.Array

    def axes(self) -> EagleState:
        return EagleState(context=caches.axes(self.context), hidden_bd=("batch", None))

    def grow(self, capacity: int) -> EagleState:
        return self.replace(context=caches.grow(self.context, capacity))

    def cut(self, length_b: jax.Array) -> EagleState:
        return self.replace(context=self.context.cut(length_b))


def choose(config: EagleConfig, options: Any) -> tuple[EagleConfig, LaneSettings]:
    """The config and the settings of a draft that a user's options ask for; see `drafters.Drafter`.

    Raises:
      ValueError: more tokens than can be drafted.
    """
    children = options.children
    if children > config.draft_vocab_size:
        raise ValueError(f"got children {quoted(children)}, expected 1 to {config.draft_vocab_size} (the draft vocabulary)")
    sizes = replace(config, num_depths=options.depths or config.num_depths, attention=options.attention)
    return sizes, LaneSettings.of(sizes, options)


def init(config: EagleConfig, batch: int, capacity: int, dtype: Any) -> EagleState:
    """The state before any context, with room for `capacity` positions."""
    hidden_bd = jnp.zeros((batch, config.layers.hidden_size), dtype)
    return EagleState(context=caches.allocate(config.layers, batch, capacity, dtype), hidden_bd=hidden_bd)


def extend(
    params: Any,
    tables: Any,
    config: EagleConfig,
    state: EagleState,
    features_btj: jax.Array,
    tokens_bt: jax.Array,
    count_b: jax.Array,
) -> EagleState:
    """Adds rows of committed positions: keys and values of all of them, the layer's output of the last real one alone.

    Args:
      tables: the verifier's weights, of which the embedding is read where the drafter has none.
      features_btj: verifier features at consecutive positions, the first following those of the context.
      tokens_bt: the token that follows each of these positions.
      count_b: how many of the rows are real; 0 leaves a sequence as it was.
    """
    prefix, length_b, rows = state.context.groups[0][0], state.context.length_b, features_btj.shape[1]
    attention = config.attention or devices.here().attention(features_btj.dtype)
    carried_btd = layer.fuse(params, config, features_btj)
    read_btr = layer.read(params, tables, config, tokens_bt, carried_btd)
    positions_bt = length_b[:, None] + jnp.arange(rows)
    k_btke, v_btke = layer.keys_values(params, config, read_btr, layer.rotations(config, positions_bt))

    last_b1 = jnp.maximum(count_b - 1, 0)[:, None]
    read_b1r, carried_b1d = (jnp.take_along_axis(x_bt, last_b1[..., None], axis=1) for x_bt in (read_btr, carried_btd))
    seen_b1t = jnp.arange(rows) <= last_b1[..., None]
    table = layer.rotations(config, length_b[:, None] + last_b1)

    def attend(q_b1he: jax.Array) -> jax.Array:
        return tree_attention(q_b1he, k_btke, v_btke, seen_b1t, prefix, length_b, implementation=attention)

    hidden_bd = layer.hidden(params, config, read_b1r, carried_b1d, table, attend)[:, 0]
    # Always all of them: it makes stores wait for the attention, see `append`.
    kept_b = jnp.where(jnp.isnan(hidden_bd[:, 0]), 0, count_b)
    return EagleState(
        context=caches.append(state.context, (((k_btke, v_btke),),), kept_b),
        hidden_bd=jnp.where((count_b > 0)[:, None], hidden_bd, state.hidden_bd).astype(state.hidden_bd.dtype),
    )


def draft(inputs: Inputs, _: None) -> LaneExpander:
    """The tokens after the anchor, and how to go on below each: one pass of the layer per level."""
    params, config, settings = inputs.params, inputs.config, inputs.settings
    embed = {} if config.own_embedding else {"embed": inputs.tables["embed"]}
    shared = params, embed, inputs.state.context, inputs.temperature_b
    hidden_b1d = inputs.state.hidden_bd[:, None]
    step = _step(config, settings.children, inputs.attention)
    return LaneExpander(
        shared,
        inputs.state.context.length_b,
        _below(shared, config, settings.children, hidden_b1d, ()),
        step=step,
        kept=kept_of(inputs.state.context),
        num_depths=inputs.depths,
    )


def stages(config: EagleConfig) -> Mapping[str, Callable[[Inputs, Any], Any]]:
    """Reading the first tokens; the levels below belong to the tree."""
    return {"draft": draft}


@cache
def _step(config: EagleConfig, children: int, attention: str) -> Callable[[Any, Row], Below]:
    """One step per setting: equal steps share a program."""
    return partial(_level, config=config, children=children, attention=attention)


def _level(shared: Any, row: Row, *, config: EagleConfig, children: int, attention: str) -> Below:
    """One pass of the layer over a token per lane, each carrying the output of the level above."""
    params, tables, context, _ = shared
    carried_bwd = layer.feed_back(params, config, row.carry)
    read_bwr = layer.read(params, tables, config, row.token_bw, carried_bwd)
    table = layer.rotations(config, row.position_bw)
    k_bwke, v_bwke = layer.keys_values(params, config, read_bwr, table)
    [[[earlier_k, earlier_v]]] = row.earlier
    keys_bxke, values_bxke = row.joined(earlier_k, k_bwke), row.joined(earlier_v, v_bwke)

    def attend(q_bwhe: jax.Array) -> jax.Array:
        prefix, length_b = context.groups[0][0], context.length_b
        return tree_attention(q_bwhe, keys_bxke, values_bxke, row.seen_bwx, prefix, length_b, implementation=attention)

    hidden_bwd = layer.hidden(params, config, read_bwr, carried_bwd, table, attend)
    return _below(shared, config, children, hidden_bwd, (((k_bwke, v_bwke),),))


def _below(shared: Any, config: EagleConfig, children: int, hidden_bwd: jax.Array, rows: Any) -> Below:
    params, temperature_b = shared[0], shared[-1]
    normed_bwd = layer.normed(params, config, hidden_bwd)
    offered = children_of(params["unembed"], normed_bwd, children, temperature_b, layer.draft_ids(params))
    return Below(hidden_bwd, rows, *offered)


def identity(config: EagleConfig, settings: LaneSettings) -> dict[str, Any]:
    return {"depths": settings.depths, "children": settings.children, "lanes": config.lanes}


__all__ = [
    "DIALECT", "OPTIONS", "READS_TOKENS", "EagleConfig", "EagleState", "choose", "draft", "extend",
    "extend_work", "identity", "init", "specs", "stages", "work",
]  # fmt: skip
