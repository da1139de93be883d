"""A mixture of experts on a CPU reads each of its weights once and copies none."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treeflash_jax.bench import shapes
from treeflash_jax.core import parameters
from treeflash_jax.models import experts, quantized

MOST = 1.3
SIZES = {"hidden_size": 2048, "expert_size": 768}  # of Qwen3-30B-A3B: no cache holds what a pass reads
HELD, PER_ROW = 16, 8


def case(num_tokens: int, dtype: str = "float32", **sizes: int):
    """The compiled `mixture` of some tokens, and its operands."""
    config = replace(shapes.VERIFIERS["tiny"], **sizes)
    specs, scheme = experts.specs(config), "int8" if dtype == "int8" else None
    drawn = parameters.initialize(specs, jax.random.key(0), jnp.float32 if scheme else dtype, scale=0.05)
    weights = {name: quantized.compress(weight, specs[name], scheme) for name, weight in drawn.items()}
    x_btd = jax.random.normal(jax.random.key(1), (1, num_tokens, config.hidden_size)).astype(drawn["router"].dtype)
    return jax.jit(lambda weights, x: experts.mixture(weights, config, x)).lower(weights, x_btd).compile(), (weights, x_btd)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_no_matrix_of_an_expert_is_copied_for_one_token(dtype):
    compiled, (weights, _) = case(1, dtype, hidden_size=64, num_experts=8, experts_per_token=2, expert_size=48)
    matrix = 64 * 48 * (weights["expert_up"].values if dtype == "int8" else weights["expert_up"]).dtype.itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < matrix


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 8])
def test_a_pass_takes_little_longer_than_plain_products_with_as_many_weights(num_tokens):
    """One token reads its own eight experts of 16; eight tokens that choose every other one read all experts."""
    words = [sys.executable, __file__, str(num_tokens)]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # as users run it: one device
    run = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment | {"JAX_PLATFORMS": "cpu"})
    assert run.returncode == 0, run.stderr
    ratios = list(map(float, run.stdout.split()))
    assert ratios[-1] <= MOST, ratios


def measure(num_tokens: int) -> Iterator[float]:
    """Least time of a pass over that of plain products with as many weights, in turns, until it is small or time is up.

    The least of many times, since other programs may interrupt every other pass.
    """
    d, f, read = *SIZES.values(), PER_ROW if num_tokens == 1 else HELD
    compiled, operands = case(num_tokens, num_experts=HELD, experts_per_token=PER_ROW, **SIZES)
    plain = jax.jit(lambda x, h, into, up, back: (x @ into, x @ up, h @ back))
    draw = np.random.default_rng(0).standard_normal
    sizes = (num_tokens, d), (num_tokens, read * f), (d, read * f), (d, read * f), (read * f, d)
    arrays = [jnp.asarray(draw(size, np.float32)) for size in sizes]
    least = {compiled: math.inf, plain: math.inf}
    for _ in range(10):
        for _ in range(40):
            for run, given in ((compiled, operands), (plain, arrays)):
                start = time.perf_counter()
                jax.block_until_ready(run(*given))
                least[run] = min(least[run], time.perf_counter() - start)
        yield least[compiled] / least[plain]
        if least[compiled] <= MOST * least[plain]:
            return


if __name__ == "__main__":
    if hasattr(os, "sched_setaffinity"):  # on one core, no thread waits for another that the machine has no time for
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    for ratio in measure(int(sys.argv[1])):
        print(ratio, flush=True)
