"""The door to training drafters: what a stage of any kind of drafter says of itself, and what they all do with it.

A stage is a frozen dataclass of settings, a subclass of `DraftingStage`, with one line in `stages.STAGES`. Data, mesh,
checkpoints, resuming, evaluation by real tree decoding, export and ahead-of-time compilation then work with it.

Example:
  >>> @dataclass(frozen=True, kw_only=True)
  ... class MyStage(DraftingStage):
  ...     width: int = 64
  ...     trains = ("table",)  # names at the top of the tree that the specs of this kind of drafter return
  ...     ...  # the methods that DraftingStage lists
  >>> drafting.train(config.load(MyStage, "my.toml"))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from etils import epath

from train import config, data, folders, hosts, loop, progress, watch
from train.data import Corpus, Rows
from train.documents import DataConfig
from train.evaluate import EvaluateConfig, TreeTau
from train.records import Source
from train.state import Stage, Sums, SumsOf, place
from treeflash_jax import drafters
from treeflash_jax import mesh as meshes
from treeflash_jax import params as parameters
from treeflash_jax.checks import bounded
from treeflash_jax.formats import models
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.pairs import locate
from treeflash_jax.verifiers import forward as verifier
from treeflash_jax.verifiers.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class DraftingStage(ABC):
    """Settings that all stages of drafters share, and what each kind of stage answers.

    Attributes:
      run: folder of checkpoints, log and result, local or gs://.
      verifier: the name of a pair, a folder, a GGUF file or a Hub id.
      sources, data: responses of that verifier (`train.respond`), or chats.
      init_scale: standard deviation of fresh weights.
      compute_dtype: dtype of activations and frozen weights.
    """

    run: str
    verifier: str = "tiny"
    sources: tuple[Source, ...]
    data: DataConfig = DataConfig()
    init_scale: float = bounded(0.02, above=0)
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    evaluate: EvaluateConfig = EvaluateConfig()
    optimizer: config.OptimizerConfig
    loop: config.LoopConfig
    mesh: config.MeshConfig = config.MeshConfig()

    @property
    @abstractmethod
    def trains(self) -> tuple[str, ...]:
        """Names at the top of the drafter's weights (`drafters.Drafter.specs`) that are trained; the others are frozen.

        Names that a drafter of these settings does not have are left out.
        """

    @property
    def noun(self) -> str:
        """What is trained, for people."""
        return " and ".join(self.trains)

    @property
    def systems(self) -> Mapping[str, Mapping[str, Any]]:
        """What evaluations decode with: name of the metric -> options of `generate`."""
        return {"tau": {}}

    @property
    def constant(self) -> tuple[str, ...]:
        """Which of `systems` this training does not change: they are measured once."""
        return ()

    @abstractmethod
    def drafter_config(self, model: ModelConfig) -> Any:
        """The config of the drafter, for this verifier.

        Raises:
          ValueError: sizes that do not fit, or a folder that cannot be read.
        """

    def shaped_config(self, model: ModelConfig) -> Any:
        """As `drafter_config`, where the verifier is a shape alone and no folder is there to be read."""
        return self.drafter_config(model)

    @abstractmethod
    def fresh(self, drafter: Any, weights: Any) -> dict[str, Any]:
        """Initial weights of what is trained, by name, on the host or the default device."""

    def kept(self, drafter: Any) -> dict[str, Any]:
        """Weights of what is frozen, by name."""
        return {}

    @abstractmethod
    def sums(self, params: Any, frozen: Any, rows: Rows, keys_b: jax.Array, *, verifier: ModelConfig, drafter: Any) -> Sums:
        """Weighted sums of the loss ("loss", which is minimised) and of metrics for monitoring.

        Args:
          params: what is trained, by name, of any float dtype.
          frozen: "verifier" and the frozen parts of the drafter, by name, in the compute dtype.
          keys_b: one random key per row, so that draws do not depend on how rows are spread over devices.
        """

    @property
    def held_out(self) -> DraftingStage:
        """The settings whose sums are taken of held-out rows: those of training, unless they estimate something."""
        return self

    @abstractmethod
    def flops(self, verifier: ModelConfig, drafter: Any) -> float:
        """Floating-point operations that a step needs, nothing recomputed counted twice; for MFU."""

    @property
    def sizes(self) -> dict[str, int]:
        """Settings of its own that decide how large a step is, for reports of compiled steps."""
        return {}

    def check(self, drafter: Any, model: ModelConfig, corpus: Corpus, tokenizer: Tokenizer | None) -> None:
        """Raises ValueError where these data cannot train this drafter. Data of any kind can, unless a stage says more."""
        return

    @abstractmethod
    def described(self, drafter: Any) -> tuple[str, dict[str, Any]]:
        """For the model card: what kind of drafter it is, and its sizes by name."""

    @classmethod
    @abstractmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        """Whether settings as read from TOML are of this stage."""


def make_stage(settings: DraftingStage, model: ModelConfig, drafter: Any) -> Stage:
    """What `settings.trains` names of a drafter is trained; what else a step needs is frozen."""

    def sums_of(settings: DraftingStage) -> SumsOf:
        return partial(settings.sums, verifier=model, drafter=drafter)

    specs = drafters.of(drafter).specs(drafter)
    others = {name: tree for name, tree in specs.items() if name not in settings.trains and tree}
    return Stage(
        specs={name: specs[name] for name in settings.trains if name in specs},
        frozen_specs={"verifier": verifier.specs(model)} | others,
        sums=sums_of(settings),
        held_out_sums=sums_of(settings.held_out),
        compute_dtype=jnp.dtype(settings.compute_dtype),
        flops=settings.flops(model, drafter),
    )


def train(settings: DraftingStage) -> None:
    """What every stage does: opens verifier and data, trains, writes RUN/model.

    Raises:
      ValueError: sources, sizes or a drafter that cannot be trained.
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
    drafter = settings.drafter_config(model)
    settings.check(drafter, model, corpus, tokenizer)
    stage = make_stage(settings, model, drafter)
    params = place(settings.fresh(drafter, weights), stage.specs, mesh, jnp.float32)
    frozen = {"verifier": weights} | {
        name: place(tree, stage.frozen_specs[name], mesh, stage.compute_dtype)
        for name, tree in settings.kept(drafter).items()
    }
    hosts.say(corpus.summary())
    hosts.say(
        f"{settings.noun} of {parameters.count(params):,} weights, {corpus.num_rows} rows of "
        f"{settings.data.row_tokens} tokens, mesh {dict(mesh.shape)}"
    )
    stops = models.stop_ids(folder, model)
    measure = TreeTau(
        settings.evaluate, settings.systems, settings.constant, stage, model, drafter, corpus, frozen, mesh, stops
    )
    params = loop.fit(stage, config=settings, mesh=mesh, params=params, frozen=frozen, corpus=corpus, evaluate=measure)
    whole = meshes.to_host(assembled(drafter, params | frozen))
    if hosts.is_first():
        target = epath.Path(settings.run) / "model"
        with folders.filled(target, overwrite=True) as folder:
            models.save_drafter(folder, drafter, whole)
        progress.table(f"Trained {settings.noun}", watch.summary(settings.run) | {"model": str(target)})


def assembled(drafter: Any, parts: Mapping[str, Any]) -> dict[str, Any]:
    """The whole tree of a drafter's weights from its parts, by name; parts without weights may be missing."""
    return {name: parts.get(name, {}) for name in drafters.of(drafter).specs(drafter)}
