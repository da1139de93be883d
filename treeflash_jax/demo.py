"""The first impression: the shipped pair answers a few prompts, drafted in four ways, side by side."""

from __future__ import annotations

import statistics
import warnings
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import treeflash_jax as tf

QUESTIONS = (
    "Lena picks 12 pears in the morning and 15 pears in the afternoon. She gives 9 pears to her aunt. How many are left?",
    "A bus has 8 rows with 4 seats in each row. 21 seats are taken. How many seats are free?",
    "Omar reads 14 pages every day for 6 days and then 10 pages on Sunday. How many pages does he read in all?",
)
SYSTEMS: dict[str, dict[str, Any]] = {
    "one token at a time": {"builder": "none"},
    "chain (DFlash)": {"builder": "chain", "head": "marginal"},
    "marginal tree (DDTree)": {"builder": "best-first", "head": "marginal"},
    "TreeFlash tree": {"builder": "best-first"},
}
PLAIN, OURS = "one token at a time", "TreeFlash tree"


def run(*, max_new_tokens: int, nodes: int, block_size: int, candidates: int, repeats: int) -> None:
    """Prints the answers, one draft tree, and a table: tau, tokens per second, and whether the output is the same.

    Speeds are medians over `repeats` interleaved runs of every system at batch 1, greedy, compilation excluded.
    """
    if repeats < 1:
        raise ValueError(f"got repeats {repeats}, expected at least 1")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="tau is")  # a chain commits little on one of the prompts
        _run(max_new_tokens=max_new_tokens, nodes=nodes, block_size=block_size, candidates=candidates, repeats=repeats)


def _run(*, max_new_tokens: int, nodes: int, block_size: int, candidates: int, repeats: int) -> None:
    console = Console(highlight=False)
    model = tf.load("tiny")
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]

    def settings(name: str) -> dict[str, Any]:
        sizes = {"nodes": nodes, "candidates": candidates} if SYSTEMS[name]["builder"] == "best-first" else {}
        return {"max_new_tokens": max_new_tokens, "block_size": block_size, **sizes, **SYSTEMS[name]}

    answers: dict[str, list[tf.Result]] = {}
    with Progress(console=console, transient=True) as progress:
        for name in progress.track(SYSTEMS, description="compiling, and answering in four ways"):
            answers[name] = [model.generate([chat], **settings(name))[0] for chat in chats]

    for question, chat in zip(QUESTIONS, chats, strict=True):
        console.print(f"[bold]{question}[/bold]")
        for piece in model.stream(chat, **settings(OURS)):
            if isinstance(piece, tf.Chunk):
                console.print(piece.text, end="", markup=False, soft_wrap=True)
        console.print("\n")

    speeds: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    with Progress(console=console, transient=True) as progress:
        for _ in progress.track(range(repeats), description="measuring"):
            for name in SYSTEMS:
                runs = [model.generate([chat], **settings(name))[0] for chat in chats]
                speeds[name].append(sum(len(r.ids) for r in runs) / sum(r.seconds for r in runs))

    result = max(answers[OURS], key=lambda result: max(result.accept_lengths, default=0))
    if result.accept_lengths:
        longest = max(range(len(result.accept_lengths)), key=result.accept_lengths.__getitem__)
        console.print(f"round {longest + 1} of one of these answers:")
        console.print(str(result.tree(longest)) + "\n", markup=False)
    title = f"blocks of {block_size}, {nodes} verified rows per tree, M = {candidates}"
    console.print(_table(title, answers, speeds))
    console.print(
        f"greedy, batch 1, float32, drafter temperature {model.drafter.drafter_temperature:g}; tau: tokens committed per "
        "round. A CPU is for trying, not for speed: drafting pays where verifying many rows costs little more than one."
    )


def _table(title: str, answers: dict[str, list[tf.Result]], speeds: dict[str, list[float]]) -> Table:
    table = Table(title=title)
    table.add_column("drafted by")
    for column in ("tau", "tokens/s", "speedup", "output identical"):
        table.add_column(column, justify="right")
    for name, results in answers.items():
        rounds = [length for result in results for length in result.accept_lengths]
        tau = sum(rounds) / max(len(rounds), 1)
        speed = statistics.median(speeds[name])
        same = all(mine.ids == theirs.ids for mine, theirs in zip(results, answers[PLAIN], strict=True))
        speedup = speed / statistics.median(speeds[PLAIN])
        table.add_row(name, f"{tau:.2f}", f"{speed:.0f}", f"{speedup:.2f} x", "yes" if same else "no")
    return table
