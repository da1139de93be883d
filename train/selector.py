"""Trains a selector, which chooses a delayed tree for every sequence and round from the results of earlier rounds.

    python -m train.selector configs/tiny/selector.toml sources.0.path=prompts.jsonl

Three steps. Labels: prompts are decoded, each with one of the buckets; at a root every few rounds, the rule's exact
expected length is computed for every bucket and averaged over a few drawn trees. Costs: the seconds of a round with every
bucket, at batch 1 on this machine, unless given. Training: with pi = softmax(scores) of a root,

    TPS = sum_a pi_a E_a / sum_a pi_a T_a,    loss = mean(-log(TPS / TPS_base)) + weight * tail

where the base is the best single bucket for the root's sampling settings, and the tail the mean of max(0, 1 - TPS /
TPS_base)^2 over the worst share of the roots. The paper states neither weight nor share.

Writes labels-*.npz (one file per batch of prompts), selector.safetensors and result.json to the run's folder; with given
costs the files are reproducible on one machine. Labels of the same settings are recorded once: another training takes
seconds, and an interrupted recording continues.

Shape suffixes: a buckets, o roots.

Source: delayed tree expansion (arXiv 2602.16994), section 5 of it for the loss.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import treeflash_jax as tf
from train.data import roots
from train.data.records import Source
from train.data.roots import Labels
from train.runtime import folders, lock, run_config, watch
from treeflash_jax.bench.report import RESAMPLES, paired_ratio
from treeflash_jax.core import devices, files, parameters
from treeflash_jax.core.checks import NonNegative, Positive, Probability, bounded
from treeflash_jax.decoding import calibration, tree_selector
from treeflash_jax.decoding.runner import Runner
from treeflash_jax.decoding.state import DecodePlan
from treeflash_jax.decoding.tree_selector import SelectorConfig, list_shapes, plan_selection
from treeflash_jax.engine import planning
from treeflash_jax.engine.batching import capacity_bucket
from treeflash_jax.formats import selector_file
from treeflash_jax.trees import Bucket

HELD_OUT = 8  # every eighth prompt is held out
TIMED_ROUNDS, REPEATS = 8, 7


@dataclass(frozen=True, kw_only=True)
class SelectorStage:
    """Settings of this stage.

    Attributes:
      run: folder of labels, selector and result.
      verifier, drafter: name of a pair, folder, GGUF file or Hub id.
      thinking, template: arguments of the chat template, as in `train.respond`.
      sources: prompts; the first message of chats.
      buckets: [branches, trunk, length] of each delayed tree, by increasing cost.
      acceptance: acceptance rule of the trees.
      depths: deepest level drafted, for drafters with this option; 0: the drafter's default.
      temperatures, top_p: sampling settings, every pair of which is used for some of the prompts.
      new_tokens: tokens of each recorded answer.
      every: rounds between two roots.
      draws: number of trees that a label averages.
      batch: prompts recorded together.
      costs: cost of a round per bucket, in any unit; none: measured.
      steps, learning_rate, dropout: settings of training.
      roots: number of roots per training step.
      tail_weight, tail_share: weight of the tail term, and share of the roots in it.
      seed: random seed of prompts, answers, weights and the order of roots.
    """

    run: str
    verifier: str = "tiny"
    drafter: str | None = None
    thinking: bool = False
    template: dict[str, Any] = field(default_factory=dict)
    sources: tuple[Source, ...] = bounded(min_length=1)
    buckets: tuple[tuple[int, int, int], ...] = bounded(min_length=1)
    acceptance: str = "traversal"
    depths: int = bounded(0, least=0)
    temperatures: tuple[NonNegative, ...] = bounded((0.2, 0.6, 1.0, 1.2), min_length=1)
    top_p: tuple[Probability, ...] = bounded((0.9, 1.0), min_length=1)
    new_tokens: int = bounded(96, least=2)
    every: int = bounded(5, least=1)
    draws: int = bounded(4, least=1)
    batch: int = bounded(8, least=1)
    costs: tuple[Positive, ...] = ()
    steps: int = bounded(1500, least=1)
    roots: int = bounded(256, least=1)
    learning_rate: float = bounded(1e-3, above=0)
    dropout: float = bounded(0.1, least=0, below=1)
    tail_weight: float = bounded(1.0, least=0)
    tail_share: float = bounded(0.1, above=0, most=1)
    seed: int = bounded(0, least=0)

    def __post_init__(self) -> None:
        if self.costs and len(self.costs) != len(self.buckets):
            raise ValueError(f"got {len(self.costs)} costs, expected {len(self.buckets)}: one per bucket")


def main(settings: SelectorStage) -> None:
    folder = folders.local(settings.run)
    with lock.held(folders.absolute(folder / "run.lock"), settings.run):
        model = tf.load(
            verifier=settings.verifier, drafter=settings.drafter, thinking=settings.thinking, template=settings.template
        )
        config, plan = make_config(model, settings)
        began = perf_counter()
        runners = [roots.make_runner(model, config, plan, bucket) for bucket in range(len(config.buckets))]
        labels = roots.record_all(model, settings, config, runners, folder)
        print(f"{labels.setting_o.size} roots, {watch.duration(perf_counter() - began)}", flush=True)
        seconds_a = np.array(settings.costs) if settings.costs else measure_costs(model, config, runners)
        params = train_selector(labels, seconds_a, settings, config)
        selector_file.save(folder / selector_file.FILE, config, params)
        result = {
            "settings": run_config.to_dict(settings),
            "roots": int(labels.setting_o.size),
            "seconds": seconds_a.tolist(),
            "machine": f"{devices.here().kind}, {os.cpu_count()} cores, {model.dtype.name}, jax {jax.__version__}",
            "held_out": summarize(params, labels.at(labels.prompt_o % HELD_OUT == 0), seconds_a),
        }
        files.write(folder / "result.json", json.dumps(result, indent=1) + "\n")
    watch.table("held-out roots", {name: json.dumps(value) for name, value in result["held_out"].items()})
    print(f"wrote {folder / selector_file.FILE}; decode with --builder delayed --selector and this file")


def make_config(model: tf.TreeFlash, settings: SelectorStage) -> tuple[SelectorConfig, DecodePlan]:
    """Returns the config of the selector and the plan of its rounds."""
    buckets = tuple(Bucket(*bucket) for bucket in settings.buckets)
    choices = {"builder": "delayed", "acceptance": settings.acceptance}
    plan = model.plan(model.resolve(None, choices | ({"depths": settings.depths} if settings.depths else {})))
    width, pair = len(plan.taps) * model.verifier.hidden_size, calibration.pair_digest(model.weights, plan)
    config = SelectorConfig(buckets=buckets, width=width, pair=pair, rule=plan.rule)
    deepest = max(bucket.depth for bucket in buckets)
    if deepest > plan.drafter.num_depths:
        raise ValueError(f"got a bucket of depth {deepest}, expected at most the drafter's {plan.drafter.num_depths}")
    return config, plan_selection(config, plan, None)


def measure_costs(model: tf.TreeFlash, config: SelectorConfig, runners: Sequence[Runner]) -> np.ndarray:
    """Returns the seconds of a round with every bucket at batch 1: minima over repeats and over buckets of one shape."""
    path = runners[0].plan.path_length
    generate = model.resolve(None, {"temperature": 1.0, "max_new_tokens": 2 + TIMED_ROUNDS * path, "stop_ids": []})
    requests = planning.make_requests([[1] * 32], generate, model.verifier)
    capacity = capacity_bucket(32 + generate.max_new_tokens + path)
    batch = model.make_batch(requests, generate, batch_size=1, capacity=capacity)
    seconds_ta = np.zeros((1 + REPEATS, len(runners)))
    for repeat, bucket in np.ndindex(*seconds_ta.shape):
        state = jax.block_until_ready(runners[bucket].start(batch))
        began = perf_counter()
        jax.block_until_ready(runners[bucket].run(state, TIMED_ROUNDS, 1))
        seconds_ta[repeat, bucket] = (perf_counter() - began) / TIMED_ROUNDS
    fastest_a, begin = np.min(seconds_ta[1:], axis=0), 0  # the first repeat compiles
    for count, _ in list_shapes(config.buckets):
        fastest_a[begin:count] = np.min(fastest_a[begin:count])
        begin = count
    return fastest_a


def compute_loss(
    scores_oa: jax.Array, labels: Labels, seconds_a: jax.Array, base_o: jax.Array, settings: SelectorStage
) -> jax.Array:
    """Computes the loss of the module's docstring; `base_o` is TPS_base."""
    chance_oa = jax.nn.softmax(scores_oa)
    ratio_o = jnp.sum(chance_oa * labels.expected_oa, axis=1) / (chance_oa @ seconds_a) / base_o
    shortfall_o = jnp.square(jnp.maximum(0, 1 - ratio_o))
    worst = jax.lax.top_k(shortfall_o, max(1, round(settings.tail_share * ratio_o.size)))[0]
    return jnp.mean(-jnp.log(ratio_o)) + settings.tail_weight * jnp.mean(worst)


def best_buckets(labels: Labels, seconds_a: np.ndarray) -> np.ndarray:
    """Returns for every root the bucket with the most tokens per second on all roots of its sampling settings, [o]."""
    best_o = np.zeros(labels.setting_o.size, int)
    for setting in np.unique(labels.setting_o):
        is_same_o = labels.setting_o == setting
        best_o[is_same_o] = np.argmax(np.mean(labels.expected_oa[is_same_o], axis=0) / seconds_a)
    return best_o


def train_selector(
    labels: Labels, seconds_a: np.ndarray, settings: SelectorStage, config: SelectorConfig
) -> dict[str, jax.Array]:
    """Returns the weights with the least loss on held-out prompts, which is computed 20 times during training."""
    is_held_o = labels.prompt_o % HELD_OUT == 0
    if not is_held_o.any() or is_held_o.all():
        raise ValueError(f"got roots of {np.unique(labels.prompt_o).size} prompts, expected more than {HELD_OUT}")
    best_o = best_buckets(labels, seconds_a)
    base_o = labels.expected_oa[np.arange(best_o.size), best_o] / seconds_a[best_o]
    trained, held = (jax.tree.map(jnp.asarray, (labels.at(which), base_o[which])) for which in (~is_held_o, is_held_o))
    params = parameters.initialize(tree_selector.specs(config), jax.random.key(settings.seed), scale=0.05)
    scalars_os = labels.scalars_os[~is_held_o]
    spread_s = np.std(scalars_os, axis=0)
    fixed = {"mean": np.mean(scalars_os, axis=0), "scale": 1 / np.where(spread_s > 1e-6, spread_s, 1)}
    fixed = {name: jnp.asarray(value, jnp.float32) for name, value in fixed.items()}
    params = {name: value for name, value in params.items() if name not in fixed}
    optimizer = optax.adamw(optax.cosine_decay_schedule(settings.learning_rate, settings.steps), weight_decay=1e-3)

    def loss(params: Any, fixed: Any, batch: tuple[Labels, jax.Array], key: jax.Array | None) -> jax.Array:
        scores_oa = batch[0].scores(params | fixed, dropout=settings.dropout, key=key)
        return compute_loss(scores_oa, batch[0], jnp.asarray(seconds_a, jnp.float32), batch[1], settings)

    @devices.jit
    def step(carry: Any, fixed: Any, index: jax.Array, trained: Any) -> Any:
        params, optimizer_state = carry
        key, size = jax.random.fold_in(jax.random.key(settings.seed), index), trained[1].size
        picked = jax.random.randint(jax.random.fold_in(key, 1), (min(settings.roots, size),), 0, size)
        grads = jax.grad(loss)(params, fixed, jax.tree.map(lambda x: x[picked], trained), key)
        updates, optimizer_state = optimizer.update(grads, optimizer_state, params)
        return optax.apply_updates(params, updates), optimizer_state

    held_loss = devices.jit(partial(loss, key=None))
    carry, best = (params, optimizer.init(params)), (np.inf, params)
    for index in range(settings.steps):
        carry = step(carry, fixed, index, trained)
        if (index + 1) % max(1, settings.steps // 20) == 0 or index + 1 == settings.steps:
            best = min(best, (float(held_loss(carry[0], fixed, held)), carry[0]), key=lambda pair: pair[0])
    return best[1] | fixed


def summarize(params: Any, labels: Labels, seconds_a: np.ndarray) -> dict[str, Any]:
    """Returns tokens per round and second, by the labels, of the selector, every bucket, and the best bucket per setting.

    Each is a value and its ratio to the best bucket per setting, with 95 % intervals of a bootstrap over prompts.
    """
    best_o, (prompts, prompt_o) = best_buckets(labels, seconds_a), np.unique(labels.prompt_o, return_inverse=True)
    count, names = prompt_o.size, ("length", "rounds", "seconds")

    def totals(bucket_o: np.ndarray) -> dict[Any, dict[str, float]]:
        values = labels.expected_oa[np.arange(count), bucket_o], np.ones(count), seconds_a[bucket_o]
        sums = zip(*(np.bincount(prompt_o, value_o) for value_o in values), strict=True)
        return {(str(prompt), 0): dict(zip(names, each, strict=True)) for prompt, each in zip(prompts, sums, strict=True)}

    def rates(bucket_o: np.ndarray) -> dict[str, Any]:
        against = {"value": {(str(prompt), 0): dict.fromkeys(names, 1) for prompt in prompts}, "ratio": totals(best_o)}
        return {
            name: {what: paired_ratio(totals(bucket_o), other, "length", per, RESAMPLES) for what, other in against.items()}
            for name, per in (("tau", "rounds"), ("tokens_per_second", "seconds"))
        }

    chosen_o = np.argmax(np.asarray(labels.scores(params)), axis=1)
    return {
        "prompts": int(prompts.size),
        "roots": int(count),
        "selector": rates(chosen_o),
        "best of each setting": rates(best_o),
        "buckets": {str(bucket): rates(np.full(count, bucket)) for bucket in range(seconds_a.size)},
        "chosen": {str(bucket): int(np.sum(chosen_o == bucket)) for bucket in range(seconds_a.size)},
    }


if __name__ == "__main__":
    run_config.run(main, SelectorStage, __doc__)
