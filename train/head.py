"""Trains a head on a backbone. With a head, a drafted token depends on the tokens before it.

    python -m train.head configs/tiny/head.toml run=runs/head drafter=runs/drafter/model

Minimises `objective.loss`, given the true tokens before each token. The forward KL is from the verifier's distribution
(temperature 1) to the head's. The output layer starts at zero, so that the drafter begins as DFlash. With `keep_head`,
training continues from the drafter's head. Writes a Hugging Face folder, RUN/model.

Source: TreeFlash (arXiv 2606.03819); train/README.md has the settings of other heads' publications.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax

from train.runtime import run_config
from train.stages.block_stage import WITH_HEAD, BlockStage
from train.stages.drafting import check_kind
from train.stages.drafting import train as main
from treeflash_jax.core import parameters
from treeflash_jax.core.checks import expect
from treeflash_jax.core.parameters import Params
from treeflash_jax.core.settings import setting
from treeflash_jax.drafters.block.block_drafter import BlockDrafter
from treeflash_jax.drafters.block.heads import HEADS
from treeflash_jax.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class HeadStage(BlockStage):
    """Settings that this stage adds to BlockStage."""

    stage: Literal["head"] = setting("head", "kind of the run, which it stores")
    drafter: str = setting("tiny", "name of a pair, folder or Hub id of a DFlash or TreeFlash drafter")
    head: str = setting(
        "mlp",
        "name in drafters.block.heads: mlp (TreeFlash), linear, lowrank (DSpark), gru (Domino), selector (DFlash2), ...",
    )
    keep_head: bool = setting(False, "starts from the drafter's head, which must be of this kind")
    train_backbone: bool = setting(
        False, "also trains the backbone (the paper's main runs; its ablation with a frozen one is nearly equal)"
    )
    drafter_temperature: float = setting(0.0, "default stored with the drafter; 0 keeps the backbone's", least=0)

    def __post_init__(self) -> None:
        trainable = [name for name, head in HEADS.items() if head.entries and head.is_trainable]
        expect(self.head in trainable, "head", self.head, f"one of {', '.join(trainable)}")
        super().__post_init__()

    @property
    def trains(self) -> tuple[str, ...]:
        return ("backbone", "head") if self.train_backbone else ("head",)

    @property
    def systems(self) -> Mapping[str, Mapping[str, Any]]:
        return WITH_HEAD

    @property
    def starts_from(self) -> str:
        return self.drafter

    def drafter_config(self, verifier: ModelConfig, start: Any) -> BlockDrafter:
        check_kind(self.drafter, start, BlockDrafter, "block drafter (DFlash)")
        drafter = start.fitted(verifier)
        if drafter.extras:
            got = f"{self.drafter}: got a drafter with {' and '.join(drafter.extras)}"
            raise ValueError(f"{got}, expected a DFlash backbone without: no head is trained on others")
        if drafter.embedding_factor != verifier.embedding_factor:
            got = f"{self.drafter}: got a drafter trained without the verifier's embedding factor"
            raise ValueError(f"{got}, expected one with it: the files of a trained head cannot store such a backbone")
        if self.keep_head and drafter.head != self.head:
            raise ValueError(f"{self.drafter}: got a drafter with head {drafter.head!r} to be kept, expected {self.head!r}")
        temperature = self.drafter_temperature or drafter.drafter_temperature
        rank = drafter.head_rank if self.keep_head else self.head_rank
        sizes = drafter.head_sizes if self.keep_head else None
        return dataclasses.replace(
            drafter,
            head=self.head,
            head_rank=rank,
            head_sizes=sizes,
            candidates=drafter.candidates if self.keep_head else HEADS[self.head].candidates,
            drafter_temperature=temperature,
            tau=None,
        )

    def fresh(self, drafter: BlockDrafter, weights: Params, stored: Mapping[str, Any]) -> dict[str, Any]:
        fresh = {name: stored[name] for name in self.trains}
        if not self.keep_head:
            key = jax.random.key(self.loop.seed + 1)
            fresh["head"] = parameters.initialize(drafter.specs()["head"], key, scale=self.init_scale)
        return fresh


if __name__ == "__main__":
    run_config.run_command(main, HeadStage, __doc__)
