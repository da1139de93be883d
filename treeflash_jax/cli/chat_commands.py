"""State of a conversation, and the commands that show or change it, such as /set temperature 0.7."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from treeflash_jax.cli.arguments import note_single_choice, read_schema
from treeflash_jax.cli.prompt_options import CHATS, add_system
from treeflash_jax.core import files
from treeflash_jax.core.checks import NoRoom, expect, hint
from treeflash_jax.core.error_text import quoted
from treeflash_jax.core.json_files import parse_json
from treeflash_jax.core.settings import coerce_field, field_names
from treeflash_jax.engine.answers.results import Result
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.schedule.session import Session
from treeflash_jax.engine.settings.generate_config import LIST_SETTINGS, REFUSED, RETURNED, GenerateConfig

COMMAND = re.compile(r"(/\w+)(?:\s+(.*))?", flags=re.DOTALL)  # does not match /usr/bin or // in pasted text
QUIT = ("/quit", "/exit")  # turns that end a conversation
# Name and value, with white space or one "=" between them; a value may begin with "==".
SETTING = re.compile(r"([^\s=]*)(?:\s*=(?!=)\s*|\s+)?(.*)", flags=re.DOTALL)
HELLO = {"role": "user", "content": "Hello"}
LEAST_ROOM = 128  # context and memory must have room for this number of answer tokens
# Settings that have no use here: a conversation has one answer at a time, and shows only text.
NOT_IN_CHAT = ("samples", "batch_size", *RETURNED)
SETTINGS = [name for name in field_names(GenerateConfig) if name not in (*NOT_IN_CHAT, "processor")]


@dataclass(kw_only=True)
class Conversation:
    """A conversation with a model.

    Attributes:
      settings: settings of `generate` that differ from their defaults. Without `max_new_tokens`, an answer may fill the
        context, or the memory.
      system: system message; None: no system message.
      messages: messages of the user and the model.
      forgotten: number of messages, the oldest ones, that the model no longer reads.
      last: result of the last finished answer; None before the first.
      session: caches of the conversation.
    """

    model: TreeFlash
    console: Console
    settings: dict[str, Any]
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    forgotten: int = 0
    last: Result | None = None
    session: Session = field(default_factory=Session)

    @property
    def prompt(self) -> list[dict[str, str]]:
        """The messages that the model reads, with the system message before them."""
        return add_system(self.messages[self.forgotten :], self.system)

    def validate(self, settings: dict[str, Any], system: str | None) -> None:
        """Raises ValueError for settings or a system message with which the model cannot answer. Computes nothing."""
        for name, value in settings.items():
            expect(name in LIST_SETTINGS or not isinstance(value, tuple), name, value, "one value, for all answers")
        settings = {"max_new_tokens": settings.get("min_new_tokens") or 1} | settings
        self.model.prepare(add_system([HELLO], system), for_session=True, **settings)

    def find_room(self) -> int:
        """Returns `max_new_tokens`, or the number of tokens left in the context; fewer if their caches do not fit memory.

        Raises NoRoom if context or memory has no room, also for `min_new_tokens`.
        """
        limit, least = self.settings.get("max_new_tokens"), self.settings.get("min_new_tokens") or 1
        room = limit or max(least, self.model.verifier.max_positions - len(self.model.encode(self.prompt)))
        while True:
            try:
                self.model.prepare(self.prompt, for_session=True, **self.settings | {"max_new_tokens": room})
                return room
            except NoRoom:
                if limit or room <= max(least, LEAST_ROOM):
                    raise
            room = max(least, room // 2)

    def make_room(self) -> int:
        """Drops the oldest turns until the next answer has room. Returns the number of its tokens, as `find_room` does.

        Raises NoRoom if there is no room for an answer even to the last message alone.
        """
        before = self.forgotten
        while True:
            is_alone = self.forgotten == len(self.messages) - 1
            try:
                room = self.find_room()
                if room >= LEAST_ROOM or is_alone or self.settings.get("max_new_tokens"):
                    break
            except NoRoom:
                if is_alone:
                    raise
            self.forgotten += 2  # one message and its answer
        if self.forgotten > before:
            text = f"no room for the whole conversation: its first {self.forgotten} messages are no longer read"
            self.console.print(f"[dim]{text}; /reset starts a new one[/dim]")
        return room

    def change_system(self, text: str) -> None:
        system = text or None
        self.validate(self.settings, system)
        self.system = system
        self.console.print("the system message is set" if system else "no system message")

    def change_setting(self, text: str) -> None:
        name, value = SETTING.fullmatch(text).groups()
        name = name.lstrip("-").replace("-", "_")
        expect(name != "" or not text, "/set", text, "/set NAME VALUE")
        settings = dict(self.settings)
        if name and name not in SETTINGS:
            reason = REFUSED.get(name, f"is no setting of a conversation{hint(name, SETTINGS)}")
            raise ValueError(f"{name} {reason}")
        if name:
            settings.pop(name, None)
        if value:
            settings[name] = parse_value(name, value)
        self.validate(settings, self.system)
        self.settings = settings
        lines = [f"{name} {value}" for name, value in settings.items()]
        self.console.print("\n".join(lines) or "all settings have their defaults", markup=False)

    def save(self, path: str) -> None:
        expect(path.endswith(CHATS), "file", path, f"FILE{CHATS}, which --prompt-file and training read")
        if not self.messages:
            raise ValueError("got no messages to save, expected a conversation with an answer")
        files.check_output(path)
        expect(not files.local(path).exists(), "file", path, "one that does not exist")
        messages = add_system(self.messages, self.system)
        files.write(path, json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
        self.console.print(f"wrote {path}", markup=False)

    def draw_tree(self, _: str) -> None:
        """Draws a draft tree of the last answer, from the round that accepted most; prints why if there is none."""
        if self.last is None:
            return self.console.print("no draft tree yet: no answer was finished")
        try:
            self.console.print(str(self.last.tree()), markup=False)
        except ValueError as error:
            self.console.print(f"no draft tree: {error}", markup=False)

    def reset(self, _: str) -> None:
        self.messages, self.forgotten, self.last = [], 0, None

    def show_help(self, _: str) -> None:
        for name, (argument, description, _) in COMMANDS.items():
            self.console.print(f"{f'{name} {argument}':<18}{description}", markup=False)
        self.console.print(f"{QUIT[0]:<18}leaves, as do {QUIT[1]} and Ctrl-D; Ctrl-C ends an answer", markup=False)


# By name: the argument, a line of help, and the function to run.
COMMANDS: dict[str, tuple[str, str, Callable[[Conversation, str], None]]] = {
    "/system": ("TEXT", "sets the system message; without TEXT, removes it", Conversation.change_system),
    "/set": ("NAME VALUE", "sets a setting of generate; /set NAME: its default; /set: list", Conversation.change_setting),
    "/save": ("FILE.jsonl", "writes the messages, which --prompt-file and training read", Conversation.save),
    "/tree": ("", "draws the round of the last answer that accepted most", Conversation.draw_tree),
    "/reset": ("", "forgets the messages, keeps settings and system message", Conversation.reset),
    "/help": ("", "lists the commands; the option --help-all lists the settings", Conversation.show_help),
}


def parse_value(name: str, text: str) -> Any:
    """Parses the value of a setting like its option. Values of settings other than `pattern` may also be JSON."""
    value: Any = text
    if name == "schema":
        value = read_schema(text)
    elif text[0] in "[{" and name != "pattern":
        try:
            value = parse_json(text)
        except ValueError as error:
            if name not in ("stop", "choices"):
                raise
            got = f"got {name} {quoted(text)} ({error})"
            raise ValueError(f"{got}, expected a JSON list; for this text: {json.dumps([text])}") from None
    elif name in ("stop", "choices"):
        value = [text]
        if name == "choices":
            note_single_choice(value)
    elif name == "stop_ids":
        value = text.replace(",", " ").split()
    return coerce_field(GenerateConfig, name, value, from_text=True)


def obey(conversation: Conversation, turn: str) -> bool:
    """Runs a command. Returns False if the turn is none. Raises ValueError for unknown commands and wrong arguments."""
    match = COMMAND.fullmatch(turn)
    if match is None:
        return False
    name, argument = match[1], (match[2] or "").strip()
    if name not in COMMANDS:
        raise ValueError(f"got command {name}{hint(name, [*COMMANDS, *QUIT]) or ', expected one that /help lists'}")
    COMMANDS[name][2](conversation, argument)
    return True
