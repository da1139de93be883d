"""`bench report`: statistics of records made by hand, with known answers, and files it refuses."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from treeflash_jax.bench import records as kept
from treeflash_jax.bench import report, run

HARDWARE = {"backend": "cpu", "device": "cpu", "devices": 1, "cores": 2}


def made(prompt, system, lengths, seconds, *, tokens=None, temperature=0.0, seed=0, ids=((1, 2),)):
    """A record made by hand; `lengths` by turn."""
    base, _, nodes = system.partition("-")
    flat = [length for turn in lengths for length in turn]
    own = dict.fromkeys(kept.OWN) | {
        "builder": "none" if base == "ar" else "best-first",
        "nodes": int(nodes.partition("@")[0]) if nodes else None,
    }
    settings = dict.fromkeys(kept.SHARED, 1) | own | {"temperature": temperature, "seed": seed}
    return {
        "schema": kept.SCHEMA,
        "prompt_id": prompt,
        "prompt_hash": "0",
        "system": system,
        "settings": settings,
        "rounds": len(flat),
        "committed": sum(flat),
        "accept_lengths": lengths,
        "accepted_by_depth": [sum(x > d for x in flat) for d in range(1, max(flat, default=1))],
        "ids": ids,
        "tokens": sum(flat) if tokens is None else tokens,
        "seconds": seconds,
        "compile_seconds": 0.0,
        "finished": ["stop"],
        "thinking": False,
        "versions": {"jax": "1"},
        "hardware": HARDWARE,
    }


def row_of(records, system, temperature=0.0, **settings):
    rows = report.summarise(records, **settings)["rows"]
    return next(row for row in rows if row["system"] == system and row["temperature"] == temperature)


def test_tau_pooled_and_per_response_and_depths():
    records = [made("a", "treeflash-8", [[4, 4, 4], [1]], 2.0, tokens=12), made("b", "treeflash-8", [[]], 1.0, tokens=1)]
    row = row_of(records, "treeflash-8")
    assert row["tau"] == 13 / 4
    assert row["tau_per_response"] == (4 + 1) / 2  # the response without a round is left out
    assert (row["responses"], row["prompts"], row["rounds"]) == (3, 2, 4)
    assert row["acceptance_by_depth"] == [3 / 4, 3 / 4, 3 / 4]
    assert row["tokens_per_second"] == 13 / 3
    assert row["speedup"] is None and row["tau_ratio"] is None and row["against"] is None
    assert row_of(records[1:], "treeflash-8")["tau"] is None


def test_speedup_pairs_prompts_seeds_and_temperatures():
    records = [
        made("a", "ar", [[1] * 10], 10.0),
        made("a", "ar", [[1] * 10], 5.0, seed=1),
        made("a", "ar", [[1] * 10], 1.0, temperature=1.0),
        made("b", "ar", [[1] * 10], 99.0),  # no partner
        made("a", "treeflash-8", [[5, 5]], 2.0),
        made("a", "treeflash-8", [[5, 5]], 3.0, seed=1, ids=[[9]]),
        made("a", "treeflash-8", [[5, 5]], 4.0, seed=2),  # no partner
        made("a", "treeflash-8", [[5, 5]], 2.0, temperature=1.0),
    ]
    row = row_of(records, "treeflash-8")
    assert row["speedup"] == {"value": (20 / 5) / (20 / 15), "low": None, "high": None, "answers": 2}
    assert row["identical"] == 1
    assert row_of(records, "treeflash-8", 1.0)["speedup"]["value"] == 0.5


def test_bootstrap_draws_whole_prompts_of_both_systems():
    """Two prompts of ratios 2 and 4: a quarter of the draws holds one of them twice, so the interval ends there."""
    records = []
    for prompt, mine in (("a", 2), ("b", 4)):
        for seed in (0, 1):
            records.append(made(prompt, "marginal-8", [[1, 1]], 1.0, seed=seed))
            records.append(made(prompt, "treeflash-8", [[mine, mine]], 1.0, seed=seed))
    ratio = row_of(records, "treeflash-8", resamples=500)["tau_ratio"]
    assert (ratio["value"], ratio["low"], ratio["high"], ratio["answers"]) == (3.0, 2.0, 4.0, 4)


def test_pairing_cancels_what_prompts_share():
    """Prompts of very different tau, but the same ratio everywhere: no uncertainty is left."""
    records = []
    for i, length in enumerate((1, 2, 8)):
        records.append(made(str(i), "marginal-8", [[length] * 4], 1.0))
        records.append(made(str(i), "treeflash-8", [[2 * length] * 4], 1.0))
    ratio = row_of(records, "treeflash-8")["tau_ratio"]
    assert np.allclose([ratio["value"], ratio["low"], ratio["high"]], 2.0)


def test_tau_is_compared_with_as_many_rows_or_a_named_system():
    records = [made("a", name, [[i + 1] * 2], 1.0) for i, name in enumerate(("marginal-8", "marginal-64", "treeflash-64"))]
    assert row_of(records, "treeflash-64")["against"] == "marginal-64"
    assert row_of(records, "treeflash-64")["tau_ratio"]["value"] == 3 / 2
    assert row_of(records, "treeflash-64", against="marginal-8")["tau_ratio"]["value"] == 3
    assert row_of(records, "marginal-64")["tau_ratio"] is None
    with pytest.raises(ValueError, match="unknown system 'eagle'"):
        report.summarise(records, against="eagle")
    sharper = [made("a", name, [[i + 1] * 2], 1.0) for i, name in enumerate(("marginal-64@0.7", "treeflash-64"))]
    assert row_of(sharper, "treeflash-64")["against"] == "marginal-64@0.7"


def test_report_derives_table_and_json_from_the_file(tmp_path, capsys):
    records = [
        made("a", "ar", [[1, 1]], 1.0),
        made("a", "marginal-8", [[2]], 1.0),
        made("a", "treeflash-8", [[3]], 1.0),
        made("b", "ar", [[1] * 6], 2.0),
        made("b", "marginal-8", [[3, 3]], 1.0),
        made("b", "treeflash-8", [[6]], 1.0),
    ]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert report.main([str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(report.summarise(records)))
    assert report.main([str(path), "--against", "ar"]) == 0
    printed = capsys.readouterr().out
    tokens, speed, depths = (line.split() for line in printed.splitlines() if "treeflash-8" in line)
    assert tokens == ["0", "treeflash-8", "2", "4.50", "4.50", "4.50", "[3.00,", "6.00]", "ar"]
    assert speed == ["0", "treeflash-8", "4", "1.69", "[1.50,", "2.00]", "2", "of", "2"]
    assert depths == ["0", "treeflash-8", "100", "100", "50", "50", "50"]
    assert "% of rounds" in printed and "jax 1" in printed and "lossless: PASS; 4 of 4 answers identical" in printed


@pytest.mark.parametrize("width", [80, 100])
def test_tables_keep_their_key_column_where_space_is_short(width):
    systems = ("ar", "marginal-64@0.85", "treeflash-64", "treeflash-64@0.7+hybrid+traversal")
    lengths = {name: [[1] * 4 if name == "ar" else [3, 16, 2, 9]] for name in systems}
    records = [made(prompt, name, lengths[name], 1.0, tokens=99999) for prompt in "abc" for name in systems]
    summary = report.summarise(records)
    for part in ("versions", "hardware", "settings"):
        summary[part] = dict.fromkeys(summary[part], 1)
    console = Console(width=width, file=io.StringIO(), highlight=False)
    report.show(summary, console)
    printed = console.file.getvalue()
    assert max(map(len, printed.splitlines())) <= width and "…" not in printed
    rows = [line.split() for line in printed.splitlines() if line.strip().startswith("0 ")]
    for name in ("ar", "treeflash-64"):
        assert sum(row[1] == name for row in rows) >= 2
    for cell in ("[1.00,", "99999"):
        assert any(cell in row for row in rows)
    keys = [row[1] for row in rows if row[1].startswith("treeflash-6")]
    assert len(keys) == 2 * 3, "names fold, they are not cut off"
    assert systems[-1] in keys, "the table of speeds has room for the longest"


def test_records_that_count_cut_rounds_in_full_are_shown_as_such(tmp_path, capsys):
    path = tmp_path / "results.jsonl"
    for schema in kept.SCHEMAS:
        path.write_text(json.dumps(made("a", "ar", [[1, 1]], 1.0) | {"schema": schema}) + "\n")
        assert report.main([str(path)]) == 0
        assert ("in full" in capsys.readouterr().out) == (schema == 1)


def changed(**changes):
    return made("b", "ar", [[1]], 1.0) | changes


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (json.dumps(changed(schema=3)), "results.jsonl:2: got schema 3, expected 2"),
        (json.dumps(changed(schema=1)), "results.jsonl:2: got schema 1, but 2 in earlier lines"),
        ('{"schema": 1', "results.jsonl:2: got malformed JSON"),
        ("[]", "results.jsonl:2: got list"),
        ('{"schema": 2, "rounds": 1}', "results.jsonl:2: got a record without prompt_id"),
        (json.dumps(changed(settings={})), "results.jsonl:2: got a record without settings.verifier"),
        (json.dumps(changed(prompt_id="a")), "results.jsonl:2: got a second answer to ('a', 'ar', 0.0, 0)"),
        (json.dumps(changed(versions={"jax": "2"})), "results.jsonl:2: got jax '2', but '1' in earlier lines"),
        (json.dumps(changed(hardware=HARDWARE | {"backend": "gpu"})), "results.jsonl:2: got backend 'gpu', but 'cpu'"),
    ],
)
def test_bad_results_are_named_by_file_and_line_and_kept(tmp_path, capsys, line, words):
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(made("a", "ar", [[1]], 1.0)) + "\n" + line + "\n")
    before = path.read_bytes()
    for command in (lambda: report.main([str(path)]), lambda: run.main(["--out", str(path)])):
        assert command() == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1 and words in captured.err
    assert path.read_bytes() == before


def test_report_of_nothing_or_half_a_line(tmp_path, capsys):
    path = tmp_path / "results.jsonl"
    assert report.main([str(path)]) == 2
    path.write_text("")
    assert report.main([str(path)]) == 2
    assert capsys.readouterr().err.splitlines()[1].endswith("results.jsonl: got no records, expected at least one")
    path.write_text(json.dumps(made("a", "ar", [[1]], 1.0)) + '\n{"schema": 1, "pro')
    with pytest.warns(UserWarning, match=r"results.jsonl:2: the last line is cut off"):
        assert report.main([str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["responses"] == 1


def test_no_resamples_are_refused():
    with pytest.raises(ValueError, match="resamples 0"):
        report.summarise([made("a", "ar", [[1]], 1.0)], resamples=0)


def test_files_of_the_first_edition_are_read(tmp_path):
    """They had a method, and a builder for trees only."""
    path, builders = tmp_path / "old.jsonl", {}
    for name, method, builder in (
        ("ar", "ar", None),
        ("chain", "chain", None),
        ("treeflash-4", "tree", "best-first"),
        ("treeflash-8", "tree", "hybrid"),
    ):
        record = made("a", name, [[1]], 1.0)
        record["settings"] |= {"method": method, "builder": builder, "nodes": 4}
        path.write_text(path.read_text() + json.dumps(record) + "\n" if path.exists() else json.dumps(record) + "\n")
        builders[name] = builder or {"ar": "none"}.get(method, method)
    records, _ = kept.read_records(path)
    assert {record["system"]: record["settings"]["builder"] for record in records} == builders
    assert not any("method" in record["settings"] for record in records)
