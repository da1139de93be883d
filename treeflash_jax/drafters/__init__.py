"""Drafters propose continuations of a text to the verifier.

A drafter is one module with the functions of `Drafter`, and one line in DRAFTERS. Decoding, benchmarks and files reach a
drafter through it (`decoding.rounds`). Its training is a stage (`train/stages/drafting.py`).
"""

import dataclasses
import functools

from treeflash_jax.drafters import block, causal_lm, eagle3, ngram
from treeflash_jax.drafters.protocol import Drafter, DrafterSizes, Inputs

DRAFTERS: dict[str, Drafter] = {"block": block, "eagle3": eagle3, "language model": causal_lm, "ngram": ngram}


def get(config: DrafterSizes) -> Drafter:
    """Returns the module of a drafter, by its config."""
    return DRAFTERS[config.kind]


def is_declared(flag: str, config: DrafterSizes) -> bool:
    """Returns an optional flag of the drafter: READS_PROMPT, MAY_OFFER_NOTHING or OWN_TOKENIZER; see `Drafter`."""
    return getattr(get(config), flag, False)


def draft_options() -> type:
    """Returns a dataclass of the options of all registered drafters."""
    return _merge(*dict.fromkeys(drafter.OPTIONS for drafter in DRAFTERS.values()))


@functools.cache
def _merge(*options: type) -> type:
    attributes = {"__doc__": "Options of the registered drafters.", "__module__": __name__}
    return dataclasses.dataclass(frozen=True, kw_only=True)(type("DraftOptions", options, attributes))


__all__ = ["DRAFTERS", "Drafter", "DrafterSizes", "Inputs", "draft_options", "get", "is_declared"]
