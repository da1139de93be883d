"""`bench report`: statistics of records made by hand, with known answers, and files it refuses."""

import io
import json
import sys

import numpy as np
import pytest
from refusals import mistake, refused
from rich.console import Console
from toy_training import write_lines

from treeflash_jax.bench import bench_records, report
from treeflash_jax.cli.commands import main

HARDWARE = {"backend": "cpu", "device": "cpu", "devices": 1, "cores": 2}


def make_record(prompt, system, lengths, seconds, *, tokens=None, temperature=0.0, seed=0, ids=(1, 2), dtype="float32"):
    """A record made by hand; `lengths` by turn."""
    base, _, nodes = system.partition("-")
    settings = dict.fromkeys(bench_records.SHARED_SETTINGS, 1) | dict.fromkeys(("drafter", "head", "acceptance"))
    settings |= {"builder": "none" if base.startswith("ar") else "best-first", "dtype": dtype}
    settings |= {"nodes": int(nodes.partition("@")[0]) if nodes else None, "temperature": temperature, "seed": seed}
    turns = {"cut": 0, "ids": list(ids), "texts": None}
    record = {"schema": bench_records.SCHEMA, "prompt_id": prompt, "prompt_hash": "0", "system": system}
    record |= {"settings": settings, "accept_lengths": lengths} | {key: [x] * len(lengths) for key, x in turns.items()}
    record |= {"tokens": sum(map(sum, lengths)) if tokens is None else tokens, "seconds": seconds}
    return record | {"versions": {"jax": "1"}, "hardware": HARDWARE}


def entry(records, system, temperature=0.0, **settings):
    systems = report.summarise(records, **settings)["systems"]
    return next(s for s in systems if s["system"] == system and s["temperature"] == temperature)


def test_tau_and_depths():
    records = [
        make_record("a", "treeflash-8", [[4, 4, 4], [1]], 2.0, tokens=12),
        make_record("b", "treeflash-8", [[]], 1.0, tokens=1),
    ]
    result = entry(records, "treeflash-8")
    assert result["tau"] == 13 / 4
    assert (result["responses"], result["prompts"], result["rounds"]) == (3, 2, 4)
    assert result["acceptance_by_depth"] == [3 / 4, 3 / 4, 3 / 4]
    assert result["tokens_per_second"] == 13 / 3
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
        make_record("a", "treeflash-8", [[5, 5]], 3.0, seed=1, ids=[9]),
        make_record("a", "treeflash-8", [[5, 5]], 4.0, seed=2),  # no partner
        make_record("a", "treeflash-8", [[5, 5]], 2.0, temperature=1.0),
    ]
    result = entry(records, "treeflash-8")
    assert result["speedup"] == {"value": (20 / 5) / (20 / 15), "low": None, "high": None, "answers": 2}
    assert result["identical"] == 1
    assert entry(records, "treeflash-8", 1.0)["speedup"]["value"] == 0.5


@pytest.mark.parametrize("lengths, interval", [
    ([(1, 2), (1, 4)], (3.0, 2.0, 4.0)),
    ([(1, 2), (2, 4), (8, 16)], (2.0, 2.0, 2.0)),
])  # fmt: skip
def test_bootstrap_draws_whole_prompts_of_both_systems(lengths, interval):
    """Half of the draws hold one of two prompts twice: the interval ends there. Pairing cancels what prompts share."""
    records = [
        make_record(str(prompt), system, [[length, length]], 1.0, seed=seed)
        for prompt, pair in enumerate(lengths)
        for system, length in zip(("marginal-8", "treeflash-8"), pair, strict=True)
        for seed in (0, 1)
    ]
    ratio = entry(records, "treeflash-8")["tau_ratio"]
    np.testing.assert_allclose((ratio["value"], ratio["low"], ratio["high"]), interval)
    assert ratio["answers"] == 2 * len(lengths)


def test_tau_is_compared_with_the_same_number_of_nodes_or_a_named_system():
    names = ("marginal-8", "marginal-64", "treeflash-64")
    records = [make_record("a", name, [[i + 1] * 2], 1.0) for i, name in enumerate(names)]
    assert entry(records, "treeflash-64")["against"] == "marginal-64"
    assert entry(records, "treeflash-64")["tau_ratio"]["value"] == 3 / 2
    assert entry(records, "treeflash-64", against="marginal-8")["tau_ratio"]["value"] == 3
    assert entry(records, "marginal-64")["tau_ratio"] is None
    refused(lambda: report.summarise(records, against="eagle"), "unknown system 'eagle'")
    sharper = [make_record("a", name, [[i + 1] * 2], 1.0) for i, name in enumerate(("marginal-64@0.7", "treeflash-64"))]
    assert entry(sharper, "treeflash-64")["against"] == "marginal-64@0.7"


def test_report_derives_table_and_json_from_the_file(tmp_path, capsys):
    records = [
        make_record("a", "ar", [[1, 1]], 1.0),
        make_record("a", "treeflash-8", [[3]], 1.0),
        make_record("b", "ar", [[1] * 6], 2.0),
        make_record("b", "treeflash-8", [[6]], 1.0),
    ]
    path = write_lines(tmp_path / "results.jsonl", records)
    assert main(["bench", "report", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(report.summarise(records)))
    assert main(["bench", "report", str(path), "--against", "ar"]) == 0
    printed = capsys.readouterr().out
    tokens, speed, depths = (line.split() for line in printed.splitlines() if "treeflash-8" in line)
    assert tokens == ["0", "treeflash-8", "2", "4.50", "4.50", "[3.00,", "6.00]", "ar"]
    assert speed == ["0", "treeflash-8", "4", "1.69", "[1.50,", "2.00]", "2", "of", "2"]
    assert depths == ["0", "treeflash-8", "100", "100", "50", "50", "50"]
    assert "% of rounds" in printed and "jax 1" in printed and "identical: 2 of 2 drafted answers" in printed


def test_tables_keep_their_key_column_in_little_space():
    systems = ("ar", "marginal-64@0.85", "treeflash-64", "treeflash-64@0.7:builder=skeleton")
    lengths = {name: [[1] * 4 if name == "ar" else [3, 16, 2, 9]] for name in systems}
    records = [make_record(prompt, name, lengths[name], 1.0, tokens=99999) for prompt in "abc" for name in systems]
    console = Console(width=80, file=io.StringIO(), highlight=False)
    report.show(report.summarise(records), console)
    printed = console.file.getvalue()
    assert max(map(len, printed.splitlines())) <= 80 and "…" not in printed
    cells = [line.split() for line in printed.splitlines() if line.strip().startswith("0 ")]
    assert sum(line[1] == "ar" for line in cells) >= 2 and any("99999" in line for line in cells)
    assert len([line for line in cells if line[1].startswith("treeflash-6")]) == 2 * 3, "names fold, they are not cut off"


def test_names_are_printed_as_they_are_without_control_characters_in_a_terminal(tmp_path, capsys, monkeypatch):
    """Rich would read them as markup and emoji."""
    record = make_record("p", "treeflash-8", [[2]], 1.0) | {"system": "treeflash-8, run[a][/b] :100: \x1b]0;owned\x9c"}
    path = write_lines(tmp_path / "results.jsonl", [record])
    for is_terminal, name in ((True, r"\x1b]0;owned\x9c"), (False, "run[a][/b] :100: \x1b]0;owned\x9c")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        assert main(["bench", "report", str(path)]) == 0
        assert name in capsys.readouterr().out


def changed(**changes):
    return json.dumps(make_record("b", "ar", [[1]], 1.0) | changes)


@pytest.mark.parametrize("line, words", [
    (changed(schema=3), "2: got schema 3, expected 4"),
    ('{"schema": 1', "2: got malformed JSON"),
    ('{"schema": 4}', "2: got no hardware, expected a record of treeflash bench run"),
    (changed(hardware=HARDWARE | {"device": "H200"}), " got device 'H200', but 'cpu' in earlier records"),
])  # fmt: skip
def test_bad_results_are_named_by_file_and_line_and_kept(tmp_path, capsys, line, words):
    path = write_lines(tmp_path / "results.jsonl", [make_record("a", "ar", [[1]], 1.0), line + "\n"])
    before = path.read_bytes()
    for command in (["report", str(path)], ["run", "--out", str(path)]):
        mistake(capsys, main, ["bench", *command], f"results.jsonl:{words}")
    assert path.read_bytes() == before
