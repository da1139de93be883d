"""Settings of a stage: one frozen dataclass, read from a TOML file, changed by dotted overrides on the command line.

    python -m train.head configs/tiny/head.toml run=runs/head optimizer.learning_rate=1e-3

Every key must be known and every value of its type: a misspelt key is an error, never ignored. What a run resolved to is
written beside its checkpoints (`save`), so that a run directory tells how it came to be.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import json
import logging
import os
import re
import sys
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, TypeVar, Union

from etils import epath

from treeflash_jax import ahead, files
from treeflash_jax.checks import bounded, clipped, fit_fields, quoted
from treeflash_jax.loading import keep_programs

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
    """Length of a run and what it leaves behind. A step trains on `batch` rows, in `accumulate` parts.

    Attributes:
      steps: optimiser steps; 0 derives them from `epochs`.
      epochs: passes over the data, where `steps` is 0.
      batch: rows of a step, over all devices.
      accumulate: parts whose gradients are summed before an update.
      seed: random seed of initial weights, order of the data, and anchors.
      log_every: steps between log lines; 0 logs the last step only.
      save_every: steps between checkpoints; 0 saves the last step only.
      evaluate_every: steps between evaluations; 0 evaluates the last step only.
      keep: number of newest checkpoints kept; the best by `best` is kept too.
      best: metric of an evaluation by which a checkpoint is best; empty: only the newest are kept.
      best_mode: "min" if the lowest value of `best` is best, "max" if the highest is.
      tensorboard: also writes TensorBoard files (needs the `tensorboard` extra).
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
    best: str = bounded("held_out/loss", nonempty=False)
    best_mode: Literal["min", "max"] = "min"
    tensorboard: bool = False


def parse(cls: type[T], doc: str | None, argv: Sequence[str] | None = None) -> T:
    """The settings a command line asks for: `[FILE.toml] [key.sub=value ...]`.

    Args:
      cls: the stage's dataclass.
      doc: shown by --help, before the list of settings.
      argv: arguments; those of the process by default.

    Raises:
      SystemExit: after one line on stderr, where a file, key or value is not understood.
    """
    parser = argparse.ArgumentParser(
        description=f"{doc}\nSettings:\n{describe(cls)}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", metavar="FILE.toml | key=value", help="a TOML file, then overrides")
    words = parser.parse_args(argv).settings
    files = [word for word in words if "=" not in word]
    try:
        if len(files) > 1:
            raise ValueError(f"got {len(files)} files ({', '.join(files)}), expected at most one TOML file")
        return load(cls, files[0] if files else None, [word for word in words if "=" in word])
    except ValueError as error:
        sys.exit(f"error: {error}")


def run(main: Callable[[Any], None], cls: type, doc: str | None, argv: Sequence[str] | None = None) -> None:
    """Runs `main(settings)` and keeps what it compiles on disk; bad input ends the process with one line on stderr."""
    config = parse(cls, doc, argv)
    keep_programs(by_jax=True)
    # Looks up sys.stderr, which a bar redirects; handlers of imported packages write into the bar.
    logging.basicConfig(format="%(message)s", handlers=[logging.lastResort], force=True)
    try:
        main(config)
    except SystemExit as ended:
        if isinstance(ended.code, int):
            ahead.leave(ended.code)  # an evaluation that a signal cut short still runs
        raise
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def load(cls: type[T], path: str | os.PathLike | None, overrides: Sequence[str] = ()) -> T:
    """Settings from a TOML file and overrides (`a.b=value`; values are TOML, bare words are strings).

    Raises:
      ValueError: an unreadable file, an unknown or missing key, a value of another type or outside its bounds.
    """
    raw = read(path, overrides)
    return _build(cls, raw, str(path) if path is not None and not overrides else "settings", "")


def read(path: str | os.PathLike | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What a TOML file and overrides say, whatever the stage.

    Raises:
      ValueError: an unreadable file, or an override of what is no table.
    """
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
        _assign(raw, key.strip(), _value(text.strip()))
    return raw


def replaced(config: T, raw: dict[str, Any]) -> T:
    """These settings, except for those that nested dicts name.

    Raises:
      ValueError: an unknown key, or a value of another type.
    """
    return _build(type(config), _merged(to_dict(config), raw), "settings", "")


def changes(config: Any, path: str | os.PathLike, free: Collection[str]) -> dict[str, tuple[Any, Any]]:
    """Where settings differ from those saved at `path`: {dotted name: (then, now)}, None where there is no such setting.

    Args:
      config: settings of now; what a file of older code does not name had its default.
      path: where `save` wrote those of then.
      free: settings and tables that may differ.

    Raises:
      ValueError: no TOML there.
    """
    try:
        then = to_dict(load(type(config), path))
    except ValueError:
        then = read(path)  # of another stage
    return {
        key: pair
        for key, pair in _differences(then, to_dict(config)).items()
        if key not in free and key.split(".")[0] not in free
    }


def to_dict(config: Any) -> dict[str, Any]:
    """Nested dicts of plain values, as JSON holds them."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def save(config: Any, path: Any) -> None:
    """Writes the settings as TOML that `load` reads back to the same."""
    path.write_bytes(dump(to_dict(config)).encode())


def dump(raw: dict[str, Any], prefix: str = "") -> str:
    """TOML of nested dicts; None, which TOML cannot say, is left out."""
    plain = {k: v for k, v in raw.items() if v is not None and not _is_table(v)}
    lines = [f"{key} = {_toml(value)}" for key, value in plain.items()]
    for key, value in raw.items():
        if isinstance(value, dict):
            lines += ["", f"[{prefix}{key}]", dump(value, f"{prefix}{key}.").rstrip()]
        elif _is_table(value):
            for item in value:
                lines += ["", f"[[{prefix}{key}]]", dump(item, f"{prefix}{key}.").rstrip()]
    return "\n".join(lines).strip("\n") + "\n"


def describe(cls: type, prefix: str = "") -> str:
    """Dotted name, type and default of every setting, and its description in the docstring below; tables last."""
    plain, tables, meanings = [], [], _meanings(cls)
    for field, kind in _fields(cls):
        table = _table(kind)
        if table is not None:
            tables.append(describe(table, f"{prefix}{field.name}{'[].' if _is_list(kind) else '.'}"))
        else:
            value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            default = "(required)" if _required(field) else f"= {_default(value)}"
            plain.append(f"  {prefix}{field.name}: {_name(kind)} {default}")
            plain += textwrap.wrap(meanings.get(field.name, ""), 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(plain + tables)


def _meanings(cls: type) -> dict[str, str]:
    """Descriptions of fields, from "Attributes:" in the docstrings of a dataclass and of its bases."""
    meanings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        text = inspect.cleandoc(base.__dict__.get("__doc__") or "").partition("Attributes:\n")[2]
        for names, meaning in re.findall(r"^  (\w[\w, ]*): (.*(?:\n {4}.*)*)", text, re.MULTILINE):
            meanings |= dict.fromkeys(names.split(", "), " ".join(meaning.split()))
    return meanings


def _default(value: Any) -> str:
    return "none" if value is None or value == "" else _toml(list(value) if isinstance(value, tuple) else value)


def _build(cls: type[T], raw: Any, where: str, prefix: str) -> T:
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: got {prefix.rstrip('.')} = {quoted(raw)}, expected a table of settings")
    fields = {field.name: (field, kind) for field, kind in _fields(cls)}
    for key in raw:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = (
                f"did you mean {prefix}{near[0]}?"
                if near
                else f"expected one of {clipped(', '.join(prefix + n for n in fields), 160)}"
            )
            raise ValueError(f"{where}: got unknown setting {clipped(prefix + key, 60)}; {hint}")
    values = {}
    for name, (field, kind) in fields.items():
        if name in raw:
            values[name] = _convert(kind, raw[name], where, prefix + name)
        elif _required(field):
            table = _table(kind)
            if table is None or _is_list(kind):
                raise ValueError(f"{where}: got no {prefix}{name}, expected a value ({_name(kind)})")
            values[name] = _build(table, {}, where, f"{prefix}{name}.")
    try:
        return cls(**fit_fields(cls, values, prefix))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _convert(kind: Any, value: Any, where: str, key: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, where, f"{key}.")
    if origin in (Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not type(None)]
        return _convert(inner[0], value, where, key)
    if origin is tuple:
        if isinstance(value, list | tuple):
            return tuple(_convert(arguments[0], item, where, key) for item in value)
    elif origin is dict:
        if isinstance(value, dict):
            return value
    elif origin is Literal:
        if value in arguments:
            return value
    elif kind is float:
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
            return float(value)
    elif kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)  # a bare number on the command line, where a name was wanted
    elif type(value) is kind:
        return value
    raise ValueError(f"{where}: got {key} = {quoted(value)}, expected {_name(kind)}")


def _name(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if origin is tuple:
        return f"a list ({_name(arguments[0])})"
    if origin in (Union, types.UnionType):
        return _name(next(argument for argument in arguments if argument is not type(None)))
    return {"str": "a string", "int": "a whole number", "float": "a number", "bool": "true or false"}.get(
        kind.__name__, "a table"
    )


def _fields(cls: type) -> list[tuple[dataclasses.Field, Any]]:
    kinds = typing.get_type_hints(cls)
    return [(field, kinds[field.name]) for field in dataclasses.fields(cls)]


def _required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _table(kind: Any) -> type | None:
    """The dataclass behind a field's type, also inside a tuple; None for plain values."""
    inner = typing.get_args(kind)[0] if _is_list(kind) else kind
    return inner if dataclasses.is_dataclass(inner) else None


def _is_list(kind: Any) -> bool:
    return typing.get_origin(kind) is tuple


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def _assign(raw: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for depth, name in enumerate(path):
        raw = raw.setdefault(name, {})
        if isinstance(raw, list):  # sources.0.path
            index, rest = path[depth + 1] if depth + 1 < len(path) else last, [*path[depth + 2 :], last]
            if not index.isdigit() or int(index) >= len(raw) or depth + 1 >= len(path):
                raise ValueError(f"settings: got {key}, expected {name}.0 to {name}.{len(raw) - 1} and a setting of it")
            return _assign(raw[int(index)], ".".join(rest), value)
        if not isinstance(raw, dict):
            raise ValueError(f"settings: got {key}, but {'.'.join(path[: depth + 1])} is a value, not a table")
    raw[last] = value


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Tables merged key by key; None, which no file can say, is left out."""
    merged = {key: value for key, value in old.items() if value is not None}
    for key, value in new.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, str):  # TOML knows JSON's escapes but no surrogate pairs, and wants DEL escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _differences(old: Any, new: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        found = {}
        for key in {**old, **new}:
            found |= _differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key)
        return found
    return {} if old == new else {prefix: (old, new)}
