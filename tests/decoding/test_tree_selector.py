"""Selectors of delayed trees, with arbitrary weights: batches, one program, drawn trees, refusals.

Losslessness by enumeration: tests/acceptance. Training: tests/train.
"""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import PROMPTS, SAMPLED, SIZES, prefilled
from conftest import compilations
from refusals import refused

from treeflash_jax import GenerateConfig, TreeFlash
from treeflash_jax.bench.shapes import describe_tree
from treeflash_jax.core import parameters, programs
from treeflash_jax.decoding import rounds, tree_choice
from treeflash_jax.engine.settings.plan import digest_pair
from treeflash_jax.formats import tree_selector_folder
from treeflash_jax.trees.sampled import tree_selector
from treeflash_jax.trees.sampled.tree_selector import FEATURES, TreeSelectorConfig

TREES = (2, 1, 0), (0, 2, 1), (1, 2, 2), (0, 3, 2)
HOW = {"builder": "delayed", "stop_ids": [], "max_new_tokens": 24} | SIZES


def written(folder, model: TreeFlash, seed: int = 0, **changes) -> dict:
    """Settings of a call with a selector, written to the folder, whose choice depends on every feature."""
    config = {"trees": TREES, "rule": "recursive", "pair": digest_pair(model.verifier, model.drafter)} | changes
    config = TreeSelectorConfig(**config)
    folder.mkdir()
    weights = parameters.initialize(tree_selector.specs(config), jax.random.key(seed), scale=1.0)
    usual_f = jnp.asarray([2, 2, 1.5, 0.4, 2.5, 0.7, 0.9])
    weights |= {"matrix_0": 9 * weights["matrix_0"], "bias_0": -9 * usual_f @ weights["matrix_0"]}
    tree_selector_folder.save(folder, config, weights)
    return HOW | {"selector": folder}


@pytest.mark.slow
def test_answers_do_not_depend_on_what_is_decoded_beside_them(trained, tmp_path):
    """With recursive rejection, answers depend on every draw and coin, and so on the trees."""
    how = written(tmp_path / "a", trained)
    together = trained.generate(PROMPTS, **how, **SAMPLED)
    for number, expected in enumerate(together):
        settings = {name: values[number] for name, values in SAMPLED.items()}
        [alone] = trained.generate([PROMPTS[number]], indices=[number], batch_size=4, **how | settings)
        assert (alone.ids, alone.accept_lengths) == (expected.ids, expected.accept_lengths)


def test_a_record_says_what_a_file_of_records_says_after_it_is_read(trained, tmp_path):
    """Otherwise a benchmark could not go on."""
    plan = trained.plan(GenerateConfig(**written(tmp_path / "a", trained)))
    described = describe_tree(plan)
    assert described == json.loads(json.dumps(described)) and "trunk" not in described
    assert described["selector"]["trees"] == [list(tree) for tree in TREES]


@pytest.mark.slow
def test_drawn_trees_are_those_that_were_chosen(trained, tmp_path):
    """Rounds differ in the number of branches below the anchor; an accepted path is a path of its tree."""
    how, branches = written(tmp_path / "a", trained), set()
    for result in trained.generate(PROMPTS, **how, **SAMPLED):
        drawn = [result.tree(index) for index in range(len(result.accept_lengths))]
        branches |= {sum(parent == 0 for parent in tree.parents[1:]) for tree in drawn}
        assert [sum(tree.accepted) for tree in drawn[:-1]] == result.accept_lengths[:-1]
    assert branches == {1, 2, 3}


def test_all_choices_share_one_program(trained, tmp_path):
    """Other weights, prompts and settings of sampling compile nothing, and change answers."""
    first, second = (written(tmp_path / f"{seed}", trained, seed) for seed in range(2))
    before = trained.generate(PROMPTS, **first, temperature=1.0)
    with compilations() as compiled:
        after = trained.generate(PROMPTS, **second, temperature=1.0)
        trained.generate(PROMPTS[::-1], **second, temperature=0.7, top_p=0.9)
    assert not compiled and [result.ids for result in before] != [result.ids for result in after]


def test_features_are_those_of_earlier_rounds_and_of_the_first_level(trained):
    plan, state = prefilled(trained, PROMPTS[:2], **HOW, temperature=[0.5, 1.0], top_p=[0.9, 1.0])
    lengths = jnp.zeros_like(state.accepted_bs).at[0, :10].set(jnp.asarray([9, 9, 1, 2, 3, 4, 1, 2, 3, 5]))
    state = state.replace(accepted_bs=lengths, rounds_b=jnp.asarray([10, 0]))

    @jax.jit
    def read(weights, state):
        expander = rounds.draft_expander(weights, state, plan)
        return tree_choice.make_features(state, expander), expander.children(jnp.int32(0), expander.start(1))[1][:, 0]

    features_bf, log_p_bc = (np.asarray(x) for x in read(trained.weights, state))
    p_bc = np.exp(log_p_bc)
    assert features_bf.shape == (2, len(FEATURES))
    np.testing.assert_allclose(features_bf[:, :2], [[21 / 8, 5], [0, 0]])
    np.testing.assert_allclose(
        features_bf[:, 2:4], np.stack([-np.sum(p_bc * np.maximum(log_p_bc, -99), 1), p_bc.max(1)], axis=1), rtol=1e-5
    )
    np.testing.assert_allclose(features_bf[:, 4:], [[np.log(4), 0.5, 0.9], [np.log(3), 1.0, 1.0]], rtol=1e-6)


def test_mistakes_are_one_line(trained, tiny, tmp_path):
    how = written(tmp_path / "a", trained)
    before = len(programs.compiled())
    ask = lambda model=trained, **changes: partial(model.generate, [[1, 2]], **how | changes)  # noqa: E731
    refused(ask(builder="paths"), "got selector", "builder 'paths' does not use it", "use builder 'delayed'")
    refused(ask(builder=None), "got selector", "builder 'best-first' does not use it")
    refused(ask(trunk=1), "got trunk 1, but the selector chooses it")
    refused(ask(branches=3), "got branches 3, but the selector chooses it")
    refused(ask(nodes=5), "got nodes 5, expected 7")
    refused(ask(acceptance="traversal"), "got acceptance 'traversal', expected 'recursive', the selector's")
    refused(ask(tiny), "trained for this verifier and drafter, with this version of the library")
    refused(ask(selector="nowhere"), "got selector 'nowhere', expected a folder that `python -m train.selector` wrote")
    assert len(programs.compiled()) == before
    lossy = written(tmp_path / "b", trained, rule="multi-path-block")
    refused(partial(trained.generate, [[1, 2]], **lossy), "'multi-path-block' with a tree of distribution 'delayed'")
    (tmp_path / "b" / "model.safetensors").unlink()
    fewer = json.loads((tmp_path / "a" / "config.json").read_text()) | {"trees": TREES[:3]}
    (tmp_path / "a" / "config.json").write_text(json.dumps(fewer))
    refused(ask(), "bias_2 has shape [4], expected [3]")
    for trees, words in ([[0, 0, 1]], "a branch"), ([[0, 2, 0]], "a node"), ([[1, 1, 1]] * 13, "13"), ([[1, 1]], "of 3"):
        (tmp_path / "a" / "config.json").write_text(json.dumps(fewer | {"trees": trees}))
        refused(ask(), "trees" if words == "of 3" else "tree", words)
