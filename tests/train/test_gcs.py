"""All stages with everything behind gs:// URLs, on an emulator of Google Cloud Storage.

TensorStore writes checkpoints, gcsfs settings, logs, locks, answers and models, and google-cloud-storage metrics. Run as a
script this is the process that trains: `python tests/train/test_gcs.py FOLDER [STEP]`; it gets SIGTERM after that step.
"""

import sys
from pathlib import Path

import fsspec
import jax
import pytest
import toy_training

import treeflash_jax as tf
from train import drafter, export, head, respond
from train.data.records import Source
from train.runtime import run_config
from treeflash_jax.core import files

BUCKET = "gs://bucket/project"
TRAINING = (
    f"verifier={BUCKET}/verifier",
    f"sources=[{{path = '{BUCKET}/answers.jsonl', format = 'responses', hold_out = 10}}]",
    "data.sequence_length=32",
    "loop={steps = 6, batch = 8, log_every = 1, save_every = 2, evaluate_every = 3, tensorboard = true, profile = [2, 3]}",
    "optimizer.learning_rate=0.01",
    "evaluate.prompts=0",
    "compute_dtype=float32",
    "mesh.data=1",
)
OBJECTIVE = "objective={{loss = '{}', anchors = 4, chunk = 2}}"


def main(toy: Path, terminate_after: int) -> None:
    """Trains a drafter from a verifier and prompts, loads it, and reads a file that other processes change."""
    system = fsspec.filesystem("gcs")
    if terminate_after:
        system.put(str(toy / "verifier"), f"{BUCKET}/verifier", recursive=True)
        toy_training.terminate_after(terminate_after)
    prompts = Source(path=str(toy / "responses.jsonl"), format="responses", hold_out=0)
    out, lengths = f"{BUCKET}/answers.jsonl", dict(max_new_tokens=8, temperatures=(1.0,))
    respond.main(respond.RespondConfig(verifier=f"{BUCKET}/verifier", sources=(prompts,), out=out, **lengths))
    sizes = ("num_layers=1", "block_size=4", "mask_token_id=3", "target_layer_ids=[2]", OBJECTIVE.format("cross-entropy"))
    drafter.main(run_config.load(drafter.DrafterStage, None, [*TRAINING, *sizes, f"run={BUCKET}/drafter"]))
    backbone = (f"drafter={BUCKET}/drafter/model", OBJECTIVE.format("forward-kl"))
    head.main(run_config.load(head.HeadStage, None, [*TRAINING, *backbone, f"run={BUCKET}/head"]))
    export.main(export.ExportConfig(run=f"{BUCKET}/head", out=f"{BUCKET}/published", step="best"))
    model = tf.load(verifier=f"{BUCKET}/verifier", drafter=f"{BUCKET}/published")
    drafted, plain = (model.generate([[5, 6]], max_new_tokens=6, builder=name)[0] for name in ("best-first", "none"))
    assert model.drafter.head == "mlp" and drafted.ids == plain.ids
    for name in ("events*", "plugins/profile/**/*.xplane.pb"):
        assert system.glob(f"{BUCKET}/head/tensorboard/{name}")
    path = files.absolute(f"{BUCKET}/shared")
    path.write_text("mine")
    assert path in path.parent.iterdir()  # gcsfs would answer from this listing afterwards
    command = "import fsspec; fsspec.filesystem('gcs').{}"
    for change, content in ((f"pipe('{path}', b'that of another')", "that of another"), (f"rm('{path}')", None)):
        toy_training.finish(toy_training.start([sys.executable, "-c", command.format(change)]))
        assert (path.read_text() if path.exists() else None) == content


@pytest.fixture
def environment(tmp_path):
    """Variables that lead every client to an emulator."""
    from gcp_storage_emulator.server import create_server

    port = toy_training.free_port()
    with create_server("localhost", port, in_memory=True, default_bucket="bucket"):
        yield {
            "STORAGE_EMULATOR_HOST": f"http://localhost:{port}",  # of gcsfs and google-cloud-storage
            "TENSORSTORE_GCS_HTTP_URL": f"http://localhost:{port}",
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",  # TensorStore's
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # gcsfs asks for the type of a bucket by gRPC
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "PYTHONPATH": f"{toy_training.ROOT}:{toy_training.ROOT / 'tests'}",
        }


@pytest.mark.slow
def test_every_stage_works_on_a_bucket(environment, tmp_path, monkeypatch):
    toy, here = toy_training.write(tmp_path / "toy", documents=60).parent, tmp_path / "here"
    here.mkdir()
    monkeypatch.setattr(toy_training, "ROOT", here)  # working directory of the processes
    output = toy_training.finish(toy_training.start([sys.executable, __file__, str(toy), "4"], **environment), 143)
    assert "terminated: saved step 4 of 6" in output, output
    output = toy_training.finish(toy_training.start([sys.executable, __file__, str(toy), "0"], **environment))
    assert "60 answers in gs://bucket/project/answers.jsonl; 0 new tokens" in output, "none was made again"
    assert "continuing at step 4 of 6" in output and "of the folder loaded again" in output and not [*here.iterdir()]


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    main(Path(sys.argv[1]), int(sys.argv[2]))
