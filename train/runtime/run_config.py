"""Settings of a stage: one frozen dataclass, read from a TOML file, changed by dotted overrides on the command line.

    python -m train.head configs/tiny/head.toml run=runs/head optimizer.learning_rate=1e-3

Every key must be known and every value of its type: a misspelt key is an error, never ignored. What a run resolved to is
written beside its checkpoints (`save`), so that a run directory says how it was made.
"""

import argparse
import dataclasses
import difflib
import functools
import inspect
import json
import logging
import os
import re
import sys
import textwrap
import tomllib
import typing
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal, TypeVar

import pydantic
import tomli_w
from etils import epath

from train.runtime import folders
from treeflash_jax.core import files, programs
from treeflash_jax.core.checks import CONFIG, bounded, clipped, explain, quoted

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices per mesh axis.

    Attributes:
      data: groups of devices that split the batch; 0 takes all devices that are left.
      fsdp: devices that split the batch, weights and optimizer state.
      model: devices that split heads, feed-forward layers and vocabulary.
    """

    data: int = bounded(0, least=0)
    fsdp: int = bounded(1, least=1)
    model: int = bounded(1, least=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, or Muon on the layers' matrices with AdamW on the rest; warm-up, then cosine.

    Attributes:
      name: "adamw" or "muon".
      learning_rate: peak learning rate; with Muon, that of its matrices.
      adam_learning_rate: with Muon, peak learning rate of the weights that it leaves to AdamW.
      warmup: share of the steps in which the learning rate rises.
      final: learning rate at the end, as a share of the peak.
      b1, b2: decay of AdamW's averages of gradients and of their squares.
      weight_decay: decay of matrices and tables; biases and norms keep their size.
      clip: largest global norm of gradients; larger ones are scaled down.
    """

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = bounded(above=0, most=10)
    adam_learning_rate: float = bounded(4e-3, above=0, most=10)
    warmup: float = bounded(0.04, least=0, most=1)
    final: float = bounded(0.0, least=0, most=1)
    b1: float = bounded(0.9, least=0, below=1)
    b2: float = bounded(0.95, least=0, below=1)
    weight_decay: float = bounded(0.0, least=0, most=10)
    clip: float = bounded(1.0, above=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Length of a run and what it leaves behind. A step trains on `batch` packed sequences, in `accumulate` parts.

    Attributes:
      steps: optimiser steps; 0 derives them from `epochs`.
      epochs: passes over the data; used if `steps` is 0.
      batch: packed sequences of a step, over all devices.
      accumulate: parts whose gradients are summed before an update.
      seed: random seed of initial weights, order of the data, and anchors.
      log_every: steps between log lines; 0 logs the last step only.
      save_every: steps between checkpoints; 0 saves the last step only.
      evaluate_every: steps between evaluations; 0 evaluates the last step only.
      keep: number of newest checkpoints kept; the best by `best` is kept too.
      best: metric of an evaluation by which a checkpoint is best; every evaluated step is then saved, and the best one
        kept. Empty: only the newest are kept.
      best_mode: "min" if the lowest value of `best` is best, "max" if the highest is.
      tensorboard: also writes TensorBoard files to RUN/tensorboard (needs the `tensorboard` extra).
      wandb: project of Weights & Biases that receives the metrics (needs the `wandb` extra); empty: none.
      profile: first and last step of a profile for TensorBoard, such as [100, 105].
    """

    steps: int = bounded(0, least=0)
    epochs: float = bounded(1.0, least=0)
    batch: int = bounded(least=1)
    accumulate: int = bounded(1, least=1)
    seed: int = bounded(0, least=0)
    log_every: int = bounded(10, least=0)
    save_every: int = bounded(200, least=0)
    evaluate_every: int = bounded(200, least=0)
    keep: int = bounded(2, least=1)
    best: str = bounded("held_out/loss", min_length=0)
    best_mode: Literal["min", "max"] = "min"
    tensorboard: bool = False
    wandb: str = bounded("", min_length=0)
    profile: tuple[int, int] | None = None


def run(main: Callable[[Any], None], cls: type, doc: str | None, argv: Sequence[str] | None = None) -> None:
    """Runs `main(settings)` with the settings that a command line gives: `[FILE.toml] [key.sub=value ...]`.

    Keeps on disk what it compiles. Bad input ends the process with one line on stderr; --help shows `doc`.
    """
    parser = argparse.ArgumentParser(
        description=f"{doc}\nSettings:\n{describe(cls)}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", metavar="FILE.toml | key=value", help="a TOML file, then overrides")
    words = parser.parse_args(argv).settings
    paths = [word for word in words if "=" not in word]
    try:
        if len(paths) > 1:
            raise ValueError(f"got {len(paths)} files ({', '.join(paths)}), expected at most one TOML file")
        config = load(cls, paths[0] if paths else None, [word for word in words if "=" in word])
        programs.keep_on_disk()
        # Looks up sys.stderr, which a bar redirects; handlers of imported packages write into the bar.
        logging.basicConfig(format="%(message)s", handlers=[logging.lastResort], force=True)
        main(config)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def load(cls: type[T], path: str | os.PathLike | None, overrides: Sequence[str] = ()) -> T:
    """Returns settings from a TOML file and overrides (`a.b=value`; values are TOML, bare words are strings).

    Raises ValueError for an unreadable file, an unknown or missing key, a value of another type or outside its limits.
    """
    return _build(cls, read(path, overrides), str(path) if path is not None and not overrides else "settings")


def read(path: str | os.PathLike | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the content of a TOML file, changed by overrides, for whatever stage it is."""
    raw: dict[str, Any] = {}
    if path is not None:
        try:
            place = epath.Path(path)
            raw = tomllib.loads((place if "://" in str(path) else files.regular(place)).read_bytes().decode())
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror or error}; expected a TOML file of settings") from None
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


def replaced(config: T, raw: dict[str, Any]) -> T:
    """Returns settings with those replaced that nested dicts name."""
    values = to_dict(config)
    for key, value in dotted(raw).items():
        _assign(values, key, value)
    return _build(type(config), values, "settings")


def changes(config: Any, path: str | os.PathLike, free: Collection[str]) -> dict[str, tuple[Any, Any]]:
    """Returns how settings differ from those saved at `path`: {dotted name: (then, now)}; None for an absent setting.

    A setting that the file does not name had its default. Those in `free`, settings or tables, may differ.
    """
    try:
        before = to_dict(load(type(config), path))
    except ValueError:
        before = read(path)  # of another stage
    then, now = dotted(before), dotted(to_dict(config))
    keys = [key for key in {**then, **now} if key not in free and key.split(".")[0] not in free]
    return {key: (then.get(key), now.get(key)) for key in keys if then.get(key) != now.get(key)}


def to_dict(config: Any) -> dict[str, Any]:
    """Returns nested dicts of plain values, as JSON holds them."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def save(config: Any, path: epath.PathLike) -> None:
    """Writes settings as TOML from which `load` returns equal settings."""
    folders.write(path, dump(config))


def dump(config: Any) -> str:
    """Returns settings as TOML, without those that are None, which TOML cannot express."""
    plain = json.dumps(dataclasses.asdict(config))
    return tomli_w.dumps(json.loads(plain, object_hook=lambda table: {k: v for k, v in table.items() if v is not None}))


def describe(cls: type) -> str:
    """Returns dotted name, type, default and description of every setting, the description from the class docstrings."""
    lines = []
    for name, kind, setting, meaning in _settings(cls):
        default = setting.default if setting.default_factory is dataclasses.MISSING else setting.default_factory()
        shown = "(required)" if default is dataclasses.MISSING else f"= {'none' if default in (None, '') else default}"
        lines += [f"  {name}: {inspect.formatannotation(kind)} {shown}"]
        lines += textwrap.wrap(meaning, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _settings(cls: type, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field, str]]:
    """Yields dotted name, type, field and description of every setting; tables last, "[]" after lists of them."""
    meanings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        text = inspect.cleandoc(base.__dict__.get("__doc__") or "").partition("Attributes:\n")[2]
        for names, meaning in re.findall(r"^  (\w[\w, ]*): (.*(?:\n {4}.*)*)", text, re.MULTILINE):
            meanings |= dict.fromkeys(names.split(", "), " ".join(meaning.split()))
    kinds, tables = typing.get_type_hints(cls), []
    for setting in dataclasses.fields(cls):
        kind = kinds[setting.name]
        inner = [part for part in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(part)]
        if inner:
            tables.append((inner[0], f"{prefix}{setting.name}{'.' if inner[0] is kind else '[].'}"))
        else:
            yield prefix + setting.name, kind, setting, meanings.get(setting.name, "")
    for table, name in tables:
        yield from _settings(table, name)


def setting_names(cls: type) -> list[str]:
    """Returns the dotted name of every setting; those of list items lack the item's number."""
    return [name.replace("[]", "") for name, *_ in _settings(cls)]


@functools.cache
def _adapter(cls: type) -> pydantic.TypeAdapter:
    return pydantic.TypeAdapter(tuple[cls], config=CONFIG | {"extra": "forbid", "coerce_numbers_to_str": True})


def _build(cls: type[T], raw: dict[str, Any], where: str) -> T:
    """Returns nested dicts as settings. Raises ValueError at the first that does not fit."""
    try:
        [config] = _adapter(cls).validate_python([raw])
        return config
    except pydantic.ValidationError as error:
        named = [(_dotted(part["loc"][1:]), part) for part in error.errors(include_url=False)]
        key, first = named[0]
        if first["type"] == "value_error":
            text = str(first["ctx"]["error"])
        elif first["type"] == "missing":
            text = f"got no {key}, expected a value"
        elif first["type"] == "unexpected_keyword_argument":
            names = setting_names(cls)
            tables = {name.rpartition(".")[0] for name in names} - {""}
            near = difflib.get_close_matches(re.sub(r"\.\d+", "", key), [*names, *tables], n=1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {clipped(', '.join(names), 160)}"
            text = f"got unknown setting {clipped(key, 60)}; {hint}"
        else:
            value, expected = explain([part for name, part in named if name == key])
            text = f"got {key} = {quoted(value)}, expected {expected}"
        raise ValueError(f"{where}: {text}") from None


def _dotted(places: Sequence[Any]) -> str:
    """Returns the dotted name of a setting from pydantic's, which ends with the alternative of a union that did not fit."""
    is_name = [isinstance(place, int) or place.isidentifier() and place not in ("int", "float", "str") for place in places]
    return ".".join(str(place) for place, keep in zip(places, is_name, strict=True) if keep)


def dotted(raw: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns everything in nested dicts that is no dict itself, by its dotted name."""
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        flat |= dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _assign(raw: dict[str, Any], key: str, value: Any) -> None:
    """Sets a value by its dotted name; numbers are places in lists of tables, as in `sources.0.path`."""
    *path, last = key.split(".")
    table: Any = raw
    try:
        for name in path:
            table = table[int(name)] if isinstance(table, list) else table.setdefault(name, {})
        table.update({last: value})
    except (AttributeError, ValueError, IndexError):  # of a value or a list in place of a table
        expected = "a setting of a table that there is, such as loop.steps or sources.0.path"
        raise ValueError(f"settings: got {clipped(key, 60)}, expected {expected}") from None
