"""`bench report`: statistics of records made by hand, with known answers, and files it refuses."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from treeflash_jax.bench import bench_records, plots, report
from treeflash_jax.cli.commands import main

HARDWARE = {"backend": "cpu", "device": "cpu", "devices": 1, "cores": 2}


def make_record(prompt, system, lengths, seconds, *, tokens=None, temperature=0.0, seed=0, ids=((1, 2),), dtype="float32"):
    """A record made by hand; `lengths` by turn."""
    base, _, nodes = system.partition("-")
    own = dict.fromkeys(bench_records.SYSTEM) | {
        "builder": "none" if base.startswith("ar") else "best-first",
        "nodes": int(nodes.partition("@")[0]) if nodes else None,
        "dtype": dtype,
    }
    settings = dict.fromkeys(bench_records.SHARED, 1) | own | {"temperature": temperature, "seed": seed}
    ids = [list(turn) for turn in ids] * len(lengths) if len(ids) == 1 else ids
    return {
        "schema": bench_records.SCHEMA,
        "prompt_id": prompt,
        "prompt_hash": "0",
        "system": system,
        "settings": settings,
        "accept_lengths": lengths,
        "cut": [0] * len(lengths),
        "ids": ids,
        "texts": [None] * len(lengths),
        "tokens": sum(map(sum, lengths)) if tokens is None else tokens,
        "seconds": seconds,
        "compile_seconds": 0.0,
        "versions": {"jax": "1"},
        "hardware": HARDWARE,
    }


def entry(records, system, temperature=0.0, **settings):
    systems = report.summarise(records, **settings)["systems"]
    return next(s for s in systems if s["system"] == system and s["temperature"] == temperature)


def test_tau_pooled_and_per_response_and_depths():
    records = [
        make_record("a", "treeflash-8", [[4, 4, 4], [1]], 2.0, tokens=12),
        make_record("b", "treeflash-8", [[]], 1.0, tokens=1),
    ]
    result = entry(records, "treeflash-8")
    assert result["tau"] == 13 / 4
    assert result["tau_per_response"] == (4 + 1) / 2  # the response without a round is left out
    assert (result["responses"], result["prompts"], result["rounds"]) == (3, 2, 4)
    assert result["acceptance_by_depth"] == [3 / 4, 3 / 4, 3 / 4]
    assert (result["tokens_per_second"], result["median_tokens_per_second"]) == (13 / 3, (12 / 2 + 1) / 2)
    assert result["speedup"] is None and result["tau_ratio"] is None and result["against"] is None
    assert entry(records[1:], "treeflash-8")["tau"] is None
    records[0]["cut"] = [2, 0]  # accepted beyond the end of the first turn, which tau does not count
    result = entry(records, "treeflash-8")
    assert result["acceptance_by_depth"] == [3 / 4, 3 / 4, 3 / 4, 1 / 4, 1 / 4] and result["tau"] == 13 / 4


def test_speedup_pairs_prompts_seeds_and_temperatures():
    records = [
        make_record("a", "ar", [[1] * 10], 10.0),
        make_record("a", "ar", [[1] * 10], 5.0, seed=1),
        make_record("a", "ar", [[1] * 10], 1.0, temperature=1.0),
        make_record("b", "ar", [[1] * 10], 99.0),  # no partner
        make_record("a", "treeflash-8", [[5, 5]], 2.0),
        make_record("a", "treeflash-8", [[5, 5]], 3.0, seed=1, ids=[[9]]),
        make_record("a", "treeflash-8", [[5, 5]], 4.0, seed=2),  # no partner
        make_record("a", "treeflash-8", [[5, 5]], 2.0, temperature=1.0),
    ]
    result = entry(records, "treeflash-8")
    assert result["speedup"] == {"value": (20 / 5) / (20 / 15), "low": None, "high": None, "answers": 2}
    assert result["identical"] == 1
    assert entry(records, "treeflash-8", 1.0)["speedup"]["value"] == 0.5


def test_the_baseline_is_the_fastest_and_answers_are_those_of_the_dtype():
    records = [
        make_record("a", "ar, float32", [[1] * 4], 4.0, ids=[[1]]),
        make_record("a", "ar, bfloat16", [[1] * 4], 1.0, ids=[[2]], dtype="bfloat16"),
        make_record("a", "treeflash, float32", [[2, 2]], 2.0, ids=[[1]]),
    ]
    result = entry(records, "treeflash, float32")
    assert result["speedup"]["value"] == 0.5 and (result["identical"], result["verdict"]) == (1, "PASS")
    assert report.summarise(records)["settings"]["dtype"] == "float32, bfloat16"


def test_bootstrap_draws_whole_prompts_of_both_systems():
    """Two prompts of ratios 2 and 4: a quarter of the draws holds one of them twice, so the interval ends there."""
    records = []
    for prompt, mine in (("a", 2), ("b", 4)):
        for seed in (0, 1):
            records.append(make_record(prompt, "marginal-8", [[1, 1]], 1.0, seed=seed))
            records.append(make_record(prompt, "treeflash-8", [[mine, mine]], 1.0, seed=seed))
    ratio = entry(records, "treeflash-8", resamples=500)["tau_ratio"]
    assert (ratio["value"], ratio["low"], ratio["high"], ratio["answers"]) == (3.0, 2.0, 4.0, 4)


def test_pairing_cancels_what_prompts_share():
    """Prompts of very different tau, but the same ratio everywhere: no uncertainty is left."""
    records = []
    for i, length in enumerate((1, 2, 8)):
        records.append(make_record(str(i), "marginal-8", [[length] * 4], 1.0))
        records.append(make_record(str(i), "treeflash-8", [[2 * length] * 4], 1.0))
    ratio = entry(records, "treeflash-8")["tau_ratio"]
    assert np.allclose([ratio["value"], ratio["low"], ratio["high"]], 2.0)


def test_tau_is_compared_with_the_same_number_of_nodes_or_a_named_system():
    names = ("marginal-8", "marginal-64", "treeflash-64")
    records = [make_record("a", name, [[i + 1] * 2], 1.0) for i, name in enumerate(names)]
    assert entry(records, "treeflash-64")["against"] == "marginal-64"
    assert entry(records, "treeflash-64")["tau_ratio"]["value"] == 3 / 2
    named = entry(records, "treeflash-64", against="marginal-8")
    assert named["tau_ratio"]["value"] == 3
    assert entry(records, "marginal-64")["tau_ratio"] is None
    with pytest.raises(ValueError, match="unknown system 'eagle'"):
        report.summarise(records, against="eagle")
    with pytest.raises(ValueError, match="resamples 0"):
        report.summarise(records, resamples=0)
    sharper = [make_record("a", name, [[i + 1] * 2], 1.0) for i, name in enumerate(("marginal-64@0.7", "treeflash-64"))]
    assert entry(sharper, "treeflash-64")["against"] == "marginal-64@0.7"


def test_report_derives_table_and_json_from_the_file(tmp_path, capsys):
    records = [
        make_record("a", "ar", [[1, 1]], 1.0),
        make_record("a", "marginal-8", [[2]], 1.0),
        make_record("a", "treeflash-8", [[3]], 1.0),
        make_record("b", "ar", [[1] * 6], 2.0),
        make_record("b", "marginal-8", [[3, 3]], 1.0),
        make_record("b", "treeflash-8", [[6]], 1.0),
    ]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["bench", "report", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(report.summarise(records)))
    assert main(["bench", "report", str(path), "--against", "ar"]) == 0
    printed = capsys.readouterr().out
    tokens, speed, depths = (line.split() for line in printed.splitlines() if "treeflash-8" in line)
    assert tokens == ["0", "treeflash-8", "2", "4.50", "4.50", "4.50", "[3.00,", "6.00]", "ar"]
    assert speed == ["0", "treeflash-8", "4", "4", "1.69", "[1.50,", "2.00]", "2", "of", "2"]
    assert depths == ["0", "treeflash-8", "100", "100", "50", "50", "50"]
    assert "% of rounds" in printed and "jax 1" in printed and "lossless: PASS; 4 of 4 answers identical" in printed


@pytest.mark.parametrize("width", [80, 100])
def test_tables_keep_their_key_column_in_little_space(width):
    systems = ("ar", "marginal-64@0.85", "treeflash-64", "treeflash-64@0.7+hybrid+traversal")
    lengths = {name: [[1] * 4 if name == "ar" else [3, 16, 2, 9]] for name in systems}
    records = [make_record(prompt, name, lengths[name], 1.0, tokens=99999) for prompt in "abc" for name in systems]
    console = Console(width=width, file=io.StringIO(), highlight=False)
    report.show(report.summarise(records), console)
    printed = console.file.getvalue()
    assert max(map(len, printed.splitlines())) <= width and "…" not in printed
    cells = [line.split() for line in printed.splitlines() if line.strip().startswith("0 ")]
    for name in ("ar", "treeflash-64"):
        assert sum(line[1] == name for line in cells) >= 2
    for cell in ("[1.00,", "99999"):
        assert any(cell in line for line in cells)
    assert len([line for line in cells if line[1].startswith("treeflash-6")]) == 2 * 3, "names fold, they are not cut off"


def changed(**changes):
    return json.dumps(make_record("b", "ar", [[1]], 1.0) | changes)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (changed(schema=3), "results.jsonl:2: got schema 3, expected 2"),
        ('{"schema": 1', "results.jsonl:2: got malformed JSON"),
        ("[]", "results.jsonl:2: got list"),
        ('{"schema": 2, "tokens": 1}', "results.jsonl:2: got prompt_id None"),
        (changed(settings={}), "results.jsonl:2: got settings without verifier"),
        (changed(cut=[]), "results.jsonl:2: got lists of different lengths"),
        (changed(prompt_id="a"), "results.jsonl:2: got a second answer to ('a', 'ar', 0.0, 0)"),
        (changed(versions={"jax": "2"}), "results.jsonl:2: got jax '2', but '1' in earlier lines"),
        (changed(hardware=HARDWARE | {"device": "H200"}), "got device 'H200', but 'cpu' in earlier lines"),
    ],
)
def test_bad_results_are_named_by_file_and_line_and_kept(tmp_path, capsys, line, words):
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(make_record("a", "ar", [[1]], 1.0)) + "\n" + line + "\n")
    before = path.read_bytes()
    for command in (["report", str(path)], ["run", "--out", str(path)]):
        assert main(["bench", *command]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1 and words in captured.err
    assert path.read_bytes() == before


def test_report_of_nothing_or_half_a_line(tmp_path, capsys):
    path = tmp_path / "results.jsonl"
    assert main(["bench", "report", str(path)]) == 2
    path.write_text("")
    assert main(["bench", "report", str(path)]) == 2
    assert capsys.readouterr().err.splitlines()[1].endswith("results.jsonl: got no records, expected at least one")
    path.write_text(json.dumps(make_record("a", "ar", [[1]], 1.0)) + '\n{"schema": 1, "pro')
    with pytest.warns(UserWarning, match=r"results.jsonl:2: the last line is cut off"):
        assert main(["bench", "report", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["systems"][0]["responses"] == 1


def test_a_picture_has_a_panel_per_set_and_temperature_and_a_line_per_drafter(tmp_path):
    pytest.importorskip("matplotlib")
    shared = {"head": None, "builder": "best-first", "whole_rounds": None}
    systems = [
        shared | {"drafter": drafter, "set": prompts, "temperature": temperature, "nodes": nodes, "tau": 2.0}
        for drafter in ("EAGLE-3", "ngram")
        for prompts in ("gsm8k", "code", "chat")
        for temperature in (0.0, 0.7)
        for nodes in (4, 8)
    ]
    plots.draw_trees([*systems, systems[0] | {"nodes": None}], tmp_path / "tau.svg")
    picture = (tmp_path / "tau.svg").read_text()
    panels = [panel for panel in picture.split('<g id="axes_')[1:] if 'id="legend_' in panel]
    assert len(panels) == 6 and "<!-- gsm8k, T = 0.7 -->" in picture
    for label in ("EAGLE-3, best-first", "ngram, best-first"):
        assert all(panel.count(f"<!-- {label} -->") == 1 for panel in panels)
