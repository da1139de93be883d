"""Trains a selector, which chooses a delayed tree for every sequence and round from what earlier rounds left behind.

    python -m train.selector configs/tiny/selector.toml sources.0.path=prompts.jsonl

Three steps. Labels: prompts are decoded, each with one of the buckets, and at a root every few rounds the rule's exact
expected length is computed for every bucket, the mean of a few drawn trees. Costs: the seconds of a round of every bucket,
at batch 1 on this machine, unless they are given. Training: with pi = softmax(scores) of a root,

    TPS = sum_a pi_a E_a / sum_a pi_a T_a,    loss = mean(-log(TPS / TPS_base)) + weight * tail

where the base is the best single bucket of the root's sampling settings, and the tail the mean of max(0, 1 - TPS /
TPS_base)^2 over the worst share of the roots. The paper states neither weight nor share.

The run's folder gets labels.npz, selector.safetensors and result.json. With given costs the same settings give the same
files on one machine. Labels that are there are used again, so that another training costs seconds; a recording that was
stopped goes on after the last batch of prompts that it finished.

Source: delayed tree expansion (arXiv 2602.16994), section 5 of it for the loss.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

import treeflash_jax as tf
from train import config, folders, lock, progress
from train.records import Source, read
from treeflash_jax import devices, files, params, planning
from treeflash_jax.adaptive import calibration, selecting, selector
from treeflash_jax.adaptive.selector import Features, SelectorConfig
from treeflash_jax.batching import capacity_bucket
from treeflash_jax.checks import bounded
from treeflash_jax.decoding.state import DecodePlan
from treeflash_jax.formats import selector as selector_files
from treeflash_jax.trees import Bucket

HELD_OUT = 8  # every so many prompts are held out
TIMED_ROUNDS, REPEATS, RESAMPLES = 8, 7, 2000


@dataclass(frozen=True, kw_only=True)
class SelectorStage:
    """Settings of this stage.

    Attributes:
      run: folder of labels, selector and result.
      verifier, drafter: name of a pair, folder, GGUF file or Hub id.
      sources: prompts; of chats the first message counts.
      buckets: [branches, trunk, length] of each delayed tree, by increasing cost.
      acceptance: rule that the trees are for.
      depths: deepest level drafted, of drafters that have the option; 0: the drafter's own.
      temperatures, top_p: every pair of them is a sampling setting; prompts take turns.
      new_tokens: tokens of each recorded answer.
      every: rounds between two roots.
      draws: number of trees that a label averages.
      batch: prompts recorded together.
      costs: cost of a round per bucket, in any unit; none: measured.
      steps, roots, learning_rate, dropout: settings of training; a step reads `roots` roots.
      tail_weight, tail_share: weight of the tail term, and share of the roots in it.
      seed: random seed of prompts, answers, weights and the order of roots.
    """

    run: str
    verifier: str = "tiny"
    drafter: str | None = None
    sources: tuple[Source, ...]
    buckets: tuple[tuple[int, ...], ...]
    acceptance: str = "traversal"
    depths: int = bounded(0, least=0)
    temperatures: tuple[float, ...] = bounded((0.2, 0.6, 1.0, 1.2), least=0)
    top_p: tuple[float, ...] = bounded((0.9, 1.0), above=0, most=1)
    new_tokens: int = bounded(96, least=2)
    every: int = bounded(5, least=1)
    draws: int = bounded(4, least=1)
    batch: int = bounded(8, least=1)
    costs: tuple[float, ...] = bounded((), above=0)
    steps: int = bounded(1500, least=1)
    roots: int = bounded(256, least=1)
    learning_rate: float = bounded(1e-3, above=0)
    dropout: float = bounded(0.1, least=0, below=1)
    tail_weight: float = bounded(1.0, least=0)
    tail_share: float = bounded(0.1, above=0, most=1)
    seed: int = bounded(0, least=0)

    def __post_init__(self) -> None:
        for name in ("sources", "buckets", "temperatures", "top_p"):
            if not getattr(self, name):
                raise ValueError(f"got no {name}, expected at least one")
        if any(len(bucket) != 3 for bucket in self.buckets):
            raise ValueError("got a bucket of other than three numbers, expected [branches, trunk, length]")
        if self.costs and len(self.costs) != len(self.buckets):
            raise ValueError(f"got {len(self.costs)} costs, expected {len(self.buckets)}: one a bucket")


@struct.dataclass
class Labels:
    """Roots of recorded answers.

    Attributes:
      hidden_rj, scalars_rs: features.
      expected_ra: tokens that a round commits with every bucket.
      setting_r: number of the sampling settings.
      prompt_r: number of the prompt.
    """

    hidden_rj: np.ndarray
    scalars_rs: np.ndarray
    expected_ra: np.ndarray
    setting_r: np.ndarray
    prompt_r: np.ndarray

    def at(self, index: Any) -> Labels:
        return jax.tree.map(lambda x: x[index], self)

    @property
    def features(self) -> Features:
        return Features(self.hidden_rj, self.scalars_rs)


def main(settings: SelectorStage) -> None:
    folder = Path(settings.run).expanduser()
    with lock.held(folders.absolute(f"{folder}/run.lock"), settings.run):
        model = tf.load(verifier=settings.verifier, drafter=settings.drafter)
        made, plan = made_for(model, settings)
        began = time.perf_counter()
        labels = recorded(model, settings, made, plan, folder / "labels.npz")
        print(f"{labels.setting_r.size} roots, {progress.duration(time.perf_counter() - began)}", flush=True)
        seconds_a = np.array(settings.costs) if settings.costs else measured_costs(model, settings, made, plan)
        weights = trained(labels, seconds_a, settings, made)
        selector_files.save(folder / selector_files.FILE, made, weights)
        result = {"settings": config.to_dict(settings), "roots": int(labels.setting_r.size), "seconds": seconds_a.tolist()}
        result |= {"machine": f"{devices.here().kind}, {os.cpu_count()} cores, {model.dtype.name}, jax {jax.__version__}"}
        result["held_out"] = summary(weights, labels.at(labels.prompt_r % HELD_OUT == 0), seconds_a)
        files.write(folder / "result.json", json.dumps(result, indent=1) + "\n")
    progress.table("held-out roots", {name: json.dumps(value) for name, value in result["held_out"].items()})
    print(f"wrote {folder / selector_files.FILE}; decode with --builder delayed --selector and this file")


def made_for(model: tf.TreeFlash, settings: SelectorStage) -> tuple[SelectorConfig, DecodePlan]:
    """What the selector of a stage chooses between, and the plan of its rounds.

    Raises:
      ValueError: no drafter, buckets that are no trees, or settings that the pair cannot serve.
    """
    buckets = tuple(Bucket(*bucket) for bucket in settings.buckets)
    own: dict[str, Any] = {"builder": "delayed", "acceptance": settings.acceptance}
    own |= {"depths": settings.depths} if settings.depths else {}
    plan = model.plan(model.resolve(None, own))
    width, pair = len(plan.taps) * model.verifier.hidden_size, calibration.pair_of(model.verifier, model.weights, plan)
    made = SelectorConfig(buckets=buckets, width=width, pair=pair, rule=plan.rule)
    deepest = max(bucket.depth for bucket in buckets)
    if deepest > plan.drafter.num_depths:
        raise ValueError(f"got a bucket of depth {deepest}, expected at most the drafter's {plan.drafter.num_depths}")
    return made, made.planned(plan, None)


def recorded(model: tf.TreeFlash, settings: SelectorStage, made: SelectorConfig, plan: DecodePlan, path: Path) -> Labels:
    """The labels in a file of the same pair, prompts and settings; else they are recorded and written there.

    Every batch of prompts has a file of its own beside it until all are recorded, so that a stop costs one batch.
    """
    shaping = "verifier drafter sources buckets acceptance depths temperatures top_p new_tokens every draws batch seed"
    own = {name: config.to_dict(settings)[name] for name in shaping.split()} | {"pair": made.pair}
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
    if path.exists():
        return _read(path, digest)
    prompts = [
        model.encode(found.content[:1])
        for source in settings.sources
        for found in read(source, settings.seed)
        if found.content
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    found, parts = [], []
    with progress.Bar("prompts", len(prompts)) as bar:
        for group, at in enumerate(range(0, len(prompts), settings.batch)):
            part = path.with_name(f"labels-{group:05}.npz")
            if not part.exists():
                _write(part, digest, record(model, settings, made, plan, prompts, group))
            found.append(_read(part, digest))
            parts.append(part)
            bar.update(min(at + settings.batch, len(prompts)))
    labels = jax.tree.map(lambda *x: np.concatenate(x), *found)
    _write(path, digest, labels)
    for part in parts:
        part.unlink()
    return labels


def _write(path: Path, digest: str, labels: Labels) -> None:
    unfinished = path.with_suffix(".part.npz")
    np.savez_compressed(unfinished, digest=np.array(digest), **vars(labels))
    unfinished.replace(path)


def _read(path: Path, digest: str) -> Labels:
    with np.load(path) as held:
        if str(held["digest"]) != digest:
            raise ValueError(f"{path} holds labels of other settings; give another run, or delete it")
        return Labels(**{one.name: held[one.name] for one in fields(Labels)})


def record(
    model: tf.TreeFlash,
    settings: SelectorStage,
    made: SelectorConfig,
    plan: DecodePlan,
    prompts: Sequence[Sequence[int]],
    group: int,
) -> Labels:
    """Labels of roots every few rounds of decoding one batch of prompts with one of the buckets.

    Args:
      group: number of the batch; its prompts begin at `group * settings.batch`, and its bucket follows from it.
    """
    pairs = [(temperature, top_p) for temperature in settings.temperatures for top_p in settings.top_p]
    capacity = capacity_bucket(max(map(len, prompts)) + settings.new_tokens + 1 + plan.path_rows)
    numbers = np.arange(len(prompts))[group * settings.batch :][: settings.batch]
    setting_b = (numbers + group) % len(pairs)  # shifted, so that every bucket meets every setting
    own = model.resolve(
        None,
        {
            "temperature": [pairs[i][0] for i in setting_b],
            "top_p": [pairs[i][1] for i in setting_b],
            "max_new_tokens": settings.new_tokens,
            "seed": settings.seed,
        },
    )
    rows = planning.rows_of([prompts[i] for i in numbers], own, model.verifier)
    rows = [replace(row, index=int(i)) for row, i in zip(rows, numbers, strict=True)]
    bucket = selector.constant(made, group % len(made.buckets))
    runner = selecting.SelectingRunner(plan, model.weights, model.mesh, params=bucket)
    state = runner.start(model.inputs(rows, own, size=settings.batch, capacity=capacity))
    found: list[Labels] = []
    while (live_b := ~np.asarray(state.decode.done_b)[: len(rows)]).any() or not found:
        features, expected_ba = runner.call(
            selecting.expected_lengths, model.weights, state, plan=plan, draws=settings.draws
        )
        rooted = Labels(*map(np.asarray, (features.hidden_bj, features.scalars_bs, expected_ba)), setting_b, numbers)
        found.append(jax.tree.map(lambda x, live_b=live_b: x[: live_b.size][live_b], rooted))
        state = runner.run(state, settings.every, settings.batch)
    return jax.tree.map(lambda *x: np.concatenate(x), *found)


def measured_costs(model: tf.TreeFlash, settings: SelectorStage, made: SelectorConfig, plan: DecodePlan) -> np.ndarray:
    """Seconds of a round of every bucket at batch 1: the fastest of a few repeats, equal for those of one size."""
    own = model.resolve(None, {"temperature": 1.0, "max_new_tokens": 2 + TIMED_ROUNDS * plan.path_rows, "stop_ids": []})
    rows = planning.rows_of([[1] * 32], own, model.verifier)
    inputs = model.inputs(rows, own, size=1, capacity=capacity_bucket(rows[0].length + own.max_new_tokens + plan.path_rows))
    fastest_a = np.full(len(made.buckets), np.inf)
    for repeat in range(-1, REPEATS):
        for index in range(len(made.buckets)):
            bucket = selector.constant(made, index)
            runner = selecting.SelectingRunner(plan, model.weights, model.mesh, params=bucket)
            state = jax.block_until_ready(runner.start(inputs))
            began = time.perf_counter()
            jax.block_until_ready(runner.run(state, TIMED_ROUNDS, 1))
            if repeat >= 0:
                fastest_a[index] = min(fastest_a[index], (time.perf_counter() - began) / TIMED_ROUNDS)
    begin = 0
    for count, _ in selecting.sizes_of(made.buckets):
        fastest_a[begin:count] = np.min(fastest_a[begin:count])
        begin = count
    return fastest_a


def loss_of(
    scores_ra: jax.Array,
    expected_ra: jax.Array,
    seconds_a: jax.Array,
    base_r: jax.Array,
    *,
    tail_weight: float,
    tail_share: float,
) -> jax.Array:
    """The loss in the module's docstring."""
    chance_ra = jax.nn.softmax(scores_ra)
    ratio_r = jnp.sum(chance_ra * expected_ra, axis=1) / (chance_ra @ seconds_a) / base_r
    shortfall_r = jnp.square(jnp.maximum(0, 1 - ratio_r))
    worst = jax.lax.top_k(shortfall_r, max(1, round(tail_share * ratio_r.size)))[0]
    return jnp.mean(-jnp.log(ratio_r)) + tail_weight * jnp.mean(worst)


def best_buckets(labels: Labels, seconds_a: np.ndarray) -> np.ndarray:
    """Of every root, the bucket of the most tokens per second on all roots of its sampling settings, [r]."""
    best_r = np.zeros(labels.setting_r.size, int)
    for setting in np.unique(labels.setting_r):
        is_own_r = labels.setting_r == setting
        best_r[is_own_r] = np.argmax(np.mean(labels.expected_ra[is_own_r], axis=0) / seconds_a)
    return best_r


def trained(labels: Labels, seconds_a: np.ndarray, settings: SelectorStage, made: SelectorConfig) -> dict[str, jax.Array]:
    """Weights of a selector: those of the step with the least loss on the held-out prompts, looked at 20 times."""
    is_held_r = labels.prompt_r % HELD_OUT == 0
    if not is_held_r.any() or is_held_r.all():
        raise ValueError(f"got roots of {np.unique(labels.prompt_r).size} prompts, expected more than {HELD_OUT}")
    chosen_r, roots = best_buckets(labels, seconds_a), np.arange(labels.setting_r.size)
    base_r = labels.expected_ra[roots, chosen_r] / seconds_a[chosen_r]
    ours, theirs = ((labels.at(held), base_r[held]) for held in (~is_held_r, is_held_r))
    fresh = params.initialize(selector.specs(made), jax.random.key(settings.seed), scale=0.05)
    spread = np.std(ours[0].scalars_rs, axis=0)
    fixed = {"mean": np.mean(ours[0].scalars_rs, axis=0), "scale": 1 / np.where(spread > 1e-6, spread, 1)}
    fixed = {name: jnp.asarray(value, jnp.float32) for name, value in fixed.items()}
    weights = {name: value for name, value in fresh.items() if name not in fixed}
    rule = optax.adamw(optax.cosine_decay_schedule(settings.learning_rate, settings.steps), weight_decay=1e-3)
    tail = {"tail_weight": settings.tail_weight, "tail_share": settings.tail_share}

    def loss(weights: Any, fixed: Any, some: tuple[Labels, jax.Array], key: jax.Array | None) -> jax.Array:
        scores_ra = selector.scores(weights | fixed, some[0].features, dropout=settings.dropout, key=key)
        return loss_of(scores_ra, some[0].expected_ra, jnp.asarray(seconds_a, jnp.float32), some[1], **tail)

    @devices.jit
    def step(carry: Any, fixed: Any, index: jax.Array, ours: Any) -> Any:
        weights, memory = carry
        key = jax.random.fold_in(jax.random.key(settings.seed), index)
        picked = jax.random.randint(jax.random.fold_in(key, 1), (min(settings.roots, ours[1].size),), 0, ours[1].size)
        grads = jax.grad(loss)(weights, fixed, jax.tree.map(lambda x: x[picked], ours), key)
        updates, memory = rule.update(grads, memory, weights)
        return optax.apply_updates(weights, updates), memory

    ours, theirs = jax.tree.map(jnp.asarray, (ours, theirs))
    judge = devices.jit(partial(loss, key=None))
    carry, best = (weights, rule.init(weights)), (np.inf, weights)
    for index in range(settings.steps):
        carry = step(carry, fixed, index, ours)
        if (index + 1) % max(1, settings.steps // 20) == 0 or index + 1 == settings.steps:
            best = min(best, (float(judge(carry[0], fixed, theirs)), carry[0]), key=lambda pair: pair[0])
    return best[1] | fixed


def summary(weights: Any, labels: Labels, seconds_a: np.ndarray) -> dict[str, Any]:
    """Tokens a round and a second, by the labels: of the selector, of every bucket, and of the best bucket per setting.

    Each with its standard error, and as a ratio to the best bucket per setting with a 95 % interval, of a bootstrap over
    the prompts.
    """
    roots, prompts = np.arange(labels.setting_r.size), np.unique(labels.prompt_r)
    picks = np.random.default_rng(0).integers(prompts.size, size=(RESAMPLES, prompts.size))
    best_r = best_buckets(labels, seconds_a)

    def resampled(chosen_r: np.ndarray, per_r: np.ndarray) -> np.ndarray:
        """The sum of expected lengths over that of `per_r`: on all prompts, and on every resample."""
        length_r = labels.expected_ra[roots, chosen_r]
        top_q, bottom_q = (np.array([x[labels.prompt_r == one].sum() for one in prompts]) for x in (length_r, per_r))
        return np.append(top_q.sum() / bottom_q.sum(), top_q[picks].sum(1) / bottom_q[picks].sum(1))

    def rates(chosen_r: np.ndarray) -> dict[str, dict[str, float]]:
        found = {}
        for what, per in (("tau", np.ones(roots.size)), ("tokens_per_second", None)):
            ours, base = (resampled(own, seconds_a[own] if per is None else per) for own in (chosen_r, best_r))
            low, high = np.percentile(ours[1:] / base[1:], [2.5, 97.5])
            found[what] = {"value": float(ours[0]), "error": float(np.std(ours[1:]))}
            found[what] |= {"ratio": float(ours[0] / base[0]), "low": float(low), "high": float(high)}
        return found

    chosen_r = np.argmax(np.asarray(selector.scores(weights, labels.features)), axis=1)
    each = {str(index): rates(np.full(roots.size, index)) for index in range(seconds_a.size)}
    counts = {str(index): int(np.sum(chosen_r == index)) for index in range(seconds_a.size)}
    found = {"prompts": int(prompts.size), "roots": int(roots.size), "selector": rates(chosen_r)}
    return found | {"best of each setting": rates(best_r), "buckets": each, "chosen": counts}


if __name__ == "__main__":
    config.run(main, SelectorStage, __doc__)
