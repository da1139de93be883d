"""The verifier: a Qwen3 (dense or a mixture of experts), Qwen2 or Llama language model as one pure forward pass.

One function serves prefill chunks, single tokens, chains and trees: they differ in positions and mask only. Logits are a
separate call on the rows that are read (`vocab.unembed`).

Shape suffixes: b batch, t new rows, d model, j tapped layers x model, v vocabulary,
k experts of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from treeflash_jax import mesh as meshes
from treeflash_jax import quantized, vocab
from treeflash_jax.params import Spec
from treeflash_jax.verifiers import cache as caches
from treeflash_jax.verifiers import experts, layers
from treeflash_jax.verifiers.attention import tree_attention
from treeflash_jax.verifiers.config import ModelConfig


@struct.dataclass
class Output:
    """What a forward pass leaves behind.

    Attributes:
      hidden_btd: after the final norm; `vocab.unembed` turns chosen rows into logits.
      features_btj: outputs of the tapped layers (residual stream, before the final norm), concatenated in tap order.
      rows: keys and values of the new rows, for `cache.append`.
      routes: experts of the new rows, [b, t, k] for every sparse layer; a program that does not read them has none.
    """

    hidden_btd: jax.Array
    features_btj: jax.Array | None
    rows: caches.NewRows
    routes: tuple[jax.Array, ...] = ()


def specs(config: ModelConfig, quantize: str | None = None) -> dict[str, Any]:
    """Every weight of the model, its matrices quantised by the scheme. Tied models have no `unembed`: `vocab.unembed`
    reads `embed`.

    Raises:
      ValueError: an unknown scheme.
    """
    table = Spec((config.vocab_size, config.hidden_size), ("vocab", "embed"), inputs=(1,))
    tree = {
        "embed": table,
        "groups": [[layers.layer_specs(config, is_sparse) for _ in range(size)] for is_sparse, size in config.runs],
        "norm": Spec((config.hidden_size,), (None,), "ones"),
    }
    return quantized.specs(tree if config.tie_embeddings else tree | {"unembed": table}, quantize)


def forward(
    params: dict[str, Any],
    config: ModelConfig,
    tokens_bt: jax.Array,
    positions_bt: jax.Array,
    mask_btu: jax.Array,
    cache: caches.KVCache | None = None,
    *,
    earlier: caches.NewRows | None = None,
    shift: Callable[[int], jax.Array] | None = None,
    taps: tuple[int, ...] = (),
    attention: str = "xla",
) -> Output:
    """Runs new rows through the model; the cache is read, never written.

    Args:
      params: weights of `specs`.
      config: static.
      tokens_bt: token ids of the new rows.
      positions_bt: their absolute positions.
      mask_btu: True where new row t sees new row u (causal for a chunk, ancestors for a tree).
      cache: committed rows, all visible to every new row; None for none.
      earlier: keys and values [b, x, k, e] of rows that are in no cache yet, per group and layer. The mask [b, t, x + t]
        then says for them, and after them for the new rows, whether row t sees them.
      shift: of a layer, counted from 0: what steers its feed-forward part, [b, 1 or t, f] (`layers.swiglu`); None: nothing.
      taps: 0-based layers whose outputs are returned.
      attention: implementation name.
    """
    table = layers.rotary_table(config.rope, config.head_dim, positions_bt)
    x_btd = meshes.constrain(vocab.embed(params["embed"], tokens_bt), ("batch", None, None))
    length_b = None if cache is None else cache.length_b
    tapped: dict[int, jax.Array] = {}
    rows = []
    routes = []
    index = 0

    def mixture(weights, x_btd):
        y_btd, ids_btk = experts.mixture(weights, config, x_btd)
        routes.append(ids_btk)
        return y_btd

    for g, group in enumerate(params["groups"]):
        group_rows = []
        for i, weights in enumerate(group):
            before = None if earlier is None else earlier[g][i]

            def attend(weights, x_btd, prefix=None if cache is None else cache.groups[g][i], before=before):
                q_bthe = layers.queries(weights, config, x_btd, table)
                new = layers.keys_values(weights, config, x_btd, table)
                seen = new if before is None else [jnp.concatenate(pair, axis=1) for pair in zip(before, new, strict=True)]
                mixed = tree_attention(q_bthe, *seen, mask_btu, prefix, length_b, implementation=attention)
                return mixed, new

            with jax.named_scope(f"layer_{index}"):
                mlp = mixture if "router" in weights else layers.swiglu
                mlp = mlp if shift is None else partial(mlp, shift_btf=shift(index))
                x_btd, new = layers.decoder_layer(weights, x_btd, attend, config.rms_norm_eps, mlp)
                x_btd = meshes.constrain(x_btd, ("batch", None, None))
            if index in taps:
                tapped[index] = x_btd
            group_rows.append(new)
            index += 1
        rows.append(tuple(group_rows))
    return Output(
        hidden_btd=layers.rms_norm(x_btd, params["norm"], config.rms_norm_eps),
        features_btj=jnp.concatenate([tapped[i] for i in taps], axis=-1) if taps else None,
        rows=tuple(rows),
        routes=tuple(routes),
    )


def logits(params: dict[str, Any], hidden_btd: jax.Array) -> jax.Array:
    """Logits of chosen rows, [..., v] in the compute dtype."""
    return vocab.unembed(params.get("unembed", params["embed"]), hidden_btd)


def causal_mask(batch: int, rows: int) -> jax.Array:
    return jnp.broadcast_to(jnp.tri(rows, dtype=bool), (batch, rows, rows))
