"""The first impression: a language model answers a few prompts, one token at a time and drafted, side by side."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

import treeflash_jax as tf
from treeflash_jax import devices, pairs
from treeflash_jax.devices import Device

PLAIN = "one token at a time"
DRAFTED = "bold green"  # what came several tokens to a pass


@dataclass(frozen=True, kw_only=True)
class Demo:
    """What is shown of a pair.

    Attributes:
      drafter: its name; None: the one that the verifier brings.
      prompts: a user's messages by the names that the table gives them.
      systems: settings by name. The first decodes one token at a time; the last is shown beside it.
      note: the last line.
    """

    drafter: str | None
    prompts: Mapping[str, str]
    systems: Mapping[str, Mapping[str, Any]]
    note: str

    @property
    def shown(self) -> str:
        return list(self.systems)[-1]


# Where a drafter's network does not pay: copying costs little.
COPYING = Demo(
    drafter="ngram",
    prompts={
        "summarize": "Summarize this text in one sentence: The weather in the mountains was cold but clear. We walked "
        "along the river until we came to a small wooden bridge, and there we rested before the long way home. In the "
        "evening we sat by the fire and talked about the walk.",
        "correct": "Fix the grammar of this text: She go to the market every monday and buy apples, pears and bread. "
        "Then she walk home along the river and she give the bread to her mother.",
        "explain": "Why is the sky blue?",
    },
    systems={PLAIN: {"builder": "none"}, "tree of n-grams": {"nodes": 16}},
    note="n-grams draft what followed the same words before: they pay where an answer repeats a text, and cost little "
    "where it does not. Try it: treeflash chat --verifier smollm2 --drafter ngram",
)
_TREE = {"builder": "best-first", "block_size": 8, "candidates": 4, "nodes": 8}
DEMOS = {
    "smollm2": Demo(
        drafter=None,
        # Of ten prompts, three whose bfloat16 answers were those of one-token decoding on a CPU with avx512_bf16.
        prompts={
            "apples": "Anna has 3 bags with 4 apples in each bag. How many apples does she have?",
            "code": "Write a Python function that checks whether a word is a palindrome.",
            "explain": "Why is the sky blue?",
        },
        systems={PLAIN: {"builder": "none"}, "TreeFlash tree": {"builder": "best-first"}},
        note="The more predictable an answer, the more of it is drafted: sums and code more than prose. Where an answer "
        "repeats a text, n-grams draft more: treeflash chat --verifier smollm2 --drafter ngram",
    ),
    "tiny": Demo(
        drafter=None,
        prompts={
            "pears": "Lena picks 12 pears in the morning and 15 pears in the afternoon. She gives 9 pears to her aunt. "
            "How many are left?",
            "bus": "A bus has 8 rows with 4 seats in each row. 21 seats are taken. How many seats are free?",
            "pages": "Omar reads 14 pages every day for 6 days and then 10 pages on Sunday. How many pages does he read in "
            "all?",
        },
        systems={
            PLAIN: {"builder": "none"},
            "chain (DFlash)": {"builder": "chain", "head": "marginal", "block_size": 8},
            "marginal tree (DDTree)": _TREE | {"head": "marginal"},
            "TreeFlash tree": _TREE,
        },
        note="A toy pair: its answers have the form of arithmetic, not the right results. Drafting pays where verifying "
        "many tokens takes little longer than one, as on accelerators.",
    ),
}


def demo_of(pair: str, device: Device) -> Demo:
    """What is shown of a pair on a device."""
    return COPYING if pair == "smollm2" and not device.drafting_pays(device.dtype) else DEMOS[pair]


def run(pair: str | None = None, *, max_new_tokens: int = 96, repeats: int = 2) -> None:
    """Prints answers, one draft tree, and a table: verifier passes, tau, tokens per second, whether the output is the same.

    In a terminal, answers arrive side by side: the two ways of decoding take turns, each shown as far as it has come after
    the same time of its own. Speeds are medians over `repeats` interleaved runs at batch 1, greedy, compilation excluded.

    Args:
      pair: a key of DEMOS; None: `pairs.default_verifier`.
      max_new_tokens: of an answer, at most.
      repeats: timed runs of each way of decoding.
    """
    if repeats < 1:
        raise ValueError(f"got repeats {repeats}, expected at least 1")
    console = Console(highlight=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="tau is")  # some prompts are there because little of them can be drafted
        if pair is None and (pair := pairs.default_verifier()) == "tiny":
            console.print(f"the toy pair, since SmolLM2 is not on this machine; {pairs.GET_SMOLLM2} adds it\n")
        _run(console, pair, max_new_tokens, repeats)


def _run(console: Console, pair: str, max_new_tokens: int, repeats: int) -> None:
    demo = demo_of(pair, devices.here())
    with console.status(f"loading {pair}"):
        model = tf.load(pair, drafter=demo.drafter)
    settings = {name: {"max_new_tokens": max_new_tokens, **system} for name, system in demo.systems.items()}
    chats = {name: [{"role": "user", "content": prompt}] for name, prompt in demo.prompts.items()}
    answers: dict[str, dict[str, tf.Result]] = {name: {} for name in chats}
    with Progress(console=console, transient=True) as progress:
        for system in progress.track(settings, description="compiling, and answering in every way"):
            for name, chat in chats.items():
                answers[name][system] = model.generate([chat], **settings[system])[0]
    for name, chat in chats.items():
        console.print(f"[bold]{demo.prompts[name]}[/bold]")
        both = {system: settings[system] for system in (PLAIN, demo.shown)}
        drafted = _race(console, model, chat, both) if console.is_terminal else Text(answers[name][demo.shown].text or "")
        console.print(drafted, "\n")
    speeds: dict[str, dict[str, list[float]]] = {name: {system: [] for system in settings} for name in chats}
    with Progress(console=console, transient=True) as progress:
        for _ in progress.track(range(repeats), description="measuring"):
            for name, chat in chats.items():
                for system, how in settings.items():
                    result = model.generate([chat], **how)[0]
                    speeds[name][system].append(len(result.ids) / result.seconds)
    with console.status("drawing a tree"):  # whose round is drafted again, by a program of its own
        picture = _picture([of[demo.shown] for of in answers.values()])
    if picture is not None:
        console.print("one of the rounds, with the tokens that it kept marked:")
        console.print(picture + "\n", markup=False)
    console.print(_table(pair, answers, speeds))
    if any(of[system].ids != of[PLAIN].ids for of in answers.values() for system in of):
        console.print(f"no: two tokens whose logits were closer than rounding errors of {model.dtype.name} swapped")
    console.print(demo.note)


def _race(console: Console, model: tf.TreeFlash, chat: list[dict[str, str]], systems: Mapping[str, Mapping]) -> Text:
    """Two streams side by side, the one that has used less time going on. Returns the answer of the second, coloured."""
    streams = {system: model.stream(chat, rounds_per_dispatch=1, **how) for system, how in systems.items()}
    clocks, texts = dict.fromkeys(streams, 0.0), {system: Text() for system in streams}
    passes = dict.fromkeys(streams, 0)

    def shown() -> Columns:
        width = max(24, console.width // len(texts) - 1)  # both in a line of 80 columns
        spent = {system: f"{passes[system]} passes, {clocks[system]:.1f} s" for system in texts}
        return Columns(
            [Panel(text, title=system, subtitle=spent[system], width=width, height=16) for system, text in texts.items()]
        )

    running: dict[str, Iterator[tf.Chunk | tf.Result]] = dict(streams)
    with Live(shown(), console=console, transient=True, auto_refresh=False) as live:
        while running:
            system = min(running, key=clocks.__getitem__)
            start = time.perf_counter()
            piece = next(running[system])
            clocks[system] += time.perf_counter() - start
            if isinstance(piece, tf.Result):
                del running[system]
            else:
                passes[system] = piece.rounds + 1
                texts[system].append(piece.text, style=DRAFTED if len(piece.ids) > 1 and piece.rounds else "")
            live.update(shown(), refresh=True)
    return texts[list(systems)[-1]]


def _picture(results: Sequence[tf.Result]) -> str | None:
    """The tree of a round that kept much, one that branches where there is any; None where nothing was drafted."""
    rounds = [(kept, result, index) for result in results for index, kept in enumerate(result.accept_lengths)]
    first = None
    for _, result, index in sorted(rounds, key=lambda one: -one[0])[:40]:
        picture = str(result.tree(index))
        if "├" in picture:
            return picture
        first = first or picture
    return first


def _table(
    pair: str, answers: Mapping[str, Mapping[str, tf.Result]], speeds: Mapping[str, Mapping[str, list[float]]]
) -> Table:
    table = Table(title=f"{pair}: greedy, batch 1", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("prompt")
    table.add_column("decoded")
    for column in ("passes", "tau", "tokens/s", "speedup", "identical"):
        table.add_column(column, justify="right")
    for name, results in answers.items():
        for system, result in results.items():
            row = [name if system == PLAIN else "", system, str(len(result.accept_lengths) + 1), f"{result.tau:.2f}"]
            speed, plain = (statistics.median(speeds[name][one]) for one in (system, PLAIN))
            row += [f"{speed:.0f}", f"{speed / plain:.2f} x"]
            table.add_row(*row, "yes" if result.ids == results[PLAIN].ids else "no")
    return table
