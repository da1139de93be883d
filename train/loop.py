"""The training loop that every stage shares: Muon and AdamW, warm-up and cosine, a log line, a checkpoint.

A run that is killed resumes from its last checkpoint to the same losses: a batch is a function of (seed, step) alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from train import checkpoint

Batch = Any
Metrics = dict[str, jax.Array]
LossFn = Callable[[Any, Batch, jax.Array], tuple[jax.Array, Metrics]]

# Input and output axes of the linear maps, by name.
MATRIX_AXES = {
    **{name: ((0,), (1, 2)) for name in ("q", "k", "v", "token_ug", "hidden_ug")},
    "o": ((0, 1), (2,)),
    **{name: ((0,), (1,)) for name in ("gate", "up", "down", "fc")},
}


def optimizer(
    steps: int, peak: float, *, adam_peak: float = 4e-3, warmup: float = 0.04, weight_decay: float = 0.0
) -> optax.GradientTransformation:
    """Muon on the matrices of the layers, AdamW (0.9, 0.95) on the rest; one warm-up and cosine, gradients of norm <= 1.

    Muon reached AdamW's loss in half the steps here. Its updates have a root mean square of 0.2 times the rate.
    """

    def schedule(rate: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(0.0, rate, max(1, round(warmup * steps)), steps, end_value=0.01 * rate)

    def is_decayed(params: Any) -> Any:
        return jax.tree.map(lambda x: x.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            schedule(peak),
            weight_decay=weight_decay,
            weight_decay_mask=is_decayed,
            adam_b2=0.95,
            adam_learning_rate=schedule(adam_peak),
            adam_weight_decay=weight_decay,
            muon_weight_dimension_numbers=_matrix_axes,
            consistent_rms=0.2,
        ),
    )


def _matrix_axes(params: Any) -> Any:
    """Which axes of a weight are its input and its output; None for weights that are no linear map."""

    def axes(path: tuple[Any, ...], _: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        found = MATRIX_AXES.get(path[-1].key if hasattr(path[-1], "key") else None)
        return None if found is None else optax.contrib.MuonDimensionNumbers(*found)

    return jax.tree_util.tree_map_with_path(axes, params)


def fit(
    params: Any,
    loss_fn: LossFn,
    transform: optax.GradientTransformation,
    batches: Callable[[int], Batch],
    *,
    steps: int,
    seed: int,
    folder: Path,
    validate: Callable[[Any], dict[str, float]] | None = None,
    log_every: int = 20,
    save_every: int = 200,
) -> Any:
    """Minimises `loss_fn(params, batch, key)` and returns the trained weights.

    Args:
      params: initial weights.
      loss_fn: mean loss of a batch, and metrics to log.
      transform: the optimiser, schedule included.
      batches: the batch of a step.
      steps: length of the run.
      seed: of the per-step keys.
      folder: takes log.jsonl (one line every `log_every` steps) and state.npz.
      validate: metrics of the weights, logged with every checkpoint.
      log_every: steps between log lines.
      save_every: steps between checkpoints.
    """
    state = {"params": params, "optimizer": transform.init(params), "step": jnp.int32(0)}
    path = folder / "state.npz"
    if path.exists():
        state = checkpoint.load(path, state)
        print(f"resumed at step {int(state['step'])}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)

    @jax.jit
    def update(state: Any, batch: Batch) -> tuple[Any, Metrics]:
        key = jax.random.fold_in(jax.random.key(seed), state["step"])
        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"], batch, key)
        updates, memory = transform.update(grads, state["optimizer"], state["params"])
        new = {"params": optax.apply_updates(state["params"], updates), "optimizer": memory, "step": state["step"] + 1}
        return new, {"loss": loss, "grad_norm": optax.global_norm(grads), **metrics}

    started = time.time()
    with (folder / "log.jsonl").open("a", encoding="utf-8") as log:
        for step in range(int(state["step"]), steps):
            state, metrics = update(state, batches(step))
            last = step + 1 == steps
            line: dict[str, float] = {}
            if step % log_every == 0 or last:
                line = {name: round(float(value), 5) for name, value in metrics.items()}
            if (step + 1) % save_every == 0 or last:
                checkpoint.save(path, state)
                line |= {} if validate is None else validate(state["params"])
            if line:
                line = {"step": step, "seconds": round(time.time() - started, 1), **line}
                log.write(json.dumps(line) + "\n")
                log.flush()
                print(json.dumps(line), flush=True)
    return state["params"]
