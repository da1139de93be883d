"""`bench.compare` on stand-ins for other programs."""

from __future__ import annotations

import json
import sys

import pytest
from conftest import DATA

from treeflash_jax.bench.compare import main

STAND_IN = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    assert asked["max_new_tokens"] == 12 and asked["stop_ids"] == []
    print(json.dumps({"ids": asked["prompt"][:1], "tokens_per_second": 10.0}), flush=True)
"""
PAIR = DATA / "conformance" / "b_trained"
ARGUMENTS = ["--verifier", str(PAIR / "verifier"), "--drafter", str(PAIR / "drafter"), "--prompt-ids", "3 4 5"]
ARGUMENTS += "--nodes 16 --candidates 8 --children 8 --max-new-tokens 12 --repeats 2 --dtypes float32".split()
ARGUMENTS += ["--stop-ids", ""]


def test_systems_take_turns_and_are_recorded(tmp_path, capsys):
    program = tmp_path / "other.py"
    program.write_text(STAND_IN)
    command = f"{sys.executable} {program}"
    others = ["--other", f"a={command}", "--other", f"b={command}"]
    record = main([*ARGUMENTS, *others, "--out", str(tmp_path / "record.json")])
    assert record == json.loads((tmp_path / "record.json").read_text()) == json.loads(capsys.readouterr().out)
    systems = record["systems"]
    assert list(systems) == ["one token, float32", "drafted, float32", "a", "b"]
    assert all(len(system["all"]) == 2 for system in systems.values())
    assert systems["a"]["tokens_per_second"] == 10.0 and systems["drafted, float32"]["tau"] > 1
    assert [system["same"] for system in systems.values()] == [1, 1, 0, 0]


def test_a_program_that_ends_is_one_line():
    with pytest.raises(ValueError, match="got no answer from .*expected one JSON line") as error:
        main([*ARGUMENTS, "--other", f"gone={sys.executable} -c pass"])
    assert "\n" not in str(error.value)
