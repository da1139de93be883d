"""Comparison of drafted with one-token decoding, at equal seeds and on the user's prompts.

Shape suffixes: b batch, n tree nodes, i depth, s token slots, v vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeflash_jax import trees
from treeflash_jax.core import programs
from treeflash_jax.core.checks import expect
from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.decoding import processors, rounds
from treeflash_jax.decoding.accepting import make_target, target_noise
from treeflash_jax.decoding.state import DecodePlan, DecodeState, Sampling, Weights, without_caches
from treeflash_jax.engine.answers.results import Result
from treeflash_jax.engine.call.prompts import Prompt
from treeflash_jax.engine.call.requests import Request
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.schedule.batching import SamplingSizes, make_batch, round_capacity
from treeflash_jax.engine.schedule.prefill import Prefill
from treeflash_jax.engine.schedule.runner import Runner
from treeflash_jax.engine.settings.generate_config import GenerateConfig
from treeflash_jax.engine.settings.plan import NO_DRAFTER_ADVICE

NEAR_TIE = 1e-4  # changes of the difference of two logits up to this count as rounding, or
ROUNDINGS = 8  # up to this number of rounding units of the larger logit, if that is more (as in bfloat16)
IDENTICAL, ROUNDING, FAIL = "identical", "equal up to rounding", "FAIL"  # verdicts on drafted answers


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """First token at which two answers to a prompt differ.

    Attributes:
      index: number of generated tokens before this token.
      drafted, plain: token of the drafted answer and of the one-token answer; None if the answer had ended.
      gap: difference of the two tokens' logits after the common prefix, read as a prompt; at a temperature above 0, with
        the noise that decides between the tokens. None if an answer had ended.
      near_tie: whether rounding explains the difference: products over one token and over many tokens round differently.
        Either the gap is so small that rounding can reverse it, or rounding decides which of the tokens a filter keeps.
    """

    index: int
    drafted: int | None
    plain: int | None
    gap: float | None = None
    near_tie: bool = False


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A prompt decoded with and without drafting, and the first difference of the answers; None if they are equal."""

    drafted: Result
    plain: Result
    divergence: Divergence | None

    @property
    def verdict(self) -> str:
        """IDENTICAL, ROUNDING if the first difference is a near-tie, or FAIL."""
        if self.divergence is None:
            return IDENTICAL
        return ROUNDING if self.divergence.near_tie else FAIL

    @property
    def tokens(self) -> int:
        """Number of tokens compared: all tokens, or the tokens up to the first difference."""
        return len(self.plain.ids) if self.divergence is None else self.divergence.index + 1


def compare_decodings(model: TreeFlash, prompts: Sequence[Prompt], **settings: Any) -> list[Comparison]:
    """Decodes every prompt with and without drafting, and compares the answers. `settings` are as in `generate`.

    Raises:
      ValueError: there is no drafter, the builder is "none", or the temperature is above 0 and the acceptance rule draws
        other samples than one-token decoding.
    """
    if model.drafter is None:
        raise ValueError(f"nothing to compare: {NO_DRAFTER_ADVICE}")
    builder = settings.get("builder") or "best-first"  # drafts even on a device where drafting does not pay
    expect(builder != "none", "builder", "none", "one that drafts: without it there is nothing to compare")
    call = model.prepare(prompts, **settings | {"builder": builder})
    rule = call.plan.rule
    if rule != "sample-and-match" and any(request.settings.temperature > 0 for request in call.requests):
        raise ValueError(f"got acceptance {rule!r} at temperature above 0, expected 'sample-and-match' to compare answers")
    drafted = model.generate(prompts, **settings | {"builder": builder})
    plain = model.generate(prompts, **settings | {"builder": "none"})
    if any(result.finished == "interrupted" for result in [*drafted, *plain]):
        raise KeyboardInterrupt
    return [
        Comparison(drafted=a, plain=b, divergence=find_divergence(model, request, a.ids, b.ids, call.weights.processor))
        for request, a, b in zip(call.requests, drafted, plain, strict=True)
    ]


def find_divergence(
    model: TreeFlash, request: Request, drafted: list[int], plain: list[int], processor: Any = None
) -> Divergence | None:
    """Finds the first difference of two answers to one request; None if they are equal."""
    if drafted == plain:
        return None
    index = next((i for i, (a, b) in enumerate(zip(drafted, plain, strict=False)) if a != b), min(len(drafted), len(plain)))
    tokens = [ids[index] if index < len(ids) else None for ids in (drafted, plain)]
    if None in tokens:
        return Divergence(index=index, drafted=tokens[0], plain=tokens[1])
    prefix = request.ids + plain[:index]
    logits_v = _compute_logits(model, prefix)
    rounding = np.spacing(np.abs(logits_v[tokens]).max().astype(model.dtype))  # logits may have more bits than this dtype
    tolerance = max(NEAR_TIE, ROUNDINGS * float(rounding))

    logits_bnv = jnp.asarray(logits_v, at_least_float32(logits_v.dtype))[None, None]
    sizes = SamplingSizes.fit([request])
    batch = make_batch([request], sizes, capacity=len(request.ids), dtype=logits_bnv.dtype)
    state = without_caches(batch.tokens_bs, batch.length_b, batch.sampling)
    noise_bnv = programs.call(_noise, state.replace(end_b=jnp.array([len(prefix)])), logits_bnv)
    state = processors.init_processors(state, logits_v.size, processor)
    answer_bni = jnp.asarray(plain[:index], jnp.int32)[None, None]
    logits_bnv = processors.process(logits_bnv, state, answer_bni, processor)
    low, high = np.sort(np.asarray(logits_bnv + request.settings.temperature * noise_bnv)[0, 0, tokens])

    def is_drawn(token: int, other: int) -> bool:
        favoured_bnv = logits_bnv.at[..., token].add(tolerance / 2).at[..., other].add(-tolerance / 2)
        return token == int(programs.call(_draw, favoured_bnv, batch.sampling, noise_bnv)[0, 0])

    near_tie = is_drawn(*tokens) and is_drawn(*reversed(tokens))
    return Divergence(index=index, drafted=tokens[0], plain=tokens[1], gap=float(high - low), near_tie=near_tie)


@jax.jit
def _noise(state: DecodeState, logits_bnv: jax.Array) -> jax.Array:
    return target_noise(state, 1, logits_bnv)


@jax.jit
def _draw(logits_bnv: jax.Array, sampling: Sampling, noise_bnv: jax.Array) -> jax.Array:
    return make_target(logits_bnv, sampling).sample(noise_bnv)


def _compute_logits(model: TreeFlash, ids: list[int]) -> np.ndarray:
    """Returns the verifier's logits after a text, [v]. All tokens but the last are read as a prompt, in chunks."""
    runner = Runner(model.plan(GenerateConfig(builder="none")), model.weights, model.mesh)
    capacity = round_capacity(len(ids))
    batch = make_batch([Request(ids=ids[:-1])], SamplingSizes(), capacity=capacity, dtype=model.dtype, mesh=model.mesh)
    state = Prefill(runner, batch).read_all()
    return np.asarray(runner.call(_logits_after, model.weights, state, jnp.int32(ids[-1]), plan=runner.plan))


@partial(jax.jit, static_argnames=("plan",))
def _logits_after(weights: Weights, state: DecodeState, token: jax.Array, plan: DecodePlan) -> jax.Array:
    tree = trees.root_only(jnp.full_like(state.end_b, token))
    return rounds.verify_tree(weights, state, tree, plan).logits_bnv[0, 0]
