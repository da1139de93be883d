"""What a drafted distribution is trained to be: losses by name, of logits against the verifier's or against the token.

A loss is one function and one line in LOSSES; each gives a value per row, in float32 at least. Rows come a chunk at a
time (objective.py), so nothing here holds the logits of a batch.

Shape suffixes: `...` any leading axes, v vocabulary.

Source: DFlash (arXiv 2602.06036) for cross-entropy; TreeFlash (arXiv 2606.03819) for the forward KL.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from treeflash_jax import vocab


@struct.dataclass
class Targets:
    """What a drafted row is held against.

    Attributes:
      labels: the token that followed, [...].
      log_probs: of the verifier at temperature 1, [..., v]; None where no loss asks for them.
    """

    labels: jax.Array
    log_probs: jax.Array | None


def cross_entropy(logits: jax.Array, targets: Targets) -> jax.Array:
    """-log q(label)."""
    picked = vocab.take(logits, targets.labels[..., None])[..., 0]
    return vocab.log_sum_exp(logits) - picked


def forward_kl(logits: jax.Array, targets: Targets) -> jax.Array:
    """KL(p || q) = sum p (log p - log q); its gradient is q - p."""
    log_q = log_softmax(logits)
    return jnp.sum(jnp.exp(targets.log_probs) * (targets.log_probs - log_q), axis=-1)


def total_variation(logits: jax.Array, targets: Targets) -> jax.Array:
    """1 - sum min(p, q): the share of drafted tokens that the best coupling must reject."""
    return 1.0 - overlap(logits, targets)


def overlap(logits: jax.Array, targets: Targets) -> jax.Array:
    """sum min(p, q)."""
    return jnp.sum(jnp.minimum(jnp.exp(targets.log_probs), jnp.exp(log_softmax(logits))), axis=-1)


def log_softmax(logits: jax.Array) -> jax.Array:
    """In float32 at least."""
    return jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))


LOSSES: dict[str, Callable[[jax.Array, Targets], jax.Array]] = {
    "cross-entropy": cross_entropy,
    "forward-kl": forward_kl,
    "total-variation": total_variation,
}
NEEDS_VERIFIER = frozenset({"forward-kl", "total-variation"})
