"""The update and the loop around it, on a stage small enough to be written out: meshes, parts, logs, resuming."""

import dataclasses
import itertools
import json
import os
import signal
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train import data, loop, state
from train.config import LoopConfig, MeshConfig, OptimizerConfig
from train.documents import DataConfig
from treeflash_jax import mesh as meshes
from treeflash_jax import params as parameters
from treeflash_jax.drafters import block, steering
from treeflash_jax.drafters.block.config import DrafterConfig
from treeflash_jax.drafters.steering import SteeringConfig
from treeflash_jax.params import Spec
from treeflash_jax.verifiers import forward as verifier
from treeflash_jax.verifiers.config import ModelConfig

WIDTH, BATCH, SEED = 8, 16, 3
SPECS = {"gate": Spec((WIDTH, 4), ("embed", "ffn"), inputs=(0,), outputs=(1,)), "scale": Spec((4,), (None,))}
FROZEN = {"offset": Spec((WIDTH,), ("embed",))}
OPTIMIZER = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, clip=1.0, warmup=0.25, final=0.1)


def sums(params, frozen, rows, keys_b):
    """A regression with noise: a loss per row, weighted, and a metric per output."""
    x_rd = rows.tokens_rt / 64 + frozen["offset"]
    y_rf = (x_rd @ params["gate"]) * params["scale"]
    noise_r = jax.vmap(jax.random.uniform)(keys_b)
    loss_r, weight_r = jnp.sum((y_rf - 1) ** 2, axis=1) * (1 + noise_r), rows.weights_rt[:, 1]
    return {"loss": (jnp.sum(loss_r * weight_r), jnp.sum(weight_r)), "y": (jnp.sum(y_rf, 0), jnp.full(4, len(y_rf), float))}


STAGE = state.Stage(specs=SPECS, frozen_specs=FROZEN, sums=sums, compute_dtype=jnp.float32, flops=1e6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToySettings:
    run: str
    data: DataConfig = DataConfig(row_tokens=WIDTH)
    optimizer: OptimizerConfig = OPTIMIZER
    loop: LoopConfig
    mesh: MeshConfig = MeshConfig()


def weights():
    rng = np.random.default_rng(0)
    params = {"gate": rng.normal(size=(WIDTH, 4)), "scale": rng.normal(size=4)}
    return jax.tree.map(np.float32, params), {"offset": rng.normal(size=WIDTH).astype(np.float32)}


def batch_of(step):
    rng = np.random.default_rng(step)
    zeros = np.zeros((BATCH, WIDTH), np.int32)
    share = rng.uniform(0.5, 2, zeros.shape).astype(np.float32)
    return data.Rows(rng.integers(0, 64, zeros.shape).astype(np.int32), zeros, zeros, share)


def make_mesh(data=1, fsdp=1, model=1):
    return meshes.make_mesh(data, model, fsdp=fsdp)


def run(stage, steps, sizes=None, *, accumulate=1, log_every=2, optimizer=OPTIMIZER, batches=batch_of):
    """States after each step, on the host."""
    mesh, (params, frozen) = make_mesh(**sizes or {}), weights()
    transform, found = state.make_optimizer(optimizer, 8, SPECS), []
    with meshes.ambient(mesh):
        abstract = state.abstract_state(stage, transform, batches(0), mesh)
        start = jax.jit(
            lambda params: state.initial_state(stage, transform, params, batches(0)),
            out_shardings=jax.tree.map(lambda x: x.sharding, abstract),
        )
        now = start(state.place(params, SPECS, mesh, jnp.float32))
        frozen = state.place(frozen, FROZEN, mesh, stage.compute_dtype)
        update = jax.jit(state.make_update(stage, transform, accumulate=accumulate, seed=SEED, log_every=log_every))
        for step in range(steps):
            now = update(now, frozen, batches(step))
            found.append(jax.device_get(now))
    return found


def plain(steps, optimizer=OPTIMIZER):
    """What those states should be: (parameters, sums, gradient norm) per step, without parts, meshes or casts."""
    (params, frozen), transform, found = weights(), state.make_optimizer(optimizer, 8, SPECS), []
    memory = transform.init(params)

    @jax.jit
    def step_of(params, memory, frozen, rows, step):
        def mean(params):
            key = jax.random.fold_in(jax.random.key(SEED), step)
            keys_b = jnp.stack([jax.random.fold_in(key, b) for b in range(BATCH)])
            own = sums(params, frozen, rows, keys_b)
            return own["loss"][0] / own["loss"][1], own

        grads, own = jax.grad(mean, has_aux=True)(params)
        norm = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(grads)))
        updates, memory = transform.update(grads, memory, params)
        return optax.apply_updates(params, updates), memory, own, norm

    for step in range(steps):
        params, memory, own, norm = step_of(params, memory, frozen, batch_of(step), step)
        found.append((params, own, norm))
    return found


def close(got, expected, tolerance=2e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, expected)


@pytest.fixture(scope="module")
def expected():
    return plain(3)


@pytest.mark.parametrize(
    ("sizes", "accumulate"),
    [
        (dict(), 1),
        (dict(), 4),
        (dict(data=2, fsdp=4), 2),
        (dict(fsdp=8), 1),
        (dict(data=2, model=4), 1),
        (dict(data=2, fsdp=2, model=2), 2),
    ],
)
def test_updates_are_those_of_the_whole_batch(expected, sizes, accumulate):
    found = run(STAGE, 3, sizes, accumulate=accumulate)
    for now, (params, _, _) in zip(found, expected, strict=True):
        close(now.params, params)
    first, second, third = (own | {"grad_norm": (norm, np.float32(1))} for _, own, norm in expected)
    close(found[0].window, first)
    close(found[1].window, jax.tree.map(jnp.add, first, second))
    close(found[2].window, third)  # two steps a line
    assert [int(now.step) for now in found] == [1, 2, 3] and {int(now.bad_step) for now in found} == {-1}


def test_every_part_has_rows_of_every_device():
    parts = state.parts_of(jnp.arange(16), 4)
    assert parts.shape == (4, 4)
    for part in np.asarray(parts):
        assert {row // 4 for row in part} == {0, 1, 2, 3}, "rows 4 d to 4 d + 3 lie on device d of 4"


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_after_a_step_that_is_not_finite_nothing_changes(poison):
    bad = 2

    def poisoned(params, frozen, rows, keys_b):
        own = sums(params, frozen, rows, keys_b)
        is_bad = jnp.any(rows.segments_rt == 7)
        if poison == "loss":
            extra = jnp.where(is_bad, jnp.nan, 0.0)
        else:  # the root of zero: a finite value whose gradient is not
            extra = jnp.sum(jnp.sqrt(jnp.where(is_bad, 0 * params["scale"] ** 2, params["scale"] ** 2 * 0 + 1))) * 0.01
        return own | {"loss": (own["loss"][0] + extra, own["loss"][1])}

    def batches(step):
        rows = batch_of(step)
        return dataclasses.replace(rows, segments_rt=np.full_like(rows.segments_rt, 7 if step == bad else 1))

    found = run(dataclasses.replace(STAGE, sums=poisoned), 5, batches=batches)
    assert [int(now.bad_step) for now in found] == [-1, -1, bad, bad, bad]
    assert [int(now.step) for now in found] == [1, 2, 3, 4, 5]
    for now in found[bad:]:
        for name in ("params", "optimizer"):
            jax.tree.map(np.testing.assert_array_equal, getattr(now, name), getattr(found[bad - 1], name))


def test_gradients_add_up_in_float32():
    """1000 contributions of 1 to weights that are read in bfloat16, where 256 + 1 is 256; on 4 ways of fsdp."""

    def counted(params, frozen, rows, keys_b):
        gate = params["gate"].astype(jnp.bfloat16)
        total = jax.lax.scan(lambda total, _: (total + jnp.sum(params["gate"].astype(jnp.bfloat16)), None), 0.0, None, 1000)
        assert frozen["offset"].dtype == jnp.bfloat16
        return {"loss": (total[0].astype(jnp.float32), jnp.float32(len(rows) / BATCH))} | {
            "exact": (jnp.sum((params["gate"] == gate).astype(jnp.float32)), jnp.float32(1))
        }

    stage = dataclasses.replace(STAGE, sums=counted, compute_dtype=jnp.bfloat16)
    for sizes, devices in ((dict(), 1), (dict(fsdp=4), 4)):
        [now] = run(stage, 1, sizes)
        expected = np.sqrt(WIDTH * 4) * 1000 * devices
        np.testing.assert_allclose(now.window["grad_norm"][0], expected, rtol=1e-6)
        assert now.window["exact"][0] == WIDTH * 4 * devices, "values are those of the compute dtype"


def test_weights_with_inputs_alone_decay_and_the_gradient_is_clipped():
    specs = SPECS | {"bias": Spec((2, 4), (None, "ffn")), "table": Spec((6, 4), ("vocab", None), inputs=(1,))}
    params = jax.tree.map(jnp.asarray, weights()[0]) | {"bias": jnp.ones((2, 4)), "table": jnp.ones((6, 4))}
    zeros = jax.tree.map(jnp.zeros_like, params)
    for name in ("adamw", "muon"):
        config = dataclasses.replace(OPTIMIZER, name=name, warmup=0.0, adam_learning_rate=0.1)
        transform = state.make_optimizer(config, 4, specs)
        _, memory = transform.update(zeros, transform.init(params), params)
        updates, _ = transform.update(zeros, memory, params)  # the first step's rate is 0
        for matrix in ("gate", "table"):
            close(updates[matrix], -0.1 * 0.5 * params[matrix])
        assert not np.any(updates["scale"]) and not np.any(updates["bias"]), name
    grads = jax.tree.map(lambda x: 100 * x, params)
    transform = state.make_optimizer(OPTIMIZER, 4, specs)
    _, memory = transform.update(grads, transform.init(params), params)
    np.testing.assert_allclose(optax.tree.norm(memory[1][0].mu) / (1 - OPTIMIZER.b1), 1.0, rtol=1e-5)


def test_muon_turns_matrices_alone():
    """Orthogonal updates of root mean square 0.2 on linear maps; AdamW with its own rate on the rest."""
    config = dataclasses.replace(OPTIMIZER, name="muon", warmup=0.0, weight_decay=0.0, adam_learning_rate=0.01, clip=1e9)
    params = jax.tree.map(jnp.asarray, weights()[0])
    transform = state.make_optimizer(config, 4, SPECS)
    memory = transform.init(params)
    for _ in range(2):
        updates, memory = transform.update(params, memory, params)
    values = np.linalg.svd(updates["gate"], compute_uv=False)
    assert values.max() < 2 * values.min(), "its singular values are alike"
    np.testing.assert_allclose(np.sqrt(np.mean(updates["gate"] ** 2)), 0.1 * 0.2, rtol=0.2)
    np.testing.assert_allclose(np.abs(updates["scale"]), 0.01, rtol=0.2)


LAYERS = ModelConfig(
    vocab_size=64,
    hidden_size=8,
    intermediate_size=12,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_positions=64,
)
BLOCK = DrafterConfig(
    layers=LAYERS, block_size=4, mask_token_id=3, target_layer_ids=(0, 2), num_target_layers=3, head="mlp"
)
LAYER = {name: ((0,), (1, 2)) for name in "qkv"} | {"o": ((0, 1), (2,))}
LAYER |= {name: ((0,), (1,)) for name in ("gate", "up", "down")}
STEERED = dict(taps=(0, 1, 2), width=8, num_layers=2, ffn=12)
KINDS = {  # specs; the weights that Muon trains, with inputs and outputs; others that decay. The rest does neither.
    "verifier": (lambda: verifier.specs(LAYERS), LAYER, {"embed", "unembed"}),
    "qwen2": (lambda: verifier.specs(dataclasses.replace(LAYERS, qkv_bias=True)), LAYER, {"embed", "unembed"}),
    "experts": (
        lambda: verifier.specs(dataclasses.replace(LAYERS, num_experts=4, experts_per_token=2, expert_size=8)),
        {name: LAYER[name] for name in "qkvo"},
        {"embed", "unembed", "router", "expert_gate", "expert_up", "expert_down"},
    ),
    "backbone": (lambda: block.specs(BLOCK)["backbone"], LAYER | {"fc": ((0,), (1,))}, set()),
    "mlp": (
        lambda: block.specs(BLOCK)["head"],
        {"token_ug": ((0,), (1, 2)), "hidden_ug": ((0,), (1, 2)), "down": ((0,), (1,))},
        set(),
    ),
    "linear": (
        lambda: block.specs(dataclasses.replace(BLOCK, head="linear"))["head"],
        {"token": ((0,), (1,)), "hidden": ((0,), (1,))},
        set(),
    ),
    "lowrank": (lambda: block.specs(dataclasses.replace(BLOCK, head="lowrank"))["head"], {}, {"previous", "following"}),
    "steering": (lambda: steering.specs(SteeringConfig(**STEERED)), {}, {"mix", "project"}),
    "steering by factors": (lambda: steering.specs(SteeringConfig(rank=2, **STEERED)), {}, {"mix", "down", "up"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_specs_say_what_muon_trains_and_what_decays(kind):
    """AdamW trains tables, experts and steering, whose `up` is [rank, layers, ffn]; no bias decays, whatever its axes."""
    make, muon, others = KINDS[kind]
    specs = make()
    leaves = jax.tree_util.tree_flatten_with_path(specs, is_leaf=parameters.is_spec)[0]
    named = [(path[-1].key, spec) for path, spec in leaves]
    assert {name: (spec.inputs, spec.outputs) for name, spec in named if spec.outputs} == muon
    assert {name for name, spec in named if spec.inputs} == {*muon, *others}
    assert all(sorted(spec.inputs + spec.outputs) == list(range(len(spec.shape))) for _, spec in named if spec.outputs)
    transform = state.make_optimizer(dataclasses.replace(OPTIMIZER, name="muon"), 4, specs)
    trained = (
        jax.eval_shape(transform.init, parameters.abstract(specs, jnp.float32))[1].inner_states["muon"].inner_state[0].mu
    )
    assert {path[-1].key for path, _ in jax.tree_util.tree_flatten_with_path(trained)[0]} == {*muon}


def test_the_rate_warms_up_and_falls():
    rate = state.schedule(OptimizerConfig(learning_rate=1.0, warmup=0.1, final=0.2), 100, 2.0)
    np.testing.assert_allclose([rate(step) for step in (0, 5, 10, 55, 100, 150)], [0, 1, 2, 1.2, 0.4, 0.4], rtol=1e-5)
    shortest = state.schedule(OptimizerConfig(learning_rate=1.0), 1, 1.0)
    assert shortest(0) == 0 and shortest(1) == 1


def test_steps_follow_from_epochs():
    assert loop.resolve_steps(LoopConfig(batch=4, epochs=1.5), 10) == 4
    assert loop.resolve_steps(LoopConfig(batch=4, steps=7, epochs=1.5), 10) == 7
    with pytest.raises(ValueError, match="got 10 rows and 0.0 epochs, expected at least one step"):
        loop.resolve_steps(LoopConfig(batch=4, epochs=0.0), 10)


def test_means_of_sums():
    sums_ = {
        "a": (np.float32(3), np.float32(2)),
        "b": (np.array([1.0, 5.0]), np.array([4.0, 0.0])),
        "c": (np.zeros(()),) * 2,
    }
    assert loop.means(sums_) == {"a": 1.5, "b": [0.25, None], "c": None}


def corpus_of(train_rows=40, held_out=(6, 3)):
    rng = np.random.default_rng(1)

    def packed(rows):
        ids = rng.integers(0, 64, (rows, WIDTH)).astype(np.int32)
        return data.pack([data.Document(tokens_n, np.ones(WIDTH, np.float32)) for tokens_n in ids], WIDTH)

    others = {f"source-{i}": packed(rows) for i, rows in enumerate(held_out)}
    return data.Corpus({"train": packed(train_rows)}, others, {"train": 1.0}, {})


@pytest.mark.parametrize("sizes", [dict(), dict(data=2, fsdp=2), dict(data=2, model=2)])
def test_held_out_means_are_over_every_source_and_spread_over_its_rows(sizes):
    """Batches of 4, at most 4: every other row of the first source, all of the second of 3, again from 0 where it ends."""
    corpus, mesh, (params, frozen) = corpus_of(held_out=(32, 3)), make_mesh(**sizes), weights()
    with meshes.ambient(mesh):
        held_out = loop.HeldOut(STAGE, corpus, LoopConfig(batch=4), mesh)
        placed = state.place(params, SPECS, mesh, jnp.float32), state.place(frozen, FROZEN, mesh, jnp.float32)
        reports = []
        found = held_out(*placed, lambda *words: reports.append(words))
        assert reports == [(0, 2, "held-out sources"), (1, 2, "held-out sources")]
        assert held_out(*placed, lambda *_: None) == found

    def expected(name, batches):
        totals = []
        for number, rows in enumerate(batches):
            keys_b = jax.random.split(jax.random.fold_in(jax.random.key(0), number), 4)
            totals.append(sums(params, frozen, corpus.held_out[name].take(rows), keys_b))
        return jax.tree.map(lambda *x: sum(x), *totals)

    one = expected("source-0", ([0, 2, 4, 6], [8, 10, 12, 14], [16, 18, 20, 22], [24, 26, 28, 30]))
    two = expected("source-1", ([0, 1, 2, 0],))
    both = jax.tree.map(jnp.add, one, two)
    assert set(found) == {"held_out/loss", "held_out/y", "held_out/source-0/loss", "held_out/source-1/loss"}
    for name, (total, weight) in {"": both["loss"], "source-0/": one["loss"], "source-1/": two["loss"]}.items():
        np.testing.assert_allclose(found[f"held_out/{name}loss"], total / weight, rtol=1e-5)
    np.testing.assert_allclose(found["held_out/y"], both["y"][0] / both["y"][1], rtol=1e-4, atol=1e-5)


LOOP = LoopConfig(steps=10, batch=8, log_every=3, save_every=4, evaluate_every=5, keep=1, best="score", best_mode="max")


def fit(folder, evaluate=None, corpus=None, **changed):
    """(log lines, final weights) of a run."""
    settings = ToySettings(run=str(folder), loop=dataclasses.replace(LOOP, **changed))
    mesh, (params, frozen) = make_mesh(data=2), weights()
    placed = state.place(params, SPECS, mesh, jnp.float32), state.place(frozen, FROZEN, mesh, jnp.float32)
    final = loop.fit(
        STAGE,
        config=settings,
        mesh=mesh,
        params=placed[0],
        frozen=placed[1],
        corpus=corpus or corpus_of(),
        evaluate=evaluate,
    )
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()], jax.device_get(final)


def saved(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").glob("[0-9]*"))


def timeless(log):
    return [{k: v for k, v in line.items() if k not in ("mfu", "tokens_per_second", "seconds")} for line in log]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    scores = iter([3.0, 1.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "time", SimpleNamespace(perf_counter=itertools.count(step=6.0).__next__))
        patch.setattr(loop.devices, "peak_flops", lambda devices, dtype: 1e6 * devices)
        return folder, *fit(folder, lambda params, report: {"score": next(scores)}, save_every=5)


def test_lines_checkpoints_and_evaluations_come_when_due(whole):
    folder, log, final = whole
    assert [line["step"] for line in log] == [3, 5, 6, 9, 10]
    assert [line["step"] for line in log if "loss" in line] == [3, 6, 9, 10]
    assert [line["step"] for line in log if "held_out/loss" in line] == [5, 10]
    assert [line.get("score") for line in log] == [None, 3.0, None, None, 1.0]
    assert saved(folder) == [5, 10], "the newest, and the best"
    rate = state.schedule(OPTIMIZER, 10, OPTIMIZER.learning_rate)
    for line in log:
        if "loss" in line:
            np.testing.assert_allclose(line["learning_rate"], rate(line["step"] - 1), rtol=1e-6)
            seconds = 6.0 if line["step"] in (6, 10) else 2.0  # of one step, after the checkpoint of step 5, and of three
            np.testing.assert_allclose(line["tokens_per_second"], 8 * WIDTH / seconds)
            np.testing.assert_allclose(line["mfu"], STAGE.flops / seconds / 2e6)
    assert log[-2]["loss"] != log[-1]["loss"], "the last line is of the last step alone"


def test_a_terminated_run_goes_on_to_the_same_end(whole, tmp_path, capsys):
    """SIGTERM during the evaluation of step 5: the step is saved at once, and evaluated when the run goes on."""
    before, killed, released = signal.getsignal(signal.SIGTERM), [], threading.Event()

    def evaluate(params, report):
        killed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)
        released.wait(60)

    with pytest.raises(SystemExit) as ended:
        fit(tmp_path / "run", evaluate)
    assert time.monotonic() - killed[0] < 30, "the evaluation was not waited for"
    released.set()
    assert ended.value.code == 143 and saved(tmp_path / "run") == [5]
    assert "terminated: saved step 5 of 10; the same command goes on from there" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is before
    scores = iter([3.0, 1.0])
    log, final = fit(tmp_path / "run", lambda params, report: {"score": next(scores)})
    assert "continuing at step 5 of 10" in capsys.readouterr().out
    assert timeless(log) == timeless(whole[1])
    jax.tree.map(np.testing.assert_array_equal, final, whole[2])


def test_a_finished_run_only_gives_its_weights(whole, monkeypatch):
    monkeypatch.setattr(loop.HeldOut, "__call__", None)
    log, final = fit(whole[0], save_every=5)
    assert log == whole[1]
    jax.tree.map(np.testing.assert_array_equal, final, whole[2])


def test_other_training_documents_are_refused(whole):
    """The same command, whose files hold other text by now."""
    with pytest.raises(ValueError, match="the documents of train changed after step 10 was trained"):
        fit(whole[0], corpus=corpus_of(train_rows=41), save_every=5)


def test_nothing_is_saved_once_a_loss_is_not_finite(tmp_path, monkeypatch):
    real = data.batches

    def poisoned(corpus, **named):
        for step, rows in enumerate(real(corpus, **named)):
            yield dataclasses.replace(rows, weights_rt=rows.weights_rt * (np.nan if step == 5 else 1))

    monkeypatch.setattr(data, "batches", poisoned)
    with pytest.raises(ValueError, match="not finite at step 5; nothing was saved since"):
        fit(tmp_path / "run", log_every=100, evaluate_every=100, save_every=2)
    assert saved(tmp_path / "run") == [4]


def test_every_zero_is_never(tmp_path):
    """But a run logs, evaluates and saves at its end."""
    log, _ = fit(
        tmp_path / "run", lambda params, report: {"score": 1.0}, steps=3, log_every=0, evaluate_every=0, save_every=0
    )
    assert [line["step"] for line in log] == [3] == saved(tmp_path / "run")
    assert log[0]["score"] == 1.0 and {"loss", "held_out/loss", "learning_rate"} <= set(log[0])


def test_a_batch_must_divide(tmp_path):
    with pytest.raises(ValueError, match="got loop.batch 9 in 1 parts, expected a multiple of 1 parts x 2 devices"):
        fit(tmp_path / "run", batch=9)
