"""Selectors of delayed trees: answers that do not depend on them, their files, refusals. Training: tests/train."""

import json
from dataclasses import astuple
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import PROMPTS, SAMPLED, SIZES
from conftest import random_pair
from refusals import refused
from safetensors.numpy import save_file

from treeflash_jax import GenerateConfig
from treeflash_jax.core import parameters
from treeflash_jax.decoding import accepting, calibration, rounds, tree_selector
from treeflash_jax.decoding.tree_selector import OBSERVED, SCALARS, Features, SelectorConfig, SelectorPolicy, list_shapes
from treeflash_jax.formats import safetensors, selector_file
from treeflash_jax.trees import Bucket

BUCKETS = (Bucket(1, 2, 0), Bucket(2, 0, 1), Bucket(2, 1, 2), Bucket(3, 0, 2))
HOW = {"builder": "delayed", "acceptance": "sample-and-match", "stop_ids": []} | SIZES


def made_for(model, rule: str, buckets=BUCKETS) -> SelectorConfig:
    plan = model.plan(GenerateConfig(**HOW | {"acceptance": rule}))
    width, pair = len(plan.taps) * model.verifier.hidden_size, calibration.pair_digest(model.weights, plan)
    return SelectorConfig(buckets=buckets, width=width, pair=pair, rule=rule)


def arbitrary(config: SelectorConfig) -> dict:
    """Random weights, so that choices depend strongly on the inputs."""
    weights = parameters.initialize(tree_selector.specs(config), jax.random.key(2), scale=1.0)
    return weights | {"norm": jnp.ones_like(weights["norm"]), "scale": jnp.ones(len(SCALARS))}


def written(model, path, rule: str = "sample-and-match") -> str:
    config = made_for(model, rule)
    selector_file.save(path, config, arbitrary(config))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["sample-and-match", "traversal"])
def test_answers_and_trees_do_not_depend_on_what_is_decoded_beside_them(trained, tmp_path, rule):
    """With traversal, answers depend on every draw and coin. Caches grow on the way."""
    how = HOW | {"acceptance": rule, "max_new_tokens": 60, "selector": written(trained, tmp_path / "a.safetensors", rule)}
    together = trained.generate(PROMPTS, **how, **SAMPLED)
    taken = {nodes for result in together for nodes in result.nodes}
    assert len(taken) > 1 and taken <= {bucket.nodes for bucket in BUCKETS}
    assert all(len(result.tree(0).labels) <= result.nodes[0] for result in together)
    if rule == "sample-and-match":
        plain = trained.generate(PROMPTS, builder="none", max_new_tokens=60, stop_ids=[], **SAMPLED)
        assert [result.ids for result in together] == [result.ids for result in plain]
    two_at_a_time = trained.generate(PROMPTS, batch_size=2, **how, **SAMPLED)
    for number, expected in enumerate(together):
        settings = {name: values[number] for name, values in SAMPLED.items()}
        [alone] = trained.generate([PROMPTS[number]], indices=[number], **how | settings)
        for result in (alone, two_at_a_time[number]):
            assert (result.ids, result.nodes) == (expected.ids, expected.nodes)


def test_a_round_runs_at_the_size_of_its_largest_tree():
    sizes = list_shapes((Bucket(1, 5, 0), Bucket(2, 1, 2), Bucket(4, 0, 3), Bucket(1, 6, 0), Bucket(2, 0, 2)))
    assert sizes == [(2, 6), (3, 13), (5, 13)]


def test_features_by_hand():
    """After a round whose last accepted node has drawn children, and after one whose last node has none."""
    logits_v = jnp.log(jnp.asarray([0.5, 0.25, 0.125, 0.125]))
    logits_bnv = jnp.stack([jnp.stack([jnp.zeros(4), logits_v])] * 2)
    log_q_bnc = jnp.full((2, 2, 3), -jnp.inf).at[0, 1].set(jnp.log(jnp.asarray([0.2, 0.8, 0.0])))
    support_bnc = jnp.broadcast_to(jnp.asarray([0, 1, 2]), (2, 2, 3))
    sampling = SimpleNamespace(temperature_b=jnp.ones(2), top_k_b=jnp.asarray([0, 1]), top_p_b=jnp.ones(2))
    proposal = SimpleNamespace(log_q_bnc=log_q_bnc, support_bnc=support_bnc)
    verified = rounds.Verified(logits_bnv, jnp.arange(4.0).reshape(2, 2, 1), None)
    accepted = accepting.Accepted(jnp.asarray([[0, 1, 0]] * 2), jnp.asarray([2, 2]), None, None, None)
    left = SelectorPolicy(()).observe(SimpleNamespace(sampling=sampling), proposal, verified, accepted)
    assert left.hidden_bj.tolist() == [[1.0], [3.0]]
    entropy = 1.75 * np.log(2)  # of the verifier at temperature 1, before filters
    drafted = -(0.2 * np.log(0.2) + 0.8 * np.log(0.8))
    np.testing.assert_allclose(left.scalars_bs, [[entropy, drafted, 0.2 + 0.25, 1], [entropy, 0, 0, 0]], atol=1e-6)
    assert left.scalars_bs.shape[1] == len(OBSERVED)


def test_a_file_is_read_back_and_weights_of_other_buckets_are_refused(tmp_path):
    config = SelectorConfig(buckets=BUCKETS, width=6, pair="a pair", rule="traversal")
    weights, path = arbitrary(config), tmp_path / "selector.safetensors"
    selector_file.save(path, config, weights)
    again, read = selector_file.load(path)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, read, weights)
    features = Features(jnp.ones((3, 6)), jnp.ones((3, len(SCALARS))))
    assert tree_selector.scores(read, features).shape == (3, len(BUCKETS))
    fewer = {name: np.asarray(x[..., :3] if name.startswith("out") else x) for name, x in weights.items()}
    save_file(fewer, path, safetensors.metadata(path))
    refused(lambda: selector_file.load(path), "shape", "expected")
    refused(lambda: selector_file.load(tmp_path / "none.safetensors"), "not found")


def test_mistakes_are_one_line(tmp_path, trained):
    pair = random_pair()
    path = written(trained, tmp_path / "a.safetensors")
    ask = lambda model, **how: partial(model.generate, [[1, 2]], max_new_tokens=2, **HOW | {"selector": path} | how)  # noqa: E731
    refused(ask(pair), "selector for the pair", "train a selector")
    refused(ask(trained, acceptance="traversal"), "acceptance 'traversal'", "'sample-and-match'")
    refused(ask(trained, builder="best-first"), "builder 'best-first'", "'delayed'")
    refused(ask(trained, trunk="auto"), "trunk 'auto'", "selector")
    refused(ask(trained, branches=3), "branches 3", "selector")
    refused(ask(trained, nodes=4), "nodes 4", "at least 7")
    refused(ask(trained, nodes="auto"), "'best-first' with nodes 'auto'")
    choose_from = partial(partial, SelectorConfig, width=1, pair="", rule="")
    refused(choose_from(buckets=(Bucket(1, 1, 0),) * 13), "13 buckets", "1 to 12")
    refused(choose_from(buckets=(Bucket(1, 0, 0),)), "bucket")
    refused(choose_from(buckets=(Bucket(5, 1, 1000),)), "5002 nodes", "4096")
    made = made_for(trained, "sample-and-match")
    for change in ({"width": "6"}, {"width": 2**40}, {"buckets": [[2, 2**31, 1]]}, {"buckets": [[1, 2]]}, {"buckets": 3}):
        text = json.dumps(vars(made) | {"buckets": [*map(astuple, BUCKETS)]} | change)
        save_file({}, tmp_path / "b.safetensors", {selector_file.KEY: text})
        refused(partial(selector_file.load, tmp_path / "b.safetensors"), "damaged description")
