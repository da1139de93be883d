"""The summary of a benchmark, derived from its JSONL alone: `treeflash bench report FILE`.

    python -m treeflash_jax.bench.report results.jsonl [--against marginal] [--json]

Estimators. tau pooled: all tokens that rounds added to answers over all rounds (in records of schema 1 the last round of an
answer counts in full, also where a stop or the limit cut it). tau per response: the mean of every response's own tau (a
turn is a response; those without a round are left out). tokens/s: all tokens over all seconds, prefill included. speedup:
tokens/s over that of the one-token system, and tau ratio: pooled tau over that of a named system, both over the answers
that the two have in common at one temperature: same prompt, same seed, same run. Intervals are 95 % percentile bootstraps
over prompts; both systems, and all seeds of a prompt, are drawn together.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from treeflash_jax.bench import standalone
from treeflash_jax.checks import Bounds, clipped, fit, parse_json, quoted
from treeflash_jax.files import regular
from treeflash_jax.settings import DraftConfig, TreeConfig, renamed
from treeflash_jax.trees import BUILDERS

Record = dict[str, Any]
Answers = dict[tuple[str, int], Record]  # one system's records at one temperature, by (prompt, seed)

SCHEMA = 2
SCHEMAS = 1, 2  # 1 counts the last round of an answer in full, also where a stop or the limit cut it
KEYS = (
    "prompt_id prompt_hash system settings rounds committed accept_lengths accepted_by_depth ids tokens seconds "
    "compile_seconds finished thinking versions hardware"
).split()
# What is computed with; the other keys are only compared.
COUNT, SECONDS = Bounds(least=0, most=2**53), Bounds(least=0)
KINDS = {
    "prompt_id": (str, Bounds()),
    "system": (str, Bounds(nonempty=True)),
    "settings": (dict[str, Any], Bounds()),
    "versions": (dict[str, Any], Bounds()),
    "hardware": (dict[str, Any], Bounds()),
    "rounds": (int, COUNT),
    "committed": (int, COUNT),
    "tokens": (int, COUNT),
    "seconds": (float, SECONDS),
    "accept_lengths": (list[list[int]], COUNT),
    "accepted_by_depth": (list[int], COUNT),
}
SETTINGS_KINDS = {"temperature": float, "seed": int, "builder": str, "nodes": int | Literal["auto"] | None, "top_p": float}
HARDWARE = "device backend cores".split()
# Settings that all records of a file share; the others are a system's own. Temperature and seed tell records apart.
SHARED = "verifier drafter dtype format max_new_tokens batch_size top_k top_p".split()
QUANTIZE = "quantize"  # shared too; absent from older files
OWN = "builder head nodes candidates children drafter_temperature drafter_temperature_rule".split()
# Own too, but absent from older files.
LATER = [one.name for group in (DraftConfig, TreeConfig) for one in fields(group) if one.name not in OWN]
RESAMPLES = 2000
WIDTH = 140  # of tables that do not go to a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", metavar="FILE", help="JSONL file that treeflash bench run wrote")
    parser.add_argument(
        "--against",
        metavar="SYSTEM",
        help="system that tau ratios divide by (default: the marginal tree with as many nodes)",
    )
    parser.add_argument("--resamples", type=int, default=RESAMPLES, help="bootstrap resamples (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the summary of one results file.

    Raises:
      ValueError: a file that cannot be read, is empty, malformed, of another schema version or of several runs.
    """
    records, _ = read_records(arguments.results)
    summary = summarise(records, against=arguments.against, resamples=arguments.resamples, source=arguments.results)
    if arguments.json:
        print(json.dumps(summary, indent=2))
    else:
        show(summary)
    return 0


def read_jsonl(path: str | Path, *, unfinished_tail: bool = False) -> tuple[list[tuple[int, Record]], int]:
    """Objects of a JSONL file with their line numbers, and how many bytes of the file they take.

    Args:
      path: the file; blank lines are skipped.
      unfinished_tail: a last line cut off in the middle is left out with a warning.

    Raises:
      ValueError: a file that cannot be read, or a line that is no JSON object.
    """
    try:
        lines = regular(path, streams=True).read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    objects, size = [], 0
    for number, line in enumerate(lines, start=1):
        try:
            value = parse_json(line) if line.strip() else None
        except ValueError as error:
            if unfinished_tail and number == len(lines) and not line.endswith(b"\n"):
                warnings.warn(f"{path}:{number}: the last line is cut off and left out", stacklevel=2)
                break
            raise ValueError(f"{path}:{number}: got malformed JSON ({error}), expected one object a line") from None
        if line.strip():
            if not isinstance(value, dict):
                raise ValueError(f"{path}:{number}: got {type(value).__name__}, expected a JSON object")
            objects.append((number, value))
        size += len(line)
    return objects, size


def read_records(path: str | Path) -> tuple[list[Record], int]:
    """Records of one run, and how many bytes of the file they take. A last line that was cut off is left out.

    Raises:
      ValueError: malformed lines, another schema version, missing keys, an answer given twice, records of several runs.
    """
    objects, size = read_jsonl(path, unfinished_tail=True)
    seen: set[tuple[str, str, float, int]] = set()
    firsts: dict[str, Record] = {}
    for number, record in objects:
        at = f"{path}:{number}"
        if record.get("schema") not in SCHEMAS:
            raise ValueError(f"{at}: got schema {quoted(record.get('schema'))}, expected {SCHEMA}; write to another file")
        missing = [key for key in KEYS if key not in record]
        for key, (kind, bounds) in KINDS.items():
            if key in record:
                fit(kind, record[key], key, bounds, at)
        record["settings"] = settings = _renamed(record.get("settings", {}))
        missing += [f"hardware.{key}" for key in HARDWARE if key not in record.get("hardware", {})]
        missing += [f"settings.{key}" for key in (*SHARED, *OWN, "temperature", "seed") if key not in settings]
        if missing:
            raise ValueError(f"{at}: got a record without {clipped(', '.join(missing), 120)}")
        for key, kind in SETTINGS_KINDS.items():
            fit(kind, settings[key], f"settings.{key}", Bounds(least=0), at)
        if len(record["accepted_by_depth"]) and not record["rounds"]:
            raise ValueError(f"{at}: got accepted_by_depth without rounds, expected an empty list")
        if key_of(record) in seen:
            raise ValueError(f"{at}: got a second answer to {quoted(key_of(record), 120)}, expected one")
        seen.add(key_of(record))
        firsts.setdefault(record["system"], record)
        for first in (next(iter(firsts.values())), firsts[record["system"]]):
            if change := difference(record, first):
                raise ValueError(f"{at}: {change} in earlier lines; results of several runs cannot be compared")
    return [record for _, record in objects], size


def _renamed(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of the first edition, which had a method, as they are recorded now."""
    found = renamed(settings)
    if (
        "method" in settings
        and "acceptance" in found
        and found["builder"] in BUILDERS
        and BUILDERS[found["builder"]].is_chain
    ):
        found["acceptance"] = "sample-and-match"
    return found


def key_of(record: Record) -> tuple[str, str, float, int]:
    """(prompt, system, temperature, seed): what tells the records of a file apart."""
    settings = record["settings"]
    return record["prompt_id"], record["system"], settings["temperature"], settings["seed"]


def difference(record: Record, other: Record) -> str | None:
    """The first thing that keeps two records from belonging to one run, in words; None where they do."""
    if record["schema"] != other["schema"]:
        return f"got schema {record['schema']}, but {other['schema']}"
    names = [*SHARED, QUANTIZE] + (OWN + LATER if record["system"] == other["system"] else [])
    for part in ("settings", "versions", "hardware"):
        ours, theirs = record[part], other[part]
        for name in names if part == "settings" else sorted({*ours, *theirs}):
            if ours.get(name) != theirs.get(name):
                return f"got {name} {quoted(ours.get(name))}, but {quoted(theirs.get(name))}"
    return None


def summarise(
    records: Sequence[Record], *, against: str | None = None, resamples: int = RESAMPLES, source: str = "the results"
) -> dict[str, Any]:
    """Everything the tables show.

    Args:
      records: of one run.
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
    records = list(mine.values())
    total = {what: sum(record[what] for record in records) for what in ("tokens", "seconds", "rounds", "committed")}
    responses = [lengths for record in records for lengths in record["accept_lengths"]]
    taus = [sum(lengths) / len(lengths) for lengths in responses if lengths]
    depths = [sum(counts) for counts in zip_longest(*(r["accepted_by_depth"] for r in records), fillvalue=0)]
    plain = next((other for other in systems.values() if _settings(other)["builder"] == "none"), {})
    wanted = (against, f"{against}-{_settings(mine)['nodes']}")
    beside = next((other for other in systems if {other, other.partition("@")[0]} & {*wanted} and other != name), None)
    return {
        "nodes": _settings(mine)["nodes"],
        "prompts": len({prompt for prompt, _ in mine}),
        "responses": len(responses),
        **total,
        "tau": total["committed"] / total["rounds"] if total["rounds"] else None,
        "tau_per_response": sum(taus) / len(taus) if taus else None,
        "acceptance_by_depth": [count / total["rounds"] for count in depths],
        "tokens_per_second": total["tokens"] / max(total["seconds"], 1e-9),
        "speedup": paired_ratio(mine, plain, "tokens", "seconds", resamples),
        "identical": sum(mine[key]["ids"] == plain[key]["ids"] for key in mine.keys() & plain.keys()),
        "against": beside,
        "tau_ratio": paired_ratio(mine, systems.get(beside, {}), "committed", "rounds", resamples),
    }


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
        + ". tau: tokens that a round adds to its answer, bonus included"
        + (" (last rounds in full, even where they were cut)" if summary["schema"] == 1 else "")
        + "; brackets: 95 % paired bootstrap over prompts; "
        "identical: answers equal to one-token decoding."
    )


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
