"""Acceptance rules through the compiled generator: answers at temperature 1 against the exact distribution, chi-square.

3,000 answers of every rule that fits a sampled tree, of all trees and kinds of drafters; 20,000 find a broken rule.
test_acceptance.py enumerates every rule exactly.
"""

import itertools
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import make_assistant, make_pair, read_texts, slow, slow_unless, with_recurrent_layers, with_shared_layers
from conftest import RANDOM_DRAFTER, RANDOM_MODEL
from scipy import special, stats

from treeflash_jax import GenerateConfig, TreeFlash
from treeflash_jax.acceptance import RULES
from treeflash_jax.acceptance.sampled.draws import reject_all
from treeflash_jax.acceptance.sampled.recursive import Recursive
from treeflash_jax.core import parameters
from treeflash_jax.decoding import loops, rounds, tree_choice
from treeflash_jax.decoding.state import DecodePlan, Sampling
from treeflash_jax.drafters import MtpDrafter, NgramDrafter
from treeflash_jax.engine.schedule.batching import Batch
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.trees import BUILDERS
from treeflash_jax.trees.sampled import tree_selector
from treeflash_jax.trees.sampled.tree_selector import TreeSelectorConfig

VOCABULARY, NEW, PROMPT = 4, 6, (1, 2, 3, 1, 2, 0, 3, 0, 1, 1, 2, 3)  # every token occurs often: n-grams match
BATCH = 20_000
EACH = 3_000  # answers of a rule that shares its program with others
MODEL = replace(RANDOM_MODEL, vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2)
RECURRENT = replace(with_recurrent_layers(MODEL), layer_types=("linear_attention",))
SHARED = with_shared_layers(MODEL)
DRAFTER = replace(RANDOM_DRAFTER, layers=MODEL, mask_token_id=3, taps=(0,), num_target_layers=1, block_size=4)
DRAFTERS = {  # with the settings under which a node has the most entries without a child
    "block": (DRAFTER, {"candidates": 3, "children": 4, "shortlist": 2}),
    "mtp": (MtpDrafter(layers=MODEL, num_depths=3, taps=(0,)), {"children": 3}),
    "ngram": (NgramDrafter(shortest=1, num_depths=3), {"children": 6}),
    "assistant": (make_assistant(SHARED, num_depths=3), {"children": 3}),
    "clusters": (make_assistant(SHARED, num_depths=3, num_clusters=2, top_clusters=1), {"children": 2}),
    "lowrank": (replace(DRAFTER, head="lowrank"), {"candidates": 2, "children": 3}),
}
TREES = {
    "one path": {"builder": "paths", "nodes": 4, "branches": 1},
    "paths": {"builder": "paths", "nodes": 7, "branches": 2},
    "delayed": {"builder": "delayed", "nodes": 6, "branches": 2, "trunk": 1},
    "without-replacement": {"builder": "without-replacement", "nodes": 7, "branches": 2},
    "skeleton": {"builder": "skeleton", "nodes": 7, "skeleton": 0.4},
}
DRAFT = {"candidates": 3, "children": 3, "ngrams": 0}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.8}
UNFILTERED = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
IN_TURN = "rules in turn"


@pytest.fixture(scope="module")
def pair() -> TreeFlash:
    return make_pair(MODEL, DRAFTER, scale=0.7)


@cache
def exact_strings(model: ModelConfig) -> np.ndarray:
    """P(first NEW tokens after the prompt), one axis a token."""
    weights = make_pair(model, None, scale=0.7).weights.verifier
    strings = np.array(list(itertools.product(range(VOCABULARY), repeat=NEW - 1)))
    ids = jnp.asarray(np.concatenate([np.broadcast_to(PROMPT, (len(strings), len(PROMPT))), strings], axis=1))
    log_p = np.asarray(jax.nn.log_softmax(read_texts(weights, model, ids)[1]), np.float64)
    log_p = log_p[:, len(PROMPT) - 1 :]
    path = sum(log_p[np.arange(len(strings)), i, strings[:, i]] for i in range(NEW - 1))
    return np.exp(path[:, None] + log_p[:, NEW - 1]).reshape((VOCABULARY,) * NEW)


@pytest.fixture(scope="module")
def exact() -> np.ndarray:
    return exact_strings(MODEL)


def asked(part: int, size: int = BATCH, new: int = NEW, **numbers: float) -> Batch:
    """The prompt `size` times, its length, and the verifier's own distribution, but for `numbers`; keys differ by part."""
    full = lambda value, dtype: jnp.full(size, value, dtype)  # noqa: E731
    tokens_bs = jnp.zeros((size, 24), jnp.int32).at[:, : len(PROMPT)].set(jnp.asarray(PROMPT))
    sampling = Sampling(
        key_b=jax.random.split(jax.random.key(part), size), limit_b=full(len(PROMPT) + new, jnp.int32),
        stop_ids_bx=jnp.full((size, 1), -1), drafter_temperature_b=full(1, jnp.float32),
        numbers={name: full(value, jnp.asarray(value).dtype) for name, value in (UNFILTERED | numbers).items()},
    )  # fmt: skip
    return Batch(tokens_bs, full(len(PROMPT), jnp.int32), sampling)


def planned(pair: TreeFlash, rule: str, settings: dict) -> DecodePlan:
    plan = pair.plan(GenerateConfig(**settings))
    return replace(plan, rule=rule, shared=replace(plan.shared, prefill_chunk=len(PROMPT)))


def answers(pair: TreeFlash, plan: DecodePlan, *, batches: int = 1, size: int = BATCH, new: int = NEW, **numbers):
    """Tokens [draws, new] and states of `batches` of `size` sequences, each with its own key; `numbers` of sampling."""
    states, rounds = [], jnp.int32(new)
    for part in range(batches):
        inputs = asked(part, size, new, **numbers)
        begun = loops.init_state(*inputs, plan=plan.shared, dtype=pair.dtype)
        state = loops.prefill_chunks(pair.weights, begun, inputs.length_b, jnp.int32(len(PROMPT)), plan=plan.shared)
        states.append(loops.decode(pair.weights, state, rounds, plan=plan))
    assert all(bool(jnp.all(state.done_b)) for state in states)
    return np.concatenate([state.tokens_bs[:, len(PROMPT) : len(PROMPT) + new] for state in states]), states


def count_rounds(states: list) -> np.ndarray:
    return np.concatenate([state.rounds_b for state in states])


def p_value(tokens: np.ndarray, exact: np.ndarray) -> float:
    """Chi-square of all strings, those expected fewer than 10 times taken together."""
    exact = exact.sum(axis=tuple(range(tokens.shape[1], exact.ndim)))
    counts = np.bincount(np.ravel_multi_index(tokens.T, exact.shape), minlength=exact.size)
    expected = exact.ravel() / exact.sum() * len(tokens)
    rare = expected < 10
    groups = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    return stats.chisquare(*groups).pvalue


def in_turn(names: list[str]) -> SimpleNamespace:
    """A rule that applies each of these to EACH sequences of the batch: one program serves all of them."""

    def accept(*arguments):
        part = lambda i: jax.tree.map(lambda x: x[i * EACH : (i + 1) * EACH], arguments)  # noqa: E731
        parts = [RULES[name].accept(*part(i)) for i, name in enumerate(names)]
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *parts)

    return SimpleNamespace(accept=accept)


PAIRS = [("block", tree) for tree in ("one path", "paths", "delayed")] + [("mtp", "skeleton"), ("ngram", "skeleton")]
PAIRS += [("lowrank", "without-replacement")]
PAIRS = [slow_unless(pair == ("ngram", "skeleton"), MODEL, *pair) for pair in PAIRS]
PAIRS += [slow(RECURRENT, "block", "skeleton")]
PAIRS += [slow(SHARED, kind, tree) for kind, tree in (("assistant", "paths"), ("clusters", "skeleton"))]


@pytest.mark.parametrize(("model", "kind", "tree"), PAIRS, ids=lambda x: getattr(x, "model_type", x))
def test_answers_have_it_with_every_drafter_tree_and_rule(monkeypatch, model, kind, tree):
    """Regression: an entry without a child that named another entry's token brought rejected tokens back."""
    drafter, settings = DRAFTERS[kind]
    pair, exact = make_pair(model, drafter, scale=0.7), exact_strings(model)
    plan = planned(pair, IN_TURN, settings | TREES[tree])
    distribution = BUILDERS[plan.builder].distribution_for(plan.shape)
    fitting = [name for name, rule in RULES.items() if distribution in rule.distributions]
    monkeypatch.setitem(RULES, IN_TURN, in_turn(fitting))
    tokens, states = answers(pair, plan, size=EACH * len(fitting), new=4)
    assert len(np.unique(count_rounds(states))) > 1
    parts = zip(fitting, np.split(tokens, len(fitting)), strict=True)
    p_values = {name: p_value(part, exact) for name, part in parts}
    assert min(p_values.values()) > 1e-4, p_values


@pytest.mark.slow
def test_answers_have_it_whatever_a_selector_chooses(pair, exact, monkeypatch):
    """Random weights, so that the trees of the next rounds depend on the lengths of the earlier ones and on the draft."""
    config = TreeSelectorConfig(trees=((3, 1, 0), (0, 2, 1), (1, 2, 2), (0, 3, 1)), rule=IN_TURN, pair="any")
    plan = planned(pair, IN_TURN, DRAFT | TREES["delayed"])
    plan = replace(plan, num_nodes=config.num_nodes, shape=replace(plan.shape, selector=config))
    weights = parameters.initialize(tree_selector.specs(config), jax.random.key(0), scale=2.0)
    chooser = TreeFlash(MODEL, pair.weights.replace(tree_selector=weights), drafter=DRAFTER)
    fitting = [name for name, rule in RULES.items() if "delayed" in rule.distributions]
    monkeypatch.setitem(RULES, IN_TURN, in_turn(fitting))
    tokens, [state] = answers(chooser, plan, size=EACH * len(fitting), new=4)
    choices_b = np.argmax(tree_selector.score_trees(weights, read_features(chooser.weights, state, plan)), axis=1)
    assert len(np.unique(choices_b)) > 1
    p_values = {name: p_value(part, exact) for name, part in zip(fitting, np.split(tokens, len(fitting)), strict=True)}
    assert min(p_values.values()) > 1e-4, p_values


@partial(jax.jit, static_argnames="plan")
def read_features(weights, state, plan):
    return tree_choice.make_features(state, rounds.draft_expander(weights, state, plan))


@pytest.fixture(scope="module")
def exact_penalized(pair) -> np.ndarray:
    """P(first 4 tokens) with PENALTIES: the prompt contains every token, so repetition scales all logits."""
    new, (repetition, presence, frequency) = 4, PENALTIES.values()
    whole = np.array([*itertools.product(range(VOCABULARY), repeat=new - 1)])
    ids = np.concatenate([np.broadcast_to(PROMPT, (len(whole), len(PROMPT))), whole], axis=1)
    logits_btv = np.asarray(read_texts(pair.weights.verifier, MODEL, jnp.asarray(ids))[1], np.float64)
    p = np.ones((1,) * 0)
    for count in range(new):
        step = VOCABULARY ** (new - 1 - count)  # strings with the same first tokens
        strings, logits = whole[::step, :count], logits_btv[::step, len(PROMPT) - 1 + count]
        logits = np.where(logits > 0, logits / repetition, logits * repetition)
        counts = (strings[..., None] == np.arange(VOCABULARY)).sum(1)
        logits -= presence * (counts > 0) + frequency * counts
        p = p[..., None] * special.softmax(logits, axis=1).reshape((VOCABULARY,) * (count + 1))
    return p


@pytest.mark.parametrize(("rule", "tree"), [("block", "one path"), slow("traversal", "skeleton")])
def test_penalized_answers_have_the_penalized_distribution(pair, exact, exact_penalized, rule, tree):
    tokens, _ = answers(pair, planned(pair, rule, DRAFT | TREES[tree]), size=5_000, new=4, **PENALTIES)
    assert p_value(tokens, exact_penalized) > 1e-3 > 1e-9 > p_value(tokens, exact)


@pytest.mark.slow
def test_a_biased_rule_is_rejected(pair, exact, monkeypatch):
    """A rejected draw is followed by a token of p, not of the residual."""

    class Biased(Recursive):
        def test_draws(self, draws):
            return reject_all(draws).chance_bx, draws.p_bnc

    monkeypatch.setitem(RULES, "biased", Biased())
    tokens, _ = answers(pair, planned(pair, "biased", DRAFT | TREES["without-replacement"]))
    assert p_value(tokens, exact) < 1e-9
