"""Drafters propose continuations of a text to the verifier.

A drafter is one module with the functions of `Drafter`, and one line in DRAFTERS. Decoding, benchmarks and files reach a
drafter through it. Its training is a stage, behind the door in `train/stages/drafting.py`.

A round (decoding/rounds.py):
  >>> drafter = drafters.of(config)
  >>> inputs = Inputs(weights.drafter, weights.verifier, config, settings, state, anchor_b, temperature_b, depths,
  ...                 tokens_bs, length_b)
  >>> expander = None
  >>> for stage in drafter.stages(config).values():
  ...     expander = stage(inputs, expander)
  >>> tree = best_first(expander, anchor_b, num_nodes)  # then verified and accepted
  >>> state = drafter.extend(weights.drafter, weights.verifier, config, state, features_btj, tokens_bt, count_b,
  ...                        attention=plan.attention)

Shape suffixes: b batch, t positions, j tapped layers x model.
"""

from __future__ import annotations

import dataclasses
import functools

from treeflash_jax.drafters import block, causal_lm, eagle3, ngram
from treeflash_jax.drafters.protocol import Drafter, DrafterSizes, Inputs, State
from treeflash_jax.drafters.steering import SteeringConfig
from treeflash_jax.trees.expander import Expander

DRAFTERS: dict[str, Drafter] = {"block": block, "eagle3": eagle3, "language model": causal_lm, "ngram": ngram}
REGISTRIES = DRAFTERS, block.HEADS  # of everything here that programs can be compiled for


def of(config: DrafterSizes) -> Drafter:
    """Returns the module of a drafter, by its config."""
    return DRAFTERS[config.kind]


def is_declared(flag: str, config: DrafterSizes) -> bool:
    """Returns an optional flag of the drafter: READS_PROMPT, MAY_OFFER_NOTHING or OWN_TOKENIZER; see `Drafter`."""
    return getattr(of(config), flag, False)


def steered(config: DrafterSizes, steering: SteeringConfig) -> DrafterSizes:
    """Returns the config of a drafter steered by the verifier's hidden states.

    Raises:
      ValueError: this drafter cannot be steered.
    """
    drafter = of(config)
    if not hasattr(drafter, "steered"):
        raise ValueError(f"got steering with a drafter of kind {config.kind!r}, expected a language model to be steered")
    return drafter.steered(config, steering)


def draft_options() -> type:
    """Returns a dataclass of the options of all registered drafters."""
    return _merge(*dict.fromkeys(drafter.OPTIONS for drafter in DRAFTERS.values()))


@functools.cache
def _merge(*options: type) -> type:
    attributes = {"__doc__": "Options of the registered drafters.", "__module__": __name__}
    return dataclasses.dataclass(frozen=True, kw_only=True)(type("DraftOptions", options, attributes))


__all__ = [
    "DRAFTERS", "REGISTRIES", "Drafter", "DrafterSizes", "Expander", "Inputs", "State", "draft_options", "is_declared",
    "of", "steered",
]  # fmt: skip
