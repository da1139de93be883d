"""The settings of every stage of `train.pair`, by rule: what each choice is and why is printed and kept in its file."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from train import choices, config, data
from train.choices import Choice
from train.config import LoopConfig, MeshConfig, OptimizerConfig
from train.documents import DataConfig
from train.drafter import DrafterStage
from train.evaluate import EvaluateConfig
from train.export import ExportStage
from train.head import HeadStage
from train.measure import MeasureStage
from train.objective import ObjectiveConfig
from train.records import Source, read
from train.respond import RespondConfig, question
from treeflash_jax import devices
from treeflash_jax.checks import bounded
from treeflash_jax.formats import models
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.pairs import locate
from treeflash_jax.trees.shape import MOST_NODES
from treeflash_jax.verifiers.config import ModelConfig

PASSES = {"drafter": 6, "head": 3}  # over the rows; the published backbones took six
LEAST_STEPS = {"drafter": 200, "head": 100}
LEARNING_RATES = {"drafter": 6e-3, "head": 1e-3}  # of Muon; the head has been trained with its backbone before
SAMPLED_ROWS = 4  # tokens of a sample of the vocabulary on CPUs, in rows
TEMPERATURES = (0.0, 0.7, 0.0, 1.0)
MEASURED_LENGTHS = 512  # prompts whose length decides what is too long
LOGITS_BYTES = 512 * 2**20  # of the drafter's logits that exist at a time
LEAST_PROMPTS = 8


@dataclass(frozen=True, kw_only=True)
class PairConfig:
    """Settings of `train.pair`. Those that are 0, none or empty are chosen by rule.

    Attributes:
      verifier: name of a pair ("smollm2"), folder, GGUF file or Hub id.
      prompts: JSONL file of prompts or chats, a folder of them, a glob or a Hub data set.
      out: folder of all settings and results; the drafter is written to OUT/model.
      num_prompts: largest number of prompts used; 0 uses all, or as many as `minutes` allows.
      minutes: total time of all commands with the same `out`, measurement included; 0 sets no limit.
      block_size: tokens of a drafted block, anchor included.
      num_layers: layers of the drafter's backbone.
      mask_token_id: token in the slots of a block that are to be predicted.
      target_layer_ids: verifier layers whose outputs the drafter reads.
      steps: training steps of backbone and head together; 0 chooses by rule, or as `minutes` allows.
      head_steps: training steps of the head alone, after that; 0 as for `steps`.
      seed: random seed of all stages.
      mesh: devices of all stages.
      respond: settings of `train.respond` to override, by name (respond.max_new_tokens=256).
      drafter: settings of `train.drafter` to override, by name (drafter.optimizer.learning_rate=3e-3).
      head: settings of `train.head` to override, by name (head.loop.batch=16).
      export: settings of `train.export` to override, by name (export.dtype=float32).
      measure: settings of `train.measure` to override, by name (measure.seed=1).
    """

    verifier: str
    prompts: str
    out: str
    num_prompts: int = bounded(0, least=0)
    minutes: float = bounded(0.0, least=0)
    block_size: int | None = bounded(None, least=2, most=MOST_NODES)
    num_layers: int | None = bounded(None, least=1)
    mask_token_id: int | None = bounded(None, least=0)
    target_layer_ids: tuple[int, ...] = bounded((), least=0)
    steps: int = bounded(0, least=0)
    head_steps: int = bounded(0, least=0)
    seed: int = bounded(0, least=0)
    mesh: MeshConfig = MeshConfig()
    respond: dict[str, Any] = field(default_factory=dict)
    drafter: dict[str, Any] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=dict)
    export: dict[str, Any] = field(default_factory=dict)
    measure: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Composed:
    """Settings of a stage, and a line for every choice: the setting's name, its value, and why it has that value."""

    stage: Any
    lines: list[str]


@dataclass(frozen=True)
class Verifier:
    """What the rules read of a verifier."""

    model: ModelConfig
    tokenizer: Tokenizer | None

    @staticmethod
    def open(name: str) -> Verifier:
        """Config and tokenizer of a verifier; no weights are read."""
        path = locate(name, "verifier")
        return Verifier(models.read_verifier_config(path), Tokenizer.load(path))


@dataclass(frozen=True)
class Answers:
    """What the answers decide: the mask token, and how many rows there are."""

    count: int
    rows: int
    mask: Choice


def file(settings: PairConfig, name: str) -> Path:
    return Path(settings.out).expanduser() / name


def held_out_every(count: int) -> int:
    """Every so-many-th record is held out: about 16 of them, at most a quarter and at least one in 50."""
    return min(50, max(4, count // 16))


def respond_stage(settings: PairConfig, verifier: Verifier, limit: Choice | None = None) -> Composed:
    """Settings of `train.respond`.

    Args:
      limit: how many of the prompts are used, in place of `settings.num_prompts`.

    Raises:
      ValueError: prompts that cannot be read, or fewer than LEAST_PROMPTS.
    """
    limit = limit or Choice(settings.num_prompts, "as given" if settings.num_prompts else "all of them")
    source = Source(path=settings.prompts, limit=limit.value, hold_out=0)
    count = count_prompts(settings, limit.value)
    if count < LEAST_PROMPTS:
        raise ValueError(f"{settings.prompts}: got {count} prompts, expected at least {LEAST_PROMPTS}")
    sample = dataclasses.replace(source, limit=min(count, MEASURED_LENGTHS))
    lengths = [_length(verifier, record.content) for record in read(sample, settings.seed)]
    context = verifier.model.max_positions
    longest = min(context // 2, math.ceil(np.percentile(lengths, 95) / 32) * 32)
    on_cpu = devices.here().is_cpu
    new = min(256 if on_cpu else 1024, context - longest)
    rows = settings.mesh.data * settings.mesh.fsdp or jax.device_count()
    made = RespondConfig(
        verifier=settings.verifier,
        sources=(dataclasses.replace(source, hold_out=held_out_every(count)),),
        out=str(file(settings, "responses.jsonl")),
        temperatures=TEMPERATURES,
        max_new_tokens=new,
        max_prompt_tokens=longest,
        batch=max(rows, min(64, count)),
        seed=settings.seed,
        mesh=settings.mesh,
    )
    why_long = f"95 % of the prompts have at most {np.percentile(lengths, 95):.0f} tokens; longer ones are left out"
    by_rule = {
        "sources.0.limit": limit.reason,
        "sources.0.hold_out": f"every so-many-th of {count:,} prompts, for validation and the last measurement",
        "max_prompt_tokens": why_long,
        "max_new_tokens": f"on {'a CPU' if on_cpu else 'an accelerator'}; longer answers are cut",
        "temperatures": "half of the answers greedy, half sampled",
    }
    return _composed(made, settings.respond, by_rule)


def count_prompts(settings: PairConfig, limit: int = 0) -> int:
    return sum(1 for _ in read(Source(path=settings.prompts, limit=limit, hold_out=0), settings.seed))


def read_answers(asked: RespondConfig, settings: PairConfig, verifier: Verifier) -> Answers:
    """Reads the answers and chooses the mask token from what they do not contain."""
    source = _answers_source(asked, 0)
    model = verifier.model
    corpus = data.open_sources([source], _data(asked, verifier), verifier.tokenizer, settings.seed, model.vocab_size)
    mask = choices.mask_token(verifier.tokenizer, corpus.token_counts(model.vocab_size), model.eos_token_ids)
    return Answers(sum(packed.num_documents for packed in corpus.train.values()), corpus.num_rows, mask)


def drafter_stage(
    settings: PairConfig,
    verifier: Verifier,
    asked: RespondConfig,
    answers: Answers,
    steps: Choice | None = None,
    evaluations: int = 4,
) -> Composed:
    """Settings of `train.drafter`, for these answers; `steps` in place of those of the settings."""
    model, own = verifier.model, settings
    block = _chosen(own.block_size, choices.block_size())
    layers = _chosen(own.num_layers, choices.drafter_layers(model.num_layers))
    mask = _chosen(own.mask_token_id, answers.mask)
    taps = _chosen(own.target_layer_ids or None, choices.tapped_layers(model.num_layers))
    initial = choices.initial_layers(model, layers.value)
    steps = steps or _steps("drafter", settings, answers, settings.steps)
    shared = _drafting("drafter", settings, verifier, asked, answers, block.value, steps.value, evaluations)
    made = DrafterStage(
        num_layers=layers.value,
        block_size=block.value,
        mask_token_id=mask.value,
        target_layer_ids=tuple(taps.value),
        initial_layers=initial.value,
        head="mlp",
        num_nodes=16,
        **shared,
    )
    sampled = made.objective.vocabulary
    by_rule = {
        "mask_token_id": mask.reason,
        "target_layer_ids": taps.reason,
        "initial_layers": initial.reason,
        "head": "TreeFlash's, trained with the backbone",
        "objective.vocabulary": "a sample for every row, on a CPU" if sampled else "all tokens, on an accelerator",
        "block_size": block.reason,
        "num_layers": layers.reason,
        "loop.steps": steps.reason,
        "compute_dtype": choices.compute_dtype().reason,
    }
    return _composed(made, settings.drafter, by_rule)


def head_stage(
    settings: PairConfig,
    verifier: Verifier,
    asked: RespondConfig,
    answers: Answers,
    trained: DrafterStage,
    steps: Choice | None = None,
    evaluations: int = 4,
) -> Composed:
    """Settings of `train.head`, on what `trained` leaves in OUT/drafter."""
    steps = steps or _steps("head", settings, answers, settings.head_steps)
    shared = _drafting("head", settings, verifier, asked, answers, trained.block_size, steps.value, evaluations)
    keeps = trained.head == "mlp"
    made = HeadStage(drafter=str(file(settings, "drafter") / "model"), head="mlp", keep_head=keeps, **shared)
    why = "goes on over the whole vocabulary" if keeps else "from zero"
    by_rule = {"keep_head": f"{why}, on the frozen backbone", "loop.steps": steps.reason}
    return _composed(made, settings.head, by_rule)


def export_stage(settings: PairConfig) -> Composed:
    made = ExportStage(run=str(file(settings, "head")), out=str(file(settings, "model")), dtype="bfloat16", overwrite=True)
    return _composed(made, settings.export, {})


def measure_stage(settings: PairConfig, seconds: float = 0.0) -> Composed:
    made = MeasureStage(
        verifier=settings.verifier,
        drafter=str(file(settings, "model")),
        respond=str(file(settings, "respond.toml")),
        out=str(file(settings, "measured.json")),
        seconds=seconds,
        seed=settings.seed,
    )
    return _composed(made, settings.measure, {})


def _batch(settings: PairConfig) -> int:
    """At least 8 rows, as many on every device."""
    mesh = settings.mesh
    devices = mesh.data * mesh.fsdp or jax.device_count() // mesh.model
    return math.ceil(8 / devices) * devices


def _steps(name: str, settings: PairConfig, answers: Answers, given: int) -> Choice:
    if given:
        return Choice(given, "as given")
    batch = _batch(settings)
    count = max(LEAST_STEPS[name], math.ceil(PASSES[name] * answers.rows / batch))
    reason = f"{PASSES[name]} passes over {answers.rows:,} rows in batches of {batch}, at least {LEAST_STEPS[name]}"
    return Choice(count, reason)


def _drafting(
    name: str,
    settings: PairConfig,
    verifier: Verifier,
    asked: RespondConfig,
    answers: Answers,
    block: int,
    steps: int,
    evaluations: int,
) -> dict[str, Any]:
    """What `train.drafter` and `train.head` share."""
    rows, batch = _data(asked, verifier), _batch(settings)
    chunk = 2 ** int(math.log2(max(1, LOGITS_BYTES // (batch * block * verifier.model.vocab_size * 4))))
    anchors = max(1, rows.row_tokens // 8)
    chunk = min(chunk, anchors)
    samples = name == "drafter" and devices.here().is_cpu and SAMPLED_ROWS * rows.row_tokens < verifier.model.vocab_size
    return dict(
        run=str(file(settings, name)),
        verifier=settings.verifier,
        sources=(_answers_source(asked, held_out_every(answers.count)),),
        data=rows,
        compute_dtype=choices.compute_dtype().value,
        objective=ObjectiveConfig(
            loss="forward-kl",
            decay=4.0 if block <= 8 else 7.0,
            base_weight=0.5 if name == "drafter" else 0.0,
            anchors=anchors // chunk * chunk,
            chunk=chunk,
            vocabulary=SAMPLED_ROWS * rows.row_tokens if samples else 0,
        ),
        evaluate=EvaluateConfig(nodes=(16,), prompts=8 if settings.minutes else 16),
        optimizer=OptimizerConfig(name="muon", learning_rate=LEARNING_RATES[name], final=0.01),
        loop=LoopConfig(
            steps=steps, batch=batch, seed=settings.seed, save_every=50, evaluate_every=math.ceil(steps / evaluations)
        ),
        mesh=settings.mesh,
    )


def _composed(by_rule: Any, given: dict[str, Any], reasons: dict[str, str]) -> Composed:
    """The settings of a rule with those that were given in their place."""
    stage = config.replaced(by_rule, given)
    lines = []
    for name, reason in reasons.items():
        value, before = setting(stage, name), setting(by_rule, name)
        shown = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        lines.append(f"{name} = {shown}: {reason if value == before else 'as given'}")
    return Composed(stage, lines)


def setting(stage: Any, name: str) -> Any:
    """The value of a setting by its dotted name."""
    for part in name.split("."):
        stage = stage[int(part)] if part.isdigit() else getattr(stage, part)
    return stage


def _chosen(given: Any, by_rule: Choice) -> Choice:
    return by_rule if given is None else Choice(given, "as given")


def _answers_source(asked: RespondConfig, every: int) -> Source:
    return Source(path=asked.out, format="responses", hold_out=every)


def _data(asked: RespondConfig, verifier: Verifier) -> DataConfig:
    whole = math.ceil((asked.max_prompt_tokens + asked.max_new_tokens) / 64) * 64
    return DataConfig(row_tokens=min(verifier.model.max_positions, max(256, whole)))


def _length(verifier: Verifier, content: Any) -> int:
    asked = question(content)
    if verifier.tokenizer is None:
        raise ValueError("got prompts as text, but the verifier has no tokenizer; expected one in its folder")
    return len(verifier.tokenizer.encode_chat(asked) if isinstance(asked, list) else verifier.tokenizer.encode(asked))
