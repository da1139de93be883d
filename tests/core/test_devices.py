"""Defaults of devices that are not here, and what programs are compiled with."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import treeflash_jax as tf
from treeflash_jax.core import devices, programs, sharding


def test_features_are_read_from_the_flags(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: x\nflags\t\t: fpu avx2 amx_bf16\n\nprocessor\t: 1\nflags\t\t: none\n")
    assert devices.cpu_features(str(path)) == {"fpu", "avx2", "amx_bf16"}
    path = tmp_path / "other"
    path.write_text("no flags")
    assert devices.cpu_features(str(path)) == devices.cpu_features(str(tmp_path / "missing")) == frozenset()


def test_what_xla_may_not_use_does_not_count():
    both, vectors = {"amx_bf16", "avx512_bf16"}, {"avx512_bf16"}
    flags = {"": both, "--xla_cpu_max_isa=AMX": both, "--xla_cpu_max_isa=AVX512_BF16": vectors}
    for text, left in (flags | {"--a=1 --xla_cpu_max_isa=avx512": set()}).items():
        assert devices.usable_features(frozenset({"avx2", *both}), text) == left | {"avx2"}


def test_rates_are_those_of_the_chip_that_is_named():
    kinds = {"NVIDIA L4": 403, "NVIDIA L40S": None, "NVIDIA H100 80GB HBM3": 295, "NVIDIA A100-SXM4-40GB": 153}
    assert {kind: devices.Device("gpu", kind).ridge for kind in kinds} == kinds


WRONG_FUSIONS = """
import jax, jax.numpy as jnp
from treeflash_jax.core import devices, programs

def by_rows(x):  # jax-ml/jax#39103: jaxlib 0.10.2 is wrong from 32,769 rows on
    return jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2))(x)

def of_rank_8(left, right):  # jax-ml/jax#39257: jaxlib 0.10.2 and 0.11.0 crash
    return jnp.log(jnp.sum(left[..., None, None, None, None, None] * right, axis=2))

ramp = jnp.arange(32769, dtype=jnp.float32)
x = jnp.stack((ramp, 0 * ramp, 0 * ramp), axis=1)
for run in (programs.jit(by_rows), lambda x: programs.call(jax.jit(by_rows), x)):
    assert float(run(x)[-1]) == 32768.0**2, run
pair = jnp.ones((10, 4, 6)), jnp.ones((10, 4, 6, 9, 9, 9, 9, 9))
for run in (programs.jit(of_rank_8), lambda *pair: programs.call(jax.jit(of_rank_8), *pair)):
    assert abs(float(run(*pair).min()) - 1.791759) < 1e-5
"""


def test_programs_are_compiled_without_the_fusions_that_are_wrong():
    """With the compiler's own defaults otherwise."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    subprocess.run([sys.executable, "-c", WRONG_FUSIONS], env=environment, cwd=Path(tf.__file__).parents[1], check=True)


def test_float32_is_float32_on_accelerators(monkeypatch):
    def precision(dtype):
        x = jnp.ones((3, 3), dtype)
        programs.call(jax.jit(lambda x: x @ x), x)
        return "highest" in programs.compiled()[-1].executable.as_text()

    with jax.default_matmul_precision(None):
        assert not precision(jnp.float32)
        monkeypatch.setattr(sharding, "device", lambda mesh=None: devices.Device("gpu"))
        assert precision(jnp.float32) and not precision(jnp.bfloat16)
    with jax.default_matmul_precision("default"):
        assert not precision(jnp.float32), "the user's choice stays"
