"""Prints the tables of a file that `treeflash bench run` wrote: `treeflash bench report FILE`.

treeflash_jax/bench/README.md explains the tables. speedup: tokens/s over one-token decoding. Ratios are over the
answers that two systems have in common at one temperature. Intervals are 95 % percentile bootstraps over prompts; both
systems and all seeds of a prompt are resampled together.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from treeflash_jax.bench.bench_records import PEER, SHARED_SETTINGS, BenchRecord, is_comparable, read_records, record_key
from treeflash_jax.bench.verdicts import conclude
from treeflash_jax.core.setting_options import add_options
from treeflash_jax.core.settings import setting
from treeflash_jax.core.terminal import Console
from treeflash_jax.engine.comparison import FAIL, IDENTICAL, ROUNDING

RESAMPLES = 2000  # number of resamples in the bootstrap
WIDTH = 140  # width of tables that do not go to a terminal
Answers = dict[tuple[str, int], BenchRecord]  # records of one system at one temperature, by (prompt, seed)


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of a report."""

    against: str | None = setting(
        None,
        "system that tau ratios divide by",
        unset="marginal, the tree without the head, of the same number of nodes",
        unit="system",
    )
    json: bool = setting(False, "print one JSON object instead of tables")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", metavar="FILE", help="JSONL file that treeflash bench run wrote")
    add_options(parser, ReportOptions)


def run(arguments: argparse.Namespace) -> int:
    records = read_records(arguments.results)
    if not records:
        raise ValueError(f"{arguments.results}: got no records, expected at least one")
    summary = summarise(records, against=arguments.against)
    if arguments.json:
        print(json.dumps(summary, indent=2))
    else:
        show(summary)
    return 0


def summarise(records: Sequence[BenchRecord], *, against: str | None = None) -> dict[str, Any]:
    """Computes everything that the tables show.

    Args:
      against: system by which tau ratios divide; "marginal", the default, is the marginal tree with as many nodes.

    Returns:
      {"settings", "versions", "hardware", "systems"}, with an entry in "systems" for each set of prompts, temperature and
      system. A ratio is {"value", "low", "high", "answers"}, or None if the other system is missing.

    Raises ValueError for an unknown system.
    """
    groups: dict[tuple[str, float], dict[str, Answers]] = {}
    for record in records:
        prompt, system, temperature, seed = record_key(record)
        lengths = sum(record["accept_lengths"], [])
        group = record.get("prompt_set") or "", temperature
        answers = groups.setdefault(group, {}).setdefault(system, {})
        answers[prompt, seed] = record | {"rounds": len(lengths), "committed": sum(lengths)}
    entries: list[dict[str, Any]] = []
    for (prompts, temperature), systems in sorted(groups.items()):
        for name in systems:
            entry = {"set": prompts, "temperature": temperature, "system": name}
            entries.append(entry | _summarise_system(name, systems, against or "marginal"))
    if against is not None and not any(entry["against"] for entry in entries):
        names = sorted({entry["system"] for entry in entries})
        raise ValueError(f"got unknown system {against!r}, expected one of {', '.join(names)}")
    first = records[0]
    settings = {name: value for name, value in first["settings"].items() if name in (*SHARED_SETTINGS, "dtype")}
    return {"settings": settings, "versions": first["versions"], "hardware": first["hardware"], "systems": entries}


def _summarise_system(name: str, systems: dict[str, Answers], against: str) -> dict[str, Any]:
    mine = systems[name]
    settings = _settings(mine)
    records = list(mine.values())
    total = {key: sum(record[key] for record in records) for key in ("tokens", "seconds", "rounds", "committed")}
    plain = next((answers for answers in systems.values() if _settings(answers)["builder"] == "none"), {})
    other = _find_other(name, systems, against)
    return {
        **{key: settings[key] for key in ("drafter", "nodes", "head", "builder", "acceptance")},
        "prompts": len({prompt for prompt, _ in mine}),
        "responses": sum(len(record["accept_lengths"]) for record in records),
        **total,
        "tau": total["committed"] / total["rounds"] if total["rounds"] else None,
        "acceptance_by_depth": _acceptance_by_depth(records),
        "tokens_per_second": total["tokens"] / max(total["seconds"], 1e-9),
        "speedup": paired_ratio(mine, plain, "tokens", "seconds"),
        **_compare_answers([(mine[key], plain[key]) for key in mine.keys() & plain.keys()]),
        "against": other,
        "tau_ratio": paired_ratio(mine, systems.get(other, {}), "committed", "rounds"),
    }


def _find_other(name: str, systems: dict[str, Answers], against: str) -> str | None:
    """Returns the system `against`, or the tree with this name and the same nodes and drafter; None if there is neither."""
    settings = _settings(systems[name])
    for other in systems:
        tree = other.partition(", ")[0].partition("@")[0]  # name without drafter and drafter temperature
        is_alike = _settings(systems[other])["drafter"] == settings["drafter"]
        if other != name and (other == against or (is_alike and tree in (against, f"{against}-{settings['nodes']}"))):
            return other
    return None


def _acceptance_by_depth(records: Sequence[BenchRecord]) -> list[float]:
    """Returns the share of rounds that accept at least 1, 2, ... draft tokens. Tokens after an answer's end count, too."""
    lengths = []
    for record in records:
        for turn, cut in zip(record["accept_lengths"], record["cut"], strict=True):
            lengths += [*turn[:-1], turn[-1] + cut] if turn else []
    return [sum(length > depth for length in lengths) / len(lengths) for depth in range(1, max(lengths, default=1))]


def _compare_answers(pairs: Sequence[tuple[BenchRecord, BenchRecord]]) -> dict[str, Any]:
    """Summarises how answers differ from their one-token answers, in pairs with the same prompt.

    Returns {"compared", "identical", "compared_tokens", "near_ties", "verdict"}. The first two are numbers of answers;
    tokens are counted up to the first difference. The last three are None for systems that draw other samples or have
    another dtype.
    """
    differing = []
    for drafted, plain in pairs:
        has_ids = all(drafted["ids"]) and all(plain["ids"])  # some programs return no ids
        key = "ids" if has_ids else "texts"
        if drafted[key] != plain[key]:
            differing.append((drafted, plain))
    summary: dict[str, Any] = {"compared": len(pairs), "identical": len(pairs) - len(differing)}
    summary |= dict.fromkeys(("compared_tokens", "near_ties", "verdict"))
    differences = [
        drafted.get("differences", {}).get(plain["system"]) or plain.get("differences", {}).get(drafted["system"])
        for drafted, plain in differing
    ]
    if pairs and all(differences) and all(is_comparable(*pair) for pair in pairs):
        tokens = sum(sum(map(len, plain["ids"])) for drafted, plain in pairs if drafted["ids"] == plain["ids"])
        for difference, (_, plain) in zip(differences, differing, strict=True):
            tokens += sum(map(len, plain["ids"][: difference["turn"]])) + difference["index"] + 1
        near_ties = sum(difference["near_tie"] for difference in differences)
        verdict = ROUNDING if near_ties else IDENTICAL
        if near_ties < len(differences):
            verdict = FAIL
        summary |= {"compared_tokens": tokens, "near_ties": near_ties, "verdict": verdict}
    return summary


def _settings(answers: Answers) -> dict[str, Any]:
    return next(iter(answers.values()))["settings"]


def paired_ratio(mine: Answers, theirs: Answers, top: str, bottom: str) -> dict[str, Any] | None:
    """Divides the sum of `top` over one system by the sum of `bottom` over another, with a paired bootstrap interval.

    `top` and `bottom` are names in the records. Only pairs (prompt, seed) that both systems have count. Returns {"value",
    "low", "high", "answers"}; None if there is no common answer or a sum is zero. A single prompt gives no interval.
    """
    common = sorted(mine.keys() & theirs.keys())
    prompts = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompt for prompt, _ in common))}
    sums = np.zeros((4, len(prompts)))
    for key in common:
        sums[:, prompts[key[0]]] += [answers[key][name] for answers in (mine, theirs) for name in (top, bottom)]
    if not sums.sum(axis=1).all():
        return None

    def divide(sums: np.ndarray) -> np.ndarray:
        return (sums[0] / sums[1]) / (sums[2] / sums[3])

    ratio = {"value": float(divide(sums.sum(axis=1))), "low": None, "high": None, "answers": len(common)}
    if len(prompts) > 1:
        share = np.full(len(prompts), 1 / len(prompts))
        counts = np.random.default_rng(0).multinomial(len(prompts), share, size=RESAMPLES)  # [resamples, prompts]
        with np.errstate(invalid="ignore"):  # a resample may contain only prompts without rounds, which have no ratio
            ratios = divide(sums @ counts.T)
        ratio["low"], ratio["high"] = (float(x) for x in np.nanpercentile(ratios, (2.5, 97.5)))
    return ratio


def show(summary: dict[str, Any], console: Console | None = None) -> None:
    """Prints the summary as tables that fit 80 columns."""
    settings, systems = summary["settings"], summary["systems"]
    title = f"{settings['verifier']}, batch {settings['batch_size']}"
    several = any(system["set"] for system in systems)
    keys = ["*prompts", "T", "*system"] if several else ["T", "*system"]
    tokens = make_table(f"{title}: tokens per round", [*keys, "responses", "tau", "tau ratio", "*over"])
    speed = make_table(f"{title}: speed", [*keys, "tokens/s", "speedup", "identical"])
    depth = max(len(system["acceptance_by_depth"]) for system in systems)
    depths = make_table("% of rounds that accept at least n draft tokens", [*keys, *map(str, range(1, depth + 1))])
    for system in systems:
        key = [f"{system['temperature']:g}", system["system"]]
        if several:
            key.insert(0, system["set"])
        if system["builder"] != PEER:
            ratio = system["tau_ratio"]
            numbers = str(system["responses"]), _number(system["tau"]), format_interval(ratio)
            tokens.add_row(*key, *numbers, system["against"] if ratio else "-")
        same = f"{system['identical']} of {system['compared']}" if system["compared"] else "-"
        speed.add_row(*key, f"{system['tokens_per_second']:.0f}", format_interval(system["speedup"]), same)
        if shares := system["acceptance_by_depth"]:
            depths.add_row(*key, *(f"{100 * share:.0f}" for share in shares + [0.0] * (depth - len(shares))))
    tables = (table for table in (tokens, speed, depths) if table.row_count)
    (console or table_console()).print(*tables, _describe(summary))


def _describe(summary: dict[str, Any]) -> str:
    """Returns the settings, the meaning of the columns, and the verdict."""
    settings, hardware = summary["settings"], summary["hardware"]
    quantized = f"{settings['quantize']} verifier, " if settings["quantize"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    text = (
        f"{hardware['device']} ({hardware['backend']}, {hardware['cores']} cores), {settings['dtype']}, {quantized}"
        f"at most {settings['max_new_tokens']} new tokens, top-k {settings['top_k']}, top-p {settings['top_p']:g}; "
        f"{versions}. tau: tokens that a round adds to its answer, the verifier's bonus token included; brackets: 95 % "
        "paired bootstrap over prompts; identical: answers equal to one-token decoding."
    )
    return f"{text}\n{conclusion(summary)}"


def conclusion(summary: dict[str, Any]) -> str:
    """Returns the verdict on systems whose answers drafting must not change; "" if there are none."""
    if not (judged := [system for system in summary["systems"] if system["verdict"]]):
        return ""
    counts = [sum(system[name] for system in judged) for name in ("compared", "identical", "near_ties", "compared_tokens")]
    line = conclude(*counts, summary["settings"]["dtype"])
    failed = ", ".join(f"{s['system']} at T {s['temperature']:g}" for s in judged if s["verdict"] == FAIL)
    return line + (f", of {failed}" if failed else "")


def table_console() -> Console:
    """Returns the console for tables: as wide as the terminal, or WIDTH if they go to a file."""
    return Console(markup=False, width=None if sys.stdout.isatty() else WIDTH)


def make_table(title: str, columns: Sequence[str]) -> Table:
    """Makes an empty table. Columns of numbers keep their width. Columns marked with * have names, which may be folded."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in columns:
        how = {"overflow": "fold"} if column.startswith("*") else {"justify": "right", "no_wrap": True}
        table.add_column(column.removeprefix("*"), **how)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def format_interval(ratio: dict[str, Any] | None) -> str:
    """Formats a ratio and, in brackets, its interval; "-" for None."""
    brackets = " [{low:.2f}, {high:.2f}]".format(**ratio) if ratio and ratio["low"] is not None else ""
    return _number(ratio and ratio["value"]) + brackets
