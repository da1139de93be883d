"""The training loop that every stage shares: one compiled step over a mesh, resumable at any moment.

A step is a function of (settings, seed, step): a batch depends on seed and step, anchors on seed, step and row. A run
that was killed, or moved to other devices or hosts, goes on from its last checkpoint to where it would have ended.
What a step computes is in state.py.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import jax
import numpy as np
from etils import epath
from jax import lax
from jax.experimental import multihost_utils

from train import data, folders, hosts, lock, watch
from train.checkpoint import Checkpoints
from train.config import LoopConfig
from train.state import (
    Stage,
    Sums,
    TrainState,
    abstract_rows,
    abstract_state,
    by_batch,
    gather,
    initial_state,
    make_optimizer,
    make_update,
    schedule,
    shared_axes,
)
from treeflash_jax import ahead, devices
from treeflash_jax import mesh as meshes

T = TypeVar("T")
Evaluating = Callable[[int, int, str], None]  # told during an evaluation: how many are done, of how many, of what


def resolve_steps(config: LoopConfig, num_rows: int) -> int:
    """Optimiser steps of a run. Raises ValueError where there is nothing to train on."""
    steps = config.steps or math.ceil(config.epochs * num_rows / config.batch)
    if steps < 1:
        raise ValueError(f"got {num_rows} rows and {config.epochs} epochs, expected at least one step; add data")
    return steps


def means(sums: Sums) -> dict[str, Any]:
    """Means of the sums as floats, vectors as lists; a metric nothing counted towards is None."""

    def mean(total: np.ndarray, weight: np.ndarray) -> Any:
        values = [round(float(t / w), 6) if w > 0 else None for t, w in zip(total.flat, weight.flat, strict=True)]
        return values if total.ndim else values[0]

    return {name: mean(np.asarray(total), np.asarray(weight)) for name, (total, weight) in sums.items()}


def fit(
    stage: Stage,
    *,
    config: Any,
    mesh: jax.sharding.Mesh,
    params: Any,
    frozen: Any,
    corpus: data.Corpus,
    evaluate: Callable[[Any, Evaluating], dict[str, Any]] | None = None,
) -> Any:
    """Trains until the last step and returns the float32 weights, on the mesh.

    Args:
      stage: what is trained.
      config: settings of the stage; reads `run`, `loop` and `optimizer`, and all of them name the run.
      mesh: over all devices of all hosts.
      params: initial weights, placed (`state.place`).
      frozen: weights that are only read, placed.
      corpus: training rows.
      evaluate: metrics of the weights, beside those of the held-out rows; it may report how far it is.

    Raises:
      ValueError: a run directory of other settings or past the last step, a batch that does not divide, a loss that is not
        finite (the last checkpoint is from before), a checkpoint that cannot be written.
      SystemExit: after SIGTERM or Ctrl-C and one more checkpoint, with status 143 or 130.
    """
    loop: LoopConfig = config.loop
    hosts.check_batch(loop.batch, loop.accumulate, mesh)
    steps = resolve_steps(loop, corpus.num_rows)
    rate = schedule(config.optimizer, steps, config.optimizer.learning_rate)
    rows = dict(batch=loop.batch, seed=loop.seed, host=jax.process_index(), hosts=jax.process_count())
    with (
        meshes.ambient(mesh),
        lock.held(folders.absolute(config.run) / "run.lock", f"run={config.run}") as mine,
        Checkpoints(config.run, config, corpus.digests(), keep=loop.keep, best=loop.best, mode=loop.best_mode) as saved,
        Termination() as termination,
    ):
        state, update = _started(stage, config, mesh, params, saved, steps)
        del params
        start = int(meshes.to_host(state.step))
        if start > steps:
            raise ValueError(
                f"run={config.run} is at step {start}, got loop.steps {steps}; give loop.steps={start} or more"
            )
        shown = watch.Watch(
            epath.Path(config.run), steps=steps, resumed_at=start, tensorboard=loop.tensorboard, shown=hosts.is_first()
        )
        held_out = HeldOut(stage, corpus, loop, mesh)
        peak = devices.peak_flops(mesh.size, stage.compute_dtype) if hosts.is_first() else None
        clock = _Clock(start)

        def measured() -> dict[str, Any]:
            with meshes.ambient(mesh):  # a thread has its own
                metrics = held_out(state.params, frozen, shown.evaluating)
                return metrics | ({} if evaluate is None else evaluate(state.params, shown.evaluating))

        def finish(done: int, line: dict[str, Any], evaluates: bool, ends: bool) -> None:
            """Evaluates, logs and saves a step, and exits after a signal."""
            metrics = termination.unless_received(measured) if evaluates else {}
            is_cut, line = metrics is None, line | (metrics or {})
            if line:
                shown.write(done, line)
            if ends or is_cut or _is_due(done, loop.save_every) or (done == start and line):
                mine.check()
                floats = {name: value for name, value in line.items() if isinstance(value, float)}
                saved.save(done, state, floats, wait=ends or is_cut)
            if is_cut or (ends and done < steps):
                hosts.say(f"{termination.word}: saved step {done} of {steps}; the same command goes on from there")
                sys.exit(termination.status)

        def evaluates_at(done: int) -> bool:
            return done == steps or _is_due(done, loop.evaluate_every)

        try:
            if start and termination.alone and evaluates_at(start) and start not in shown.evaluated:
                finish(start, {}, True, False)  # a signal had cut this evaluation short
            for step, batch in zip(range(start, steps), data.batches(corpus, start=start, stop=steps, **rows), strict=True):
                state = update(state, frozen, hosts.place_rows(batch, mesh))
                done = step + 1
                shown.advance(done)
                ends = done == steps or termination.requested(done)
                logs = done == steps or _is_due(done, loop.log_every or steps)
                pauses = ends or evaluates_at(done) or _is_due(done, loop.save_every)
                line: dict[str, Any] = {}
                if logs or pauses:
                    _stop_if_bad(state)
                if logs:
                    seconds = clock.lap(done)
                    line = means(meshes.to_host(state.window)) | {"learning_rate": float(rate(step))}
                    line |= {"tokens_per_second": batch.tokens_rt.size * jax.process_count() / seconds}
                    line |= {"mfu": stage.flops / seconds / peak} if peak else {}
                finish(done, line, evaluates_at(done), ends)
                if pauses:
                    clock.lap(done)  # the time of evaluations and checkpoints is not step time
        finally:
            shown.close()
    return state.params


def _started(
    stage: Stage, config: Any, mesh: jax.sharding.Mesh, params: Any, saved: Checkpoints, steps: int
) -> tuple[TrainState, Callable[..., TrainState]]:
    """The state of the last checkpoint, else a fresh one, and the compiled step, which donates it."""
    loop: LoopConfig = config.loop
    transform = make_optimizer(config.optimizer, steps, stage.specs)
    example = abstract_rows(loop.batch, config.data.row_tokens)
    abstract = abstract_state(stage, transform, example, mesh)
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    state = saved.restore(abstract)
    if state is None:
        fresh = devices.jit(lambda params: initial_state(stage, transform, params, example), out_shardings=shardings)
        state = fresh(params)
    update = make_update(stage, transform, accumulate=loop.accumulate, seed=loop.seed, log_every=loop.log_every or steps)
    return state, devices.jit(update, donate_argnums=0, out_shardings=shardings)


class HeldOut:
    """Means over held-out rows of every source, with fixed anchors; a few batches, spread over the source."""

    def __init__(self, stage: Stage, corpus: data.Corpus, loop: LoopConfig, mesh: jax.sharding.Mesh, batches: int = 4):
        self.mesh, self.loop, self.batches = mesh, loop, batches
        self.packed = {name: packed for name, packed in corpus.held_out.items() if len(packed)}

        def local(params: Any, frozen: Any, rows: data.Rows, keys_b: jax.Array) -> Sums:
            params = gather(params, stage.specs, stage.compute_dtype)
            frozen = gather(frozen, stage.frozen_specs, stage.compute_dtype)
            return lax.psum((stage.held_out_sums or stage.sums)(params, frozen, rows, keys_b), shared_axes())

        def sums(params: Any, frozen: Any, rows: data.Rows, number: jax.Array) -> Sums:
            keys_b = jax.random.split(jax.random.fold_in(jax.random.key(0), number), rows.tokens_rt.shape[0])
            return by_batch(local, stage)(params, frozen, rows, keys_b)

        self.sums = devices.jit(sums)

    def __call__(self, params: Any, frozen: Any, report: Evaluating) -> dict[str, Any]:
        total: Sums | None = None
        found: dict[str, Any] = {}
        for place, (name, packed) in enumerate(self.packed.items()):
            own: Sums | None = None
            report(place, len(self.packed), "held-out sources")
            size = self.loop.batch
            chosen = data.spread(min(self.batches, -(-len(packed) // size)) * size, len(packed)).reshape(-1, size)
            for number, members in enumerate(chosen):
                rows = packed.take(members)
                share = size // jax.process_count()
                mine = rows.take(np.arange(jax.process_index() * share, (jax.process_index() + 1) * share))
                new = meshes.to_host(self.sums(params, frozen, hosts.place_rows(mine, self.mesh), number))
                own = new if own is None else jax.tree.map(np.add, own, new)
            total = own if total is None else jax.tree.map(np.add, total, own)
            if len(self.packed) > 1:
                found[f"held_out/{name}/loss"] = means(own)["loss"]
        return found if total is None else {f"held_out/{name}": value for name, value in means(total).items()} | found


class Termination:
    """Notes SIGTERM and Ctrl-C, agreed on by all hosts. A second Ctrl-C ends the process at once.

    Python's own handlers wait until the main thread is done with a step or a compilation. Here a thread reads the numbers
    of the signals, so that the answer to the first Ctrl-C and the second one come at any time.
    """

    def __enter__(self) -> Termination:
        self.received: int | None = None
        self.alone = jax.process_count() == 1
        noted = (signal.SIGTERM, signal.SIGINT) if self.alone else (signal.SIGINT,)  # JAX listens to SIGTERM on several
        self.before = {number: signal.signal(number, lambda *_: None) for number in noted}
        self.reads, self.writes = os.pipe()
        os.set_blocking(self.writes, False)
        self.woken = signal.set_wakeup_fd(self.writes, warn_on_full_buffer=False)
        self.listening = threading.Thread(target=self._listen, daemon=True)
        self.listening.start()
        return self

    def __exit__(self, *_: Any) -> None:
        signal.set_wakeup_fd(self.woken)
        for number, before in self.before.items():
            signal.signal(number, before)
        os.close(self.writes)
        self.listening.join()
        os.close(self.reads)

    @property
    def word(self) -> str:
        return "interrupted" if self.received == signal.SIGINT else "terminated"

    @property
    def status(self) -> int:
        return 128 + (self.received or signal.SIGTERM)

    def _listen(self) -> None:
        while numbers := os.read(self.reads, 64):
            for number in numbers:
                if number not in self.before:
                    continue
                if self.received is not None and number == signal.SIGINT:
                    os._exit(128 + number)
                if self.received is None and number == signal.SIGINT:
                    print("interrupted: saving after this step; Ctrl-C again ends at once", flush=True)
                    if not self.alone:
                        os.kill(os.getpid(), signal.SIGTERM)  # which JAX tells all hosts of
                self.received = self.received or number

    def unless_received(self, work: Callable[[], T]) -> T | None:
        """Returns the result of `work`, or None as soon as a signal is received; `work` then ends with the process.

        On several hosts, which must agree, `work` is always finished.
        """
        if not self.alone:
            return work()
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=run, daemon=True, name=ahead.NAME).start()
        while not result.done():
            if self.received is not None:
                return None
            wait([result], timeout=0.1)
        return result.result()

    def requested(self, step: int) -> bool:
        return self.received is not None if self.alone else multihost_utils.reached_preemption_sync_point(step)


class _Clock:
    """Seconds per step since the last lap."""

    def __init__(self, step: int) -> None:
        self.step, self.since = step, time.perf_counter()

    def lap(self, step: int) -> float:
        now = time.perf_counter()
        seconds = (now - self.since) / max(1, step - self.step)
        self.step, self.since = step, now
        return seconds


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _stop_if_bad(state: TrainState) -> None:
    bad = int(meshes.to_host(state.bad_step))
    if bad >= 0:
        raise ValueError(
            f"the loss or its gradient was not finite at step {bad}; nothing was saved since. "
            "Lower optimizer.learning_rate, or look at the rows of that step"
        )
