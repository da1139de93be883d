"""What a drafter reads in a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Inputs:
    """Everything that the stages of a drafter may read in one round.

    Attributes:
      tables: the verifier's weights, whose embedding and vocabulary tables drafters share.
      settings: of the draft, static; what the drafter's `choose` returned.
      anchor_b: the last committed token of each sequence.
      temperature_b: of the drafted distribution, above 0.
      depths: the deepest level that the round's tree can have, at least 1 and at most the drafter's; static.
    """

    params: Any
    tables: Any
    config: Any
    settings: Any
    state: Any
    anchor_b: jax.Array
    temperature_b: jax.Array
    depths: int
    attention: str = "xla"
