"""One round of tree decoding, stage by stage: draft a block, build a tree, verify it in one pass, accept, commit.

Each stage is a pure function of its own, so that it can be compiled and timed by itself. Plain one-token decoding is the
same round with a tree of one node and no drafter.

Shape suffixes: b batch, n tree nodes, p rows of an accepted path, s token slots, d model, v vocabulary, x stop ids.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treeflash_jax import acceptance as rules
from treeflash_jax import drafters, trees, vocab
from treeflash_jax import mesh as meshes
from treeflash_jax.decoding.state import DecodePlan, DecodeState, Sampling, Weights
from treeflash_jax.verifiers import cache as caches
from treeflash_jax.verifiers import forward as verifier

# Random streams of a row's key. Never shared: a tree that looked at verify noise would not be lossless. Verify noise
# belongs to positions of the text; draws and coins to the round, that is to the position of its root.
VERIFY_STREAM, DRAFT_STREAM, COINS_STREAM = 0, 1, 2
KEPT = 0.8  # of the mean of recent rounds, with every further round


@struct.dataclass
class Verified:
    """What one verifier pass over a tree leaves to the rest of the round.

    Attributes:
      logits_bnv: of all nodes, in the compute dtype, possibly sharded over the vocabulary; None once judged.
      features_btj: tapped features of all nodes; None without a drafter.
      rows: keys and values of all nodes, for `cache.append`.
      routes: experts of all nodes, by sparse layer; no stage of a round reads them.
    """

    logits_bnv: jax.Array | None
    features_btj: jax.Array | None
    rows: caches.NewRows
    routes: tuple[jax.Array, ...] = ()


@struct.dataclass
class Accepted:
    """What a round commits, before any cut at a stop id or limit.

    Attributes:
      path_bp: accepted nodes, root first.
      length_b: how many of them, and of the tokens, are real.
      tokens_bp: the token emitted after each of them, the bonus last.
      log_probs_bp: the verifier's log-probabilities of these tokens; None unless planned.
      expected_b: tokens the round was expected to commit, given its tree; None unless planned.
    """

    path_bp: jax.Array
    length_b: jax.Array
    tokens_bp: jax.Array
    log_probs_bp: jax.Array | None
    expected_b: jax.Array | None


def decode_round(weights: Weights, state: DecodeState, plan: DecodePlan) -> DecodeState:
    """Draft, verify, accept, commit: at least one token for every row that is not done."""
    tree, proposal = draft_tree(weights, state, plan)
    if plan.drafts and drafters.may_offer_nothing(plan.drafter):
        verified, accepted = _judged_if_drafted(weights, state, tree, proposal, plan)
    else:
        verified, accepted = judged(weights, state, tree, proposal, plan)
    return commit_path(weights, state, verified, accepted, plan)


def _judged_if_drafted(
    weights: Weights, state: DecodeState, tree: trees.DraftTree, proposal: trees.Proposal | None, plan: DecodePlan
) -> tuple[Verified, Accepted]:
    """`judged`, of the roots alone where no tree of the batch has anything else: that takes no longer than one token.

    Both branches read the caches and hand on what a path commits. Whether something was drafted is known from the text, so
    that a rule of its own for the roots leaves the verifier's distribution as it is.
    """
    root = replace(plan, num_nodes=1, rule="sample-and-match")

    def whole() -> tuple[Verified, Accepted]:
        return along_path(*judged(weights, state, tree, proposal, plan), plan.path_rows)

    def alone() -> tuple[Verified, Accepted]:
        return along_path(*judged(weights, state, trees.first(tree, 1), None, root), plan.path_rows)

    return lax.cond(jnp.any(tree.valid_bn[:, 1:] & ~state.done_b[:, None]), whole, alone)


def judged(
    weights: Weights, state: DecodeState, tree: trees.DraftTree, proposal: trees.Proposal | None, plan: DecodePlan
) -> tuple[Verified, Accepted]:
    """One verifier pass over a tree, and the path that the plan's rule keeps of it."""
    verified = verify_tree(weights, state, tree, plan)
    return verified, accept_path(state, tree, proposal, verified.logits_bnv, plan)


def along_path(verified: Verified, accepted: Accepted, rows: int) -> tuple[Verified, Accepted]:
    """What a commit reads of a verified tree: its rows along the path, padded to `rows` of them."""

    def pad(x_bp: jax.Array) -> jax.Array:
        return jnp.pad(x_bp, ((0, 0), (0, rows - x_bp.shape[1]), *((0, 0),) * (x_bp.ndim - 2)))

    def cut(x_bn: jax.Array) -> jax.Array:
        return pad(trees.pick(x_bn, accepted.path_bp))

    kept = Verified(None, cut(verified.features_btj), jax.tree.map(cut, verified.rows))
    path_bp = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (accepted.length_b.size, rows))
    log_probs_bp = None if accepted.log_probs_bp is None else pad(accepted.log_probs_bp)
    return kept, accepted.replace(path_bp=path_bp, tokens_bp=pad(accepted.tokens_bp), log_probs_bp=log_probs_bp)


def draft_tree(weights: Weights, state: DecodeState, plan: DecodePlan) -> tuple[trees.DraftTree, trees.Proposal | None]:
    """The tree of one round, drafted from the anchors, and the law its nodes were drawn from, if they were."""
    if not plan.drafts:
        return trees.root_only(_anchor(state)), None
    return build_tree(state, draft_expander(weights, state, plan), plan)


def draft_expander(weights: Weights, state: DecodeState, plan: DecodePlan) -> trees.Expander:
    """All stages of the drafter."""
    value = None
    for name in drafters.of(plan.drafter).stages(plan.drafter):
        value = draft_stage(weights, state, value, plan, name)
    return value


# The stages of a round, in order. Each is a pure function of its own, so that it can be compiled and timed by itself.


def draft_stage(weights: Weights, state: DecodeState, value: Any, plan: DecodePlan, name: str) -> Any:
    """One of the drafter's stages, after the one before it returned `value`; the last returns an Expander."""
    inputs = drafters.Inputs(
        params=weights.drafter,
        tables=weights.verifier,
        config=plan.drafter,
        settings=plan.draft,
        state=state.drafter,
        anchor_b=_anchor(state),
        temperature_b=state.sampling.drafter_temperature_b,
        depths=max(plan.path_rows - 1, 1),
        attention=plan.attention,
    )
    with jax.named_scope(name):
        return drafters.of(plan.drafter).stages(plan.drafter)[name](inputs, value)


def build_tree(
    state: DecodeState, expander: trees.Expander, plan: DecodePlan, choice_b: jax.Array | None = None
) -> tuple[trees.DraftTree, trees.Proposal | None]:
    """The tree below each anchor, and the law its nodes were drawn from, if they were.

    Where the plan's shape lists buckets, `choice_b` says which of them each sequence takes.
    """
    builder = trees.BUILDERS[plan.builder]
    keys = (round_keys(state, DRAFT_STREAM),) if builder.draws else ()

    past = {"recent_b": recent_lengths(state)} if builder.reads_past(plan.shape) else {}
    past |= {} if choice_b is None else {"choice_b": choice_b}

    def build(expander, anchor_b, past, *key_b):
        noise_bnc = trees.draw_noise(*key_b, expander, plan.num_nodes) if key_b else None
        return builder.build(expander, anchor_b, plan.num_nodes, plan.shape, noise_bnc, **past)

    with jax.named_scope("tree"):
        build = partial(meshes.by_rows, build) if expander.is_table else build
        return build(expander, _anchor(state), past, *keys)


def recent_lengths(state: DecodeState) -> jax.Array:
    """Tokens that a round of each sequence commits, averaged with a weight that falls by a fifth a round, [b].

    Before its first round a sequence counts as one that keeps the default trunk of a delayed tree.
    """
    age_bs = state.rounds_b[:, None] - 1 - jnp.arange(state.accepted_bs.shape[1])
    weight_bs = jnp.where(age_bs >= 0, (1 - KEPT) * KEPT ** age_bs.astype(jnp.float32), 0)
    start_b = KEPT ** state.rounds_b.astype(jnp.float32) * (trees.TreeShape().trunk + 1)
    return start_b + jnp.sum(weight_bs * state.accepted_bs, axis=1)


def extend_drafter(
    weights: Weights, drafter: Any, plan: DecodePlan, features_btj: jax.Array, tokens_bt: jax.Array, count_b: jax.Array
) -> Any:
    """The drafter's state after it was shown committed positions; see `drafters.Drafter.extend`."""
    own = drafters.of(plan.drafter)
    return own.extend(weights.drafter, weights.verifier, plan.drafter, drafter, features_btj, tokens_bt, count_b)


def verify_tree(weights: Weights, state: DecodeState, tree: trees.DraftTree, plan: DecodePlan) -> Verified:
    """One pass of the verifier over all nodes; the caches are read, not written."""
    with jax.named_scope("verify"):
        out = verifier.forward(
            weights.verifier,
            plan.verifier,
            tree.tokens_bn,
            state.cache.length_b[:, None] + tree.depth_bn,
            trees.ancestor_mask(tree.parent_bn, plan.path_rows - 1),
            state.cache,
            taps=plan.taps,
            attention=plan.attention,
        )
        return Verified(verifier.logits(weights.verifier, out.hidden_btd), features_of(out, plan), out.rows, out.routes)


def features_of(out: verifier.Output, plan: DecodePlan) -> jax.Array | None:
    """What a drafter reads of new rows: their tapped features, of no width where it taps no layer."""
    if plan.taps or not plan.drafts:
        return out.features_btj
    return jnp.zeros((*out.hidden_btd.shape[:2], 0), out.hidden_btd.dtype)


def accept_path(
    state: DecodeState,
    tree: trees.DraftTree,
    proposal: trees.Proposal | None,
    logits_bnv: jax.Array,
    plan: DecodePlan,
) -> Accepted:
    """The path that the plan's rule keeps, and the tokens it emits."""
    with jax.named_scope("accept"):
        coins_bx, bonus_bv = coins(state, tree.tokens_bn.shape[1] - 1, logits_bnv)
        noise = rules.Noise(_noise(state, plan.path_rows, logits_bnv), coins_bx, bonus_bv)
        rows = _target_rows(logits_bnv, state.sampling)
        taken = rules.RULES[plan.rule].walk(tree, proposal, rows, noise)
        drafted_bp = trees.pick(tree.tokens_bn, taken.path_bp)
        is_bonus_bp = jnp.arange(plan.path_rows) == taken.length_b[:, None] - 1
        emitted_bp = jnp.where(is_bonus_bp, taken.bonus_b[:, None], jnp.roll(drafted_bp, -1, axis=1))
        log_probs_bp = expected_b = None
        if plan.log_probs:
            log_probs_bp = _token_log_probs(trees.pick(logits_bnv, taken.path_bp), emitted_bp)
        if plan.expected_lengths:
            expected_b = jnp.sum(rules.RULES[plan.rule].weights(tree, proposal, rows), axis=1)
        return Accepted(taken.path_bp, taken.length_b, emitted_bp, log_probs_bp, expected_b)


def commit_path(
    weights: Weights, state: DecodeState, verified: Verified, accepted: Accepted, plan: DecodePlan
) -> DecodeState:
    """The state after the round: tokens, statistics, and the rows of the accepted path in both caches."""
    with jax.named_scope("commit"):
        is_round_bs = (jnp.arange(state.capacity) == state.rounds_b[:, None]) & ~state.done_b[:, None]

        def note(x_bs: jax.Array, value_b: jax.Array) -> jax.Array:
            return jnp.where(is_round_bs, value_b.astype(x_bs.dtype)[:, None], x_bs)

        state = state.replace(
            expected_bs=note(state.expected_bs, accepted.expected_b) if plan.expected_lengths else state.expected_bs,
            accepted_bs=note(state.accepted_bs, accepted.length_b),
            rounds_b=state.rounds_b + ~state.done_b,
        )
        state, kept_b = _emit(state, accepted.tokens_bp, accepted.length_b, accepted.log_probs_bp)
        drafter = state.drafter
        if plan.drafts:
            features_bpj = trees.pick(verified.features_btj, accepted.path_bp)
            drafter = extend_drafter(weights, drafter, plan, features_bpj, accepted.tokens_bp, kept_b)
        cache = caches.append(state.cache, verified.rows, kept_b, accepted.path_bp)
        return state.replace(cache=cache, drafter=drafter)


def first_token(
    weights: Weights,
    state: DecodeState,
    last_bd: jax.Array,
    count_b: jax.Array,
    plan: DecodePlan,
    given_b: jax.Array | None = None,
) -> DecodeState:
    """Returns the state after the token that follows each prompt, sampled from `last_bd` unless it is given.

    Sequences with `count_b` 0 in place of 1 get none.
    """
    logits_bnv = verifier.logits(weights.verifier, last_bd[:, None])
    picks_bp = _target_rows(logits_bnv, state.sampling).sample(_noise(state, 1, logits_bnv))
    picks_bp = picks_bp if given_b is None else given_b[:, None]
    log_probs_bp = _token_log_probs(logits_bnv, picks_bp) if plan.log_probs else None
    return _emit(state, picks_bp, count_b, log_probs_bp)[0]


def _anchor(state: DecodeState) -> jax.Array:
    return jnp.take_along_axis(state.tokens_bs, state.cache.length_b[:, None], axis=1)[:, 0]


def _target_rows(logits_bnv: jax.Array, sampling: Sampling) -> rules.TargetRows:
    return rules.target_rows(logits_bnv, sampling.temperature_b, sampling.top_k_b, sampling.top_p_b)


def _noise(state: DecodeState, depths: int, logits_bnv: jax.Array) -> jax.Array:
    """Gumbel noise [b, depths, v] of the next positions; zeros, for free, where every row is greedy."""
    size = logits_bnv.shape[-1]
    dtype = jnp.promote_types(logits_bnv.dtype, jnp.float32)
    with jax.named_scope("noise"):
        stream_b = jax.vmap(jax.random.fold_in, (0, None))(state.sampling.key_b, VERIFY_STREAM)
        positions_bp = state.end_b[:, None] + jnp.arange(depths)
        keys_bp = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(stream_b, positions_bp)
        return lax.cond(
            jnp.any(state.sampling.temperature_b > 0),
            lambda: vocab.gumbel(keys_bp, size, dtype),
            lambda: meshes.constrain(jnp.zeros((*keys_bp.shape, size), dtype), ("batch", None, "vocab")),
        )


def coins(state: DecodeState, draws: int, logits_bnv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Uniforms [b, x] for the tests of a round, and Gumbel noise [b, v] for the token after the last accepted node."""
    dtype = jnp.promote_types(logits_bnv.dtype, jnp.float32)
    with jax.named_scope("noise"):
        key_b2 = jax.vmap(jax.random.split)(round_keys(state, COINS_STREAM))
        coins_bx = jax.vmap(lambda key: jax.random.uniform(key, (draws,), dtype))(key_b2[:, 0])
        return coins_bx, vocab.gumbel(key_b2[:, 1], logits_bnv.shape[-1], dtype)


def round_keys(state: DecodeState, stream: int) -> jax.Array:
    """One key per row for this round: fold_in(fold_in(key, stream), position of the root)."""
    stream_b = jax.vmap(jax.random.fold_in, (0, None))(state.sampling.key_b, stream)
    return jax.vmap(jax.random.fold_in)(stream_b, state.cache.length_b)


def _token_log_probs(logits_bpv: jax.Array, tokens_bp: jax.Array) -> jax.Array:
    chosen_bp = vocab.take(logits_bpv, tokens_bp[..., None])[..., 0]
    return (chosen_bp - vocab.log_sum_exp(logits_bpv)).astype(jnp.float32)


def _emit(
    state: DecodeState, tokens_bp: jax.Array, count_b: jax.Array, log_probs_bp: jax.Array | None
) -> tuple[DecodeState, jax.Array]:
    """Appends up to `count_b` tokens, cut after the first stop id and at the limit. Returns how many were kept."""
    sampling = state.sampling
    offered_bp = jnp.arange(tokens_bp.shape[1]) < count_b[:, None]
    stops_bp = jnp.any(tokens_bp[..., None] == sampling.stop_ids_bx[:, None], axis=-1) & offered_bp
    stopped_b = jnp.any(stops_bp, axis=1)
    kept_b = jnp.where(stopped_b, jnp.argmax(stops_bp, axis=1) + 1, count_b)
    room_b = sampling.limit_b - state.end_b
    kept_b = jnp.where(state.done_b, 0, jnp.minimum(kept_b, room_b)).astype(jnp.int32)
    stopped_b &= jnp.argmax(stops_bp, axis=1) < kept_b

    # Written past the end in full width: what lies beyond `kept_b` is garbage that later rounds overwrite.
    write = jax.vmap(lambda row_s, new_p, at: lax.dynamic_update_slice(row_s, new_p, (at,)))
    log_probs_bs = None if log_probs_bp is None else write(state.log_probs_bs, log_probs_bp, state.end_b)
    end_b = state.end_b + kept_b
    state = state.replace(
        tokens_bs=write(state.tokens_bs, tokens_bp.astype(state.tokens_bs.dtype), state.end_b),
        end_b=end_b,
        done_b=state.done_b | stopped_b | (end_b >= sampling.limit_b),
        log_probs_bs=log_probs_bs,
    )
    return state, kept_b
