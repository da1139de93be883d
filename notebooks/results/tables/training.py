"""Tables of training: its steps as compiled, its batches, and small runs."""

from typing import Any

from forms import GIB, interval, read, section, shown, table


def _train_steps() -> list[dict[str, Any]]:
    """Returns the compiled steps, without those with chunked attention, which kernels replace."""
    return [step for step in read("train_steps.json").values() if step["attention"] != "chunked"]


@shown
def train_steps() -> str:
    rows = []
    for step in _train_steps():
        memory = step["bytes_per_device"]
        cells = [step["shape"], step["topology"], " and ".join(step["trains"]), step["batch"], step["attention"]]
        cells += [f"{memory[part] / GIB:.1f} GiB" for part in ("total", "temporary")]
        rows.append([*cells, f"{step['flops_per_device']:.1e}"])
    return table("model | topology | trains | batch | attention | memory a chip | of it temporary | FLOPs a chip", rows)


@shown
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


@shown
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


@shown
def tpu_training() -> str:
    """Formats what the compiler for TPUs estimates for training steps."""
    rows, phases = [], ("teach", "draft", "score", "update", "other")
    for step in read("tpu_training.json").values():
        times = step["estimate"]["milliseconds"]
        cells = [step["topology"], " and ".join(step["trains"]), step["batch"]]
        cells += [f"{times[phase]:.0f}" for phase in phases]
        rows.append([*cells, f"{sum(times.values()):.0f}", f"{100 * step['estimate']['utilisation']:.0f}%"])
    return table(f"topology | trains | batch | {' | '.join(phases)} | total | of peak FLOP/s, at most", rows)


@shown
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


@shown
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


@shown
def recipe() -> str:
    """Formats short training runs of `train.pair`'s drafter on a CPU, by recipe."""
    runs, rows = read("recipe_smollm2.json"), []
    for row in runs["rows"]:
        loss = f"{row['held_out_loss']:.2f}" if row["held_out_loss"] else ""
        taus = [f"{tau:.2f}" for tau in (row["tau"], *row["tau_by_set"].values())] if row.get("tau") else [""] * 5
        rows.append([row["name"], row["steps"], row["cpu_seconds"], loss, interval(row.get("over_base")), *taus])
    header = "run | steps | CPU seconds | held-out loss | tau ratio | tau | GSM8K | HumanEval | MT-Bench | Vicuna"
    return section(header, rows, f"{runs['note']}:", runs["commands"])


@shown
def recipe_whole() -> str:
    """Formats the time of every stage of `train.pair`."""
    whole = read("recipe_smollm2.json")["whole"]
    return section("stage | minutes", list(whole["minutes"].items()), f"{whole['note']}:", whole["commands"])


@shown
def recipe_short() -> str:
    """Formats short runs of the recipe of `train.pair`, each with one change."""
    runs, rows = read("recipe_smollm2.json")["short"], []
    for row in runs["rows"]:
        loss = f"{row['loss']:.2f}" if row["loss"] else ""
        measured = f"{row['tau_estimate']:.2f}", f"{row['tau_marginal_8']:.2f}", f"{row['tau_8']:.2f}"
        rows.append([row["name"], row["steps"], row["cpu_seconds"], loss, *measured])
    header = "run | steps | CPU seconds | held-out loss | estimated tau | tau without head | tau"
    return section(header, rows, f"{runs['note']}:", runs["commands"])


@shown
def recipe_speed() -> str:
    """Formats the speed of the drafter of `train.pair` over one-token decoding."""
    rows = []
    for entry in read("recipe_smollm2.json")["speed"]:
        way = "with n-grams" if entry["system"].startswith("joined") else "alone"
        equal = f"{entry['identical']} of {entry['compared']}"
        rows.append([entry["cpu"], entry["set"], way, f"{entry['tau']:.2f}", interval(entry["speedup"]), equal])
    return table("CPU | prompts | drafter | tau | speedup | identical answers", rows)


@shown
def recipe_curve() -> str:
    """Formats a run of the recipe's drafter while it trained."""
    curve, rows = read("recipe_smollm2.json")["curve"], []
    for row in curve["rows"]:
        minutes = [f"{row['step'] * seconds / 60:.0f}" for seconds in curve["seconds_per_step"].values()]
        measured = "loss", "tau_estimate", "tau_marginal_8", "tau_8"
        rows.append([row["step"], *minutes, *(f"{row[f'held_out/{name}']:.2f}" for name in measured)])
    header = "steps | minutes, one core | two cores | held-out loss | estimated tau | tau without head | tau"
    return section(header, rows, f"{curve['note']}.")


@shown
def recipe_arms() -> str:
    """Formats runs of the recipe's drafter that differ in one thing."""
    arms, rows = read("recipe_smollm2.json")["arms"], []
    for row in arms["rows"]:
        tau = f"{row['tau_8']:.2f}" if row["tau_8"] else ""
        losses = f"{row['held_out_loss']:.2f}", f"{row['tau_estimate']:.2f}"
        rows.append([row["answers"], row["step"], row["name"], *losses, tau])
    return section("answers | step | run | held-out loss | estimated tau | tau", rows, f"{arms['note']}.")


@shown
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
