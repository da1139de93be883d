"""The library's promise, in float64: see lossless_float64.py for the cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("which", "cases", "cut", "programs"), [("core", 60, 10, 6), pytest.param("all", 345, 20, 39, marks=pytest.mark.slow)]
)
def test_drafted_output_is_one_token_output_in_float64(which, cases, cut, programs):
    words = [sys.executable, Path(__file__).parent / "lossless_float64.py", which]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=1800)
    assert run.returncode == 0, run.stderr[-4000:]
    counts = json.loads(run.stdout.splitlines()[-1])
    assert counts["cases"] >= cases
    assert counts["stops_inside_a_path"] >= cut
    assert counts["cut_at_the_limit"] >= cut
    assert counts["programs"] <= programs


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0"])
def test_random_verifiers_and_trees_lose_nothing_in_float64(seed):
    """See lossless_fuzz.py; `python tests/decoding/lossless_fuzz.py SEED 7` tries more."""
    words = [sys.executable, Path(__file__).parent / "lossless_fuzz.py", seed]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=1800)
    assert run.returncode == 0, run.stderr[-4000:]
    counts = json.loads(run.stdout.splitlines()[-1])
    assert counts["sequences"] >= 60 and counts["tokens"] >= 1.1 * counts["rounds"] and counts["met int8"]
    met = {key for key in counts if key.startswith("met ")}
    for words in ("verifier", "head", "builder", "nodes auto", "shortlist", "block_size", "lanes"):
        assert any(words in key for key in met), (words, met)
    assert len(met) >= 15, met
