"""EAGLE-3 drafters: one decoder layer, run once per level of the tree on the verifier's features and the drafted tokens.

This module implements `drafters.Drafter`; layer.py has the maths of the layer. Position t of the layer pairs the verifier's
features at t with the token at t + 1, so after a commit its context is as long as the verifier's cache, and the output at
its last position gives the first drafted token.

Shape suffixes: b batch, t positions, w lanes, j tapped layers x verifier width, d drafter width, x keys that a lane may
see.

Source: EAGLE-3 (arXiv 2503.01840); EAGLE-2 (arXiv 2406.16858) for the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from treeflash_jax.drafters import ngram
from treeflash_jax.drafters.eagle3 import layer
from treeflash_jax.drafters.eagle3.layer import EagleConfig
from treeflash_jax.drafters.eagle3.layer import specs as specs
from treeflash_jax.drafters.lanes import (
    LaneExpander,
    LaneOptions,
    LaneSettings,
    LaneState,
    Level,
    likeliest_children,
    scratch_specs,
)
from treeflash_jax.drafters.lanes import choose as choose
from treeflash_jax.drafters.lanes import identity as identity
from treeflash_jax.drafters.protocol import ContextState, Inputs, draft_ids
from treeflash_jax.models import kv_cache
from treeflash_jax.models.attention import tree_attention
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.costs import Counter, Work
from treeflash_jax.trees import Expander

OPTIONS = LaneOptions
READS_TOKENS = True
DIALECT = "speculators"


def init(config: EagleConfig, batch: int, capacity: int, dtype: Any) -> ContextState:
    hidden_bd = jnp.zeros((batch, config.layers.hidden_size), dtype)
    return ContextState(context=kv_cache.allocate(config.layers, batch, capacity, dtype), hidden_bd=hidden_bd)


def extend(
    params, tables, config: EagleConfig, state: ContextState, features_btj, tokens_bt, count_b, *, attention: str
) -> ContextState:
    """Adds committed positions: keys and values of all of them, but the layer's output only at the last valid one."""
    prefix, length_b, length = state.context.layers[0], state.context.length_b, features_btj.shape[1]
    carried_btd = layer.fuse(params, config, features_btj)
    read_bt = layer.read(params, tables, config, tokens_bt, carried_btd)
    positions_bt = length_b[:, None] + jnp.arange(length)
    k_btke, v_btke = layer.keys_values(params, config, read_bt, layer.rotations(config, positions_bt))

    last_b1 = jnp.maximum(count_b - 1, 0)[:, None]
    read_b1, carried_b1d = (jnp.take_along_axis(x_bt, last_b1[..., None], axis=1) for x_bt in (read_bt, carried_btd))
    seen_b1t = jnp.arange(length) <= last_b1[..., None]
    table = layer.rotations(config, length_b[:, None] + last_b1)

    def attend(q_b1he: jax.Array) -> jax.Array:
        return tree_attention(q_b1he, k_btke, v_btke, seen_b1t, prefix, length_b, implementation=attention)

    hidden_bd = layer.hidden(params, config, read_b1, carried_b1d, table, attend)[:, 0]
    return ContextState(
        context=kv_cache.append(state.context, ((k_btke, v_btke),), kv_cache.count_after(count_b, hidden_bd[:, 0])),
        hidden_bd=jnp.where((count_b > 0)[:, None], hidden_bd, state.hidden_bd).astype(state.hidden_bd.dtype),
    )


def draft(inputs: Inputs, _: None) -> Expander:
    """Returns the children of the anchor, and the layer that continues below them."""
    context, step = inputs.state.context, LayerStep(inputs.config, inputs.settings.children, inputs.attention)
    embed = {} if inputs.config.own_embedding else {"embed": inputs.tables["embed"]}
    shared = inputs.params, embed, context, inputs.temperature_b
    first, scratch = step.offer(shared, inputs.state.hidden_bd[:, None], ()), scratch_specs(context)
    lanes = LaneExpander(shared, context.length_b, first, step=step, scratch=scratch, num_depths=inputs.depths)
    return ngram.join(lanes, inputs)


STAGES = {"draft": draft}  # levels below the anchor's children are drafted while the tree is built


@dataclass(frozen=True)
class LayerStep:
    """The `Step` of EAGLE-3: the layer over a token per lane, each carrying the output of the level above."""

    config: EagleConfig
    children: int
    attention: str

    def __call__(self, shared: Any, level: Level) -> LaneState:
        (params, tables, context, _), config = shared, self.config
        carried_bwd = layer.feed_back(params, config, level.carry)
        read_bw = layer.read(params, tables, config, level.token_bw, carried_bwd)
        table = layer.rotations(config, level.position_bw)
        k_bwke, v_bwke = layer.keys_values(params, config, read_bw, table)
        [[earlier_k, earlier_v]] = level.earlier
        keys_bxke, values_bxke = level.join(earlier_k, k_bwke), level.join(earlier_v, v_bwke)

        def attend(q_bwhe: jax.Array) -> jax.Array:
            seen, prefix, length_b = level.seen_bwx, context.layers[0], context.length_b
            return tree_attention(q_bwhe, keys_bxke, values_bxke, seen, prefix, length_b, implementation=self.attention)

        hidden_bwd = layer.hidden(params, config, read_bw, carried_bwd, table, attend)
        return self.offer(shared, hidden_bwd, ((k_bwke, v_bwke),))

    def offer(self, shared: Any, hidden_bwd: jax.Array, kv: Any) -> LaneState:
        """Returns the children below the layer's outputs."""
        (params, *_, temperature_b), ids_z = shared, draft_ids(shared[0])
        normed_bwd = layer.normed(params, self.config, hidden_bwd)
        return LaneState(
            hidden_bwd, kv, *likeliest_children(params["unembed"], normed_bwd, self.children, temperature_b, ids_z)
        )


def extend_work(count: Counter, config: EagleConfig, tokens: float) -> Work:
    """Counts keys and values of all new positions, the remaining layer for one, and reading and writing the cache."""
    specs = layer.specs(config)
    keys_values = {name: specs["layer"].pop(name) for name in ("k", "v")}
    work = count.weights({"fc": specs["fc"]} | keys_values, tokens) + count.weights(specs["layer"], 1)
    seen = count.context + tokens
    return work + count.attention(config.layers, 1, seen) + count.cached(config.layers, seen)


def work(
    count: Counter, config: EagleConfig, settings: LaneSettings, verifier: ModelConfig, quantize: str | None = None
) -> dict[str, tuple[Work, Work]]:
    """Counts one pass over the vocabulary matrix for the anchor; the layer and that pass again for every level below."""
    specs, width = layer.specs(config), settings.width
    first = count.weights({"unembed": specs["unembed"], "norm": specs["norm"]}, 1)
    level = count.weights({name: specs[name] for name in ("layer", "norm", "unembed")}, width)
    level += count.attention(config.layers, width, count.context + 1) + count.cached(config.layers, count.context)
    return {"draft": (first, Work()), "tree": (sum([level] * (config.num_depths - 1), Work()), Work())}
