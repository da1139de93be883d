"""Training selectors: labels against enumeration, the loss, a world to be learnt, and a run from prompts to answers."""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from toy_training import write_lines

from train import selector as stage_of
from train.data import roots
from train.data.records import Source
from train.runtime import run_config
from treeflash_jax import acceptance, trees
from treeflash_jax.bench import bench_records, report
from treeflash_jax.cli.commands import main
from treeflash_jax.decoding.tree_selector import SCALARS, SelectorConfig
from treeflash_jax.trees import Bucket, TreeShape

sys.path.insert(0, str(Path(__file__).parents[1] / "acceptance"))
import acceptance_cases as cases  # noqa: E402
import acceptance_oracle as oracle  # noqa: E402
import acceptance_toys as toys  # noqa: E402

BUCKETS = (Bucket(1, 2, 0), Bucket(2, 1, 1), Bucket(2, 0, 2), Bucket(3, 0, 1))


@pytest.mark.parametrize(
    ("rule", "which"), [("traversal", BUCKETS[1:2]), pytest.param("recursive", BUCKETS, marks=pytest.mark.slow)]
)
def test_a_label_is_what_enumeration_gives(float64, rule, which):
    """Every draft and every coin of buckets over three tokens, all of them in the shapes of the largest."""
    p = toys.random_verifier(0, 3, 3)
    world = cases.World(3, 2, p, toys.random_drafter(0, p, 3, 2, 3, ends=0.0))
    nodes = max(bucket.nodes for bucket in BUCKETS)
    shape = TreeShape()
    for bucket in which:
        sizes = dict(num_nodes=bucket.nodes, branches=bucket.branches, trunk=bucket.trunk)
        case = cases.Case("delayed", nodes, shape, partial(toys.draft_paths, **sizes))
        drafts, expected = world.drafts(case), 0.0
        for chance, drafted in drafts:
            for run, (last, _) in oracle.outcomes(lambda run, tree=drafted: oracle.RULES[rule](tree, p, run)):
                expected += chance * run.probability * (len(last) + 1)
        noise = jnp.asarray(world.noise(case, drafts))
        choice_b, anchor_b = jnp.full(len(drafts), BUCKETS.index(bucket)), jnp.zeros(len(drafts), jnp.int32)
        build = trees.BUILDERS["delayed"].build
        tree, proposal = build(world.table(len(drafts)), anchor_b, nodes, shape, noise, buckets=BUCKETS, choice_b=choice_b)
        prefixes = [cases.read(tree, proposal, b, 3)[0] for b in range(len(drafts))]
        logits = jnp.asarray(np.stack([cases.node_logits(world.unfiltered, prefix, nodes) for prefix in prefixes]))
        weights_bn = acceptance.RULES[rule].weights(tree, proposal, cases.target_distribution(logits))
        label = sum(chance * float(total) for (chance, _), total in zip(drafts, weights_bn.sum(1), strict=True))
        assert abs(label - expected) < 1e-9


def test_the_loss_is_least_where_one_bucket_dominates():
    expected_ra, seconds_a = jnp.asarray([[2.0, 4.0, 3.0]] * 4), jnp.asarray([1.0, 1.0, 2.0])
    base_r, how = jnp.full(4, 2.0), settings(tail_weight=3.0, tail_share=0.25)
    labels = roots.Labels(None, None, expected_ra, None, None)
    loss = lambda scores_ra: float(stage_of.compute_loss(scores_ra, labels, seconds_a, base_r, how))  # noqa: E731
    sure = lambda index: jnp.zeros((4, 3)).at[:, index].set(40.0)  # noqa: E731
    np.testing.assert_allclose([loss(sure(1)), loss(sure(0))], [-np.log(2), 0.0], atol=1e-6)
    np.testing.assert_allclose(loss(sure(2)), np.log(2 / 1.5) + 3 * 0.25**2, atol=1e-6)
    rng = np.random.default_rng(0)
    others = (scale * rng.normal(size=(4, 3)) for scale in (0.1, 1, 4) for _ in range(20))
    assert all(loss(jnp.asarray(scores_ra)) > loss(sure(1)) for scores_ra in others)
    mixed = sure(1).at[0].set(sure(2)[0])  # one of four roots falls short, and is the worst quarter
    np.testing.assert_allclose(loss(mixed), -0.75 * np.log(2) + 0.25 * np.log(2 / 1.5) + 3 * 0.25**2, atol=1e-6)


def settings(**changes) -> stage_of.SelectorStage:
    usual = {"run": "unused", "sources": (Source(path="unused"),), "buckets": ((1, 2, 0), (2, 1, 1), (2, 0, 2))}
    return stage_of.SelectorStage(**usual | {"steps": 80, "roots": 64, "learning_rate": 3e-3} | changes)


def world(count: int = 512) -> roots.Labels:
    """Two contexts, told by the sum of two hidden features alone: long paths are best in one, branches in the other."""
    rng = np.random.default_rng(0)
    hidden_rj = rng.normal(size=(count, 4)).astype(np.float32)
    is_easy_r1 = (hidden_rj[:, :1] + hidden_rj[:, 1:2]) > 0
    expected_ra = np.where(is_easy_r1, [5.0, 3.0, 2.0], [1.5, 2.0, 2.6]) + rng.normal(size=(count, 3)) * 0.3
    scalars_rs = rng.normal(size=(count, len(SCALARS))).astype(np.float32)
    numbers = np.arange(count)
    return roots.Labels(hidden_rj, scalars_rs, expected_ra.astype(np.float32), numbers % 2, numbers // 4)


def test_a_world_of_two_contexts_is_learnt():
    labels, made = world(), SelectorConfig(buckets=BUCKETS[:3], width=4, pair="", rule="traversal")
    weights = stage_of.train_selector(labels, np.ones(3), settings(), made)
    chosen_r = np.argmax(np.asarray(labels.scores(weights)), axis=1)
    best_r = np.where(labels.hidden_oj[:, 0] + labels.hidden_oj[:, 1] > 0, 0, 2)
    is_held_r = labels.prompt_o % stage_of.HELD_OUT == 0
    assert np.mean(chosen_r[is_held_r] == best_r[is_held_r]) > 0.85
    summary = stage_of.summarize(weights, labels.at(is_held_r), np.ones(3))
    assert summary["selector"]["tokens_per_second"]["ratio"]["low"] > 1.1
    assert summary["best of each setting"]["tau"]["ratio"]["value"] == 1 < summary["selector"]["tau"]["value"]["low"]
    again = stage_of.train_selector(labels, np.ones(3), settings(), made)
    jax.tree.map(np.testing.assert_array_equal, weights, again)
    dear = stage_of.train_selector(labels, np.array([20.0, 1.0, 20.0]), settings(steps=40), made)
    assert np.all(np.argmax(np.asarray(labels.scores(dear)), axis=1) == 1), "costs count"


def test_mistakes_are_one_line():
    refused(lambda: settings(costs=(1.0,)), "got 1 costs")
    words = ["run=x", "buckets=[]", "sources=[{path='x'}]"]
    refused(lambda: run_config.load(stage_of.SelectorStage, None, words), "got buckets = [], expected at least 1 item")


@pytest.mark.slow
def test_from_prompts_to_answers(tmp_path, monkeypatch):
    """Labels, training and file, then a benchmark of what was trained.

    The recording is stopped in its second batch of prompts and goes on there; whole labels are used again.
    """
    lines = [{"id": number, "turns": [f"Add {number} and {number + 3}."]} for number in range(20)]
    asked = write_lines(tmp_path / "prompts.jsonl", lines)
    how = dict(run=str(tmp_path / "run"), sources=(Source(path=str(asked)),), buckets=((1, 2, 0), (2, 0, 1), (2, 1, 1)))
    how |= dict(new_tokens=12, steps=20, costs=(1.0, 1.0, 1.2), temperatures=(1.0,), top_p=(1.0,))
    run = lambda draws=2: stage_of.main(stage_of.SelectorStage(verifier="tiny", drafter="tiny", draws=draws, **how))  # noqa: E731
    record, groups = roots.record_batch, []

    def stopped_once(*args):
        groups.append(args[-1])
        if groups == [0, 1]:
            raise KeyboardInterrupt
        return record(*args)

    monkeypatch.setattr(roots, "record_batch", stopped_once)
    with pytest.raises(KeyboardInterrupt):
        run()
    run()
    assert groups == [0, 1, 1, 2]
    prompts = [np.load(path)["prompt_o"] for path in sorted((tmp_path / "run").glob("labels-*.npz"))]
    assert len(prompts) == 3 and np.array_equal(np.unique(np.concatenate(prompts)), np.arange(20))
    made = tmp_path / "run" / "selector.safetensors"
    first = made.read_bytes()
    run()
    assert made.read_bytes() == first and len(groups) == 4
    run(draws=1)
    assert len(groups) == 7, "labels of other settings are recorded anew"
    out, systems = tmp_path / "out.jsonl", ["treeflash-4+delayed:trunk=auto", f"treeflash-4+delayed:selector={made}"]
    words = ["bench", "run", "--prompts", str(asked), "--limit", "3", "--max-new-tokens", "8", "--temperature", "1"]
    assert main([*words, "--systems", *systems, "--out", str(out)]) == 0
    summary = report.summarise(bench_records.read_records(out)[0], against=systems[0])["systems"]
    assert [system["system"] for system in summary] == systems and summary[1]["tau"] >= 1
