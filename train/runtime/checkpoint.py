"""Checkpoints of a run, written asynchronously by Orbax to local or gs:// folders. The newest few and the best are kept.

A checkpoint is complete or absent. It holds the state, and digests of the documents that it was trained on and of the run's
frozen inputs. The settings of the run are stored beside its checkpoints. A run that continues is refused if its settings,
documents or inputs differ in a way that would change the result.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from etils import epath

from train.runtime import frozen_inputs, hosts, run_config
from train.runtime.frozen_inputs import FrozenInputs
from train.runtime.run_config import LoopConfig
from treeflash_jax.core import files

# Settings that may change when a run continues: the number of steps, and what changes weights by rounding at most.
FREE_IN_LOOP = "steps accumulate log_every save_every evaluate_every keep best best_mode tensorboard wandb profile"
FREE = {"run", "mesh", "evaluate", "attention", *(f"loop.{name}" for name in FREE_IN_LOOP.split())}
STATE = "state"  # name that Orbax gives to a tree that is saved alone


class Checkpoints:
    """The checkpoints of one run directory.

    Args:
      loop: settings of the run's steps, and of the checkpoints to keep.
      documents: digest of the training documents (`Corpus.digest`); None if checkpoints are only read.
      inputs: frozen inputs of the run as they are now.
    """

    def __init__(self, run: str, loop: LoopConfig, documents: str | None = None, inputs: FrozenInputs | None = None):
        from orbax.checkpoint import v1 as ocp  # slow to import, and not needed to compile a step

        self.folder = files.absolute(run)
        self.loop = loop
        self.documents = documents
        self.orbax = ocp
        self.inputs = inputs or {}
        policies = ocp.training.preservation_policies
        kept = [policies.LatestN(loop.keep)]
        if loop.best:
            worst = float("inf") if loop.best_mode == "min" else float("-inf")
            best = policies.BestN(
                get_metric_fn=lambda metrics: (metrics or {}).get(loop.best, worst),
                reverse=loop.best_mode == "min",
                n=1,
                keep_checkpoints_without_metrics=False,
            )
            kept.append(best)
        self.inner = ocp.training.Checkpointer(
            self.folder / "checkpoints",
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),  # the loop decides
            preservation_policy=policies.AnyPreservationPolicy(kept),
            cleanup_tmp_directories=documents is not None,
        )

    def metrics(self) -> dict[int, dict[str, float]]:
        """Returns the metrics of every checkpoint by its step, oldest first; {} for a checkpoint without an evaluation."""
        return {saved.step: saved.metrics or {} for saved in sorted(self.inner.checkpoints, key=lambda saved: saved.step)}

    def restore(self, abstract: Any) -> Any:
        """Returns the newest state, laid out as `abstract`; None without a checkpoint. Raises the errors of `load`."""
        steps = [*self.metrics()]
        return self.load(steps[-1], abstract) if steps else None

    def load(self, step: int, abstract: Any, *, in_part: bool = False) -> Any:
        """Returns the state of one checkpoint, laid out as `abstract`; with `in_part`, only the parts in `abstract`.

        Raises ValueError if the checkpoint is damaged, holds other arrays, or was trained on other documents or inputs.
        """
        notes = self.notes(step)
        unknown = [name for name in self.inputs if name not in notes.get("inputs", {})]
        if unknown:
            hosts.say(f"{self.folder}: begun by an earlier version, so {' and '.join(unknown)} cannot be compared")
        context = self.orbax.Context()
        context.pytree.loading.partial_load = in_part
        with self._reading(step) as path, context:
            state = self.orbax.load(path, abstract, checkpointable_name=STATE)
        # When a run is extended, it may have more documents.
        if self.documents not in (None, notes["documents"]) and notes["steps"] == self.loop.steps:
            raise ValueError(
                f"{self.folder}: the training documents changed after step {step}; restore the earlier ones to continue, "
                "or give more loop.steps or another run= to train on these"
            )
        return state

    def notes(self, step: int) -> dict[str, Any]:
        """Returns the notes that `save` stored. Raises ValueError for a damaged checkpoint, or for other frozen inputs."""
        with self._reading(step) as path:
            notes = self.orbax.metadata(path, checkpointable_name=STATE).custom_metadata
            inputs = notes.get("inputs", {})
        frozen_inputs.compare(inputs, self.inputs, f"run={self.folder}")
        return notes

    def save(self, step: int, state: Any, metrics: dict[str, float] | None = None, *, wait: bool = False) -> None:
        """Starts to write a checkpoint, and returns when its arrays are copied.

        Raises ValueError if this or the last write failed.
        """
        notes = {"documents": self.documents, "steps": self.loop.steps, "inputs": self.inputs}
        with self._writing():
            self.inner.wait()
            self.inner.save_async(step, state, metrics=metrics, custom_metadata=notes, overwrite=True)
            if wait:
                self.inner.wait()

    def close(self) -> None:
        """Waits until the last checkpoint is written. Raises ValueError if the write failed."""
        with self._writing():
            self.inner.close()

    @contextmanager
    def _reading(self, step: int) -> Iterator[epath.Path]:
        path = self.folder / "checkpoints" / str(step)
        try:
            yield path
        except Exception as error:  # errors of Orbax and TensorStore have no common base class
            raise ValueError(
                f"{path} cannot be read ({_reason(error)}); use the code and drafter it was saved with, delete it to "
                "continue from the checkpoint before it, or give another run="
            ) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise ValueError(
                f"{self.folder}: a checkpoint could not be written ({_reason(error)}); free some space or give another "
                "run=; complete checkpoints are untouched"
            ) from error


def check_inputs(run: str, loop: LoopConfig, inputs: FrozenInputs) -> None:
    """Raises the ValueErrors of `Checkpoints.notes` for the newest checkpoint of a run, if there is one."""
    if (files.absolute(run) / "checkpoints").exists():
        with closing(Checkpoints(run, loop, inputs=inputs)) as checkpoints:
            steps = [*checkpoints.metrics()]
            if steps:
                checkpoints.notes(steps[-1])


def claim(folder: epath.Path, settings: Any) -> None:
    """Writes the settings of a new run, or compares them with those in its folder. Raises ValueError if they differ."""
    path = folder / "settings.toml"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        if hosts.is_first():
            run_config.save(settings, path)  # writes in one piece, since other hosts may already read the file
        return
    run_config.refuse(run_config.changes(settings, path, FREE), folder, "run")
    steps = run_config.changes(settings, path, ()).get("loop.steps")
    if steps and hosts.is_first():
        run_config.save(settings, path)
        hosts.say(f"{folder}: had loop.steps = {steps[0]}, now {steps[1]}: the learning rate follows the new number")


def _reason(error: BaseException) -> str:
    """Returns the end of an error's first line, because TensorStore writes names of files before the reason."""
    text = (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]
    return text.partition(" [tensorstore")[0].rpartition('": ')[2][:100]
