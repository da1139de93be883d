"""Metrics and profiles of a run for other programs, on the first host only."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import jax

from train.runtime import folders, hosts, run_config

Sink = Callable[[int, Mapping[str, float]], None]  # receives a step and its metrics


def open_sinks(config: Any, step: int, stack: ExitStack) -> list[Sink]:
    """Opens the programs that the settings of a run name, for the metrics of steps after `step`; `stack` closes them."""
    sinks: list[Sink] = []
    try:
        if config.loop.tensorboard and hosts.is_first():
            from tensorboardX import SummaryWriter

            folder = folders.absolute(config.run) / "tensorboard"
            writer = stack.enter_context(SummaryWriter(str(folder), purge_step=step + 1))

            def write(step: int, metrics: Mapping[str, float]) -> None:
                for name, value in metrics.items():
                    writer.add_scalar(name, value, step)

            sinks.append(write)
        if config.loop.wandb and hosts.is_first():
            import wandb

            run = wandb.init(project=config.loop.wandb, group=config.run, config=run_config.to_dict(config))
            stack.callback(run.finish)
            sinks.append(lambda step, metrics: run.log(dict(metrics), step=step))
    except ImportError as error:
        extras = "treeflash-jax[tensorboard], for gs:// also [gcs], and loop.wandb treeflash-jax[wandb]"
        raise ValueError(f"{error}; loop.tensorboard needs {extras}") from None
    return sinks


@contextmanager
def profiled(config: Any) -> Iterator[None]:
    """Records a profile that TensorBoard finds in RUN/tensorboard."""
    with folders.filled(folders.absolute(config.run) / "tensorboard", overwrite=True) as folder, jax.profiler.trace(folder):
        yield
