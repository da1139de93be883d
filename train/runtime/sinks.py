"""Metrics and profiles of a run for other programs, and the record of its starts; all of it on the first host only.

RUN/starts.jsonl has a line per start of the run: git commit, versions, devices and mesh; settings are in RUN/settings.toml.
"""

import json
import subprocess
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
from etils import epath

from train.runtime import folders, hosts, run_config
from treeflash_jax.core.devices import here

PACKAGES = ("treeflash-jax", "jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class Sink(NamedTuple):
    """A program that shows metrics: `write` receives a step and its metrics, `close` ends the record of this start."""

    write: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], None]


def open_sinks(folder: epath.Path, config: Any, mesh: jax.sharding.Mesh, step: int) -> list[Sink]:
    """Records that the run starts at `step`, and opens the sinks that its settings name."""
    if not hosts.is_first():
        return []
    path = folder / "starts.jsonl"
    known = [start["wandb"] for start in map(json.loads, folders.whole_lines(path)) if start["wandb"]]
    name = uuid.uuid4().hex[:8] if config.loop.wandb else None
    installed = {package.name: package.version for package in metadata.distributions()}
    commit = _git("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
    start = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit or None,
        "versions": {name: installed[name] for name in PACKAGES if name in installed},
        "processes": jax.process_count(),
        "devices": f"{jax.device_count()} {here().kind}",
        "mesh": dict(mesh.shape),
        "step": step,
        "wandb": name,
    }
    sinks = [_tensorboard(folder, step)] if config.loop.tensorboard else []
    if name:
        sinks.append(_wandb(config, name, known[0] if known else name))
    folders.append(path, json.dumps(start) + "\n")
    return sinks


def _git(*words: str) -> str:
    """Returns what git prints about this code without writing to its repository; "" without git or a repository."""
    command = ["git", "--no-optional-locks", *words]
    try:
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def _tensorboard(folder: epath.Path, step: int) -> Sink:
    try:
        from tensorboardX import SummaryWriter

        writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
    except ImportError as error:
        raise ValueError(f"loop.tensorboard: {error}; install treeflash-jax[tensorboard], for gs:// also [gcs]") from None

    def write(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return Sink(write, writer.close)


def _wandb(config: Any, name: str, group: str) -> Sink:
    try:
        import wandb
    except ImportError:
        raise ValueError("loop.wandb needs wandb; install treeflash-jax[wandb]") from None
    run = wandb.init(project=config.loop.wandb, id=name, group=group, config=run_config.to_dict(config))
    return Sink(lambda step, metrics: run.log(dict(metrics), step=step), run.finish)


class Trace:
    """Profile of steps `steps[0]` to `steps[1]`, made by the first host; TensorBoard finds it in RUN/tensorboard."""

    def __init__(self, folder: epath.Path, steps: tuple[int, int] | None):
        self.folder, self.running = folder / "tensorboard", ExitStack()
        self.first, self.last = steps if steps and hosts.is_first() else (0, 0)

    def begin(self, step: int, state: Any) -> None:
        """Begins the profile if `step` is its first; `state` is that of the step before."""
        if self.first <= step <= self.last:
            jax.block_until_ready(state)
            local = self.running.enter_context(folders.filled(self.folder, overwrite=True))
            self.running.enter_context(jax.profiler.trace(local))
            self.first = self.last + 1

    def end(self, step: int, state: Any) -> None:
        """Writes the profile if `step` is its last."""
        if step == self.last:
            jax.block_until_ready(state)
            self.running.close()
