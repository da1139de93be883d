"""Checkpoints of a run through Orbax: asynchronous, the newest few and the best kept, on a local disk or gs://.

A checkpoint is complete or absent: Orbax writes into a temporary directory and renames it. It holds the state, a checksum
of its values, and digests of the documents it was trained on. The settings of the run lie beside its checkpoints; a run
directory refuses settings and documents that would train something else.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from jax import lax

from train import config as settings
from train import folders, hosts
from treeflash_jax import devices
from treeflash_jax import mesh as meshes

# What may differ between the start of a run and its continuation: the number of steps, and what changes no weights.
FREE = frozenset(
    {"run", "mesh"} | {f"loop.{name}" for name in "steps log_every save_every evaluate_every keep tensorboard".split()}
)
STATE = "state"  # Orbax's name for a tree that is saved alone
LOGGERS = ("absl", "asyncio")  # where Orbax reports, with tracebacks, what it also raises


@devices.jit
def checksum(state: Any) -> jax.Array:
    """Sum of all 32-bit words of a tree of arrays, modulo 2^32: the same however they are sharded."""
    leaves = jax.tree.leaves(state)
    return sum(jnp.sum(lax.bitcast_convert_type(x, jnp.uint32), dtype=jnp.uint32) for x in leaves)


class Checkpoints:
    """The checkpoints of one run directory.

    Args:
      run: the directory.
      config: settings of the run.
      documents: digest of the training documents by source (`Corpus.digests`).
      keep: number of newest checkpoints that are kept.
      best, mode: metric by which the best checkpoint is kept too, and "min" or "max"; "" keeps the newest only.

    Example:
      >>> with Checkpoints("runs/head", config, corpus.digests(), keep=2, best="held_out/loss", mode="min") as saved:
      ...     state = saved.restore(abstract_state) or fresh_state
      ...     saved.save(200, state, {"held_out/loss": 0.3})
    """

    def __init__(self, run: str, config: Any, documents: Mapping[str, str], *, keep: int, best: str, mode: str):
        from orbax.checkpoint import v1 as ocp  # slow to import; what only compiles a step needs none

        self.folder, self.documents, self.orbax = folders.absolute(run), dict(documents), ocp
        self.num_steps = config.loop.steps
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
            cleanup_tmp_directories=True,
        )

    def __enter__(self) -> Checkpoints:
        for name in LOGGERS:
            logging.getLogger(name).disabled = True
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            self.inner.close()
        except Exception as error:  # an asynchronous write that failed shows up here
            if kind is None:
                raise _unwritten(self.folder, error) from None
        if kind is None:  # else threads of a write that failed may go on reporting
            for name in LOGGERS:
                logging.getLogger(name).disabled = False

    @property
    def steps(self) -> list[int]:
        """Steps that have a checkpoint, oldest first."""
        return sorted(checkpoint.step for checkpoint in self.inner.checkpoints)

    def restore(self, abstract: Any) -> Any:
        """Returns the newest intact state, laid out as `abstract` says; None if there is no checkpoint yet.

        A damaged checkpoint (files that are missing, cut off or changed) is passed over with one line.

        Raises:
          ValueError: a checkpoint holds other arrays or was trained on other documents, or none is intact.
        """
        for step in reversed(self.steps):
            try:
                return self._load(step, abstract)
            except _Damaged as error:
                hosts.say(f"{self.folder}: checkpoint of step {step} is damaged ({error}); trying the one before")
        if self.steps:
            raise ValueError(f"{self.folder}: all of its checkpoints are damaged; move it away or give another run=")
        return None

    def _load(self, step: int, abstract: Any) -> Any:
        path = self.folder / "checkpoints" / str(step)
        with _damage():
            if not folders.is_remote(path):
                _read_through(path / STATE)
            stored = self.orbax.metadata(path, checkpointable_name=STATE)
        notes = stored.custom_metadata or {}  # checkpoints of older code have none
        if stored.metadata:  # else it cannot be read, and `load` says why
            self._check_arrays(step, _shapes(stored.metadata), _shapes(abstract))
        if notes.get("steps", self.num_steps) == self.num_steps:  # a run that is extended may have more documents
            self._check_documents(step, notes.get("documents", self.documents))
        with _damage():
            state = self.orbax.load(path, abstract, checkpointable_name=STATE)
        if notes.get("checksum", total := int(meshes.to_host(checksum(state)))) != total:
            raise _Damaged("its values are not those that were saved")
        return state

    def _check_arrays(self, step: int, then: dict[str, tuple], now: dict[str, tuple]) -> None:
        changed = [name for name in {**then, **now} if then.get(name) != now.get(name)]
        if changed:
            was, is_now = (
                ", ".join(f"{name} {sizes.get(name, 'absent')}" for name in changed[:3]) for sizes in (then, now)
            )
            raise ValueError(
                f"{self.folder}: the checkpoint of step {step} holds other arrays: {len(changed)} differ, such as {was}; "
                f"expected {is_now}. Go on with the drafter and code that it was trained with, or give another run="
            )

    def _check_documents(self, step: int, then: Mapping[str, str]) -> None:
        changed = [name for name in {**then, **self.documents} if then.get(name) != self.documents.get(name)]
        if changed:
            raise ValueError(
                f"{self.folder}: the documents of {', '.join(changed)} changed after step {step} was trained; "
                "put back those of then to go on, or give more loop.steps or another run= to train on these"
            )

    def save(self, step: int, state: Any, metrics: dict[str, float] | None = None, *, wait: bool = False) -> None:
        """Starts writing; returns once the arrays are copied.

        Raises:
          ValueError: this write, or the one before it, failed. Complete checkpoints stay as they are.
        """
        notes = {"documents": self.documents, "steps": self.num_steps, "checksum": int(meshes.to_host(checksum(state)))}
        try:
            self.inner.wait()
            self.inner.save_async(step, state, metrics=metrics, custom_metadata=notes, overwrite=True)
            if wait:
                self.inner.wait()
        except Exception as error:
            raise _unwritten(self.folder, error) from error


class _Damaged(Exception):
    """A checkpoint whose files are missing, cut off or changed."""


@contextmanager
def _damage() -> Iterator[None]:
    """Raises `_Damaged` for what Orbax raises if files are missing, cut off or changed; other errors are no damage."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError | ValueError | KeyError) or type(error) is Exception:
            raise _Damaged(_reason(error)) from error
        raise


def _read_through(folder: epath.Path) -> None:
    """Reads every array once, one by one. Orbax reads all at once: if one fails, Python reports each of the others."""
    import tensorstore

    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}
    stored = tensorstore.KvStore.open(spec).result()
    names = stored.list().result()
    if not names or not all(stored.read(name).result().value for name in names):
        raise ValueError("arrays are missing")


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape) for path, leaf in leaves}


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
        steps = settings.changes(config, path, ()).get("loop.steps")
        if steps and not changed and jax.process_index() == 0:
            folders.write(path, settings.dump(settings.to_dict(config)))
            hosts.say(f"{folder}: had loop.steps = {steps[0]}, now {steps[1]}: the learning rate follows the new number")
    except OSError as error:
        raise ValueError(f"{path}: {_reason(error)}; give another run=") from None
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
        f"{folder}: a checkpoint could not be written ({_reason(error)}); free some space or give another run=; "
        "complete checkpoints are untouched"
    )


def _reason(error: BaseException) -> str:
    """Returns the end of an error's first line: TensorStore puts the names of files before the reason."""
    text = (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]
    return text.partition(" [tensorstore")[0].rpartition('": ')[2][:200]
