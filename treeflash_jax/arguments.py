"""What the commands' arguments share: a parser that answers mistakes in one line, and the options that give prompts."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from treeflash_jax.checks import clipped, quoted
from treeflash_jax.clock import slow
from treeflash_jax.files import regular
from treeflash_jax.suggest import suggestion


class Words(str):
    """Text that becomes a user's message where the tokenizer has a chat template, and is taken as it is elsewhere."""


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

    def error(self, message: str) -> NoReturn:
        """One line, without the usage text."""
        self.exit(2, f"{self.prog}: error: {clipped(message, 240)} (see {self.prog} --help)\n")


def add_method(parser: Any) -> None:
    """`--method` of the first edition: it still works, and is no longer shown."""
    parser.add_argument("--method", help=argparse.SUPPRESS)


def add_prompts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts (options may be given several times)")
    group.add_argument(
        "words", nargs="*", metavar="WORDS",
        help="a user's message, formatted with the chat template if the tokenizer has one; - reads it from standard input, "
        "which is also the default if no prompt is given",
    )  # fmt: skip
    group.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="text to continue, without a chat template"
    )
    group.add_argument(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="file of text to continue, without a chat template; - is standard input",
    )
    group.add_argument(
        "--chat", action="append", default=[], metavar="TEXT", help="a user's message, formatted with the chat template"
    )
    group.add_argument("--prompt-ids", action="append", default=[], metavar="IDS", help='token ids, like "3 4 5"')


def prompts_of(arguments: argparse.Namespace) -> list[Any]:
    """Prompts in the order of the help text; bare words are `Words`, which `spoken` makes messages of.

    Raises:
      ValueError: no prompt.
    """
    words = arguments.words
    if not (words or arguments.prompt or arguments.prompt_file or arguments.chat or arguments.prompt_ids):
        words = [] if sys.stdin is None or sys.stdin.isatty() else ["-"]
    said = " ".join(_read(word) if word == "-" else word for word in words)
    prompts: list[Any] = [Words(said)] if said else []
    prompts += [*arguments.prompt, *map(_read, arguments.prompt_file)]
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


def spoken(model: Any, prompts: list[Any]) -> list[Any]:
    """Prompts with bare words as messages, where the model knows how a chat is written."""
    if model.tokenizer is None or not model.tokenizer.has_chat_template:
        return prompts
    return [[{"role": "user", "content": str(p)}] if isinstance(p, Words) else p for p in prompts]


def ids_of(text: str, option: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"got {option} {quoted(text)}, expected whole numbers like '3 4 5'") from None
