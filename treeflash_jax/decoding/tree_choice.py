"""Runs a tree selector (`trees.sampled.tree_selector`) on features of the decoding state.

Shape suffixes: b batch, s token slots, c children of the anchor, f features.
"""

import jax
import jax.numpy as jnp

from treeflash_jax import trees
from treeflash_jax.decoding.state import DecodeState, Weights
from treeflash_jax.trees.sampled.tree_selector import score_trees

RECENT = 8  # number of rounds whose mean length is a feature


def choose_trees(weights: Weights, state: DecodeState, expander: trees.Expander) -> jax.Array:
    """Returns the index of each sequence's tree in the selector's list, [b]."""
    return jnp.argmax(score_trees(weights.tree_selector, make_features(state, expander)), axis=1)


def make_features(state: DecodeState, expander: trees.Expander) -> jax.Array:
    """Returns the inputs of a tree selector, float32 [b, f], in the order of `tree_selector.FEATURES`.

    They do not depend on the draws of the round.
    """
    log_p_bc = expander.children(jnp.int32(0), expander.start(1))[1][:, 0]
    entropy_b = -jnp.sum(jnp.where(jnp.isfinite(log_p_bc), jnp.exp(log_p_bc) * log_p_bc, 0), axis=-1)
    age_bs = state.rounds_b[:, None] - jnp.arange(state.capacity)  # age of each round; the last has age 1
    recent_b = jnp.sum(jnp.where((age_bs >= 1) & (age_bs <= RECENT), state.accepted_bs, 0), axis=1)
    last_b = jnp.sum(jnp.where(age_bs == 1, state.accepted_bs, 0), axis=1)
    recent_b /= jnp.clip(state.rounds_b, 1, RECENT)
    numbers = state.sampling.numbers
    top_b = jnp.exp(jnp.max(log_p_bc, axis=-1))
    log_length_b = jnp.log(state.end_b)
    features = recent_b, last_b, entropy_b, top_b, log_length_b, numbers["temperature"], numbers["top_p"]
    return jnp.stack(features, axis=1, dtype=jnp.float32)
