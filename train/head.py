"""Trains the TreeFlash head (or the linear one) on a backbone: what a drafted token depends on besides the context.

    python -m train.head configs/tiny/head.toml run=runs/head drafter=runs/drafter/model

Forward KL from the verifier's distribution (temperature 1) to the corrected one, given the true previous token. The
output layer starts at zero, where the drafter is DFlash, whatever head the drafter's folder may hold. Leaves a Hugging Face
folder in RUN/model.

Source: TreeFlash (arXiv 2606.03819).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from train import config
from train.documents import DataConfig
from train.drafter import train
from train.evaluate import EvaluateConfig
from train.objective import ObjectiveConfig
from train.records import Source
from treeflash_jax import hf
from treeflash_jax import params as parameters
from treeflash_jax.config import DrafterConfig, ModelConfig
from treeflash_jax.generate import shipped
from treeflash_jax.heads import HEADS


@dataclass(frozen=True, kw_only=True)
class HeadStage:
    """Settings of this stage.

    Attributes:
      run: folder of checkpoints, log and result, local or gs://.
      verifier: "tiny", a folder or a Hub id.
      drafter: "tiny", a folder or a Hub id of a DFlash or TreeFlash drafter; its head is not read.
      head: "mlp" (TreeFlash) or "linear".
      train_backbone: also trains the backbone (the paper's main runs; frozen is its nearly equal ablation).
      sources, data: responses of the verifier (`train.respond`), or chats.
      drafter_temperature: default stored with the drafter; 0 keeps the backbone's.
      init_scale: standard deviation of the head's fresh input maps.
      compute_dtype: of activations, and of frozen weights.
    """

    run: str
    verifier: str = "tiny"
    drafter: str = "tiny"
    head: Literal["mlp", "linear"] = "mlp"
    train_backbone: bool = False
    sources: tuple[Source, ...]
    data: DataConfig = DataConfig()
    drafter_temperature: float = 0.0
    init_scale: float = 0.02
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    objective: ObjectiveConfig
    evaluate: EvaluateConfig = EvaluateConfig()
    optimizer: config.OptimizerConfig
    loop: config.LoopConfig
    mesh: config.MeshConfig = config.MeshConfig()


def fresh_head(drafter: DrafterConfig, seed: int, scale: float) -> Any:
    """Head weights whose output layer is zero, so that training starts from the marginals."""
    return parameters.initialize(HEADS[drafter.head].specs(drafter), jax.random.key(seed), scale=scale)


def read_backbone(settings: HeadStage, model: ModelConfig | None = None) -> tuple[DrafterConfig, Any]:
    """The drafter to be trained, its head replaced, and the weights of its backbone."""
    folder = hf.locate(shipped("drafter") if settings.drafter == "tiny" else settings.drafter)
    if model is not None:
        hf.read_drafter_config(folder).check_fits(model)
    drafter, backbone, _ = hf.load_drafter(folder, dtype=jnp.float32)
    temperature = settings.drafter_temperature or drafter.drafter_temperature
    return dataclasses.replace(drafter, head=settings.head, drafter_temperature=temperature), backbone


def main(settings: HeadStage) -> None:
    def prepare(model: ModelConfig, norm: Any) -> tuple[DrafterConfig, Any, Any]:
        drafter, backbone = read_backbone(settings, model)
        head = fresh_head(drafter, settings.loop.seed + 1, settings.init_scale)
        if settings.train_backbone:
            return drafter, {"backbone": backbone, "head": head}, {}
        return drafter, {"head": head}, {"backbone": backbone}

    train(settings, ("backbone", "head") if settings.train_backbone else ("head",), prepare)


if __name__ == "__main__":
    config.run(main, HeadStage, __doc__)
