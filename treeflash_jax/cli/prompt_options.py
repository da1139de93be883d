"""Prompts of a command: words, options, files of text or chats, and piped text."""

import argparse
import os
import select
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeflash_jax.core.clock import slow
from treeflash_jax.core.error_text import clipped, logger, warn
from treeflash_jax.core.json_files import read_jsonl
from treeflash_jax.core.setting_options import add_options
from treeflash_jax.core.settings import setting
from treeflash_jax.engine.call.prompts import Prompt, Text, parse_ids, read_messages

PIPE_SECONDS = 1.0  # time in which a program must send its first text into a pipe
HEADING = 60  # most characters of a prompt that are shown above its answer
CHATS = ".jsonl"  # file name ending for chats


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Prompts. All options except the system message can be repeated."""

    prompt: Sequence[str] = setting((), "text to continue as it is, without a chat template", unit="text")
    prompt_file: Sequence[str] = setting(
        (),
        f"file of text to continue as it is, or of chats to answer if its name ends in {CHATS}; - is standard input",
        unit="file",
    )
    chat: Sequence[str] = setting((), "a user's message, formatted with the chat template", unit="text")
    prompt_ids: Sequence[str] = setting((), 'token ids, like "3 4 5"', unit="ids")
    system: str | None = setting(None, "system message before users' messages", unit="text")


def add_prompts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts (options may be given several times)")
    group.add_argument(
        "words", nargs="*", metavar="WORDS",
        help="a user's message, formatted with the chat template if the tokenizer has one: an argument with white space is "
        "a message of its own, others are joined. Text piped to the command follows every message after a line break, or "
        "is the message if there is no prompt; - waits for it",
    )  # fmt: skip
    add_options(group, PromptOptions)


def parse_prompts(arguments: argparse.Namespace) -> list[Prompt]:
    """Returns prompts as `generate` takes them, in the order of the help text. Raises ValueError if there are none."""
    messages: list[Any] = read_words(arguments)
    texts = []
    chats = []
    for path in arguments.prompt_file:
        if path.endswith(CHATS):
            chats += read_chats(path)
        else:
            texts.append(_read(path))
    chats += [[{"role": "user", "content": message}] for message in arguments.chat]
    if arguments.system is not None:
        if not messages and not chats:
            raise ValueError("got --system without a user's message, expected words, --chat or a file of chats")
        messages = [add_system([{"role": "user", "content": message}], arguments.system) for message in messages]
    chats = [add_system(chat, arguments.system) for chat in chats]
    prompts = [*messages, *map(Text, [*arguments.prompt, *texts]), *chats, *map(parse_ids, arguments.prompt_ids)]
    if not prompts:
        raise ValueError("got no prompt, expected words, --prompt, --chat, --prompt-file, --prompt-ids or standard input")
    return prompts


def read_words(arguments: argparse.Namespace) -> list[str]:
    """Returns the user's messages among the words of a command, each with the piped text."""
    messages = join_words([word for word in arguments.words if word != "-"])
    has_options = arguments.prompt or arguments.prompt_file or arguments.chat or arguments.prompt_ids
    is_awaited = "-" in arguments.words
    if not messages and not has_options and sys.stdin is not None and not sys.stdin.isatty():
        is_awaited = True
    if not is_awaited and (not messages or "-" in arguments.prompt_file or not has_piped_text()):
        return messages
    piped = _read("-")
    if not piped:
        return messages
    return [f"{message}\n{piped}" for message in messages] or [piped]


def add_system(chat: list[dict[str, str]], text: str | None) -> list[dict[str, str]]:
    """Returns a chat whose system message is replaced by this one; None changes nothing."""
    if text is None:
        return chat
    return [{"role": "system", "content": text}, *(message for message in chat if message["role"] != "system")]


def describe_prompt(prompt: Any) -> str:
    """Returns the start of a prompt in one line: of its last message, its text or its token ids."""
    if not isinstance(prompt, str):
        prompt = prompt[-1]["content"] if isinstance(prompt[-1], dict) else " ".join(map(str, prompt))
    return clipped(prompt, HEADING)


def join_words(words: Sequence[str]) -> list[str]:
    """Returns the messages in the words of a command. A word with white space is a message; other words are joined."""
    messages: list[str] = []
    is_open = False  # whether the next word is added to the last message
    for word in words:
        is_message = len(word.split()) > 1
        if is_open and not is_message:
            messages[-1] += f" {word}"
        else:
            messages.append(word)
        is_open = not is_message
    return messages


def has_piped_text() -> bool:
    """Returns whether standard input is a file that was not read yet, or a pipe that has text or has ended.

    Loops and scripts that read lines from a file have already read part of it. A pipe without text is ignored, because the
    process that started this one may have forgotten to close it.
    """
    if sys.stdin is None:
        return False
    with suppress(OSError, ValueError):  # no descriptor, as in notebooks, or the system cannot wait for it
        descriptor = sys.stdin.fileno()
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return os.lseek(descriptor, 0, os.SEEK_CUR) == 0
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            if select.select([descriptor], [], [], PIPE_SECONDS)[0]:
                return True
            logger.warning("standard input is open and silent: not read; the word - waits for its text")
    return False


def read_chats(path: str) -> list[list[dict[str, str]]]:
    """Returns the chats of a file with a JSON object per line, each without the answer to the user's last message.

    Of {"turns": [text, ...]}, only the first turn is kept, because later turns need the answers in between.
    """
    chats = []
    for number, record in read_jsonl(path):
        try:
            messages = read_messages(record)
            if len(messages) > 1 and record.get("turns") and all(message["role"] == "user" for message in messages):
                warn(f"{path}: only the first of several turns is answered; later ones need the answers in between")
                del messages[1:]
            if messages[-1]["role"] == "assistant":
                messages.pop()
            if not messages:
                raise ValueError("got an answer alone, expected a user's message before it")
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
        chats.append(messages)
    return chats


def _read(path: str) -> str:
    """Returns the text of a file (of standard input for "-") without its final line break."""
    if path != "-":
        try:
            return Path(path).read_text(encoding="utf-8-sig").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: got byte 0x{error.object[error.start]:02x}, expected text in UTF-8") from None
    with slow("reading a prompt from standard input"):
        return sys.stdin.read().removesuffix("\n")
