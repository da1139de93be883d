"""Options of commands, made from the fields of dataclasses, and what several commands share: the model and the prompts.

`add_fields` makes an option of every field, with the type, default, choices, unit and help it was declared with;
`values_of` reads them back.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from treeflash_jax.checks import bounded, clipped, default_of, quoted
from treeflash_jax.clock import slow
from treeflash_jax.files import regular
from treeflash_jax.pairs import PAIRS
from treeflash_jax.prompts import Text
from treeflash_jax.quantized import SCHEMES
from treeflash_jax.suggest import suggestion


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model to load, and how it is loaded."""

    verifier: str | None = bounded(
        None,
        f"language model to serve: a name ({', '.join(PAIRS)}), or the folder, GGUF file or Hub id of a Qwen3, "
        "Qwen2 or Llama model",
        unset="smollm2 if its weights are on this machine, otherwise tiny",
        unit="model",
        basic=True,
    )
    drafter: str | None = bounded(
        None,
        "a name, folder or Hub id of a DFlash, TreeFlash or EAGLE-3 drafter, or of a small language model; 'ngram'; or "
        "'none' to decode one token at a time",
        unset="the drafter that ships for the named verifier, otherwise none",
        unit="model",
        basic=True,
    )
    revision: str | None = bounded(None, "Hub revision of the verifier", unit="rev")
    drafter_revision: str | None = bounded(None, "Hub revision of the drafter", unit="rev")
    steering: str | None = bounded(
        None,
        "folder of steering weights for a language model that drafts (SD squared)",
        unset="those in the drafter's folder, if any",
        unit="folder",
    )
    local_files_only: bool = bounded(False, "use the local cache of the Hub only")
    dtype: Literal["float32", "bfloat16", "float64"] | None = bounded(
        None,
        "dtype of weights, caches and activations",
        unset="bfloat16, but float32 on a CPU without bfloat16 instructions",
        basic=True,
    )
    quantize: str | None = bounded(
        None, "quantize the verifier's matrices while loading", unset="none", choices=lambda: tuple(SCHEMES)
    )
    mesh: str | None = bounded(
        None,
        "use D x M devices: split the batch D ways, weights and vocabulary M ways; with DxMxE, experts E ways",
        unset="one device",
        unit="DxM",
    )
    budget: str | None = bounded(
        None, "calibration file for --nodes auto", unset="the path treeflash calibrate writes to", unit="file"
    )


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Prompts; every option may be given several times."""

    prompt: Sequence[str] = bounded((), "text to continue as it is, without a chat template", unit="text")
    prompt_file: Sequence[str] = bounded((), "file of text to continue as it is; - is standard input", unit="file")
    chat: Sequence[str] = bounded((), "a user's message, formatted with the chat template", unit="text")
    prompt_ids: Sequence[str] = bounded((), 'token ids, like "3 4 5"', unit="ids")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser for commands: bare words may stand anywhere, and every mistake is one line."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        namespace, unknown = super().parse_known_args(args, namespace)
        for word in unknown:
            if word.startswith("-"):
                self.error(f"unrecognized option {word}{self._did_you_mean(word)}")
        if hasattr(namespace, "words"):
            namespace.words, unknown = namespace.words + unknown, []
        return namespace, unknown

    def _did_you_mean(self, word: str) -> str:
        names = {
            option.lstrip("-").replace("-", "_"): option
            for action in self._actions
            for option in action.option_strings
            if action.help != argparse.SUPPRESS
        }
        meant = suggestion(word.partition("=")[0].lstrip("-").replace("-", "_"), names)
        return f"; did you mean {names[meant]}?" if meant else ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Names the choice that was probably meant instead of one that there is not."""
        choices = [] if action.choices is None else [str(choice) for choice in action.choices]
        if choices and value not in choices:
            meant = suggestion(str(value), choices)
            hint = f"; did you mean {meant}?" if meant else f", expected one of {', '.join(choices)}"
            raise argparse.ArgumentError(action, f"got {quoted(value)}{hint}")

    def format_help(self) -> str:
        """The help text, whose usage names only what must be given."""
        if self.usage is None:
            named = [one for one in self._actions if one.option_strings and one.required]
            places = [one for one in self._actions if not one.option_strings]
            needed = [f"{one.option_strings[0]} {one.metavar or one.dest.upper()}" for one in named]
            needed += [f"[{one.metavar} ...]" if one.nargs == "*" else one.metavar or one.dest for one in places]
            self.usage = " ".join(["%(prog)s [options]", *needed])
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """One line, without the usage text."""
        self.exit(2, f"{self.prog}: error: {clipped(message, 240)} (see {self.prog} --help)\n")


def add_fields(
    parser: Any,
    cls: type,
    names: str = "",
    *,
    without: str = "",
    several: str = "",
    basic: bool | None = None,
    **defaults: Any,
) -> None:
    """An option for every field of a dataclass.

    Args:
      parser: or a group of options.
      cls: the dataclass; its fields are declared with `checks.bounded`.
      names: of the fields to take, separated by spaces; all where it is empty.
      without: names of fields to leave out.
      several: names of fields that take a list of values here.
      basic: whether to take only fields declared as basic, or only the others; None: both.
      **defaults: other than the fields' own.
    """
    kinds = get_type_hints(cls)
    for one in fields(cls):
        is_chosen = basic is None or one.metadata["basic"] == basic
        if is_chosen and one.name in (names.split() or kinds) and one.name not in without.split():
            default = defaults.get(one.name, one.default)
            _add_option(parser, one, kinds[one.name], default, several=one.name in several.split())
            if one.name == "builder":
                parser.add_argument("--method", help=argparse.SUPPRESS)  # what --builder was called in the first edition


def _add_option(parser: Any, one: Field, kind: Any, default: Any, *, several: bool) -> None:
    about, bounds, atoms = one.metadata, one.metadata["bounds"], list(_atoms(kind))
    option, usual = "--" + one.name.replace("_", "-"), _in_words(one, default)
    text = (about["help"] + (f" (default: {usual})" if usual else "")).replace("%", "%%")
    if bool in atoms:
        parser.add_argument(option, action="store_true", help=text)
        return
    literals = [atom for atom in atoms if not isinstance(atom, type)]
    choices = bounds.choices() if bounds.choices else literals if len(literals) == len(atoms) else None
    item = _item(kind)
    if choices:
        how: dict[str, Any] = {"choices": choices}
    else:
        unit = about["unit"] or "number"
        how = {"metavar": "|".join([unit.upper() if unit.islower() else unit, *literals])}
        how["type"] = str if item else _number_or(literals) if literals else atoms[0]
    if several:
        how["nargs"] = "+"
    elif item is str:
        how["action"], default = "append", list(default)
    how |= {"required": True} if default is MISSING else {"default": default}
    parser.add_argument(option, help=text, **how)


def _in_words(one: Field, default: Any) -> str:
    if isinstance(default, list):
        return " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in default)
    return default_of(one) if default is one.default else str(default)


def _atoms(kind: Any) -> Iterator[Any]:
    """Scalar types and literals that a type hint is made of; not None."""
    if get_origin(kind) is Literal or not get_args(kind):
        yield from (one for one in get_args(kind) or (kind,) if one is not NoneType)
    else:
        for part in get_args(kind):
            yield from _atoms(part)


def _item(kind: Any) -> type | None:
    """The type of the items of `Sequence[item]` or `Sequence[item] | None`; None where a single value is taken."""
    parts = [
        part for part in (get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)) if part is not NoneType
    ]
    return get_args(parts[0])[0] if len(parts) == 1 and get_origin(parts[0]) is Sequence else None


def _number_or(words: Sequence[str]) -> Callable[[str], int | str]:
    def read(text: str) -> int | str:
        if text not in words and not (text.lstrip("-").isdecimal() and len(text) < 20):
            raise argparse.ArgumentTypeError(f"got {quoted(text)}, expected a whole number or {' or '.join(words)}")
        return text if text in words else int(text)

    return read


def values_of(arguments: argparse.Namespace, cls: type) -> dict[str, Any]:
    """Fields of a dataclass as the options give them, those that are options; `method` too where it was given.

    Raises:
      ValueError: ids that are no numbers.
    """
    kinds = get_type_hints(cls)
    found = {name: getattr(arguments, name) for name in kinds if hasattr(arguments, name)}
    for name, value in found.items():
        if _item(kinds[name]) is int and value is not None:
            found[name] = ids_of(value, "--" + name.replace("_", "-"))
    method = getattr(arguments, "method", None)
    return found | ({"method": method} if method and "builder" in found else {})


def add_prompts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts (options may be given several times)")
    group.add_argument(
        "words", nargs="*", metavar="WORDS",
        help="a user's message, formatted with the chat template if the tokenizer has one; - reads it from standard input, "
        "which is also the default if no prompt is given",
    )  # fmt: skip
    add_fields(group, PromptOptions)


def prompts_of(arguments: argparse.Namespace) -> list[Any]:
    """Prompts in the order of the help text, as `generate` takes them.

    Raises:
      ValueError: no prompt.
    """
    words = arguments.words
    if not (words or arguments.prompt or arguments.prompt_file or arguments.chat or arguments.prompt_ids):
        words = [] if sys.stdin is None or sys.stdin.isatty() else ["-"]
    said = " ".join(_read(word) if word == "-" else word for word in words)
    prompts: list[Any] = [said] if said else []
    prompts += map(Text, [*arguments.prompt, *map(_read, arguments.prompt_file)])
    prompts += [[{"role": "user", "content": message}] for message in arguments.chat]
    prompts += [ids_of(text, "--prompt-ids") for text in arguments.prompt_ids]
    if not prompts:
        raise ValueError("got no prompt, expected words, --prompt, --chat, --prompt-file, --prompt-ids or standard input")
    return prompts


def _read(path: str) -> str:
    """The text of a file, or of standard input for "-", without the line break at its end."""
    if path != "-":
        return regular(path, streams=True).read_text(encoding="utf-8").removesuffix("\n")
    with slow("reading a prompt from standard input"):
        return sys.stdin.read().removesuffix("\n")


def ids_of(text: str, option: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"got {option} {quoted(text)}, expected whole numbers like '3 4 5'") from None
