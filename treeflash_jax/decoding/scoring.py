"""The verifier's log-probabilities of tokens: emitted ones, and given ones such as a prompt's.

Shape suffixes: b batch, p emitted tokens, s token slots, t positions, x positions of a chunk, k likeliest tokens, d model,
v vocabulary.
"""

import jax
import jax.numpy as jnp

from treeflash_jax.core import sharding
from treeflash_jax.decoding.state import LogProbs, Weights
from treeflash_jax.models import decoder, vocab
from treeflash_jax.models.config import ModelConfig


def compute_log_probs(logits_bpv: jax.Array, tokens_bp: jax.Array, top: int) -> LogProbs:
    """Returns the log-probabilities of the given tokens, and of the `top` likeliest tokens."""
    token_bp1 = vocab.take(logits_bpv, tokens_bp[..., None])
    total_bp1 = vocab.log_sum_exp(logits_bpv)[..., None]
    if top:
        top_bpk, top_ids_bpk = vocab.top_k(logits_bpv, top)
    else:
        top_bpk, top_ids_bpk = token_bp1[..., :0], tokens_bp[..., None][..., :0]
    token_bp = (token_bp1 - total_bp1).astype(jnp.float32)
    top_bpk = (top_bpk - total_bp1).astype(jnp.float32)
    return LogProbs(token_bp[..., 0], top_ids_bpk.astype(jnp.int32), top_bpk)


def score_tokens(
    weights: Weights,
    verifier: ModelConfig,
    log_probs: LogProbs,
    hidden_btd: jax.Array,
    next_bt: jax.Array,
    positions_bt: jax.Array,
    is_known_bt: jax.Array,
) -> LogProbs:
    """Returns `log_probs` with the log-probabilities of given tokens added, such as a prompt's.

    At most CHUNK_BYTES of logits exist at a time.

    Args:
      hidden_btd: hidden states at the positions before the tokens.
      next_bt: the tokens. Entries are ignored if `is_known_bt` is False.
      positions_bt: positions of the tokens in the text.
    """
    top = log_probs.top_bsk.shape[-1]

    def score(hidden_bxd: jax.Array, next_bx: jax.Array) -> LogProbs:
        return compute_log_probs(decoder.logits(weights.verifier, verifier, hidden_bxd), next_bx, top)

    new = vocab.by_chunks(score, verifier.vocab_size, hidden_btd, next_bt)
    at_bt = jnp.where(is_known_bt, positions_bt, log_probs.token_bs.shape[1])
    write = jax.vmap(lambda x_s, at_t, new_t: x_s.at[at_t].set(new_t, mode="drop"))
    written = jax.tree.map(lambda x_bs, new_bt: write(x_bs, at_bt, new_bt), log_probs, new)
    return jax.tree.map(lambda x_bs: sharding.constrain(x_bs, ("batch",) + (None,) * (x_bs.ndim - 1)), written)
