"""The summary of a benchmark, derived from its JSONL alone: `treeflash bench report FILE`.

    python -m treeflash_jax.bench.report results.jsonl [--against marginal] [--json]

Estimators. tau pooled: all tokens that rounds added to answers over all rounds (in records of schema 1 the last round of an
answer counts in full, also where a stop or the limit cut it). tau per response: the mean of every response's own tau (a
turn is a response; those without a round are left out). tokens/s: all tokens over all seconds, prefill included. speedup:
tokens/s over that of the one-token system, and tau ratio: pooled tau over that of a named system, both over the answers
that the two have in common at one temperature: same prompt, same seed, same run. Intervals are 95 % percentile bootstraps
over prompts; both systems, and all seeds of a prompt, are drawn together.

Where rounds recorded what they were expected to commit, a further table counts the last round of an answer in full, also
where a stop or the limit cut it, since what is expected of a round knows no cut. It compares trees with the best-first tree
of as many nodes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from treeflash_jax.bench import plots, standalone, verdicts
from treeflash_jax.bench.records import QUANTIZE, SHARED, Answers, Record, key_of, read_records

RESAMPLES = 2000
WIDTH = 140  # of tables that do not go to a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", metavar="FILE", help="JSONL file that treeflash bench run wrote")
    parser.add_argument(
        "--against",
        metavar="SYSTEM",
        help="system that tau ratios divide by (default: marginal, the tree without the head, with as many nodes)",
    )
    parser.add_argument("--resamples", type=int, default=RESAMPLES, help="bootstrap resamples (default: %(default)s)")
    parser.add_argument("--plot", metavar="FILE", help="picture of tokens per round over nodes (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the summary of one results file.

    Raises:
      ValueError: a file that cannot be read, is empty, malformed, of another schema version or of several runs.
    """
    records, _ = read_records(arguments.results)
    summary = summarise(records, against=arguments.against, resamples=arguments.resamples, source=arguments.results)
    if arguments.plot:
        plots.check(arguments.plot)
        plots.draw_trees(summary["rows"], arguments.plot)
    if arguments.json:
        print(json.dumps(summary, indent=2))
    else:
        show(summary)
    return 0


def summarise(
    records: Sequence[Record], *, against: str | None = None, resamples: int = RESAMPLES, source: str = "the results"
) -> dict[str, Any]:
    """Everything the tables show.

    Args:
      against: the system that tau ratios divide by; a tree without rows ("marginal", the default) means as many rows.
      resamples: of the bootstrap.
      source: named in errors.

    Returns:
      {"schema", "settings", "versions", "hardware", "rows"}: a row per temperature and system. Ratios are {"value", "low",
      "high", "answers"} or None where the other system is missing.

    Raises:
      ValueError: no records, or an unknown system.
    """
    if not records:
        raise ValueError(f"{source}: got no records, expected at least one")
    if resamples < 1:
        raise ValueError(f"got resamples {resamples}, expected at least 1")
    names = sorted({record["system"] for record in records})
    if against is not None and not any(against in (name, name.partition("@")[0], name.partition("-")[0]) for name in names):
        raise ValueError(f"got unknown system {against!r}, expected one of {', '.join(names)}")
    groups: dict[float, dict[str, Answers]] = {}
    for record in records:
        prompt, system, temperature, seed = key_of(record)
        groups.setdefault(temperature, {}).setdefault(system, {})[prompt, seed] = record
    rows = []
    for temperature, systems in sorted(groups.items()):
        for name in systems:
            row = {"temperature": temperature, "system": name}
            rows.append(row | _row(name, systems, against or "marginal", resamples))
    first = records[0]
    shared = {name: first["settings"].get(name) for name in (*SHARED, QUANTIZE)}
    return {
        "schema": first["schema"],
        "settings": shared,
        "versions": first["versions"],
        "hardware": first["hardware"],
        "rows": rows,
    }


def _row(name: str, systems: dict[str, Answers], against: str, resamples: int) -> dict[str, Any]:
    mine = systems[name]
    settings = _settings(mine)
    builder = settings["builder"]
    records = list(mine.values())
    total = {what: sum(record[what] for record in records) for what in ("tokens", "seconds", "rounds", "committed")}
    responses = [lengths for record in records for lengths in record["accept_lengths"]]
    taus = [sum(lengths) / len(lengths) for lengths in responses if lengths]
    depths = [sum(counts) for counts in zip_longest(*(r["accepted_by_depth"] for r in records), fillvalue=0)]
    plain = next((other for other in systems.values() if _settings(other)["builder"] == "none"), {})
    wanted = (against, f"{against}-{_settings(mine)['nodes']}")
    beside = next((other for other in systems if {other, other.partition("@")[0]} & {*wanted} and other != name), None)
    return {
        **{name: settings.get(name) for name in ("nodes", "head", "acceptance")},
        "builder": "one-path" if settings.get("branches") == 1 and builder != "hybrid" else builder,
        "prompts": len({prompt for prompt, _ in mine}),
        "responses": len(responses),
        **total,
        "tau": total["committed"] / total["rounds"] if total["rounds"] else None,
        "tau_per_response": sum(taus) / len(taus) if taus else None,
        "acceptance_by_depth": [count / total["rounds"] for count in depths],
        "tokens_per_second": total["tokens"] / max(total["seconds"], 1e-9),
        "speedup": paired_ratio(mine, plain, "tokens", "seconds", resamples),
        **verdicts.summarise([(mine[key], plain[key]) for key in mine.keys() & plain.keys()]),
        "against": beside,
        "tau_ratio": paired_ratio(mine, systems.get(beside, {}), "committed", "rounds", resamples),
        "whole_rounds": _whole_rounds(mine, systems, resamples) if "expected" in records[0] else None,
    }


def _whole_rounds(mine: Answers, systems: dict[str, Answers], resamples: int) -> dict[str, Any]:
    """tau and expected tau with the cut parts of rounds, and their ratios over the best-first tree of as many nodes."""

    def whole(answers: Answers) -> Answers:
        return {key: record | {"whole": record["committed"] + sum(record["cut"])} for key, record in answers.items()}

    wanted = {**{name: _settings(mine)[name] for name in ("head", "nodes")}, "builder": "best-first"}
    plain = (other for other in systems.values() if wanted.items() <= _settings(other).items())
    beside, single = whole(next(plain, {})), {key: {"whole": 1, "expected": 1, "rounds": 1} for key in mine}
    mine, found = whole(mine), {}
    for top, name in (("whole", "tau"), ("expected", "expected_tau")):
        found[name] = paired_ratio(mine, single, top, "rounds", resamples)
        found[f"{name}_ratio"] = paired_ratio(mine, beside, top, "rounds", resamples)
    return found


def _settings(answers: Answers) -> dict[str, Any]:
    return next(iter(answers.values()))["settings"]


def paired_ratio(mine: Answers, theirs: Answers, top: str, bottom: str, resamples: int) -> dict[str, Any] | None:
    """(sum of top / sum of bottom) of one system over the same of another, with its paired bootstrap interval.

    Args:
      mine, theirs: records by (prompt, seed); only keys of both count.
      top, bottom: names of the two summed quantities.
      resamples: draws of as many prompts, with replacement.

    Returns:
      {"value", "low", "high", "answers"}; None without a common answer or where a sum is zero. One prompt has no interval.
    """
    common = sorted(mine.keys() & theirs.keys())
    prompts = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompt for prompt, _ in common))}
    sums_xp = np.zeros((4, len(prompts)))
    for key in common:
        ours, other = mine[key], theirs[key]
        sums_xp[:, prompts[key[0]]] += (ours[top], ours[bottom], other[top], other[bottom])
    if not sums_xp.sum(axis=1).all():
        return None
    ratio = {"value": float(_ratio(sums_xp.sum(axis=1))), "low": None, "high": None, "answers": len(common)}
    if len(prompts) > 1:
        share_p = np.full(len(prompts), 1 / len(prompts))
        draws_rp = np.random.default_rng(0).multinomial(len(prompts), share_p, size=resamples)
        with np.errstate(invalid="ignore"):  # a draw of nothing but prompts without rounds has no ratio
            ratios_r = _ratio(sums_xp @ draws_rp.T)
        ratio["low"], ratio["high"] = (float(x) for x in np.nanpercentile(ratios_r, (2.5, 97.5)))
    return ratio


def _ratio(sums: np.ndarray) -> np.ndarray:
    return (sums[0] / sums[1]) / (sums[2] / sums[3])


def show(summary: dict[str, Any], console: Console | None = None) -> None:
    """Prints the summary as tables that fit 80 columns."""
    console = console or table_console()
    settings, hardware, versions = summary["settings"], summary["hardware"], summary["versions"]
    title = f"{settings['verifier']}, {settings['format']} prompts, batch {settings['batch_size']}"
    tokens = table(
        f"{title}: tokens per round", ["T", "*system", "responses", "tau", "per\nresponse", "tau ratio", "*over"]
    )
    speed = table(f"{title}: speed", ["T", "*system", "tokens/s", "speedup", "identical"])
    for row in summary["rows"]:
        key = f"{row['temperature']:g}", row["system"]
        ratio, numbers = row["tau_ratio"], (row["tau"], row["tau_per_response"])
        over = row["against"] if ratio else "-"
        tokens.add_row(*key, str(row["responses"]), *map(_number, numbers), interval(ratio), over)
        same = f"{row['identical']} of {row['speedup']['answers']}" if row["speedup"] else "-"
        speed.add_row(*key, f"{row['tokens_per_second']:.0f}", interval(row["speedup"]), same)
    console.print(tokens, speed)
    if found := [row for row in summary["rows"] if row["whole_rounds"]]:
        columns = ["T", "*system", "tau", "ratio", "expected ratio"]
        rules = table("whole rounds: ratios over the best-first tree of as many nodes", columns)
        for row in found:
            whole = row["whole_rounds"]
            tau = _number(whole["tau"] and whole["tau"]["value"])
            ratios = interval(whole["tau_ratio"]), interval(whole["expected_tau_ratio"])
            rules.add_row(f"{row['temperature']:g}", row["system"], tau, *ratios)
        console.print(rules)
    depth = max(len(row["acceptance_by_depth"]) for row in summary["rows"])
    if depth:
        depths = map(str, range(1, depth + 1))
        shares = table("% of rounds that accept at least so many draft tokens", ["T", "*system", *depths])
        for row in summary["rows"]:
            if found := row["acceptance_by_depth"]:
                percent = [f"{100 * share:.0f}" for share in found + [0.0] * (depth - len(found))]
                shares.add_row(f"{row['temperature']:g}", row["system"], *percent)
        console.print(shares)
    console.print(
        f"{hardware['device']} ({hardware['backend']}, {hardware['cores']} cores), {settings['dtype']}, "
        + (f"{settings[QUANTIZE]} verifier, " if settings[QUANTIZE] else "")
        + f"at most {settings['max_new_tokens']} new tokens, top-k {settings['top_k']}, top-p {settings['top_p']:g}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + ". tau: tokens that a round adds to its answer, the verifier's own token after the accepted ones included"
        + (" (last rounds in full, even where they were cut)" if summary["schema"] == 1 else "")
        + "; brackets: 95 % paired bootstrap over prompts; "
        "identical: answers equal to one-token decoding."
    )
    console.print(*_lossless([row for row in summary["rows"] if row["verdict"]], settings["dtype"]))


def _lossless(rows: Sequence[dict[str, Any]], dtype: str) -> list[str]:
    """Says the verdict of all systems in a sentence; nothing without systems that drafting must not change."""
    if not rows:
        return []
    names = "identical", "compared", "near_ties", "compared_tokens"
    identical, answers, near_ties, tokens = (sum(row[name] for row in rows) for name in names)
    failed = ", ".join(f"{row['system']} at T {row['temperature']:g}" for row in rows if row["verdict"] == "FAIL")
    often = f", one in {tokens / near_ties:.0f} tokens" if near_ties else ""
    return [
        f"lossless: {'FAIL, ' + failed if failed else 'PASS'}; {identical} of {answers} answers identical, {near_ties} "
        f"near-ties{often} (the two candidates' logits are equal to within {dtype} rounding; not an error), "
        f"{answers - identical - near_ties} other differences"
    ]


def table_console() -> Console:
    """Where tables go: the terminal at its own width, or a file."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)


def table(title: str, columns: Sequence[str]) -> Table:
    """An empty table. Numbers keep their width; columns marked with * hold names, which fold where space is short."""
    made = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in columns:
        if column.startswith("*"):
            made.add_column(column[1:], overflow="fold")
        else:
            made.add_column(column, justify="right", no_wrap=True)
    return made


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def interval(ratio: dict[str, Any] | None) -> str:
    """A ratio and, in brackets, its interval; "-" for none."""
    if ratio is None:
        return "-"
    brackets = "" if ratio["low"] is None else f" [{ratio['low']:.2f}, {ratio['high']:.2f}]"
    return f"{ratio['value']:.2f}{brackets}"


def main(argv: list[str] | None = None) -> int:
    return standalone(__doc__, add_arguments, argv)


if __name__ == "__main__":
    sys.exit(main())
