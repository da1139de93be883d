"""Rounds under observation: distances of a drafter's distributions from the verifier's on accepted paths, by depth.

Shape suffixes: b batch, i depth, p positions of an accepted path, c children, v vocabulary.

Source: the total variation distance by depth of TreeFlash (arXiv 2606.03819), Figure 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeflash_jax.core import devices, sharding
from treeflash_jax.decoding import loops, rounds
from treeflash_jax.decoding.state import DecodePlan, DecodeState, Weights
from treeflash_jax.engine.batching import capacity_bucket
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.planning import Request, make_requests
from treeflash_jax.engine.settings import GenerateConfig
from treeflash_jax.trees import Expander, pick


def distances(expander: Expander, logits_bpv: jax.Array, tokens_bp: jax.Array) -> jax.Array:
    """Computes the total variation distance between drafter and verifier after every prefix of a path, [b, i].

    Tokens that the drafter does not list count as one, which gives a lower bound: exact if all are listed, NaN if none is.

    Args:
      logits_bpv: of the verifier, after 0, 1, ... tokens of the path.
      tokens_bp: tokens of the path. Distances after a token that the drafter does not list are undefined.
    """
    state_b1, distances_bi = expander.start(1), []
    for depth in range(min(expander.num_depths, logits_bpv.shape[1])):
        tokens_b1c, log_q_b1c = expander.children(jnp.int32(depth), state_b1)
        tokens_bc, q_bc = tokens_b1c[:, 0], jnp.exp(log_q_b1c[:, 0].astype(jnp.float32))
        p_bv = jax.nn.softmax(logits_bpv[:, depth].astype(jnp.float32))
        p_bc = jnp.where(q_bc > 0, jnp.take_along_axis(p_bv, tokens_bc, axis=1), 0)
        others_b = jnp.abs(jnp.sum(p_bc, axis=1) - jnp.sum(q_bc, axis=1))
        distance_b = (jnp.sum(jnp.abs(p_bc - q_bc), axis=1) + others_b) / 2
        distances_bi.append(jnp.where(jnp.any(q_bc > 0, axis=1), distance_b, jnp.nan))
        child_b1 = jnp.argmax(tokens_bc == tokens_bp[:, depth, None], axis=1)[:, None].astype(jnp.int32)
        state_b1 = expander.follow(jnp.int32(depth), state_b1, child_b1)
    return jnp.stack(distances_bi, axis=1)


@partial(devices.jit, static_argnames=("plan", "read"), donate_argnames="state")
def _observed_round(
    weights: Weights, state: DecodeState, plan: DecodePlan, read: Callable[..., Any]
) -> tuple[DecodeState, Any]:
    expander = rounds.draft_expander(weights, state, plan)
    tree, proposal = rounds.build_tree(state, expander, plan)
    verified = rounds.verify_tree(weights, state, tree, plan)
    accepted = rounds.accept_path(state, tree, proposal, verified.logits_bnv, plan)
    values = read(state, expander, tree, verified, accepted)
    return loops.pin(rounds.commit_path(weights, state, verified, accepted, plan)), values


def observe(
    model: TreeFlash, requests: Sequence[Request], config: GenerateConfig, batch_size: int, read: Callable[..., Any]
) -> Iterator[Any]:
    """Decodes a batch round by round, and yields the arrays that a function computes in each round.

    Args:
      read: static; function of the state before the round, expander, tree, verifier's outputs and accepted path.
    """
    plan = model.plan(config)
    capacity = capacity_bucket(max(request.length for request in requests) + config.max_new_tokens + 1 + plan.path_length)
    inputs = model.make_batch(requests, config, batch_size=batch_size, capacity=capacity)
    with sharding.ambient(model.mesh):
        state = loops.prefill(model.weights, *inputs, plan=plan.for_prefill())
        while not np.all(sharding.to_host(state.done_b)):
            state, values = _observed_round(model.weights, state, plan, read)
            yield sharding.to_host(values)


def _read_distances(state: DecodeState, expander: Expander, tree: Any, verified: Any, accepted: Any) -> tuple[Any, Any]:
    """Returns the distances along the accepted path [b, i], and the number of them that are defined, [b]."""
    distances_bi = distances(expander, pick(verified.logits_bnv, accepted.path_bp), accepted.tokens_bp)
    return distances_bi, jnp.where(state.done_b, 0, accepted.length_b)


def distances_by_depth(model: TreeFlash, prompts: Sequence[Any], config: GenerateConfig) -> dict[str, list[float]]:
    """Measures the mean distance at every depth, over the rounds that accepted all tokens above it and drafted any there.

    Returns:
      {"distance", "rounds"}: mean distances, and the numbers of rounds, by depth; depth 0 comes after the anchor.
    """
    requests = make_requests([model.encode(prompt) for prompt in prompts], config, model.verifier)
    total, count = 0.0, 0
    for distances_bi, count_b in observe(model, requests, config, len(requests), _read_distances):
        means = (np.arange(distances_bi.shape[1]) < count_b[:, None]) & ~np.isnan(distances_bi)
        total, count = total + np.sum(distances_bi, axis=0, where=means), count + np.sum(means, axis=0)
    return {"distance": [round(float(t / n), 4) for t, n in zip(total, count, strict=True) if n], "rounds": count.tolist()}
