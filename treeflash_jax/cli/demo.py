"""The demo: a language model answers a few prompts twice, side by side: one token at a time and with drafting."""

import argparse
import io
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product

from rich.columns import Columns
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import treeflash_jax as tf
from treeflash_jax.bench import harness, report
from treeflash_jax.bench.bench_records import BenchRecord
from treeflash_jax.bench.harness import System
from treeflash_jax.bench.prompt_sets import BenchPrompt
from treeflash_jax.core import files
from treeflash_jax.core.error_text import logger
from treeflash_jax.core.setting_options import add_options
from treeflash_jax.core.settings import setting
from treeflash_jax.core.terminal import Console, shown
from treeflash_jax.engine.comparison import FAIL, IDENTICAL, ROUNDING
from treeflash_jax.engine.settings import pairs
from treeflash_jax.engine.settings.model_options import ModelOptions

PLAIN, DRAFTED = "one token at a time", "TreeFlash tree"  # names of the two systems
SEVERAL = "bold green"  # style of text from rounds that committed several tokens
SAME = {IDENTICAL: "yes", ROUNDING: "near-tie", FAIL: "no"}  # word in the table for each verdict
COLUMNS = ["*prompt", "*decoded", "passes", "tau", "tokens/s", "speedup", "identical"]
TREE = "one of the rounds, with the tokens that it kept marked:"

TEXTS = {
    "smollm2": "SmolLM2-135M-Instruct. The prompts were chosen because a model of 135M parameters answers them well; "
    "measured speeds are in notebooks/results/README.md. To talk to the model: treeflash chat",
    "tiny": "A toy pair, trained for form only: its arithmetic is usually wrong. Drafting pays if verifying many tokens "
    "takes little longer than verifying one, as on accelerators.",
}
PROMPTS = {
    "smollm2": {
        "rewrite": "Rewrite this sentence in the past tense: The children walk to the lake, feed the ducks and go home "
        "before the rain begins.",
        "code": "Write a Python function that checks whether a word is a palindrome.",
        "explain": "What is the water cycle?",
    },
    "tiny": {
        "pens": "A box holds 6 red pens and 9 blue pens. Ada takes 4 pens. How many pens are left?",
        "apples": "Tom has 3 apples and buys 4 more. How many apples does he have?",
        "seats": "A train has 5 cars with 10 seats in each car. How many seats are there?",
    },
}


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Options of the demo."""

    pair: str | None = setting(
        None,
        "smollm2: SmolLM2-135M-Instruct; tiny: a toy model that ships with the package",
        unset="smollm2 if its weights are on this machine, else tiny",
        choices=lambda: tuple(PROMPTS),
    )
    repeats: int = setting(2, "timed answers to every prompt", least=1, unit="answers")
    svg: str | None = setting(None, "write a picture of the demo", unit="file")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Answers three prompts one token at a time and with drafting, side by side, draws a draft tree, and compares times."""
    add_options(parser, DemoOptions)
    add_options(parser, ModelOptions, ["dtype"])
    add_options(parser, tf.GenerateConfig, ["max_new_tokens"], max_new_tokens=160)


def run(arguments: argparse.Namespace) -> int:
    """Streams answers side by side, and prints a draft tree and a table.

    Speeds are measured in alternating greedy runs at batch 1, after all programs are compiled. The picture shows the
    streams of the last prompt at the time when the first of them ended, the tree and the table.
    """
    if arguments.svg is not None:
        files.check_output(arguments.svg)
    pair = arguments.pair or pairs.default_verifier()
    console = Console()
    with ExitStack() as stack:
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)  # the status line already says that programs are compiled
        with console.status(f"loading {pair}"):
            model = tf.load(pair, dtype=arguments.dtype)
        console.print(TEXTS[pair] + "\n")
        plain = tf.GenerateConfig(max_new_tokens=arguments.max_new_tokens, batch_size=1, builder="none")
        drafted = replace(plain, builder="best-first")
        systems = [
            System(name=PLAIN, model=model, config=plain),
            System(name=DRAFTED, model=model, config=drafted),
        ]
        with console.status("compiling"):
            for system, prompt in product(systems, PROMPTS[pair].values()):
                model.warmup(len(model.encode(prompt)), config=system.config)
        results = []  # results of drafted answers
        for prompt in PROMPTS[pair].values():
            console.print(f"[bold]{prompt}[/bold]")
            text, result, streams = _race(console, systems, prompt)
            console.print(text, "\n")
            results.append(result)
        prompts = [BenchPrompt(id=name, set=name, turns=(prompt,)) for name, prompt in PROMPTS[pair].items()]
        with console.status("measuring") as status:
            records = list(harness.measure(systems, prompts, seeds=range(arguments.repeats), notify=status.update))
            status.update("drawing a tree")  # a separate program drafts the round again
            tree = Text(f"{TREE}\n{_draw(results)}\n")
        table = _table(pair, records)
        console.print(tree, table)
        if arguments.svg is not None:
            pictured = Console(record=True, width=console.width, file=io.StringIO())
            pictured.print(f"[bold]{prompt}[/bold]", streams, tree, table)
            title = f"treeflash demo: {model.device.kind}, {model.dtype.name}"
            picture = pictured.export_svg(title=title, font_aspect_ratio=0.6)  # the width of Fira Code's letters
            # librsvg drops spaces at the ends of texts unless this attribute keeps them.
            files.write(arguments.svg, picture.replace("<svg ", '<svg xml:space="preserve" ', 1))
    return 0


def _race(console: Console, systems: Sequence[System], prompt: str) -> tuple[Text, tf.Result, Columns]:
    """Shows streams side by side. The stream that has used less time continues.

    Returns the last system's answer with colours, its result, and both streams at the time when the first of them ended.
    """
    streams = {s.name: s.model.stream(prompt, s.config, rounds_per_dispatch=1) for s in systems}
    texts = {name: Text() for name in streams}
    clocks = dict.fromkeys(streams, 0.0)
    passes = dict.fromkeys(streams, 0)
    first_end = None
    width = max(24, console.width // len(texts) - 1)
    height = max(6, min(18, console.height - 6))

    def panels() -> Columns:
        panels = []
        for name, text in texts.items():
            state = f"{passes[name]} passes, {clocks[name]:.1f} s"
            lines = Text("\n").join(text.wrap(console, width - 4)[2 - height :])
            panels.append(Panel(lines, title=name, subtitle=state, width=width, height=height))
        return Columns(panels)

    with Live(get_renderable=panels, console=console, transient=True):
        while streams:
            name = min(streams, key=clocks.__getitem__)
            start = time.perf_counter()
            piece = next(streams[name])
            clocks[name] += time.perf_counter() - start
            if isinstance(piece, tf.Chunk):
                passes[name] = piece.rounds + 1
                style = SEVERAL if len(piece.ids) > 1 and piece.rounds else ""
                texts[name].append(shown(piece.text, console.is_terminal), style)
                continue
            if piece.finished == "interrupted":  # Ctrl-C also ends the demo
                raise KeyboardInterrupt
            del streams[name]
            first_end = first_end or panels()
            if name == systems[-1].name:
                result = piece
    return texts[systems[-1].name], result, first_end


def _draw(results: Sequence[tf.Result]) -> str:
    """Draws the tree with most branches, among the rounds that kept most tokens."""
    rounds = []
    for index, result in enumerate(results):
        rounds += [(-length, index, number) for number, length in enumerate(result.accept_lengths)]
    pictures = [str(results[index].tree(number)) for _, index, number in sorted(rounds)[:12]]
    return max(pictures, key=lambda picture: picture.count("├"), default="none")


def _table(pair: str, records: Sequence[BenchRecord]) -> Table:
    table = report.make_table(f"{pair}: greedy, batch 1", COLUMNS)
    summary = report.summarise(records)
    order = list(PROMPTS[pair])
    for entry in sorted(summary["systems"], key=lambda entry: (order.index(entry["set"]), entry["system"] != PLAIN)):
        same = SAME.get(entry["verdict"], "")  # one-token decoding has no verdict
        passes = str(entry["rounds"] // entry["responses"] + 1)
        speeds = f"{entry['tokens_per_second']:.0f}", f"{entry['speedup']['value']:.2f} x"
        name = entry["set"] if entry["system"] == PLAIN else ""
        table.add_row(name, entry["system"], passes, f"{entry['tau'] or 1:.2f}", *speeds, same)
    table.caption = report.conclusion(summary)
    return table
