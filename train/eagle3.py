"""Trains an EAGLE-3 drafter from scratch on the verifier's own responses. The verifier stays frozen.

    python -m train.eagle3 configs/tiny/eagle3.toml run=runs/eagle3 verifier=tiny

The drafter's layer is unrolled for a few steps on its own outputs, and compared with the verifier's distribution
("training-time test"). Step 0 at position t reads the verifier's features at t and the token at t + 1, and predicts the
token at t + 2. As in drafting, step i is at position t + i: it reads the output of step i - 1 and the token at t + 1 + i,
and attends to the step-0 keys before t and to the keys of its rollout. So a rollout computes what decoding would compute
below an anchor at t + 1 if the true tokens were drafted.

Positions are processed in chunks, and logits are recomputed in the backward pass. So no array has an axis for the
vocabulary together with one for all positions or all steps.

The vocabulary matrix starts as a copy of the verifier's, and the embedding is shared. Writes a folder, RUN/model, that
`treeflash_jax.load` and vLLM's speculators read.

Shape suffixes: as in `train.stages.rollout`.

Source: EAGLE-3 (arXiv 2503.01840) section 3; losses and masks as in SpecForge and DeepSpec.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import numpy as np

from train.runtime import run_config
from train.runtime.training_state import SumsFunction
from train.stages.drafting import DraftingStage, copy_weights
from train.stages.drafting import train as main
from train.stages.rollout import RolloutConfig, RolloutNetwork, check_chunks, rollout_sums
from train.stages.teacher import Teacher
from treeflash_jax.core import parameters
from treeflash_jax.core.checks import expect
from treeflash_jax.core.parameters import Params
from treeflash_jax.core.settings import setting
from treeflash_jax.drafters import eagle3_drafter
from treeflash_jax.drafters.block.block_drafter import fresh_layers
from treeflash_jax.drafters.eagle3_drafter import Eagle3Drafter, default_taps
from treeflash_jax.drafters.protocol import draft_ids
from treeflash_jax.formats.draft_vocabulary import most_frequent
from treeflash_jax.models import layers, vocab
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.trees.tree_inputs import MAX_NODES


@dataclass(frozen=True, kw_only=True)
class Eagle3Stage(DraftingStage):
    """Settings that this stage adds to DraftingStage."""

    records_training = True

    stage: Literal["eagle3"] = setting("eagle3", "kind of the run, which it stores")
    objective: RolloutConfig
    target_layer_ids: tuple[int, ...] = setting(
        (), "verifier layers that it reads; empty takes the rule of the EAGLE repository", least=0
    )
    fc_norm: bool = setting(False, "option of EAGLE-3.1: see `Eagle3Drafter`")
    norm_before_residual: bool = setting(False, "option of EAGLE-3.1: see `Eagle3Drafter`")
    norm_output: bool = setting(False, "option of EAGLE-3.1: see `Eagle3Drafter`")
    draft_vocab_size: int = setting(
        0, "number of tokens that can be drafted, the most frequent ones of the answers; 0: all", least=0
    )
    num_depths: int = setting(7, "default depth of the tree, stored with the drafter", least=1, most=MAX_NODES - 1)
    num_nodes: int = setting(16, "default number of tree nodes, stored with the drafter", least=1, most=MAX_NODES)
    drafter_temperature: float = setting(1.0, "default temperature of the draft, stored with the drafter", above=0)

    def __post_init__(self) -> None:
        check_chunks(self.objective, self.data.sequence_length)

    @property
    def trains(self) -> tuple[str, ...]:
        return ("fc", "layer", "norm", "unembed", *(("fc_norm",) if self.fc_norm else ()))

    def drafter_config(self, verifier: ModelConfig, start: None) -> Eagle3Drafter:
        depth = verifier.num_layers
        size = self.draft_vocab_size or verifier.vocab_size
        # With fewer than 8 layers, some default taps are equal.
        usual = default_taps(depth) if depth >= 8 else (0, depth // 2, depth - 1)
        taps = self.target_layer_ids or usual
        expect(size <= verifier.vocab_size, "draft_vocab_size", size, f"at most {verifier.vocab_size} (verifier)")
        return Eagle3Drafter(
            layers=fresh_layers(verifier, 1),
            target_hidden_size=verifier.hidden_size,
            taps=taps,
            num_taps=len(taps),
            draft_vocab_size=size,
            fc_norm=self.fc_norm,
            norm_before_residual=self.norm_before_residual,
            norm_output=self.norm_output,
            num_depths=self.num_depths,
            num_nodes=self.num_nodes,
            drafter_temperature=self.drafter_temperature,
        ).fitted(verifier)

    def derived(self, drafter: Eagle3Drafter, counts_v: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the draft vocabulary, the most frequent tokens, if it is smaller than the verifier's."""
        if drafter.draft_vocab_size == counts_v.size:
            return {}
        ids_z = most_frequent(counts_v, drafter.draft_vocab_size)
        return {"offsets": ids_z - np.arange(len(ids_z))}

    def fresh(self, drafter: Eagle3Drafter, weights: Params, stored: Mapping[str, Any]) -> dict[str, Any]:
        fresh = parameters.initialize(drafter.specs(), jax.random.key(self.loop.seed), scale=self.init_scale)
        fresh |= copy_weights({"norm": weights["norm"], "unembed": weights.get("unembed", weights["embed"])})
        if "offsets" in stored:
            fresh["unembed"] = fresh["unembed"][draft_ids(stored)]
        return {name: fresh[name] for name in self.trains}

    def make_sums(self, verifier: ModelConfig, drafter: Eagle3Drafter) -> SumsFunction:
        network = Eagle3Network(drafter)
        return partial(rollout_sums, settings=self.objective, verifier=verifier, network=network, attention=self.attention)


@dataclass(frozen=True)
class Eagle3Network(RolloutNetwork):
    """EAGLE-3's layer."""

    drafter: Eagle3Drafter

    def carried(self, weights: Params, teacher: Teacher) -> jax.Array:
        return eagle3_drafter.fuse(weights, self.drafter, teacher.features_btj)

    def layer_input(self, weights: Params, tables: Params, token_bn: jax.Array, carried_bnd: jax.Array) -> jax.Array:
        return eagle3_drafter.layer_input(weights, tables, self.drafter, token_bn, carried_bnd)

    def keys_values(self, weights: Params, input_bn: jax.Array, position_bn: jax.Array) -> tuple[jax.Array, jax.Array]:
        table = eagle3_drafter.rotary_table(self.drafter, position_bn)
        return layers.keys_values(weights["layer"], self.drafter.layers, input_bn, table)

    def output(
        self, weights: Params, input_bn: jax.Array, carried_bnd: jax.Array, position_bn: jax.Array, attend: Callable
    ) -> jax.Array:
        table = eagle3_drafter.rotary_table(self.drafter, position_bn)
        return eagle3_drafter.layer_output(weights, self.drafter, input_bn, carried_bnd, table, attend)

    def feed_back(self, weights: Params, hidden_bnd: jax.Array) -> jax.Array:
        return eagle3_drafter.feed_back(weights, self.drafter, hidden_bnd)

    def logits(self, weights: Params, tables: Params, hidden_bnd: jax.Array) -> jax.Array:
        return vocab.unembed(weights["unembed"], eagle3_drafter.normed(weights, self.drafter, hidden_bnd))


if __name__ == "__main__":
    run_config.run_command(main, Eagle3Stage, __doc__)
