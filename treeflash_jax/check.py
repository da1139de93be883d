"""Losslessness, checked on the user's own prompts: drafted against one-token decoding with the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from treeflash_jax import devices
from treeflash_jax import mesh as meshes
from treeflash_jax.model import TreeFlash
from treeflash_jax.planning import drafting, resolve, values
from treeflash_jax.prompts import Prompt
from treeflash_jax.results import Result
from treeflash_jax.settings import NO_DRAFTER, Settings, renamed, takes_settings
from treeflash_jax.verifiers import forward as model_code


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where two outputs part.

    Attributes:
      index: of the first generated token that differs.
      drafted: the token of the drafted output, None where it had ended.
      plain: the token of the one-token output, None where it had ended.
      gap: difference of the verifier's two largest logits there, after one pass over the common prefix. A gap of the
        order of the dtype's rounding is a near-tie that a wide and a narrow matrix product may decide differently.
    """

    index: int
    drafted: int | None
    plain: int | None
    gap: float


@dataclass(frozen=True, kw_only=True)
class Check:
    """One prompt, decoded twice.

    Attributes:
      drafted, plain: both answers.
      divergence: None where they are equal.
      quantize: scheme of the verifier that gave both: `meaning` says what their equality means.
    """

    drafted: Result
    plain: Result
    divergence: Divergence | None
    quantize: str | None = None


@takes_settings
def check(model: TreeFlash, prompts: Sequence[Prompt], **settings: Unpack[Settings]) -> list[Check]:
    """Decodes every prompt with and without drafting and compares.

    Args:
      model: with a drafter.
      prompts: as `TreeFlash.generate` takes them.
      **settings: of the drafted run; the plain one takes those that shape the output.

    Raises:
      ValueError: no drafter, or an acceptance rule whose answers are samples of their own, at a temperature above 0.
    """
    if model.drafter is None:
        raise ValueError(f"{NO_DRAFTER}, expected one: without it there is nothing to compare")
    settings = renamed(settings)
    config = resolve(None, settings, model.verifier, model.drafter)
    if config.builder != "none" and drafting(config)[1] != "sample-and-match" and max(values(config.temperature)) > 0:
        rule = drafting(config)[1]
        raise ValueError(f"got acceptance {rule!r} at temperature above 0, expected 'sample-and-match' to compare answers")
    own = drafting(config)[0]  # named, so that none is chosen by temperature: answers of a sampled tree are its own samples
    drafted = model.generate(prompts, **settings | {"builder": own})
    plain = model.generate(prompts, **settings | {"builder": "none"})
    return [
        Check(drafted=mine, plain=theirs, divergence=_divergence(model, mine, theirs), quantize=model.quantize)
        for mine, theirs in zip(drafted, plain, strict=True)
    ]


def meaning(quantize: str | None) -> str:
    """What equal outputs are exact with respect to, in one line."""
    if quantize is None:
        return "exact with respect to the verifier as loaded"
    return f"exact with respect to the {quantize} verifier, not to the one in the files: its own answers may differ"


def _divergence(model: TreeFlash, drafted: Result, plain: Result) -> Divergence | None:
    if drafted.ids == plain.ids:
        return None
    common = zip(drafted.ids, plain.ids, strict=False)
    index = next((i for i, (a, b) in enumerate(common) if a != b), min(len(drafted.ids), len(plain.ids)))

    def token(ids: list[int]) -> int | None:
        return ids[index] if index < len(ids) else None

    prefix = plain.prompt_ids + plain.ids[:index]
    return Divergence(index=index, drafted=token(drafted.ids), plain=token(plain.ids), gap=_top_gap(model, prefix))


def _top_gap(model: TreeFlash, ids: list[int]) -> float:
    size = 1 << (len(ids) - 1).bit_length()  # few shapes, few compilations
    padded = np.zeros((1, size), np.int32)
    padded[0, : len(ids)] = ids
    with meshes.ambient(model.mesh):
        logits_v = np.asarray(_logits_at(model.weights.verifier, jnp.asarray(padded), len(ids) - 1, model.verifier))
    second, first = np.sort(logits_v.astype(np.float64))[-2:]
    return float(first - second)


@partial(devices.jit, static_argnames="config")
def _logits_at(weights: Any, tokens_1t: jax.Array, index: jax.Array, config: Any) -> jax.Array:
    size = tokens_1t.shape[1]
    out = model_code.forward(weights, config, tokens_1t, jnp.arange(size)[None], model_code.causal_mask(1, size))
    return model_code.logits(weights, out.hidden_btd[:, index])[0]
