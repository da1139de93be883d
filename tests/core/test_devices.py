"""Defaults of devices that are not here, and what programs are compiled with."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from conftest import needs_8_devices
from refusals import refused

import treeflash_jax as tf
from treeflash_jax.core import devices, programs
from treeflash_jax.core.devices import Device
from treeflash_jax.drafters.ngram import NgramConfig
from treeflash_jax.engine.planning import make_plan


@pytest.mark.parametrize("device, dtype, reason", [
    (Device("cpu", features=frozenset({"avx2", "avx512f", "avx512_vnni"})), "float32", "no bfloat16 instructions"),
    (Device("cpu", features=frozenset({"avx512f", "avx512_bf16"})), "bfloat16", "has avx512_bf16"),
    (Device("cpu", features=frozenset({"amx_tile", "amx_bf16"})), "bfloat16", "has amx_bf16"),
    (Device("gpu", "NVIDIA H200"), "bfloat16", "an accelerator"),
])  # fmt: skip
def test_the_default_dtype_is_the_faster_one(device, dtype, reason):
    assert device.dtype == jnp.dtype(dtype) and device.dtype_reason.endswith(reason)


@pytest.mark.parametrize("device, nodes, candidates, block_size", [
    (Device("cpu", features=frozenset({"avx512_bf16"})), 8, 8, 8),
    (Device("cpu", features=frozenset({"avx512_bf16", "amx_bf16"})), 16, 16, 16),
    (Device("gpu", "NVIDIA H200"), 16, 16, 16),
])  # fmt: skip
def test_trees_and_blocks_are_smaller_where_every_token_costs(device, nodes, candidates, block_size):
    model = tf.load("tiny", dtype="float32")

    def sizes(drafter=model.drafter, dtype=jnp.bfloat16, **settings):
        plan = make_plan(tf.GenerateConfig(builder="best-first", **settings), model.verifier, drafter, dtype, device)
        return plan.num_nodes, getattr(plan.draft, "candidates", None), getattr(plan.draft, "block_size", None)

    assert (model.drafter.num_nodes, model.drafter.block_size) == (16, 16)
    assert sizes() == (nodes, candidates, block_size)
    assert sizes(dtype=jnp.float32) == ((8, 8, 8) if device.is_cpu else (nodes, candidates, block_size))
    assert sizes(nodes=24, candidates=5) == (24, 5, 16)
    assert sizes(replace(model.drafter, num_nodes=4)) == (4, candidates, 4 if nodes == 8 else 16)
    assert sizes(nodes=5) == (5, candidates, 16), "rounds of different sizes share their draft"
    assert sizes(block_size=3) == (nodes, candidates, 3)
    assert sizes(NgramConfig(num_nodes=16)) == (16, None, None), "what it cannot offer costs nothing"


@needs_8_devices
def test_meshes_of_several_cpu_devices_turn_the_compilation_cache_off():
    tf.make_mesh(1, 1)
    assert jax.config.jax_enable_compilation_cache
    tf.make_mesh(2)
    assert not jax.config.jax_enable_compilation_cache


def test_attention_follows_from_the_backend_and_the_dtype():
    cpu, gpu = Device("cpu"), Device("gpu")
    assert [cpu.attention(dtype) for dtype in (jnp.float32, jnp.float64, jnp.bfloat16)] == ["streamed", "streamed", "xla"]
    assert gpu.attention(jnp.float32, "pallas-gpu") == cpu.attention(jnp.float32, "pallas-gpu") == "pallas-gpu"
    hopper = Device("gpu", "NVIDIA H200")
    assert hopper.attention(jnp.bfloat16, head_dims=(128, 64)) == "pallas-gpu"
    others = (jnp.bfloat16, (96, 64)), (jnp.bfloat16, (128, 8)), (jnp.float32, (128,))
    assert {hopper.attention(dtype, head_dims=sizes) for dtype, sizes in others} == {"xla"}
    assert Device("gpu", "NVIDIA A100-SXM4-80GB").attention(jnp.bfloat16, head_dims=(128,)) == "xla"
    words = "got attention 'pallas-gpu' on a tpu, expected 'xla' or 'streamed'"
    refused(lambda: Device("tpu").attention(jnp.float32, "pallas-gpu"), words)


def test_features_are_read_from_the_flags(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: x\nflags\t\t: fpu avx2 amx_bf16\n\nprocessor\t: 1\nflags\t\t: none\n")
    assert devices.cpu_features(str(path)) == {"fpu", "avx2", "amx_bf16"}
    path = tmp_path / "other"
    path.write_text("no flags")
    assert devices.cpu_features(str(path)) == devices.cpu_features(str(tmp_path / "missing")) == frozenset()


def test_what_xla_may_not_use_does_not_count():
    flags = {"": {"amx_bf16"}, "--xla_cpu_max_isa=AMX": {"amx_bf16"}, "--a=1 --xla_cpu_max_isa=avx512": set()}
    assert all(devices.usable(frozenset({"amx_bf16", "avx2"}), text) == left | {"avx2"} for text, left in flags.items())


def test_a_pair_is_loaded_in_the_default_dtype(monkeypatch):
    monkeypatch.setattr(devices, "cpu_features", lambda: frozenset({"amx_bf16"}))
    assert tf.load("tiny").dtype == jnp.float32, "the tests run without these instructions"
    monkeypatch.setenv("XLA_FLAGS", "")
    model = tf.load("tiny")
    assert model.dtype == jnp.bfloat16 and model.plan(tf.GenerateConfig()).attention == "xla"
    model = tf.load("tiny", dtype=jnp.float32)
    assert model.dtype == jnp.float32 and model.plan(tf.GenerateConfig()).attention == "streamed"


def test_prefill_passes_are_as_long_as_the_ridge_of_the_chip():
    """Peak FLOP/s over bytes/s, for weights of two bytes and two FLOPs: 206, 240, 166 and 560 tokens."""
    chunks = {"NVIDIA H200 NVL": 256, "TPU v5 lite": 256, "TPU v5": 128, "TPU v6 lite": 512, "NVIDIA X": 128, "cpu": 64}
    assert {kind: Device("cpu" if kind == "cpu" else "any", kind).prefill_chunk for kind in chunks} == chunks


def test_training_attends_with_the_kernel_of_the_device():
    kinds = {("tpu", "TPU v5 lite"): "splash", ("gpu", "NVIDIA H200"): "cudnn", ("gpu", "Tesla T4"): "chunked"}
    kinds |= {("gpu", "AMD Instinct MI300X"): "chunked", ("cpu", "cpu"): "chunked"}
    assert {kind: Device(*kind).training_attention() for kind in kinds} == kinds
    assert Device("cpu").training_attention("splash") == "splash"
    assert Device("tpu").training_attention("chunked") == "chunked"
    for backend, name in (("tpu", "cudnn"), ("gpu", "splash"), ("cpu", "cudnn")):
        words = f"got attention '{name}' on a {backend}, expected 'auto' or 'chunked'"
        refused(partial(Device(backend, "NVIDIA H200").training_attention, name), words)


@pytest.mark.parametrize("kind, chunk, attention, wide", [
    ("cpu", 64, ["streamed", "xla"], jnp.dtype("float32")), ("gpu", 128, ["xla", "xla"], None),
    ("tpu", 128, ["xla", "xla"], None),
])  # fmt: skip
def test_a_plan_is_made_for_a_device_that_is_not_here(tiny, kind, chunk, attention, wide):
    """On a CPU, the residual stream is wider than weights in 16 bits."""
    plans = {
        dtype: make_plan(tf.GenerateConfig(builder="best-first"), tiny.verifier, tiny.drafter, dtype, Device(kind))
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64)
    }
    assert {plan.prefill_chunk for plan in plans.values()} == {chunk}
    assert [plan.attention for plan in plans.values()][:2] == attention
    assert {plan.for_prefill().attention for plan in plans.values()} == {attention[0]}
    for dtype, plan in plans.items():
        residual = {part.residual_dtype for part in (plan, plan.for_prefill(), plan.one_token())}
        assert residual == {wide if dtype in (jnp.bfloat16, jnp.float16) else None}


WRONG_FUSIONS = """
import jax, jax.numpy as jnp
from treeflash_jax.core import devices, programs

def by_rows(x):  # jax-ml/jax#39103: jaxlib 0.10.2 is wrong from 32,769 rows on
    return jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2))(x)

def of_rank_8(left, right):  # jax-ml/jax#39257: jaxlib 0.10.2 and 0.11.0 crash
    return jnp.log(jnp.sum(left[..., None, None, None, None, None] * right, axis=2))

ramp = jnp.arange(32769, dtype=jnp.float32)
x = jnp.stack((ramp, 0 * ramp, 0 * ramp), axis=1)
for run in (devices.jit(by_rows), lambda x: programs.call(jax.jit(by_rows), x)):
    assert float(run(x)[-1]) == 32768.0**2, run
pair = jnp.ones((10, 4, 6)), jnp.ones((10, 4, 6, 9, 9, 9, 9, 9))
for run in (devices.jit(of_rank_8), lambda *pair: programs.call(jax.jit(of_rank_8), *pair)):
    assert abs(float(run(*pair).min()) - 1.791759) < 1e-5
"""


def test_programs_are_compiled_without_the_fusions_that_are_wrong():
    """With the compiler's own defaults otherwise."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    subprocess.run([sys.executable, "-c", WRONG_FUSIONS], env=environment, cwd=Path(tf.__file__).parents[1], check=True)


def test_programs_that_hold_weights_as_constants_fail():
    """pytest makes JAX's warning of large constants an error: in every test, of runners, training and evaluation."""
    weight = jnp.ones((64, 64))
    with pytest.raises(UserWarning, match="onstant"):
        devices.jit(lambda x: x @ weight)(jnp.ones(64))
    devices.jit(lambda x, weight: x @ weight)(jnp.ones(64), weight)


def test_float32_is_float32_on_accelerators(monkeypatch):
    def precision(dtype):
        x = jnp.ones((3, 3), dtype)
        programs.call(jax.jit(lambda x: x @ x), x)
        return "highest" in programs.compiled()[-1].run.as_text()

    with jax.default_matmul_precision(None):
        assert not precision(jnp.float32)
        monkeypatch.setattr(devices, "describe_mesh", lambda mesh: devices.Device("gpu"))
        assert precision(jnp.float32) and not precision(jnp.bfloat16)
    with jax.default_matmul_precision("default"):
        assert not precision(jnp.float32), "the user's choice stays"
