"""Settings of the stages of `train.pair`: composed by rule, then overridden by given settings."""

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from train.ask import AskConfig, question_tokens
from train.data import packing
from train.data.documents import DataConfig
from train.data.packing import Corpus
from train.data.records import Record, Source, read_records
from train.drafter import DrafterStage
from train.export import ExportConfig
from train.measure import MeasureConfig
from train.pairing.training_defaults import ACCELERATOR, CPU, TrainingDefaults
from train.respond import RespondConfig, encode_question
from train.runtime import run_config
from train.runtime.run_config import LoopConfig, MeshConfig, OptimizerConfig
from train.stages import choices
from train.stages.evaluation import EvaluateConfig
from train.stages.objective import ObjectiveConfig
from treeflash_jax.core import files, sharding
from treeflash_jax.core.error_text import warn
from treeflash_jax.core.settings import setting
from treeflash_jax.engine.settings.defaults import choose_dtype
from treeflash_jax.engine.settings.pairs import locate
from treeflash_jax.formats import model_files
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.trees.tree_inputs import MAX_NODES

USUAL_STEPS, LEAST_STEPS = 200, 50
MEASURED_LENGTHS = 512  # number of prompts from which the longest allowed length is chosen
LEAST_PROMPTS, FEW_PROMPTS = 8, 32
ENOUGH_PROMPTS = 1000  # number of prompts in total; if fewer are given, the verifier writes the others
CHUNK = 8  # number of blocks of a sequence whose logits over the whole vocabulary are in memory at a time
EVALUATIONS = 4  # number of evaluations while training
MEASURE_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class PairConfig:
    """Settings of `train.pair`."""

    verifier: str = setting(help='name of a pair ("smollm2"), folder, GGUF file or Hub id')
    prompts: str = setting(help="JSONL file of prompts or chats, a folder of them, a glob or a Hub data set")
    out: str = setting(help="folder of all settings and results; the drafter is written to OUT/model")
    num_prompts: int = setting(0, "largest number of prompts used; 0 uses all", least=0)
    questions: int | None = setting(
        None,
        "number of questions that the verifier writes itself (`train.ask`) and answers, besides the prompts",
        unset=f"as many as {ENOUGH_PROMPTS:,} prompts lack, if the verifier has a chat template",
        least=0,
    )
    block_size: int | None = setting(
        None,
        "tokens of a block, anchor included",
        unset=f"{CPU.block} on a CPU, otherwise {ACCELERATOR.block}, as published",
        least=2,
        most=MAX_NODES,
    )
    num_layers: int | None = setting(
        None, "layers of the drafter's backbone", unset="a tenth of the verifier's layers, from 2 to 5", least=1
    )
    mask_token_id: int | None = setting(
        None,
        "token in the slots of a block to be predicted",
        unset="a special token called mask, or else another one that does not occur in the answers",
        least=0,
    )
    target_layer_ids: tuple[int, ...] = setting(
        (), "verifier layers whose outputs the drafter reads; empty: up to five by the published rule", least=0
    )
    steps: int = setting(0, "training steps of backbone and head", least=0)
    passes: float = setting(
        0.0,
        f"passes over the answers, in place of `steps`. Without either: {CPU.passes:g} passes on a CPU, "
        f"otherwise {ACCELERATOR.passes:g}, and at least {USUAL_STEPS} steps",
        least=0,
    )
    anyway: bool = setting(False, f"trains for fewer than {LEAST_STEPS} steps, too")
    seed: int = setting(0, "random seed of all stages", least=0, most=run_config.MAX_SEED)
    mesh: MeshConfig = MeshConfig()
    ask: dict[str, Any] = setting(help="settings of `train.ask` that replace the rules'", default_factory=dict)
    respond: dict[str, Any] = setting(help="settings of `train.respond` that replace the rules'", default_factory=dict)
    drafter: dict[str, Any] = setting(help="settings of `train.drafter` that replace the rules'", default_factory=dict)
    export: dict[str, Any] = setting(help="settings of `train.export` that replace the rules'", default_factory=dict)
    measure: dict[str, Any] = setting(help="settings of `train.measure` that replace the rules'", default_factory=dict)

    def __post_init__(self) -> None:
        if self.steps and self.passes:
            raise ValueError(f"got steps {self.steps} and passes {self.passes:g}, expected one of them")

    def path(self, name: str) -> Path:
        return files.local(self.out) / name


class Composer:
    """Composes every stage's settings from the command's settings and the verifier's config and tokenizer.

    Attributes:
      stages: settings of the stages composed so far, by name. Training depends on the stages before it.
      answers: the verifier's answers, on which training depends; empty before they are made.
    """

    def __init__(self, settings: PairConfig):
        self.settings = settings
        self.skipped = Counter[str]() if settings.respond.get("malformed") == "skip" else None  # the counts are not shown
        self.stages: dict[str, Any] = {}
        self.answers = Corpus({}, {}, {}, {})

    @cached_property
    def prompts(self) -> list[Record]:
        """Prompts of the command. Malformed ones are left out if they may be skipped."""
        source = Source(path=self.settings.prompts, limit=self.settings.num_prompts, hold_out=0)
        return [*read_records(source, self.settings.seed, self.skipped)]

    @cached_property
    def num_questions(self) -> int:
        """Number of questions that the verifier writes besides the prompts."""
        requested = self.settings.ask.get("count", self.settings.questions)
        begun = self.settings.path("ask.toml")
        if requested is not None:
            return requested
        if begun.exists():  # more prompts do not change the number of questions
            return run_config.load(AskConfig, begun).count
        if self.settings.path("respond.toml").exists():  # begun without questions
            return 0
        try:
            question_tokens(self.tokenizer)
        except ValueError:  # the verifier has no chat template in which it could write a question
            return 0
        return max(0, ENOUGH_PROMPTS - len(self.prompts))

    def prompts_digest(self) -> str:
        return hashlib.sha256(repr([prompt.content for prompt in self.prompts]).encode()).hexdigest()

    @cached_property
    def verifier(self) -> ModelConfig:
        return model_files.read_verifier_config(locate(self.settings.verifier, "verifier"))

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return Tokenizer.load(locate(self.settings.verifier, "verifier"))

    @cached_property
    def defaults(self) -> TrainingDefaults:
        return CPU if sharding.device().is_cpu else ACCELERATOR

    @property
    def block_size(self) -> int:
        return self.settings.block_size or self.defaults.block

    def check_settings(self) -> None:
        """Composes all stages without answers, so that a wrong setting raises at once."""
        count = len(self.prompts) + self.num_questions
        if count < FEW_PROMPTS:
            warn(f"got {count} prompts and questions: a drafter that pays needs hundreds; give more, or questions=")
        self.stages["ask"] = self.ask()
        self.stages["respond"] = self.respond()
        self.stages["drafter"] = self.drafter()
        self.stages["export"] = self.export()
        self.stages["measure"] = self.measure()
        self.stages["drafter"].drafter_config(self.verifier, None)

    def ask(self) -> AskConfig:
        settings = self.settings
        out = str(self.settings.path("questions.jsonl"))
        batch = self.defaults.slots
        count = max(1, self.num_questions)
        by_rule = AskConfig(verifier=settings.verifier, out=out, count=count, batch=batch, seed=settings.seed)
        return run_config.replaced(by_rule, settings.ask)

    def respond(self) -> RespondConfig:
        """Composes the settings of the answers. Prompts may be as long as the longest question, and as 95 % of all."""
        settings = self.settings
        context = self.verifier.max_positions
        prompts = self.prompts
        source = Source(path=settings.prompts, limit=settings.num_prompts, hold_out=0)
        if len(prompts) < LEAST_PROMPTS:
            raise ValueError(f"{settings.prompts}: got {len(prompts)} prompts, expected at least {LEAST_PROMPTS}")
        sample = packing.pick_spread(prompts, MEASURED_LENGTHS)
        questions = {prompt.number: encode_question(prompt, self.tokenizer, self.skipped) for prompt in sample}
        lengths = {number: len(ids) for number, ids in questions.items() if ids is not None}
        if not lengths:
            raise ValueError(f"{settings.prompts}: got no prompt that can be asked, expected chats that a user opens")
        # The shortest prompt has at least the tokens that the chat template adds to a question.
        asked = min(lengths.values()) + self.ask().max_tokens if self.num_questions else 0
        longest = min(context // 2, math.ceil(max(asked, np.percentile([*lengths.values()], 95)) / 32) * 32)
        usable = [number for number, length in lengths.items() if length <= longest]
        sources = [dataclasses.replace(source, hold_out=_hold_out(usable))]
        if self.num_questions:
            sources.append(Source(path=str(self.settings.path("questions.jsonl")), hold_out=0))
        by_rule = RespondConfig(
            verifier=settings.verifier,
            sources=tuple(sources),
            out=str(settings.path("responses.jsonl")),
            max_new_tokens=min(self.defaults.tokens, context - longest),
            max_prompt_tokens=longest,
            batch=min(self.defaults.slots, len(prompts) + self.num_questions),
            seed=settings.seed,
            mesh=MeshConfig(data=settings.mesh.data * settings.mesh.fsdp, model=settings.mesh.model),
        )
        return run_config.replaced(by_rule, settings.respond)

    def read_answers(self) -> None:
        source = Source(path=self.stages["respond"].out, format="responses", hold_out=0)
        shared = self.tokenizer, self.settings.seed, self.verifier.vocab_size
        self.answers = packing.load_corpus([source], self._data(), *shared)

    def drafter(self) -> DrafterStage:
        """Composes the training of backbone and head together."""
        settings = self.settings
        verifier = self.verifier
        answers = self.answers
        steps = settings.steps
        if not steps:
            passes = settings.passes or self.defaults.passes
            least_steps = 1 if settings.passes else USUAL_STEPS
            steps = max(least_steps, math.ceil(passes * answers.num_sequences / self._batch_size()))
        num_layers = settings.num_layers or choices.drafter_layers(verifier.num_layers)
        mask_token_id = settings.mask_token_id
        if mask_token_id is None:
            counts_v = answers.token_counts(verifier.vocab_size)
            mask_token_id = choices.mask_token(self.tokenizer, counts_v, verifier.eos_token_ids)
        optimizer, rate = self.defaults.optimizer
        hold_out = _hold_out(range(answers.num_documents))
        data = self._data()
        by_rule = DrafterStage(
            run=str(settings.path("drafter")),
            verifier=settings.verifier,
            sources=(Source(path=self.stages["respond"].out, format="responses", hold_out=hold_out),),
            data=data,
            compute_dtype=choose_dtype(sharding.device()).name,
            objective=self._objective(data.sequence_length),
            evaluate=EvaluateConfig(nodes=(16,)),
            optimizer=OptimizerConfig(name=optimizer, learning_rate=rate, final=0.01),
            loop=LoopConfig(
                steps=steps,
                batch=self._batch_size(),
                seed=settings.seed,
                save_every=50,
                evaluate_every=math.ceil(steps / EVALUATIONS),
            ),
            mesh=settings.mesh,
            block_size=self.block_size,
            num_layers=num_layers,
            mask_token_id=mask_token_id,
            target_layer_ids=settings.target_layer_ids or choices.tapped_layers(verifier.num_layers),
            initial_layers=choices.initial_layers(verifier, num_layers),
            head="mlp",
        )
        stage = run_config.replaced(by_rule, settings.drafter)
        steps = stage.loop.steps
        if (answers.train or settings.steps) and steps < LEAST_STEPS and not settings.anyway:
            raise ValueError(
                f"got a plan of {steps} optimiser steps, expected at least {LEAST_STEPS}; give more prompts, passes= or "
                "steps=, or anyway=true"
            )
        return stage

    def _objective(self, sequence_length: int) -> ObjectiveConfig:
        anchors = CHUNK * max(1, sequence_length // (self.defaults.anchors * CHUNK))
        sample = self.defaults.vocabulary * sequence_length
        return ObjectiveConfig(
            loss="forward-kl",
            decay=4.0 if self.block_size <= 8 else 7.0,
            base_weight=0.5,
            anchors=anchors,
            prompts=True,  # costs nothing, and held-out losses fall: notebooks/results/recipe_smollm2.md
            chunk=anchors if sample else CHUNK,
            vocabulary=0 if sample >= self.verifier.vocab_size else sample,
        )

    def export(self) -> ExportConfig:
        run = str(self.settings.path("drafter"))
        out = str(self.settings.path("model"))
        return run_config.replaced(ExportConfig(run=run, out=out, overwrite=True), self.settings.export)

    def measure(self) -> MeasureConfig:
        settings = self.settings
        by_rule = MeasureConfig(
            verifier=settings.verifier,
            drafter=str(settings.path("model")),
            respond=str(settings.path("respond.toml")),
            out=str(settings.path("measured.json")),
            seconds=MEASURE_SECONDS,
            seed=settings.seed,
        )
        return run_config.replaced(by_rule, settings.measure)

    def _data(self) -> DataConfig:
        responded = self.stages["respond"]
        whole = math.ceil((responded.max_prompt_tokens + responded.max_new_tokens) / 64) * 64
        return DataConfig(
            sequence_length=min(self.verifier.max_positions, max(256, whole)),
            thinking=responded.thinking,
            record=str(self.settings.path("recorded")) if self.defaults.records else "",
        )

    def _batch_size(self) -> int:
        """Returns the smallest batch of at least `defaults.batch` sequences that all devices share equally."""
        mesh = self.settings.mesh
        num_devices = mesh.data * mesh.fsdp or jax.device_count() // mesh.model
        return math.ceil(self.defaults.batch / num_devices) * num_devices


def _hold_out(numbers: Sequence[int]) -> int:
    """Returns n such that every n-th record is held out: about 16 records, but at least one in 50 and at most one in 4.

    If possible, some records are held out and some are not.
    """
    usual = min(50, max(4, len(numbers) // 16))
    for n in range(usual, 1, -1):
        if 0 < sum(number % n == n - 1 for number in numbers) < len(numbers):
            return n
    return usual
