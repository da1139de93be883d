"""Losses of drafted distributions: of logits against the verifier's distribution or against the next token.

They return a value per drafted token, in float32 at least.

Shape suffixes: `...` any leading axes, v vocabulary.

Source: DFlash (arXiv 2602.06036) for cross-entropy; TreeFlash (arXiv 2606.03819) for the forward KL.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from train.runtime.training_state import Sums
from treeflash_jax.models import vocab

LossName = Literal["cross-entropy", "forward-kl"]  # the latter reads the verifier's distribution


def drafting_loss(logits: jax.Array, labels: jax.Array, log_p: jax.Array | None) -> jax.Array:
    """Returns the forward KL from the verifier's distribution `log_p` [..., v], or without it the cross-entropy."""
    return cross_entropy(logits, labels) if log_p is None else forward_kl(logits, log_p)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """-log q(label)."""
    return vocab.log_sum_exp(logits) - vocab.take(logits, labels[..., None])[..., 0]


def forward_kl(logits: jax.Array, log_p: jax.Array) -> jax.Array:
    """KL(p || q) = sum p (log p - log q); its gradient is q - p."""
    return jnp.sum(jnp.exp(log_p) * (log_p - log_softmax(logits)), axis=-1)


def overlap(logits: jax.Array, log_p: jax.Array) -> jax.Array:
    """sum min(p, q)."""
    return jnp.sum(jnp.minimum(jnp.exp(log_p), jnp.exp(log_softmax(logits))), axis=-1)


def log_softmax(logits: jax.Array) -> jax.Array:
    """Computes in float32 at least."""
    return jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))


def path_sums(
    loss_bni: jax.Array, weights_bni: jax.Array, real_bni: jax.Array, top1_bni: jax.Array, overlap_bni: jax.Array | None
) -> Sums:
    """Returns metric sums of drafted paths, n per sequence.

    Args:
      real_bni: 1 for depths that count, 0 for those past the end of the document.
      top1_bni: 1 if the likeliest token is the next token.
      overlap_bni: sum min(p, q); None without the verifier's distribution.

    Returns:
      "loss"; per depth "top1" and "overlap"; "tau_estimate", 1 + the expected number of accepted tokens, over paths that
      count at every depth. A token is accepted with probability overlap (0 or 1 for top1) if all before it are.
    """
    top1_bni = top1_bni * real_bni
    accepted_bni, total_i = top1_bni, jnp.sum(real_bni, axis=(0, 1))
    sums = {"loss": (jnp.sum(loss_bni * weights_bni), jnp.sum(weights_bni))}
    sums["top1"] = jnp.sum(top1_bni, axis=(0, 1)), total_i
    if overlap_bni is not None:
        accepted_bni = overlap_bni * real_bni
        sums["overlap"] = (jnp.sum(accepted_bni, axis=(0, 1)), total_i)
    whole_bn = jnp.prod(real_bni, axis=-1)
    tau_bn = 1.0 + jnp.sum(jnp.cumprod(accepted_bni, axis=-1), axis=-1)
    return sums | {"tau_estimate": (jnp.sum(tau_bn * whole_bn), jnp.sum(whole_bn))}
