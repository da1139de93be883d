"""Results of `treeflash bench latency`: derived numbers, the file that keeps them, the table and the figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from treeflash_jax.bench import plots, report
from treeflash_jax.core import files
from treeflash_jax.core.checks import read_json
from treeflash_jax.models.ceilings import Ceilings

SCHEMA = 2
LABELS = {
    "step": "one-token step",
    "prefill": "prefill, a token",
    "expand": "head",
    "tree": "tree build",
    "verify": "tree verify",
    "round": "whole round",
}
SWEPT = ("batch", "context", "slots", "nodes")  # settings in which results of one figure may differ

Result = dict[str, Any]


def make_result(
    settings: dict[str, Any],
    environment: dict[str, Any],
    ceilings: Ceilings,
    times: Sequence[dict[str, Any]],
    compile_seconds: float,
) -> Result:
    """Makes the result of one batch and context: times of its phases, and rounds over one-token steps by nodes."""
    by_phase = {(time["phase"], time["nodes"]): time for time in times}
    step, rounds = by_phase["step", None], []
    for nodes in settings["nodes"]:
        whole = by_phase["round", nodes]
        parts = [t for t in times if t["nodes"] in (None, nodes) and t["phase"] not in ("step", "prefill", "round")]
        rounds.append(
            {
                "nodes": nodes,
                "round_over_step": whole["ms"] / step["ms"],
                "floor_round_over_step": whole["floor_ms"] / step["floor_ms"],
                "sum_of_phases_ms": sum(part["ms"] for part in parts),
            }
        )
    return {
        "settings": settings,
        **environment,
        "ceilings": asdict(ceilings),
        "phases": list(times),
        "rounds": rounds,
        "compile_seconds": compile_seconds,
    }


def read_results(path: str | Path) -> list[Result]:
    """Reads the results of earlier runs; none if there is no file yet.

    Raises:
      ValueError: a file that cannot be read or holds anything else.
    """
    files.check_output(path)
    if not Path(path).exists() or not Path(path).stat().st_size:
        return []
    held = read_json(path)
    if not isinstance(held, dict) or held.get("schema") != SCHEMA or not isinstance(held.get("results"), list):
        raise ValueError(f"{path}: got no results of `bench latency` (schema {SCHEMA}); write to another file")
    return held["results"]


def merge(results: Sequence[Result], result: Result) -> list[Result]:
    """Returns all results, the new one in place of one with equal settings, versions and hardware."""
    same = ("settings", "versions", "hardware")
    return [other for other in results if any(other[key] != result[key] for key in same)] + [result]


def show(result: Result) -> None:
    """Prints a result."""
    settings, hardware, ceilings = result["settings"], result["hardware"], result["ceilings"]
    mesh = "" if settings["mesh"] is None else ", mesh " + " x ".join(map(str, settings["mesh"].values()))
    quantized = f", {settings['quantize']} verifier" if settings.get("quantize") else ""
    table = report.make_table("", ["*phase", "nodes", "ms", "quartiles", "floor ms", "ms / floor"])
    for time in result["phases"]:
        ratio = time["ms"] / time["floor_ms"] if time["floor_ms"] else math.inf
        table.add_row(
            LABELS.get(time["phase"], time["phase"]),
            str(time["nodes"] or "-"),
            f"{time['ms']:.4f}",
            f"{time['low_ms']:.4f} - {time['high_ms']:.4f}",
            f"{time['floor_ms']:.4f}",
            f"{ratio:.2f}" if ratio < 1000 else "> 1000",
        )
    lines = [
        f"{settings['shape']}, {settings['weights']} weights, {settings['dtype']}{quantized}, batch {settings['batch']}, "
        f"context {settings['context']} ({settings['slots']} slots){mesh}, {settings['builder']}, {settings['head']} head, "
        f"{settings['candidates']} candidates, {settings['children']} children, T {settings['temperature']:g}",
        f"{hardware['device']} ({hardware['backend']}): copy {ceilings['copy_bytes_per_second'] / 1e9:.4g} GB/s, "
        f"{settings['dtype']} matmul {ceilings['matmul_flops_per_second'] / 1e12:.4g} TFLOP/s a device; "
        + ", ".join(f"{name} {version}" for name, version in result["versions"].items()),
    ]
    ends = [
        f"  round / step at {r['nodes']} nodes: {r['round_over_step']:.2f} "
        f"(of the floors: {r['floor_round_over_step']:.2f}); its phases alone sum to {r['sum_of_phases_ms']:.4f} ms"
        for r in result["rounds"]
    ]
    for read in result.get("experts", ()):
        counts = read["by_layer"]
        ends.append(
            f"  experts that a layer reads in a pass over {read['tokens']} tokens a sequence: {np.mean(counts):.1f} of "
            f"{read['of']} (from {min(counts):.1f} to {max(counts):.1f} by layer; {read['at_random']:.1f} at random)"
        )
    print(*lines, sep="\n")
    report.table_console().print(table)
    print(*ends, f"  compiled and warmed up before, in {result['compile_seconds']:.0f} s", sep="\n", flush=True)


def plot(results: Sequence[Result], path: str | Path) -> None:
    """Draws round / step over nodes: a panel per context, a line per batch; dotted, the same for the floors."""
    from matplotlib.figure import Figure

    contexts = sorted({result["settings"]["context"] for result in results})
    figure = Figure(figsize=(4.5 * len(contexts), 3.6), layout="constrained")
    for axis, context in zip(figure.subplots(1, len(contexts), squeeze=False, sharey=True)[0], contexts, strict=True):
        batches: dict[int, dict[int, Any]] = {}
        for settings, rounds in ((result["settings"], result["rounds"]) for result in results):
            if settings["context"] == context:
                batches.setdefault(settings["batch"], {}).update({r["nodes"]: r for r in rounds})
        for batch, rounds in sorted(batches.items()):
            nodes = sorted(rounds)
            (line,) = axis.plot(nodes, [rounds[n]["round_over_step"] for n in nodes], "o-", label=f"batch {batch}")
            axis.plot(nodes, [rounds[n]["floor_round_over_step"] for n in nodes], ":", color=line.get_color())
        axis.set(title=f"context {context}", xlabel="nodes verified per round", xscale="log", ylim=(0, None))
        axis.set_ylabel("round / one-token step (dotted: floors)")
        axis.legend()
    settings = results[0]["settings"]
    figure.suptitle(f"{settings['shape']}, {settings['dtype']}, {results[0]['hardware']['device']}")
    plots.save(figure, path)


def is_same_sweep(result: Result, other: Result) -> bool:
    """Tells whether two results may be in one figure."""

    def fixed(result: Result) -> tuple[Any, ...]:
        settings = {name: value for name, value in result["settings"].items() if name not in SWEPT}
        return settings, result["versions"], result["hardware"]

    return fixed(result) == fixed(other)
