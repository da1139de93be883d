"""A conversation in the terminal: answers are streamed, with statistics after each turn."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from treeflash_jax.core.checks import clipped
from treeflash_jax.core.settings import setting
from treeflash_jax.core.terminal import shown
from treeflash_jax.engine.batching import Session
from treeflash_jax.engine.generate_config import GenerateConfig
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.results import Chunk, Result

HELP = "/reset forgets the conversation, /tree draws the round that accepted most, /quit or /exit leaves"
HELLO = [{"role": "user", "content": "Hello"}]
LEAST_ROOM = 128  # tokens of an answer for which memory must have room


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Settings of `generate` that have other defaults in a conversation."""

    max_new_tokens: int | None = setting(
        None, "largest number of tokens in an answer", unset="up to the context's end", least=1, unit="tokens"
    )


def converse(model: TreeFlash, console: Console, max_new_tokens: int | None = None, **settings: Any) -> None:
    """Reads user turns until /quit, /exit or end of input.

    A turn that fails (for example, a conversation longer than the context) is reported in one line and removed; Ctrl-C ends
    the answer and keeps its text so far.

    Args:
      max_new_tokens: largest number of tokens in an answer; None: up to the context's end, or as memory allows.

    Before the first turn, raises ValueError for a model without a chat template or for invalid settings.
    """
    if model.tokenizer is None:
        raise ValueError("got a verifier without tokenizer.json, expected one that can chat")
    model.prepare(HELLO, **settings, max_new_tokens=max_new_tokens or GenerateConfig.max_new_tokens)
    console.print(f"[dim]{HELP}[/dim]")
    messages: list[dict[str, str]] = []
    last, session = None, Session()
    while True:
        try:
            message = console.input("[bold]you:[/bold] ").strip()
        except (EOFError, KeyboardInterrupt):
            return console.print()
        if message in ("/quit", "/exit"):
            return
        if message == "/reset":
            messages, last = [], None
        elif message == "/tree":
            _draw(console, last)
        elif message.startswith("/"):
            console.print(HELP)
        elif message:
            messages.append({"role": "user", "content": message})
            try:
                room = max_new_tokens or _room(model, messages, settings)
                text, last = _turn(model, console, messages, session, **settings, max_new_tokens=room)
                messages.append({"role": "assistant", "content": text})
            except ValueError as error:
                console.print(f"error: {clipped(error)}", markup=False)
                messages.pop()


def _room(model: TreeFlash, messages: list[dict[str, str]], settings: dict[str, Any]) -> int:
    """Returns the number of tokens up to the context's end; less if memory has no room for the caches of so many."""
    room = max(1, model.verifier.max_positions - len(model.encode(messages)))
    while room > LEAST_ROOM:
        with suppress(ValueError):
            model.prepare(messages, **settings, max_new_tokens=room)
            break
        room //= 2
    return room


def _draw(console: Console, last: Result | None) -> None:
    """Draws the draft tree of the last answer's round that accepted most, or prints why there is none."""
    if last is None:
        return console.print("no draft tree yet: no answer was finished")
    try:
        console.print(str(last.tree()), markup=False)
    except ValueError as error:
        console.print(f"no draft tree: {error}", markup=False)
    except KeyboardInterrupt:
        console.print("\n[dim]interrupted[/dim]")


def _turn(
    model: TreeFlash, console: Console, messages: list[dict[str, str]], session: Session, **settings: Any
) -> tuple[str, Result | None]:
    """Streams one answer and prints its statistics; returns its text and Result, None after Ctrl-C."""
    text = ""
    try:
        with Lines(console) as lines:
            for piece in model.stream(messages, session=session, **settings):
                if isinstance(piece, Chunk):
                    lines.write(piece.text)
                    text += piece.text
    except KeyboardInterrupt:
        console.print("\n[dim]interrupted[/dim]")
        return text, None
    rounds = len(piece.accept_lengths)
    console.print(
        f"[dim]{len(piece.ids)} tokens, {rounds} rounds, tau {piece.tau:.2f}, "
        f"{piece.tokens_per_second:.0f} tokens/s, {ending(piece, model.verifier.max_positions)}[/dim]"
    )
    return text, piece


def ending(result: Result, context: int) -> str:
    """Returns why an answer ended and, if `max_new_tokens` cut it, how to go on; `context` is the verifier's."""
    room = context - len(result.prompt_ids)
    if result.finished != "length":
        return result.finished
    if len(result.ids) == room:
        return f"cut at the context's end, {context:,} tokens"
    return f"cut: --max-new-tokens {min(4 * len(result.ids), room)} goes on"


class Lines(Live):
    """Prints a growing text, which rich wraps at words in a terminal: complete lines once, the last one as it grows."""

    def __init__(self, console: Console):
        super().__init__(console=console, transient=True)
        self.last = ""

    def write(self, text: str) -> None:
        *lines, self.last = (self.last + shown(text, self.console.is_terminal)).split("\n")
        for line in lines:
            self._print(line)
        self.update(Text(self.last), refresh=True)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._print(self.last)

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, soft_wrap=not self.console.is_terminal)
