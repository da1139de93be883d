"""The loop around the update: logs, held-out means, checkpoints, resuming."""

import dataclasses
import itertools
import math
import os
import signal
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_training
from answers import slow
from refusals import refused
from toy_task import FROZEN, OPTIMIZER, SPECS, TASK, WIDTH, sums, weights

from train.data import packing
from train.data.documents import DataConfig
from train.runtime import loop, training_state
from train.runtime.run_config import LoopConfig, MeshConfig, OptimizerConfig
from treeflash_jax.core import sharding


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToySettings:
    run: str
    data: DataConfig = DataConfig(sequence_length=WIDTH)
    optimizer: OptimizerConfig = OPTIMIZER
    loop: LoopConfig
    mesh: MeshConfig = MeshConfig()


def test_all_hosts_end_one_step_after_a_signal(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    signals = loop.Signals(sharding.make_mesh())
    assert not signals.requested() and not signals.requested()
    signals.received = signal.SIGTERM
    assert not signals.requested() and signals.requested()


def test_steps_follow_from_epochs():
    assert loop.resolve_steps(LoopConfig(batch=4, epochs=1.5), 10) == 4
    assert loop.resolve_steps(LoopConfig(batch=4, steps=7, epochs=1.5), 10) == 7
    refused(lambda: loop.resolve_steps(LoopConfig(batch=4, epochs=0.0), 10), "got 10 sequences and 0.0 epochs, expected at")


def test_means_of_sums():
    totals = {"a": (np.float32(3), np.float32(2)), "b": (np.array([1.0, 5.0]), np.array([4.0, 0.0]))}
    assert loop.means(totals | {"c": (np.zeros(()),) * 2}) == {"a": 1.5, "b": [0.25, None], "c": None}


def place(mesh):
    params, frozen = weights()
    params = training_state.place_weights(params, SPECS, mesh, jnp.float32)
    return params, training_state.place_weights(frozen, FROZEN, mesh, jnp.float32)


def make_corpus(held_out=(6, 3)):
    rng = np.random.default_rng(1)

    def packed(batch):
        ids = rng.integers(0, 64, (batch, WIDTH)).astype(np.int32)
        return packing.pack([packing.Document(tokens_n, np.ones(WIDTH, np.float32)) for tokens_n in ids], WIDTH)

    others = {f"source-{i}": packed(batch) for i, batch in enumerate(held_out)}
    return packing.Corpus({"train": packed(40)}, others, {"train": 1.0}, {})


@pytest.mark.parametrize("sizes, parts", [(dict(), 2), (dict(data=2, fsdp=2), 1), (dict(data=2, model=2), 2)])
def test_held_out_means_are_over_every_source_and_spread_over_it(sizes, parts):
    """Batches of 4, at most 4: every other one of the first source, all of the second of 3, then again from 0. They are
    computed in the parts of a step, for which memory was found to suffice."""
    corpus, mesh, (params, frozen) = make_corpus(held_out=(32, 3)), sharding.make_mesh(**sizes), weights()
    computed = []

    def noted(params, frozen, batch, keys_b):
        computed.append(len(keys_b))
        return sums(params, frozen, batch, keys_b)

    task = dataclasses.replace(TASK, held_out_sums=noted)
    with sharding.ambient(mesh):
        held_out = loop.make_held_out_measure(task, corpus, LoopConfig(batch=4, accumulate=parts), mesh)
        placed, reports = place(mesh), []
        metrics = held_out(*placed, reports.append)
        assert reports == [f"evaluating {done} of 2 held-out sources" for done in (0, 1)]
        assert held_out(*placed, lambda *_: None) == metrics
        assert {*computed} == {4 // parts // (4 if "fsdp" in sizes else 1)}

    def expected(name, batches):
        totals = []
        for number, batch in enumerate(batches):
            keys_b = jax.random.split(jax.random.fold_in(jax.random.key(0), number), 4)
            totals.append(sums(params, frozen, corpus.held_out[name].take(batch), keys_b))
        return jax.tree.map(lambda *x: sum(x), *totals)

    first = expected("source-0", ([0, 2, 4, 6], [8, 10, 12, 14], [16, 18, 20, 22], [24, 26, 28, 30]))
    second = expected("source-1", ([0, 1, 2, 0],))
    both = jax.tree.map(jnp.add, first, second)
    assert set(metrics) == {"held_out/loss", "held_out/y", "held_out/source-0/loss", "held_out/source-1/loss"}
    for name, (total, weight) in {"": both["loss"], "source-0/": first["loss"], "source-1/": second["loss"]}.items():
        np.testing.assert_allclose(metrics[f"held_out/{name}loss"], total / weight, rtol=1e-5)
    np.testing.assert_allclose(metrics["held_out/y"], both["y"][0] / both["y"][1], rtol=1e-4, atol=1e-5)


LOOP = LoopConfig(steps=10, batch=8, log_every=3, save_every=4, evaluate_every=5, keep=1, best="score", best_mode="max")


def fit(folder, evaluate=None, **changed):
    """(log lines, final weights) of a run."""
    settings, mesh = ToySettings(run=str(folder), loop=dataclasses.replace(LOOP, **changed)), sharding.make_mesh(data=2)
    params, frozen = place(mesh)
    named = dict(params=params, frozen=frozen, corpus=make_corpus(), evaluate=evaluate)
    final = loop.fit(TASK, settings=settings, mesh=mesh, **named)
    return toy_training.read_lines(folder / "log.jsonl"), jax.device_get(final)


def saved(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").glob("[0-9]*"))


def profiled_steps(folder):
    [path] = (folder / "tensorboard" / "plugins" / "profile").rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    events = [event for plane in planes for line in plane.lines for event in line.events if event.name == "train"]
    return [dict(event.stats)["step_num"] for event in events]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    scores = iter([3.0, 1.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "time", SimpleNamespace(perf_counter=itertools.count(step=6.0).__next__))
        patch.setattr(loop.flops, "peak_flops", lambda devices: 1e6 * devices)
        shown = dict(tensorboard=True, profile=(4, 5))
        return folder, *fit(folder, lambda params, report: {"score": next(scores)}, save_every=5, **shown)


def test_lines_checkpoints_and_evaluations_come_when_due(whole):
    folder, log, final = whole
    assert [line["step"] for line in log] == [3, 5, 6, 9, 10]
    assert [line["step"] for line in log if "loss" in line] == [3, 6, 9, 10]
    assert [line["step"] for line in log if "held_out/loss" in line] == [5, 10]
    assert [line.get("score") for line in log] == [None, 3.0, None, None, 1.0]
    assert saved(folder) == [5, 10], "the newest, and the best"
    rate = training_state.schedule(OPTIMIZER, 10, OPTIMIZER.learning_rate)
    for line in log:
        if "loss" in line:
            np.testing.assert_allclose(line["learning_rate"], rate(line["step"] - 1), rtol=1e-6)
            # The first step is not timed; step 6 follows a checkpoint.
            seconds = {3: 6.0 / 2, 6: 6.0, 9: 6.0 / 3, 10: 6.0}[line["step"]]
            np.testing.assert_allclose(line["tokens_per_second"], 8 * WIDTH / seconds)
            np.testing.assert_allclose(line["mfu"], TASK.flops / seconds / 2e6)
    assert log[-2]["loss"] != log[-1]["loss"], "the last line is of the last step alone"


def test_tensorboard_reads_the_metrics_and_a_profile_of_the_steps_that_settings_name(whole):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    [path] = (whole[0] / "tensorboard").glob("events.out.tfevents.*")
    content, shown = path.read_bytes(), {}
    while content:  # length, its checksum, an event, its checksum
        size = int.from_bytes(content[:8], "little")
        event, content = Event.FromString(content[12 : 12 + size]), content[16 + size :]
        shown |= {(event.step, value.tag): value.simple_value for value in event.summary.value}
    logged = {}
    for line in whole[1]:
        for name, value in line.items():
            parts = {f"{name}/{i}": x for i, x in enumerate(value, 1)} if isinstance(value, list) else {name: value}
            logged |= {(line["step"], part): x for part, x in parts.items() if part != "step"}
    assert shown.keys() == logged.keys() and (10, "y/2") in shown
    np.testing.assert_allclose([shown[key] for key in logged], [*logged.values()], rtol=1e-5)
    assert profiled_steps(whole[0]) == [4, 5]


@pytest.mark.parametrize("sent, word, status", [
    (signal.SIGTERM, "terminated", 143), slow(signal.SIGINT, "interrupted", 130),
])  # fmt: skip
def test_a_stopped_run_goes_on_to_the_same_end(whole, tmp_path, monkeypatch, capsys, sent, word, status):
    """During the evaluation of step 5, which ends first: the next step is the last before a checkpoint."""
    run, wandb = tmp_path / "run", Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    before = signal.getsignal(sent)

    def evaluate(params, report):
        os.kill(os.getpid(), sent)
        report("evaluating 1 of 9 prompts")
        return {"score": 3.0}

    with pytest.raises(SystemExit) as ended:
        fit(run, evaluate, wandb="drafters")
    assert ended.value.code == status and saved(run) == [5, 6] and not (run / "run.lock").exists()
    assert f"{word}: saved step 6 of 10; the same command goes on from there" in capsys.readouterr().out
    assert signal.getsignal(sent) is before
    _, final = fit(run, lambda params, report: {"score": 1.0}, wandb="drafters", profile=(5, 8))
    assert profiled_steps(run) == [7, 8]
    assert "continuing at step 6 of 10" in capsys.readouterr().out
    assert toy_training.read_log(run) == toy_training.read_log(whole[0])
    jax.tree.map(np.testing.assert_array_equal, final, whole[2])

    for start in wandb.init.call_args_list:
        assert start.kwargs["project"] == "drafters" and start.kwargs["group"] == str(run)
        assert start.kwargs["config"]["loop"]["batch"] == 8
    logged = [(call.kwargs["step"], *call.args) for call in wandb.init.return_value.log.call_args_list]
    assert [step for step, _ in logged] == [3, 5, 6, 9, 10] and logged[-1][1]["seconds"] > 0
    assert wandb.init.return_value.finish.call_count == 2


def test_a_finished_run_only_gives_its_weights(whole, monkeypatch):
    monkeypatch.setattr(loop, "make_held_out_measure", lambda *_: lambda *_, **__: pytest.fail("measured"))
    log, final = fit(whole[0], save_every=5)
    assert log == whole[1]
    jax.tree.map(np.testing.assert_array_equal, final, whole[2])


def test_nothing_is_saved_once_a_loss_is_not_finite(tmp_path, monkeypatch):
    real = packing.batches

    def poisoned(corpus, **named):
        for step, batch in enumerate(real(corpus, **named)):
            yield dataclasses.replace(batch, weights_bt=batch.weights_bt * (np.nan if step == 5 else 1))

    monkeypatch.setattr(packing, "batches", poisoned)
    every = dict(log_every=100, evaluate_every=100, save_every=2)
    refused(
        lambda: fit(tmp_path / "run", **every), "not finite at step 6 or after the last log line; nothing was saved since"
    )
    assert saved(tmp_path / "run") == [4]


def test_what_was_evaluated_is_saved_and_the_best_of_it_kept(tmp_path, capsys):
    """Checkpoints are due at 4 and 8, evaluations at 5 and 10. A score that is not finite is never the best."""
    scores = iter([3.0, math.nan])
    fit(tmp_path / "run", lambda params, report: {"score": next(scores)})
    assert saved(tmp_path / "run") == [5, 10]
    assert "as the best" not in capsys.readouterr().out
    fit(tmp_path / "other", lambda params, report: {"score": 1.0}, best="scores", steps=2)
    assert "loop.best scores is not among held_out/loss, held_out/y" in capsys.readouterr().out


def test_every_zero_is_never(tmp_path):
    """But a run logs, evaluates and saves at its end."""
    log, _ = fit(
        tmp_path / "run", lambda params, report: {"score": 1.0}, steps=3, log_every=0, evaluate_every=0, save_every=0
    )
    assert [line["step"] for line in log] == [3] == saved(tmp_path / "run")
    assert log[0]["score"] == 1.0 and {"loss", "held_out/loss", "learning_rate"} <= set(log[0])
