"""Trains an EAGLE-3 drafter from scratch on the verifier's own responses; the verifier stays frozen.

    python -m train.eagle3 configs/tiny/eagle3.toml run=runs/eagle3 verifier=tiny

Its layer is unrolled for a few steps on its own outputs, against the verifier's distribution ("training-time test"; see
stages/rollout.py). The vocabulary matrix starts as the verifier's, whose embedding is shared. Writes a folder,
RUN/model, that `treeflash_jax.load` and vLLM's speculators read.

Source: EAGLE-3 (arXiv 2503.01840).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from train.runtime import run_config
from train.runtime.training_state import SumsFunction
from train.stages.drafting import DraftingStage, copy_weights
from train.stages.drafting import train as main
from train.stages.rollout import RolloutConfig, rollout_sums
from treeflash_jax.core import parameters
from treeflash_jax.core.checks import expect
from treeflash_jax.core.settings import setting
from treeflash_jax.drafters.block.block_drafter import fresh_layers
from treeflash_jax.drafters.eagle3_drafter import Eagle3Config, default_taps
from treeflash_jax.drafters.protocol import draft_ids
from treeflash_jax.formats.draft_vocabulary import most_frequent
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.trees.shape import MAX_NODES


@dataclass(frozen=True, kw_only=True)
class Eagle3Stage(DraftingStage):
    """Settings of this stage, besides those of DraftingStage."""

    objective: RolloutConfig
    target_layer_ids: tuple[int, ...] = setting(
        (), "verifier layers that it reads; empty takes the rule of the EAGLE repository", least=0
    )
    fc_norm: bool = setting(False, "option of EAGLE-3.1: see `Eagle3Config`")
    norm_before_residual: bool = setting(False, "option of EAGLE-3.1: see `Eagle3Config`")
    norm_output: bool = setting(False, "option of EAGLE-3.1: see `Eagle3Config`")
    draft_vocab_size: int = setting(
        0, "number of tokens that can be drafted, the most frequent ones of the answers; 0: all", least=0
    )
    num_depths: int = setting(7, "default depth of the tree, stored with the drafter", least=1, most=MAX_NODES - 1)
    num_nodes: int = setting(16, "default number of tree nodes, stored with the drafter", least=1, most=MAX_NODES)
    drafter_temperature: float = setting(1.0, "default temperature of the draft, stored with the drafter", above=0)

    def __post_init__(self) -> None:
        whole, anchors, chunk = self.data.sequence_length, self.objective.anchors, self.objective.chunk
        expect(anchors <= whole, "objective.anchors", anchors, f"at most data.sequence_length {whole}")
        divided = f"objective.anchors {anchors}" if anchors else f"data.sequence_length {whole}"
        expect((anchors or whole) % chunk == 0, "objective.chunk", chunk, f"a divisor of {divided}")

    @property
    def trains(self) -> tuple[str, ...]:
        return ("fc", "layer", "norm", "unembed", *(("fc_norm",) if self.fc_norm else ()))

    def drafter_config(self, model: ModelConfig, start: None) -> Eagle3Config:
        depth, size = model.num_layers, self.draft_vocab_size or model.vocab_size
        usual = default_taps(depth) if depth >= 8 else (0, depth // 2, depth - 1)  # of fewer, the usual ones coincide
        taps = self.target_layer_ids or usual
        expect(size <= model.vocab_size, "draft_vocab_size", size, f"at most {model.vocab_size} (verifier)")
        return Eagle3Config(
            layers=fresh_layers(model, 1),
            target_hidden_size=model.hidden_size,
            taps=taps,
            num_taps=len(taps),
            draft_vocab_size=size,
            fc_norm=self.fc_norm,
            norm_before_residual=self.norm_before_residual,
            norm_output=self.norm_output,
            num_depths=self.num_depths,
            num_nodes=self.num_nodes,
            drafter_temperature=self.drafter_temperature,
        ).fitted(model)

    def derived(self, drafter: Eagle3Config, counts_v: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the draft vocabulary if it is not whole: the most frequent tokens."""
        if drafter.draft_vocab_size == counts_v.size:
            return {}
        ids_z = most_frequent(counts_v, drafter.draft_vocab_size)
        return {"offsets": ids_z - np.arange(len(ids_z))}

    def fresh(self, drafter: Eagle3Config, weights: Any, stored: Mapping[str, Any]) -> dict[str, Any]:
        fresh = parameters.initialize(drafter.specs(), jax.random.key(self.loop.seed), scale=self.init_scale)
        fresh |= copy_weights({"norm": weights["norm"], "unembed": weights.get("unembed", weights["embed"])})
        if "offsets" in stored:
            fresh["unembed"] = fresh["unembed"][draft_ids(stored)]
        return {name: fresh[name] for name in self.trains}

    def make_sums(self, verifier: ModelConfig, drafter: Eagle3Config) -> SumsFunction:
        return partial(rollout_sums, settings=self.objective, verifier=verifier, drafter=drafter, attention=self.attention)


if __name__ == "__main__":
    run_config.run(main, Eagle3Stage, __doc__)
