"""The training loop that every stage shares: one compiled step over a mesh, resumable at any moment.

A step depends only on settings, seed and step number: batches depend on seed and step, and anchors on seed, step and
sequence. So a run that was killed, or moved to other devices or hosts, continues from its last checkpoint to the same
result. `training_state` defines the computation of a step.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from train.data import packing
from train.runtime import flops, hosts, training_state, watch
from train.runtime.checkpoint import Checkpoints, claim
from train.runtime.frozen_inputs import FrozenInputs
from train.runtime.run_config import LoopConfig
from train.runtime.training_state import Sums, TrainState, TrainTask
from treeflash_jax.core import files, programs, sharding
from treeflash_jax.core.parameters import Params

HELD_OUT_BATCHES = 4  # number of batches per source
Report = Callable[[str], None]  # receives texts about the progress of an evaluation


def resolve_steps(config: LoopConfig, num_sequences: int) -> int:
    """Returns the number of optimiser steps of a run. Raises ValueError if there are none."""
    steps = config.steps or math.ceil(config.epochs * num_sequences / config.batch)
    if steps < 1:
        raise ValueError(f"got {num_sequences} sequences and {config.epochs} epochs, expected at least one step; add data")
    return steps


def means(sums: Sums) -> dict[str, Any]:
    """Returns the means of the sums as floats (vectors as lists); None for a metric whose total weight is 0."""

    def mean(total: np.ndarray, weight: np.ndarray) -> Any:
        values = [round(float(t / w), 6) if w > 0 else None for t, w in zip(total.flat, weight.flat, strict=True)]
        return values if total.ndim else values[0]

    return {name: mean(np.asarray(total), np.asarray(weight)) for name, (total, weight) in sums.items()}


def fit(
    task: TrainTask,
    *,
    settings: Any,
    mesh: Mesh,
    params: Params,
    frozen: Params,
    corpus: packing.Corpus,
    inputs: FrozenInputs | None = None,
    evaluate: Callable[[Params, Report], dict[str, Any]] | None = None,
    on_timed: Callable[[int, float], None] | None = None,
) -> Params:
    """Trains until the last step and returns the float32 weights, on the mesh.

    Args:
      settings: settings of the stage. `fit` reads only `run`, `loop`, `optimizer` and `data`, but all settings are stored,
        and must be the same when the run continues.
      params, frozen: initial weights, and weights that are only read, both on the mesh (`training_state.place_weights`).
      inputs: frozen inputs, which checkpoints note. A run that continues must have the same ones.
      evaluate: function that returns metrics of the weights, which are added to those of held-out sequences. Its second
        argument receives its progress.
      on_timed: function that receives the number of the second step and the seconds that it took. (The first step includes
        compilation.)

    Raises:
      ValueError: a run directory with other settings or inputs, or past the last step; a batch that cannot be divided; a
        loss that is not finite (the last checkpoint is older); a checkpoint that cannot be written.
      SystemExit: after SIGTERM or Ctrl-C and one more checkpoint, with status 143 or 130.
    """
    loop: LoopConfig = settings.loop
    hosts.check_batch(loop.batch, loop.accumulate, mesh)
    steps = resolve_steps(loop, corpus.num_sequences)
    folder = files.absolute(settings.run)
    with sharding.ambient(mesh), hosts.held(folder / "run.lock", f"run={settings.run}"):
        claim(folder, settings)
        with closing(Checkpoints(settings.run, loop, corpus.digest(), inputs)) as checkpoints, ExitStack() as stack:
            run = _Run(task, settings, steps, mesh, params, checkpoints, stack)
            run.measures = [partial(make_held_out_measure(task, corpus, loop, mesh), frozen=frozen)]
            if evaluate is not None:
                run.measures.append(evaluate)
            return run.train(frozen, corpus, on_timed)


class _Run:
    """A run in progress: the compiled step, and the state of the last checkpoint or a new one."""

    def __init__(
        self,
        task: TrainTask,
        settings: Any,
        steps: int,
        mesh: Mesh,
        params: Params,
        checkpoints: Checkpoints,
        stack: ExitStack,
    ):
        loop: LoopConfig = settings.loop
        self.task = task
        self.settings = settings
        self.loop = loop
        self.steps = steps
        self.mesh = mesh
        self.checkpoints = checkpoints
        self.signals = stack.enter_context(Signals(mesh))
        self.profile = ExitStack()
        self.rate = training_state.schedule(settings.optimizer, steps, settings.optimizer.learning_rate)
        transform = training_state.make_optimizer(settings.optimizer, steps, task.specs)
        example = training_state.abstract_batch(loop.batch, settings.data.sequence_length)
        abstract = training_state.abstract_state(task, transform, example, mesh)
        shardings = jax.tree.map(lambda x: x.sharding, abstract)
        self.state: TrainState = checkpoints.restore(abstract)
        if self.state is None:
            initial_state = partial(training_state.initial_state, task, transform, batch=example)
            self.state = programs.jit(initial_state, out_shardings=shardings)(params)
        every = {"accumulate": loop.accumulate, "log_every": loop.log_every or steps}
        update = training_state.make_update(task, transform, steps=steps, seed=loop.seed, **every)
        self.update = programs.jit(update, donate_argnums=0, out_shardings=shardings)
        self.start = int(sharding.to_host(self.state.step))
        if self.start > steps:
            raise ValueError(
                f"run={settings.run} is at step {self.start}, got loop.steps {steps}; give loop.steps={self.start} or more"
            )
        opened = watch.open_sinks(settings, self.start, stack) if self.start < steps else []
        log = watch.Watch(files.absolute(settings.run), steps=steps, resumed_at=self.start, sinks=opened)
        self.watch = stack.enter_context(log)
        stack.enter_context(self.profile)
        self.measures: list[Callable[..., dict[str, Any]]] = []

    def train(self, frozen: Params, corpus: packing.Corpus, on_timed: Callable[[int, float], None] | None) -> Params:
        """Returns the weights after the last step."""
        loop = self.loop
        start = self.start
        steps = self.steps
        peak = flops.peak_flops(self.mesh.size) if hosts.is_first() else None
        members = hosts.local_members(loop.batch, self.mesh)
        batches = packing.batches(corpus, start=start, stop=steps, batch=loop.batch, seed=loop.seed, members=members)
        profile_start, profile_end = loop.profile if loop.profile and hosts.is_first() else (0, 0)
        profile_start = max(profile_start, start + 1)  # a run may be resumed within the range
        began = time.perf_counter()  # start of the steps after number `timed`
        timed = start
        for step, batch in zip(range(start + 1, steps + 1), batches, strict=True):
            if step == profile_start <= profile_end:
                jax.block_until_ready(self.state)
                self.profile.enter_context(watch.profiled(self.settings))
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                self.state = self.update(self.state, frozen, hosts.place_batch(batch, loop.batch, self.mesh))
            if step == profile_end:
                jax.block_until_ready(self.state)
                self.profile.close()
            self.watch.show(step, "")
            if step == start + 1:  # this step included compilation
                jax.block_until_ready(self.state.step)
                began = time.perf_counter()
                timed = step
            elif step == start + 2 and on_timed is not None:
                jax.block_until_ready(self.state.step)
                on_timed(step, time.perf_counter() - began)
            ends = step == steps or self.signals.requested()
            logs = self.is_due(step, loop.log_every)
            evaluates = self.is_due(step, loop.evaluate_every)
            pauses = ends or evaluates or self.is_due(step, loop.save_every)
            line: dict[str, Any] = {}
            if logs or pauses:
                window = sharding.to_host(self.state.window)
                if not np.isfinite(window["loss"][0] + window["grad_norm"][0]):
                    raise ValueError(
                        f"the loss or its gradient was not finite at step {step} or after the last log line; nothing was "
                        "saved since. Lower optimizer.learning_rate, or look at the sequences of those steps"
                    )
                now = time.perf_counter()
                seconds = now - began
                count = step - timed
                began = now
                timed = step
            if logs:
                line = means(window) | {"learning_rate": float(self.rate(step - 1))}
            if logs and count:
                line["tokens_per_second"] = count * loop.batch * batch.tokens_bt.shape[1] / seconds
                if peak:
                    line["mfu"] = count * self.task.flops / seconds / peak
            self.finish(step, line, evaluates=evaluates, ends=ends)
            if pauses:
                began = time.perf_counter()  # evaluations and checkpoints do not count as step time
        return self.state.params

    def is_due(self, step: int, every: int) -> bool:
        return step == self.steps or (every > 0 and step % every == 0)

    def finish(self, step: int, line: dict[str, Any], *, evaluates: bool, ends: bool) -> None:
        """Evaluates, logs and saves a step, and exits after a signal."""
        metrics: dict[str, Any] = {}
        if evaluates:
            for measure in self.measures:
                metrics |= measure(self.state.params, report=lambda words: self.watch.show(note=words))
        if metrics and self.loop.best and self.loop.best not in metrics:
            hosts.say(f"no checkpoint is kept as the best: loop.best {self.loop.best} is not among {', '.join(metrics)}")
        line = line | metrics
        if line:
            self.watch.write(step, line)
        if ends or bool(metrics and self.loop.best) or self.is_due(step, self.loop.save_every):
            floats = {name: value for name, value in line.items() if isinstance(value, float) and math.isfinite(value)}
            self.checkpoints.save(step, self.state, floats, wait=ends)
        if ends and step < self.steps:
            received = self.signals.received or signal.SIGTERM
            word = "interrupted" if received == signal.SIGINT else "terminated"
            hosts.say(f"{word}: saved step {step} of {self.steps}; the same command goes on from there")
            sys.exit(128 + received)


def make_held_out_measure(
    task: TrainTask, corpus: packing.Corpus, loop: LoopConfig, mesh: Mesh
) -> Callable[[Params, Params, Report], dict[str, Any]]:
    """Returns a function that computes, from trained and frozen weights, means over a few held-out batches of every source.

    The batches are spread over the source, and their anchors are fixed. Like a step's batches, they are computed in
    `loop.accumulate` parts.
    """
    members = hosts.local_members(loop.batch, mesh)
    sources = {name: packed for name, packed in corpus.held_out.items() if len(packed)}

    def local(params: Params, frozen: Params, batch: packing.PackedBatch, keys_b: jax.Array) -> Sums:
        params = training_state.gather(params, task.specs, task.compute_dtype)
        frozen = training_state.gather(frozen, task.frozen_specs, task.compute_dtype)
        function = partial(task.held_out_sums or task.sums, params, frozen)
        sums = training_state.sum_parts(lambda part: function(*part), (batch, keys_b), loop.accumulate)
        return lax.psum(sums, training_state.shared_axes())

    @programs.jit
    def sums(params: Params, frozen: Params, batch: packing.PackedBatch, number: jax.Array) -> Sums:
        keys_b = jax.random.split(jax.random.fold_in(jax.random.key(0), number), batch.tokens_bt.shape[0])
        return training_state.by_batch(local, task)(params, frozen, batch, keys_b)

    def measure(params: Params, frozen: Params, report: Report) -> dict[str, Any]:
        totals: dict[str, Sums] = {}
        for done, (name, packed) in enumerate(sources.items()):
            report(f"evaluating {done} of {len(sources)} held-out sources")
            count = min(HELD_OUT_BATCHES, -(-len(packed) // loop.batch))
            batches = packing.spread(count * loop.batch, len(packed)).reshape(count, -1)
            placed = (hosts.place_batch(packed.take(index[members]), loop.batch, mesh) for index in batches)
            totals[name] = _add([sharding.to_host(sums(params, frozen, x, number)) for number, x in enumerate(placed)])
        if not totals:
            return {}
        metrics = {f"held_out/{name}": value for name, value in means(_add(list(totals.values()))).items()}
        if len(totals) > 1:
            metrics |= {f"held_out/{name}/loss": means(total)["loss"] for name, total in totals.items()}
        return metrics

    return measure


def _add(sums: list[Sums]) -> Sums:
    return jax.tree.map(lambda *parts: sum(parts), *sums)


class Signals:
    """Notes SIGTERM and Ctrl-C, so that a run saves a checkpoint before it ends. A second Ctrl-C ends the process at once.

    In every step, the hosts also compute together whether one of them has noted a signal. They read the result one step
    later, so that no device waits for them. So all hosts end after the same step.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.received: int | None = None
        self.any_host = programs.jit(jnp.any, out_shardings=NamedSharding(mesh, P()))
        self.any_noted: jax.Array | None = None  # whether any host had noted a signal one step earlier

    def __enter__(self) -> Self:
        self.before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, before in self.before.items():
            signal.signal(number, before)

    def _note(self, number: int, _: Any) -> None:
        self.received = self.received or number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            # Unlike `print`, this call is allowed while another print is interrupted.
            os.write(2, b"interrupted: saving a checkpoint; Ctrl-C again ends at once\n")

    def requested(self) -> bool:
        """Returns whether the run ends after this step. All hosts call it once a step, and get the same result."""
        if jax.process_count() == 1:
            return self.received is not None
        noted = np.array([self.received is not None])
        layout = NamedSharding(self.mesh, P(self.mesh.axis_names))
        flags = jax.make_array_from_callback((self.mesh.size,), layout, lambda _: noted)
        any_noted, self.any_noted = self.any_noted, self.any_host(flags)
        return any_noted is not None and bool(any_noted)
