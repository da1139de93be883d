"""Losses of drafted distributions, against the verifier's distribution or the next token, and weights of drafted tokens.

Losses return one value per drafted token, in float32 at least.

Shape suffixes: `...` any leading axes, v vocabulary, b sequences, n paths, i depths.

Source: DFlash (arXiv 2602.06036) for cross-entropy; TreeFlash (arXiv 2606.03819) for the forward KL; DSpark (arXiv
2607.05147) for cross-entropy with the L1 distance; D-PACE (arXiv 2605.18810) for weights.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from train.runtime.training_state import Sums
from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.models import vocab

LossName = Literal["cross-entropy", "forward-kl", "cross-entropy-l1"]  # the last two read the verifier's distribution


def drafting_loss(name: LossName, logits: jax.Array, labels: jax.Array, log_p: jax.Array | None) -> jax.Array:
    """Computes the loss with this name.

    Args:
      labels: next tokens [...].
      log_p: log-probabilities of the verifier's distribution [..., v]; None if the loss does not read them.
    """
    if name == "forward-kl":
        return forward_kl(logits, log_p)
    if name == "cross-entropy-l1":
        return 0.1 * cross_entropy(logits, labels) + 0.9 * l1_distance(logits, log_p)
    return cross_entropy(logits, labels)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns -log q(label)."""
    return vocab.log_sum_exp(logits) - vocab.take(logits, labels[..., None])[..., 0]


def forward_kl(logits: jax.Array, log_p: jax.Array) -> jax.Array:
    """Returns KL(p || q) = sum p (log p - log q); its gradient is q - p."""
    return jnp.sum(jnp.exp(log_p) * (log_p - log_softmax(logits)), axis=-1)


def l1_distance(logits: jax.Array, log_p: jax.Array) -> jax.Array:
    """Returns sum |p - q|, which is 2 - 2 sum min(p, q)."""
    return jnp.sum(jnp.abs(jnp.exp(log_p) - jnp.exp(log_softmax(logits))), axis=-1)


def overlap(logits: jax.Array, log_p: jax.Array) -> jax.Array:
    """Returns sum min(p, q)."""
    return jnp.sum(jnp.minimum(jnp.exp(log_p), jnp.exp(log_softmax(logits))), axis=-1)


def log_softmax(logits: jax.Array) -> jax.Array:
    """Returns log-probabilities, computed in float32 at least."""
    return jax.nn.log_softmax(logits.astype(at_least_float32(logits.dtype)))


def dpace_weights(label_probs_bni: jax.Array, real_bni: jax.Array) -> jax.Array:
    """Returns the loss weights of D-PACE, which measure how much the length of the accepted path depends on each depth.

    Depth i is reached with probability r_i = prod_{l <= i} f_l, with f_l = (1 + q_l) / 2. Its weight is the sum of r_l over
    all l >= i.

    Args:
      label_probs_bni: the drafter's probabilities q of the next tokens.
      real_bni: 1 for depths that count. For other depths, f is 1 and the weight is 0.
    """
    factors_bni = jnp.where(real_bni > 0, (1 + label_probs_bni) / 2, 1.0)
    reached_bni = jnp.cumprod(factors_bni, axis=-1) * real_bni
    return lax.cumsum(reached_bni, axis=2, reverse=True) * real_bni


def path_sums(
    loss_bni: jax.Array, weights_bni: jax.Array, real_bni: jax.Array, top1_bni: jax.Array, overlap_bni: jax.Array | None
) -> Sums:
    """Returns metric sums of drafted paths, n per sequence.

    Args:
      real_bni: 1 for depths that count, 0 for those past the end of the document.
      top1_bni: 1 if the likeliest token is the next token.
      overlap_bni: sum min(p, q); None without the verifier's distribution.

    Returns:
      "loss"; "top1" and "overlap" per depth; and "tau_estimate", which is 1 + the expected number of accepted tokens, over
      paths that count at every depth. If all tokens before it are accepted, a token is accepted with probability overlap,
      or without overlaps if it is the likeliest.
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
