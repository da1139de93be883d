"""Training of drafters: the protocol of a stage, and `train`, which runs one.

A stage is a frozen dataclass of settings, a subclass of `DraftingStage`, with one line in `registry.STAGES`. Data, mesh,
checkpoints, resuming, evaluation by real tree decoding, export and ahead-of-time compilation then work with it.

Example:
  >>> @dataclass(frozen=True, kw_only=True)
  ... class MyStage(DraftingStage):
  ...     width: int = 64
  ...     trains = ("table",)  # names at the top of the tree that the specs of this kind of drafter return
  ...     ...  # the other abstract methods of DraftingStage
  >>> drafting.train(run_config.load(MyStage, "my.toml"))
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

import jax
import jax.numpy as jnp

from train.data import answers, packing
from train.data.documents import DataConfig
from train.data.packing import Corpus
from train.data.records import Source
from train.evaluate import EvaluateConfig, assemble, make_tau_measure
from train.runtime import folders, hosts, loop, run_config, watch
from train.runtime.training_state import SumsFunction, TrainTask, place
from train.stages.teacher import record
from treeflash_jax.core import devices, parameters, sharding
from treeflash_jax.core.checks import expect
from treeflash_jax.core.settings import setting
from treeflash_jax.decoding.state import Weights
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.pairs import HUB_IDS, locate
from treeflash_jax.formats import models
from treeflash_jax.formats.architectures import ARCHITECTURES
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.models import verifier
from treeflash_jax.models.config import ModelConfig

Config = TypeVar("Config")


@dataclass(frozen=True, kw_only=True)
class DraftingStage(ABC):
    """Settings that all stages of drafters share, and the protocol of a stage.

    "By name" means by the names at the top of the tree of weights that `DrafterConfig.specs` returns.
    """

    run: str = setting(help="folder of checkpoints, log and result, local or gs://")
    verifier: str = setting("tiny", "name of a pair, folder, GGUF file or Hub id")
    sources: tuple[Source, ...] = setting(help="responses of that verifier (`train.respond`), or chats")
    data: DataConfig = setting(DataConfig(), "responses of that verifier (`train.respond`), or chats")
    init_scale: float = setting(0.02, "standard deviation of fresh weights", above=0)
    compute_dtype: Literal["float32", "bfloat16"] = setting("bfloat16", "dtype of activations and frozen weights")
    attention: Literal["auto", "chunked", "splash", "cudnn"] = setting(
        "auto",
        '"auto": splash attention on TPUs, cuDNN on NVIDIA GPUs, if they support the sequence length and dtype; else '
        '"chunked", a few queries at a time',
    )
    evaluate: EvaluateConfig = EvaluateConfig()
    optimizer: run_config.OptimizerConfig
    loop: run_config.LoopConfig
    mesh: run_config.MeshConfig = run_config.MeshConfig()

    @property
    @abstractmethod
    def trains(self) -> tuple[str, ...]:
        """Names of the trained weights; the others are frozen. Names unknown to this drafter are ignored."""

    @abstractmethod
    def drafter_config(self, model: ModelConfig) -> Any:
        """Returns the config of the drafter for this verifier. Raises ValueError if they do not fit."""

    def stored(self, drafter: Any) -> dict[str, Any]:
        """Reads weights that exist before training, by name; at least all frozen ones. Called once per command."""
        return {}

    @abstractmethod
    def fresh(self, drafter: Any, weights: Any, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Returns initial trained weights by name, from the verifier's weights and the result of `stored`."""

    @abstractmethod
    def make_sums(self, verifier: ModelConfig, drafter: Any) -> SumsFunction:
        """Returns the objective, `sums(params, frozen, batch, keys_b)`: weighted sums of the loss and of metrics.

        Its arguments are the trained weights by name, of any float dtype; "verifier" and the frozen weights by name, in
        the compute dtype; packed sequences; and one random key per sequence, so that draws do not depend on the
        distribution of sequences over devices. It returns (sum, weight) of "loss", which is minimised, and of metrics.
        """

    @abstractmethod
    def flops(self, verifier: ModelConfig, drafter: Any) -> float:
        """Returns the floating-point operations of a step, without recomputation; for MFU."""

    @abstractmethod
    def describe(self, drafter: Any) -> tuple[str, dict[str, Any]]:
        """Returns the kind of drafter, and its sizes by name, for the model card."""

    def add_files(self, folder: Path) -> None:
        """Adds files that depend on the training data to the drafter's folder."""
        return

    # Decoding that evaluations measure, metric -> options of `generate`; metrics that training does not change, which are
    # measured once; and settings that determine the size of a step, for reports of compiled steps.
    systems: ClassVar[Mapping[str, Mapping[str, Any]]] = setting({"tau": {}}, "")
    constant: ClassVar[tuple[str, ...]] = setting((), "")
    sizes: ClassVar[Mapping[str, int]] = setting({}, "")

    @property
    def held_out(self) -> Self:
        """Settings whose sums are measured on held-out sequences; other than these if training estimates its sums."""
        return self

    @property
    def noun(self) -> str:
        """Name of the trained weights, for messages."""
        return " and ".join(self.trains)

    def shaped_config(self, model: ModelConfig) -> Any:
        """Returns a drafter config like `drafter_config`, for a verifier known only by its sizes: reads no folder."""
        return self.drafter_config(model)

    def resolved(self) -> Self:
        """Returns these settings with `data.thinking` set if all sources agree on it."""
        sources = [source for source in self.sources if source.format != "text"]
        stated = {answers.read_thinking(source.path) if source.format == "responses" else False for source in sources}
        if self.data.thinking is not None or len(stated) != 1:
            return self
        return replace(self, data=replace(self.data, thinking=stated.pop()))

    def recorded_config(self, model: ModelConfig) -> Any:
        """Returns `drafter_config` with the facts about its training data that its files record."""
        drafter = self.drafter_config(model)
        known = {"verifier": (HUB_IDS.get(self.verifier, self.verifier), ARCHITECTURES[model.model_type].class_name)}
        known |= {} if self.data.thinking is None else {"thinking": self.data.thinking}
        return replace(drafter, **{name: value for name, value in known.items() if hasattr(drafter, name)})

    def check(self, drafter: Any, model: ModelConfig) -> None:
        """Raises ValueError if `corpus` cannot train this drafter."""
        return

    @cached_property
    def verifier_folder(self) -> Path:
        """Folder or file of the verifier."""
        return locate(self.verifier, "verifier")

    @cached_property
    def verifier_config(self) -> ModelConfig:
        return models.read_verifier_config(self.verifier_folder)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The verifier's tokenizer; None if its folder has none."""
        return Tokenizer.load(self.verifier_folder, {"enable_thinking": bool(self.data.thinking)})

    @cached_property
    def corpus(self) -> Corpus:
        """Training documents, read, tokenised and packed once per run."""
        return packing.load_corpus(self.sources, self.data, self.tokenizer, self.loop.seed, self.verifier_config.vocab_size)


def read_drafter(name: str, kind: type[Config], noun: str) -> Config:
    """Reads the config of an existing drafter. Raises ValueError if it is not of this kind."""
    config = models.read_drafter_config(locate(name, "drafter"))
    if not isinstance(config, kind):
        raise ValueError(f"{name}: got a drafter of kind {config.kind!r}, expected a {noun}")
    return config


def load_drafter(name: str) -> dict[str, Any]:
    """Loads the weights of an existing drafter in float32."""
    return models.load_drafter(locate(name, "drafter"), dtype=jnp.float32)[1]


def copy_weights(tree: Any) -> Any:
    """Copies weights of the verifier in float32."""
    return jax.tree.map(lambda x: jnp.asarray(sharding.to_host(x), jnp.float32), tree)


def make_task(settings: DraftingStage, model: ModelConfig, drafter: Any, mesh: Any = None) -> TrainTask:
    """Divides a drafter's weights into trained and frozen ones by `settings.trains`, and chooses the attention."""
    settings = replace(settings, attention=devices.describe_mesh(mesh).training_attention(settings.attention))
    specs = drafter.specs()
    others = {name: tree for name, tree in specs.items() if name not in settings.trains and tree}
    return TrainTask(
        specs={name: specs[name] for name in settings.trains if name in specs},
        frozen_specs={"verifier": verifier.specs(model)} | others,
        sums=settings.make_sums(model, drafter),
        held_out_sums=settings.held_out.make_sums(model, drafter),
        compute_dtype=jnp.dtype(settings.compute_dtype),
        flops=settings.flops(model, drafter),
    )


def train(settings: DraftingStage, *, on_timed: Callable[[int, float], None] | None = None) -> None:
    """Loads verifier and data, trains, and writes RUN/model; `on_timed` as in `loop.fit`."""
    began = time.perf_counter()
    hosts.connect(notes_sigterm=True)
    settings, mesh = settings.resolved(), hosts.make_mesh(settings.mesh)
    hosts.introduce(mesh, f"run={settings.run}")
    hosts.check_batch(settings.loop.batch, settings.loop.accumulate, mesh)
    model, folder, length = settings.verifier_config, settings.verifier_folder, settings.data.sequence_length
    expect(length <= model.max_positions, "data.sequence_length", length, f"at most {model.max_positions} (verifier)")
    corpus = settings.corpus
    _, weights = models.load_verifier(folder, dtype=jnp.dtype(settings.compute_dtype), mesh=mesh)
    drafter = settings.recorded_config(model)
    settings.check(drafter, model)
    task = make_task(settings, model, drafter, mesh)
    if settings.data.record:
        attention = devices.describe_mesh(mesh).training_attention(settings.attention)
        recorded = dict(model=model, taps=drafter.taps, batch_size=settings.loop.batch, attention=attention, mesh=mesh)
        corpus = record(corpus, settings.data.record, weights=weights, **recorded)
    stored = settings.stored(drafter)
    params = place(settings.fresh(drafter, weights, stored), task.specs, mesh, jnp.float32)
    frozen = {"verifier": weights} | {
        name: place(stored[name], specs, mesh, task.compute_dtype)
        for name, specs in task.frozen_specs.items()
        if name != "verifier"
    }
    del stored
    size = f"{parameters.count(params):,} weights, {corpus.num_sequences} sequences of {length} tokens"
    hosts.say(f"{corpus.summary()}\n{settings.noun} of {size}")
    pair = TreeFlash(model, Weights(weights), drafter=drafter, stop_ids=models.stop_ids(folder, model), mesh=mesh)
    measure = make_tau_measure(settings, task, pair, corpus, frozen)
    named = dict(params=params, frozen=frozen, corpus=corpus, evaluate=measure, began=began, on_timed=on_timed)
    params = loop.fit(task, config=settings, mesh=mesh, **named)
    whole = sharding.to_host(assemble(drafter, params | frozen))
    if hosts.is_first():
        target = folders.absolute(settings.run) / "model"
        with folders.filled(target, overwrite=True) as folder:
            models.save_drafter(folder, drafter, whole)
            settings.add_files(folder)
        watch.table(f"Trained {settings.noun}", watch.summary(settings.run) | {"model": str(target)})
    hosts.wait("model")
