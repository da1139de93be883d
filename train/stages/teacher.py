"""The frozen verifier in training: one clean pass over packed sequences, from which every kind of drafter learns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from train.data.packing import Batch
from treeflash_jax.models import verifier
from treeflash_jax.models.config import ModelConfig


@struct.dataclass
class Teacher:
    """Outputs of the frozen verifier.

    Attributes:
      features_btj: outputs of the tapped layers, j = layers x model.
      hidden_btd: the states from which logits are made.
    """

    features_btj: jax.Array
    hidden_btd: jax.Array


def document_mask(segments_bt: jax.Array) -> jax.Array:
    """Causal mask inside each document, [b, t, t]."""
    same_bts = segments_bt[:, :, None] == segments_bt[:, None, :]
    return same_bts & jnp.tri(segments_bt.shape[1], dtype=bool)


def teach(params: Any, config: ModelConfig, taps: tuple[int, ...], batch: Batch) -> Teacher:
    """Runs the verifier over packed sequences.

    Args:
      taps: 0-based layers, in the order in which the drafter reads them.
    """
    mask_bts = document_mask(batch.segments_bt)
    out = verifier.forward(params, config, batch.tokens_bt, batch.positions_bt, mask_bts, taps=taps, attention="chunked")
    return jax.lax.stop_gradient(Teacher(out.features_btj, out.hidden_btd))
