"""Log-probabilities of prompts: those of a pass over the whole text, in chunks, in batches, after sessions, on meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import TREE, make_pair, read_texts, slow_unless, with_recurrent_layers
from conftest import FEW_TOKENS, needs_8_devices
from refusals import refused

import treeflash_jax as tf
from treeflash_jax.core import programs
from treeflash_jax.decoding import loops
from treeflash_jax.models import vocab

VERIFIERS = {"attention": FEW_TOKENS, "recurrent": with_recurrent_layers(FEW_TOKENS)}
RNG = np.random.default_rng(0)
# Around a chunk's end (64 on a CPU), and more of them than a batch has slots.
PROMPTS = [RNG.integers(0, FEW_TOKENS.vocab_size, size).tolist() for size in (1, 2, 63, 64, 65, 66, 128, 129, 200, 5, 64)]


def pair(kind: str, mesh=None) -> tf.TreeFlash:
    return make_pair(VERIFIERS[kind], None, dtype=jnp.float64, mesh=mesh)


def assert_those_of_one_pass(model: tf.TreeFlash, scores: list[tf.Score], top: int, atol: float = 1e-6) -> None:
    for score in scores:
        logits_tv = read_texts(model.weights.verifier, model.verifier, jnp.array([score.ids]))[1][0]
        expected_tv = np.asarray(jax.nn.log_softmax(logits_tv))
        assert score.log_probs[0] is None and score.top_log_probs[0] is None
        np.testing.assert_allclose(
            np.array(score.log_probs[1:]), expected_tv[np.arange(len(score.ids) - 1), score.ids[1:]], atol=atol
        )
        for likeliest, expected_v in zip(score.top_log_probs[1:], expected_tv[:-1], strict=True):
            ids, values = zip(*likeliest, strict=True)
            np.testing.assert_allclose(values, np.sort(expected_v)[::-1][:top], atol=atol)
            np.testing.assert_allclose(values, expected_v[[*ids]], atol=atol)


@pytest.mark.parametrize("kind", [slow_unless(kind == "attention", kind) for kind in VERIFIERS])
def test_scores_are_those_of_one_pass_over_the_text(float64, kind):
    model, before = pair(kind), programs.compiled(loops.decode)
    scores = model.score(PROMPTS, top_log_probs=3)
    assert [score.ids for score in scores] == PROMPTS
    assert_those_of_one_pass(model, scores, 3)
    assert model.score(PROMPTS[3])[0].top_log_probs is None
    assert programs.compiled(loops.decode) == before, "nothing is decoded"


def test_logits_of_a_part_of_a_chunk_at_a_time(float64, monkeypatch):
    monkeypatch.setattr(vocab, "CHUNK_BYTES", 5 * 8 * FEW_TOKENS.vocab_size)
    programs.clear()
    model = pair("attention")
    assert_those_of_one_pass(model, model.score(PROMPTS[4:6], top_log_probs=3), 3)
    programs.clear()


@pytest.mark.slow
@needs_8_devices
@pytest.mark.parametrize("kind", VERIFIERS)
def test_scores_on_eight_devices(float64, kind):
    sharded = pair(kind, tf.make_mesh(4, 2))
    for got, expected in zip(
        sharded.score(PROMPTS, top_log_probs=3), pair(kind).score(PROMPTS, top_log_probs=3), strict=True
    ):
        np.testing.assert_allclose(got.log_probs[1:], expected.log_probs[1:], atol=1e-6)
        assert [[i for i, _ in top] for top in got.top_log_probs[1:]] == [
            [i for i, _ in top] for top in expected.top_log_probs[1:]
        ]


@pytest.mark.slow
def test_an_answer_has_the_same_log_probs_when_it_is_scored(tiny):
    prompt = tf.Text("Sam has 2 cats and 3 dogs. How many animals?")
    how = {"max_new_tokens": 100, "stop_ids": [], "top_log_probs": 3, **TREE}  # the programs of test_generate
    answer = tiny.generate(prompt, prompt_log_probs=True, **how)[0]
    [score] = tiny.score(answer.prompt_ids + answer.ids, top_log_probs=3)
    start = len(answer.prompt_ids)
    np.testing.assert_allclose(score.log_probs[start:], answer.log_probs, atol=1e-4)
    np.testing.assert_allclose(score.log_probs[1:start], answer.prompt_score.log_probs[1:], atol=1e-4)
    assert [top[0][0] for top in score.top_log_probs[start:]] == answer.ids
    plain = tiny.generate(prompt, **how)[0]
    assert (plain.ids, plain.prompt_score) == (answer.ids, None)


def test_a_session_reads_a_prompt_again_whose_log_probs_are_wanted(float64):
    model, session, text = pair("attention"), tf.Session(), RNG.integers(0, FEW_TOKENS.vocab_size, 85).tolist()
    for how, is_reused in (({}, False), ({}, True), ({"prompt_log_probs": True}, False), ({}, True)):
        *_, result = model.stream(text, session=session, max_new_tokens=4, log_probs=True, **how)
        assert (result.reused > 0) == is_reused
        if how:
            expected = model.score(text)[0].log_probs
            np.testing.assert_allclose(result.prompt_score.log_probs[1:], expected[1:], atol=1e-4)
        text = text + result.ids + [7, 8]


def test_only_scores_have_no_new_tokens(float64):
    model = pair("attention")
    refused(lambda: model.generate([5], max_new_tokens=0), "got max_new_tokens 0, expected at least 1")
    refused(lambda: model.generate([[5], [6]], max_new_tokens=[1, 0]), "expected at least 1 (0 only scores a prompt)")
    refused(lambda: model.score([[]]), "prompt")
    refused(lambda: model.score([5] * (model.verifier.max_positions + 1)), "(the verifier's context)")
    assert len(model.score([5] * model.verifier.max_positions)[0].log_probs) == model.verifier.max_positions


def test_nan_is_an_error(float64):
    model = pair("attention")
    model.weights = model.weights.replace(
        verifier=model.weights.verifier | {"norm": jnp.nan * model.weights.verifier["norm"]}
    )
    with pytest.raises(ValueError, match="got NaN as log-probability of a prompt's token"):
        model.score([5, 6])
