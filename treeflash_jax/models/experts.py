"""Mixture of experts: the router chooses a few experts for each token, and the experts' results are added up.

On a mesh, every device processes its tokens with the experts, or the slices of all experts, that it holds. The partial sums
are then added over the mesh. No weight is moved. `backend.expert_sums` has the variants of the sum.

Source: Qwen3-MoE and gpt-oss as transformers computes them.

Shape suffixes: b batch, t tokens, n = b t tokens of a device, d model, x experts, f ffn of an expert, k experts of a token.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec

from treeflash_jax.core import sharding
from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.core.parameters import Params, Spec, is_spec
from treeflash_jax.models import quantized
from treeflash_jax.models.backend import expert_sums
from treeflash_jax.models.config import ModelConfig

SWIGLU_ALPHA = 1.702  # gpt-oss's; sigmoid(1.702 x) x approximates GELU
NORMS = ("router_norm", "experts_norm", "dense_post_norm", "experts_post_norm")  # norms of sparse layers with a dense part


def specs(config: ModelConfig) -> dict[str, Spec]:
    """Returns specs of the experts of one layer and of their router. The router is never quantised."""
    d, x, f = config.hidden_size, config.num_experts, config.expert_size
    into, back = ("experts", "embed", "expert_ffn"), ("experts", "expert_ffn", "embed")
    weights = {
        "router": Spec((d, x), ("embed", None), inputs=(0,), can_quantize=False),
        "expert_gate": Spec((x, d, f), into, inputs=(1,)),
        "expert_up": Spec((x, d, f), into, inputs=(1,)),
        "expert_down": Spec((x, f, d), back, inputs=(1,)),
    }
    if config.dense_beside_experts:
        weights |= {name: Spec((d,), (None,), "ones") for name in NORMS}
        weights["expert_scale"] = Spec((x,), (None,), "ones")
    if not config.expert_biases:
        return weights
    return weights | {
        "router_bias": Spec((x,), (None,), "zeros"),
        "expert_gate_bias": Spec((x, f), ("experts", "expert_ffn"), "zeros"),
        "expert_up_bias": Spec((x, f), ("experts", "expert_ffn"), "zeros"),
        "expert_down_bias": Spec((x, d), ("experts", "embed"), "zeros"),
    }


def shared_specs(config: ModelConfig) -> dict[str, Spec]:
    """Returns specs of the expert that sees every token, and of its gate; {} if the model has no such expert."""
    d, f = config.hidden_size, config.shared_expert_size
    if not f:
        return {}
    return {
        "shared_gate": Spec((f, d), ("ffn", "embed"), inputs=(1,)),
        "shared_up": Spec((f, d), ("ffn", "embed"), inputs=(1,)),
        "shared_down": Spec((d, f), ("embed", "ffn"), inputs=(1,)),
        "shared_router": Spec((1, d), (None, "embed"), inputs=(1,), can_quantize=False),
    }


def mixture(params: Params, config: ModelConfig, x_btd: jax.Array, routed_btd: jax.Array | None = None) -> jax.Array:
    """Computes the feed-forward part of a sparse layer: sum over a token's experts of weight * down(silu(gate x) * up x).

    `ModelConfig` describes biases and the clamped product. The input is the normed residual stream; the result
    has its dtype.

    Args:
      routed_btd: input of the router; None: the input of the experts.
    """
    weights = {name: params[name] for name in specs(config) if name not in NORMS}
    inputs = (x_btd,) if routed_btd is None else (x_btd, routed_btd)
    mesh = sharding.current()
    with jax.named_scope("experts"):
        if mesh is None or not sharding.free_axes(mesh):
            return _local_mixture(weights, inputs, config)
        all_specs = quantized.specs_like({name: specs(config)[name] for name in weights}, weights)
        places = jax.tree.map(lambda spec: _partition(spec, mesh), all_specs, is_leaf=is_spec)
        experts, _, ffn = _partition(specs(config)["expert_gate"], mesh)
        tokens = sharding.partition(("batch", None, None), x_btd.shape, mesh)
        run = partial(_local_mixture, config=config, experts=experts, ffn=ffn)
        return sharding.per_device(run, mesh, (places, (tokens,) * len(inputs)), tokens)(weights, inputs)


def route(weights: Params, config: ModelConfig, x_nd: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the experts of every token and their weights, both [n, k]: largest weight first, lower expert first in ties.

    The product has the compute dtype. Probabilities over all experts are float32 at least. Weights are rounded to the
    compute dtype at the end.
    """
    logits_nx = quantized.product("nd,dx->nx", x_nd, weights["router"])
    if "router_bias" in weights:
        logits_nx += weights["router_bias"].astype(logits_nx.dtype)
    probs_nx = jax.nn.softmax(logits_nx.astype(at_least_float32(x_nd.dtype)), axis=-1)
    weight_nk, ids_nk = lax.top_k(probs_nx, config.experts_per_token)
    if config.normalize_experts:
        weight_nk = weight_nk / jnp.sum(weight_nk, axis=-1, keepdims=True)
    if "expert_scale" in weights:
        weight_nk *= weights["expert_scale"].astype(weight_nk.dtype)[ids_nk]
    return weight_nk.astype(x_nd.dtype), ids_nk


def _local_mixture(
    weights: Params,
    inputs: tuple[jax.Array, ...],
    config: ModelConfig,
    experts: str | None = None,
    ffn: str | None = None,
) -> jax.Array:
    """Computes `mixture` on one device. Mesh axis `experts`, if any, splits the experts, and `ffn` their width."""
    if quantized.quantization_scheme(weights):  # frees wide copies after each layer, as `quantized.product` does
        inputs, weights = lax.optimization_barrier((inputs, weights))
    x_btd, routed_btd = inputs[0], inputs[-1]
    x_nd = x_btd.reshape(-1, x_btd.shape[-1])
    held = weights["expert_gate"].shape[0]
    weight_nk, ids_nk = route(weights, config, routed_btd.reshape(x_nd.shape))
    local_nk = ids_nk - lax.axis_index(experts) * held if experts else ids_nk
    is_held_nk = (local_nk >= 0) & (local_nk < held)
    weight_nk = jnp.where(is_held_nk, weight_nk.astype(at_least_float32(x_nd.dtype)), 0)
    ids_nk = jnp.where(is_held_nk, local_nk, held)
    y_nd = expert_sums.sum_experts(weights, x_nd, weight_nk, ids_nk, find_gate(config))
    if "expert_down_bias" in weights:
        weight_nx = jnp.sum(jnp.where(local_nk[..., None] == jnp.arange(held), weight_nk[..., None], 0), axis=1)
        bias_nd = weight_nx @ weights["expert_down_bias"].astype(weight_nx.dtype)
        y_nd += jnp.where(lax.axis_index(ffn) == 0, bias_nd, 0) if ffn else bias_nd  # `ffn` is summed over, so once
    if axes := tuple(name for name in (experts, ffn) if name):
        y_nd = lax.psum(y_nd, axes)
    return y_nd.astype(x_btd.dtype).reshape(x_btd.shape)


def find_gate(config: ModelConfig) -> expert_sums.Gate:
    """Returns the gated activation of the experts."""
    if config.swiglu_limit:
        return partial(clamped_gate, limit=config.swiglu_limit)
    return {"silu": silu_gate, "gelu": gelu_gate}[config.activation]


def silu_gate(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def gelu_gate(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.gelu(gate, approximate=True) * up


def clamped_gate(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """Returns (up + 1) * gate * sigmoid(1.702 gate). `limit` bounds the gate from above, and the up map on both sides."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate)


def _partition(spec: Spec, mesh: AbstractMesh) -> PartitionSpec:
    """Returns the layout of a weight in a pass over tokens: the model width is whole, even if it is stored in shards."""
    return sharding.partition(tuple(None if axis == "embed" else axis for axis in spec.axes), spec.shape, mesh)
