"""Labels of a selector: roots of decoded prompts, with the expected length of the next round for every bucket.

Shape suffixes: b batch, j tapped layers x model, s scalars, a buckets, o roots.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

import treeflash_jax as tf
from train.data.records import read
from train.runtime import run_config, watch
from treeflash_jax import acceptance
from treeflash_jax.core import devices, sharding
from treeflash_jax.decoding import accepting, rounds, tree_selector
from treeflash_jax.decoding.runner import Runner
from treeflash_jax.decoding.state import DecodePlan, DecodeState, Weights
from treeflash_jax.decoding.tree_selector import SelectorConfig, make_features
from treeflash_jax.engine import planning
from treeflash_jax.engine.batching import capacity_bucket

TRAINING = "run costs steps roots learning_rate dropout tail_weight tail_share".split()  # settings that affect no label


@struct.dataclass
class Labels:
    """Roots of recorded answers.

    Attributes:
      hidden_oj, scalars_os: inputs of the selector, see `tree_selector.Features`.
      expected_oa: expected number of tokens that the round commits with every bucket.
      setting_o: index of the pair of sampling settings.
    """

    hidden_oj: np.ndarray
    scalars_os: np.ndarray
    expected_oa: np.ndarray
    setting_o: np.ndarray
    prompt_o: np.ndarray

    @staticmethod
    def join(parts: Sequence["Labels"]) -> "Labels":
        return jax.tree.map(lambda *x: np.concatenate(x), *parts)

    def at(self, index: Any) -> Self:
        return jax.tree.map(lambda x: x[index], self)

    def scores(self, params: Any, **dropout: Any) -> jax.Array:
        return tree_selector.scores(params, tree_selector.Features(self.hidden_oj, self.scalars_os), **dropout)


def make_runner(model: tf.TreeFlash, config: SelectorConfig, plan: DecodePlan, bucket: int) -> Runner:
    """Returns a runner whose selector always chooses the same bucket."""
    params = {name: jnp.zeros(spec.shape) for name, spec in tree_selector.specs(config).items()}
    params["out_bias"] = params["out_bias"].at[bucket].set(1.0)
    return Runner(plan, model.weights.replace(policy=params), model.mesh)


def record_all(
    model: tf.TreeFlash, settings: Any, config: SelectorConfig, runners: Sequence[Runner], folder: Path
) -> Labels:
    """Returns the labels of all prompts, read from the folder or recorded there, batch by batch.

    Batches take turns with the runners, one per bucket. `settings` is a `train.selector.SelectorStage`.
    """
    affecting = {name: value for name, value in run_config.to_dict(settings).items() if name not in TRAINING}
    digest = hashlib.sha256(json.dumps(affecting | {"pair": config.pair}, sort_keys=True).encode()).hexdigest()[:8]
    records = (record for source in settings.sources for record in read(source, settings.seed))
    prompts = [model.encode(record.content[:1]) for record in records if record.content]
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    with watch.Bar("prompts", len(prompts)) as bar:
        for group in range(-(-len(prompts) // settings.batch)):
            path = folder / f"labels-{digest}-{group:05}.npz"
            if not path.exists():
                labels = record_batch(model, settings, runners[group % len(runners)], prompts, group)
                unfinished = folder / "unfinished.npz"
                np.savez_compressed(unfinished, **vars(labels))
                unfinished.replace(path)
            with np.load(path) as arrays:
                parts.append(Labels(**{name: arrays[name] for name in Labels.__dataclass_fields__}))
            bar.show((group + 1) * settings.batch)
    return Labels.join(parts)


def record_batch(
    model: tf.TreeFlash, settings: Any, runner: Runner, prompts: Sequence[Sequence[int]], group: int
) -> Labels:
    """Decodes the batch of prompts that begins at `group * settings.batch`; returns labels of roots every few rounds."""
    pairs = [(temperature, top_p) for temperature in settings.temperatures for top_p in settings.top_p]
    prompt_b = np.arange(len(prompts))[group * settings.batch :][: settings.batch]
    setting_b = (prompt_b + group) % len(pairs)  # shifted, so that every bucket meets every setting
    temperature, top_p = ([pairs[i][which] for i in setting_b] for which in (0, 1))
    sampling = {"temperature": temperature, "top_p": top_p, "max_new_tokens": settings.new_tokens, "seed": settings.seed}
    generate = model.resolve(None, sampling)
    requests = planning.make_requests([prompts[i] for i in prompt_b], generate, model.verifier, prompt_b)
    capacity = capacity_bucket(max(map(len, prompts)) + settings.new_tokens + 1 + runner.plan.path_length)
    state = runner.start(model.make_batch(requests, generate, batch_size=settings.batch, capacity=capacity))
    parts: list[Labels] = []
    while (live_b := ~np.asarray(state.done_b)[: len(requests)]).any() or not parts:
        with sharding.ambient(model.mesh):
            labels = expected_lengths(model.weights, state, plan=runner.plan, draws=settings.draws)
        arrays = (np.asarray(x)[: len(requests)] for x in labels)
        parts.append(Labels(*arrays, setting_b, prompt_b).at(live_b))
        state = runner.run(state, settings.every, settings.batch)
    return Labels.join(parts)


@partial(devices.jit, static_argnames=("draws", "plan"))
def expected_lengths(weights: Weights, state: DecodeState, *, draws: int, plan: DecodePlan) -> tuple[jax.Array, ...]:
    """Returns the selector's inputs [b, j] and [b, s], and the expected length of the next round for every bucket [b, a].

    The length is the mean, over `draws` trees, of the rule's exact expectation given the tree.
    """
    buckets = plan.policy.sizes
    expander = rounds.draft_expander(weights, state, plan)

    def expected_length(pair: jax.Array) -> jax.Array:
        index, draw = pair
        key_b = jax.vmap(jax.random.fold_in, (0, None))(state.sampling.key_b, draw)
        drawn = state.replace(sampling=state.sampling.replace(key_b=key_b))
        tree, proposal = rounds.build_tree(drawn, expander, plan, jnp.full_like(state.end_b, index))
        logits_bnv = rounds.verify_tree(weights, state, tree, plan).logits_bnv
        target = accepting.make_target(logits_bnv, state.sampling)
        return jnp.sum(acceptance.RULES[plan.rule].weights(tree, proposal, target), axis=1)

    pairs = np.stack(np.meshgrid(np.arange(len(buckets)), np.arange(1, draws + 1), indexing="ij"), axis=-1)
    length_xb = jax.lax.map(expected_length, jnp.asarray(pairs.reshape(-1, 2), jnp.int32))
    features = make_features(state, expander)
    return features.hidden_bj, features.scalars_bs, jnp.mean(length_xb.reshape(len(buckets), draws, -1), axis=1).T
