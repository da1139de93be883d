"""Writes the tables of the README files from the JSON files in this folder and from the declared settings.

    python notebooks/results/tables.py

A table stands between the lines `<!-- table: NAME -->` and `<!-- end -->`; NAME is a key of TABLES. A test fails if a page
and the results disagree.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent
ROOT = RESULTS.parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted(page for page in RESULTS.glob("*.md") if page.name != "README.md"),
    *sorted(page for part in ("notebooks", "train", "treeflash_jax") for page in (ROOT / part).rglob("README.md")),
]
SYSTEMS = {
    "ar": "one token at a time",
    "chain": "chain (DFlash)",
    "marginal": "marginal tree (DDTree)",
    "treeflash": "TreeFlash tree",
}
GIB = 2**30
Rows = Iterable[Iterable[Any]]


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def table(header: str, rows: Rows) -> str:
    """Formats a Markdown table; `header` separates its columns by "|"."""
    columns = [column.strip() for column in header.split("|")]
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def section(header: str, rows: Rows, note: str, commands: Iterable[str] = (), language: str = "sh") -> str:
    """Formats a table, a note on it, and the commands that made its numbers."""
    lines = [table(header, rows), "", note[0].upper() + note[1:]]
    return "\n".join(lines + (["", f"```{language}", *commands, "```"] if commands else []))


def interval(ratio: dict[str, float] | None) -> str:
    return "{value:.2f} [{low:.2f}, {high:.2f}]".format(**ratio) if ratio else ""


def tau() -> str:
    runs, rows = read("tau_gsm8k.json"), []
    sampled = {row["system"].partition("@")[0]: row for row in runs["sampled"]["rows"]}
    for greedy in runs["greedy"]["rows"]:
        system = greedy["system"].partition("@")[0]
        name, measured = SYSTEMS[system.partition("-")[0]], (greedy, sampled[system])
        taus = [f"{row['tau']:.2f}" for row in measured]
        ratios = [interval(row["tau_ratio"]) if "TreeFlash" in name else "" for row in measured]
        rows.append([name, greedy["nodes"] or "", taus[0], ratios[0], taus[1], ratios[1]])
        assert all(row["identical"] == row["responses"] for row in measured), "the caption says so"
    settings, where, versions = (runs["greedy"][key] for key in ("settings", "hardware", "versions"))
    caption = (
        f"{runs['greedy']['rows'][0]['prompts']} prompts, at most {settings['max_new_tokens']} new tokens, "
        f"{settings['dtype']} on {where['cores']} CPU cores, batch {settings['batch_size']}, jax {versions['jax']}; "
        "all answers equal those of one-token decoding; "
        "commands in [tau_gsm8k.json](tau_gsm8k.json)."
    )
    header = "drafted by | nodes | tau, T = 0 | over the marginal tree | tau, T = 1 | over the marginal tree"
    return section(header, rows, caption)


def speeds() -> str:
    """Formats tokens per second on several devices, beside llama.cpp if it was measured."""
    peers, tiny, h100 = read("peers_smollm2.json"), read("drafters_tiny.json"), read("published_h100.json")
    rows = []
    for drafting, dtype, model, device in (
        ("trained", "bfloat16", "SmolLM2-135M", "2 CPU cores, amx_bf16"),
        ("zen5", "bfloat16", "SmolLM2-135M", "2 CPU cores, avx512_bf16"),
        ("ngrams", "float32", "SmolLM2-135M, n-grams alone", "2 CPU cores, float32"),
    ):
        systems = peers[drafting]["runs"]["mixed"]["systems"]
        names = f"one token, {dtype}", f"drafted, {dtype}", "llama.cpp, Q4_1"
        rows.append([model, device, *(f"{systems[name]['tokens_per_second']:.1f}" for name in names)])
    ways = {(system["drafter"], system["way"], system["nodes"]): system["tokens_per_second"] for system in tiny["systems"]}
    paces = [f"{ways[key]:.0f}" for key in (("none", "one token", None), ("TreeFlash", "tree", 16))]
    rows.append(["`tiny`", "2 CPU cores, float32", *paces, "-"])
    plain = next(row["ms"] for row in h100["rows"] if row["name"] == "one token at a time")
    rows.append(["Qwen3-4B, random weights", "one H100", f"{1000 / plain:.0f}", "-", "-"])
    note = (
        "Tokens per second; T = 0, batch 1, 64 new tokens, prompts included; bfloat16 with 8 nodes, float32 with 16. "
        "llama.cpp: 4-bit weights. Commands: [SmolLM2](notebooks/results/peers_smollm2.md), "
        "[tiny](notebooks/results/drafters_tiny.md), [Qwen3-4B](notebooks/results/published_h100.md)."
    )
    return section("model | device | one token at a time | drafted | llama.cpp", rows, note)


def tau_smollm2() -> str:
    runs, rows = read("tau_smollm2.json"), []
    for prompts, name in runs["names"].items():
        measured = {(row["temperature"], row["system"]): row for row in runs["run"]["systems"] if row["set"] == prompts}
        for temperature in sorted({temperature for temperature, _ in measured}):
            marginal, tree = (measured[temperature, system] for system in runs["systems"])
            taus = [f"{row['tau']:.2f}" for row in (marginal, tree)]
            rows.append([name, f"{temperature:g}", *taus, interval(tree["tau_ratio"])])
    header = "prompts | T | marginal tree (DDTree) | tree with the head | with the head over without"
    return section(header, rows, f"{runs['note']}:", [runs["command"]])


TREES = {
    "joined-8": "8 nodes, joined with n-grams",
    "joined-5:block_size=5": "5 nodes, joined with n-grams",
    "treeflash-8": "8 nodes",
}


def _speed_smollm2() -> Iterable[tuple[str, dict[str, dict[str, Any]]]]:
    """Yields every set of prompts with its systems by name."""
    runs = read("speed_smollm2.json")
    for prompts, name in runs["names"].items():
        yield name, {row["system"]: row for row in runs["run"]["systems"] if row["set"] == prompts}


def speed_smollm2() -> str:
    rows = []
    for prompts, systems in _speed_smollm2():
        plain, (tree, *others) = systems["ar"], [systems[name] for name in TREES]
        speeds = [f"{row['tokens_per_second']:.1f}" for row in (plain, tree)]
        rows.append([prompts, f"{tree['tau']:.2f}", *speeds, *(interval(row["speedup"]) for row in (tree, *others))])
    header = "prompts | tau | one token, tokens/s | drafted, tokens/s | speedup"
    runs = read("speed_smollm2.json")
    return section(f"{header} | 5 nodes of blocks of 5 | 8 nodes, no n-grams", rows, f"{runs['note']}:", [runs["command"]])


def batches_smollm2() -> str:
    """Formats the speedup of trees by the number of sequences decoded together."""
    runs, names, rows = read("speed_smollm2.json")["batches"], read("speed_smollm2.json")["names"], []
    for run in runs["runs"]:
        speedups = {(row["system"], row["set"]): f"{row['speedup']['value']:.2f}" for row in run["systems"]}
        for system in sorted({system for system, _ in speedups} - {"ar"}):
            cells = [speedups[system, prompts] for prompts in names]
            rows.append([run["sequences"], run["dtype"], system.removeprefix("joined-"), *cells])
    return section(f"sequences | dtype | nodes | {' | '.join(names.values())}", rows, f"{runs['note']}:", [runs["command"]])


def _train_steps() -> list[dict[str, Any]]:
    """Returns the compiled steps, without those with chunked attention, which kernels replace."""
    return [step for step in read("train_steps.json").values() if step["attention"] != "chunked"]


def train_steps() -> str:
    rows = []
    for step in _train_steps():
        memory = step["bytes_per_device"]
        cells = [step["shape"], step["topology"], " and ".join(step["trains"]), step["batch"], step["attention"]]
        cells += [f"{memory[part] / GIB:.1f} GiB" for part in ("total", "temporary")]
        rows.append([*cells, f"{step['flops_per_device']:.1e}"])
    return table("model | topology | trains | batch | attention | memory a chip | of it temporary | FLOPs a chip", rows)


def train_batches() -> str:
    """Formats the largest batch that fits, by a line through the memory of two compiled batches."""
    from treeflash_jax.core.devices import GPU_MEMORY, TPU_MEMORY

    rows, compiled = [], {}
    for step in _train_steps():
        kind = step["topology"], " and ".join(step["trains"]), step["attention"]
        chips = step["mesh"]["data"] * step["mesh"]["fsdp"]
        compiled.setdefault((*kind, chips), []).append((step["batch"] // chips, step["bytes_per_device"]["total"]))
    for (*kind, chips), points in compiled.items():
        if len(points) < 2:
            continue
        (few, small), (many, large) = sorted(points)
        memory, slope = (TPU_MEMORY | GPU_MEMORY)[kind[0].split(":")[0]], (large - small) / (many - few)
        rows.append([*kind, f"{slope / GIB:.2f} GiB", chips * int(few + (memory - small) / slope)])
    return table("topology | trains | attention | memory of a sequence | largest batch", rows)


def pod_minutes() -> str:
    """Formats the least times of the stages of Qwen3-4B: FLOPs or bytes over the rates of data sheets."""
    from treeflash_jax.bench import shapes
    from treeflash_jax.core.devices import PEAK_RATES

    steps = [step for step in read("train_steps.json").values() if step["shape"] == "qwen3-4b"]
    flops = {len(step["trains"]): step["flops_per_step"] / step["batch"] / step["sequence_length"] for step in steps}
    model = shapes.find_verifier("qwen3-4b")
    cache = 2 * 2 * model.num_layers * model.num_kv_heads * model.head_dim  # bytes per token
    read_per_step = 8.04e9 + 64 * 1000 * cache  # of 64 answers
    rows = []
    for stage, tokens in (("respond", 1e8), ("drafter", 6e8), ("head", 1e8)):
        cells = [stage, f"{tokens:.0e}".replace("+0", "")]
        for chips, kind in ((16, "TPU v5 lite"), (8, "NVIDIA H200")):
            peak, bandwidth = PEAK_RATES[kind]
            if stage == "respond":
                seconds = tokens / 64 * read_per_step / (bandwidth * chips)
            else:
                seconds = tokens * flops[1 if stage == "drafter" else 2] / (chips * peak)
            cells.append(f"{seconds / 60:.0f} min")
        rows.append(cells)
    return table("stage | tokens | 16 v5e | 8 H200", rows)


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


def compiled(name: str) -> str:
    """Formats the memory of rounds."""
    rows = []
    for result in read(name).values():
        size = {name: count / GIB for name, count in result["bytes_per_device"].items()}
        parts = [size["verifier"], size["drafter"] + size.get("head", 0), size["verifier_cache"] + size["drafter_cache"]]
        parts += [max(size["round"], size["prefill"])]
        total = f"{size['total']:.2f} of {result['bytes_limit'] / GIB:.0f}"
        mesh = "x".join(map(str, result["mesh"].values()))
        rows.append([result["shape"], result["topology"], mesh, *(f"{part:.2f}" for part in parts), total])
    return table("model | topology | mesh | verifier | drafter and head | caches | temporary | total", rows)


def tpu_estimates() -> str:
    """Formats what the compiler for TPUs estimates for steps and rounds, beside the time of reading their bytes."""
    rows, steps = [], {}
    for result in read("tpu_estimates.json").values():
        times = result["estimate"]
        total, chip = math.fsum(times["milliseconds"].values()), result["topology"].partition(":")[0]
        place = result["shape"], chip
        kind = "step" if result["nodes"] == 1 else f"round of {result['nodes']} nodes"
        if result["nodes"] == 1:
            steps[place] = total  # rounds follow the step of the same forms
        phases = [f"{times['milliseconds'].get(phase, 0):.2f}" for phase in ("draft", "tree", "verify", "accept", "commit")]
        over_step = f"{total / steps[place]:.2f}" if result["nodes"] > 1 else ""
        ratio = f"{total / times['reading']:.2f}"
        what = *place, kind, result["products"]
        rows.append(
            [*what, *phases, f"{total:.2f}", f"{times['reading']:.2f}", ratio, f"{times['copying']:.2f}", over_step]
        )
    names = "draft | tree | verify | accept | commit | total | reading | total / reading | copies | round / step"
    return table(f"model | chip | program | on the matrix unit | {names}", rows)


def gemma_rounds() -> str:
    """Formats memory, launches and the compiler's estimates of steps and rounds of Gemma 4 with its assistants."""
    rows, steps = [], {}
    for result in read("gemma_rounds.json").values():
        size = {name: count / GIB for name, count in result["bytes_per_device"].items()}
        chip, is_step = result["topology"].partition(":")[0], result["nodes"] == 1
        what = [result["shape"], chip, "step" if is_step else f"round of {result['nodes']}"]
        parts = [size["verifier"], size["drafter"], size["verifier_cache"], max(size["round"], size["prefill"])]
        what += [f"{part:.2f}" for part in parts] + [f"{result['launches']:,}"]
        if "estimate" not in result:  # for a GPU
            rows.append([*what, *[""] * 6])
            continue
        times = result["estimate"]["milliseconds"]
        total = math.fsum(times.values())
        if is_step:
            steps[result["shape"]] = total
        what += [f"{times.get(phase, 0):.2f}" for phase in ("draft", "tree", "verify", "other")]
        rows.append([*what, f"{total:.2f}", "" if is_step else f"{total / steps[result['shape']]:.2f}"])
    sizes, names = "verifier | assistant | caches | temporary", "draft | tree | verify | other | total"
    return table(f"model | chip | program | {sizes} | launches | {names} | round / step", rows)


def four_bit_products() -> str:
    """Formats estimated times of products with weights of four bits, over that of reading the weights in bfloat16."""
    times: dict[tuple[str, ...], dict[int, float]] = {}
    for result in read("four_bit_products.json"):
        place = result["chip"].partition(":")[0], result["form"], str(result["group"] or "")
        times.setdefault(place, {})[result["vectors"]] = result["over_reading_bfloat16"]
    counts = sorted({count for row in times.values() for count in row})
    rows = ([*place, *(f"{row[count]:.2f}" for count in counts)] for place, row in times.items())
    return table("chip | form | inputs of a group | " + " | ".join(f"{count}" for count in counts), rows)


def hybrid_rounds() -> str:
    """Formats weights, caches and rounds of verifiers with recurrent layers."""
    rows = []
    for _, result in sorted(read("hybrid_rounds.json").items()):
        size = {name: f"{count / GIB:.2f}" for name, count in result["bytes_per_device"].items()}
        mesh = "x".join(map(str, result["mesh"].values()))
        parts = [size[part] for part in ("verifier", "drafter", "verifier_cache", "drafter_cache")]
        total = f"{size['total']} of {result['bytes_limit'] / GIB:.0f}"
        where = result["shape"], result["topology"], mesh, result["nodes"]
        rows.append([*where, *parts, size["round"], total, f"{result['launches']:,}"])
    sizes = "verifier | drafter | verifier's cache | drafter's cache | round | total"
    return table(f"model | topology | mesh | nodes | {sizes} | launches", rows)


def fits() -> str:
    """Formats weights per device, and the number of tokens whose caches fit beside them in nine tenths of its memory."""
    rows: dict[tuple[str, str], list[str]] = {}
    for result in read("fits.json").values():
        size = result["bytes_per_device"]
        weights = size["verifier"] + size["drafter"]
        per_token = (size["verifier_cache"] + size["drafter_cache"]) / (result["batch"] * result["context"])
        tokens = (0.9 * result["bytes_limit"] - weights) / per_token
        name = result["shape"], result["quantize"] or result["dtype"]
        holds = f"{tokens / 1000:,.0f}k tokens" if tokens > 0 else "too large"
        rows.setdefault(name, [*name]).append(f"{weights / GIB:.1f} GiB, {holds}")
    more = []
    for result in read("fits_h100.json").values():
        size = result["bytes_per_device"]
        summed = sum(size[part] for part in ("verifier", "drafter", "verifier_cache", "drafter_cache"))
        more.append((size["total"] - summed) / GIB)
    note = f"Compiled for one H100, {len(more)} of these requests needed {min(more):.1f} to {max(more):.1f} GiB more."
    return section("model | weights | one H100 | one H200 | v5e-8 | v5p-8", rows.values(), note)


def drafter_rounds() -> str:
    """Formats the memory of rounds of drafters that are not block drafters."""
    rows = []
    for result in read("drafter_rounds.json").values():
        size = {name: count / GIB for name, count in result["bytes_per_device"].items()}
        parts = [size["drafter"], size["drafter_cache"], max(size["round"], size["prefill"]), size["total"]]
        names = result["drafter"], result["topology"], "x".join(map(str, result["mesh"].values())), result["batch"]
        rows.append([*names, *(f"{part:.2f}" for part in parts), result["depths"]])
    return table("drafter | topology | mesh | batch | drafter | its cache | temporary | total | levels", rows)


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


def beside_published() -> str:
    runs, rows = read("speed_b_trained.json"), []
    for key, name in (("tree", "tree"), ("one_token", "one token at a time")):
        for suffix, note in (("", ""), ("_one_thread", ", published code on one thread")):
            speed = runs[key + suffix]
            speeds = [f"{speed[which]:.0f}" for which in ("tokens_per_second", "other_tokens_per_second")]
            rows.append([name + note, *speeds, f"{speed['ratio']:.1f}"])
    header, note = "decoding | this library, tokens/s | published code, tokens/s | ratio", runs["note"]
    return section(header, rows, f"{note.partition('; one_thread')[0]}:", [runs["command"]], "text")


def beside_published_gpu() -> str:
    runs = read("published_h100.json")
    rows = [[row["name"], f"{row['ms']:.1f}", f"{row['other_ms']:.1f}", f"{row['ratio']:.1f}"] for row in runs["rows"]]
    return section("decoding | this library, ms | published code, ms | ratio", rows, f"{runs['note']}:", runs["commands"])


def beside_peers(drafting: str) -> str:
    """Formats systems of peers_smollm2.json by prompts, with speeds over the first system's."""
    runs, rows = read("peers_smollm2.json")[drafting], []
    for prompts, run in runs["runs"].items():
        plain = next(iter(run["systems"].values()))
        for system, measured in run["systems"].items():
            ratio = median(mine / theirs for mine, theirs in zip(measured["all"], plain["all"], strict=True))
            tau = f"{measured['tau']:.2f}" if "tau" in measured else ""
            same = f"{measured['same']} of {run['prompts']}"
            rows.append([prompts, system, tau, f"{measured['tokens_per_second']:.1f}", f"{ratio:.2f}", same])
    header = "prompts | decoded by | tau | tokens/s | over one-token decoding | same answers"
    return section(header, rows, f"{runs['note']}:", runs["commands"], "text")


def drafters() -> str:
    runs, rows = read("drafters_tiny.json"), []
    settings, phases = runs["settings"], ("draft", "tree", "verify", "commit", "round")
    for system in runs["systems"]:
        times = system["phases_ms"]
        if times is None:
            plain = f"{system['tokens_per_second']:.0f}"
            continue
        shares = system["acceptance_by_depth"]
        accepted = [f"{share / above:.2f}" for above, share in zip([1.0, *shares], shares[:5], strict=False)]
        pace = [f"{system['tau']:.2f}", f"{system['tokens_per_second']:.0f}"]
        times["draft"] += times.get("expand", 0.0)  # in older results a phase of its own
        costs = [f"{times[phase]:.1f}" for phase in phases]
        rows.append([system["drafter"], system["way"], system["nodes"], *pace, " ".join(accepted), *costs])
    step = median(system["phases_ms"]["step"] for system in runs["systems"] if system["phases_ms"])
    header = f"drafter | way | nodes | tau | tokens/s | accepted at depth 1 to 5 | {' | '.join(phases)}"
    note = (
        f"{settings['prompts']} GSM8K test prompts, greedy, batch 1, {settings['max_new_tokens']} "
        f"new tokens, float32, phases in ms. One token at a time: {plain} tokens/s, {step:.1f} ms a step. 2 CPU cores, jax "
        f"{runs['versions']['jax']}; {runs['note']}:"
    )
    return section(header, rows, note, runs["commands"])


def heads() -> str:
    """Formats tau of heads on one backbone, by nodes and temperature."""
    runs, rows = read("heads_tiny.json"), {}
    for row in runs["rows"]:
        cells = rows.setdefault((row["head"], row["trained"], row["nodes"]), [])
        cells += [f"{row['tau']:.2f}", interval(row["tau_ratio"])]
    header = "head | trained with | nodes | tau, T = 0 | over the marginal tree | tau, T = 1 | over the marginal tree"
    return section(header, [[*key, *cells] for key, cells in rows.items()], f"{runs['note']}:", runs["commands"])


def drafters_smollm2() -> str:
    """Formats tau, costs and gains with 8 nodes, over all sets of prompts together and the gain for each."""
    results, rows = read("drafters_smollm2.json"), []

    def total(drafter: str, top: str, bottom: str, prompts: str | None = None) -> float:
        rows = [x for x in results["greedy"] if x["drafter"] == drafter and prompts in (None, x["set"])]
        return sum(x[top] for x in rows) / sum(x[bottom] for x in rows)

    for drafter, times in results["phases_ms"].items():
        pace = partial(total, top="tokens", bottom="seconds")
        gains = [pace(drafter, prompts=name) / pace("none", prompts=name) for name in (None, *results["sets"])]
        cells = total(drafter, "committed", "rounds"), times["round"] / times["step"], *gains
        rows.append([drafter, *(f"{x:.2f}" for x in cells)])
    header = f"drafter | tau | round / step | speedup | {' | '.join(results['sets'].values())}"
    return section(header, rows, f"{results['note']}:", results["commands"])


def taus_smollm2() -> str:
    """Formats tau by the number of nodes."""
    results, rows = read("drafters_smollm2.json")["by_nodes"], {}
    for row in results["rows"]:
        rows.setdefault(row["drafter"], {})[f"{row['nodes']} nodes"] = f"{row['tau']:.2f}"
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    cells = [[name, *(row.get(column, "") for column in columns)] for name, row in rows.items()]
    return section(f"drafter | {' | '.join(columns)}", cells, f"{results['note']}:", results["commands"])


def shipped_nodes() -> str:
    """Formats tau of the drafter that ships by tree and temperature, over all sets of prompts."""
    results, rows = read("drafters_smollm2.json")["shipped"], {}
    for row in results["rows"]:
        rows.setdefault((row["tree"], row["nodes"]), {})[row["temperature"]] = row["tau"]
    temperatures = sorted({row["temperature"] for row in results["rows"]})
    cells = [[*key, *(f"{taus[t]:.2f}" for t in temperatures)] for key, taus in rows.items()]
    header = " | ".join(["tree", "nodes", *(f"tau, T = {t:g}" for t in temperatures)])
    return section(header, cells, f"{results['note']}:", results["commands"])


def small_runs() -> str:
    """Formats short training runs of one drafter that differ from the first in one setting."""
    runs, rows = read("small_runs_smollm2.json"), []
    for row in runs["rows"]:
        loss, served = row["held_out_loss"], row["served"]
        change = f"`{row['change']}`" if row.get("change") else ""
        rows.append(
            [row["name"], change, row["steps"], f"{loss:.2f}" if loss else "", interval(served and served["over_base"])]
        )
    return section("run | change | steps | held-out loss | tau ratio", rows, f"{runs['note']}:", runs["commands"])


def small_runs_cpu() -> str:
    """Formats short training runs on a CPU that differ from the first in one setting."""
    runs, rows = read("small_runs_smollm2.json")["cpu"], []
    for row in runs["rows"]:
        loss = f"{row['held_out_loss']:.2f}" if row["held_out_loss"] else ""
        change = f"`{row['change']}`" if row["change"] else ""
        tau = f"{row['tau']:.2f}" if row["tau"] else ""
        rows.append([row["name"], change, row["cpu_seconds"], loss, tau, interval(row["over_base"])])
    header = "run | change | CPU seconds | held-out loss | tau | tau ratio"
    return section(header, rows, f"{runs['note']}:", runs["commands"])


def equal_seconds() -> str:
    """Formats drafters that trained for the same CPU seconds."""
    runs, rows = read("drafters_smollm2.json")["equal_seconds"], []
    for row in runs["rows"]:
        cells = [
            f"{row['tau']:.2f}",
            f"{row['sampled_tau']:.2f}",
            *(f"{100 * x:.0f}" for x in (row["accepted"] + [0.0] * 4)[:4]),
        ]
        rows.append([row["drafter"], row["steps"], row["cpu_seconds"], *cells])
    header = "drafter | steps | CPU seconds | tau, T = 0 | tau, T = 0.7 | 1 token, % | 2 | 3 | 4"
    return section(header, rows, f"{runs['note']}:", runs["commands"])


def sampled_trees() -> str:
    runs = read("sampled_tiny.json")
    plain = {(row["temperature"], row["system"]): row["tau"] for row in runs["rows"]}
    rows = []
    for row in filter(lambda row: row["against"], runs["rows"]):
        taus = [f"{tau:.2f}" for tau in (plain[row["temperature"], row["against"]], row["tau"])]
        way = f"{row['builder']} + {row['acceptance']}"
        rows.append([f"{row['temperature']:g}", row["nodes"], way, *taus, interval(row["tau_ratio"])])
    header = "T | nodes | builder + rule | tau, best-first tree | tau | ratio"
    return section(header, rows, f"{runs['note']}:", runs["command"])


def accept_costs() -> str:
    runs = read("accept_costs.json")
    rows = []
    for row in runs["rows"]:
        builder = "one path" if row.get("branches") == 1 else row["builder"]
        rows.append([builder, row["acceptance"], f"{row['temperature']:g}", row["batch"], f"{row['accept_ms']:.1f}"])
    header = "builder | rule | T | batch | accept phase, ms"
    return section(header, rows, f"{runs['hardware']}:", [runs["command"]])


def served() -> str:
    """Formats the tokens per second that clients of servers get together."""
    runs = read("serve_smollm2.json")["clients"]
    clients = sorted({row["clients"] for row in runs["rows"]})
    speeds = {(row["server"], row["clients"]): f"{row['tokens_per_second']:.1f}" for row in runs["rows"]}
    names = dict.fromkeys(row["server"] for row in runs["rows"])
    rows = [[name, *(speeds[name, count] for count in clients)] for name in names]
    header = " | ".join(["server", *(f"{count} client{'s' * (count > 1)}" for count in clients)])
    return section(header, rows, f"{runs['note']}:", runs["commands"])


def long_prompts() -> str:
    """Formats pauses of a stream while another client's long prompt is read."""
    runs = read("serve_smollm2.json")["long_prompt"]
    keys = "words", "server", "alone", "beside", "long_prompt"
    header = "words | server | longest pause of the stream alone, s | beside the prompt, s | time to the prompt's answer, s"
    return section(header, ([row[key] for key in keys] for row in runs["rows"]), runs["note"] + ":", runs["commands"])


def schemas() -> str:
    """Formats answers that follow schemas, with drafts that obey them and drafts that do not."""
    runs = read("serve_smollm2.json")["schemas"]
    rows = [[row["schema"], row["decoded"], f"{row['tau']:.2f}", f"{row['tokens_per_second']:.1f}"] for row in runs["rows"]]
    return section("schema | decoded by | tau | tokens/s", rows, runs["note"])


def near_ties() -> str:
    rows = []
    for prompts, systems in _speed_smollm2():
        trees = [systems[name] for name in TREES]
        often = [f"one in {tree['compared_tokens'] / tree['near_ties']:.0f} tokens" for tree in trees]
        equal = [f"{tree['identical']} of {tree['compared']}" for tree in trees]
        rows.append([prompts, *(f"{which}; {rate}" for which, rate in zip(equal, often, strict=True))])
    return table(f"prompts | {' | '.join(TREES.values())}", rows)


SHOWN = (speeds, tau, tau_smollm2, speed_smollm2, near_ties, beside_published, drafters, sampled_trees)
SHOWN += (round_times, small_runs, accept_costs, fits, drafters_smollm2, taus_smollm2, drafter_rounds)
SHOWN += (train_steps, train_batches, batches_smollm2, small_runs_cpu, equal_seconds, beside_published_gpu)
SHOWN += (shipped_nodes, pod_minutes, heads, hybrid_rounds, gemma_rounds, served, schemas, long_prompts)
TABLES: dict[str, Callable[[], str]] = {function.__name__.replace("_", "-"): function for function in SHOWN} | {
    "latency": lambda: latency("tiny", "candidates, children", "candidates"),
    "latency-smollm2": lambda: latency("smollm2", "jax | dtype", "jax", "dtype"),
    "latency-h200": lambda: latency("h200", "tokens in the cache | attention", "context", "attention"),
    "peers": lambda: beside_peers("ngrams"),
    "peers-trained": lambda: beside_peers("trained"),
    "peers-zen5": lambda: beside_peers("zen5"),
    "tpu-rounds": lambda: compiled("tpu_rounds.json"),
    "tpu-estimates": tpu_estimates,
    "four-bit-products": four_bit_products,
    "experts-rounds": lambda: compiled("experts_rounds.json"),
}


def rendered(text: str) -> str:
    """Returns a page with its tables generated again."""
    made = re.compile(r"(<!-- table: ([a-z0-9-]+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
    return made.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", text)


def main() -> None:
    for page in PAGES:
        page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # the package beside the pages, whichever is installed
    main()
