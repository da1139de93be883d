"""Training of drafters: the protocol of a stage, and `train`, which runs a stage.

A stage is a frozen dataclass of settings, a subclass of `DraftingStage`, with one line in `registry.STAGES`. Data, mesh,
checkpoints, resuming, evaluation by real tree decoding, export and ahead-of-time compilation then work with it.

Example:
  >>> @dataclass(frozen=True, kw_only=True)
  ... class MyStage(DraftingStage):
  ...     stage: Literal["mine"] = "mine"  # its name in registry.STAGES, which a run stores
  ...     width: int = 64
  ...     trains = ("table",)  # names at the top of the tree that the specs of this kind of drafter return
  ...     ...  # the other abstract methods of DraftingStage
  >>> drafting.train(run_config.load(MyStage, "my.toml"))
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from train.data import answers, packing
from train.data.documents import DataConfig
from train.data.packing import Corpus
from train.data.records import Source
from train.runtime import frozen_inputs, hosts, loop, picture, run_config, watch
from train.runtime.checkpoint import check_inputs
from train.runtime.flops import step_flops
from train.runtime.frozen_inputs import FrozenInputs
from train.runtime.training_state import SumsFunction, TrainTask, abstract_batch, place_weights
from train.stages import choices
from train.stages.evaluation import EvaluateConfig, assemble, make_tau_measure
from train.stages.teacher import record
from treeflash_jax.core import files, parameters, sharding
from treeflash_jax.core.checks import expect
from treeflash_jax.core.dtypes import dtype_setting
from treeflash_jax.core.parameters import Params
from treeflash_jax.core.settings import setting
from treeflash_jax.decoding.state import Weights
from treeflash_jax.drafters.protocol import Drafter
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.settings.pairs import HUB_IDS, locate
from treeflash_jax.formats import draft_vocabulary, model_files
from treeflash_jax.formats.architectures import ARCHITECTURES
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.models import decoder, quantized
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.quantized import NO_SCHEME, SCHEMES

DERIVED = "derived.json"  # file in a run's folder


@dataclass(frozen=True, kw_only=True)
class DraftingStage(ABC):
    """Settings that all stages of drafters share, and the protocol of a stage.

    "By name" means by the names at the top level of the tree that `Drafter.specs` returns.

    Attributes:
      starts_from: name of a pair, folder or Hub id of a drafter to train further; "" for a new one.
      lists_tokens: whether frequent tokens are listed beside the new drafter.
      records_training: whether the drafter's files record the verifier and `data.thinking`.
      systems: options of `generate` for each metric that evaluations measure.
    """

    starts_from: ClassVar[str] = ""
    lists_tokens: ClassVar[bool] = False
    records_training: ClassVar[bool] = False
    systems: ClassVar[Mapping[str, Mapping[str, Any]]] = {"tau": {}}

    stage: str
    run: str = setting(help="folder of checkpoints, log and result, local or gs://")
    verifier: str = setting("tiny", "name of a pair, folder, GGUF file or Hub id")
    sources: tuple[Source, ...] = setting(help="responses of that verifier (`train.respond`), or chats")
    data: DataConfig = DataConfig()
    init_scale: float = setting(0.02, "standard deviation of fresh weights", above=0)
    compute_dtype: str = dtype_setting("bfloat16", "dtype of activations and frozen weights", "float32", "bfloat16")
    quantize: str = setting(
        NO_SCHEME,
        "scheme of the frozen verifier's matrices, except vocabulary tables: keeps them as quantised files have them, or "
        "rounds them, as the setting of `load` does; none expands them",
        choices=lambda: (*SCHEMES, NO_SCHEME),
    )
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
    def scheme(self) -> str | None:
        """Scheme of the setting `quantize`; None if the verifier's weights are arrays."""
        return None if self.quantize == NO_SCHEME else self.quantize

    @property
    @abstractmethod
    def trains(self) -> tuple[str, ...]:
        """Names of the trained weights. All others are frozen. Names that this drafter does not have are ignored."""

    @abstractmethod
    def drafter_config(self, verifier: ModelConfig, start: Any) -> Any:
        """Returns the drafter for this verifier. Raises ValueError if they do not fit.

        `start` is the drafter that `starts_from` names, or None.
        """

    def derived(self, drafter: Any, counts_v: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the frozen weights, by name, that depend on the number of occurrences of each token in the answers."""
        return {}

    @abstractmethod
    def fresh(self, drafter: Any, weights: Params, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Returns initial trained weights by name.

        Args:
          weights: weights of the verifier.
          stored: weights of the drafter that `starts_from` names, and weights of `derived`.
        """

    @abstractmethod
    def make_sums(self, verifier: ModelConfig, drafter: Any) -> SumsFunction:
        """Returns the objective, `sums(params, frozen, batch, keys_b)`: weighted sums of the loss and of metrics.

        `params` are the trained weights by name, of any float dtype. `frozen` are "verifier" and the frozen weights by
        name, in the compute dtype. `batch` are packed sequences. `keys_b` has one random key per sequence, so that draws do
        not depend on the distribution of sequences over devices. The result is (sum, weight) of "loss", which is minimised,
        and of metrics.
        """

    def make_held_out_sums(self, verifier: ModelConfig, drafter: Any) -> SumsFunction:
        """Returns the objective for held-out sequences. It differs from `make_sums` if training only estimates its sums."""
        return self.make_sums(verifier, drafter)

    def check_corpus(self, drafter: Any, verifier: ModelConfig, corpus: Corpus, tokenizer: Tokenizer | None) -> None:
        """Raises ValueError if this corpus cannot train this drafter."""
        return


def with_thinking(settings: DraftingStage) -> DraftingStage:
    """Returns settings in which `data.thinking` is set if all sources have the same value."""
    sources = [source for source in settings.sources if source.format != "text"]
    stated = {answers.read_thinking(source.path) if source.format == "responses" else False for source in sources}
    if settings.data.thinking is not None or len(stated) != 1:
        return settings
    return replace(settings, data=replace(settings.data, thinking=stated.pop()))


def read_verifier(settings: DraftingStage) -> tuple[Path, ModelConfig, Tokenizer | None]:
    """Returns the folder or file of the verifier, its config, and its tokenizer if there is one."""
    folder = locate(settings.verifier, "verifier")
    tokenizer = Tokenizer.load(folder, {"enable_thinking": bool(settings.data.thinking)})
    return folder, model_files.read_verifier_config(folder), tokenizer


def read_drafter_config(settings: DraftingStage, verifier: ModelConfig) -> Drafter:
    """Returns the drafter, with the facts about its training that will be recorded in its files."""
    start = model_files.read_drafter_config(locate(settings.starts_from, "drafter")) if settings.starts_from else None
    drafter = settings.drafter_config(verifier, start)
    if not settings.records_training:
        return drafter
    name = HUB_IDS.get(settings.verifier, settings.verifier)
    class_name = ARCHITECTURES[verifier.model_type].class_name
    thinking = drafter.thinking if settings.data.thinking is None else settings.data.thinking
    return replace(drafter, verifier=(name, class_name), thinking=thinking)


def read_stored(settings: DraftingStage, drafter: Drafter, counts_v: np.ndarray | None = None) -> dict[str, Any]:
    """Returns the weights of the drafter that the stage starts from, and the weights of `read_derived`."""
    stored: dict[str, Any] = {}
    if settings.starts_from:
        stored = model_files.load_drafter(locate(settings.starts_from, "drafter"), dtype=jnp.float32)[1]
    return stored | {name: np.array(values) for name, values in read_derived(settings, drafter, counts_v).items()}


def read_derived(settings: DraftingStage, drafter: Drafter, counts_v: np.ndarray | None = None) -> dict[str, list]:
    """Returns the weights derived from the answers when the run began. They are stored in RUN/derived.json.

    Args:
      counts_v: number of occurrences of each token in the answers; None if the run exists.
    """
    path = files.absolute(settings.run) / DERIVED
    if path.exists():
        return json.loads(path.read_text())
    if counts_v is None:
        return {}
    derived = {name: array.tolist() for name, array in settings.derived(drafter, counts_v).items()}
    if derived and hosts.is_first():
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, json.dumps(derived))
    return derived


def read_inputs(settings: DraftingStage, drafter: Drafter, counts_v: np.ndarray | None = None) -> FrozenInputs:
    """Returns the frozen inputs of a run: the verifier, the drafter that it starts from, and the weights of `read_derived`.

    If all weights of that drafter are trained further, checkpoints hold them, and only the drafter's config is an input.
    """
    inputs = {"verifier": frozen_inputs.note(settings.verifier, locate(settings.verifier, "verifier"))}
    if settings.starts_from not in ("", settings.verifier):
        is_frozen = any(name not in settings.trains for name, tree in drafter.specs().items() if tree)
        folder = locate(settings.starts_from, "drafter")
        inputs["drafter"] = frozen_inputs.note(settings.starts_from, folder, weights=is_frozen)
    derived = read_derived(settings, drafter, counts_v)
    if derived:
        digest = hashlib.sha256(json.dumps(derived).encode()).hexdigest()
        inputs["draft vocabulary"] = {"path": f"{settings.run}/{DERIVED}", "digest": digest}
    return inputs


def check_kind(name: str, drafter: Drafter, kind: type, noun: str) -> None:
    """Raises ValueError if an existing drafter is not of this kind."""
    if not isinstance(drafter, kind):
        raise ValueError(f"{name}: got a drafter of kind {drafter.kind!r}, expected a {noun}")


def copy_weights(tree: Any) -> Any:
    """Copies weights of the verifier, as float32."""
    return jax.tree.map(lambda x: jnp.asarray(sharding.to_host(x), jnp.float32), tree)


def make_task(
    settings: DraftingStage,
    verifier: ModelConfig,
    drafter: Drafter,
    mesh: Mesh | None = None,
    weights: Params | None = None,
) -> TrainTask:
    """Divides a drafter's weights into trained and frozen weights by `settings.trains`, and chooses the attention.

    Args:
      weights: weights of the verifier, with the layout of its quantised files; None: the layout that `quantize` makes.
    """
    settings = replace(settings, attention=choices.attention(sharding.device(mesh), settings.attention))
    trained = {name: tree for name, tree in drafter.specs().items() if name in settings.trains}
    frozen = {name: tree for name, tree in drafter.specs().items() if name not in settings.trains and tree}
    if weights is None:
        frozen["verifier"] = decoder.specs(verifier, settings.scheme, mesh=mesh, wide_tables=True)
    else:
        frozen["verifier"] = quantized.specs_like(decoder.specs(verifier), weights)
    batch = abstract_batch(settings.loop.batch, settings.data.sequence_length)
    counted = replace(verifier, num_experts=verifier.experts_per_token)  # though accelerators compute all experts
    counted_sums = replace(settings, attention="chunked").make_sums(counted, drafter)
    return TrainTask(
        specs=trained,
        frozen_specs=frozen,
        sums=settings.make_sums(verifier, drafter),
        held_out_sums=settings.make_held_out_sums(verifier, drafter),
        compute_dtype=jnp.dtype(settings.compute_dtype),
        flops=step_flops(counted_sums, trained, frozen | {"verifier": decoder.specs(counted)}, batch),
    )


def train(settings: DraftingStage, *, on_timed: Callable[[int, float], None] | None = None) -> None:
    """Loads verifier and data, trains, and writes RUN/model. `loop.fit` describes `on_timed`."""
    hosts.connect()
    settings = with_thinking(settings)
    mesh = hosts.make_mesh(settings.mesh)
    hosts.introduce(mesh, f"run={settings.run}")
    hosts.check_batch(settings.loop.batch, settings.loop.accumulate, mesh)
    folder, verifier, tokenizer = read_verifier(settings)
    length = settings.data.sequence_length
    expect(length <= verifier.max_positions, "data.sequence_length", length, f"at most {verifier.max_positions} (verifier)")
    corpus = packing.load_corpus(settings.sources, settings.data, tokenizer, settings.loop.seed, verifier.vocab_size)
    drafter = read_drafter_config(settings, verifier)
    settings.check_corpus(drafter, verifier, corpus, tokenizer)
    model_files.writable(drafter.dialect, drafter)
    counts_v = corpus.answer_counts(verifier.vocab_size)
    inputs = read_inputs(settings, drafter, counts_v)
    check_inputs(settings.run, settings.loop, inputs)  # before weights are read and outputs are recorded
    dtype = jnp.dtype(settings.compute_dtype)
    _, weights = model_files.load_verifier(folder, dtype=dtype, mesh=mesh, quantize=settings.scheme, wide_tables=True)
    task = make_task(settings, verifier, drafter, mesh, weights)
    if settings.data.record:
        attention = choices.attention(sharding.device(mesh), settings.attention)
        corpus = record(
            corpus,
            settings.data.record,
            digest=inputs["verifier"]["digest"],
            weights=weights,
            verifier=verifier,
            taps=drafter.taps,
            batch_size=settings.loop.batch,
            attention=attention,
            mesh=mesh,
        )
    stored = read_stored(settings, drafter, counts_v)
    scales = {"norm": weights["norm"] + 1} if verifier.offset_norms else {}  # norms of drafters store their whole scale
    params = place_weights(settings.fresh(drafter, weights | scales, stored), task.specs, mesh, jnp.float32)
    frozen = {"verifier": weights} | {
        name: place_weights(stored[name], specs, mesh, task.compute_dtype)
        for name, specs in task.frozen_specs.items()
        if name != "verifier"
    }
    del stored
    hosts.say(corpus.summary())
    hosts.say(f"{parameters.count(params):,} weights to train, {corpus.num_sequences} sequences of {length} tokens")
    stop_ids = model_files.stop_ids(folder, verifier)
    pair = TreeFlash(verifier, Weights(weights), drafter=drafter, stop_ids=stop_ids, mesh=mesh)
    measure = make_tau_measure(settings, task, pair, corpus, frozen)
    params = loop.fit(
        task,
        settings=settings,
        mesh=mesh,
        params=params,
        frozen=frozen,
        corpus=corpus,
        inputs=inputs,
        evaluate=measure,
        on_timed=on_timed,
    )
    write_model(settings, drafter, sharding.to_host(assemble(drafter, params | frozen)), counts_v)


def write_model(settings: DraftingStage, drafter: Drafter, weights: Params, counts_v: np.ndarray) -> None:
    """Writes RUN/model, and a picture of the run. The first host writes; the others wait.

    Args:
      weights: all weights of the drafter, on the host.
      counts_v: number of occurrences of each token in the answers.
    """
    if hosts.is_first():
        target = files.absolute(settings.run) / "model"
        with files.filled(target, overwrite=True) as folder:
            model_files.save_drafter(folder, drafter, weights)
            if settings.lists_tokens:
                draft_vocabulary.write(folder, counts_v)
        files.write(target.parent / picture.NAME, picture.draw(watch.read_log(settings.run)))
        hosts.say(f"{drafter.kind} drafter in {target}: {watch.summary(settings.run)}; loss and tau in {picture.NAME}")
    hosts.wait("model")
