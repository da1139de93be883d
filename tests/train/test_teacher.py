"""Outputs of the verifier that are recorded once."""

import dataclasses

import numpy as np
import toy_training
from refusals import refused

from train import head
from train.stages import teacher


def losses(toy, name, *overrides):
    settings = toy_training.settings(toy, f"run={toy.parent / name}", "loop.steps=4", "loop.evaluate_every=0", *overrides)
    head.main(settings)
    lines = toy_training.read_log(settings.run)
    return [line[key] for line in lines for key in ("loss", "held_out/loss") if key in line]


def test_losses_are_those_of_a_verifier_in_every_step(toy, capsys):
    folder = toy.parent / "outputs"
    expected = losses(toy, "plain")
    np.testing.assert_allclose(losses(toy, "recording", f"data.record={folder}"), expected, rtol=1e-5)
    assert "recording" in capsys.readouterr().out
    np.testing.assert_allclose(losses(toy, "recorded", f"data.record={folder}", "mesh.data=2"), expected, rtol=1e-5)
    assert "recording" not in capsys.readouterr().out
    for path in folder.rglob("*-hidden"):
        path.write_bytes(bytes(path.stat().st_size))
    assert np.abs(np.subtract(losses(toy, "zeros", f"data.record={folder}"), expected)).min() > 1e-3, "files are read"


def test_an_interrupted_record_goes_on_and_layers_are_shared(toy, tmp_path, monkeypatch, capsys):
    settings = toy_training.settings(toy, f"run={tmp_path}/run", f"data.record={tmp_path}/outputs", "loop.steps=1")
    head.main(settings)
    assert "recording 48 sequences" in capsys.readouterr().out
    [folder] = (tmp_path / "outputs").iterdir()
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name, content in whole.items():
        (folder / f"{name}.part").write_bytes(content[: len(content) // 2])
        (folder / name).unlink()
    head.main(dataclasses.replace(settings, run=f"{tmp_path}/again"))
    assert "recording 24 sequences" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole

    taps, teach = [], teacher.teach
    monkeypatch.setattr(teacher, "teach", lambda *args, **named: taps.append(named["taps"]) or teach(*args, **named))
    (folder / "responses-train-2").unlink()
    head.main(dataclasses.replace(settings, run=f"{tmp_path}/layer"))
    assert taps == [(2,)]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


def test_a_full_disk_is_refused_before_anything_is_computed(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(teacher.shutil, "disk_usage", lambda _: teacher.shutil._ntuple_diskusage(10, 10, 0))
    settings = toy_training.settings(toy, f"run={tmp_path}/run", f"data.record={tmp_path}/outputs")
    refused(lambda: head.main(settings), "got 0.0 GB of disk for data.record, expected")
