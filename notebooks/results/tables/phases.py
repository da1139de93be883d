"""Tables of the measured phases of a round."""

from collections.abc import Iterable
from typing import Any

from forms import TABLES, read, section, shown

PHASES = "nodes | draft | tree | verify | accept | commit | round | one-token step | round / step"


def _phase_rows(runs: Iterable[dict[str, Any]], *keys: str) -> list[list[Any]]:
    """Returns a row for every result of `bench latency` and number of nodes: settings, then the cells of PHASES."""
    rows = []
    for run in runs:
        settings = run["settings"] | run["versions"]
        time = {(row["phase"], row["nodes"]): row["ms"] for row in run["phases"]}
        for nodes in settings["nodes"]:
            if ("draft", nodes) not in time:  # in older results all trees share it, in the oldest it is two phases
                time["draft", nodes] = time["draft", None] + time.get(("expand", None), 0.0)
            parts = [time[phase, nodes] for phase in ("draft", "tree", "verify", "accept", "commit", "round")]
            parts += [time["step", None], time["round", nodes] / time["step", None]]
            rows.append([*(settings[key] for key in keys), nodes, *(f"{part:.2f}" for part in parts)])
    return rows


def latency(name: str, header: str, *keys: str) -> str:
    """Formats the times of phases; `header` has a heading for each of the settings `keys`."""
    runs = read(f"latency_{name}.json")
    return section(f"{header} | {PHASES}", _phase_rows(runs["results"], *keys), runs["note"], runs["commands"])


@shown
def round_times() -> str:
    """Formats rounds beside one-token steps, on a CPU and on an H200, each with the default attention of the device."""
    smollm2, qwen3, rows = read("latency_smollm2.json"), read("latency_h200.json"), []
    on_cpu = next(run for run in smollm2["results"] if run["settings"]["dtype"] == "bfloat16")
    on_gpu = [run for run in qwen3["results"] if run["settings"]["attention"] == "pallas-gpu"]
    for name, runs in (("SmolLM2, two Zen 5 cores", [on_cpu]), ("Qwen3-4B, one H200", on_gpu)):
        for jax, context, nodes, *cells in _phase_rows(runs, "jax", "context"):
            rows.append([name, jax, context, nodes, *cells[-3:]])
    note = (
        "Milliseconds; bfloat16, batch 1, greedy. SmolLM2 with its drafter and n-grams; Qwen3-4B with random weights, "
        "16 candidates with 16 children each:"
    )
    commands = [smollm2["commands"][0].replace("float32", "bfloat16"), qwen3["commands"][0].partition(" --attention")[0]]
    header = "model and device | jax | tokens in the cache | nodes | round | one-token step | round / step"
    return section(header, rows, note, commands)


@shown
def accept_costs() -> str:
    runs = read("accept_costs.json")
    rows = []
    for row in runs["rows"]:
        builder = "one path" if row.get("branches") == 1 else row["builder"]
        rows.append([builder, row["acceptance"], f"{row['temperature']:g}", row["batch"], f"{row['accept_ms']:.1f}"])
    header = "builder | rule | T | batch | accept phase, ms"
    return section(header, rows, f"{runs['hardware']}:", [runs["command"]])


TABLES["latency"] = lambda: latency("tiny", "candidates, children", "candidates")
TABLES["latency-smollm2"] = lambda: latency("smollm2", "jax | dtype", "jax", "dtype")
TABLES["latency-h200"] = lambda: latency("h200", "tokens in the cache | attention", "context", "attention")
