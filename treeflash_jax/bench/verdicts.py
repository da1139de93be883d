"""Words for comparisons of drafted with one-token decoding: verdicts, counts and differences."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from treeflash_jax.core.error_text import quoted
from treeflash_jax.engine.comparison import FAIL, IDENTICAL, ROUNDING, Comparison, Divergence
from treeflash_jax.engine.model import TreeFlash


def make_record(comparison: Comparison, model: TreeFlash) -> dict[str, Any]:
    """Returns a comparison as JSON, with its verdict and what the difference means."""
    divergence = comparison.divergence
    record = {"verdict": comparison.verdict, "identical": divergence is None, "tokens": len(comparison.plain.ids)}
    record |= {"tau": comparison.drafted.tau, "quantize": model.quantize, "meaning": describe_reference(model.quantize)}
    meaning = divergence and {"meaning": explain(divergence, model.dtype)}
    return record | {"divergence": divergence and asdict(divergence) | meaning}


def describe_difference(comparison: Comparison, model: TreeFlash) -> str:
    """Returns in one line how the answers of a comparison differ."""
    divergence = comparison.divergence
    if divergence is None:
        return f"{comparison.verdict}, {len(comparison.plain.ids)} tokens, tau {comparison.drafted.tau:.2f}"
    tokens = f"drafted {divergence.drafted}, one by one {divergence.plain}"
    return f"{comparison.verdict}, differs from token {divergence.index} on ({tokens}); {explain(divergence, model.dtype)}"


def describe_verdict(comparisons: Sequence[Comparison]) -> str:
    """Returns the verdict on all answers in words, with the position of the first difference."""
    differing = [i for i, comparison in enumerate(comparisons) if comparison.verdict != IDENTICAL]
    errors = [i for i in differing if comparisons[i].verdict == FAIL]
    if not differing:
        return "lossless: equal"
    first = (errors or differing)[0]
    place = f"token {comparisons[first].divergence.index}"
    if len(comparisons) > 1:
        place += f" of prompt {first}"
    if errors:
        answers = "1 answer differs" if len(errors) == 1 else f"{len(errors)} answers differ, the first"
        return f"not lossless: {answers} from {place} on"
    ties = "1 near-tie at" if len(differing) == 1 else f"{len(differing)} near-ties, the first at"
    return f"lossless: equal up to {ties} {place}"


def describe_counts(answers: int, identical: int, near_ties: int, tokens: int, dtype: DTypeLike) -> str:
    """Returns in words the numbers on which a verdict is based.

    Args:
      answers: number of drafted answers compared with one-token decoding.
      identical: number of answers that are identical.
      near_ties: number of answers whose first difference is a near-tie.
      tokens: number of tokens compared, each answer up to its first difference.
    """
    counts = f"{identical} of {answers} drafted answers identical to one-token decoding, {tokens:,} tokens compared"
    if near_ties:
        counts += f", {near_ties} near-tie" if near_ties == 1 else f", {near_ties} near-ties"
    if others := answers - identical - near_ties:
        counts += f", {others} other difference" if others == 1 else f", {others} other differences"
    if near_ties and jnp.dtype(dtype).itemsize < 4:
        counts += "; float32 has far fewer: add --dtype float32"
    return counts


def conclude(answers: int, identical: int, near_ties: int, tokens: int, dtype: DTypeLike) -> str:
    """Returns in words the verdict on all answers, as in `Comparison`, and its numbers; see `describe_counts`."""
    verdict = ROUNDING if near_ties else IDENTICAL
    if identical + near_ties < answers:
        verdict = FAIL
    return f"{verdict}: {describe_counts(answers, identical, near_ties, tokens, dtype)}"


def describe_reference(quantize: str | None) -> str:
    """Returns a line with the name of the verifier whose outputs are reproduced exactly."""
    if quantize is None:
        return "exact with respect to the verifier as loaded"
    return f"exact with respect to the {quantize} verifier, whose own answers may differ from those of wider weights"


def describe_ends(model: TreeFlash) -> str:
    """Returns a line with the tokens that end an answer if a call has no `stop_ids`."""
    ends = [str(i) for i in model.stop_ids]
    if model.tokenizer is not None:
        ends = [f"{i} {quoted(model.tokenizer.inner.convert_ids_to_tokens(i))}" for i in model.stop_ids]
    return f"tokens that end an answer: {', '.join(ends) or 'none'}"


def explain(divergence: Divergence, dtype: DTypeLike) -> str:
    if divergence.gap is None:
        return "one answer ended before the other"
    if divergence.near_tie:
        return f"near-tie: {dtype} rounding decides between the two candidates; not an error"
    return f"{dtype} rounding does not explain it: the two candidates' logits are {divergence.gap:.2g} apart"
