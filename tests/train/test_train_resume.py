"""A run may be extended, damaged, or moved to other hosts, where it ends as it would have ended.

It may also be killed: see test_train_faults.py.
"""

import dataclasses
import json
import os
import re
import shutil
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
import toy_training
from etils import epath
from refusals import refused
from toy_training import read_log, start, write_lines

from train import head
from train.data import packing
from train.runtime.checkpoint import Checkpoints, claim
from train.runtime.run_config import LoopConfig

STEPS = ("loop.steps=24", "loop.save_every=3", "loop.evaluate_every=12", "loop.batch=4")


def here(toml, run, *overrides):
    """Trains in this process."""
    head.main(toy_training.settings(toml, f"run={run}", *STEPS, *overrides))


ARRAYS = {"large": np.random.default_rng(0).normal(size=50_000).astype(np.float32), "layers": [{"small": np.int32([1, 2])}]}
DAMAGES = {"empty": lambda content: b"", "cut off": lambda content: content[: len(content) // 2]}


def times(step):
    return jax.tree.map(lambda x: jax.numpy.asarray(x * step), ARRAYS)


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    """A run with checkpoints of steps 1 and 2, whose values are multiples of each other, and its settings."""
    folder = tmp_path_factory.mktemp("two")
    config = toy_training.settings(toy_training.write(folder / "toy"), f"run={folder}/run")
    with opened(f"{folder}/run", config) as saved:
        for step in (1, 2):
            saved.save(step, times(step), wait=True)
    return folder / "run", config


@pytest.fixture
def copied(two_checkpoints, tmp_path):
    """A copy of that run, and its settings."""
    return Path(shutil.copytree(two_checkpoints[0], tmp_path / "run")), two_checkpoints[1]


def opened(run, config, documents="a"):
    claim(epath.Path(run), config)
    return closing(Checkpoints(str(run), config.loop, documents))


def restored(run, config, arrays=ARRAYS, documents="a"):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with opened(run, config, documents) as saved:
        return saved.restore(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arrays))


def test_a_run_that_is_extended_may_have_other_documents(copied, capsys):
    """With other steps the settings are noted anew; from its next checkpoint on the run is bound to these documents."""
    copy, config = copied
    refused(lambda: restored(copy, config, documents="b"), "the training documents changed after step 2", "another run=")
    more = dataclasses.replace(config, loop=dataclasses.replace(config.loop, steps=config.loop.steps + 3))
    restored(copy, more, documents="b")
    assert f"now {more.loop.steps}: the learning rate follows" in capsys.readouterr().out
    assert f"steps = {more.loop.steps}\n" in (copy / "settings.toml").read_text()
    restored(copy, more, documents="b")
    with opened(copy, more, "b") as saved:
        saved.save(3, times(3), wait=True)
    refused(lambda: restored(copy, more, documents="c"), "changed after step 3", "more loop.steps")


@pytest.mark.parametrize("damage", ["missing", *DAMAGES])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damaged_checkpoints_are_refused_in_one_line(copied, damage):
    """Without the checkpoint of step 2, the run continues from step 1."""
    run, config = copied
    newest = run / "checkpoints" / "2"
    largest = max(newest.rglob("d/*"), key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    largest.unlink()
    if damage != "missing":
        largest.write_bytes(DAMAGES[damage](content))
    refused(
        lambda: restored(run, config), f"{newest} cannot be read (", "delete it to continue from the checkpoint before it"
    )
    shutil.rmtree(newest)
    jax.tree.map(np.testing.assert_array_equal, restored(run, config), times(1))


@pytest.mark.parametrize("arrays, words", [
    (ARRAYS | {"large": np.zeros(7, "f")}, "shape: (7,) is not compatible with the stored shape"),
    (ARRAYS | {"new": np.zeros(7, "f")}, "tree structures do not match"),
    ({"large": ARRAYS["large"]}, "tree structures do not match"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_other_arrays_are_refused(two_checkpoints, arrays, words):
    refused(lambda: restored(*two_checkpoints, arrays), "cannot be read (", words, "use the code and drafter")


def several_processes(toy, run, count, *overrides, terminated_after=0):
    """Trains in `count` processes of one device each; the last may get SIGTERM. Returns the first one's output."""
    command = [sys.executable, toy_training.__file__, str(toy.parent), f"run={run}", *STEPS, *overrides]
    environment = {"TOY_RECORD": f"{run}.{count}", "TOY_TERMINATE_AFTER": str(terminated_after)}
    outputs = toy_training.run_job(command, count, 143 if terminated_after else 0, **environment)
    assert [output.count("step ") > 0 for output in outputs] == [i == 0 for i in range(count)], "the first one reports"
    return outputs[0]


def consumed(run):
    """The sequences of every step of a run, each step once; processes of one model axis read the same."""
    steps = {}
    for path in sorted(run.parent.glob(f"{run.name}.*-*")):
        for step, sequences in map(json.loads, path.read_text().splitlines()):
            steps.setdefault(step, {}).setdefault(path.name.partition("-")[0], {}).update(
                dict.fromkeys(map(tuple, sequences))
            )
    assert all(len(topologies) == 1 for topologies in steps.values()), "no step is trained twice"
    return [ids for _, topologies in sorted(steps.items()) for sequences in topologies.values() for ids in sequences]


def states(run, count):
    """The states of the first checkpoints of a run, on one device."""
    from orbax.checkpoint import v1 as ocp

    place, loaded = jax.sharding.SingleDeviceSharding(jax.devices()[0]), []
    for path in sorted((run / "checkpoints").iterdir(), key=lambda path: int(path.name))[:count]:
        shapes = ocp.metadata(path, checkpointable_name="state").metadata
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)
        loaded.append(ocp.load(path, abstract, checkpointable_name="state"))
    return loaded


@pytest.mark.slow
def test_a_run_moves_from_four_processes_to_two_to_one(tmp_path, monkeypatch):
    """Over all of them, every epoch has each example once, and the losses equal an uninterrupted run's."""
    toy, rng = toy_training.write(tmp_path), np.random.default_rng(0)
    examples = [rng.integers(4, 64, rng.integers(18, 32)).tolist() for _ in range(24)]  # of more than half a sequence each
    write_lines(tmp_path / "responses.jsonl", [{"prompt": ids[:3], "response": ids[3:]} for ids in examples])
    overrides = ("sources.0.hold_out=0", "mesh.data=4", "loop.batch=8", "loop.steps=15", "loop.log_every=1")
    overrides += ("loop.save_every=1", "loop.keep=15", "loop.evaluate_every=0")
    whole, run = tmp_path / "whole", tmp_path / "moved"
    several_processes(toy, whole, 4, *overrides)
    saved = []
    for count, step, mesh in ((4, 2, ()), (4, 5, ()), (2, 8, ("mesh.data=1", "mesh.model=2"))):
        output = several_processes(toy, run, count, *overrides, *mesh, terminated_after=step)
        saved.append(int(re.search(r"terminated: saved step (\d+) of 15", output)[1]))
    assert saved == [3, 6, 9], "all processes end a step after the one that got the signal noted it"
    monkeypatch.setattr(packing, "batches", packing.batches)
    toy_training.record_batches(Path(f"{run}.1-0"))
    here(toy, run, *overrides)
    equal = partial(np.testing.assert_array_equal, err_msg="bit for bit on as many processes")
    jax.tree.map(equal, states(run, saved[1]), states(whole, saved[1]))
    losses, expected = ([line["loss"] for line in read_log(path)] for path in (run, whole))
    assert losses[: saved[1]] == expected[: saved[1]]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert consumed(run) == consumed(whole)
    for epoch in np.reshape(consumed(run), (5, 24, 32)):
        assert sorted(np.trim_zeros(row, "b").tolist() for row in epoch) == sorted(examples)


def test_other_settings_are_refused_and_nothing_is_overwritten(toy, tmp_path):
    run = tmp_path / "run"
    claim(epath.Path(run), toy_training.settings(toy, f"run={run}"))
    before = (run / "settings.toml").read_text()
    second = toy_training.settings(toy, f"run={run}", "optimizer.learning_rate=0.5")
    refused(lambda: claim(epath.Path(run), second), "learning_rate = 0.01, got 0.5; give", "or another run=")
    assert (run / "settings.toml").read_text() == before
    other = ("mesh.data=8", "loop.accumulate=2", "attention=chunked", "evaluate.prompts=3", "loop.save_every=7")
    moved = toy_training.settings(toy, f"run={run}", *other)
    claim(epath.Path(run), moved)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_best_checkpoint_is_kept_beside_the_newest(tmp_path, mode):
    """Saves between evaluations have no metric and are never the best; what is restored is the newest."""
    loop = LoopConfig(batch=1, keep=2, best="loss", best_mode=mode)
    sign = 1.0 if mode == "min" else -1.0
    with closing(Checkpoints(f"{tmp_path}/run", loop, "")) as saved:
        for step, value in ((1, 3.0), (2, 1.0), (3, None), (4, 2.5), (5, None)):
            state = {"x": jax.numpy.arange(3.0) + step}
            saved.save(step, state, {"other": 0.0} | ({} if value is None else {"loss": sign * value}), wait=True)
        assert list(saved.metrics()) == [2, 4, 5]
        abstract = {"x": jax.ShapeDtypeStruct((3,), np.float32, sharding=state["x"].sharding)}
        np.testing.assert_array_equal(saved.restore(abstract)["x"], state["x"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs resource limits")
@pytest.mark.slow
def test_full_disk_is_one_clear_error(toy, tmp_path):
    script = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000));"
        f"sys.argv = {['x', str(toy), f'run={tmp_path}/run', *STEPS]!r};"
        "runpy.run_module('train.head', run_name='__main__')"
    )
    output = toy_training.finish(start([sys.executable, "-c", script]), 2)
    assert "Traceback" not in output and output.count("ERROR") == 0, output[-3000:]
    last = output.splitlines()[-1]
    assert last.startswith("train.x: error: "), output[-3000:]
    assert "could not be written" in last and "free some space" in last, last
