"""The frozen verifier in training: one clean pass over packed rows, from which every kind of drafter learns.

Shape suffixes: b batch, s and t row tokens, j tapped layers x model, d model.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from train.data import Rows
from treeflash_jax.verifiers import forward as verifier
from treeflash_jax.verifiers.config import ModelConfig


@struct.dataclass
class Teacher:
    """One clean pass of the frozen verifier over packed rows."""

    features_bsj: jax.Array
    hidden_bsd: jax.Array


def document_mask(segments_bt: jax.Array) -> jax.Array:
    """Causal inside each document, [b, t, t]."""
    same_btu = segments_bt[:, :, None] == segments_bt[:, None, :]
    return same_btu & jnp.tri(segments_bt.shape[1], dtype=bool)


def teach(params: Any, config: ModelConfig, taps: tuple[int, ...], rows: Rows) -> Teacher:
    """What a drafter reads and imitates: features of the tapped layers, and the states from which logits are made.

    Args:
      taps: 0-based layers, in the order in which the drafter reads them.
    """
    out = verifier.forward(
        params,
        config,
        rows.tokens_rt,
        rows.positions_rt,
        document_mask(rows.segments_rt),
        taps=taps,
        attention="chunked",
    )
    return jax.lax.stop_gradient(Teacher(out.features_btj, out.hidden_btd))
