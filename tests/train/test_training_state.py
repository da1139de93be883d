"""The update, on a task small enough to be written out: meshes, parts, optimisers."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toy_task import BATCH, FROZEN, OPTIMIZER, SEED, SPECS, TASK, WIDTH, sums, weights
from toy_training import MODEL, WITH_HEAD

from train.data import packing
from train.runtime import training_state
from train.runtime.flops import step_flops
from train.runtime.run_config import OptimizerConfig
from treeflash_jax.core import parameters, sharding
from treeflash_jax.core.parameters import Spec
from treeflash_jax.models import decoder


def make_batch(step):
    rng = np.random.default_rng(step)
    zeros = np.zeros((BATCH, WIDTH), np.int32)
    share = rng.uniform(0.5, 2, zeros.shape).astype(np.float32)
    return packing.PackedBatch(rng.integers(0, 64, zeros.shape).astype(np.int32), zeros, zeros, share)


def run(task, steps, sizes=None, *, accumulate=1, batches=make_batch):
    """States after each step, on the host."""
    mesh, (params, frozen) = sharding.make_mesh(**sizes or {}), weights()
    transform, states = training_state.make_optimizer(OPTIMIZER, 8, SPECS), []
    with sharding.ambient(mesh):
        abstract = training_state.abstract_state(task, transform, batches(0), mesh)
        start = jax.jit(
            lambda params: training_state.initial_state(task, transform, params, batches(0)),
            out_shardings=jax.tree.map(lambda x: x.sharding, abstract),
        )
        now = start(training_state.place_weights(params, SPECS, mesh, jnp.float32))
        frozen = training_state.place_weights(frozen, FROZEN, mesh, task.compute_dtype)
        update = jax.jit(
            training_state.make_update(task, transform, steps=8, accumulate=accumulate, seed=SEED, log_every=2)
        )
        for step in range(steps):
            now = update(now, frozen, batches(step))
            states.append(jax.device_get(now))
    return states


@pytest.fixture(scope="module")
def expected():
    """Three of those states: (parameters, sums, gradient norm) per step, without parts, meshes or casts."""
    (params, frozen), transform, states = weights(), training_state.make_optimizer(OPTIMIZER, 8, SPECS), []
    memory = transform.init(params)

    @jax.jit
    def make_step(params, memory, frozen, batch, step):
        def mean(params):
            key = jax.random.fold_in(jax.random.key(SEED), step)
            keys_b = jnp.stack([jax.random.fold_in(key, b) for b in range(BATCH)])
            totals = sums(params, frozen, batch, keys_b)
            return totals["loss"][0] / totals["loss"][1], totals

        grads, totals = jax.grad(mean, has_aux=True)(params)
        norm = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(grads)))
        updates, memory = transform.update(grads, memory, params)
        return optax.apply_updates(params, updates), memory, totals, norm

    for step in range(3):
        params, memory, totals, norm = make_step(params, memory, frozen, make_batch(step), step)
        states.append((params, totals, norm))
    return states


def close(got, expected):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), got, expected)


def test_sums_know_the_share_of_the_run_that_is_done():
    def noted(params, frozen, batch, keys_b):
        progress_b = jnp.zeros(len(keys_b)) if batch.progress_b is None else batch.progress_b
        return sums(params, frozen, batch, keys_b) | {"progress": (jnp.sum(progress_b), jnp.float32(len(keys_b)))}

    states = run(dataclasses.replace(TASK, sums=noted), 3, {"fsdp": 8}, accumulate=1)
    shares = [state.window["progress"][0] / BATCH for state in states]
    np.testing.assert_allclose(shares, [0, 1 / 8, 2 / 8])  # the window has two steps


@pytest.mark.parametrize(("sizes", "accumulate"), [({}, 4), ({"fsdp": 8}, 1), (dict(data=2, fsdp=2, model=2), 2)])
def test_updates_are_those_of_the_whole_batch(expected, sizes, accumulate):
    states = run(TASK, 3, sizes, accumulate=accumulate)
    for now, (params, _, _) in zip(states, expected, strict=True):
        close(now.params, params)
    first, second, third = (totals | {"grad_norm": (norm, np.float32(1))} for _, totals, norm in expected)
    close(states[0].window, first)
    close(states[1].window, jax.tree.map(jnp.add, first, second))
    close(states[2].window, third)  # two steps a line
    assert [int(now.step) for now in states] == [1, 2, 3]


def test_gradients_add_up_in_float32():
    """1000 contributions of 1 to weights that are read in bfloat16, where 256 + 1 is 256; on 4 ways of fsdp."""

    def counted(params, frozen, batch, keys_b):
        gate = params["gate"].astype(jnp.bfloat16)
        total = jax.lax.scan(lambda total, _: (total + jnp.sum(params["gate"].astype(jnp.bfloat16)), None), 0.0, None, 1000)
        assert frozen["offset"].dtype == jnp.bfloat16
        return {"loss": (total[0].astype(jnp.float32), jnp.float32(len(batch.tokens_bt) / BATCH))} | {
            "exact": (jnp.sum((params["gate"] == gate).astype(jnp.float32)), jnp.float32(1))
        }

    task = dataclasses.replace(TASK, sums=counted, compute_dtype=jnp.bfloat16)
    for sizes, devices in ((dict(), 1), (dict(fsdp=4), 4)):
        [now] = run(task, 1, sizes)
        expected = np.sqrt(WIDTH * 4) * 1000 * devices
        np.testing.assert_allclose(now.window["grad_norm"][0], expected, rtol=1e-6)
        assert now.window["exact"][0] == WIDTH * 4 * devices, "values are those of the compute dtype"


def test_weights_with_inputs_alone_decay_and_the_gradient_is_clipped():
    specs = SPECS | {"bias": Spec((2, 4), (None, "ffn")), "table": Spec((6, 4), ("vocab", None), inputs=(1,))}
    params = weights()[0] | {"bias": np.ones((2, 4), np.float32), "table": np.ones((6, 4), np.float32)}
    zeros = jax.tree.map(np.zeros_like, params)
    for name in ("adamw", "muon"):
        config = dataclasses.replace(OPTIMIZER, name=name, warmup=0.0, adam_learning_rate=0.1)
        transform = training_state.make_optimizer(config, 4, specs)
        update = jax.jit(transform.update)
        _, memory = update(zeros, jax.jit(transform.init)(params), params)
        updates, _ = update(zeros, memory, params)  # the first step's rate is 0
        for matrix in ("gate", "table"):
            close(updates[matrix], -0.1 * 0.5 * params[matrix])
        assert not np.any(updates["scale"]) and not np.any(updates["bias"]), name
    grads = jax.tree.map(lambda x: 100 * x, params)
    transform = training_state.make_optimizer(OPTIMIZER, 4, specs)
    _, memory = jax.jit(transform.update)(grads, jax.jit(transform.init)(params), params)
    np.testing.assert_allclose(optax.tree.norm(memory[1][0].mu) / (1 - OPTIMIZER.b1), 1.0, rtol=1e-5)


def test_muon_turns_matrices_alone():
    """Orthogonal updates of root mean square 0.2 on linear maps; AdamW with its own rate on the rest."""
    config = dataclasses.replace(OPTIMIZER, name="muon", warmup=0.0, weight_decay=0.0, adam_learning_rate=0.01, clip=1e9)
    params, transform = weights()[0], training_state.make_optimizer(config, 4, SPECS)
    memory, update = jax.jit(transform.init)(params), jax.jit(transform.update)
    for _ in range(2):
        updates, memory = update(params, memory, params)
    values = np.linalg.svd(updates["gate"], compute_uv=False)
    assert values.max() < 2 * values.min(), "its singular values are alike"
    np.testing.assert_allclose(np.sqrt(np.mean(updates["gate"] ** 2)), 0.1 * 0.2, rtol=0.2)
    np.testing.assert_allclose(np.abs(updates["scale"]), 0.01, rtol=0.2)


LAYER = {name: ((2,), (0, 1)) for name in "qkv"} | {"o": ((1, 2), (0,))}
LAYER |= {name: ((1,), (0,)) for name in ("gate", "up", "down")}
UNTIED = dataclasses.replace(MODEL, qkv_bias=True, tie_embeddings=False)
KINDS = {  # specs; the weights that Muon trains, with inputs and outputs; others that decay. The rest does neither.
    "qwen2": (lambda: decoder.specs(UNTIED), LAYER, {"embed", "unembed"}),
    "experts": (
        lambda: decoder.specs(dataclasses.replace(MODEL, num_experts=4, experts_per_token=2, expert_size=8)),
        {name: LAYER[name] for name in "qkvo"},
        {"embed", "router", "expert_gate", "expert_up", "expert_down"},
    ),
    "backbone": (lambda: WITH_HEAD.specs()["backbone"], LAYER | {"fc": ((0,), (1,))}, set()),
    "mlp": (
        lambda: WITH_HEAD.specs()["head"],
        {"token_ug": ((0,), (1, 2)), "hidden_ug": ((0,), (1, 2)), "down": ((0,), (1,))},
        set(),
    ),
    "lowrank": (lambda: dataclasses.replace(WITH_HEAD, head="lowrank").specs()["head"], {}, {"previous", "following"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_specs_say_what_muon_trains_and_what_decays(kind):
    """AdamW trains tables and experts; no bias decays, whatever its axes."""
    make, muon, others = KINDS[kind]
    specs = make()
    leaves = jax.tree_util.tree_flatten_with_path(specs, is_leaf=parameters.is_spec)[0]
    named = [(path[-1].key, spec) for path, spec in leaves]
    assert {name: (spec.inputs, spec.outputs) for name, spec in named if spec.outputs} == muon
    assert {name for name, spec in named if spec.inputs} == {*muon, *others}
    assert all(sorted(spec.inputs + spec.outputs) == list(range(len(spec.shape))) for _, spec in named if spec.outputs)
    transform = training_state.make_optimizer(dataclasses.replace(OPTIMIZER, name="muon"), 4, specs)
    _, memory = jax.eval_shape(transform.init, parameters.abstract(specs, jnp.float32))
    trained = memory.inner_states["muon"].inner_state[0].mu
    assert {path[-1].key for path, _ in jax.tree_util.tree_flatten_with_path(trained)[0]} == {*muon}


def test_products_of_a_step_are_counted_once_and_three_times_if_they_are_trained():
    """Whatever is recomputed, in all steps of a loop; a product with frozen weights twice if it needs the gradient."""

    @jax.checkpoint
    def through(x_bd, weight):
        return jnp.tanh(x_bd @ weight)

    def sums(params, frozen, batch, keys_b):
        start_bd = batch.tokens_bt.astype(jnp.float32) @ frozen["first"]
        x_bd, _ = jax.lax.scan(lambda x_bd, _: (through(x_bd, params["middle"]), None), start_bd, None, 5)
        return {"loss": (jnp.sum(x_bd @ frozen["last"]), jnp.float32(1))}

    square = Spec((8, 8), (None, None))
    counted = step_flops(sums, {"middle": square}, dict(first=square, last=square), training_state.abstract_batch(3, 8))
    assert counted == (1 + 5 * 3 + 2) * 2 * 3 * 8 * 8


def test_the_rate_warms_up_and_falls():
    rate = training_state.schedule(OptimizerConfig(learning_rate=1.0, warmup=0.1, final=0.2), 100, 2.0)
    np.testing.assert_allclose([rate(step) for step in (0, 5, 10, 55, 100, 150)], [0, 1, 2, 1.2, 0.4, 0.4], rtol=1e-5)
    shortest = training_state.schedule(OptimizerConfig(learning_rate=1.0), 1, 1.0)
    assert shortest(0) == 0 and shortest(1) == 1
