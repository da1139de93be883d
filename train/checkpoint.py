"""Checkpoints of a run through Orbax: asynchronous, the newest few and the best kept, on a local disk or gs://.

A checkpoint is complete or absent: Orbax writes into a temporary directory and renames it. The settings of the run lie
beside its checkpoints and inside each of them; a run directory refuses settings that would train something else.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import jax
from etils import epath

from train import config as settings
from train import folders

# What may differ between the start of a run and its continuation: it changes what is seen, not what is computed.
FREE = frozenset(
    {"run", "mesh"} | {f"loop.{name}" for name in "log_every save_every evaluate_every keep tensorboard".split()}
)


class Checkpoints:
    """The checkpoints of one run directory.

    Example:
      >>> with Checkpoints("runs/head", config, keep=2, best="held_out/loss", mode="min") as saved:
      ...     state = saved.restore(abstract_state) or fresh_state
      ...     saved.save(200, state, {"held_out/loss": 0.3})
    """

    def __init__(self, run: str, config: Any, *, keep: int, best: str, mode: str):
        from orbax.checkpoint import v1 as ocp  # slow to import; what only compiles a step needs none

        self.folder = folders.absolute(run)
        claim(self.folder, config)
        _check_readable(self.folder / "checkpoints")
        policies = ocp.training.preservation_policies
        kept = [policies.LatestN(keep)]
        if best:
            worst = float("inf") if mode == "min" else float("-inf")
            kept.append(
                policies.BestN(
                    get_metric_fn=lambda metrics: (metrics or {}).get(best, worst),
                    reverse=mode == "min",
                    n=1,
                    keep_checkpoints_without_metrics=False,
                )
            )
        self.inner = ocp.training.Checkpointer(
            self.folder / "checkpoints",
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),  # the loop decides
            preservation_policy=policies.AnyPreservationPolicy(kept),
            custom_metadata=settings.to_dict(config),
            cleanup_tmp_directories=True,
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            self.inner.close()
        except Exception as error:  # an asynchronous write that failed shows up here
            if kind is None:
                raise _unwritten(self.folder, error) from None

    @property
    def steps(self) -> list[int]:
        """Steps that have a checkpoint, oldest first."""
        return sorted(found.step for found in self.inner.checkpoints)

    def restore(self, abstract: Any) -> Any:
        """The newest readable state, laid out as `abstract` says; None where there is no checkpoint yet.

        A damaged one is passed over with a warning.

        Raises:
          ValueError: there are checkpoints and none can be read.
        """
        for step in reversed(self.steps):
            try:
                return self.inner.load(step, abstract)
            except Exception as error:
                message = (
                    f"{self.folder}: checkpoint of step {step} cannot be read ({_first_line(error)}); trying the one before"
                )
                warnings.warn(message, stacklevel=2)
        if self.steps:
            raise ValueError(f"{self.folder}: none of its checkpoints can be read; move it away or give another run=")
        return None

    def save(self, step: int, state: Any, metrics: dict[str, float] | None = None, *, wait: bool = False) -> None:
        """Starts writing; returns once the arrays are copied.

        Raises:
          ValueError: this write, or the one before it, failed. Complete checkpoints stay as they are.
        """
        try:
            self.inner.wait()
            self.inner.save_async(step, state, metrics=metrics, overwrite=True)
            if wait:
                self.inner.wait()
        except Exception as error:
            raise _unwritten(self.folder, error) from error


def claim(folder: epath.Path, config: Any) -> None:
    """Writes the settings of a new run, or compares them with those of a run that is there.

    Raises:
      ValueError: the directory belongs to a run with other settings, or cannot be written.
    """
    path = folder / "settings.toml"
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                folders.write(path, settings.dump(settings.to_dict(config)))  # other hosts must not read half of it
            return
        changed = settings.changes(config, path, FREE)
    except OSError as error:
        raise ValueError(f"{path}: {_first_line(error)}; give another run=") from None
    if changed:
        shown = "; ".join(f"{key} was {then!r}, now {now!r}" for key, (then, now) in list(changed.items())[:3])
        raise ValueError(f"{folder} holds a run with other settings ({shown}); give another run= or the settings it has")


def _check_readable(folder: epath.Path) -> None:
    """Refuses what Orbax would stumble over while it lists the checkpoints: no folder, or metrics that are damaged.

    Raises:
      ValueError: naming the file.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file, expected a folder of checkpoints; move it away or give another run=")
    for path in folder.glob("*/metrics/metrics"):
        try:
            if isinstance(json.loads(path.read_bytes()), dict):
                continue
        except (OSError, ValueError, RecursionError):
            pass
        raise ValueError(f"{path} is damaged; delete {path.parent.parent} to go on from the checkpoint before it")


def _unwritten(folder: epath.Path, error: Exception) -> ValueError:
    return ValueError(
        f"{folder}: a checkpoint could not be written ({_first_line(error)}); free some space or give another run=; "
        "complete checkpoints are untouched"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
