"""A conversation in the terminal: answers stream in, each turn ends with its statistics."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from treeflash_jax.generate import TreeFlash
from treeflash_jax.result import Chunk, Result

HELP = "/reset forgets the conversation, /tree draws the round that accepted most, /exit leaves"


def converse(model: TreeFlash, console: Console, **settings: Any) -> None:
    """Reads user turns until /exit or end of input.

    A turn that fails (say, a conversation longer than the context) is reported in one line and taken back; Ctrl-C ends the
    answer and keeps what was said.

    Raises:
      ValueError: a model without a tokenizer.
    """
    if model.tokenizer is None:
        raise ValueError("got a verifier without tokenizer.json, expected one that can chat")
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
            if last is None or not last.accept_lengths:
                console.print("no draft tree yet")
            else:
                longest = max(range(len(last.accept_lengths)), key=last.accept_lengths.__getitem__)
                console.print(str(last.tree(longest)), markup=False)
        elif said.startswith("/"):
            console.print(HELP)
        elif said:
            messages.append({"role": "user", "content": said})
            try:
                text, last = _turn(model, console, messages, settings)
                messages.append({"role": "assistant", "content": text})
            except ValueError as error:
                console.print(f"error: {error}", markup=False)
                messages.pop()


def _turn(
    model: TreeFlash, console: Console, messages: list[dict[str, str]], settings: dict[str, Any]
) -> tuple[str, Result | None]:
    """Streams one answer and prints its statistics. Ctrl-C ends it early: its text so far, and no Result."""
    text = ""
    try:
        for piece in model.stream(messages, **settings):
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
