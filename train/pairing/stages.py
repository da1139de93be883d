"""The stages of `train.pair`, and the record of their inputs, so that a rerun repeats only the stages that changed."""

import hashlib
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from train import ask, drafter, export, measure, respond
from train.pairing.compose import Composer, PairConfig
from train.runtime import run_config
from treeflash_jax.core import files
from treeflash_jax.core.json_files import read_json
from treeflash_jax.core.setting_tables import dotted

ALWAYS_GIVEN = ("verifier", "seed")
Action = Literal["skip", "continue", "begin"]


@dataclass(frozen=True, kw_only=True)
class PairStage:
    """A stage of the command: `python -m train.NAME`.

    Attributes:
      main: function that runs the stage with its settings.
      compose: function that returns the stage's settings.
      given: settings of the command that the stage depends on, in addition to ALWAYS_GIVEN.
      reads: file or folder of OUT that the stage depends on, if it exists.
      reads_prompts: whether the stage depends on the prompts.
      writes: pattern of the files or folders of OUT that the stage writes.
      size: function that returns the quantity that may grow when the stage continues, such as the number of steps; 0 if
        none may.
      follows: prefixes of the settings that may change when the stage continues.
      shown: settings chosen by rule that are printed.
    """

    name: str
    main: Callable[..., None]
    compose: Callable[[Composer], Any]
    given: tuple[str, ...]
    reads: str
    writes: str
    reads_prompts: bool = False
    size: Callable[[Composer, Any], int] = lambda composer, stage_settings: 0
    follows: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()

    def inputs(self, composer: Composer, stage_settings: Any) -> dict[str, Any]:
        """Returns the inputs that decide a stage's results: given settings, digests of the data it reads, and its size."""
        values = run_config.to_dict(composer.settings)
        path = composer.settings.path(self.reads)
        digest = digest_files(path) if self.reads and path.exists() else ""
        digest = composer.prompts_digest() + digest if self.reads_prompts else digest
        given = {name: values[name] for name in (*ALWAYS_GIVEN, *self.given)}
        if self.reads_prompts and composer.num_questions:
            given["questions"] = True  # questions are a second source of prompts
        return {"given": given, "digest": digest, "size": self.size(composer, stage_settings)}

    def continued(self, stage_settings: Any, settings: PairConfig) -> Any:
        """Returns the settings with which the stage was begun. Those that may change keep their new values."""
        begun = run_config.load(type(stage_settings), settings.path(f"{self.name}.toml"))
        now = dotted(run_config.to_dict(stage_settings), into_lists=True)
        return run_config.replaced(begun, {key: value for key, value in now.items() if key.startswith(self.follows)})

    def set_aside(self, settings: PairConfig) -> Path:
        """Moves earlier results to OUT/before, or OUT/before/2 and so on if such results are there. Returns the folder."""
        before = settings.path("before")
        paths = [*settings.path("").glob(self.writes)]
        folders = itertools.chain([before], (before / str(number) for number in itertools.count(2)))
        folder = next(folder for folder in folders if not any((folder / path.name).exists() for path in paths))
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            path.rename(folder / path.name)
        return folder


PAIR_STAGES = (
    PairStage(
        name="ask",
        main=ask.main,
        compose=Composer.ask,
        given=("ask",),
        reads="",
        writes="questions.jsonl*",
        size=lambda composer, stage_settings: stage_settings.count,
        follows=("count",),
        shown=("count",),
    ),
    PairStage(
        name="respond",
        main=respond.main,
        compose=Composer.respond,
        given=("prompts", "respond"),
        reads="questions.jsonl",
        reads_prompts=True,
        writes="responses.jsonl*",
        size=lambda composer, stage_settings: len(composer.prompts) + composer.num_questions,
        follows=("sources.0.limit", "mesh."),
        shown=("sources.0.hold_out", "max_prompt_tokens", "max_new_tokens"),
    ),
    PairStage(
        name="drafter",
        main=drafter.main,
        compose=Composer.drafter,
        given=("block_size", "num_layers", "mask_token_id", "target_layer_ids", "drafter"),
        reads="responses.jsonl",
        writes="drafter",
        size=lambda composer, stage_settings: stage_settings.loop.steps,
        follows=("loop.steps", "loop.evaluate_every", "mesh."),
        shown=(
            *("mask_token_id", "target_layer_ids", "block_size", "num_layers", "initial_layers", "compute_dtype"),
            "loop.steps",
        ),
    ),
    PairStage(
        name="export",
        main=export.main,
        compose=Composer.export,
        given=("export",),
        reads="drafter/model",
        writes="model",
    ),
    PairStage(
        name="measure",
        main=measure.main,
        compose=Composer.measure,
        given=("measure",),
        reads="model",
        writes="measured.json",
    ),
)


class StageInputs:
    """The inputs of every stage that was begun; they are stored in OUT/stages.json."""

    def __init__(self, settings: PairConfig):
        self.path = settings.path("stages.json")
        if settings.path("pair.toml").exists() and not self.path.exists():
            raise ValueError(f"{settings.out} was begun by an earlier version (it has no stages.json); give another out=")
        self.by_name: dict[str, dict[str, Any]] = read_json(self.path) if self.path.exists() else {}

    def action(self, stage: PairStage, inputs: dict[str, Any]) -> Action:
        """Returns "skip" for a stage that finished with these inputs, and "continue" for one that was begun with them.

        A stage whose size alone grew also continues, even if the files that it reads changed, because more prompts or steps
        extend it.
        """
        before = self.by_name.get(stage.name)
        if before is None or before["given"] != inputs["given"]:
            return "begin"
        if (before["digest"], before["size"]) == (inputs["digest"], inputs["size"]):
            return "skip" if before["finished"] else "continue"
        return "continue" if inputs["size"] > before["size"] else "begin"

    def changed(self, stage: PairStage, inputs: dict[str, Any]) -> str:
        """Describes the first given setting that differs from the last time; returns "" if none does."""
        then, now = dotted(self.by_name[stage.name]["given"]), dotted(inputs["given"])
        return next((f"{key} was {then.get(key)}" for key in {**then, **now} if then.get(key) != now.get(key)), "")

    def save(self, stage: PairStage, inputs: dict[str, Any], *, finished: bool) -> None:
        self.by_name[stage.name] = inputs | {"finished": finished}
        files.write(self.path, json.dumps(self.by_name, indent=1) + "\n")


def digest_files(path: Path) -> str:
    """Returns the SHA-256 of a file, or of the names and contents of all files in a folder."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            digest.update(file.name.encode())
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()
