"""A conversation in the terminal: answers are streamed, with statistics after each turn."""

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from treeflash_jax.cli.chat_commands import QUIT, Conversation, obey
from treeflash_jax.cli.line_editor import LineEditor
from treeflash_jax.core.error_text import clipped
from treeflash_jax.core.settings import setting
from treeflash_jax.core.terminal import shown
from treeflash_jax.engine.answers.results import Chunk, Result
from treeflash_jax.engine.model import TreeFlash


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options of a conversation. Both replace options of `generate`."""

    max_new_tokens: int | None = setting(
        None, "largest number of tokens in an answer", unset="up to the context's end", least=1, unit="tokens"
    )
    system: str | None = setting(None, "system message", unit="text")


def converse(model: TreeFlash, console: Console, system: str | None = None, **settings: Any) -> None:
    """Reads user turns and commands until /quit, /exit or end of input. Samples answers as the model recommends.

    If a conversation outgrows the context, its oldest turns are dropped. If a turn fails (for example, because a message is
    longer than the context, or the device has no memory left), one line reports it, the turn is removed, and turns that it
    dropped are read again. Ctrl-C ends an answer and keeps its text so far; without text, the turn is removed likewise.

    Raises ValueError before the first turn if the model has no chat template or settings are invalid.
    """
    if model.tokenizer is None:
        raise ValueError("got a verifier without tokenizer.json, expected one that can chat")
    settings = {"sampling": "model"} | {name: value for name, value in settings.items() if value is not None}
    conversation = Conversation(model=model, console=console, settings=settings, system=system)
    conversation.validate(settings, system)
    console.print("[dim]/help lists the commands, /quit leaves[/dim]")
    editor = LineEditor()
    while True:
        try:
            turn = editor.read()
        except (EOFError, KeyboardInterrupt):
            return console.print()
        if turn and turn.split()[0] in QUIT:
            return
        try:
            if turn and not obey(conversation, turn):
                answer(conversation, turn)
        except (ValueError, OSError, RuntimeError) as error:  # of settings, of /save, of the device
            console.print(f"error: {clipped(error)}", markup=False)
        except KeyboardInterrupt:
            console.print("\n[dim]interrupted[/dim]")


def answer(conversation: Conversation, message: str) -> None:
    """Streams the answer to a message, prints its statistics, and adds both to the conversation."""
    model, console = conversation.model, conversation.console
    forgotten_before = conversation.forgotten
    conversation.messages.append({"role": "user", "content": message})
    text = ""
    result = None
    try:
        settings = conversation.settings | {"max_new_tokens": conversation.make_room()}
        with Lines(console) as lines:
            for piece in model.stream(conversation.prompt, session=conversation.session, **settings):
                if isinstance(piece, Chunk):
                    lines.write(piece.text)
                    text += piece.text
                else:
                    result = piece
        if not text and result.finished == "interrupted":  # the stream ended after Ctrl-C
            raise KeyboardInterrupt
    except (Exception, KeyboardInterrupt) as error:
        if not text or not isinstance(error, KeyboardInterrupt):
            conversation.messages.pop()
            conversation.forgotten = forgotten_before
            raise
        console.print("\n[dim]interrupted[/dim]")
    conversation.messages.append({"role": "assistant", "content": text})
    conversation.last = result
    if result is not None:
        is_limited = "max_new_tokens" in conversation.settings
        advice = "/set max_new_tokens removes the limit" if is_limited else "no memory for a longer answer"
        end = ending(result, model.verifier.max_positions, advice)
        console.print(f"[dim]{format_statistics(result)}, {result.tokens_per_second:.0f} tokens/s, {end}[/dim]")


def format_statistics(result: Result) -> str:
    return f"{len(result.ids)} tokens in {len(result.accept_lengths)} rounds, tau {result.tau:.2f}"


def ending(result: Result, context: int, advice: str | None = None) -> str:
    """Returns why an answer ended.

    Args:
      context: the verifier's limit on prompt and answer together.
      advice: words for an answer that ended before its context did; None: an option of `generate` for a longer answer.
    """
    room = context - len(result.prompt_ids)
    if result.finished != "length":
        return result.finished
    if len(result.ids) == room:
        return f"cut at the context's end, {context:,} tokens"
    return f"cut: {advice or f'--max-new-tokens {min(4 * len(result.ids), room)} goes on'}"


class Lines(Live):
    """Prints a growing text, wrapped by rich at words in a terminal: complete lines once, the last one as it grows."""

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
