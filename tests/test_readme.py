"""README keeps its promises: the example runs as printed, commands parse, files it names exist."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path

import jax.numpy as jnp
import pytest

from train import compile as train_compile
from train import config
from treeflash_jax import cli
from treeflash_jax.bench import shapes
from treeflash_jax.bench.floors import Ceilings, stage_work
from treeflash_jax.state import DecodePlan

ROOT = Path(__file__).parent.parent
STAGES = {
    "pair": "PairConfig",
    "respond": "RespondConfig",
    "head": "HeadStage",
    "drafter": "DrafterStage",
    "export": "ExportStage",
}
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_works_as_printed(capsys):
    [example] = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(example.strip().splitlines()) <= 10
    exec(compile(example, "README.md", "exec"), {})
    assert re.search(r"tokens in \d+ rounds: tau \d", capsys.readouterr().out)


def test_two_commands_come_first():
    first, second = re.search(r"```sh\n(.*?)```", README, flags=re.DOTALL).group(1).strip().splitlines()
    assert first.startswith("python3 -m venv") and first.endswith("treeflash demo")
    assert second.startswith("python3 -m venv") and " -m pytest " in second


def test_printed_commands_parse():
    commands = re.findall(r"^treeflash (.*)$", README, flags=re.MULTILINE)
    assert commands
    for command in commands:
        assert callable(cli._parser().parse_args(shlex.split(command)).run)


def test_printed_training_commands_are_understood():
    commands = re.findall(r"^(?:srun )?python -m train\.(\w+) ([^#\n]*)", README, flags=re.MULTILINE)
    assert {stage for stage, _ in commands} >= {"pair", "respond", "head", "drafter", "export"}
    for stage, words in commands:
        module = importlib.import_module(f"train.{stage}")
        if stage == "compile":
            continue  # tests/test_train_compile.py
        kind = getattr(module, STAGES[stage])
        files = [ROOT / word for word in words.split() if "=" not in word]
        config.load(kind, files[0] if files else None, [word for word in words.split() if "=" in word])


@pytest.mark.parametrize("option", sorted(set(re.findall(r"`(--[a-z-]+)", README))))
def test_named_options_exist(option, capsys):
    programs = (
        (cli.main, ["generate"]),
        (cli.main, ["bench", "latency"]),
        (cli.main, ["bench", "memory"]),
        (train_compile.main, []),
    )
    for main, command in programs:
        with pytest.raises(SystemExit):
            main([*command, "--help"])
    assert re.search(rf"{option}\b", capsys.readouterr().out)


def test_named_files_exist():
    for row in re.findall(r"^\| (`[a-z_]+[./].*?) \|", README, flags=re.MULTILINE):
        for name in re.findall(r"`([a-z_/]+(?:\.py|/))`", row):
            assert (ROOT / "treeflash_jax" / name).exists() or (ROOT / name).exists(), name


def read(name: str) -> dict:
    return json.loads((ROOT / "notebooks" / "results" / name).read_text())


def test_measured_numbers_are_those_of_the_results():
    results = read("tau_gsm8k.json")
    rows = re.findall(r"^\| (chain|marginal tree|TreeFlash tree).*?(\d+) rows \| (.*) \|$", README, flags=re.MULTILINE)
    assert len(rows) == 5
    base = {"chain": "chain", "marginal tree": "marginal-{}", "TreeFlash tree": "treeflash-{}"}
    for name, nodes, cells in rows:
        system, printed = base[name].format(nodes), [cell.strip() for cell in cells.split("|")]
        for run, (tau, ratio) in zip(("greedy", "sampled"), (printed[:2], printed[2:]), strict=True):
            [row] = [row for row in results[run]["rows"] if row["system"].partition("@")[0] == system]
            assert tau == f"{row['tau']:.2f}"
            if ratio:
                found = row["tau_ratio"]
                assert ratio == f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"
                assert row["against"].partition("@")[0] == f"marginal-{nodes}" and row["prompts"] == 64
    for command in results["command"]:
        assert command.split(" --out")[0].replace(" --temperature 0 ", " ") in README
    sampled = read("rules_shipped.json")["rows"]
    table = re.findall(r"^\| ([\d.]+) \| (16|64), (\d+) \| (.*) \|$", README, flags=re.MULTILINE)
    assert len(table) == 5
    for temperature, nodes, candidates, cells in table:
        where = {"temperature": float(temperature), "nodes": int(nodes), "candidates": int(candidates)}
        plain, hybrid = (
            next(row for row in sampled if row["builder"] == name and where.items() <= row.items() and row["prompts"] == 64)
            for name in ("best-first", "hybrid")
        )
        found = (hybrid[key] for key in ("tau_ratio", "expected_tau_ratio"))
        ratios = ("{value:.2f} [{low:.2f}, {high:.2f}]".format(**ratio) for ratio in found)
        assert cells.split(" | ") == [f"{plain['tau']['value']:.2f}", f"{hybrid['tau']['value']:.2f}", *ratios]
    trained = read("train_tiny_head.json")
    last = trained["curve"][-1]
    taus = [last[name] for name in ("held_out/tau_64", "held_out/tau_marginal_64")]
    assert "held-out tau of {:.2f} at 64 rows, against {:.2f}".format(*taus) in README
    seconds = sum(trained["cpu_seconds"].values())
    assert f"({trained['ratio_64']:.2f} x;" in README and f"in {seconds} CPU seconds" in README
    assert trained["ratio_64"] == round(taus[0] / taus[1], 3) >= 1.10 and seconds < 20 * 60
    for step in (*read("tpu_train_steps.json").values(), *read("gpu_train_steps.json").values()):
        memory, flops = step["bytes_per_chip"]["total"] / 2**30, step["flops_per_chip"]
        moved = {kind: one["bytes"] / 2**30 for kind, one in step["collectives"].items()}
        gathered, reduced = moved["all-gather"], moved["all-reduce"] + moved.get("reduce-scatter", 0)
        row = [
            step["topology"],
            " and ".join(step["trains"]),
            step["batch"],
            step["anchors"],
            f"{memory:.1f} GiB",
            f"{flops:.1e}",
            f"{gathered:.1f} / {reduced:.1f} GiB",
        ]
        assert "| " + " | ".join(map(str, row)) + " |" in README
    for r in read("tpu_rounds.json").values():
        size = {name: count / 2**30 for name, count in r["bytes_per_device"].items()}
        moved = {kind: one["bytes"] / 2**20 for kind, one in r["collectives"].items()}
        row = [r["shape"], r["topology"], "{data}x{model}".format(**r["mesh"]), f"{size['verifier']:.2f}"]
        row += [f"{size['drafter'] + size['head']:.2f}", f"{size['verifier_cache'] + size['drafter_cache']:.2f}"]
        row += [f"{max(size['round'], size['prefill']):.2f}", f"{size['total']:.2f} of {r['bytes_limit'] / 2**30:.0f}"]
        row += [f"{moved['all-gather']:.2f} MiB", f"{moved['all-reduce']:.0f} MiB"]
        assert "| " + " | ".join(row) + " |" in README
        assert r["logits_moved"] == r["caches_moved"] == 0
    gpus = read("gpu_rounds.json")
    for name, r in gpus.items():
        if r["method"] == "tree":
            step = sum(gpus[f"{name} ar"]["launches"].values())
            row = [r["shape"], r["batch"], f"{r['bytes_per_device']['round'] / 2**30:.2f}"]
            row += [r["launches"][stage] for stage in ("draft", "expand", "tree", "verify", "accept", "commit")]
            assert "| " + " | ".join(map(str, [*row, step])) + " |" in README
            assert (r["topology"], r["nodes"], r["context"], r["float32_logits"]) == ("h200", 64, 4096, 0)
    assert not any(r["float32_logits"] for r in read("tpu_rounds.json").values())
    rules = read("rules_shipped.json")
    pairs = rules["all_pairs"]["rows"]
    assert (
        len(pairs) == 4 * 28
        and len({(row["head"], row["nodes"], row["builder"], row["acceptance"]) for row in pairs}) == 112
    )
    where = {"head": "mlp", "builder": "hybrid", "acceptance": "traversal"}
    shown = [
        f"{row['expected_tau']['value']:.2f}"
        for nodes in (16, 64)
        for rows in (rules["leaves"]["rows"], pairs)
        for row in rows
        if (where | {"nodes": nodes}).items() <= row.items()
    ]
    assert "{} against {} at 16 rows, but {} against {} at 64".format(*shown) in README
    speeds = [row["tokens_per_second"] for row in read("budget_auto.json")["rows"]]
    assert all(speed["ar"] > max(speed["treeflash-8"], speed["treeflash-16"]) for speed in speeds) and len(speeds) == 8
    ratios = [speed["treeflash-auto"] / speed["ar"] for speed in speeds]
    assert f"{min(ratios):.2f} to {max(ratios):.2f} of the tokens per second of one-token decoding" in README
    assert min(ratios) >= 0.98
    costs = read("accept_costs.json")["rows"]
    model = shapes.named("qwen3-4b")
    plan = DecodePlan(verifier=model, drafter=shapes.drafter_of(model), head="mlp", num_nodes=64)
    for row in costs:
        work = stage_work(plan, batch=row["batch"], context=1024, dtype=jnp.float32)
        floor = work["verify"].seconds(Ceilings(**row["ceilings"]))
        assert abs(row["share_of_verify"] - row["accept_ms"] / 1e3 / floor) < 1e-4
    shares = [
        max(row["share_of_verify"] for row in costs if row["acceptance"] in rules)
        for rules in (("sample-and-match",), ("rejection", "block"), ("traversal",))
    ]
    words = "at most {:.1%} (sample-and-match), {:.1%} (rejection, block) and {:.1%}".format(*shares).replace("%", " %")
    assert words in README and shares[0] <= 0.03 and shares[1] <= 0.03 and shares[2] <= 0.1
    for result in read("latency_tiny.json")["results"]:
        if result["settings"]["nodes"] == [8, 16]:
            time = {(row["stage"], row["nodes"]): row["ms"] for row in result["stages"]}
            step, drafted = time["step", None], time["draft", None] + time["expand", None]
            words = f"takes {time['verify', 8] / step:.1f} times as long as over one, draft and second stage together"
            assert f"{words} {drafted / step:.1f} times" in " ".join(README.split())
            apart = sum(time[stage, 16] for stage in ("tree", "accept", "commit"))
            assert apart <= 0.15 * time["round", 16]
        if result["settings"]["candidates"] == 16:
            time = {(row["stage"], row["nodes"]): row["ms"] for row in result["stages"]}
            apart = sum(time[stage, 16] for stage in ("tree", "accept", "commit"))
            assert f"is {apart / time['round', 16]:.0%} of a round of 16 rows".replace("%", " %") in README
            growth = result["growth"]
            powers = [f"{growth[stage]['exponent']:.2f}" for stage in ("tree", "verify", "accept")]
            steepest = max(one["steepest"] for one in growth.values())
            words = "as rows^{}, verify ^{}, accept ^{}, between 64 and 256 at most ^{:.2f}".format(*powers, steepest)
            assert words in " ".join(README.split()) and steepest < 1
    speed = read("speed_b_trained.json")
    for run in (speed[key] for key in ("tree", "tree_one_thread", "one_token", "one_token_one_thread")):
        assert f"| {run['tokens_per_second']:.0f} | {run['other_tokens_per_second']:.0f} | {run['ratio']:.1f} x |" in README
        assert run["same_ids"]
