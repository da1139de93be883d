"""Mixtures of experts against a loop in NumPy, in float64: all variants, ties, experts that none or all tokens pick."""

import os
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import random_weights
from compiled import reductions_of_weights
from conftest import RANDOM_MODEL, needs_8_devices, needs_cpu
from jax.experimental import topologies

from treeflash_jax import make_mesh
from treeflash_jax.bench import memory
from treeflash_jax.core import parameters, programs, sharding
from treeflash_jax.models import experts, quantized
from treeflash_jax.models.backend import expert_sums

CONFIG = replace(RANDOM_MODEL, hidden_size=8, num_experts=6, experts_per_token=2, expert_size=4, normalize_experts=True)
pytestmark = pytest.mark.usefixtures("float64")


@partial(jax.jit, static_argnames="gate")
def run_every_variant(*operands, gate):
    names = "all_experts", "gather_in_steps", "gather_and_reduce", "one_by_one", "sum_experts"
    variants = [getattr(expert_sums, name) for name in names]
    return {variant.__name__: variant(*operands, gate) for variant in variants}


route, mixture = (jax.jit(function, static_argnames="config") for function in (experts.route, experts.mixture))


def make_weights(config, seed: int = 0):
    return jax.tree.map(np.array, random_weights(experts.specs(config), seed, 0.7, jnp.float64))


def oracle(weights, config, x_nd):
    """Token by token, expert by expert; returns the sum and the experts of each token."""
    y_nd, ids_nk = np.zeros_like(x_nd), []
    names = "router", "expert_gate", "expert_up", "expert_down"
    router_x, gate_xf, up_xf, down_xd = (weights.get(f"{name}_bias", np.zeros(config.num_experts)) for name in names)
    for y_d, x_d in zip(y_nd, x_nd, strict=True):
        logits_x = x_d @ weights["router"] + router_x
        probs_x = np.exp(logits_x - logits_x.max())
        probs_x /= probs_x.sum()
        ids_k = np.argsort(-probs_x, kind="stable")[: config.experts_per_token]
        total = probs_x[ids_k].sum() if config.normalize_experts else 1.0
        for x in ids_k:
            gate_f, up_f = x_d @ weights["expert_gate"][x] + gate_xf[x], x_d @ weights["expert_up"][x] + up_xf[x]
            if limit := config.swiglu_limit:
                gate_f, up_f = np.minimum(gate_f, limit), np.clip(up_f, -limit, limit)
                h_f = (up_f + 1) * gate_f / (1 + np.exp(-1.702 * gate_f))
            else:
                h_f = up_f * gate_f / (1 + np.exp(-gate_f))
            y_d += probs_x[x] / total * (h_f @ weights["expert_down"][x] + down_xd[x])
        ids_nk.append(ids_k)
    return y_nd, np.array(ids_nk)


BIASED = {"expert_biases": True, "swiglu_limit": 0.9}
CASES = {  # with what they change in the config
    "plain": {},
    "not normalised": {"normalize_experts": False},
    "k = E": {"experts_per_token": 6},
    "few of many": {"num_experts": 16},
    "sizes of no whole turns": {"hidden_size": 12, "expert_size": 5},
    "one token": {},
    "ties": {},
    "one expert for all": {},
    "an expert no token picks": {},
    "int8": {},
    "biases": BIASED,
    "biases, few of many": BIASED | {"num_experts": 16},
}


@pytest.mark.parametrize("name", CASES)
def test_every_form_is_the_loop_over_tokens_and_experts(name):
    config = replace(CONFIG, **CASES[name])
    weights, shape = make_weights(config), (1 if name == "one token" else 9, config.hidden_size)
    x_nd = np.random.default_rng(3).normal(size=shape)
    if name == "ties":
        weights["router"] = np.zeros_like(weights["router"])
    if name in ("one expert for all", "an expert no token picks"):
        x_nd[:, 0] = 1.0
        weights["router"][0, 4] = 50.0 if name == "one expert for all" else -50.0
    given = weights
    if name == "int8":
        specs = experts.specs(config)
        given = {part: quantized.compress(jax.device_put(x), specs[part], "int8") for part, x in weights.items()}
        for part in ("expert_gate", "expert_up", "expert_down"):
            weights = weights | {part: np.asarray(given[part].values * given[part].scale[:, None])}
    expected_nd, expected_nk = oracle(weights, config, x_nd)
    weight_nk, ids_nk = route(weights, config, x_nd)
    np.testing.assert_array_equal(ids_nk, expected_nk)
    counts_x = np.bincount(np.ravel(ids_nk), minlength=6)
    expect = {"ties": counts_x[:2].sum() == 18, "one expert for all": counts_x[4] == 9}
    assert expect.get(name, True) and (name != "an expert no token picks" or counts_x[4] == 0)
    without_nd, _ = oracle({key: x for key, x in weights.items() if key != "expert_down_bias"}, config, x_nd)
    sums = run_every_variant(given, jnp.asarray(x_nd), weight_nk, ids_nk, gate=experts.find_gate(config))
    for variant, got_nd in sums.items():
        np.testing.assert_allclose(got_nd, without_nd, atol=1e-12, err_msg=variant)
    got_btd = mixture(given, config, x_nd[None])
    np.testing.assert_allclose(got_btd[0], expected_nd, atol=1e-12)


def test_more_tokens_than_a_block_are_run_block_by_block():
    weights = make_weights(CONFIG)
    x_nd = np.random.default_rng(1).normal(size=(expert_sums.BLOCK + 3, 8))
    got_btd = mixture(weights, CONFIG, x_nd[None])
    np.testing.assert_allclose(got_btd[0], oracle(weights, CONFIG, x_nd)[0], atol=1e-12)


def test_one_token_multiplies_no_matrix_of_all_experts():
    """Nothing in the program of a one-token step is as large as the experts' weights, but for these."""
    weights, x_btd = make_weights(CONFIG), jnp.ones((1, 1, 8))
    text = jax.jit(lambda weights, x: experts.mixture(weights, CONFIG, x)).lower(weights, x_btd).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products and not [line for line in products if "6x8x4" in line or "6x4x8" in line]


@needs_cpu
@pytest.mark.parametrize("scheme, dtype", [(None, "float32"), (None, "bfloat16"), ("int8", "float32")])
def test_no_matrix_of_an_expert_is_copied_for_one_token(scheme, dtype, as_users_compile):
    config = replace(CONFIG, hidden_size=64, num_experts=8, expert_size=48)
    weights = parameters.initialize(experts.specs(config), jax.random.key(0), dtype)
    weights = {name: quantized.compress(weight, experts.specs(config)[name], scheme) for name, weight in weights.items()}
    run = jax.jit(lambda weights, x: experts.mixture(weights, config, x))
    compiled = run.lower(weights, jnp.ones((1, 1, 64), dtype)).compile()
    matrix = 64 * 48 * (1 if scheme else jnp.dtype(dtype).itemsize)
    assert compiled.memory_analysis().temp_size_in_bytes < matrix


OVER_EXPERTS, OVER_WIDTH = {"data": 2, "model": 4}, {"data": 2, "model": 4, "experts": 1}


@needs_8_devices
@pytest.mark.parametrize("sizes, axes, sequences, scheme", [
    (OVER_EXPERTS, ("model", None, None), 1, None),
    (OVER_WIDTH, ("experts", None, "model"), 9, "int8"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        (OVER_EXPERTS, ("model", None, None), 80, "int8"),
        ({"data": 1, "model": 2, "experts": 4}, ("experts", None, "model"), 1, "int8"),
        ({"data": 1, "model": 8}, (None, None, "model"), 80, None),  # which does not divide the experts
    ]),
])  # fmt: skip
def test_a_mesh_gives_what_one_device_gives_and_moves_no_weight(sizes, axes, sequences, scheme):
    config = replace(CONFIG, num_experts=16 if sizes["model"] < 8 else 6, expert_size=8, **BIASED)
    specs, x_btd = experts.specs(config), jnp.asarray(np.random.default_rng(1).normal(size=(2, sequences, 8)))
    weights = jax.tree.map(jnp.asarray, make_weights(config))
    weights = {name: quantized.compress(weight, specs[name], scheme) for name, weight in weights.items()}
    run = jax.jit(lambda weights, x: experts.mixture(weights, config, x))
    expected = run(weights, x_btd)
    mesh = make_mesh(**sizes)
    places = jax.tree.map(lambda x: x.sharding, parameters.abstract(quantized.specs(specs, scheme), float, mesh))
    assert tuple((places["expert_gate"].values if scheme else places["expert_gate"]).spec) == axes
    weights = jax.device_put(weights, places)
    with sharding.ambient(mesh):
        compiled = run.lower(weights, x_btd).compile()
        got = compiled(weights, x_btd)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-12), got, expected)
    assert "all-gather" not in compiled.as_text()


def test_tpus_read_matrices_in_the_layout_that_they_have():
    """Compiled for a v5p, a loop over chunks of 128 tokens had a copy of all experts of gpt-oss in another layout."""
    shapes = {"expert_gate": (4, 320, 64), "expert_up": (4, 320, 64), "expert_down": (4, 64, 320)}
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    routed = (jax.ShapeDtypeStruct((9, 2), dtype) for dtype in (jnp.float32, jnp.int32))
    x_nd = jax.ShapeDtypeStruct((9, 320), jnp.bfloat16)
    traced = jax.jit(partial(expert_sums.sum_experts, gate=experts.silu_gate)).trace(weights, x_nd, *routed)
    texts = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda", "tpu")}
    assert {name: text.count("LayoutConstraint") for name, text in texts.items()} == {"cpu": 0, "cuda": 0, "tpu": 3}


@pytest.mark.slow
def test_a_loop_on_a_tpu_copies_no_experts():
    """Two layers with the sizes of gpt-oss; a v5p holds eight experts of each: copies had 549 MB."""
    libtpu = pytest.importorskip("libtpu", reason='needs pip install "jax[tpu]"')
    os.environ.setdefault("TPU_LIBRARY_PATH", libtpu.get_library_path())
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    device = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices[0]
    place = jax.sharding.SingleDeviceSharding(device)

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    weights = {f"expert_{name}": array(8, 2880, 2880) for name in ("gate", "up", "down")}

    def run(layers, x_nd, *routed):
        def step(_, x_nd):
            for weights in layers:
                x_nd = x_nd + expert_sums.sum_experts(weights, x_nd, *routed, experts.silu_gate).astype(x_nd.dtype)
            return x_nd

        return jax.lax.fori_loop(0, 5, step, x_nd)

    routed = (array(128, 4, dtype=dtype) for dtype in (jnp.float32, jnp.int32))
    compiled = jax.jit(run).lower([weights, weights], array(128, 2880), *routed).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**24


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [None, "int8", "fp8"])
@pytest.mark.parametrize("num_experts", [6, 64], ids=["all", "chosen"])
def test_a_tpu_copies_no_matrix_of_an_expert_for_one_token(num_experts, scheme):
    """Gathered matrices were copied in float32. The sizes of Qwen3-30B-A3B."""
    pytest.importorskip("libtpu", reason='needs pip install "jax[tpu]"')
    config = replace(CONFIG, hidden_size=2048, num_experts=num_experts, experts_per_token=4, expert_size=768)
    mesh = make_mesh(1, 1, devices=memory.find_devices("v5e:2x2")[:1])
    weights = parameters.abstract(quantized.specs(experts.specs(config), scheme, mesh), jnp.bfloat16, mesh)
    x_btd = jax.ShapeDtypeStruct((1, 1, 2048), jnp.bfloat16, sharding=weights["router"].sharding)
    run = jax.jit(lambda weights, x: experts.mixture(weights, config, x))
    compiled = programs.compile_lowered(run.trace(weights, x_btd).lower(), mesh)
    assert compiled.memory_analysis().temp_size_in_bytes < 2048 * 768
    assert reductions_of_weights(compiled.as_text(), 2048 * 768) == []
