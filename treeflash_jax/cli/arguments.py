"""Options of commands, made from the fields of dataclasses; the options of models and prompts.

`add_fields` adds an option per field; `option_values` returns their values.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import treeflash_jax as tf
from treeflash_jax.core import sharding
from treeflash_jax.core.checks import bounded, clipped, default_text, field_checks, fit, parse_json, quoted, suggestion
from treeflash_jax.core.clock import slow
from treeflash_jax.core.files import regular
from treeflash_jax.engine import pairs
from treeflash_jax.engine.prompts import Text
from treeflash_jax.engine.settings import REFUSED, groups, settings_class
from treeflash_jax.models.quantized import SCHEMES


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of `tf.load`."""

    verifier: str | None = bounded(
        None,
        f"language model to serve: a name ({', '.join(pairs.VERIFIERS)}), or the folder, GGUF file or Hub id of a Qwen3, "
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
    thinking: bool = bounded(False, "value of `enable_thinking` for the chat template; some templates ignore it")
    template: Mapping[str, Any] | None = bounded(
        None, 'further arguments of the chat template, such as {"reasoning_effort": "high"}', unset="none", unit="json"
    )


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Prompts; all options are repeatable."""

    prompt: Sequence[str] = bounded((), "text to continue as it is, without a chat template", unit="text")
    prompt_file: Sequence[str] = bounded((), "file of text to continue as it is; - is standard input", unit="file")
    chat: Sequence[str] = bounded((), "a user's message, formatted with the chat template", unit="text")
    prompt_ids: Sequence[str] = bounded((), 'token ids, like "3 4 5"', unit="ids")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with positional words between options and one-line errors, which name what was probably meant."""

    def __init__(self, **settings: Any):
        super().__init__(**settings, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        namespace, unknown = super().parse_known_args(args, namespace)
        for word in unknown:
            if word.startswith("-"):
                self.error(f"unrecognized option {word}{self._did_you_mean(word)}")
        if hasattr(namespace, "words"):
            namespace.words, unknown = namespace.words + unknown, []
        return namespace, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            meant = suggestion(value, action.choices)
            known = f"expected one of {', '.join(action.choices)}" + (f"; did you mean {meant}?" if meant else "")
            raise argparse.ArgumentError(action, f"got {quoted(value)}, {known}")

    def _did_you_mean(self, word: str) -> str:
        options = [option for a in self._actions if a.help != argparse.SUPPRESS for option in a.option_strings]
        names = {option.lstrip("-").replace("-", "_"): option for option in options}
        meant = suggestion(word.partition("=")[0].lstrip("-").replace("-", "_"), names)
        return f"; did you mean {names[meant]}?" if meant else ""

    def format_help(self) -> str:
        """Returns the help text; its usage line names only required arguments."""
        words = ["%(prog)s [options]"]
        for action in self._actions:
            if action.required or not action.option_strings:
                word = action.metavar or action.dest
                words += [f"[{word} ...]"] if action.nargs == "*" else [*action.option_strings[:1], word]
        self.usage = " ".join(words)
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Ends the process with one line, without the usage text."""
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
    """Adds an option for every field of a dataclass, with its type, limits, default, choices, unit and help.

    Args:
      cls: dataclass with fields declared by `checks.bounded`.
      names: names of the fields to add, separated by spaces; empty for all. `without` those.
      several: names of fields whose option accepts a list of values.
      basic: true adds only basic fields, false only the others, None both.
      **defaults: defaults that replace those of the fields.
    """
    kinds = get_type_hints(cls)
    for setting in fields(cls):
        is_chosen = basic is None or setting.metadata["basic"] == basic
        if is_chosen and setting.name in (names.split() or kinds) and setting.name not in without.split():
            default = defaults.get(setting.name, setting.default)
            how = _option(setting, kinds[setting.name], field_checks(cls)[setting.name], default)
            if setting.name in several.split():
                how["nargs"] = "+"
            parser.add_argument("--" + setting.name.replace("_", "-"), **how)


def _option(setting: Field, kind: Any, check: Callable[..., Any], default: Any) -> dict[str, Any]:
    """Returns the arguments of `add_argument` for a field; `check` parses and checks its value."""
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else [kind]
    parts = [part for part in parts if part is not NoneType]
    words = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    usual = default_text(setting) if default is setting.default else str(default).strip("[]").replace(",", "")
    text = (setting.metadata["help"] + (f" (default: {usual})" if usual else "")).replace("%", "%%")
    if parts == [bool]:
        return {"action": "store_true", "help": text}
    how = {"help": text} | ({"required": True} if default is MISSING else {"default": default})
    if setting.metadata["choices"] or all(get_origin(part) is Literal for part in parts):
        return how | {"choices": list(setting.metadata["choices"]() if setting.metadata["choices"] else words)}
    unit = setting.metadata["unit"] or "number"
    how["metavar"] = "|".join([unit.upper() if unit.islower() else unit, *words])
    if parts == [Sequence[str]]:
        return how | {"action": "append", "default": list(default)}

    def read(text: str) -> Any:
        try:
            if parts == [Mapping[str, Any]]:
                return check(parse_json(text))
            return check(text.replace(",", " ").split() if parts == [Sequence[int]] else text, from_text=True)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return how | {"type": read}


def option_values(arguments: argparse.Namespace, cls: type) -> dict[str, Any]:
    """Returns the parsed values of the fields of a dataclass."""
    return {setting.name: getattr(arguments, setting.name) for setting in fields(cls) if hasattr(arguments, setting.name)}


def load_model(arguments: argparse.Namespace) -> tf.TreeFlash:
    """Loads the model of the options; prints a line if that is the toy pair by default."""
    if arguments.verifier is None:
        arguments.verifier = pairs.default_verifier()
        if arguments.verifier == "tiny":
            why = f"SmolLM2 is not on this machine ({pairs.GET_SMOLLM2} adds it)"
            print(f"treeflash: loading the toy pair tiny, since {why}", file=sys.stderr)
    given = option_values(arguments, ModelOptions)
    given["mesh"] = tf.make_mesh(**sharding.parse_sizes(given["mesh"])) if given["mesh"] else None
    names = [name for name in (arguments.verifier, arguments.drafter) if name not in (None, pairs.NO_DRAFTER)]
    with slow(f"loading {' and '.join(names)}"):
        return tf.load(**given)


def add_settings(parser: argparse.ArgumentParser, without: str = "") -> Any:
    """Adds the options of the model and of GenerateConfig; returns a group for those of output, after the basic ones."""
    add_fields(parser.add_argument_group("model"), ModelOptions, basic=True)
    add_fields(parser.add_argument_group("settings"), settings_class(), basic=True, without=without)
    output = parser.add_argument_group("output")
    add_fields(parser.add_argument_group("advanced: model"), ModelOptions, basic=False)
    for title, group in groups().items():
        add_fields(parser.add_argument_group(f"advanced: {title}"), group, basic=False, without=without)
    for name in REFUSED:
        parser.add_argument("--" + name.replace("_", "-"), help=argparse.SUPPRESS)
    return output


def add_prompts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts (options may be given several times)")
    group.add_argument(
        "words", nargs="*", metavar="WORDS",
        help="a user's message, formatted with the chat template if the tokenizer has one; - reads it from standard input, "
        "which is also the default if no prompt is given",
    )  # fmt: skip
    add_fields(group, PromptOptions)


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings given by options. Raises ValueError for one in REFUSED."""
    for name, reason in REFUSED.items():
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is not supported: {reason}")
    return option_values(arguments, settings_class())


def parse_prompts(arguments: argparse.Namespace) -> list[Any]:
    """Returns prompts in the order of the help text, as `generate` takes them. Raises ValueError if there are none."""
    words = arguments.words
    if not (words or arguments.prompt or arguments.prompt_file or arguments.chat or arguments.prompt_ids):
        words = [] if sys.stdin is None or sys.stdin.isatty() else ["-"]
    message = " ".join(_read(word) if word == "-" else word for word in words)
    prompts: list[Any] = [message] if message else []
    prompts += map(Text, [*arguments.prompt, *map(_read, arguments.prompt_file)])
    prompts += [[{"role": "user", "content": message}] for message in arguments.chat]
    prompts += map(parse_ids, arguments.prompt_ids)
    if not prompts:
        raise ValueError("got no prompt, expected words, --prompt, --chat, --prompt-file, --prompt-ids or standard input")
    return prompts


def _read(path: str) -> str:
    """Returns the text of a file, or of standard input for "-", without its final line break."""
    if path != "-":
        try:
            return regular(path, streams=True).read_text(encoding="utf-8-sig").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: got byte 0x{error.object[error.start]:02x}, expected text in UTF-8") from None
    with slow("reading a prompt from standard input"):
        return sys.stdin.read().removesuffix("\n")


def parse_ids(text: str) -> list[int]:
    return fit(list[int], text.replace(",", " ").split(), "--prompt-ids", from_text=True)
