"""Results of `treeflash bench latency`: derived numbers, the file that keeps them, the table and the figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from treeflash_jax import files
from treeflash_jax.bench import plots
from treeflash_jax.checks import parse_json
from treeflash_jax.devices import Ceilings
from treeflash_jax.settings import renamed

SCHEMA = 1
LABELS = {
    "step": "one-token step",
    "prefill": "prefill, a token",
    "draft": "draft",
    "expand": "second stage",
    "tree": "tree build",
    "verify": "tree verify",
    "accept": "accept",
    "commit": "commit",
    "round": "whole round",
}
OF_A_SWEEP = ("batch", "context", "slots", "nodes")  # settings that results of one figure may differ in

Result = dict[str, Any]


def result_of(
    settings: dict[str, Any],
    environment: dict[str, Any],
    ceilings: Ceilings,
    rows: Sequence[dict[str, Any]],
    compile_seconds: float,
) -> Result:
    """One batch and context: its rows, and what follows from them."""
    at = {(row["stage"], row["nodes"]): row for row in rows}
    step = at["step", None]
    rounds = []
    for nodes in settings["nodes"]:
        whole = at["round", nodes]
        parts = [row for row in rows if row["nodes"] in (None, nodes) and row["stage"] not in ("step", "prefill", "round")]
        rounds.append(
            {
                "nodes": nodes,
                "round_over_step": whole["ms"] / step["ms"],
                "floor_round_over_step": whole["floor_ms"] / step["floor_ms"],
                "sum_of_stages_ms": sum(part["ms"] for part in parts),
            }
        )
    return {
        "settings": settings,
        **environment,
        "ceilings": asdict(ceilings),
        "stages": list(rows),
        "rounds": rounds,
        "growth": growth(rows),
        "compile_seconds": compile_seconds,
    }


def growth(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """How each stage's time grows with nodes, as a power of them; 1 is linear.

    Returns:
      By stage: "exponent", the slope of log ms over log nodes by least squares, and "steepest", that between the two
      neighbouring numbers of nodes where it is largest. Empty with one number of nodes.
    """
    found = {}
    for stage in dict.fromkeys(row["stage"] for row in rows if row["nodes"] is not None):
        points = sorted((math.log(row["nodes"]), math.log(row["ms"])) for row in rows if row["stage"] == stage)
        if len(points) > 1:
            x, y = np.array(points).T
            found[stage] = {
                "exponent": float(np.polyfit(x, y, 1)[0]),
                "steepest": float(np.max(np.diff(y) / np.diff(x))),
            }
    return found


def read_results(path: str | Path) -> list[Result]:
    """Results of earlier runs; none where there is no file yet.

    Raises:
      ValueError: a file that cannot be read or holds anything else.
    """
    try:
        text = files.regular(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    try:
        held = parse_json(text) if text.strip() else {"schema": SCHEMA, "results": []}
    except ValueError as error:
        raise ValueError(f"{path}: got malformed JSON ({error}); write to another file") from None
    if not isinstance(held, dict) or held.get("schema") != SCHEMA or not isinstance(held.get("results"), list):
        raise ValueError(f"{path}: got no results of `bench latency` (schema {SCHEMA}); write to another file")
    return [one | {"settings": renamed(one["settings"])} for one in held["results"]]


def merge(results: Sequence[Result], result: Result) -> list[Result]:
    """All results, those of equal settings, versions and hardware replaced by the new one."""
    same = ("settings", "versions", "hardware")
    return [other for other in results if any(other[key] != result[key] for key in same)] + [result]


def lines(result: Result) -> list[str]:
    """A result as people read it."""
    settings, hardware, ceilings = result["settings"], result["hardware"], result["ceilings"]
    mesh = "" if settings["mesh"] is None else ", mesh " + " x ".join(map(str, settings["mesh"].values()))
    quantized = f", {settings['quantize']} verifier" if settings.get("quantize") else ""
    text = [
        f"{settings['shape']}, {settings['weights']} weights, {settings['dtype']}{quantized}, batch {settings['batch']}, "
        f"context {settings['context']} ({settings['slots']} slots){mesh}, {settings['builder']}, {settings['head']} head, "
        f"{settings['candidates']} candidates, {settings['children']} children, T {settings['temperature']:g}",
        f"{hardware['device']} ({hardware['backend']}): copy {ceilings['copy_bytes_per_second'] / 1e9:.4g} GB/s, "
        f"{settings['dtype']} matmul {ceilings['matmul_flops_per_second'] / 1e12:.4g} TFLOP/s a device; "
        + ", ".join(f"{name} {version}" for name, version in result["versions"].items()),
        f"  {'stage':17}{'nodes':>6}{'ms':>11}{'quartiles':>24}{'floor ms':>11}{'ms / floor':>12}",
    ]
    for row in result["stages"]:
        ratio = row["ms"] / row["floor_ms"] if row["floor_ms"] else math.inf
        label = LABELS.get(row["stage"], row["stage"])
        spread = f"{row['low_ms']:.4f} - {row['high_ms']:.4f}"
        text.append(
            f"  {label:17}{row['nodes'] or '-':>6}{row['ms']:11.4f}{spread:>24}{row['floor_ms']:11.4f}"
            + (f"{ratio:12.2f}" if ratio < 1000 else f"{'> 1000':>12}")
        )
    for one in result["rounds"]:
        text.append(
            f"  round / step at {one['nodes']} nodes: {one['round_over_step']:.2f} (of the floors: "
            f"{one['floor_round_over_step']:.2f}); its stages alone sum to {one['sum_of_stages_ms']:.4f} ms"
        )
    for one in result.get("experts", ()):
        counts = one["by_layer"]
        text.append(
            f"  experts that a layer reads in a pass over {one['tokens']} tokens a sequence: {np.mean(counts):.1f} of "
            f"{one['of']} (from {min(counts):.1f} to {max(counts):.1f} by layer; {one['at_random']:.1f} at random)"
        )
    if result["growth"]:
        powers = (f"{name} {one['exponent']:.2f} ({one['steepest']:.2f})" for name, one in result["growth"].items())
        text.append("  growth as a power of the nodes, and where it is steepest: " + ", ".join(powers))
    return [*text, f"  compiled and warmed up before, in {result['compile_seconds']:.0f} s"]


def plot(results: Sequence[Result], path: str | Path) -> None:
    """Round / step over nodes: a panel per context, a line per batch; dotted, the same of the floors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    contexts = sorted({result["settings"]["context"] for result in results})
    figure, axes = pyplot.subplots(1, len(contexts), squeeze=False, sharey=True, figsize=(4.5 * len(contexts), 3.6))
    for axis, context in zip(axes[0], contexts, strict=True):
        here = [result for result in results if result["settings"]["context"] == context]
        for batch in sorted({result["settings"]["batch"] for result in here}):
            rounds = [one for result in here if result["settings"]["batch"] == batch for one in result["rounds"]]
            rounds = [by_nodes[nodes] for by_nodes in [{one["nodes"]: one for one in rounds}] for nodes in sorted(by_nodes)]
            nodes = [one["nodes"] for one in rounds]
            (line,) = axis.plot(nodes, [one["round_over_step"] for one in rounds], "o-", label=f"batch {batch}")
            axis.plot(nodes, [one["floor_round_over_step"] for one in rounds], ":", color=line.get_color())
        axis.set(title=f"context {context}", xlabel="nodes verified per round", xscale="log", ylim=(0, None))
        axis.legend()
    settings = results[0]["settings"]
    axes[0, 0].set_ylabel("round / one-token step (dotted: floors)")
    figure.suptitle(f"{settings['shape']}, {settings['dtype']}, {results[0]['hardware']['device']}")
    figure.tight_layout()
    plots.save(figure, path)
    pyplot.close(figure)


def of_one_sweep(result: Result, other: Result) -> bool:
    """Whether two results may stand in one figure."""

    def rest(result: Result) -> tuple[Any, ...]:
        settings = {name: value for name, value in result["settings"].items() if name not in OF_A_SWEEP}
        return settings, result["versions"], result["hardware"]

    return rest(result) == rest(other)
