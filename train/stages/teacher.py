"""The frozen verifier in training: one clean pass over packed sequences, from which every kind of drafter learns."""

from __future__ import annotations

from typing import Any

import jax
from flax import struct

from train.data.packing import Batch
from treeflash_jax.models import verifier
from treeflash_jax.models.backend.packed_attention import PackedMask
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


def teach(params: Any, config: ModelConfig, taps: tuple[int, ...], batch: Batch, attention: str = "chunked") -> Teacher:
    """Runs the verifier over packed sequences, unless the batch has its outputs. Its attention runs forward only.

    Args:
      taps: 0-based layers, in the order in which the drafter reads them.
      attention: implementation, a name in `attention.TRAINING`.
    """
    if batch.hidden_btd is not None:
        return Teacher(batch.features_btj, batch.hidden_btd)
    mask = PackedMask(batch.segments_bt, batch.segments_bt)
    out = verifier.forward(params, config, batch.tokens_bt, batch.positions_bt, mask, taps=taps, attention=attention)
    return jax.lax.stop_gradient(Teacher(out.features_btj, out.hidden_btd))
