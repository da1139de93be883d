"""How many nodes of a drafted tree a round verifies, and whether it drafts at all, chosen on the device.

Nodes of a best-first tree stand in order of decreasing path probability, so the first n of them are the tree of n nodes.
A round drafts once, at its largest bucket, and takes the bucket that maximises tokens per second,

    argmax_n (1 + c (Phi(n) - 1)) / T(n),    Phi(n) = sum of the path probabilities of the first n nodes (root = 1),

summed over the rows that are not done: one bucket a round for the whole batch. T is the measured time of a round
(calibration.py), c how many of the tokens that were drafted so far came true. The probabilities know nothing of the
verifier's noise, so the answer is the same whatever is chosen.

Drafting pauses once it has lost PATIENCE one-token rounds to one-token decoding (gains count, but are not saved up: the
CUSUM test). The drafter's context then waits: features of tokens that it has not seen are pending until the next draft.
Pauses grow geometrically, and no probe costs more than PROBE_SHARE of the pause after it, so a call loses little more than
PATIENCE rounds and that share, whatever its prompts.

Shape suffixes: b batch, n nodes or buckets of them, c measured lengths, p pending rows, j tapped layers x model,
s token slots.

Source: CaDDTree for the objective; its greedy search over every n is an argmax over buckets here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from treeflash_jax import mesh as meshes
from treeflash_jax.trees import DraftTree

PATIENCE = 3.0  # one-token rounds
PROBE_SHARE = 0.01  # of a pause's rounds: what trying again may cost, in one-token rounds
FIRST_PAUSE, LONGEST_PAUSE = 8, 2**15
PRIOR_TOKENS = 32.0  # drafted tokens that the calibration's reliability counts for


@struct.dataclass
class RoundTimes:
    """Seconds of rounds at one batch, measured before. Traced: another table is the same program.

    Attributes:
      positions_c: of the caches that the measured rounds read, increasing.
      round_cn: of a drafted round, by bucket.
      step_c: of a one-token round.
    """

    positions_c: jax.Array
    round_cn: jax.Array
    step_c: jax.Array

    def at(self, positions: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """Seconds of a round by bucket, and of a one-token round: linear in what they read, clamped at the ends."""
        x = jnp.asarray(positions, self.positions_c.dtype)
        rounds_n = jax.vmap(lambda y_c: jnp.interp(x, self.positions_c, y_c), 1)(self.round_cn)
        return rounds_n, jnp.interp(x, self.positions_c, self.step_c)


@struct.dataclass
class Budget:
    """What the choice depends on and leaves behind; part of the loop carry.

    Attributes:
      times: of rounds.
      drafted, committed: tokens below the root that drafted rounds were expected to commit and did, means over live rows,
        the calibration's prior included. Their ratio is the reliability c.
      debt: what drafting has lost, in one-token rounds, 0 to PATIENCE.
      pause: one-token rounds to go before the next draft.
      last_pause: how long the last pause was; 0 since the debt was paid back.
      features_bpj: of tokens that the drafter has not seen yet.
      pending_b: how many of them are real.
      nodes_bs: verified rows by round; 1 where nothing was drafted.
    """

    times: RoundTimes
    drafted: jax.Array
    committed: jax.Array
    debt: jax.Array
    pause: jax.Array
    last_pause: jax.Array
    features_bpj: jax.Array
    pending_b: jax.Array
    nodes_bs: jax.Array

    @property
    def is_full(self) -> jax.Array:
        return jnp.max(self.pending_b) >= self.features_bpj.shape[1]


@struct.dataclass
class Choice:
    """What one round takes.

    Attributes:
      index: of the bucket.
      nodes: verified rows a sequence.
      expected: sum of their path probabilities, mean over live rows.
      tokens: what they are expected to commit, mean over live rows.
      steps: one-token rounds that the round takes the time of.
    """

    index: jax.Array
    nodes: jax.Array
    expected: jax.Array
    tokens: jax.Array
    steps: jax.Array


def start(
    times: RoundTimes,
    *,
    reliability: float,
    debt: float,
    batch: int,
    capacity: int,
    pending: int,
    features: int,
    dtype: Any,
) -> Budget:
    """The budget of rows that have just read their prompts.

    Args:
      times: of rounds at this batch.
      reliability: tokens committed over tokens drafted, both below the root, on the calibration's prompts.
      debt: to begin with.
      batch, capacity: of the state.
      pending: tokens that may wait for the drafter, at least 1.
      features: entries of a token's tapped features.
      dtype: of the features.
    """
    scalar = lambda value: jnp.asarray(value, jnp.float32)  # noqa: E731
    return Budget(
        times=times,
        drafted=scalar(PRIOR_TOKENS),
        committed=scalar(PRIOR_TOKENS * reliability),
        debt=scalar(debt),
        pause=jnp.int32(0),
        last_pause=jnp.int32(0),
        features_bpj=jnp.zeros((batch, pending, features), dtype),
        pending_b=jnp.zeros(batch, jnp.int32),
        nodes_bs=jnp.zeros((batch, capacity), jnp.int32),
    )


def choose(
    budget: Budget, tree: DraftTree, live_b: jax.Array, positions: jax.Array | int, buckets: Sequence[int]
) -> Choice:
    """The bucket of most expected tokens per second.

    Args:
      tree: of the largest bucket, in order of decreasing path probability.
      live_b: rows that still need tokens, at least one.
      positions: of the caches that the round reads (`attention.positions_read`).
      buckets: nodes, root included, increasing; static.
    """
    reached_bn = jnp.cumsum(jnp.where(tree.valid_bn, jnp.exp(tree.log_prob_bn.astype(jnp.float32)), 0), axis=1)
    reached_bn = reached_bn[:, jnp.asarray(buckets) - 1]
    expected_n = jnp.sum(jnp.where(live_b[:, None], reached_bn, 0), axis=0) / jnp.maximum(jnp.sum(live_b), 1)
    tokens_n = 1 + budget.committed / budget.drafted * (expected_n - 1)
    seconds_n, step = budget.times.at(positions)
    index = jnp.argmax(tokens_n / seconds_n).astype(jnp.int32)
    return Choice(
        index=index,
        nodes=jnp.asarray(buckets, jnp.int32)[index],
        expected=expected_n[index],
        tokens=tokens_n[index],
        steps=seconds_n[index] / step,
    )


def learn(budget: Budget, choice: Choice, committed_b: jax.Array, live_b: jax.Array) -> Budget:
    """What a drafted round says about the next ones: how reliable drafts are, and whether to pause.

    Args:
      committed_b: tokens it committed, bonus included, before any cut.
      live_b: rows that took part.
    """
    tokens_b = jnp.where(live_b, committed_b, 0).astype(budget.committed.dtype)  # int / int would be float64 under x64
    came = jnp.sum(tokens_b) / jnp.maximum(jnp.sum(live_b), 1)
    loss = choice.steps - choice.tokens
    debt = jnp.maximum(budget.debt + loss, 0)
    pause = jnp.maximum(jnp.ceil(loss / PROBE_SHARE), jnp.maximum(FIRST_PAUSE, 2 * budget.last_pause))
    pause = jnp.where(debt > PATIENCE, jnp.minimum(pause, LONGEST_PAUSE), 0).astype(jnp.int32)
    return budget.replace(
        drafted=budget.drafted + choice.expected - 1,
        committed=budget.committed + came - 1,
        debt=jnp.minimum(debt, PATIENCE),
        pause=pause,
        last_pause=jnp.where(pause > 0, pause, jnp.where(debt > 0, budget.last_pause, 0)),
    )


def put_off(budget: Budget, features_b1j: jax.Array, count_b: jax.Array) -> Budget:
    """Keeps the features of one token a row (where `count_b` is 1) for the drafter, and counts the pause down.

    Live rows have equally many pending, so one slot serves all; rows that are done never draft again.
    """
    at = jnp.max(budget.pending_b)
    features_bpj = jax.lax.dynamic_update_slice_in_dim(budget.features_bpj, features_b1j, at, axis=1)
    return budget.replace(features_bpj=features_bpj, pending_b=budget.pending_b + count_b, pause=budget.pause - 1)


def note(budget: Budget, rounds_b: jax.Array, live_b: jax.Array, nodes: jax.Array | int) -> Budget:
    """Keeps how many rows the round verified."""
    is_round_bs = (jnp.arange(budget.nodes_bs.shape[1]) == rounds_b[:, None]) & live_b[:, None]
    return budget.replace(nodes_bs=jnp.where(is_round_bs, jnp.asarray(nodes, jnp.int32), budget.nodes_bs))


def forget(budget: Budget, is_new_b: jax.Array) -> Budget:
    """The budget after new sequences took some places: their records begin anew; what was learnt stays."""
    return budget.replace(nodes_bs=jnp.where(is_new_b[:, None], 0, budget.nodes_bs))


def grow(budget: Budget, capacity: int) -> Budget:
    nodes_bs = budget.nodes_bs
    return budget.replace(nodes_bs=jnp.pad(nodes_bs, ((0, 0), (0, capacity - nodes_bs.shape[1]))))


def pin(budget: Budget) -> Budget:
    """Constrains rows to their layout on the ambient mesh, and all else to every device."""
    times = jax.tree.map(lambda x: meshes.constrain(x, (None,) * x.ndim), budget.times)
    rows = jax.tree.map(
        lambda x: meshes.constrain(x, (("batch",) + (None,) * (x.ndim - 1))[: x.ndim]), budget.replace(times=None)
    )
    return rows.replace(times=times)
