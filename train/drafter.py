"""Trains a DFlash backbone from scratch on the verifier's own responses; the verifier stays frozen.

    python -m train.drafter configs/tiny/drafter.toml run=runs/drafter verifier=tiny

Leaves a Hugging Face folder in RUN/model, which `treeflash_jax.load`, `train.head` and the published code read.

Source: DFlash (arXiv 2602.06036) sections 4.2 and 5.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from etils import epath

from train import choices, config, data, folders, hosts, loop, progress, watch
from train.documents import DataConfig
from train.evaluate import EvaluateConfig, TreeTau
from train.objective import ObjectiveConfig, drafting_flops, drafting_sums
from train.records import Source
from train.state import Stage, place
from treeflash_jax import mesh as meshes
from treeflash_jax import params as parameters
from treeflash_jax.checks import bounded
from treeflash_jax.drafters import block
from treeflash_jax.drafters.block.config import DrafterConfig, default_target_layers, fresh_layers
from treeflash_jax.formats import models
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.pairs import locate
from treeflash_jax.trees.shape import MOST_NODES
from treeflash_jax.verifiers import forward as verifier
from treeflash_jax.verifiers.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class DraftingStage(ABC):
    """Settings that `train.drafter` and `train.head` share.

    Attributes:
      run: folder of checkpoints, log and result, local or gs://.
      verifier: the name of a pair, a folder, a GGUF file or a Hub id.
      sources, data: responses of that verifier (`train.respond`), or chats.
      init_scale: standard deviation of fresh weights.
      compute_dtype: of activations, and of frozen weights.
    """

    run: str
    verifier: str = "tiny"
    sources: tuple[Source, ...]
    data: DataConfig = DataConfig()
    init_scale: float = bounded(0.02, above=0)
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    objective: ObjectiveConfig
    evaluate: EvaluateConfig = EvaluateConfig()
    optimizer: config.OptimizerConfig
    loop: config.LoopConfig
    mesh: config.MeshConfig = config.MeshConfig()

    @property
    @abstractmethod
    def trains(self) -> tuple[str, ...]:
        """What gets new weights: "backbone" and/or "head"."""


@dataclass(frozen=True, kw_only=True)
class DrafterStage(DraftingStage):
    """Settings of this stage, besides those of DraftingStage.

    Attributes:
      num_layers, block_size, mask_token_id: of the backbone; all other sizes are the verifier's.
      target_layer_ids: verifier layers it reads; empty takes the published rule, one per layer of the backbone.
      drafter_temperature, num_nodes: defaults stored with the drafter.
    """

    num_layers: int = bounded(5, least=1)
    block_size: int = bounded(16, least=2, most=MOST_NODES)
    mask_token_id: int = bounded(least=0)
    target_layer_ids: tuple[int, ...] = bounded((), least=0)
    drafter_temperature: float = bounded(1.0, above=0)
    num_nodes: int = bounded(16, least=1, most=MOST_NODES)

    @property
    def trains(self) -> tuple[str, ...]:
        return ("backbone",)


def drafter_config(settings: DrafterStage, model: ModelConfig) -> DrafterConfig:
    made = DrafterConfig(
        layers=fresh_layers(model, settings.num_layers),
        block_size=settings.block_size,
        mask_token_id=settings.mask_token_id,
        target_layer_ids=settings.target_layer_ids or default_target_layers(model.num_layers, settings.num_layers),
        num_target_layers=model.num_layers,
        num_nodes=settings.num_nodes,
        drafter_temperature=settings.drafter_temperature,
    )
    return made.fitted(model)


def make_stage(settings: DraftingStage, model: ModelConfig, drafter: DrafterConfig) -> Stage:
    """What `settings.trains` names of a drafter is trained; what else a step needs is frozen."""
    trains = settings.trains
    specs = block.specs(drafter)
    frozen = {"verifier": verifier.specs(model)} | ({} if "backbone" in trains else {"backbone": specs["backbone"]})
    return Stage(
        specs={name: specs[name] for name in trains},
        frozen_specs=frozen,
        sums=partial(drafting_sums, settings=settings.objective, verifier=model, drafter=drafter),
        compute_dtype=jnp.dtype(settings.compute_dtype),
        flops=drafting_flops(
            settings.objective,
            model,
            drafter,
            batch=settings.loop.batch,
            row_tokens=settings.data.row_tokens,
            trains_backbone="backbone" in trains,
        ),
    )


def train(settings: DraftingStage, prepare: Callable[[ModelConfig, Any], tuple[DrafterConfig, Any, Any]]) -> None:
    """What both drafter stages do: open verifier and data, train, write RUN/model.

    Args:
      settings: of the stage.
      prepare: (verifier's config, verifier's final norm) -> drafter's config, initial weights of what is trained, and
        frozen weights besides the verifier.

    Raises:
      ValueError: sources, sizes or a drafter that cannot be trained (see `choices`).
    """
    hosts.connect()
    mesh = hosts.make_mesh(settings.mesh)
    hosts.check_batch(settings.loop.batch, settings.loop.accumulate, mesh)
    folder = locate(settings.verifier, "verifier")
    tokenizer = Tokenizer.load(folder)
    model = models.read_verifier_config(folder)
    if settings.data.row_tokens > model.max_positions:
        raise ValueError(
            f"got data.row_tokens {settings.data.row_tokens}, expected at most {model.max_positions} (verifier)"
        )
    corpus = data.open_sources(settings.sources, settings.data, tokenizer, settings.loop.seed, vocab_size=model.vocab_size)
    _, weights = models.load_verifier(folder, dtype=jnp.dtype(settings.compute_dtype), mesh=mesh)
    drafter, params, frozen = prepare(model, meshes.to_host(weights["norm"]))
    if "backbone" in settings.trains:
        choices.check_taps(drafter, model)
        choices.check_mask(drafter, model, corpus, tokenizer)
    stage = make_stage(settings, model, drafter)
    params = place(params, stage.specs, mesh, jnp.float32)
    frozen = {"verifier": weights} | {
        name: place(tree, stage.frozen_specs[name], mesh, stage.compute_dtype) for name, tree in frozen.items()
    }
    hosts.say(corpus.summary())
    hosts.say(
        f"{' and '.join(settings.trains)} of {parameters.count(params):,} weights, {corpus.num_rows} rows of "
        f"{settings.data.row_tokens} tokens, mesh {dict(mesh.shape)}"
    )
    measure = TreeTau(settings.evaluate, stage, model, drafter, corpus, frozen, mesh, models.stop_ids(folder, model))
    params = loop.fit(stage, config=settings, mesh=mesh, params=params, frozen=frozen, corpus=corpus, evaluate=measure)
    whole = meshes.to_host({name: (params | frozen).get(name, {}) for name in ("backbone", "head")})
    if hosts.is_first():
        target = epath.Path(settings.run) / "model"
        with folders.filled(target, overwrite=True) as folder:
            models.save_drafter(folder, drafter, whole)
        noun = " and ".join(settings.trains)
        progress.table(f"Trained {noun}", watch.summary(settings.run) | {"model": str(target)})


def main(settings: DrafterStage) -> None:
    def prepare(model: ModelConfig, norm: Any) -> tuple[DrafterConfig, Any, Any]:
        drafter = drafter_config(settings, model)
        specs = block.specs(drafter)["backbone"]
        backbone = parameters.initialize(specs, jax.random.key(settings.loop.seed), scale=settings.init_scale)
        backbone["norm"] = jnp.asarray(norm, jnp.float32)  # the vocabulary matrix was trained behind this scale
        return drafter, {"backbone": backbone}, {}

    train(settings, prepare)


if __name__ == "__main__":
    config.run(main, DrafterStage, __doc__)
