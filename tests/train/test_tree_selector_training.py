"""Training of selectors: labels, the loss, a world to be learnt, and a run from prompts to answers."""

import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import prefilled, slow_unless
from refusals import refused
from toy_training import write_lines

import treeflash_jax as tf
from train import selector as stage
from train.runtime import run_config
from treeflash_jax import acceptance
from treeflash_jax.core import files
from treeflash_jax.decoding import loops
from treeflash_jax.trees.sampled import tree_selector
from treeflash_jax.trees.sampled.tree_selector import TreeSelectorConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "acceptance"))
import acceptance_cases as cases  # noqa: E402
import acceptance_oracle as oracle  # noqa: E402
import acceptance_toys as toys  # noqa: E402

TREES = (1, 2, 1), (0, 2, 2), (2, 1, 0)
SPLIT = slice(400), slice(400, 600)  # of rounds: for training, held out
CONFIG = TreeSelectorConfig(trees=TREES, rule="traversal", pair="any")


@pytest.mark.parametrize("choice", [slow_unless(choice == 0, choice) for choice in range(len(TREES))])
def test_the_expected_lengths_of_all_draws_are_what_enumeration_gives(float64, choice):
    """Every draft and every coin of trees over three tokens, in the shapes of the largest."""
    p = toys.random_verifier(0, 3, 3)
    world = cases.World(3, 2, p, toys.random_drafter(0, p, 3, 2, 3, ends=0.0))
    case, expected = cases.selected_case(TREES, choice), 0.0
    drafts = world.drafts(case)
    for chance, drafted in drafts:
        for run, (last, _) in oracle.outcomes(lambda run, tree=drafted: oracle.recursive(tree, p, run)):
            expected += chance * run.probability * (len(last) + 1)
    tree, proposal = world.build(case, world.noise(case, drafts))
    prefixes = [cases.read(tree, proposal, b, 3)[0] for b in range(len(drafts))]
    logits = jnp.asarray(np.stack([cases.node_logits(p, prefix, case.nodes) for prefix in prefixes]))
    reach_bn = acceptance.RULES["recursive"].reach_probabilities(tree, proposal, cases.target_distribution(logits))
    label = sum(chance * float(total) for (chance, _), total in zip(drafts, reach_bn.sum(1), strict=True))
    assert abs(label - expected) < 1e-12


@pytest.mark.slow
def test_a_label_is_the_mean_length_of_rounds_with_its_tree(trained):
    """Of 600 answers to one prompt, each with noise of its own: within four standard errors."""
    how = {"builder": "delayed", "acceptance": "recursive", "nodes": 5, "temperature": 1.0, "candidates": 4, "children": 4}
    plan, state = prefilled(trained, [[3, 1, 4]] * 600, **how, seed=[*range(600)])
    config = replace(CONFIG, trees=((1, 1, 0), (3, 1, 0), (0, 4, 1)))
    plan = replace(plan, shape=replace(plan.shape, selector=config))
    once_ba, expected_ba = (np.asarray(stage.label_roots(trained.weights, state, plan=plan, draws=n)[1]) for n in (1, 2))
    assert expected_ba.std() < 0.9 * once_ba.std(), "draws differ"
    means = []
    for choice in range(len(config.trees)):
        weights = trained.weights.replace(tree_selector=stage.fixed_choice_weights(config, choice))
        after = loops.decode(weights, jax.tree.map(jnp.copy, state), jnp.int32(1), plan=plan)
        length_b = np.asarray(after.accepted_bs[:, 0])
        error = np.hypot(length_b.std(), expected_ba[:, choice].std()) / 600**0.5
        assert abs(length_b.mean() - expected_ba[:, choice].mean()) < 4 * error
        means.append(length_b.mean())
    assert np.diff(np.sort(means)).min() > 0.15, "control: trees differ"


def test_the_loss_is_least_where_one_tree_dominates():
    expected_oa, base_o = jnp.asarray([[2.0, 4.0, 1.0]] * 10), jnp.full(10, 2.0)
    loss = lambda scores_oa: float(stage.compute_loss(scores_oa, expected_oa, base_o))  # noqa: E731
    sure = lambda index: jnp.zeros((10, 3)).at[:, index].set(40.0)  # noqa: E731
    np.testing.assert_allclose([loss(sure(1)), loss(sure(0))], [-np.log(2), 0.0], atol=1e-6)
    np.testing.assert_allclose(loss(sure(2)), np.log(2) + 0.25, atol=1e-6)
    mixed = sure(1).at[0].set(sure(2)[0])  # one of ten roots falls short: the worst tenth
    np.testing.assert_allclose(loss(mixed), -0.9 * np.log(2) + 0.1 * np.log(2) + 0.25, atol=1e-6)


def test_a_world_of_two_contexts_is_learnt():
    """The sum of two features decides which tree is best; the others, and the sampling setting, say nothing."""
    rng = np.random.default_rng(0)
    features_of = rng.normal(3, 2, size=(600, len(tree_selector.FEATURES))).astype(np.float32)
    is_easy_o = features_of[:, 0] + features_of[:, 2] > 6
    expected_oa = np.where(is_easy_o[:, None], [5.0, 3.0, 2.0], [1.5, 2.0, 2.6]) + rng.normal(size=(600, 3)) * 0.3
    labels = features_of, expected_oa.astype(np.float32), np.arange(600) % 2
    train, held_out = (tuple(x[part] for x in labels) for part in SPLIT)
    weights = stage.fit(train, CONFIG, 2)
    chosen_o = np.argmax(tree_selector.score_trees(weights, features_of[400:]), axis=1)
    assert np.mean(chosen_o == np.where(is_easy_o[400:], 0, 2)) > 0.85
    line = stage.describe(weights, train, held_out, 2)
    selected, best = map(float, re.findall(r"\d\.\d+", line))
    assert "200 held-out rounds" in line and selected > 1.1 * best
    assert abs(best - held_out[1].mean(axis=0).max()) < 1e-3


def test_a_folder_that_another_run_fills_is_left_alone(tmp_path):
    settings = stage.SelectorConfig(verifier="tiny", sources=(), out=str(tmp_path / "run"), trees=TREES)
    with files.held(tmp_path / "run.lock", "out"):
        refused(lambda: stage.main(settings), f"out={tmp_path}/run: another process works on it")
    assert not [*tmp_path.iterdir()]


def test_too_few_prompts_for_the_sampling_settings_are_refused(monkeypatch):
    counts = {False: 9, True: 3}
    monkeypatch.setattr(stage.respond, "collect_prompts", lambda *_, held_out: [None] * counts[held_out])
    settings = stage.SelectorConfig(verifier="tiny", sources=(), out="unused", trees=TREES)
    refused(lambda: stage.collect_prompts(settings, None), "got 3 held-out prompts, expected at least 4, one for each")
    assert [*map(len, stage.collect_prompts(replace(settings, top_p=(0.9,)), None))] == [9, 3]


@pytest.mark.slow
def test_from_prompts_to_answers(tmp_path, capsys):
    """A run that is repeated gives the same selector."""
    prompts = write_lines(
        tmp_path / "prompts.jsonl", [{"prompt": f"Add {number} and {number + 3}."} for number in range(16)]
    )
    words = [f"out={tmp_path / 'run'}", f"sources=[{{path='{prompts}', hold_out=4}}]", "trees=[[2,1,0],[0,2,1]]"]
    words += ["verifier=tiny", "drafter=tiny", "max_new_tokens=12", "draws=1", "batch=4", "acceptance=recursive"]
    train = lambda *more: stage.main(run_config.load(stage.SelectorConfig, None, [*words, *more]))  # noqa: E731
    train()
    made = tmp_path / "run" / "model" / "model.safetensors"
    weights, out = made.read_bytes(), capsys.readouterr().out
    assert "selector in" in out and "held-out rounds" in out
    train("draws=2")
    assert made.read_bytes() != weights
    train()
    assert made.read_bytes() == weights
    few = [f"sources=[{{path='{prompts}', hold_out=0}}]"]
    refused(partial(train, *few), "expected at least one that is held out; give the source hold_out=8")
    assert made.read_bytes() == weights
    how = {"builder": "delayed", "selector": made.parent, "max_new_tokens": 12}
    [result] = tf.load("tiny").generate("Add 2 and 2.", **how, temperature=1.0)
    assert result.accept_lengths and result.builder == "delayed"
