"""A run may be damaged or moved to other hosts: the same command ends where it would have ended.

It may also be killed: see test_train_faults.py.
"""

import dataclasses
import json
import os
import re
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

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
from treeflash_jax.formats import model_files

STEPS = ("loop.steps=24", "loop.save_every=3", "loop.evaluate_every=12", "loop.batch=4")


def here(toml, run, *overrides):
    """Trains in this process."""
    head.main(toy_training.settings(toml, f"run={run}", *STEPS, *overrides))


ARRAYS = {"large": np.random.default_rng(0).normal(size=50_000).astype(np.float32), "layers": [{"small": np.int32([1, 2])}]}
DAMAGES = {
    "empty": lambda content: b"",
    "cut off": lambda content: content[: len(content) // 2],
    "changed": lambda content: bytes(byte ^ 90 if k % 999 == 99 else byte for k, byte in enumerate(content)),
}


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


def opened(run, config, documents=None):
    claim(epath.Path(run), config)
    return Checkpoints(str(run), config.loop, documents or {"a": "1", "b": "2"})


def restored(run, config, arrays=ARRAYS, **documents):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with opened(run, config, documents) as saved:
        return saved.restore(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arrays))


def test_a_run_that_is_extended_may_have_more_documents(copied, capsys):
    """With other steps the settings are noted anew; from its next checkpoint on the run is bound to these documents."""
    copy, config = copied
    more = dataclasses.replace(config, loop=dataclasses.replace(config.loop, steps=config.loop.steps + 3))
    restored(copy, more, a="3")
    assert f"now {more.loop.steps}: the learning rate follows" in capsys.readouterr().out
    assert f"steps = {more.loop.steps}\n" in (copy / "settings.toml").read_text()
    restored(copy, more, a="3")
    with opened(copy, more, {"a": "3"}) as saved:
        saved.save(3, times(3), wait=True)
    refused(lambda: restored(copy, more, a="4"), "of a changed after step 3 was trained", "more loop.steps")


@pytest.mark.parametrize("damage", ["missing", *DAMAGES])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damaged_checkpoints_are_passed_over_with_one_line(two_checkpoints, tmp_path, capfd, damage):
    """Any file of the newest may be damaged: what is restored is whole, the newest state or the one before it."""
    run, config = two_checkpoints
    passed_over = set()
    files = [path.relative_to(run) for path in (run / "checkpoints" / "2").rglob("*") if path.is_file()]
    for number, file in enumerate(files):
        copy = Path(shutil.copytree(run, tmp_path / str(number)))
        content = (copy / file).read_bytes()
        (copy / file).unlink()
        if damage != "missing":
            (copy / file).write_bytes(DAMAGES[damage](content))
        state = restored(copy, config)
        out, err = capfd.readouterr()
        assert len(out.splitlines()) <= 1 and "Traceback" not in err
        assert not out or f"{copy}: checkpoint of step 2 is damaged (" in out
        jax.tree.map(np.testing.assert_array_equal, state, times(1 if out else 2))
        passed_over |= {file.name} if out else set()
    assert {"_METADATA", "manifest.ocdbt", *(file.name for file in files if file.parent.name == "d")} <= passed_over


def test_values_that_changed_are_noticed(copied, capsys):
    """Neither Orbax nor TensorStore notices one bit of an array."""
    largest = max((copied[0] / "checkpoints" / "2").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 4
    largest.write_bytes(content)
    jax.tree.map(np.testing.assert_array_equal, restored(*copied), times(1))
    assert "step 2 is damaged (its values are not those that were saved)" in capsys.readouterr().out


def test_all_checkpoints_damaged_is_an_error(copied, capsys):
    for path in copied[0].rglob("d/*"):
        path.unlink()
    refused(lambda: restored(*copied), "all of its checkpoints are damaged; move it away or give another run=")
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("arrays, words", [
    (ARRAYS | {"large": np.zeros(7, "f")}, "1 differ, such as large float32[50000]; expected large float32[7]"),
    (ARRAYS | {"new": np.zeros(7, "f")}, "new absent; expected new float32[7]"),
    ({"large": ARRAYS["large"]}, "layers.0.small int32[2]; expected layers.0.small absent"),
])  # fmt: skip
def test_other_arrays_are_no_damage(two_checkpoints, capsys, arrays, words):
    said = "checkpoint of step 2 holds other arrays: ", words, "another run="
    refused(lambda: restored(*two_checkpoints, arrays), *said)
    assert not capsys.readouterr().out


def test_a_failure_of_code_is_no_damage(two_checkpoints, monkeypatch, capsys):
    monkeypatch.setattr("orbax.checkpoint.v1.load", Mock(side_effect=TypeError("got an unexpected keyword")))
    with pytest.raises(TypeError, match="unexpected keyword"):
        restored(*two_checkpoints)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("documents, names", [({"a": "1", "b": "3"}, "b"), ({"c": "1"}, "a, b, c")])
def test_other_documents_are_refused(two_checkpoints, documents, names):
    refused(lambda: restored(*two_checkpoints, **documents), f"documents of {names} changed after step 2")


@pytest.mark.slow
def test_a_damaged_checkpoint_and_a_cut_log_change_nothing(toy, tmp_path, capsys):
    here(toy, tmp_path / "whole")
    whole, run = tmp_path / "whole", Path(shutil.copytree(tmp_path / "whole", tmp_path / "run"))
    shutil.rmtree(run / "model")
    for path in (run / "checkpoints" / "24").rglob("*"):
        if path.is_file() and path.stat().st_size > 500:
            path.write_bytes(path.read_bytes()[:100])
    (run / "log.jsonl").write_text((run / "log.jsonl").read_text()[:-20])
    here(toy, run)
    assert "checkpoint of step 24 is damaged" in capsys.readouterr().out
    assert read_log(run) == read_log(whole)
    trained, expected = (model_files.load_drafter(path / "model")[1] for path in (run, whole))
    jax.tree.map(np.testing.assert_array_equal, trained, expected)


def several_processes(toy, run, count, *overrides, terminated_after=0):
    """Trains on a device each of `count` processes, the last of which may get SIGTERM; returns the first one's output."""
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


def checksums(run):
    from orbax.checkpoint import v1 as ocp

    paths = sorted((run / "checkpoints").iterdir(), key=lambda path: int(path.name))
    return [ocp.metadata(path, checkpointable_name="state").custom_metadata["checksum"] for path in paths]


@pytest.mark.slow
def test_a_run_moves_from_four_processes_to_two_to_one(tmp_path, monkeypatch):
    """Over all of them every epoch has each example once, and the losses are those of a run that nothing interrupts."""
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
    assert saved[-1] < 15
    monkeypatch.setattr(packing, "batches", packing.batches)
    toy_training.record_batches(Path(f"{run}.1-0"))
    here(toy, run, *overrides)
    assert checksums(run)[: saved[1]] == checksums(whole)[: saved[1]], "bit for bit on as many processes"
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
    refused(lambda: claim(epath.Path(run), second), "optimizer.learning_rate was 0.01, now 0.5", "another run=")
    assert (run / "settings.toml").read_text() == before
    other = ("mesh.data=8", "loop.accumulate=2", "attention=chunked", "evaluate.prompts=3", "loop.save_every=7")
    moved = toy_training.settings(toy, f"run={run}", *other)
    claim(epath.Path(run), moved)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_best_checkpoint_is_kept_beside_the_newest(tmp_path, mode):
    """Saves between evaluations have no metric and are never the best; what is restored is the newest."""
    loop = LoopConfig(batch=1, keep=2, best="loss", best_mode=mode)
    sign = 1.0 if mode == "min" else -1.0
    with Checkpoints(f"{tmp_path}/run", loop, {}) as saved:
        for step, value in ((1, 3.0), (2, 1.0), (3, None), (4, 2.5), (5, None)):
            state = {"x": jax.numpy.arange(3.0) + step}
            saved.save(step, state, {"other": 0.0} | ({} if value is None else {"loss": sign * value}), wait=True)
        assert list(saved.metrics()) == [2, 4, 5]
        abstract = {"x": jax.ShapeDtypeStruct((3,), np.float32, sharding=state["x"].sharding)}
        np.testing.assert_array_equal(saved.restore(abstract)["x"], state["x"])


def test_checkpoints_do_not_ask_whether_a_host_was_terminated(tmp_path, monkeypatch):
    """JAX expects the numbers of steps in order, on all hosts alike; Orbax would ask about an earlier one from a thread."""
    monkeypatch.setattr("jax.experimental.multihost_utils.reached_preemption_sync_point", None)
    with Checkpoints(f"{tmp_path}/run", LoopConfig(batch=1), {}) as saved:
        saved.save(1, {"x": jax.numpy.arange(3.0)}, wait=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs resource limits")
@pytest.mark.slow
def test_full_disk_is_one_clear_error(toy, tmp_path):
    script = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000));"
        f"sys.argv = {['x', str(toy), f'run={tmp_path}/run', *STEPS]!r};"
        "runpy.run_module('train.head', run_name='__main__')"
    )
    output = toy_training.finish(start([sys.executable, "-c", script]), 1)
    assert "Traceback" not in output and output.count("ERROR") == 0, output[-3000:]
    last = output.splitlines()[-1]
    assert last.startswith("error: ") and "could not be written" in last and "free some space" in last, output[-3000:]
