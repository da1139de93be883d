"""EAGLE-3 drafters: one decoder layer, run once per level of the tree on the verifier's features and the drafted tokens.

This module implements `drafters.Drafter`; layer.py has the maths of the layer. Position t of the layer pairs the verifier's
features at t with the token at t + 1, so after a commit its context is as long as the verifier's cache, and the output at
its last position gives the first drafted token.

Shape suffixes: b batch, t positions, w lanes, j tapped layers x verifier width, d drafter width, x keys that a lane may
see.

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

from treeflash_jax.core.checks import quoted
from treeflash_jax.drafters.eagle3 import layer
from treeflash_jax.drafters.eagle3.eagle3_config import EagleConfig
from treeflash_jax.drafters.eagle3.layer import specs
from treeflash_jax.drafters.lanes import LaneExpander, LaneSettings, LaneState, Level, likeliest_children, scratch_specs
from treeflash_jax.drafters.options import LevelOptions
from treeflash_jax.drafters.protocol import Inputs
from treeflash_jax.models import kv_cache
from treeflash_jax.models.attention import tree_attention
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.costs import Counter, Work

OPTIONS = LevelOptions
READS_TOKENS = True
DIALECT = "speculators"


@struct.dataclass
class EagleState:
    """The drafter's cache and what the next draft starts from.

    Attributes:
      hidden_bd: the layer's output at the last position.
    """

    context: kv_cache.KVCache
    hidden_bd: jax.Array

    def axes(self) -> EagleState:
        return EagleState(context=kv_cache.axes(self.context), hidden_bd=("batch", None))

    def grow(self, capacity: int) -> EagleState:
        return self.replace(context=kv_cache.grow(self.context, capacity))

    def cut(self, length_b: jax.Array) -> EagleState:
        return self.replace(context=self.context.cut(length_b))


def choose(config: EagleConfig, options: Any) -> tuple[EagleConfig, LaneSettings]:
    """See `Drafter.choose`. Raises ValueError for more children than the draft vocabulary has tokens."""
    children = options.children
    if children > config.draft_vocab_size:
        raise ValueError(f"got children {quoted(children)}, expected 1 to {config.draft_vocab_size} (the draft vocabulary)")
    sizes = replace(config, num_depths=options.depths or config.num_depths)
    return sizes, LaneSettings.of(sizes, options)


def init(config: EagleConfig, batch: int, capacity: int, dtype: Any) -> EagleState:
    hidden_bd = jnp.zeros((batch, config.layers.hidden_size), dtype)
    return EagleState(context=kv_cache.allocate(config.layers, batch, capacity, dtype), hidden_bd=hidden_bd)


def extend(
    params: Any,
    tables: Any,
    config: EagleConfig,
    state: EagleState,
    features_btj: jax.Array,
    tokens_bt: jax.Array,
    count_b: jax.Array,
    *,
    attention: str,
) -> EagleState:
    """Adds committed positions: keys and values of all of them, but the layer's output only at the last valid one."""
    prefix, length_b, length = state.context.groups[0][0], state.context.length_b, features_btj.shape[1]
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
    return EagleState(
        context=kv_cache.append(state.context, (((k_btke, v_btke),),), kv_cache.count_after(count_b, hidden_bd[:, 0])),
        hidden_bd=jnp.where((count_b > 0)[:, None], hidden_bd, state.hidden_bd).astype(state.hidden_bd.dtype),
    )


def draft(inputs: Inputs, _: None) -> LaneExpander:
    """Returns the children of the anchor, and the layer that continues below them."""
    params, config, settings = inputs.params, inputs.config, inputs.settings
    embed = {} if config.own_embedding else {"embed": inputs.tables["embed"]}
    shared = params, embed, inputs.state.context, inputs.temperature_b
    hidden_b1d = inputs.state.hidden_bd[:, None]
    step = _step(config, settings.children, inputs.attention)
    return LaneExpander(
        shared,
        inputs.state.context.length_b,
        _lane_state(shared, config, settings.children, hidden_b1d, ()),
        step=step,
        scratch=scratch_specs(inputs.state.context),
        num_depths=inputs.depths,
    )


def stages(config: EagleConfig) -> Mapping[str, Callable[[Inputs, Any], Any]]:
    """Drafts the children of the anchor; levels below them are drafted while the tree is built."""
    return {"draft": draft}


@cache
def _step(config: EagleConfig, children: int, attention: str) -> Callable[[Any, Level], LaneState]:
    """Returns one step per setting: equal steps share a program."""
    return partial(_run_level, config=config, children=children, attention=attention)


def _run_level(shared: Any, level: Level, *, config: EagleConfig, children: int, attention: str) -> LaneState:
    """Runs the layer over a token per lane, each carrying the output of the level above."""
    params, tables, context, _ = shared
    carried_bwd = layer.feed_back(params, config, level.carry)
    read_bw = layer.read(params, tables, config, level.token_bw, carried_bwd)
    table = layer.rotations(config, level.position_bw)
    k_bwke, v_bwke = layer.keys_values(params, config, read_bw, table)
    [[[earlier_k, earlier_v]]] = level.earlier
    keys_bxke, values_bxke = level.join(earlier_k, k_bwke), level.join(earlier_v, v_bwke)

    def attend(q_bwhe: jax.Array) -> jax.Array:
        prefix, length_b = context.groups[0][0], context.length_b
        return tree_attention(q_bwhe, keys_bxke, values_bxke, level.seen_bwx, prefix, length_b, implementation=attention)

    hidden_bwd = layer.hidden(params, config, read_bw, carried_bwd, table, attend)
    return _lane_state(shared, config, children, hidden_bwd, (((k_bwke, v_bwke),),))


def _lane_state(shared: Any, config: EagleConfig, children: int, hidden_bwd: jax.Array, kv: Any) -> LaneState:
    params, temperature_b = shared[0], shared[-1]
    normed_bwd = layer.normed(params, config, hidden_bwd)
    offered = likeliest_children(params["unembed"], normed_bwd, children, temperature_b, layer.draft_ids(params))
    return LaneState(hidden_bwd, kv, *offered)


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


def identity(config: EagleConfig, settings: LaneSettings) -> dict[str, Any]:
    return {"depths": settings.depths, "children": settings.children, "lanes": config.lanes}


__all__ = [
    "DIALECT", "OPTIONS", "READS_TOKENS", "EagleConfig", "EagleState", "choose", "draft", "extend",
    "extend_work", "identity", "init", "specs", "stages", "work",
]  # fmt: skip
