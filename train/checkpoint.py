"""Checkpoints of a run through Orbax: asynchronous, the newest few and the best kept, on a local disk or gs://.

A checkpoint is complete or absent: Orbax writes into a temporary directory and renames it. The settings of the run lie
beside its checkpoints and inside each of them; a run directory refuses settings that would train something else.
"""

from __future__ import annotations

import json
import os
import warnings
from typing import Any

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp

from train import config as settings

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
        self.folder = epath.Path(run if "://" in run else os.path.abspath(run))  # Orbax takes no relative paths
        claim(self.folder, config)
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
    path = folder / "settings.json"
    mine = settings.to_dict(config)
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                (folder / "settings.toml").write_text(settings.dump(mine))
                path.write_text(json.dumps(mine, indent=1))
            return
        theirs = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {_first_line(error)}; give another run=") from None
    changed = [key for key, (a, b) in _differences(theirs, mine).items() if not _free(key) and a != b]
    if changed:
        flat = _differences(theirs, mine)
        shown = "; ".join(f"{key} was {flat[key][0]!r}, now {flat[key][1]!r}" for key in changed[:3])
        raise ValueError(f"{folder} holds a run with other settings ({shown}); give another run= or the settings it has")


def _differences(old: Any, new: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        found = {}
        for key in {**old, **new}:
            found |= _differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key)
        return found
    return {} if old == new else {prefix: (old, new)}


def _free(key: str) -> bool:
    return key in FREE or key.split(".")[0] in FREE


def _unwritten(folder: epath.Path, error: Exception) -> ValueError:
    return ValueError(
        f"{folder}: a checkpoint could not be written ({_first_line(error)}); free some space or give another run=; "
        "complete checkpoints are untouched"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
