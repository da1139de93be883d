"""Parsing of command lines, and the options of models and settings."""

import argparse
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from treeflash_jax.core.checks import hint, suggestion
from treeflash_jax.core.error_text import clipped, logger, quoted
from treeflash_jax.core.json_files import parse_json
from treeflash_jax.core.setting_options import add_options
from treeflash_jax.core.settings import default_text, field_names
from treeflash_jax.engine.settings.generate_config import REFUSED, SECTIONS, GenerateConfig
from treeflash_jax.engine.settings.model_options import ModelOptions

ADVANCED = "advanced:"  # titles of option groups that only --help-all shows begin with this


class HelpAll(argparse.Action):
    """Prints the help text with the groups of advanced options, which `Parser` otherwise leaves out."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.shows_advanced = True
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that allows positional words between options. One-line errors suggest what was probably meant."""

    shows_advanced = False
    refused: Mapping[str, str] = {}  # reasons for refusing options, by name of the option

    def __init__(self, **keywords: Any):
        super().__init__(**keywords, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        namespace, unknown = super().parse_known_args(args, namespace)
        end = unknown.index("--") if "--" in unknown else len(unknown)  # only words follow "--"
        for word in unknown[:end]:
            if self._parse_optional(word):
                name = word.partition("=")[0].lstrip("-").replace("-", "_")
                if name in self.refused:
                    self.error(f"{word.partition('=')[0]} {self.refused[name]}")
                self.error(f"unrecognized option {word}{self._did_you_mean(name)}")
        if hasattr(namespace, "words"):
            namespace.words = namespace.words + unknown[:end] + unknown[end + 1 :]
            unknown = []
        return namespace, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            expected = f"one of {', '.join(action.choices)}{hint(value, action.choices)}"
            raise argparse.ArgumentError(action, f"got {quoted(value)}, expected {expected}")

    def _did_you_mean(self, name: str) -> str:
        options: dict[str, str] = {}  # by name
        for action in self._actions:
            if action.help != argparse.SUPPRESS:
                options |= {option.lstrip("-").replace("-", "_"): option for option in action.option_strings}
        meant = suggestion(name, options)
        return f"; did you mean {options[meant]}?" if meant else ""

    def format_help(self) -> str:
        """Returns the help text. Its usage line contains only required arguments."""
        if not self.shows_advanced:
            self._action_groups = [group for group in self._action_groups if not (group.title or "").startswith(ADVANCED)]
        words = ["%(prog)s [options]"]
        for action in self._actions:
            if action.required or not action.option_strings:
                word = action.metavar or action.dest
                words += [f"[{word} ...]"] if action.nargs == "*" else [*action.option_strings[:1], word]
        self.usage = " ".join(words)
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Ends the process with a one-line error, without the usage text."""
        self.exit(2, f"{self.prog}: error: {clipped(message, 240)} (see {self.prog} --help)\n")


def add_settings(parser: Parser, without: Collection[str] = ()) -> Any:
    """Adds the options of the model and of GenerateConfig. Returns a group for output options, listed after the basic ones.

    Parsed arguments contain only options that were given.
    """

    def add(title: str, cls: type, chosen: list[str]) -> Any:
        chosen = [name for name in chosen if name not in (*without, "processor", "schema")]  # a function; added below
        group = parser.add_argument_group(title)
        add_options(group, cls, chosen, **dict.fromkeys(chosen, argparse.SUPPRESS))
        return group

    add("model", ModelOptions, field_names(ModelOptions, basic=True))
    add("settings", GenerateConfig, field_names(GenerateConfig, basic=True))
    output = parser.add_argument_group("output")
    parser.add_argument("--help-all", action=HelpAll, nargs=0, help="show this help message with the advanced options")
    add(f"{ADVANCED} model", ModelOptions, field_names(ModelOptions, basic=False))
    for section, title in SECTIONS.items():
        group = add(f"{ADVANCED} {title}", GenerateConfig, field_names(GenerateConfig, section, basic=False))
        if section == "sampling":
            field = GenerateConfig.__dataclass_fields__["schema"]
            help = f"{field.metadata['help']} (default: {default_text(field)}), here a file or JSON text"
            group.add_argument("--schema", type=_schema_option, metavar="FILE|JSON", default=argparse.SUPPRESS, help=help)
    parser.refused = REFUSED
    return output


def _schema_option(text: str) -> str:
    try:
        return read_schema(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def read_schema(text: str) -> str:
    """Returns the JSON text of a schema that is given as text or as a file name. Raises ValueError for any other text."""
    is_text = text.lstrip().startswith("{")
    try:
        schema = text if is_text else Path(text).read_text(encoding="utf-8-sig")
        parse_json(schema)
    except (OSError, ValueError) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", None) or error
        raise ValueError(f"got schema {quoted(text)} ({reason}), expected a JSON file or JSON text") from None
    return schema


def note_single_choice(choices: Sequence[str]) -> None:
    """Logs how to give several choices if the only choice looks like a list."""
    if len(choices) == 1 and "," in choices[0]:
        several = 'several are --choices yes --choices no, in a chat /set choices ["yes", "no"]'
        logger.warning("choices %s is one choice; %s", quoted(choices[0]), several)
