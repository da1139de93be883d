"""A toy verifier, drafter and responses on disk, and the settings of a few training steps on them.

Run as a script it is one process of a training run: `python tests/toy_training.py FOLDER [key=value ...]`.
"""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from answers import drafted_as_plain, fresh_weights, with_recurrent_layers

import treeflash_jax as tf
from train import export, head
from train.data import packing
from train.runtime import run_config
from treeflash_jax.core import parameters
from treeflash_jax.drafters.block.block_drafter import BlockDrafter
from treeflash_jax.formats import model_files
from treeflash_jax.models import decoder
from treeflash_jax.models.config import ModelConfig

ROOT = Path(__file__).parents[1]
TIMES = ("tokens_per_second", "mfu", "seconds")
SIZES = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_heads=4, num_kv_heads=2, head_dim=8)
MODEL = ModelConfig(num_layers=3, tie_embeddings=True, max_positions=256, eos_token_ids=(2,), **SIZES)
HYBRID = with_recurrent_layers(MODEL)
DRAFTER = BlockDrafter(
    layers=ModelConfig(num_layers=2, max_positions=256, **SIZES), block_size=5, mask_token_id=3, taps=(0, 2),
    num_target_layers=3,
)  # fmt: skip
WITH_HEAD = dataclasses.replace(DRAFTER, head="mlp")
TOML = """
run = "{folder}/run"
verifier = "{folder}/verifier"
drafter = "{folder}/drafter"
init_scale = 0.3
compute_dtype = "float32"
sources = [{{ path = "{folder}/responses.jsonl", format = "responses", hold_out = 10 }}]
data = {{ sequence_length = 32 }}
objective = {{ loss = "forward-kl", decay = 4.0, anchors = 4, chunk = 2 }}
evaluate = {{ prompts = 0 }}
optimizer = {{ learning_rate = 1e-2 }}
loop = {{ steps = 12, batch = 8, log_every = 2, save_every = 4, evaluate_every = 6 }}
mesh = {{ data = 1 }}
"""


def write_lines(path: Path, lines) -> Path:
    """Writes a JSONL file of objects, and of lines that are given as text."""
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write(folder: Path, documents: int = 120, model: ModelConfig = MODEL) -> Path:
    """Writes the pair, its responses and head.toml; returns the TOML file."""
    model_files.save_verifier(folder / "verifier", model, fresh_weights(decoder.specs(model)))
    backbone = fresh_weights(DRAFTER.specs()["backbone"], 1)
    model_files.save_drafter(folder / "drafter", DRAFTER, {"backbone": backbone, "head": {}})
    rng = np.random.default_rng(0)
    with (folder / "responses.jsonl").open("w") as file:
        for _ in range(documents):
            prompt, response = (rng.integers(4, 64, rng.integers(*ends)).tolist() for ends in ((2, 5), (6, 14)))
            file.write(json.dumps({"prompt": prompt, "response": response}) + "\n")
    (folder / "head.toml").write_text(TOML.format(folder=folder))
    return folder / "head.toml"


def write_stage(folder: Path, *lines: str, without: tuple[str, ...]) -> Path:
    """Writes stage.toml: head.toml with more lines, and without the settings of these names."""
    kept = [line for line in (folder / "head.toml").read_text().splitlines() if not line.startswith(without)]
    (folder / "stage.toml").write_text("\n".join([*lines, *kept]))
    return folder / "stage.toml"


def change_weights(folder: Path) -> None:
    """Changes one number of the weights in a folder, and nothing else."""
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-2] ^= 1  # of the last number, also in bfloat16
    path.write_bytes(content)


def fresh_head() -> dict:
    """The head that runs begin with; its output layer is zero."""
    return parameters.initialize(WITH_HEAD.specs()["head"], jax.random.key(1), scale=0.3)


def make_batch(lengths, sequence_length=32, prompt=3):
    """Packs documents of random tokens and these lengths into two sequences."""
    rng = np.random.default_rng(0)
    members = [
        packing.Document(rng.integers(4, 64, n).astype(np.int32), np.float32(np.arange(n) >= prompt)) for n in lengths
    ]
    return packing.pack(members, sequence_length).take(np.arange(2))


def settings(toml: Path, *overrides: str) -> head.HeadStage:
    return run_config.load(head.HeadStage, toml, overrides)


def exported(run: Path, verifier: Path) -> tf.TreeFlash:
    """Exports a run to the folder "out" beside it; returns the pair, which drafts what one-token decoding gives."""
    out = run.parent / "out"
    export.main(export.ExportConfig(run=str(run), out=str(out), dtype="float32"))
    model = tf.load(verifier=verifier, drafter=out, dtype="float32")
    drafted_as_plain(model, [[5, 6, 7]], {"nodes": 4}, max_new_tokens=6)
    return model


def start(command: list[str], **environment: str) -> subprocess.Popen:
    """Starts a process of this clone on one CPU device, its two streams joined."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_") or "CACHE" in k} | {"JAX_PLATFORMS": "cpu"}
    env |= {"PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen, status: int = 0) -> str:
    """Waits until a process has ended with a status; returns its output."""
    output, _ = process.communicate(timeout=400)
    assert process.returncode == status, output
    return output


def run_job(command: list[str], count: int, status: int = 0, **environment: str) -> list[str]:
    """Runs the processes of one job, which end with a status; returns their outputs."""
    environment |= {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": str(count)}
    processes = [start(command, **environment, JAX_PROCESS_ID=str(number)) for number in range(count)]
    try:
        return [finish(process, status) for process in processes]
    finally:
        for process in processes:
            process.kill()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def read_log(run: Path) -> list[dict]:
    """Lines of a run's log without times."""
    return [{k: v for k, v in line.items() if k not in TIMES} for line in read_lines(Path(run) / "log.jsonl")]


def terminate_after(last: int) -> None:
    """Has this process send itself SIGTERM before that step of training; it notices that after the step."""
    batches = packing.batches

    def terminated(corpus: packing.Corpus, *, start: int, **named) -> Iterator[packing.PackedBatch]:
        for step, batch in enumerate(batches(corpus, start=start, **named), start + 1):
            if step == last:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    packing.batches = terminated


def record_batches(path: Path) -> None:
    """Has this process write the tokens of every step that it trains on to a file: a JSON list [step, sequences] a line."""
    batches = packing.batches

    def recorded(corpus: packing.Corpus, *, start: int, **named) -> Iterator[packing.PackedBatch]:
        for step, batch in enumerate(batches(corpus, start=start, **named), start):
            with path.open("a") as file:
                file.write(json.dumps([step, batch.tokens_bt.tolist()]) + "\n")
            yield batch

    packing.batches = recorded


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    if "TOY_RECORD" in os.environ:  # one of several processes; the last may be terminated
        number = int(os.environ["JAX_PROCESS_ID"])
        record_batches(Path(f"{os.environ['TOY_RECORD']}-{number}"))
        if number == int(os.environ["JAX_NUM_PROCESSES"]) - 1:
            terminate_after(int(os.environ["TOY_TERMINATE_AFTER"]))
    head.main(settings(Path(sys.argv[1]) / "head.toml", *sys.argv[2:]))
