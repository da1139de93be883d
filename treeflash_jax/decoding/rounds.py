"""One round of tree decoding, phase by phase: draft a block, build a tree, verify it in one pass, accept, commit.

Each phase is a pure function, so that benchmarks can time it. One-token decoding is the same round with a tree of one
node and no drafter.

Shape suffixes: b batch, n tree nodes, p accepted path, c children kept, s token slots, t positions, d model, j tapped
layers x model, v vocabulary.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treeflash_jax import trees
from treeflash_jax.core import sharding
from treeflash_jax.decoding.accepting import DRAFT_STREAM, EmittedPath, accept_path, round_keys
from treeflash_jax.decoding.automaton import ConstrainedExpander
from treeflash_jax.decoding.emitting import emit
from treeflash_jax.decoding.state import DecodePlan, DecodeState, Weights
from treeflash_jax.decoding.tree_choice import choose_trees
from treeflash_jax.drafters import Inputs, NewPositions
from treeflash_jax.models import caches, decoder, kernels
from treeflash_jax.models.backend.indexing import pick

Draft = tuple[trees.DraftTree, trees.Proposal | None]  # a tree, and the distribution of its nodes if they were drawn


@struct.dataclass
class Verified:
    """Outputs of one verifier pass over a tree.

    Attributes:
      logits_bnv: logits of all nodes, in the residual stream's dtype, possibly sharded over the vocabulary; None after
        `keep_path`.
      features_btj: tapped features of all nodes.
      new: results of the layers for all nodes, for `caches.commit`.
    """

    logits_bnv: jax.Array | None
    features_btj: jax.Array
    new: tuple[Any, ...]


def decode_round(weights: Weights, state: DecodeState, plan: DecodePlan) -> DecodeState:
    """Drafts, verifies, accepts and commits. Every sequence that is not done gets at least one token."""
    tree, proposal = draft_tree(weights, state, plan)
    verify = verify_and_accept
    if plan.drafts and plan.configured_drafter.may_offer_nothing:
        verify = _verify_if_drafted
    verified, accepted = verify(weights, state, tree, proposal, plan)
    return commit_path(weights, state, verified, accepted, plan)


def _verify_if_drafted(
    weights: Weights, state: DecodeState, tree: trees.DraftTree, proposal: trees.Proposal | None, plan: DecodePlan
) -> tuple[Verified, EmittedPath]:
    """Verifies and accepts. If every draft tree is empty, only the roots are verified, as fast as a one-token step.

    The choice depends on the text alone, so the output stays exact although the roots use another rule. With a sampled
    rule, however, the random numbers of an answer then depend on whether any sequence of its batch has a draft.
    """

    def verify_trees() -> tuple[Verified, EmittedPath]:
        verified, accepted = verify_and_accept(weights, state, tree, proposal, plan)
        return keep_path(verified, accepted, plan.path_length)

    def verify_roots() -> tuple[Verified, EmittedPath]:
        root_plan = replace(plan, num_nodes=1, rule="sample-and-match")
        verified, accepted = verify_and_accept(weights, state, trees.first(tree, 1), None, root_plan)
        return keep_path(verified, accepted, plan.path_length)

    is_drafted = jnp.any(tree.valid_bn[:, 1:] & ~state.done_b[:, None])
    return lax.cond(is_drafted, verify_trees, verify_roots)


def verify_and_accept(
    weights: Weights, state: DecodeState, tree: trees.DraftTree, proposal: trees.Proposal | None, plan: DecodePlan
) -> tuple[Verified, EmittedPath]:
    """Verifies a tree in one pass and returns the path that the plan's rule keeps."""
    verified = verify_tree(weights, state, tree, plan)
    return verified, accept_path(state, tree, proposal, verified.logits_bnv, plan, weights.processor)


def keep_path(verified: Verified, accepted: EmittedPath, length: int) -> tuple[Verified, EmittedPath]:
    """Cuts the outputs for a tree to its accepted path, padded to `length` nodes, as `commit_path` needs them."""

    def pad(x_bp: jax.Array) -> jax.Array:
        return jnp.pad(x_bp, ((0, 0), (0, length - x_bp.shape[1]), *((0, 0),) * (x_bp.ndim - 2)))

    def cut(x_bn: jax.Array) -> jax.Array:
        return pad(pick(x_bn, accepted.path_bp))

    kept = Verified(None, cut(verified.features_btj), jax.tree.map(cut, verified.new))
    path_bp = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (accepted.length_b.size, length))
    log_probs = jax.tree.map(pad, accepted.log_probs)
    return kept, accepted.replace(path_bp=path_bp, tokens_bp=pad(accepted.tokens_bp), log_probs=log_probs)


def draft_tree(weights: Weights, state: DecodeState, plan: DecodePlan) -> Draft:
    """Returns the tree below each anchor."""
    if not plan.drafts:
        return trees.root_only(find_anchor(state)), None
    return build_tree(weights, state, draft_expander(weights, state, plan), plan)


def draft_expander(weights: Weights, state: DecodeState, plan: DecodePlan) -> trees.Expander:
    """Runs the drafter. A network that runs once per level is only set up here; it runs while the tree is built."""
    inputs = Inputs(
        params=weights.drafter,
        verifier_params=weights.verifier,
        state=state.drafter,
        anchor_b=find_anchor(state),
        temperature_b=state.sampling.drafter_temperature_b,
        depths=max(plan.path_length - 1, 1),
        tokens_bs=state.tokens_bs,
        length_b=state.cache.length_b + 1,
        attention=plan.attention,
        cache=state.cache,
    )
    with jax.named_scope("draft"):
        expander = plan.configured_drafter.draft(inputs)
        automaton = state.sampling.automaton
        return expander if automaton is None else ConstrainedExpander(expander, automaton, state.automaton_b)


def build_tree(weights: Weights, state: DecodeState, expander: trees.Expander, plan: DecodePlan) -> Draft:
    """Returns the trees of `draft_tree`, given the drafter's expander."""
    builder = trees.BUILDERS[plan.builder]
    key_b = round_keys(state, DRAFT_STREAM) if builder.draws else None

    def build(expander: trees.Expander, anchor_b: jax.Array, key_b: jax.Array | None, choice_b: jax.Array | None):
        noise_bnc = None if key_b is None else trees.draw_noise(key_b, expander, plan.num_nodes)
        return builder.build(trees.TreeInputs(expander, anchor_b, plan.num_nodes, plan.shape, noise_bnc, choice_b))

    with jax.named_scope("tree"):
        choice_b = None if plan.shape.selector is None else choose_trees(weights, state, expander)
        if expander.is_table:
            build = partial(sharding.over_batch, build)
        return build(expander, find_anchor(state), key_b, choice_b)


def verify_tree(weights: Weights, state: DecodeState, tree: trees.DraftTree, plan: DecodePlan) -> Verified:
    """Runs one verifier pass over all nodes; the caches are only read."""
    with jax.named_scope("verify"), kernels.use(plan.shared.kernels):
        positions_bn = state.cache.length_b[:, None] + tree.depth_bn
        mask_bnn = trees.ancestor_mask(tree.parent_bn, plan.path_length - 1)
        out = decoder.forward(
            weights.verifier, plan.shared.verifier, tree.tokens_bn, positions_bn, mask_bnn, state.cache,
            taps=plan.shared.taps, attention=plan.attention, residual_dtype=plan.shared.residual_dtype, is_tree=True,
        )  # fmt: skip
        logits_bnv = decoder.logits(weights.verifier, plan.shared.verifier, out.hidden_btd)
        return Verified(logits_bnv, out.features_btj, out.new)


def commit_path(
    weights: Weights,
    state: DecodeState,
    verified: Verified,
    accepted: EmittedPath,
    plan: DecodePlan,
) -> DecodeState:
    """Returns the state after the round, with the positions of the accepted path in both caches."""
    with jax.named_scope("commit"):
        is_round_bs = (jnp.arange(state.capacity) == state.rounds_b[:, None]) & ~state.done_b[:, None]

        def store(x_bs: jax.Array, value_b: jax.Array) -> jax.Array:
            return jnp.where(is_round_bs, value_b.astype(x_bs.dtype)[:, None], x_bs)

        state = state.replace(
            expected_bs=None if state.expected_bs is None else store(state.expected_bs, accepted.expected_b),
            accepted_bs=store(state.accepted_bs, accepted.length_b),
            rounds_b=state.rounds_b + ~state.done_b,
        )
        state, kept_b = emit(
            state,
            accepted.tokens_bp,
            accepted.length_b,
            accepted.log_probs,
            vocab_size=plan.shared.verifier.vocab_size,
            processor=weights.processor,
        )
        drafter = state.drafter
        if plan.drafts:
            features_bpj = pick(verified.features_btj, accepted.path_bp)
            new = NewPositions(features_bpj, accepted.tokens_bp, kept_b, plan.attention)
            drafter = plan.shared.loaded_drafter.extend(weights.drafter, weights.verifier, drafter, new)
        cache = caches.commit(state.cache, verified.new, kept_b, accepted.path_bp)
        return state.replace(cache=cache, drafter=drafter)


def find_anchor(state: DecodeState) -> jax.Array:
    return jnp.take_along_axis(state.tokens_bs, state.cache.length_b[:, None], axis=1)[:, 0]
