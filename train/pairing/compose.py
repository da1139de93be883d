"""Settings of the stages of `train.pair`: composed by rule, then replaced by those that were given."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from train.data import packing
from train.data.documents import DataConfig
from train.data.packing import Corpus
from train.data.records import Source, read
from train.drafter import DrafterStage
from train.evaluate import EvaluateConfig
from train.export import ExportStage
from train.head import HeadStage
from train.measure import MeasureStage
from train.pairing import choices
from train.pairing.choices import Choice
from train.respond import RespondConfig, question
from train.runtime import folders, run_config
from train.runtime.run_config import LoopConfig, MeshConfig, OptimizerConfig
from train.stages.objective import ObjectiveConfig
from treeflash_jax.core import devices
from treeflash_jax.core.settings import setting
from treeflash_jax.engine.defaults import choose_dtype
from treeflash_jax.engine.pairs import locate
from treeflash_jax.formats import model_files
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.trees.shape import MAX_NODES

PASSES, USUAL_STEPS = 6, 200  # the published backbones took six passes
LEAST_STEPS = 50
LEARNING_RATES = {"drafter": 6e-3, "head": 1e-3}  # of Muon; the head has been trained with its backbone before
SAMPLED_VOCABULARY = 4  # tokens of a sampled vocabulary per token of a sequence, on CPUs
MEASURED_LENGTHS = 512  # prompts whose length decides what is too long
LOGITS_BYTES = 512 * 2**20  # of the drafter's logits in memory at a time
LEAST_PROMPTS = 8
EVALUATIONS = 4  # of a training stage
MEASURE_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class PairConfig:
    """Settings of `train.pair`. Those that are 0, none or empty are chosen by rule."""

    verifier: str = setting(help='name of a pair ("smollm2"), folder, GGUF file or Hub id')
    prompts: str = setting(help="JSONL file of prompts or chats, a folder of them, a glob or a Hub data set")
    out: str = setting(help="folder of all settings and results; the drafter is written to OUT/model")
    num_prompts: int = setting(0, "largest number of prompts used; 0 uses all", least=0)
    block_size: int | None = setting(None, "tokens of a block, anchor included", unset="by rule", least=2, most=MAX_NODES)
    num_layers: int | None = setting(None, "layers of the drafter's backbone", unset="by rule", least=1)
    mask_token_id: int | None = setting(None, "token in the slots of a block to be predicted", unset="by rule", least=0)
    target_layer_ids: tuple[int, ...] = setting((), "verifier layers whose outputs the drafter reads", least=0)
    steps: int = setting(
        0, "training steps of backbone and head together; the head is then trained alone for half as many", least=0
    )
    passes: float = setting(
        0.0, "passes over the answers, in place of `steps`. Without either: 6 passes, and at least 200 steps", least=0
    )
    anyway: bool = setting(False, "trains for fewer than 50 steps, too")
    seed: int = setting(0, "random seed of all stages", least=0)
    mesh: MeshConfig = MeshConfig()
    respond: dict[str, Any] = setting(help="settings of `train.respond` in place of those by rule", default_factory=dict)
    drafter: dict[str, Any] = setting(help="settings of `train.drafter` in place of those by rule", default_factory=dict)
    head: dict[str, Any] = setting(help="settings of `train.head` in place of those by rule", default_factory=dict)
    export: dict[str, Any] = setting(help="settings of `train.export` in place of those by rule", default_factory=dict)
    measure: dict[str, Any] = setting(help="settings of `train.measure` in place of those by rule", default_factory=dict)

    def __post_init__(self) -> None:
        if self.steps and self.passes:
            raise ValueError(f"got steps {self.steps} and passes {self.passes:g}, expected one of them")

    def path(self, name: str) -> Path:
        return folders.local(self.out) / name


class Composed(NamedTuple):
    """Settings of a stage, and a line for every choice: the setting's name, its value, and the reason for it."""

    stage: Any
    lines: list[str]


@dataclass(frozen=True)
class Composer:
    """Composes the settings of every stage from those of the command, and config and tokenizer of the verifier."""

    settings: PairConfig

    @cached_property
    def model(self) -> ModelConfig:
        return model_files.read_verifier_config(locate(self.settings.verifier, "verifier"))

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return Tokenizer.load(locate(self.settings.verifier, "verifier"))

    def check(self) -> None:
        """Composes all stages without answers, so that a misspelt setting is refused at once."""
        responded, nothing = self.respond().stage, Corpus({}, {}, {}, {})
        trained = self.training(responded, nothing).stage
        choices.check_taps(trained.drafter_config(self.model, None), self.model)
        if self.settings.steps:
            check_steps(trained.loop, self.settings)
        self.training(responded, nothing, on=trained)
        self.export()
        self.measure()

    def respond(self) -> Composed:
        settings, context, limit = self.settings, self.model.max_positions, self.settings.num_prompts
        skipped = Counter() if settings.respond.get("malformed") == "skip" else None
        count = sum(1 for _ in read(Source(path=settings.prompts, limit=limit, hold_out=0), settings.seed, skipped))
        if count < LEAST_PROMPTS:
            raise ValueError(f"{settings.prompts}: got {count} prompts, expected at least {LEAST_PROMPTS}")
        sample = Source(path=settings.prompts, limit=min(count, MEASURED_LENGTHS), hold_out=0)
        lengths = {record.number: self._length(record.content) for record in read(sample, settings.seed, skipped)}
        typical = np.percentile([*lengths.values()], 95)
        longest = min(context // 2, math.ceil(typical / 32) * 32)
        on_cpu = devices.here().is_cpu
        hold_out = _hold_out(count, [number for number, length in lengths.items() if length <= longest])
        made = RespondConfig(
            verifier=settings.verifier,
            sources=(Source(path=settings.prompts, limit=limit, hold_out=hold_out),),
            out=str(settings.path("responses.jsonl")),
            temperatures=(0.0, 0.7, 0.0, 1.0),
            max_new_tokens=min(256 if on_cpu else 1024, context - longest),
            max_prompt_tokens=longest,
            batch=max(settings.mesh.data * settings.mesh.fsdp or jax.device_count(), min(64, count)),
            seed=settings.seed,
            mesh=MeshConfig(data=settings.mesh.data * settings.mesh.fsdp, model=settings.mesh.model),
        )
        reasons = {
            "sources.0.limit": "as given" if limit else "all prompts",
            "sources.0.hold_out": f"one in {hold_out} of {count:,} prompts, for validation and measurement",
            "max_prompt_tokens": f"95 % of the prompts have at most {typical:.0f} tokens; longer ones are left out",
            "max_new_tokens": f"on {'a CPU' if on_cpu else 'an accelerator'}; longer answers are cut",
            "temperatures": "half of the answers greedy, half sampled",
        }
        return _composed(made, settings.respond, reasons)

    def _length(self, content: Any) -> int:
        if self.tokenizer is None:
            raise ValueError("got prompts as text, but the verifier has no tokenizer; expected one in its folder")
        prompt = question(content)
        return len(self.tokenizer.encode_chat(prompt) if isinstance(prompt, list) else self.tokenizer.encode(prompt))

    def read_answers(self, responded: RespondConfig) -> Corpus:
        source, data = Source(path=responded.out, format="responses", hold_out=0), self._data(responded)
        return packing.load_corpus([source], data, self.tokenizer, self.settings.seed, self.model.vocab_size)

    def steps(self, answers: Corpus) -> Choice:
        """Chooses the number of steps of `train.drafter`."""
        if self.settings.steps:
            return Choice(self.settings.steps, "as given")
        passes, least = self.settings.passes or PASSES, 1 if self.settings.passes else USUAL_STEPS
        count, batch = answers.num_sequences, _batch_size(self.settings.mesh)
        reason = f"{passes:g} passes over {count:,} sequences in batches of {batch}"
        return Choice(max(least, math.ceil(passes * count / batch)), reason + ("" if least == 1 else f", at least {least}"))

    def training(self, responded: RespondConfig, answers: Corpus, *, on: DrafterStage | None = None) -> Composed:
        """Composes the settings of `train.drafter`; or, `on` a drafter in OUT/drafter, those of `train.head`."""
        settings, data, mesh = self.settings, self._data(responded), self.settings.mesh
        steps = Choice(math.ceil(on.loop.steps / 2), "half of the drafter's") if on else self.steps(answers)
        if on:
            name, kind, block, keeps = "head", HeadStage, on.block_size, on.head == "mlp"
            why = f"{'continues over the whole vocabulary' if keeps else 'from zero'}, on the frozen backbone"
            folder = Choice(str(settings.path("drafter") / "model"), "the result of train.drafter")
            chosen = {"drafter": folder, "keep_head": Choice(keeps, why)}
        else:
            name, kind = "drafter", DrafterStage
            counts_v = answers.token_counts(self.model.vocab_size)
            chosen = choices.backbone(self.model, self.tokenizer, counts_v, vars(settings))
            block = chosen["block_size"].value
        chosen["compute_dtype"] = Choice(choose_dtype(devices.here()).name, "the default of this device")
        anchors, batch = max(1, data.sequence_length // 8), _batch_size(mesh)
        chunk = min(anchors, 2 ** int(math.log2(max(1, LOGITS_BYTES // (batch * block * self.model.vocab_size * 4)))))
        every, sample = math.ceil(steps.value / EVALUATIONS), SAMPLED_VOCABULARY * data.sequence_length
        is_sampled = not on and devices.here().is_cpu and sample < self.model.vocab_size
        made = kind(
            **{key: choice.value for key, choice in chosen.items()},
            run=str(settings.path(name)),
            verifier=settings.verifier,
            sources=(Source(path=responded.out, format="responses", hold_out=_hold_out(answers.num_documents)),),
            data=data,
            objective=ObjectiveConfig(
                loss="forward-kl",
                decay=4.0 if block <= 8 else 7.0,
                base_weight=0.0 if on else 0.5,
                anchors=anchors // chunk * chunk,
                chunk=chunk,
                vocabulary=sample if is_sampled else 0,
            ),
            evaluate=EvaluateConfig(nodes=(16,), prompts=16),
            optimizer=OptimizerConfig(name="muon", learning_rate=LEARNING_RATES[name], final=0.01),
            loop=LoopConfig(steps=steps.value, batch=batch, seed=settings.seed, save_every=50, evaluate_every=every),
            mesh=mesh,
        )
        reasons = {key: choice.reason for key, choice in chosen.items()} | {
            "objective.vocabulary": "a sample for each sequence" if is_sampled else "0 compares all tokens",
            "loop.steps": steps.reason,
        }
        return _composed(made, getattr(settings, name), reasons)

    def export(self) -> Composed:
        run, out = (str(self.settings.path(name)) for name in ("head", "model"))
        return _composed(ExportStage(run=run, out=out, overwrite=True), self.settings.export, {})

    def measure(self) -> Composed:
        drafter, responded, out = (str(self.settings.path(name)) for name in ("model", "respond.toml", "measured.json"))
        pair = dict(verifier=self.settings.verifier, drafter=drafter, respond=responded)
        made = MeasureStage(**pair, out=out, seconds=MEASURE_SECONDS, seed=self.settings.seed)
        return _composed(made, self.settings.measure, {})

    def _data(self, responded: RespondConfig) -> DataConfig:
        whole = math.ceil((responded.max_prompt_tokens + responded.max_new_tokens) / 64) * 64
        return DataConfig(sequence_length=min(self.model.max_positions, max(256, whole)), thinking=responded.thinking)


def check_steps(loop: LoopConfig, settings: PairConfig) -> None:
    """Raises ValueError for a training so short that its drafter cannot be judged."""
    if loop.steps < LEAST_STEPS and not settings.anyway:
        raise ValueError(
            f"got a plan of {loop.steps} optimiser steps, expected at least {LEAST_STEPS}; give more prompts, passes= or "
            "steps=, or anyway=true"
        )


def _hold_out(count: int, numbers: Sequence[int] | None = None) -> int:
    """Returns n such that every n-th record is held out: of `count`, about 16, from one in 50 to a quarter.

    If possible, holds out some but not all of `numbers`, the usable records.
    """
    usual = min(50, max(4, count // 16))
    if numbers is None:
        return usual
    held_out = {n: sum(Source(path="", hold_out=n).holds_out(number) for number in numbers) for n in range(usual, 1, -1)}
    return next((n for n, held in held_out.items() if 0 < held < len(numbers)), usual)


def _batch_size(mesh: MeshConfig) -> int:
    """Returns the smallest batch of at least 8 sequences that all devices share equally."""
    num_devices = mesh.data * mesh.fsdp or jax.device_count() // mesh.model
    return math.ceil(8 / num_devices) * num_devices


def _composed(by_rule: Any, given: dict[str, Any], reasons: dict[str, str]) -> Composed:
    """Replaces settings by those that were given, and describes each choice."""
    stage = run_config.replaced(by_rule, given)
    lines = []
    for name, reason in reasons.items():
        value, before = _setting(stage, name), _setting(by_rule, name)
        shown = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        lines.append(f"{name} = {shown}: {reason if value == before else 'as given'}")
    return Composed(stage, lines)


def _setting(stage: Any, name: str) -> Any:
    for part in name.split("."):
        stage = stage[int(part)] if part.isdigit() else getattr(stage, part)
    return stage
