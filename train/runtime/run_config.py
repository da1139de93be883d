"""Settings of a stage: one frozen dataclass, read from a TOML file and changed by words `key=value` on the command line.

    python -m train.head configs/tiny/head.toml run=runs/head optimizer.learning_rate=1e-3

Every key must be known, and every value must have its type. A misspelt key is an error, and never ignored. The resulting
settings are written beside the run's checkpoints (`save`), so that a run directory records how it was made.
"""

import dataclasses
import json
import logging
import os
import sys
import tomllib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import tomli_w
from etils import epath

from treeflash_jax.core import files, programs
from treeflash_jax.core.checks import UnknownSetting, suggestion
from treeflash_jax.core.error_text import clipped, quoted
from treeflash_jax.core.exit_status import exit_status
from treeflash_jax.core.setting_tables import build, describe, dotted, setting_names
from treeflash_jax.core.settings import setting

T = TypeVar("T")
MAX_SEED = 2**32 - 1  # JAX's keys ignore further bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices per mesh axis."""

    data: int = setting(0, "groups of devices that split the batch; 0 takes all devices that are left", least=0)
    fsdp: int = setting(1, "devices that split the batch, weights and optimiser state", least=1)
    model: int = setting(1, "devices that split heads, feed-forward layers and vocabulary", least=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, or Muon for the layers' matrices and AdamW for other weights. The rate warms up, then follows a cosine."""

    name: Literal["adamw", "muon"] = setting("adamw", "algorithm")
    learning_rate: float = setting(help="peak learning rate; with Muon, of its matrices", above=0, most=10)
    adam_learning_rate: float = setting(
        4e-3, "with Muon, peak learning rate of the weights that it leaves to AdamW", above=0, most=10
    )
    warmup: float = setting(0.04, "share of the steps in which the learning rate rises", least=0, most=1)
    final: float = setting(0.0, "learning rate at the end, as a share of the peak", least=0, most=1)
    b1: float = setting(0.9, "decay of AdamW's averages of gradients", least=0, below=1)
    b2: float = setting(0.95, "decay of AdamW's averages of the gradients' squares", least=0, below=1)
    weight_decay: float = setting(0.0, "decay of matrices and tables; biases and norms keep their size", least=0, most=10)
    clip: float = setting(1.0, "largest global norm of gradients; larger ones are scaled down", above=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Length of a run, and the files that it keeps. A step trains on `batch` packed sequences in `accumulate` parts."""

    steps: int = setting(0, "optimiser steps; 0 derives them from `epochs`", least=0)
    epochs: float = setting(1.0, "passes over the data; used if `steps` is 0", least=0)
    batch: int = setting(help="packed sequences of a step, over all devices", least=1)
    accumulate: int = setting(1, "parts of a step; their gradients are summed", least=1)
    seed: int = setting(0, "random seed of initial weights, order of the data, and anchors", least=0, most=MAX_SEED)
    log_every: int = setting(10, "steps between log lines; 0 logs the last step only", least=0)
    save_every: int = setting(200, "steps between checkpoints; 0 saves the last step only", least=0)
    evaluate_every: int = setting(200, "steps between evaluations; 0 evaluates the last step only", least=0)
    keep: int = setting(2, "number of newest checkpoints kept; the best by `best` is kept too", least=1)
    best: str = setting(
        "held_out/loss",
        "metric of an evaluation by which a checkpoint is best; every evaluated step is then saved, and the best one "
        "kept. Empty: only the newest are kept",
        min_length=0,
    )
    best_mode: Literal["min", "max"] = setting("min", "whether the lowest or the highest value of `best` is best")
    tensorboard: bool = setting(False, "also writes TensorBoard files to RUN/tensorboard (needs the `tensorboard` extra)")
    wandb: str = setting(
        "", "project of Weights & Biases that receives the metrics (needs the `wandb` extra); empty: none", min_length=0
    )
    profile: tuple[int, int] | None = setting(None, "first and last step of a profile for TensorBoard, such as [100, 105]")


def run_command(main: Callable[[Any], None], cls: type, doc: str | None, argv: Sequence[str] | None = None) -> None:
    """Runs `main(settings)` with the settings that a command line gives, `[FILE.toml] [key=value ...]`, and exits.

    Compiled programs are cached on disk. Bad input ends the process with one line on stderr. --help shows `doc`, except for
    its list of shape suffixes.
    """
    command = f"train.{Path(sys.argv[0]).stem}"
    words = sys.argv[1:] if argv is None else argv

    def parse_and_run() -> None:
        if {"-h", "--help"} & {*words}:
            paragraphs = [text for text in (doc or "").strip().split("\n\n") if not text.startswith("Shape suffixes:")]
            usage = f"usage: python -m {command} [FILE.toml] [name=value ...]"
            print("\n\n".join([usage, *paragraphs, f"settings:\n{describe(cls)}"]))
            return
        try:
            settings = parse(cls, words)
        except (ValueError, UnknownSetting, OSError) as error:
            raise ValueError(f"{clipped(error, 220)} (see python -m {command} --help)") from None
        programs.keep_programs()
        # This handler looks up sys.stderr, which a bar redirects. Handlers of imported packages would write into the bar.
        logging.basicConfig(format="%(message)s", handlers=[logging.lastResort], force=True)
        for name in ("absl", "asyncio"):  # Orbax logs a traceback of every error that it also raises
            logging.getLogger(name).disabled = True
        main(settings)

    if status := exit_status(parse_and_run, command):
        sys.exit(status)


def parse(cls: type[T], words: Sequence[str]) -> T:
    """Returns the settings of a command line's words: at most one TOML file, and words `key=value`."""
    for word in words:
        if word.startswith("-"):
            name = word.lstrip("-").partition("=")[0].replace("-", "_")
            meant = suggestion(name, setting_names(cls)) or name
            raise UnknownSetting(f"got option {clipped(word, 60)}; settings are given as {meant}=...")
    paths = [word for word in words if "=" not in word]
    if len(paths) > 1:
        raise ValueError(f"got {len(paths)} files ({', '.join(paths)}), expected at most one TOML file")
    return load(cls, paths[0] if paths else None, [word for word in words if "=" in word])


def load(cls: type[T], path: str | os.PathLike | None, overrides: Sequence[str] = ()) -> T:
    """Returns settings from a TOML file and overrides (`a.b=value`; values are TOML, bare words are strings).

    Raises FileNotFoundError, UnknownSetting, or ValueError for a missing or wrong value.
    """
    return build(cls, read_toml(path, overrides), str(path) if path is not None and not overrides else "settings")


def read_toml(path: str | os.PathLike | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the content of a TOML file of any stage, changed by overrides."""
    raw: dict[str, Any] = {}
    if path is not None:
        try:
            raw = tomllib.loads(epath.Path(path).read_bytes().decode())
        except OSError as error:
            kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
            raise kind(f"{path}: {error.strerror or error}; expected a TOML file, or settings as name=value") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not valid TOML: {clipped(error, 120)}") from None
    for override in overrides:
        key, _, text = override.partition("=")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):
            value = text.strip()
        _assign(raw, key.strip(), value)
    return raw


def _assign(raw: dict[str, Any], key: str, value: Any) -> None:
    """Sets a value by its dotted name. Numbers are indices of lists of tables, as in `sources.0.path`."""
    *path, last = key.split(".")
    table: Any = raw
    try:
        for name in path:
            table = table[int(name)] if isinstance(table, list) else table.setdefault(name, {})
        table.update({last: value})
    except (AttributeError, ValueError, IndexError):  # there is a value or a list instead of a table
        expected = "a setting of a table that there is, such as loop.steps or sources.0.path"
        raise ValueError(f"settings: got {clipped(key, 60)}, expected {expected}") from None


def replaced(settings: T, raw: dict[str, Any]) -> T:
    """Returns settings with the new values of nested dicts."""
    values = to_dict(settings)
    for key, value in dotted(raw).items():
        _assign(values, key, value)
    return build(type(settings), values)


def changes(settings: Any, path: str | os.PathLike, free: Collection[str]) -> dict[str, tuple[Any, Any]]:
    """Returns the differences from the settings saved at `path`: {dotted name: (then, now)}; None for an absent setting.

    A setting that the file does not name had its default. Differences of settings and tables in `free` do not count.
    """
    try:
        before = to_dict(load(type(settings), path))
    except (ValueError, UnknownSetting):
        before = read_toml(path)  # a file of another stage
    then, now = dotted(before), dotted(to_dict(settings))
    keys = [key for key in {**then, **now} if key not in free and key.split(".")[0] not in free]
    return {key: (then.get(key), now.get(key)) for key in keys if then.get(key) != now.get(key)}


def refuse(changed: dict[str, tuple[Any, Any]], where: Any, option: str) -> None:
    """Raises ValueError for the first of the changed settings, if any.

    Args:
      changed: result of `changes`.
      where: run or file that was begun with other settings: the value of the setting `option`.
    """
    for name, (old, new) in changed.items():
        before, after = dotted({name: old}, into_lists=True), dotted({name: new}, into_lists=True)
        key = next(key for key in {**before, **after} if before.get(key) != after.get(key))
        then, now = before.get(key), after.get(key)
        give = f"leave {key} out" if then in (None, [], "") else f"give {key}={quoted(then)}"
        raise ValueError(f"{where} was begun with {key} = {quoted(then)}, got {quoted(now)}; {give}, or another {option}=")


def to_dict(settings: Any) -> dict[str, Any]:
    """Returns settings as nested dicts of plain values that JSON can hold."""
    return json.loads(json.dumps(dataclasses.asdict(settings)))


def save(settings: Any, path: epath.PathLike) -> None:
    """Writes settings as TOML from which `load` returns equal settings."""
    files.write(path, dump(settings))


def dump(settings: Any) -> str:
    """Returns settings as TOML. Settings that are None are left out, because TOML cannot express None."""
    plain = json.dumps(dataclasses.asdict(settings))
    return tomli_w.dumps(json.loads(plain, object_hook=lambda table: {k: v for k, v in table.items() if v is not None}))
