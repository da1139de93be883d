"""Selectors of delayed trees: answers that do not depend on them, their files, refusals. Training: tests/train."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import compilations, needs_8_devices, random_pair
from safetensors.numpy import save_file

from treeflash_jax import GenerateConfig, make_mesh
from treeflash_jax.core import parameters, programs
from treeflash_jax.decoding import accepting, calibration, rounds, tree_selector
from treeflash_jax.decoding.tree_selector import OBSERVED, SCALARS, Features, SelectorConfig, SelectorPolicy, list_shapes
from treeflash_jax.formats import selector_file
from treeflash_jax.trees import Bucket

PROMPTS = [[3, 4, 5, 17, 29], [7, 8], [100, 3, 50, 60, 61, 62, 63], [9]]
BUCKETS = (Bucket(1, 2, 0), Bucket(2, 0, 1), Bucket(2, 1, 2), Bucket(3, 0, 2))
HOW = {"builder": "delayed", "acceptance": "sample-and-match", "candidates": 8, "children": 8, "stop_ids": []}
SAMPLED = {"temperature": [0.0, 0.7, 1.0, 1.0], "top_p": [1.0, 0.9, 1.0, 1.0], "seed": [1, 2, 3, 4]}


def made_for(model, rule: str, buckets=BUCKETS) -> SelectorConfig:
    plan = model.plan(GenerateConfig(**HOW | {"acceptance": rule}))
    width, pair = len(plan.taps) * model.verifier.hidden_size, calibration.pair_digest(model.verifier, model.weights, plan)
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
def test_answers_are_those_of_one_token_decoding_alone_and_together(trained, tmp_path):
    """Trees are chosen for each sequence: neither ids nor nodes depend on the rest of the batch."""
    how = HOW | SAMPLED | {"selector": written(trained, tmp_path / "a.safetensors"), "max_new_tokens": 24}
    results = trained.generate(PROMPTS, **how)
    plain = trained.generate(PROMPTS, builder="none", max_new_tokens=24, stop_ids=[], **SAMPLED)
    assert [result.ids for result in results] == [result.ids for result in plain]
    taken = {nodes for result in results for nodes in result.nodes}
    assert len(taken) > 1 and taken <= {bucket.nodes for bucket in BUCKETS}
    assert all(len(result.tree(0).labels) <= result.nodes[0] for result in results)
    with compilations() as compiled:
        swapped = trained.generate(PROMPTS[::-1], indices=[3, 2, 1, 0], **how | {k: v[::-1] for k, v in SAMPLED.items()})
        assert not [name for name in compiled if "decode" in name]
    for result, other in zip(results, swapped[::-1], strict=True):
        assert (result.ids, result.nodes) == (other.ids, other.nodes)
    few = trained.generate(PROMPTS, **how | {"batch_size": 2})
    assert [result.ids for result in few] == [result.ids for result in results]


@pytest.mark.slow
def test_drawn_trees_do_not_depend_on_what_is_decoded_beside_them(trained, tmp_path):
    """With a rule whose answers depend on every draw and coin; caches grow on the way."""
    how = HOW | SAMPLED | {"acceptance": "traversal", "max_new_tokens": 60}
    how |= {"selector": written(trained, tmp_path / "a.safetensors", "traversal")}
    together = trained.generate(PROMPTS, **how)
    for number, expected in enumerate(together):
        settings = {name: values[number] for name, values in SAMPLED.items()}
        [alone] = trained.generate([PROMPTS[number]], indices=[number], **how | settings)
        assert (alone.ids, alone.nodes) == (expected.ids, expected.nodes)


@pytest.mark.slow
@needs_8_devices
@pytest.mark.filterwarnings("ignore:tau is")
def test_eight_devices_answer_as_one(tmp_path):
    alone, pair = random_pair(), random_pair(make_mesh(4, 2))
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [11]]
    how = {"max_new_tokens": 16, "temperature": [0.0, 0.7, 1.0, 0.0]}
    expected = [result.ids for result in alone.generate(prompts, builder="none", stop_ids=[], **how)]
    programs.clear()
    results = pair.generate(prompts, **HOW, **how, selector=written(pair, tmp_path / "a.safetensors"))
    assert [result.ids for result in results] == expected


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
    left = SelectorPolicy().observe(SimpleNamespace(sampling=sampling), proposal, verified, accepted)
    assert left.hidden_bj.tolist() == [[1.0], [3.0]]
    entropy = 1.75 * np.log(2)  # of the verifier at temperature 1, before filters
    drafted = -(0.2 * np.log(0.2) + 0.8 * np.log(0.8))
    np.testing.assert_allclose(left.scalars_bl, [[entropy, drafted, 0.2 + 0.25, 1], [entropy, 0, 0, 0]], atol=1e-6)
    assert left.scalars_bl.shape[1] == len(OBSERVED)


def test_a_file_is_read_back_and_another_bucket_list_is_refused(tmp_path):
    config = SelectorConfig(buckets=BUCKETS, width=6, pair="a pair", rule="traversal")
    weights, path = arbitrary(config), tmp_path / "selector.safetensors"
    selector_file.save(path, config, weights)
    again, read = selector_file.load(path)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, read, weights)
    features = Features(jnp.ones((3, 6)), jnp.ones((3, len(SCALARS))))
    assert tree_selector.scores(read, features).shape == (3, len(BUCKETS))
    content = path.read_bytes()
    shorter = replace(config, buckets=BUCKETS[:3])
    fewer = {name: value[..., :3] if name.startswith("out") else value for name, value in weights.items()}
    selector_file.save(tmp_path / "fewer.safetensors", shorter, fewer)
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    other = (tmp_path / "fewer.safetensors").read_bytes()
    size_of_other = int.from_bytes(other[:8], "little")
    header["__metadata__"] = json.loads(other[8 : 8 + size_of_other])["__metadata__"]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    refused(lambda: selector_file.load(path), "shape", "expected")
    refused(lambda: selector_file.load(tmp_path / "none.safetensors"), "not found")


def refused(call, *words: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) <= 300 and all(word in message for word in words), message


def test_mistakes_are_one_line(tmp_path, trained):
    pair = random_pair()
    path = written(trained, tmp_path / "a.safetensors")
    ask = lambda model, **how: partial(model.generate, [[1, 2]], max_new_tokens=2, **HOW | {"selector": path} | how)  # noqa: E731
    refused(ask(pair), "selector for the pair", "train a selector")
    refused(ask(trained, acceptance="traversal"), "acceptance 'traversal'", "'sample-and-match'")
    refused(ask(trained, builder="best-first"), "builder 'best-first'", "'delayed'")
    refused(ask(trained, builder=None), "'delayed'")
    refused(ask(trained, trunk=1), "trunk 1", "selector")
    refused(ask(trained, trunk="auto"), "trunk 'auto'", "selector")
    refused(ask(trained, branches=3), "branches 3", "selector")
    refused(ask(trained, nodes=4), "nodes 4", "at least 7")
    refused(ask(trained, nodes="auto"), "'best-first' with nodes 'auto'")
    refused(partial(SelectorConfig, buckets=(Bucket(1, 1, 0),) * 13, width=1, pair="", rule=""), "13 buckets", "1 to 12")
    refused(partial(SelectorConfig, buckets=(Bucket(1, 0, 0),), width=1, pair="", rule=""), "bucket")
    refused(partial(SelectorConfig, buckets=(Bucket(5, 1, 1000),), width=1, pair="", rule=""), "5002 nodes", "4096")
    made = made_for(trained, "sample-and-match")
    for width in (0, 7):
        other = replace(made, width=width)
        selector_file.save(
            tmp_path / f"{width}.safetensors", other, parameters.initialize(tree_selector.specs(other), jax.random.key(0))
        )
        refused(
            ask(trained, selector=str(tmp_path / f"{width}.safetensors")), f"of width {width}", f"expected {made.width}"
        )
    for change in ({"width": "6"}, {"width": 2**40}, {"buckets": [[2, 2**31, 1]]}, {"buckets": [[1, 2]]}, {"buckets": 3}):
        text = json.dumps(vars(made) | {"buckets": [*map(astuple, BUCKETS)]} | change)
        save_file({}, tmp_path / "b.safetensors", {selector_file.KEY: text})
        refused(partial(selector_file.load, tmp_path / "b.safetensors"), "damaged description")
