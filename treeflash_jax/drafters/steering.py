"""Steering of a small language model by the verifier's hidden states (SD squared).

The verifier's hidden state at the last committed token shifts every layer of the small model's next draft: a vector per
layer is added inside its feed-forward part, down(silu(gate x) * (up x + shift)). Shifts of zero change nothing.

    s = [low; mid; high]             outputs of three layers of the verifier, at the last accepted position
    g = mix s + mix_bias
    shift = project(LayerNorm(g))    one vector per layer of the small model; a product of two matrices if `rank` > 0

Shape suffixes: b batch, t positions, j three tapped layers x verifier width, d verifier width, y layers and f
feed-forward width of the small model, r rank.

Source: SD squared (arXiv 2511.09844) sections 3 and 4; the two factors are this library's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from treeflash_jax.core.checks import expect
from treeflash_jax.core.parameters import Spec
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.layers import layer_norm

EPS = 1e-5  # epsilon of the LayerNorm
MIN_SPREAD_LAYERS = 12  # smaller verifiers are tapped at their ends and their middle


@dataclass(frozen=True, kw_only=True)
class SteeringConfig:
    """Sizes of the steering of one pair of models.

    Attributes:
      taps: 0-based layers of the verifier whose outputs are read: low, mid, high.
      width: hidden size of the verifier.
      num_layers, ffn: sizes of the small model.
      rank: rank of the projection to the shifts; 0 is the published form, one full matrix.
    """

    taps: tuple[int, int, int]
    width: int
    num_layers: int
    ffn: int
    rank: int = 0

    def check_fits(self, verifier: ModelConfig, drafter: ModelConfig) -> None:
        """Raises ValueError if it was made for another verifier or another small model."""
        sizes = (self.width, self.num_layers, self.ffn)
        expected = (verifier.hidden_size, drafter.num_layers, drafter.intermediate_size)
        what = "steering for (verifier width, drafter layers, drafter feed-forward width)"
        expect(sizes == expected, what, sizes, f"{expected}: it was trained for another pair of models")
        fits = all(0 <= tap < verifier.num_layers for tap in self.taps)
        expect(fits, "steering by layers", list(self.taps), f"0 to {verifier.num_layers - 1} (verifier)")
        if drafter.num_experts:
            raise ValueError("got steering of a mixture of experts, expected a dense model: its experts are not steered")


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Returns the published layers (outputs 2, L // 2 - 1 and L - 4), or ends and middle of a small verifier."""
    if num_layers < MIN_SPREAD_LAYERS:
        return 0, num_layers // 2, num_layers - 1
    return 2, num_layers // 2 - 1, num_layers - 4


def specs(config: SteeringConfig) -> dict[str, Spec]:
    """Returns the specs of the weights; fresh weights give shifts of zero."""
    d, y, f, r = config.width, config.num_layers, config.ffn, config.rank
    whole = {"project": Spec((d, y, f), ("embed", None, "ffn"), "zeros", inputs=(0,))}
    factors = {
        "down": Spec((d, r), ("embed", None), inputs=(0,)),
        "up": Spec((r, y, f), (None, None, "ffn"), "zeros", inputs=(0,)),
    }
    return {
        "mix": Spec((3 * d, d), ("embed", None), inputs=(0,)),
        "mix_bias": Spec((d,), (None,), "zeros"),
        "norm": Spec((d,), (None,), "ones"),
        "norm_bias": Spec((d,), (None,), "zeros"),
    } | (factors if r else whole)


def start(params: dict[str, Any]) -> dict[str, Any]:
    """Returns fresh weights as published: the mix starts as the sum of the three layers."""
    width = params["mix"].shape[1]
    return params | {"mix": jnp.tile(jnp.eye(width, dtype=params["mix"].dtype), (3, 1))}


def normed(params: dict[str, Any], features_btj: jax.Array) -> jax.Array:
    """Returns LayerNorm(g), [b, t, d]."""
    g_btd = jnp.einsum("btj,jd->btd", features_btj, params["mix"]) + params["mix_bias"]
    return layer_norm(g_btd, params["norm"], params["norm_bias"], EPS)


def shifts(params: dict[str, Any], normed_bd: jax.Array) -> jax.Array:
    """Returns the shifts of every layer, [b, y, f], from the result of `normed` at one position."""
    if "project" in params:
        return jnp.einsum("bd,dyf->byf", normed_bd, params["project"])
    return jnp.einsum("br,ryf->byf", jnp.einsum("bd,dr->br", normed_bd, params["down"]), params["up"])


def layer_shifts(params: dict[str, Any], normed_btd: jax.Array) -> Callable[[int], jax.Array]:
    """Returns a function of the layer to its shifts at every position, [b, t, f]: in training all layers do not fit."""
    if "project" in params:
        return lambda layer: jnp.einsum("btd,df->btf", normed_btd, params["project"][:, layer])
    low_btr = jnp.einsum("btd,dr->btr", normed_btd, params["down"])
    return lambda layer: jnp.einsum("btr,rf->btf", low_btr, params["up"][:, layer])
