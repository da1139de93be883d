"""Processors of logits: equal to transformers' own, lossless in float64 with every draft, nothing without them."""

import dataclasses
import itertools
import operator
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import drafted_as_plain, prefilled, slow_unless
from conftest import DATA, FEW_TOKENS, RANDOM_MODEL, compilations
from drafted_pairs import TEXTS, accepted_pair
from refusals import refused

from treeflash_jax import GenerateConfig, TreeFlash, load, trees
from treeflash_jax.core import programs
from treeflash_jax.decoding import accepting, loops, processors
from treeflash_jax.decoding.state import DecodeState
from treeflash_jax.engine.call.requests import make_requests
from treeflash_jax.engine.prepared_call import PreparedCall
from treeflash_jax.engine.schedule.batching import SamplingSizes, make_batch
from treeflash_jax.trees import NO_TOKEN

STORED = np.load(DATA / "sampling" / "transformers.npz")


@pytest.mark.parametrize("depths", [0, 5])
def test_logits_are_those_of_transformers(depths):
    """The end of each answer is a node's path; the rest is committed."""
    names = "repetition_penalty min_new_tokens temperature top_k top_p min_p".split()
    settings = {name: STORED[name].tolist() for name in names}
    biases = map(zip, STORED["bias_ids"].tolist(), STORED["bias"].tolist())
    settings |= {"logit_bias": [*map(dict, biases)], "stop_ids": STORED["stops"].tolist(), "max_new_tokens": 30}
    texts = zip(*(STORED[name].tolist() for name in ("ids", "prompt", "count")), strict=True)
    parts = [(ids[:prompt], ids[prompt : prompt + count]) for ids, prompt, count in texts]
    config = GenerateConfig(**settings)
    requests = make_requests([prompt for prompt, _ in parts], config, RANDOM_MODEL)
    batch = make_batch(requests, SamplingSizes.fit(requests), capacity=32, dtype=jnp.float32)
    state = DecodeState(batch.tokens_bs, batch.length_b, *[None] * 7, batch.sampling)
    paths = np.full((len(parts), 1, depths), NO_TOKEN)
    answers = np.zeros((len(parts), 12), np.int32)
    kept = []
    for number, (_, answer) in enumerate(parts):
        cut = max(0, len(answer) - depths)
        paths[number, 0, : len(answer) - cut], answers[number, :cut] = answer[cut:], answer[:cut]
        kept.append(cut)

    @jax.jit
    def read(state, kept_b, logits_bnv):
        state = processors.init_processors(state, logits_bnv.shape[2])
        state = processors.count_tokens(state.replace(end_b=state.end_b + kept_b), answers, kept_b)
        processed_bnv = processors.process(logits_bnv, state, jnp.asarray(paths))
        every_id = jnp.broadcast_to(jnp.arange(logits_bnv.shape[2]), logits_bnv.shape)
        return processed_bnv, jnp.exp(accepting.make_target(processed_bnv, batch.sampling).gather(every_id))

    processed, probabilities = read(state, np.array(kept, np.int32), STORED["logits"][:, None])
    np.testing.assert_allclose(processed[:, 0], STORED["processed"], atol=1e-5)
    np.testing.assert_allclose(probabilities[:, 0], STORED["probabilities"], atol=1e-5)


ENDS = {"min_new_tokens": [5, 25, 0], "stop_ids": [[2, 5], [1, 3, 7], [4]]}
PROCESSED = ENDS | {
    "repetition_penalty": 1.2, "presence_penalty": [2.0, -1.0, 0.0], "frequency_penalty": [0.3, 0.0, 0.6],
    "logit_bias": {2: 1.0}, "min_p": [0.3, 0.0, 0.05],
}  # fmt: skip
SAMPLED = {"temperature": [1.0, 0.7, 1.3], "top_k": [0, 0, 9], "seed": 3}
DRAFT = {"nodes": 8, "children": 6}
CASES = [("language_model", "qwen3"), ("ngram", "qwen3"), ("frequent", "qwen3_5")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "verifier"), CASES)
def test_drafted_output_is_one_token_output(float64, kind, verifier):
    """Greedy and sampled; the third text joins the batch later."""
    pair, accepted = accepted_pair(kind, verifier), 0
    draft = DRAFT | ({"candidates": 6} if kind == "frequent" else {})
    for settings in ({}, SAMPLED):
        settings = {"max_new_tokens": 30} | settings
        plain = pair.generate(TEXTS, builder="none", batch_size=3, **settings | PROCESSED)
        results = drafted_as_plain(pair, TEXTS, draft, plain=plain, batch_size=2, **settings | PROCESSED)
        accepted += sum(length - 1 for result in results for length in result.accept_lengths)
        unprocessed = pair.generate(TEXTS, builder="none", batch_size=3, stop_ids=(), **settings)
        assert [result.ids for result in results] != [result.ids for result in unprocessed]
        assert all(map(operator.ge, (len(result.ids) for result in results), PROCESSED["min_new_tokens"]))
    assert accepted


@pytest.mark.slow
def test_a_history_without_ancestors_fails_the_same_test(float64, monkeypatch):
    """Control: nodes penalised for the committed text alone."""
    settings = {"max_new_tokens": 30, "stop_ids": (), "batch_size": 3, "presence_penalty": 2.0}
    drafted_as_plain(accepted_pair("language_model"), TEXTS, DRAFT, **settings)
    whole = trees.path_tokens
    monkeypatch.setattr(trees, "path_tokens", lambda tree, depths: jnp.full_like(whole(tree, depths), NO_TOKEN))
    programs.clear()
    with pytest.raises(AssertionError):
        drafted_as_plain(accepted_pair("language_model"), TEXTS, DRAFT, **settings)
    programs.clear()


def test_programs_without_processors_contain_nothing_of_them(float64, monkeypatch):
    pair = accepted_pair("language_model")

    def lower(**settings) -> None:
        plan, state = prefilled(pair, TEXTS, **DRAFT, **settings)
        assert (state.counts is not None) == ("presence_penalty" in settings)
        loops.decode.lower(pair.weights, state, jnp.int32(1), plan=plan)

    monkeypatch.setattr(processors, "process", lambda *_: pytest.fail("processors are traced"))
    lower(max_new_tokens=40)
    with pytest.raises(pytest.fail.Exception):
        lower(max_new_tokens=40, presence_penalty=0.5)


# Processors of users: the examples of the page on generating.


@pytest.fixture(scope="module")
def small(short) -> TreeFlash:
    return load(verifier=short, drafter="ngram")


PAGE = Path(loops.__file__).parents[1] / "engine" / "README.md"
EXAMPLES = [code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL) if "logits_bnv" in code]


def run_example(number: int, **names) -> dict:
    names = {"jax": jax, "jnp": jnp, "dataclasses": dataclasses} | names
    exec(EXAMPLES[number], names)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["language_model", "frequent"])
def test_answers_of_an_automaton_are_those_of_one_token_decoding(float64, kind):
    """Every state of a random table admits four or more tokens of twelve; the third text joins the batch later."""
    pair, rng = accepted_pair(kind), np.random.default_rng(0)
    next_sv = rng.integers(0, 5, (5, FEW_TOKENS.vocab_size))
    next_sv[rng.random(next_sv.shape) < 0.4] = -1
    assert (next_sv >= 0).sum(1).min() >= 4
    processor = run_example(1)["Automaton"](jnp.asarray(next_sv, jnp.int32))
    draft = DRAFT | ({"candidates": 6} if kind == "frequent" else {})
    accepted = 0
    for settings in ({}, SAMPLED):
        settings = {"max_new_tokens": 30, "stop_ids": (), "presence_penalty": 0.5, "processor": processor} | settings
        plain = pair.generate(TEXTS, builder="none", batch_size=3, **settings)
        results = drafted_as_plain(pair, TEXTS, draft, plain=plain, batch_size=2, **settings)
        accepted += sum(length - 1 for result in results for length in result.accept_lengths)
        for result in results:
            state = 0
            for token in result.ids:
                state = next_sv[state, token]
                assert state >= 0
    assert accepted
    other = dataclasses.replace(processor, next_sv=jnp.minimum(processor.next_sv, 0))
    with compilations() as compiled:
        pair.generate(TEXTS, **draft, batch_size=2, **settings | {"processor": other})
    assert "jit(decode)" not in compiled, "a table is an argument"


def test_a_function_sees_the_last_token_of_every_node(float64, small):
    """The function of the page's example, which runs as it is: no even token after an even one."""
    forbid = run_example(0, model=small)["forbid_after_digits"]
    is_even_v = np.arange(FEW_TOKENS.vocab_size) % 2 == 0
    settings = {"max_new_tokens": 30, "stop_ids": (), "batch_size": 3}
    settings |= {"processor": jax.tree_util.Partial(forbid, is_even_v, is_even_v)}
    pair = accepted_pair("language_model")
    results = pair.generate(TEXTS, **DRAFT, **settings)
    texts = [[prompt[-1], *result.ids] for prompt, result in zip(TEXTS, results, strict=True)]
    assert not any(a % 2 == b % 2 == 0 for text in texts for a, b in itertools.pairwise(text))
    assert max(length for result in results for length in result.accept_lengths) > 1
    refused(lambda: pair.generate(TEXTS, processor=3), "got processor 3, expected")

    class Counter:
        def advance(self, state, tokens): ...

        def __call__(self, logits_bnv, history): ...

    refused(lambda: pair.generate(TEXTS, processor=Counter()), "expected a pytree (jax.tree_util.register_dataclass)")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stateful:
    table: jax.Array

    def advance(self, tokens): ...

    def __call__(self, logits_bnv, history): ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Started(Stateful):
    def start(self, tokens_bs, length_b): ...


@pytest.mark.parametrize(("processor", "words"), [
    (lambda logits: logits, "processor <lambda>(logits), expected one that takes (logits_bnv, history)"),
    (jax.jit(lambda a, b, c: a), "processor <lambda>(a, b, c), expected one that takes (logits_bnv, history)"),
    (jax.tree_util.Partial(lambda table, logits: logits, jnp.ones(3)), "(logits), expected one that takes (logits_bnv, h"),
    (Stateful(jnp.ones(3)), "processor 'Stateful', expected one with start(tokens_bs, length_b), since it has advance"),
    (Started(jnp.ones(3)), "processor Started.advance(tokens), expected one that takes (state, tokens)"),
])  # fmt: skip
def test_a_processor_that_takes_other_arguments_is_refused_at_once(small, monkeypatch, processor, words):
    monkeypatch.setattr(PreparedCall, "schedule", lambda *_: pytest.fail("the call has begun"))
    refused(lambda: small.generate([5, 6, 7], processor=processor), words)


def allow_few(logits_bnv, history):
    """Allows nothing to the sequence that begins with token 4, once it has seven tokens."""
    length_bn = history.length_b[:, None] + jnp.sum(history.path_bni != NO_TOKEN, axis=2)
    is_blocked_bn = (history.tokens_bs[:, :1] == 4) & (length_bn >= 7)
    return jnp.where(is_blocked_bn[..., None], -jnp.inf, logits_bnv)


ENDED = [{"builder": "none"}, DRAFT]
ENDED += [{"temperature": 1.0, "builder": builder, "nodes": 8} for builder in ("walk", "skeleton")]


@pytest.mark.parametrize("how", [slow_unless(how == DRAFT, how) for how in ENDED])
def test_a_processor_that_allows_nothing_ends_that_answer_alone(small, how, caplog):
    settings, prompts = {"max_new_tokens": 12, "stop_ids": (), "batch_size": 3} | how, [[5, 6, 7], [4, 6, 7], [8, 9]]
    results = [small.generate(prompts, processor=allow_few, **settings) for _ in range(2)][1]
    warning, again = [message for message in caplog.messages if "processor" in message]
    assert again == warning and warning.startswith("prompt 1: processor allow_few left no logit above -inf for token 4")
    plain = small.generate(prompts, **settings)
    assert [result.finished for result in results] == ["length", "blocked", "length"]
    assert [results[i].ids for i in (0, 2)] == [plain[i].ids for i in (0, 2)]
    blocked = results[1]
    assert "builder" in how or max(plain[1].accept_lengths) > 2, "control: the answer is blocked inside an accepted path"
    assert blocked.ids == plain[1].ids[:4] and blocked.text == small.tokenizer.decode(blocked.ids)
    assert 1 + sum(blocked.accept_lengths) == 4


def test_a_processor_that_allows_nothing_at_first_leaves_an_empty_answer(small, caplog):
    settings = {"max_new_tokens": 12, "stop_ids": (), "batch_size": 3} | DRAFT  # programs of the test above
    *chunks, result = small.stream([4, 6, 7, 8, 9, 10, 11], processor=allow_few, **settings)
    assert "token 0" in caplog.text
    assert (result.ids, result.text, result.accept_lengths, result.finished) == ([], "", [], "blocked")
    assert [chunk.text for chunk in chunks] == [""]


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (lambda logits_bnv: None, "got NoneType from processor wrong"),
        (lambda logits_bnv: logits_bnv > 0, "got bool (1, 1, 2048) from processor wrong"),
        (lambda logits_bnv: logits_bnv[:, 0], "got float32 (1, 2048) from processor wrong"),
    ],
)
def test_a_processor_that_returns_no_logits_is_refused_in_one_line(small, returned, got):
    def wrong(logits_bnv, history):
        return returned(logits_bnv)

    call = lambda: small.generate([5, 6, 7], processor=wrong, builder="none")  # noqa: E731
    refused(call, got, "expected logits (1, 1, 2048) of a floating dtype")
