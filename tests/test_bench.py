"""`bench.compare` on a stand-in for the other program."""

from __future__ import annotations

import json
import sys

from conftest import DATA

from treeflash_jax.bench.compare import main

STAND_IN = """
import sys
for _ in sys.stdin:
    print('{"ids": [1], "tokens_per_second": 10.0}', flush=True)
"""


def test_compare_alternates_and_records(tmp_path, capsys):
    pair = DATA / "conformance" / "b_trained"
    program = tmp_path / "other.py"
    program.write_text(STAND_IN)
    arguments = ["--verifier", str(pair / "verifier"), "--drafter", str(pair / "drafter"), "--prompt-ids", "3 4 5"]
    arguments += "--nodes 16 --candidates 8 --children 8 --max-new-tokens 12 --repeats 2".split()
    arguments += ["--other", f"{sys.executable} {program}", "--out", str(tmp_path / "record.json")]
    record = main(arguments)
    assert record == json.loads((tmp_path / "record.json").read_text()) == json.loads(capsys.readouterr().out)
    assert len(record["all"]["ours"]) == len(record["all"]["other"]) == 2
    assert record["ratio"] == record["tokens_per_second"] / 10.0
    assert record["same_ids"] is False
