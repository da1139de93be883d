"""Decoding with an EAGLE-3 drafter: the answers are those of one-token decoding, in one program that copies no cache.

The vocabulary is small, so that even random weights draft tokens that are kept, and answers stop inside rounds.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import cut_by_stops, drafted_as_plain, make_pair, prefilled, refused
from conftest import DATA, needs_8_devices

import treeflash_jax as tf
from treeflash_jax.core import parameters
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.state import Weights
from treeflash_jax.drafters import eagle3
from treeflash_jax.formats import models
from treeflash_jax.models import verifier
from treeflash_jax.models.config import ModelConfig

VERIFIER = ModelConfig(
    vocab_size=12, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4,
    max_positions=512,
)  # fmt: skip
DRAFTER = eagle3.EagleConfig(
    layers=replace(VERIFIER, num_layers=1, num_kv_heads=1), target_hidden_size=16, draft_vocab_size=10, norm_output=True,
    taps=(0, 0, 1), num_depths=3,
).fitted(VERIFIER)  # fmt: skip
PROMPTS = [[3, 4, 5, 6, 7], [8], [2, 9, 4, 4, 1, 0, 3, 5, 7, 6, 2]]


def pair(dtype=jnp.float64, mesh=None) -> tf.TreeFlash:
    made = make_pair(VERIFIER, DRAFTER, dtype=dtype, scale=0.5, mesh=mesh)
    made.weights.drafter["offsets"] += jnp.asarray([0] * 4 + [1] * 3 + [2] * 3, jnp.int32)  # 4 and 8 cannot be drafted
    return made


TREE = {"nodes": 12, "lanes": 4, "children": 6}
DRAFTS = {
    "best-first": TREE,
    "all lanes": {"nodes": 16, "lanes": 15},
    "best-first, few lanes": {"nodes": 8, "lanes": 2, "children": 3},
    "one node": {"nodes": 1},
    "many nodes": {"nodes": 64, "depths": 5},
    "walk": {"builder": "walk", "depths": 4},
}
QUICK = ("best-first",)
SAMPLED = {
    "paths": {"builder": "paths", "nodes": 9},
    "without replacement": {"builder": "without-replacement", "nodes": 9},
    "hybrid": {"builder": "hybrid", "nodes": 9},
}


@pytest.fixture(scope="module")
def wide():
    with jax.enable_x64(True):
        yield pair()


@pytest.mark.filterwarnings("ignore:tau is")
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in DRAFTS])
def test_answers_are_those_of_one_token_decoding(wide, name):
    """In float64, greedy and sampled with the same seed, three lengths together, with stops inside rounds."""
    kept = stopped = 0
    for temperature in (0.0, 0.7, [0.0, 0.7, 1.3]):
        for seed in range(3):
            how = {"max_new_tokens": 30 - seed, "temperature": temperature, "seed": seed}
            how["stop_ids"] = [] if seed == 0 else [seed + 4]
            results = drafted_as_plain(wide, PROMPTS, {"children": 6} | DRAFTS[name], **how)
            kept += sum(sum(result.accept_lengths) - len(result.accept_lengths) for result in results)
            stopped += cut_by_stops(results)
    assert kept > 20 or name == "one node"
    assert stopped or name in ("one node", "two nodes", "walk")


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_trees_give_the_greedy_answer(wide, name):
    drafted_as_plain(wide, PROMPTS, {"children": 6} | SAMPLED[name], max_new_tokens=20)
    assert wide.generate(PROMPTS, max_new_tokens=20, children=6, temperature=0.7, **SAMPLED[name])


def oracle(lookahead: float) -> tf.TreeFlash:
    """Returns a verifier that continues token t with t + 1, by far the likeliest, and an EAGLE-3 drafter that agrees.

    The verifier's layers add nothing. Queries and keys of the drafter's layer are equal at all positions, and so large that
    after the rotation every position attends to itself only; its values replace the carried state by the embedded token.
    Embeddings consist of +1 and -1, which normalisation does not change.

    Args:
      lookahead: share of the carried state that is left; 0 makes the drafter exact.
    """
    with jax.enable_x64(True):
        sizes, d = replace(VERIFIER, num_kv_heads=4), VERIFIER.hidden_size
        config = eagle3.EagleConfig(
            layers=replace(sizes, num_layers=1), target_hidden_size=d, draft_vocab_size=12, num_depths=5
        )
        config = replace(config, taps=(0, 0, 1)).fitted(sizes)
        specs = verifier.specs(sizes), eagle3.specs(config)
        weights, drafter = (parameters.initialize(spec, jax.random.key(5), jnp.float64, scale=0.5) for spec in specs)
        weights["embed"] = jax.random.rademacher(jax.random.key(6), (12, d), jnp.float64).at[:, 0].set(1)
        [group] = weights["groups"]
        group[:] = [layer | {name: jnp.zeros_like(layer[name]) for name in ("o", "down")} for layer in group]
        layer = drafter["layer"]
        for name in ("q", "k"):
            layer[name] = jnp.zeros_like(layer[name]).at[0, :, :2].set(1)
            layer[f"{name}_norm"] = jnp.full_like(layer[f"{name}_norm"], 40)
        layer["v"] = jnp.concatenate([jnp.eye(d), (lookahead - 1) * jnp.eye(d)]).reshape(layer["v"].shape)
        layer["o"] = jnp.eye(d).reshape(layer["o"].shape)
        weights["unembed"] = jnp.roll(weights["embed"], 1, axis=0)
        drafter |= {"fc": jnp.zeros_like(drafter["fc"]), "unembed": weights["unembed"]}
        layer["down"] = jnp.zeros_like(layer["down"])
        return tf.TreeFlash(sizes, Weights(weights, drafter), drafter=config, stop_ids=())


@pytest.mark.parametrize(
    "how", [{"nodes": 17}, pytest.param({"builder": "walk", "depths": 3}, marks=pytest.mark.slow)], ids=str
)
def test_a_drafter_with_the_verifiers_distribution_is_accepted_to_full_depth(how):
    with jax.enable_x64(True):
        how = {"max_new_tokens": 40, "drafter_temperature": 0.02, "children": 4} | how
        [result] = oracle(0.0).generate([[3, 4, 5]], **how)
        assert result.ids == [(6 + i) % 12 for i in range(40)]
        assert {*result.accepted_before_cut[:-1]} == {how.get("depths", 5) + 1}
        [other] = oracle(2.0).generate([[3, 4, 5]], **how)
        assert other.ids == result.ids and other.tau < result.tau, "control: another law is not"


def test_the_drafter_is_shown_every_token_once(wide):
    """After a few rounds its context has the length of the verifier's, and equals that of one prefill of the text."""
    plan, state = prefilled(wide, PROMPTS, **TREE)
    state = loops.decode(wide.weights, state, jnp.int32(4), plan=plan)
    end_b, drafter = np.asarray(state.end_b), state.drafter
    np.testing.assert_array_equal(drafter.context.length_b, end_b - 1)
    assert (end_b > [len(prompt) + 4 for prompt in PROMPTS]).any()
    size = int(end_b.max()) - 1

    @jax.jit
    def at_once(weights, tokens_bt, count_b):
        out = verifier.forward(
            weights.verifier, VERIFIER, tokens_bt[:, :-1], jnp.broadcast_to(jnp.arange(size), (3, size)),
            verifier.causal_mask(3, size), taps=DRAFTER.taps,
        )  # fmt: skip
        nothing, tables = eagle3.init(DRAFTER, 3, 256, jnp.float64), weights.verifier
        return eagle3.extend(
            weights.drafter, tables, DRAFTER, nothing, out.features_btj, tokens_bt[:, 1:], count_b, attention="xla"
        )

    whole = at_once(wide.weights, state.tokens_bs[:, : size + 1], jnp.asarray(end_b - 1))
    np.testing.assert_allclose(drafter.hidden_bd, whole.hidden_bd, atol=1e-10)
    for x, y in zip(jax.tree.leaves(drafter.context.groups), jax.tree.leaves(whole.context.groups), strict=True):
        for b, end in enumerate(end_b):
            np.testing.assert_allclose(x[b, :, : end - 1], y[b, :, : end - 1], atol=1e-10)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"candidates": 4}, "candidates"), ({"shortlist": 4}, "shortlist"), ({"head": "mlp"}, "head"),
        ({"nodes": 16, "lanes": 16, "children": 4}, "lanes 16, expected at most 15"), ({"lanes": 0}, "lanes"),
        ({"children": 11}, "children 11"),
    ],
)  # fmt: skip
def test_options_that_are_refused(settings, words):
    with refused(words):
        pair(jnp.float32).generate(PROMPTS, **settings)


def test_a_folder_loads_with_its_verifier(tmp_path):
    """By `load`, whose layer ids follow from the verifier; a misfit is refused before any weight is read."""
    form = DATA / "eagle3" / "eagle"
    sizes = replace(VERIFIER, vocab_size=48, hidden_size=12, num_layers=6)
    models.save_verifier(tmp_path / "verifier", sizes, parameters.initialize(verifier.specs(sizes), jax.random.key(0)))
    model = tf.load(verifier=tmp_path / "verifier", drafter=form, dtype="float32")
    assert model.drafter.taps == (1, 2, 2) and model.weights.drafter["offsets"].dtype == jnp.int32
    with pytest.raises(ValueError, match="hidden size"):
        tf.load("tiny", drafter=form)


@needs_8_devices
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:tau is")
def test_a_mesh_changes_no_answer():
    """Batch, heads and both vocabularies split; the drafter's one key/value head is on every device."""
    prompts, how = [*PROMPTS, [5]], {"max_new_tokens": 20, "temperature": [0.0, 0.7, 0.0, 1.3]}
    plain = pair(jnp.float32).generate(prompts, builder="none", **how)
    drafted = drafted_as_plain(pair(jnp.float32, tf.make_mesh(2, 2)), prompts, TREE, **how)
    assert [result.ids for result in drafted] == [result.ids for result in plain]
    assert sum(len(result.accept_lengths) for result in drafted) < sum(len(result.ids) - 1 for result in plain)
