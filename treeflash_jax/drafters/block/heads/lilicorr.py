"""The LiLiCorr head: attention over the candidates of all depths, then a score for every pair of adjacent candidates.

    x     = candidate: its embedding, hidden state of its slot, marginal log-probability, slot and rank
    x     = layers of attention among all candidates, with biases by distance of their slots
    a     = fused verifier feature of the position before the anchor
    f     = silu(W [x; a; x a]),   out, in = unit(W_out f), unit(W_in f)
    score = s <out of the candidate before, in of this candidate>;  at depth 0 s <unit(W_anchor a), in>

The scores replace the marginals: the draft distribution is the softmax over the scores of a previous candidate.

Shape suffixes: b batch, i draft depth, k candidates of a depth, t = i k candidates in order of depth, h width, a attention
heads, e head dim, f factor width, c children kept.

Source: LiLiCorr (arXiv 2608.20530).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.core.parameters import Entry, Params, Spec
from treeflash_jax.drafters.block.heads.block_head import Block, DrafterSizes, Head, Unembed, candidate_table
from treeflash_jax.models import vocab
from treeflash_jax.models.layers import layer_norm, rms_norm
from treeflash_jax.models.quantized import product
from treeflash_jax.trees import TransitionTable

FEATURES = 5
LAYER_NORM_EPS = 1e-5  # PyTorch's default; not in the config


@dataclass(frozen=True)
class LiLiCorrSizes:
    """Sizes of the head.

    Attributes:
      width: width of the attention layers; embeddings are projected to it if the drafter's width differs.
      top_k: candidates per depth.
      logit_scale: factor s of the cosines.
      vector_eps: smallest length by which a vector is divided.
    """

    width: int
    top_k: int = 8
    num_layers: int = 2
    num_heads: int = 4
    mlp_width: int = 64
    factor_dim: int = 16
    vector_eps: float = 1e-4
    logit_scale: float = 8.0


MAPS = {  # linear maps with biases, by name in files
    "token": "token_proj", "hidden": "pass_hidden_proj", "feature_up": "feature_mlp.1", "feature_down": "feature_mlp.3",
    "context": "context_proj", "factor": "factor_input_proj", "out": "out_head", "into": "in_head",
    "anchor_out": "anchor_out_head", "mixed": "layers.{}.attn.out_proj", "up": "layers.{}.mlp.0",
    "down": "layers.{}.mlp.2",
}  # fmt: skip
VECTORS = {  # all other weights
    "feature_norm": "feature_mlp.0.weight", "feature_norm_bias": "feature_mlp.0.bias", "output_norm": "output_norm.weight",
    "anchor_norm": "anchor_norm.weight", "attention_norm": "layers.{}.attn_norm.weight",
    "mlp_norm": "layers.{}.mlp_norm.weight", "heads_bias": "layers.{}.attn.in_proj_bias", "same_slot": "same_slot_bias",
}  # fmt: skip
MATRICES = {"slot": "slot_embedding", "rank": "rank_embedding", "distance": "relative_slot_bias"}


class LiLiCorrHead(Head):
    file_name = "lilicorr"
    entries: ClassVar[dict[str, Entry]] = {
        **{name: Entry(f"lilicorr.{stored}.weight", order=(1, 0)) for name, stored in MAPS.items()},
        **{f"{name}_bias": Entry(f"lilicorr.{stored}.bias") for name, stored in MAPS.items()},
        **{name: Entry(f"lilicorr.{stored}") for name, stored in VECTORS.items()},
        **{name: Entry(f"lilicorr.{stored}", order=(0, 1)) for name, stored in MATRICES.items()},
        "heads": Entry("lilicorr.layers.{}.attn.in_proj_weight", order=(1, 0)),
    }
    reads_context = True

    def sizes(self, drafter: DrafterSizes) -> LiLiCorrSizes:
        return drafter.head_sizes or LiLiCorrSizes(drafter.layers.hidden_size)

    def specs(self, drafter: DrafterSizes) -> dict[str, Any]:
        """Returns the specs. The weights of all layers are stacked."""
        sizes = self.sizes(drafter)
        d = drafter.layers.hidden_size
        slots = drafter.num_depths
        y, h, f = sizes.num_layers, sizes.width, sizes.factor_dim
        maps: dict[str, tuple[int, ...]] = {
            "hidden": (d, h), "feature_up": (FEATURES, h), "feature_down": (h, h), "context": (d, h), "factor": (3 * h, h),
            "out": (h, f), "into": (h, f), "anchor_out": (h, f), "heads": (y, h, 3 * h), "mixed": (y, h, h),
            "up": (y, h, sizes.mlp_width), "down": (y, sizes.mlp_width, h),
        }  # fmt: skip
        maps |= {"token": (d, h)} if h != d else {}
        others: dict[str, tuple[int, ...]] = {"same_slot": (sizes.num_heads,), "slot": (slots, h), "rank": (sizes.top_k, h)}
        others["distance"] = sizes.num_heads, 2 * slots + 1
        norms: dict[str, tuple[int, ...]] = {"feature_norm": (FEATURES,), "output_norm": (h,), "anchor_norm": (h,)}
        norms |= {"attention_norm": (y, h), "mlp_norm": (y, h)}

        def specs(shapes: dict[str, tuple[int, ...]], init: str, **options: Any) -> dict[str, Spec]:
            return {name: Spec(shape, (None,) * len(shape), init, **options) for name, shape in shapes.items()}

        biases: dict[str, tuple[int, ...]] = {f"{name}_bias": (*shape[:-2], shape[-1]) for name, shape in maps.items()}
        biases["feature_norm_bias"] = (FEATURES,)
        return specs(maps, "normal") | specs(biases, "zeros") | specs(norms, "ones") | specs(others, "zeros")

    def expand(self, params: Params, unembed: Unembed, block: Block, drafter: DrafterSizes) -> TransitionTable:
        sizes, normed_bid = self.sizes(drafter), unembed.normed(block.hidden_bid)
        logits_biv = unembed.logits(normed_bid)
        values_bik, ids_bik = vocab.top_k(logits_biv, sizes.top_k)
        log_probs_bik = values_bik - vocab.log_sum_exp(logits_biv)[..., None]
        tokens_bik = unembed.tokens(ids_bik)
        out_bikf, in_bikf, anchor_bf = self.factors(params, unembed, tokens_bik, log_probs_bik, normed_bid, block, drafter)
        start_bk = jnp.einsum("bf,bkf->bk", anchor_bf, in_bikf[:, 0])
        pairs_bikk = jnp.einsum("bikf,bilf->bikl", out_bikf[:, :-1], in_bikf[:, 1:])
        start_b1kk = jnp.broadcast_to(start_bk[:, None, None], (len(start_bk), 1, sizes.top_k, sizes.top_k))
        cosines_bikk = jnp.concatenate([start_b1kk, pairs_bikk], axis=1)
        scale_b = sizes.logit_scale / block.temperature_b.astype(cosines_bikk.dtype)
        log_probs_bikk = jax.nn.log_softmax(scale_b[:, None, None, None] * cosines_bikk, axis=-1)
        return candidate_table(tokens_bik, log_probs_bikk[:, :, : drafter.candidates], drafter.children)

    def factors(
        self,
        params: Params,
        unembed: Unembed,
        tokens_bik: jax.Array,
        log_probs_bik: jax.Array,
        normed_bid: jax.Array,
        block: Block,
        drafter: DrafterSizes,
    ) -> Any:
        """Returns factors of unit length: out and in of every candidate, [b, i, k, f] each, and the anchor's, [b, f]."""
        sizes, eps = self.sizes(drafter), unembed.eps
        slots, num_candidates = tokens_bik.shape[1:]

        def through(name: str, x: jax.Array) -> jax.Array:
            return product("...h,hf->...f", x, params[name]) + params[f"{name}_bias"]

        def unit(x: jax.Array) -> jax.Array:
            x = x.astype(at_least_float32(x.dtype))
            return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), sizes.vector_eps)

        embedding_bikd = unembed.embed(tokens_bik)
        x_bikh = through("token", embedding_bikd) if "token" in params else embedding_bikd
        x_bikh += through("hidden", normed_bid)[:, :, None] + self.features(params, through, log_probs_bik)
        x_bikh += params["slot"][:slots, None] + params["rank"]
        x_bth = x_bikh.reshape(len(x_bikh), slots * num_candidates, -1)
        slot_t = jnp.repeat(jnp.arange(slots), num_candidates)
        distance_tt = slot_t[:, None] - slot_t + params["distance"].shape[1] // 2
        bias_att = params["distance"][:, distance_tt]
        bias_att += params["same_slot"][:, None, None] * (slot_t[:, None] == slot_t)
        for layer in range(sizes.num_layers):
            weights = {name: weight[layer] for name, weight in params.items() if "{}" in self.entries[name].name}
            x_bth += attention(weights, rms_norm(x_bth, weights["attention_norm"], eps), bias_att, sizes.num_heads)
            hidden = product("bth,hf->btf", rms_norm(x_bth, weights["mlp_norm"], eps), weights["up"]) + weights["up_bias"]
            x_bth += product("btf,fh->bth", jax.nn.silu(hidden), weights["down"]) + weights["down_bias"]
        x_bth = rms_norm(x_bth, params["output_norm"], eps)
        anchor_bh = rms_norm(through("context", block.context_bd), params["anchor_norm"], eps)
        anchor_bth = jnp.broadcast_to(anchor_bh[:, None], x_bth.shape)
        factor_bth = jax.nn.silu(through("factor", jnp.concatenate([x_bth, anchor_bth, x_bth * anchor_bth], axis=-1)))
        shape = *tokens_bik.shape, sizes.factor_dim
        out_bikf = unit(through("out", factor_bth)).reshape(shape)
        in_bikf = unit(through("into", factor_bth)).reshape(shape)
        return out_bikf, in_bikf, unit(through("anchor_out", anchor_bh))

    def features(self, params: Params, through: Any, log_probs_bik: jax.Array) -> jax.Array:
        """Returns the features of each candidate's marginal log-probability and rank, [b, i, k, h], to be added to it."""
        rank_k = jnp.arange(log_probs_bik.shape[2])
        share_k = (rank_k / max(rank_k.size - 1, 1)).astype(log_probs_bik.dtype)
        ranks = (jnp.broadcast_to(x_k, log_probs_bik.shape) for x_k in (share_k, (rank_k == 0).astype(share_k.dtype)))
        of_probs = log_probs_bik, jnp.exp(log_probs_bik), log_probs_bik - log_probs_bik[..., :1]
        x = jnp.stack([*of_probs, *ranks], axis=-1)
        x = layer_norm(x, params["feature_norm"], params["feature_norm_bias"], LAYER_NORM_EPS)
        return through("feature_down", jax.nn.silu(through("feature_up", x)))


def attention(weights: dict[str, jax.Array], x_bth: jax.Array, bias_att: jax.Array, num_heads: int) -> jax.Array:
    """Returns attention of all candidates to all candidates, with a bias for each pair."""
    heads = product("bth,hx->btx", x_bth, weights["heads"]) + weights["heads_bias"]
    q_btae, k_btae, v_btae = (part.reshape(*x_bth.shape[:2], num_heads, -1) for part in jnp.split(heads, 3, axis=-1))
    mixed_btae = jax.nn.dot_product_attention(q_btae, k_btae, v_btae, bias_att, implementation="xla")
    return product("bth,hx->btx", mixed_btae.reshape(x_bth.shape), weights["mixed"]) + weights["mixed_bias"]
