"""Checkpoints of a run through Orbax: asynchronous, complete or absent, the newest few and the best kept, local or gs://.

A checkpoint holds the state, a checksum of its values, and digests of the documents it was trained on. The settings of the
run are stored beside its checkpoints; a run directory refuses settings and documents that would train something else.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import jax
import jax.numpy as jnp
from etils import epath
from jax import lax

from train.runtime import folders, hosts, run_config
from train.runtime.run_config import LoopConfig
from treeflash_jax.core import programs, sharding

# Settings that may change when a run continues: the number of steps, and what changes weights by rounding at most.
FREE = frozenset(
    {"run", "mesh", "evaluate", "attention"}
    | {f"loop.{name}" for name in "steps accumulate log_every save_every evaluate_every keep best best_mode".split()}
    | {f"loop.{name}" for name in "tensorboard wandb profile".split()}
)
STATE = "state"  # Orbax's name for a tree that is saved alone
LOGGERS = ("absl", "asyncio")  # Orbax logs a traceback here of every error that it also raises


@programs.jit
def checksum(state: Any) -> jax.Array:
    """Sum of all 32-bit words of a tree of arrays, modulo 2^32: the same however they are sharded."""
    leaves = jax.tree.leaves(state)
    return sum(jnp.sum(lax.bitcast_convert_type(x, jnp.uint32), dtype=jnp.uint32) for x in leaves)


class DamageError(ValueError):
    """A checkpoint has files that are missing, cut off or changed."""


class Checkpoints:
    """The checkpoints of one run directory.

    Args:
      loop: settings of the run: its steps, and which checkpoints are kept.
      documents: digest of the training documents by source (`Corpus.digests`); None if checkpoints are only read.
    """

    def __init__(self, run: str, loop: LoopConfig, documents: Mapping[str, str] | None = None):
        from orbax.checkpoint import v1 as ocp  # slow to import; compiling a step alone does not need it

        self.folder, self.loop, self.documents, self.orbax = folders.absolute(run), loop, documents, ocp
        policies = ocp.training.preservation_policies
        kept = [policies.LatestN(loop.keep)]
        if loop.best:
            worst = float("inf") if loop.best_mode == "min" else float("-inf")
            how = dict(reverse=loop.best_mode == "min", n=1, keep_checkpoints_without_metrics=False)
            kept.append(policies.BestN(get_metric_fn=lambda metrics: (metrics or {}).get(loop.best, worst), **how))
        self.inner = ocp.training.Checkpointer(
            self.folder / "checkpoints",
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),  # the loop decides
            preservation_policy=policies.AnyPreservationPolicy(kept),
            cleanup_tmp_directories=documents is not None,
        )
        # Orbax's thread asks JAX about an earlier step, after which hosts may agree on a step that one of them has passed.
        self.inner._manager.reached_preemption = lambda step: False

    def __enter__(self) -> Self:
        for name in LOGGERS:
            logging.getLogger(name).disabled = True
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            self.inner.close()
        except Exception as error:  # of an asynchronous write
            if kind is None:
                raise _unwritten(self.folder, error) from None
        if kind is None:  # threads of a failed write may still log
            for name in LOGGERS:
                logging.getLogger(name).disabled = False

    def metrics(self) -> dict[int, dict[str, float]]:
        """Metrics of every checkpoint by its step, oldest first; those without an evaluation have none."""
        return {saved.step: saved.metrics or {} for saved in sorted(self.inner.checkpoints, key=lambda saved: saved.step)}

    def restore(self, abstract: Any) -> Any:
        """Returns the newest intact state, laid out as `abstract`; None if there is no checkpoint yet.

        A damaged checkpoint is skipped with one line. Raises ValueError if none is intact, and see `load`.
        """
        steps = list(self.metrics())
        for step in reversed(steps):
            try:
                return self.load(step, abstract)
            except DamageError as error:
                hosts.say(f"{error}; trying the one before")
        if steps:
            raise ValueError(f"{self.folder}: all of its checkpoints are damaged; move it away or give another run=")
        return None

    def load(self, step: int, abstract: Any) -> Any:
        """Returns the state of one checkpoint, laid out as `abstract`.

        Raises:
          DamageError: the checkpoint is damaged.
          ValueError: it holds other arrays or was trained on other documents.
        """
        path = self.folder / "checkpoints" / str(step)
        with self._damage(step):
            stored = self.orbax.metadata(path, checkpointable_name=STATE)
            notes = stored.custom_metadata or {}
            total, steps, documents = notes["checksum"], notes["steps"], notes["documents"]
        if stored.metadata:  # otherwise Orbax cannot read it, and its `load` says why
            then, now = _describe(stored.metadata), _describe(abstract)
            if changed := _changed(then, now):
                was, expected = (
                    ", ".join(f"{name} {arrays.get(name, 'absent')}" for name in changed[:3]) for arrays in (then, now)
                )
                raise ValueError(
                    f"{self.folder}: the checkpoint of step {step} holds other arrays: {len(changed)} differ, such as "
                    f"{was}; expected {expected}. Continue with the drafter and code it was trained with, or give another "
                    "run="
                )
        # A run that is extended may have more documents.
        if self.documents is not None and steps == self.loop.steps and (changed := _changed(documents, self.documents)):
            raise ValueError(
                f"{self.folder}: the documents of {', '.join(changed)} changed after step {step} was trained; "
                "restore those of then to continue, or give more loop.steps or another run= to train on these"
            )
        with self._damage(step):
            state = self.orbax.load(path, abstract, checkpointable_name=STATE)
            if int(sharding.to_host(checksum(state))) != total:  # neither Orbax nor TensorStore notices one bit
                raise ValueError("its values are not those that were saved")
        return state

    @contextmanager
    def _damage(self, step: int) -> Iterator[None]:
        """Raises `DamageError` for errors of missing, cut off or changed files; other errors come from code."""
        try:
            yield
        except Exception as error:
            if isinstance(error, OSError | ValueError | KeyError) or type(error) is Exception:
                raise DamageError(f"{self.folder}: checkpoint of step {step} is damaged ({_reason(error)})") from error
            raise

    def save(self, step: int, state: Any, metrics: dict[str, float] | None = None, *, wait: bool = False) -> None:
        """Starts writing; returns once the arrays are copied. Raises ValueError if this or the last write failed."""
        notes = {"documents": self.documents, "steps": self.loop.steps, "checksum": int(sharding.to_host(checksum(state)))}
        try:
            self.inner.wait()
            self.inner.save_async(step, state, metrics=metrics, custom_metadata=notes, overwrite=True)
            if wait:
                self.inner.wait()
        except Exception as error:
            raise _unwritten(self.folder, error) from error


def claim(folder: epath.Path, config: Any) -> None:
    """Writes the settings of a new run, or compares them with those of this directory. Raises ValueError if they differ."""
    path = folder / "settings.toml"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        if hosts.is_first():
            run_config.save(config, path)  # in one piece, since other hosts may read it already
        return
    changed = run_config.changes(config, path, FREE)
    steps = run_config.changes(config, path, ()).get("loop.steps")
    if steps and not changed and hosts.is_first():
        run_config.save(config, path)
        hosts.say(f"{folder}: had loop.steps = {steps[0]}, now {steps[1]}: the learning rate follows the new number")
    if changed:
        examples = "; ".join(f"{key} was {then!r}, now {now!r}" for key, (then, now) in list(changed.items())[:3])
        raise ValueError(f"{folder} holds a run with other settings ({examples}); give another run= or the settings it has")


def _changed(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [name for name in {**then, **now} if then.get(name) != now.get(name)]


def _describe(tree: Any) -> dict[str, str]:
    """Returns dtype and shape by path, such as "float32[8, 16]"."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): f"{jnp.dtype(leaf.dtype)}{list(leaf.shape)}"
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _unwritten(folder: epath.Path, error: Exception) -> ValueError:
    return ValueError(
        f"{folder}: a checkpoint could not be written ({_reason(error)}); free some space or give another run=; "
        "complete checkpoints are untouched"
    )


def _reason(error: BaseException) -> str:
    """Returns the end of an error's first line: TensorStore puts the names of files before the reason."""
    text = (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]
    return text.partition(" [tensorstore")[0].rpartition('": ')[2][:200]
