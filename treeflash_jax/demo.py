"""The first impression: a language model answers a few prompts, one token at a time and drafted, side by side."""

from __future__ import annotations

import logging
import re
import statistics
import time
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress import track
from rich.table import Table
from rich.text import Text

import treeflash_jax as tf
from treeflash_jax import ahead, devices, pairs
from treeflash_jax.devices import Device

PLAIN = "one token at a time"
DRAFTED = "bold green"  # text of rounds that committed several tokens


@dataclass(frozen=True, kw_only=True)
class Demo:
    """A pair, prompts by the names that the table gives them, and the way of drafting that is shown."""

    about: str
    drafter: str | None = None  # the one that ships for the verifier
    prompts: Mapping[str, str]
    drafted: str = "TreeFlash tree"
    settings: Mapping[str, Any]


DEMOS = {
    "smollm2": Demo(
        about="SmolLM2-135M-Instruct. The prompts were chosen because a model of 135M parameters answers them well; "
        "measured speeds are in treeflash_jax/bench/README.md. To talk to the model: treeflash chat",
        prompts={
            "rewrite": "Rewrite this sentence in the past tense: The children walk to the lake, feed the ducks and go home "
            "before the rain begins.",
            "code": "Write a Python function that checks whether a word is a palindrome.",
            "explain": "What is photosynthesis?",
        },
        settings={"builder": "best-first"},
    ),
    "tiny": Demo(
        about="A toy pair, trained for form only: its arithmetic is usually wrong. Drafting pays if verifying many tokens "
        "takes little longer than verifying one, as on accelerators.",
        prompts={
            "pens": "A box holds 6 red pens and 9 blue pens. Ada takes 4 pens. How many pens are left?",
            "apples": "Tom has 3 apples and buys 4 more. How many apples does he have?",
            "seats": "A train has 5 cars with 10 seats in each car. How many seats are there?",
        },
        settings={"builder": "best-first", "block_size": 8, "candidates": 4, "nodes": 8},
    ),
}
COPYING = replace(DEMOS["smollm2"], drafter="ngram", drafted="tree of n-grams", settings={"nodes": 16})


def choose(pair: str, device: Device) -> Demo:
    """Returns the demo of a pair: SmolLM2 drafts with n-grams on devices on which its own drafter does not pay."""
    return COPYING if pair == "smollm2" and not device.drafting_pays(device.dtype) else DEMOS[pair]


def run(pair: str | None = None, *, max_new_tokens: int = 160, repeats: int = 2) -> None:
    """Streams answers side by side, while later programs compile, and prints a draft tree and a table.

    Speeds are medians over interleaved runs at batch 1, greedy, made after all programs are compiled.

    Args:
      pair: a key of DEMOS; None: `pairs.default_verifier`.
      max_new_tokens: most tokens of an answer; a longer one is shown up to its last whole sentence.
      repeats: timed runs of each way of decoding.
    """
    if repeats < 1:
        raise ValueError(f"got repeats {repeats}, expected at least 1")
    console, logger = Console(highlight=False), logging.getLogger("treeflash_jax")
    if pair is None and (pair := pairs.default_verifier()) == "tiny":
        console.print(f"the toy pair, since SmolLM2 is not on this machine; {pairs.GET_SMOLLM2} adds it\n")
    demo = choose(pair, devices.here())
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="tau is")  # of an answer of which little can be drafted
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)  # the live display says that programs are compiled
        with console.status(f"loading {pair}"):
            model = tf.load(pair, drafter=demo.drafter)
        console.print(demo.about + "\n")
        systems = {PLAIN: {"builder": "none"}, demo.drafted: demo.settings}
        systems = {name: {"max_new_tokens": max_new_tokens, **settings} for name, settings in systems.items()}
        compiled = {name: Future() for name in systems}
        ahead.wait()  # a job of an earlier call would keep this one from starting
        ahead.start(lambda: _compile(model, demo.prompts.values(), systems, compiled))
        for prompt in demo.prompts.values():
            console.print(f"[bold]{prompt}[/bold]")
            console.print(_race(console, model, prompt, systems, compiled), "\n")
        answers = {name: {system: [] for system in systems} for name in demo.prompts}
        runs = list(demo.prompts.items()) * repeats
        for name, prompt in track(runs, description="measuring", console=console, transient=True):
            for system, settings in systems.items():
                answers[name][system] += map(_whole, model.generate(prompt, **settings))
        with console.status("drawing a tree"):  # whose round is drafted again, by a program of its own
            picture = _draw([results[demo.drafted][0] for results in answers.values()])
        console.print("one of the rounds, with the tokens that it kept marked:")
        console.print(picture + "\n", markup=False)
        console.print(_table(pair, answers))


def _compile(model: tf.TreeFlash, prompts: Iterable[str], systems: Mapping, compiled: Mapping[str, Future]) -> None:
    for name, settings in systems.items():
        try:
            compiled[name].set_result([model.warmup(len(model.encode(prompt)), **settings) for prompt in prompts])
        except Exception as error:
            compiled[name].set_exception(error)  # raised where the stream is awaited


def _race(console: Console, model: tf.TreeFlash, prompt: str, systems: Mapping, compiled: Mapping[str, Future]) -> Text:
    """Shows streams side by side; of those whose program exists, the one that has used least time goes on.

    Returns:
      The answer of the last, coloured; if it was cut at the limit, up to its last whole sentence.
    """
    streams = {name: model.stream(prompt, rounds_per_dispatch=1, **settings) for name, settings in systems.items()}
    texts, clocks, passes = {name: Text() for name in streams}, dict.fromkeys(streams, 0.0), dict.fromkeys(streams, 0)
    is_timed, since = all(compiled[name].done() for name in streams), time.perf_counter()
    width, height = max(24, console.width // len(texts) - 1), max(6, min(18, console.height - 6))

    def panels() -> Columns:
        panels = []
        for name, text in texts.items():
            state = f"{passes[name]} passes" + (f", {clocks[name]:.1f} s" if is_timed else "")
            if not compiled[name].done():
                state = f"compiling, {time.perf_counter() - since:.0f} s"
            end = Text("\n").join(text.wrap(console, width - 4)[2 - height :])
            panels.append(Panel(end, title=name, subtitle=state, width=width, height=height))
        return Columns(panels)

    with Live(get_renderable=panels, console=console, transient=True):
        while streams:
            name = min([name for name in streams if compiled[name].done()] or streams, key=clocks.__getitem__)
            compiled[name].result()
            start = time.perf_counter()
            piece = next(streams[name])
            clocks[name] += time.perf_counter() - start
            if isinstance(piece, tf.Result):
                _whole(piece)
                del streams[name]
                sentences = re.match(r".*[.!?](?=\s|$)|.*(?=\s)", texts[name].plain, re.DOTALL)
                if piece.finished == "length" and sentences:
                    texts[name] = texts[name][: sentences.end()]
            else:
                passes[name] = piece.rounds + 1
                texts[name].append(piece.text, style=DRAFTED if len(piece.ids) > 1 and piece.rounds else "")
    return texts[list(systems)[-1]]


def _whole(result: tf.Result) -> tf.Result:
    """Returns an answer, unless Ctrl-C ended it: then the demo ends too."""
    if result.finished == "interrupted":
        raise KeyboardInterrupt
    return result


def _draw(results: list[tf.Result]) -> str:
    """Draws a round that kept many tokens, if possible of a tree that branches."""
    rounds = sorted((-kept, i, j) for i, result in enumerate(results) for j, kept in enumerate(result.accept_lengths))
    pictures = [str(results[i].tree(j)) for _, i, j in rounds[:12]]
    return next((picture for picture in pictures if "├" in picture), pictures[0] if pictures else "none")


def _table(pair: str, answers: Mapping[str, Mapping[str, list[tf.Result]]]) -> Table:
    table = Table("prompt", "decoded", title=f"{pair}: greedy, batch 1", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("passes", "tau", "tokens/s", "speedup", "identical"):
        table.add_column(column, justify="right")
    for name, systems in answers.items():
        for system, results in systems.items():
            speed, plain = (statistics.median(len(r.ids) / r.seconds for r in systems[s]) for s in (system, PLAIN))
            last, is_same = results[-1], results[-1].ids == systems[PLAIN][-1].ids
            numbers = str(len(last.accept_lengths) + 1), f"{last.tau:.2f}", f"{speed:.0f}", f"{speed / plain:.2f} x"
            if not is_same:
                table.caption = "no: usually a near-tie of two logits, not an error; see treeflash check"
            table.add_row(name if system == PLAIN else "", system, *numbers, "yes" if is_same else "no")
    return table
