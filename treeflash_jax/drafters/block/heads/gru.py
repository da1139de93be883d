"""The Domino head: a GRU over the drafted path corrects the marginal logits.

    s_i = GRU(e(token before depth i), s_{i-1}), no biases;   logits_i = marginal_i + W silu(M [z_i; s_i])

e is the verifier's embedding, z_i the slot's hidden state after the final norm. With W = 0, as at the start of training,
the head equals the marginal head.

Shape suffixes: as in path_head; y the gates r, z, n.

Source: Domino-Tree (arXiv 2607.08642).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from treeflash_jax.core.parameters import Entry, Params, Spec
from treeflash_jax.drafters.block.heads.block_head import DrafterSizes, Unembed, head_rank, scored_size
from treeflash_jax.drafters.block.heads.path_head import PathHead
from treeflash_jax.models.quantized import product


@dataclass(frozen=True)
class GruSizes:
    """Width of the GRU, and the number of leading depths that draft from the marginals."""

    width: int
    prefix: int = 1


class GruHead(PathHead):
    file_name = "gru"
    entries: ClassVar[dict[str, Entry]] = {
        "gru_in": Entry("prefix_gru.weight_ih_l0", order=(1, 2, 0), row_axes=2),
        "gru_state": Entry("prefix_gru.weight_hh_l0", order=(1, 2, 0), row_axes=2),
        "mix": Entry("embed_proj.0.weight", order=(1, 0)),
        "out": Entry("embed_proj.2.weight", order=(0, 1)),
    }
    scored = ("out",)

    def sizes(self, drafter: DrafterSizes) -> GruSizes:
        return drafter.head_sizes or GruSizes(min(1024, drafter.layers.hidden_size))

    def specs(self, drafter: DrafterSizes) -> dict[str, Any]:
        d = drafter.layers.hidden_size
        width = self.state_size(drafter)
        rank = head_rank(drafter)
        return {
            "gru_in": Spec((d, 3, width), ("embed", None, None), inputs=(0,), outputs=(1, 2)),
            "gru_state": Spec((width, 3, width), (None, None, None), inputs=(0,), outputs=(1, 2)),
            "mix": Spec((d + width, rank), (None, None), inputs=(0,), outputs=(1,)),
            "out": Spec((scored_size(drafter), rank), ("vocab", None), "zeros", inputs=(1,)),
        }

    def prefix(self, drafter: DrafterSizes) -> int:
        return self.sizes(drafter).prefix

    def state_size(self, drafter: DrafterSizes) -> int:
        return self.sizes(drafter).width

    def step(
        self, params: Params, unembed: Unembed, state: jax.Array, token: jax.Array, normed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        new = product("...d,dys->...ys", unembed.embed(token), params["gru_in"])
        old = product("...t,tys->...ys", state, params["gru_state"])
        reset = jax.nn.sigmoid(new[..., 0, :] + old[..., 0, :])
        update = jax.nn.sigmoid(new[..., 1, :] + old[..., 1, :])
        state = (1 - update) * jnp.tanh(new[..., 2, :] + reset * old[..., 2, :]) + update * state
        of_slot, of_state = jnp.split(params["mix"], [normed.shape[-1]])
        mixed = product("...d,dk->...k", normed, of_slot) + product("...s,sk->...k", state, of_state)
        return jax.nn.silu(mixed), state
