"""Trains the TreeFlash head (or the linear one) on a backbone: what a drafted token depends on besides the context.

    python -m train.head configs/tiny/head.toml run=runs/head drafter=runs/drafter/model

Forward KL from the verifier's distribution (temperature 1) to the corrected one, given the true previous token. The
output layer starts at zero, where the drafter is DFlash, whatever head the drafter's folder may hold. Leaves a Hugging Face
folder in RUN/model.

Source: TreeFlash (arXiv 2606.03819).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp

from train import config
from train.drafter import DrafterStage, DraftingStage, train
from treeflash_jax import params as parameters
from treeflash_jax.checks import bounded, quoted
from treeflash_jax.drafters import block
from treeflash_jax.drafters.block.config import DrafterConfig
from treeflash_jax.formats import models
from treeflash_jax.pairs import locate
from treeflash_jax.verifiers.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class HeadStage(DraftingStage):
    """Settings of this stage, besides those of DraftingStage.

    Attributes:
      drafter: the name of a pair, a folder or a Hub id of a DFlash or TreeFlash drafter; its head is not read.
      head: a name in drafters.block.heads: "mlp" (TreeFlash), "linear" or "lowrank".
      train_backbone: also trains the backbone (the paper's main runs; frozen is its nearly equal ablation).
      drafter_temperature: default stored with the drafter; 0 keeps the backbone's.
    """

    drafter: str = "tiny"
    head: str = "mlp"
    train_backbone: bool = False
    drafter_temperature: float = bounded(0.0, least=0)

    def __post_init__(self) -> None:
        trainable = [name for name, head in block.HEADS.items() if head.ENTRIES]
        if self.head not in trainable:
            raise ValueError(f"got head {quoted(self.head)}, expected one of {', '.join(trainable)}")

    @property
    def trains(self) -> tuple[str, ...]:
        return ("backbone", "head") if self.train_backbone else ("head",)


def read_stage(path: str | PathLike, overrides: Sequence[str] = ()) -> DrafterStage | HeadStage:
    """Settings of whichever drafter stage a file is for: backbones from scratch name a mask token, heads do not."""
    kind = DrafterStage if "mask_token_id" in config.read(path, overrides) else HeadStage
    return config.load(kind, path, overrides)


def fresh_head(drafter: DrafterConfig, seed: int, scale: float) -> Any:
    """Head weights whose output layer is zero, so that training starts from the marginals."""
    return parameters.initialize(block.specs(drafter)["head"], jax.random.key(seed), scale=scale)


def read_backbone(settings: HeadStage, model: ModelConfig) -> tuple[DrafterConfig, Any]:
    """The drafter to be trained, its head replaced, and the weights of its backbone.

    Raises:
      ValueError: a drafter that cannot be read, or of another verifier than `model`.
    """
    folder = locate(settings.drafter, "drafter")
    models.read_drafter_config(folder).fitted(model)
    drafter, params = models.load_drafter(folder, dtype=jnp.float32)
    temperature = settings.drafter_temperature or drafter.drafter_temperature
    fresh = dataclasses.replace(drafter, head=settings.head, drafter_temperature=temperature, sampled_above=None)
    return fresh, params["backbone"]


def main(settings: HeadStage) -> None:
    def prepare(model: ModelConfig, norm: Any) -> tuple[DrafterConfig, Any, Any]:
        drafter, backbone = read_backbone(settings, model)
        head = fresh_head(drafter, settings.loop.seed + 1, settings.init_scale)
        if settings.train_backbone:
            return drafter, {"backbone": backbone, "head": head}, {}
        return drafter, {"head": head}, {"backbone": backbone}

    train(settings, prepare)


if __name__ == "__main__":
    config.run(main, HeadStage, __doc__)
