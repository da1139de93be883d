"""Steering of a small language model by the verifier's hidden states (SD squared).

The hidden states at the last position that the verifier read give shifts for the next draft: each layer of the small model
adds a vector inside its feed-forward part, down(silu(gate x) * (up x + shift)).

    s = [low; mid; high]             outputs of three layers of the verifier
    g = mix s + mix_bias
    shift = project LayerNorm(g)     one vector per layer of the small model

Shape suffixes: b batch, t positions, j three tapped layers x verifier width, d verifier width, f feed-forward width of the
small model.

Source: SD squared (arXiv 2511.09844), sections 3 and 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
from flax import struct

from treeflash_jax.core.parameters import Params, Spec
from treeflash_jax.drafters.protocol import ContextState
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.layers import layer_norm
from treeflash_jax.models.quantized import product

EPS = 1e-5  # epsilon of the LayerNorm


@dataclass(frozen=True, kw_only=True)
class Steering:
    """The verifier that steers a small model.

    Attributes:
      taps: 0-based indices of the layers whose outputs are read: low, mid, high.
      width: hidden size of the verifier.
    """

    taps: tuple[int, ...]
    width: int


@struct.dataclass
class SteeredState(ContextState):
    """State of a steered model. Cached positions keep the shifts that they were computed with.

    Attributes:
      shifts: shift of each layer, [b, 1, f], for the positions of the next draft.
    """

    shifts: tuple[jax.Array, ...] = ()

    def axes(self) -> Self:
        return SteeredState(**vars(super().axes()), shifts=(("batch", None, "ffn"),) * len(self.shifts))


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Returns the published layers of a verifier (2, 15 and 28 of 32); with fewer than 12 layers, its ends and middle."""
    return (2, num_layers // 2 - 1, num_layers - 4) if num_layers >= 12 else (0, num_layers // 2, num_layers - 1)


def specs(config: Steering, layers: ModelConfig) -> dict[str, Any]:
    """Returns the specs of the weights that steer a small model of these sizes. Fresh weights give shifts of zero."""
    d = config.width
    shift = Spec((layers.intermediate_size, d), ("ffn", "embed"), "zeros", inputs=(1,), outputs=(0,))
    return {
        "mix": Spec((d, 3 * d), (None, "embed"), inputs=(1,), outputs=(0,)),
        "mix_bias": Spec((d,), (None,), "zeros"),
        "norm": Spec((d,), (None,), "ones"),
        "norm_bias": Spec((d,), (None,), "zeros"),
        "project": [shift] * layers.num_layers,
    }


def make_shifts(params: Params, features_btj: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the shift of each layer, [b, t, f], from the verifier's features."""
    g_btd = product("btj,dj->btd", features_btj, params["mix"]) + params["mix_bias"]
    normed_btd = layer_norm(g_btd, params["norm"], params["norm_bias"], EPS)
    return tuple(product("btd,fd->btf", normed_btd, project_fd) for project_fd in params["project"])


def steer(params: Params, shifts: Sequence[jax.Array]) -> Params:
    """Returns a model's weights with the shift of each layer, [b, 1 or t, f], as the bias that `layers.gated` adds."""
    remaining = iter(shifts)
    return params | {"groups": [[layer | {"up_bias": next(remaining)} for layer in group] for group in params["groups"]]}
