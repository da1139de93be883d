"""Inputs and results of acceptance rules.

Shape suffixes: b batch, n tree nodes, v vocabulary, p places of an accepted path (depths + root), c tokens of a node's
support, x requested tokens or draws (n - 1).
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.models import vocab
from treeflash_jax.models.backend.indexing import pick
from treeflash_jax.trees import DraftTree, ancestor_mask


@struct.dataclass
class TargetDistribution:
    """The verifier's distribution after every node: softmax(logits / temperature), cut by top-k, top-p and min-p.

    Attributes:
      logits_bnv: the processed logits, in the dtype of the logits, possibly sharded over the vocabulary.
      temperature_b: 0 is greedy.
      threshold_bn: tokens with a logit below it have probability zero.
      peak_bn: the largest logit.
      log_normaliser_bn: log-sum-exp of (kept logits - peak) / temperature.
    """

    logits_bnv: jax.Array
    temperature_b: jax.Array
    threshold_bn: jax.Array
    peak_bn: jax.Array
    log_normaliser_bn: jax.Array

    def gather(self, ids_bnx: jax.Array) -> jax.Array:
        """Returns log-probabilities of tokens, [b, n, x]; -inf for filtered tokens. Greedy: 0 for the argmax, else -inf."""
        logits_bnx = vocab.take(self.logits_bnv, ids_bnx)
        kept_bnx = (logits_bnx >= self.threshold_bn[..., None]) & (logits_bnx > -jnp.inf)
        log_p_bnx = _scaled(logits_bnx, self.peak_bn, self.temperature_b) - self.log_normaliser_bn[..., None]
        log_p_bnx = jnp.where(kept_bnx, log_p_bnx, -jnp.inf)
        best_bn = vocab.argmax(self.logits_bnv)
        greedy_bnx = jnp.where(ids_bnx == best_bn[..., None], 0.0, -jnp.inf)
        return jnp.where((self.temperature_b > 0)[:, None, None], log_p_bnx, greedy_bnx)

    def sample(self, gumbel_bnv: jax.Array) -> jax.Array:
        """Returns argmax(kept logits + temperature * gumbel) at every node, [b, n]: an exact sample of the distribution."""
        kept_bnv = self.logits_bnv >= self.threshold_bn[..., None]
        noisy_bnv = self.logits_bnv + self.temperature_b[:, None, None].astype(gumbel_bnv.dtype) * gumbel_bnv
        return vocab.argmax(jnp.where(kept_bnv, noisy_bnv, -jnp.inf))

    def residual(self, node_b: jax.Array, support_bc: jax.Array, residual_bc: jax.Array) -> jax.Array:
        """Returns the log of one node's distribution with other probabilities on the support; unnormalised, [b, v].

        If the remaining mass is within rounding error, returns the node's unchanged distribution. A walk ends there with at
        most that probability.
        """
        at_b1 = node_b[:, None]
        logits_bv = pick(self.logits_bnv, at_b1)[:, 0]
        scaled_bv = _scaled(logits_bv[:, None], pick(self.peak_bn, at_b1), self.temperature_b)[:, 0]
        kept_bv = logits_bv >= pick(self.threshold_bn, at_b1)
        log_p_bv = jnp.where(kept_bv, scaled_bv - pick(self.log_normaliser_bn, at_b1), -jnp.inf)
        ids_bv = lax.broadcasted_iota(jnp.int32, log_p_bv.shape, 1)
        greedy_bv = jnp.where(ids_bv == vocab.argmax(scaled_bv)[:, None], 0.0, -jnp.inf)
        log_p_bv = jnp.where((self.temperature_b > 0)[:, None], log_p_bv, greedy_bv)
        left_bv = vocab.put(log_p_bv, support_bc, jnp.log(residual_bc).astype(log_p_bv.dtype))
        mass_b1 = jnp.sum(jnp.exp(left_bv), axis=-1, keepdims=True)
        return jnp.where(mass_b1 > 4 * jnp.finfo(left_bv.dtype).eps, left_bv, log_p_bv)


@struct.dataclass
class Noise:
    """Random numbers of one round. A rule reads either the first field or the other two.

    Attributes:
      gumbel_bpv: Gumbel noise for the token after a node of depth p; all nodes of a depth share it.
      coins_bx: uniforms in [0, 1), drawn anew in every round: one per draw, or one per node below the root.
      bonus_bv: Gumbel noise for the token after the last accepted node.
    """

    gumbel_bpv: jax.Array
    coins_bx: jax.Array | None = None
    bonus_bv: jax.Array | None = None


@struct.dataclass
class Acceptance:
    """Accepted path of one round.

    Attributes:
      path_bp: accepted nodes, root first; entries from `length_b` on are 0.
      length_b: number of accepted nodes, root included. The round commits as many tokens, bonus token included.
      bonus_b: the token after the last accepted node. It is the next anchor.
    """

    path_bp: jax.Array
    length_b: jax.Array
    bonus_b: jax.Array


def deepest_match(tree: DraftTree, matches_bn: jax.Array, length: int) -> jax.Array:
    """Returns the deepest node that matches and whose ancestors below the root all match, [b].

    A node matches if the walk goes to it from its parent; at most one child of a node may match. `length`, static, is the
    number of places of a path, root included: at least the tree's depth + 1.
    """
    matches_bn = matches_bn.at[:, 0].set(True)
    reached_bn = jnp.all(matches_bn[:, None] | ~ancestor_mask(tree.parent_bn, length - 1), axis=-1)
    return jnp.argmax(jnp.where(reached_bn, tree.depth_bn + 1, 0), axis=-1)


def path_to(tree: DraftTree, last_b: jax.Array, bonus_b: jax.Array, length: int) -> Acceptance:
    """Returns the path from the root to `last_b`, and the token after it. `length` is as in `deepest_match`."""
    above_bnn = ancestor_mask(tree.parent_bn, length - 1)
    on_path_bn = jnp.take_along_axis(above_bnn, last_b[:, None, None], axis=1)[:, 0]
    at_depth_bpn = on_path_bn[:, None] & (tree.depth_bn[:, None] == jnp.arange(length)[:, None])
    return Acceptance(
        path_bp=jnp.argmax(at_depth_bpn, axis=-1).astype(jnp.int32),
        length_b=jnp.take_along_axis(tree.depth_bn, last_b[:, None], axis=1)[:, 0] + 1,
        bonus_b=bonus_b,
    )


def target_distribution(
    logits_bnv: jax.Array,
    temperature_b: jax.Array,
    top_k_b: jax.Array,
    top_p_b: jax.Array,
    min_p_b: jax.Array | float = 0.0,
) -> TargetDistribution:
    """Returns the verifier's distribution at every node. The order is temperature, top-k, top-p, min-p.

    Args:
      temperature_b: 0 is greedy; filters then have no effect.
      top_k_b: number of tokens to keep; 0 keeps all.
      top_p_b: mass to keep; 1 keeps all.
      min_p_b: smallest probability to keep, as a fraction of the largest; 0 keeps all.
    """
    min_p_b = jnp.broadcast_to(min_p_b, temperature_b.shape)
    cuts_b = (temperature_b > 0) & ((top_k_b > 0) | (top_p_b < 1) | (min_p_b > 0))

    def threshold() -> jax.Array:
        safe_b1 = jnp.where(temperature_b > 0, temperature_b, 1)[:, None]
        return vocab.filter_threshold(logits_bnv, safe_b1, top_k_b[:, None], top_p_b[:, None], min_p_b[:, None])

    no_cut_bn = jnp.full(logits_bnv.shape[:2], -jnp.inf, logits_bnv.dtype)
    threshold_bn = lax.cond(jnp.any(cuts_b), threshold, lambda: no_cut_bn)
    peak_bn = jnp.max(logits_bnv, axis=-1)
    scaled_bnv = _scaled(logits_bnv, peak_bn, temperature_b)
    mass_bn = jnp.sum(jnp.where(logits_bnv >= threshold_bn[..., None], jnp.exp(scaled_bnv), 0), axis=-1)
    return TargetDistribution(logits_bnv, temperature_b, threshold_bn, peak_bn, jnp.log(mass_bn))


def _scaled(logits_bnx: jax.Array, peak_bn: jax.Array, temperature_b: jax.Array) -> jax.Array:
    """Returns (logits - peak) / temperature in float32 at least; logits - peak for greedy sequences.

    At low temperature, logits / temperature would be so large that rounding changes the exponential.
    """
    dtype = at_least_float32(logits_bnx.dtype)
    divisor_b = jnp.where(temperature_b > 0, temperature_b, 1.0).astype(dtype)
    return (logits_bnx.astype(dtype) - peak_bn[..., None].astype(dtype)) / divisor_b[:, None, None]
