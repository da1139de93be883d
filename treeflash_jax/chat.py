"""A conversation in the terminal: answers stream in, each turn ends with its statistics."""

from __future__ import annotations

from typing import Unpack

from rich.console import Console

from treeflash_jax import devices
from treeflash_jax.model import TreeFlash
from treeflash_jax.planning import rows_of, why_plain
from treeflash_jax.results import Chunk, Result
from treeflash_jax.settings import GenerateConfig, Settings

HELP = "/reset forgets the conversation, /tree draws the round that accepted most, /exit leaves"
HELLO = [{"role": "user", "content": "Hello"}]


def converse(model: TreeFlash, console: Console, **settings: Unpack[Settings]) -> None:
    """Reads user turns until /exit or end of input.

    A turn that fails (say, a conversation longer than the context) is reported in one line and taken back; Ctrl-C ends the
    answer and keeps what was said.

    Args:
      model: with a tokenizer that has a chat template; without a drafter it answers one token at a time.
      console: what is read from and written to.
      **settings: fields of GenerateConfig.

    Raises:
      ValueError: a model that cannot chat, or settings that no turn could be answered with, before anything is read.
    """
    config = _checked(model, settings)
    if config.builder == "none":
        why = why_plain(GenerateConfig(), model.drafter, devices.of_mesh(model.mesh), model.dtype) or "nothing is drafted"
        console.print(f"[dim]answers come one token at a time: {why}[/dim]")
    console.print(f"[dim]{HELP}[/dim]")
    messages: list[dict[str, str]] = []
    last = None
    while True:
        try:
            said = console.input("[bold]you:[/bold] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if said == "/exit":
            return
        if said == "/reset":
            messages, last = [], None
        elif said == "/tree":
            _draw(console, last)
        elif said.startswith("/"):
            console.print(HELP)
        elif said:
            messages.append({"role": "user", "content": said})
            try:
                text, last = _turn(model, console, messages, config)
                messages.append({"role": "assistant", "content": text})
            except ValueError as error:
                console.print(f"error: {error}", markup=False)
                messages.pop()


def _checked(model: TreeFlash, settings: Settings) -> GenerateConfig:
    """The settings of all turns.

    Raises:
      ValueError: what would be wrong at every turn.
    """
    if model.tokenizer is None:
        raise ValueError("got a verifier without tokenizer.json, expected one that can chat")
    model.noted_plain = True  # it is said here
    config = model.resolve(None, settings)
    rows_of([model.encode(HELLO)], config, model.verifier)
    model.plan(config)
    return config


def _draw(console: Console, last: Result | None) -> None:
    """Draws the round of the last answer that accepted most, or says why there is none."""
    if last is None:
        console.print("no draft tree yet: no answer was finished")
        return
    longest = max(range(len(last.accept_lengths)), key=last.accept_lengths.__getitem__, default=0)
    try:
        console.print(str(last.tree(longest)), markup=False)
    except ValueError as error:
        console.print(f"no draft tree: {error}", markup=False)
    except KeyboardInterrupt:
        console.print("\n[dim]interrupted[/dim]")


def _turn(
    model: TreeFlash, console: Console, messages: list[dict[str, str]], config: GenerateConfig
) -> tuple[str, Result | None]:
    """Streams one answer and prints its statistics. Ctrl-C ends it early: its text so far, and no Result."""
    text = ""
    try:
        for piece in model.stream(messages, config=config):
            if isinstance(piece, Chunk):
                console.print(piece.text, end="", markup=False, soft_wrap=True)
                text += piece.text
    except KeyboardInterrupt:
        console.print("\n[dim]interrupted[/dim]")
        return text, None
    rounds = len(piece.accept_lengths)
    console.print(
        f"\n[dim]{len(piece.ids)} tokens, {rounds} rounds, tau {piece.tau:.2f}, "
        f"{piece.tokens_per_second:.0f} tokens/s, {piece.finished}[/dim]"
    )
    return text, piece
