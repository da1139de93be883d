"""Check of losslessness on the user's prompts: drafted against one-token decoding with the same seed."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeflash_jax.core import programs, sharding
from treeflash_jax.core.checks import expect
from treeflash_jax.decoding import processors
from treeflash_jax.decoding.accepting import VERIFY_STREAM
from treeflash_jax.decoding.state import DecodeState
from treeflash_jax.engine import defaults
from treeflash_jax.engine.batching import make_batch
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.plan import NO_DRAFTER
from treeflash_jax.engine.prompts import Prompt
from treeflash_jax.engine.requests import Request
from treeflash_jax.engine.results import Result
from treeflash_jax.models import verifier, vocab

NEAR_TIE = 1e-4  # largest gap between the two logits of a near-tie, in any dtype, or
ROUNDINGS = 8  # this number of units of rounding of the larger logit, if larger (as in bfloat16)
IDENTICAL, ROUNDING, FAIL = "identical", "equal up to rounding", "FAIL"  # verdicts on drafted answers


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """First token at which two answers to one prompt differ.

    Attributes:
      index: number of generated tokens before it.
      drafted, plain: token of the drafted and of the one-token answer; None if the answer had ended.
      gap: difference of the two tokens' logits after one pass over the common prefix, at a temperature above 0 with the
        noise that decides between them; or the change of logits by which a filter keeps one token and drops the other, if
        that explains the difference; None if an answer had ended.
      rounding: unit of rounding of the larger logit in the compute dtype.
    """

    index: int
    drafted: int | None
    plain: int | None
    gap: float | None
    rounding: float

    def is_near_tie(self) -> bool:
        """Returns True if rounding explains the difference: products over one and over many tokens round differently."""
        return self.gap is not None and self.gap <= max(NEAR_TIE, ROUNDINGS * self.rounding)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One prompt, decoded with and without drafting, and the first difference; None if the answers are equal."""

    drafted: Result
    plain: Result
    divergence: Divergence | None

    @property
    def verdict(self) -> str:
        """IDENTICAL, ROUNDING if the first difference is a near-tie, or FAIL."""
        if self.divergence is None:
            return IDENTICAL
        return ROUNDING if self.divergence.is_near_tie() else FAIL

    @property
    def tokens(self) -> int:
        """Number of tokens compared: all, or those up to the first difference."""
        return len(self.plain.ids) if self.divergence is None else self.divergence.index + 1

    def record(self, model: TreeFlash) -> dict[str, Any]:
        record = {"verdict": self.verdict, "identical": self.divergence is None, "tokens": len(self.plain.ids)}
        record |= {"tau": self.drafted.tau, "quantize": model.quantize, "meaning": meaning(model.quantize)}
        if self.divergence is None:
            return record | {"divergence": None}
        return record | {"divergence": asdict(self.divergence) | {"meaning": explanation(self.divergence, model.dtype)}}

    def describe(self, model: TreeFlash) -> str:
        """Returns one line that says how the answers differ."""
        if self.divergence is None:
            return f"{self.verdict}, {len(self.plain.ids)} tokens, tau {self.drafted.tau:.2f}"
        tokens = f"drafted {self.divergence.drafted}, one by one {self.divergence.plain}"
        why = explanation(self.divergence, model.dtype)
        return f"{self.verdict}, differs from token {self.divergence.index} on ({tokens}); {why}"


def check(model: TreeFlash, prompts: Sequence[Prompt], **settings: Any) -> list[Check]:
    """Decodes every prompt with and without drafting and compares the answers; see `TreeFlash.generate`.

    Raises:
      ValueError: no drafter, builder "none", or an acceptance rule with other samples than one-token decoding at a
        temperature above 0.
    """
    if model.drafter is None:
        raise ValueError(f"{NO_DRAFTER}, expected one: without it there is nothing to compare")
    builder = settings.get("builder") or "best-first"  # also on a device where drafting does not pay
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
        Check(drafted=a, plain=b, divergence=divergence(model, request, a.ids, b.ids, call.processor))
        for request, a, b in zip(call.requests, drafted, plain, strict=True)
    ]


def conclude(answers: int, identical: int, near_ties: int, tokens: int, dtype: Any) -> str:
    """Returns one line about drafted answers, beginning with the verdict.

    Args:
      answers: number of drafted answers compared with one-token decoding.
      identical, near_ties: numbers of answers that are identical, and that first differ at a near-tie.
      tokens: number of tokens compared, each answer up to its first difference.
    """
    counts = f"{identical} of {answers} drafted answers identical to one-token decoding, {tokens:,} tokens compared"
    ties = f"{near_ties} near-tie" if near_ties == 1 else f"{near_ties} near-ties"
    if identical + near_ties < answers:
        return f"{FAIL}: {counts}; {ties}, {answers - identical - near_ties} other differences"
    if not near_ties:
        return f"{IDENTICAL}: {counts}"
    hint = "; exact in float32: add --dtype float32" if jnp.dtype(dtype).itemsize < 4 else ""
    return f"{ROUNDING} ({ties}): {counts}{hint}"


def meaning(quantize: str | None) -> str:
    """Returns one line that names the verifier whose outputs are reproduced exactly."""
    if quantize is None:
        return "exact with respect to the verifier as loaded"
    return f"exact with respect to the {quantize} verifier, not to the one in the files: its own answers may differ"


def explanation(divergence: Divergence, dtype: Any) -> str:
    if divergence.gap is None:
        return "one answer ended before the other"
    if divergence.is_near_tie():
        return f"near-tie: {dtype} rounding decides between the two candidates; not an error"
    return f"the two candidates' logits are {divergence.gap:.2g} apart, more than {dtype} rounding explains"


def divergence(
    model: TreeFlash, request: Request, drafted: list[int], plain: list[int], processor: Any = None
) -> Divergence | None:
    """Finds the first difference of two answers to one request; None if they are equal."""
    if drafted == plain:
        return None
    index = next((i for i, (a, b) in enumerate(zip(drafted, plain, strict=False)) if a != b), min(len(drafted), len(plain)))
    tokens = [ids[index] if index < len(ids) else None for ids in (drafted, plain)]
    prefix = request.ids + plain[:index]
    padded = np.zeros((1, 1 << (len(prefix) - 1).bit_length()), np.int32)  # few shapes, few compilations
    padded[0, : len(prefix)] = prefix
    arguments = model.weights.verifier, jnp.asarray(padded), jnp.int32(len(prefix) - 1)
    static = {"config": model.verifier, "dtype": defaults.choose_residual_dtype(model.device, model.dtype)}
    logits_v = np.asarray(programs.call(_logits_at, *arguments, mesh=model.mesh, **static))
    largest = np.abs(logits_v[[token for token in tokens if token is not None]]).max()
    logits_v = _process(logits_v, request, plain[:index], processor)
    with sharding.ambient(model.mesh):
        key, dtype = jax.random.key(request.settings.seed), jnp.promote_types(logits_v.dtype, jnp.float32)
        for number in (request.index, *filter(None, [request.sample]), VERIFY_STREAM, len(prefix)):
            key = jax.random.fold_in(key, number)
        noise_v = vocab.gumbel(key[None], logits_v.size, dtype)[0]
    scores_v = logits_v.astype(np.float64) + request.settings.temperature * np.asarray(noise_v)
    ids = [token for token in tokens if token is not None]
    gap = None
    if len(ids) == 2:
        low, high = sorted(ids, key=lambda token: scores_v[token])
        is_kept, margins = _filter_margins(logits_v, [low, high], request)
        gap = min(scores_v[high] - scores_v[low], margins[1]) if is_kept[1] else margins[1]
        gap = float(gap if is_kept[0] else max(gap, margins[0]))
    rounding = float(np.spacing(largest.astype(model.dtype)))  # logits may have more bits
    return Divergence(index=index, drafted=tokens[0], plain=tokens[1], gap=gap, rounding=rounding)


def _process(logits_v: np.ndarray, request: Request, answer: list[int], processor: Any) -> np.ndarray:
    """Returns the processed logits of the token after a prompt and the beginning of its answer."""
    tokens_bs, length_b, sampling = make_batch([request], batch_size=1, capacity=request.length, dtype=logits_v.dtype)
    state = DecodeState(tokens_bs, length_b, *[None] * 7, sampling)
    state, answer_bni = processors.start(state, logits_v.size, processor), jnp.asarray(answer, jnp.int32)[None, None]
    return np.asarray(processors.process(jnp.asarray(logits_v)[None, None], state, answer_bni, processor))[0, 0]


def _filter_margins(logits_v: np.ndarray, ids: list[int], request: Request) -> tuple[np.ndarray, np.ndarray]:
    """Returns whether the filters keep each token, and the smallest change of logits that alters it."""
    from scipy.special import logit  # slow to import

    temperature, top_p = request.settings.temperature, request.settings.top_p
    top_k = min(request.settings.top_k or logits_v.size, logits_v.size)
    if temperature == 0:  # no filters
        return np.array([True, True]), np.array([np.inf, np.inf])
    sorted_v = np.append(np.sort(logits_v.astype(np.float64))[::-1], -np.inf)
    mass_k = np.cumsum(np.exp((sorted_v[:top_k] - sorted_v[0]) / temperature))
    mass_k /= mass_k[-1]
    num_kept = top_k if top_p == 1 else 1 + int(np.argmax(mass_k >= top_p))
    # If differences of logits change by up to d, the log-odds of a mass change by up to d / temperature.
    changes_k = temperature * np.abs(logit(mass_k) - logit(top_p)) if top_p < 1 else np.full(top_k, np.inf)
    fewer = changes_k[num_kept - 2] if num_kept > 1 else np.inf  # change by which top-p keeps one token fewer
    more = changes_k[num_kept - 1] if num_kept < top_k else np.inf
    values, last, after = logits_v[ids].astype(np.float64), *sorted_v[num_kept - 1 : num_kept + 1]
    to_drop, to_keep = np.maximum(values - last, fewer), np.maximum(after - values, more)
    margins = np.where(values >= last, np.minimum(values - after, to_drop), np.minimum(last - values, to_keep))
    with np.errstate(divide="ignore"):
        excess = values - sorted_v[0] - temperature * np.log(request.settings.min_p)  # above the limit of min-p
    is_kept, is_likely = values >= last, excess >= 0
    to_keep = np.maximum(np.where(is_kept, 0, margins), np.where(is_likely, 0, -excess))
    return is_kept & is_likely, np.where(is_kept & is_likely, np.minimum(margins, excess), to_keep)


@partial(jax.jit, static_argnames=("config", "dtype"))
def _logits_at(weights: Any, tokens_1t: jax.Array, index: jax.Array, config: Any, dtype: Any) -> jax.Array:
    size = tokens_1t.shape[1]
    mask_1tt = verifier.causal_mask(1, size)
    out = verifier.forward(weights, config, tokens_1t, jnp.arange(size)[None], mask_1tt, residual_dtype=dtype)
    return verifier.logits(weights, out.hidden_btd[:, index])[0]
