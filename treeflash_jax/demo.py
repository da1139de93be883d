"""The first impression: the shipped pair answers a few prompts, drafted in four ways, side by side."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

import treeflash_jax as tf

QUESTIONS = (
    "Lena picks 12 pears in the morning and 15 pears in the afternoon. She gives 9 pears to her aunt. How many are left?",
    "A bus has 8 rows with 4 seats in each row. 21 seats are taken. How many seats are free?",
    "Omar reads 14 pages every day for 6 days and then 10 pages on Sunday. How many pages does he read in all?",
)
SYSTEMS: dict[str, dict[str, Any]] = {
    "one token at a time": {"method": "ar"},
    "chain (DFlash)": {"method": "chain", "head": "marginal"},
    "marginal tree (DDTree)": {"method": "tree", "head": "marginal"},
    "TreeFlash tree": {"method": "tree"},
}


def run(*, max_new_tokens: int, nodes: int, repeats: int) -> None:
    """Prints the answers, then a table: tau, tokens per second, and whether the output is the one-token output.

    Speeds are medians over `repeats` interleaved runs of every system at batch 1, greedy, compilation excluded.
    """
    if repeats < 1:
        raise ValueError(f"got repeats {repeats}, expected at least 1")
    console = Console(highlight=False)
    model = tf.load("tiny")
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]

    def answer(name: str, chat: Any) -> tf.Result:
        settings = SYSTEMS[name]
        sizes = {"nodes": nodes} if settings["method"] == "tree" else {}
        return model.generate([chat], max_new_tokens=max_new_tokens, **sizes, **settings)[0]

    with console.status("compiling"):
        answers = {name: [answer(name, chat) for chat in chats] for name in SYSTEMS}
    for question, result in zip(QUESTIONS, answers["TreeFlash tree"], strict=True):
        console.print(f"[bold]{question}[/bold]")
        console.print(f"{result.text}\n", markup=False)

    speeds: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    with console.status("measuring"):
        for _ in range(repeats):
            for name in SYSTEMS:
                runs = [answer(name, chat) for chat in chats]
                speeds[name].append(sum(len(r.ids) for r in runs) / sum(r.seconds for r in runs))

    plain, *_ = SYSTEMS
    table = Table(title=f"greedy, batch 1, {nodes} verified rows per tree")
    for column in ("drafted by", "tau", "tokens/s", "speedup", "output identical"):
        table.add_column(column, justify="left" if column == "drafted by" else "right")
    for name, results in answers.items():
        rounds = [length for result in results for length in result.accept_lengths]
        speed = statistics.median(speeds[name])
        same = all(mine.ids == theirs.ids for mine, theirs in zip(results, answers[plain], strict=True))
        tau = sum(rounds) / len(rounds)
        speedup = speed / statistics.median(speeds[plain])
        table.add_row(name, f"{tau:.2f}", f"{speed:.0f}", f"{speedup:.2f} x", "yes" if same else "no")
    console.print(table)
    console.print(
        f"drafter temperature {model.drafter.drafter_temperature:g}; tau: tokens committed per round. "
        "A CPU is for trying: trees pay where verifying many rows costs little more than one, on GPUs and TPUs."
    )
