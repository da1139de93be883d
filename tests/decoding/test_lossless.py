"""The library's promise, in float64: see lossless_float64.py for the cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(*words: str) -> dict[str, int]:
    command = [sys.executable, str(Path(__file__).parent / "lossless_float64.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("which", "cases", "cut", "programs"), [("core", 60, 10, 6), pytest.param("all", 345, 20, 39, marks=pytest.mark.slow)]
)
def test_drafted_output_is_one_token_output(which, cases, cut, programs):
    counts = run(which)
    assert counts["cases"] >= cases and counts["programs"] <= programs
    assert min(counts["stops_inside_a_path"], counts["cut_at_the_limit"]) >= cut


@pytest.mark.slow
def test_random_verifiers_and_trees_lose_nothing():
    """`python tests/decoding/lossless_float64.py random SEED 7` tries more."""
    counts = run("random", "0")
    assert counts["cases"] >= 60 and counts["tokens"] >= 1.1 * counts["rounds"]
    met = {key for key in counts if key.startswith("met ")}
    for words in ("verifier", "head", "builder", "nodes auto", "shortlist", "block_size", "lanes", "scheme int8"):
        assert any(words in key for key in met), (words, met)
    assert len(met) >= 20, met
