"""Metrics and profiles of a run for other programs, on the first host only."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import jax
from etils import epath

from train.runtime import folders, hosts, run_config


class Sink(NamedTuple):
    """A program that shows metrics: `write` receives a step and its metrics, `close` ends the record of this start."""

    write: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], None]


def open_sinks(folder: epath.Path, config: Any, step: int) -> list[Sink]:
    """Opens the sinks that the settings of a run name, for the steps after `step`."""
    sinks = []
    if config.loop.tensorboard and hosts.is_first():
        sinks.append(_tensorboard(folder, step))
    if config.loop.wandb and hosts.is_first():
        sinks.append(_wandb(config))
    return sinks


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


def _wandb(config: Any) -> Sink:
    try:
        import wandb
    except ImportError:
        raise ValueError("loop.wandb needs wandb; install treeflash-jax[wandb]") from None
    run = wandb.init(project=config.loop.wandb, group=config.run, config=run_config.to_dict(config))
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
