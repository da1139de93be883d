"""Trains a DFlash backbone on the verifier's own responses, alone or together with a head.

    python -m train.drafter configs/tiny/drafter.toml run=runs/drafter verifier=tiny

The backbone starts from scratch or from layers of the verifier, which stays frozen. Writes a Hugging Face folder,
RUN/model, for `treeflash_jax.load`, `train.head` and the published code.

Source: DFlash (arXiv 2602.06036) sections 4.2 and 5.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from train.runtime import run_config
from train.stages import choices
from train.stages.block_stage import WITH_HEAD, BlockStage
from train.stages.drafting import copy_weights
from train.stages.drafting import train as main
from treeflash_jax.core import parameters
from treeflash_jax.core.checks import expect
from treeflash_jax.core.error_text import quoted
from treeflash_jax.core.parameters import Params
from treeflash_jax.core.settings import setting
from treeflash_jax.drafters.block.block_drafter import BlockDrafter, default_target_layers, fresh_layers
from treeflash_jax.drafters.block.heads import HEADS
from treeflash_jax.models import decoder, quantized
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.trees.tree_inputs import MAX_NODES


@dataclass(frozen=True, kw_only=True)
class DrafterStage(BlockStage):
    """Settings that this stage adds to BlockStage."""

    stage: Literal["drafter"] = setting("drafter", "kind of the run, which it stores")
    num_layers: int = setting(5, "number of layers of the backbone; sizes not given here are the verifier's", least=1)
    block_size: int = setting(16, "tokens of a block, its anchor included", least=2, most=MAX_NODES)
    mask_token_id: int = setting(help="token in the slots of a block that are to be predicted", least=0)
    target_layer_ids: tuple[int, ...] = setting(
        (), "verifier layers that it reads; empty takes the published rule, one per layer of the backbone", least=0
    )
    head: str = setting(
        "marginal",
        'name in drafters.block.heads. All but "marginal", which has no weights, are trained with the backbone from the'
        " start: the loss of the head, plus `objective.base_weight`, above 0, times the loss of the backbone's marginals,"
        " which propose the candidates",
    )
    initial_layers: tuple[int, ...] = setting(
        (),
        "verifier layers copied into the backbone's layers, one for each; empty starts at random, as published. With "
        "copies a short training gets much further",
        least=0,
    )
    drafter_temperature: float = setting(1.0, "default temperature of the draft, stored with the drafter", above=0)
    num_nodes: int = setting(16, "default number of tree nodes, stored with the drafter", least=1, most=MAX_NODES)

    def __post_init__(self) -> None:
        trainable = [name for name, head in HEADS.items() if head.is_trainable]
        expect(self.head in trainable, "head", self.head, f"one of {', '.join(trainable)}")
        super().__post_init__()
        if "head" in self.trains and not self.objective.base_weight:
            raise ValueError(f"got head {quoted(self.head)} and objective.base_weight 0, expected more for the candidates")

    @property
    def trains(self) -> tuple[str, ...]:
        return ("backbone", "head") if HEADS[self.head].entries else ("backbone",)

    @property
    def systems(self) -> Mapping[str, Mapping[str, Any]]:
        return WITH_HEAD if "head" in self.trains else super().systems

    def drafter_config(self, verifier: ModelConfig, start: None) -> BlockDrafter:
        drafter = BlockDrafter(
            layers=fresh_layers(verifier, self.num_layers),
            block_size=self.block_size,
            mask_token_id=self.mask_token_id,
            taps=self.target_layer_ids or default_target_layers(verifier.num_layers, self.num_layers),
            num_target_layers=verifier.num_layers,
            num_nodes=self.num_nodes,
            drafter_temperature=self.drafter_temperature,
            head=self.head,
            head_rank=self.head_rank,
            candidates=HEADS[self.head].candidates,
        )
        copied = self.initial_layers
        if copied:
            is_one_each = len(copied) == self.num_layers and max(copied) < verifier.num_layers
            if not (is_one_each and choices.has_drafter_layers(verifier)):
                raise ValueError(
                    f"got initial_layers {list(copied)}, expected {self.num_layers} verifier layers from 0 to "
                    f"{verifier.num_layers - 1}, or none if those layers are of another kind than a drafter's"
                )
        return drafter.fitted(verifier)

    def fresh(self, drafter: BlockDrafter, weights: Params, stored: Mapping[str, Any]) -> dict[str, Any]:
        specs = drafter.specs()
        fresh = {
            name: parameters.initialize(specs[name], jax.random.key(self.loop.seed + number), scale=self.init_scale)
            for number, name in enumerate(self.trains)
        }
        fresh["backbone"]["norm"] = copy_weights(weights["norm"])  # the vocabulary matrix was trained with this scale
        if self.initial_layers:
            fresh["backbone"] |= _copy_layers(drafter, weights, self.initial_layers)
        return fresh


def _copy_layers(drafter: BlockDrafter, weights: Params, initial_layers: Sequence[int]) -> dict[str, Any]:
    """Copies layers of the verifier. In the drafter, they read the last tapped layer instead of the residual stream.

    If there is only one layer, and it directly follows the tap, the context's keys and values equal the verifier's.
    """
    layers = decoder.each_layer(weights)
    specs = drafter.specs()["backbone"]["groups"][0]
    copies = copy_weights(quantized.expand(specs, [layers[i] for i in initial_layers]))
    width, taps = drafter.layers.hidden_size, len(drafter.taps)
    last = int(np.argmax(drafter.taps))
    return {
        "fc": jnp.zeros((taps, width, width)).at[last].set(jnp.eye(width)).reshape(taps * width, width),
        "hidden_norm": sum(layer["attention_norm"] for layer in copies) / len(copies),
        "groups": [copies],
    }


if __name__ == "__main__":
    run_config.run_command(main, DrafterStage, __doc__)
