"""The Python API on the shipped pair: samples, stop strings, streams, pictures, interrupts."""

import copy
import dataclasses
import gc
import math
import multiprocessing
import pickle
import tracemalloc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_tokenizers
from answers import TREE
from refusals import refused

import treeflash_jax as tf
from treeflash_jax import trees
from treeflash_jax.core import programs, sharding
from treeflash_jax.decoding import loops
from treeflash_jax.engine import prepared_call
from treeflash_jax.engine.answers import drawn_trees
from treeflash_jax.engine.answers.result_reader import ResultReader

CHAT = [{"role": "user", "content": "Nora has 4 boxes with 6 cups in each box. She breaks 5 cups. How many cups are left?"}]


@pytest.fixture(scope="module")
def answer(tiny) -> tf.Result:
    return tiny.generate([CHAT], max_new_tokens=40, **TREE)[0]


def test_a_stop_string_ends_the_text_before_it(tiny, answer):
    stop = answer.text[12:16]
    cut = answer.text.index(stop)
    stopped = tiny.generate([CHAT], max_new_tokens=40, stop=[stop, "never said"], **TREE)[0]
    assert (stopped.text, stopped.finished) == (answer.text[:cut], "stop")
    assert stopped.ids == answer.ids[: len(stopped.ids)]
    assert stop in tiny.tokenizer.decode(stopped.ids) and stop not in tiny.tokenizer.decode(stopped.ids[:-1])
    assert stopped.accepted_before_cut == answer.accept_lengths[: len(stopped.accept_lengths)]
    assert 1 + sum(stopped.accept_lengths) == len(stopped.ids)


def test_text_ends_where_the_first_stop_string_is_complete(tiny, answer):
    """Not before one that begins earlier and would be complete later, however many tokens a dispatch decodes."""
    stops = (answer.text[9:24], answer.text[13:16])
    assert answer.text.index(stops[0]) < answer.text.index(stops[1])
    results = [tiny.generate([CHAT], max_new_tokens=40, stop=stops, **TREE)[0]]
    results += [[*tiny.stream(CHAT, max_new_tokens=40, stop=stops, rounds_per_dispatch=1, **TREE)][-1]]
    assert [result.text for result in results] == [answer.text[: answer.text.index(stops[1])]] * 2


def test_a_special_token_may_be_given_as_a_stop_string(tiny):
    usual = tiny.generate([CHAT], max_new_tokens=200, **TREE)[0]
    [*before, end] = usual.ids
    assert usual.finished == "stop"
    stopped = tiny.generate([CHAT], max_new_tokens=200, stop=tiny.tokenizer.inner.decode([end]), stop_ids=[], **TREE)[0]
    assert (stopped.ids, stopped.text, stopped.finished) == (usual.ids, usual.text, "stop")


def test_copies_of_an_answer_do_not_copy_the_model(answer):
    assert answer.draft_again is not None
    for copied in (pickle.loads(pickle.dumps(answer)), copy.deepcopy(answer), tf.Result(**dataclasses.asdict(answer))):
        assert copied == answer and copied.draft_again is None
        refused(copied.tree, "a copy of a result")


def test_a_kept_answer_and_a_session_keep_no_weights():
    model, session = tf.load("tiny"), tf.Session()
    *_, kept = model.stream(CHAT, max_new_tokens=40, session=session, **TREE)
    assert kept.tree().accepted
    array = weakref.ref(jax.tree.leaves(model.weights.verifier)[0])
    del model
    gc.collect()
    assert array() is None
    refused(kept.tree, "the model that drafted this answer is gone")


@pytest.mark.parametrize("rounds", [1, 5])
def test_a_stream_shows_the_text_and_never_takes_back(tiny, answer, rounds):
    *chunks, result = tiny.stream(CHAT, max_new_tokens=40, rounds_per_dispatch=rounds, **TREE)
    assert [i for chunk in chunks for i in chunk.ids] == result.ids == answer.ids
    assert result.accept_lengths == answer.accept_lengths and len(chunks) == 1 + -(-len(answer.accept_lengths) // rounds)
    assert "".join(chunk.text for chunk in chunks) == result.text == answer.text
    stop = answer.text[12:16]
    *chunks, result = tiny.stream(CHAT, max_new_tokens=40, stop=stop, rounds_per_dispatch=rounds, **TREE)
    assert "".join(chunk.text for chunk in chunks) == result.text == answer.text[: answer.text.index(stop)]


def test_a_chunk_converts_its_tokens_only(tiny, answer, monkeypatch):
    """Not the whole answer again, which takes milliseconds for thousands of tokens with log-probabilities."""
    sizes, to_host = [], sharding.to_host

    class Counted(np.ndarray):
        def tolist(self):
            sizes.append(self.size)
            return super().tolist()

    monkeypatch.setattr(sharding, "to_host", lambda tree: jax.tree.map(lambda x: x.view(Counted), to_host(tree)))
    *_, result = tiny.stream(CHAT, max_new_tokens=40, rounds_per_dispatch=1, top_log_probs=3, **TREE)
    numbers_per_token = 1 + 1 + 2 * 3  # id, log-probability, and those of the likeliest tokens
    assert result.ids == answer.ids
    assert sum(sizes) == numbers_per_token * len(answer.ids) + len(answer.accept_lengths)


def test_a_drawn_tree_holds_the_accepted_path(answer):
    longest = max(range(len(answer.accept_lengths)), key=answer.accept_lengths.__getitem__)
    tree = answer.tree(longest)
    assert str(answer.tree()) == str(answer.tree(answer.accept_lengths.index(max(answer.accept_lengths))))
    assert sum(tree.accepted) == answer.accept_lengths[longest] > 1
    assert all(tree.accepted[tree.parents[node]] for node in range(len(tree.labels)) if tree.accepted[node])
    drawn = str(tree)
    assert len(drawn.splitlines()) == len(tree.labels) <= 8
    assert drawn.count("●") == sum(tree.accepted)  # the legend's mark stands for the anchor's
    refused(lambda: answer.tree(len(answer.accept_lengths)), "expected 0 to")


def test_drawing_a_tree_holds_few_copies_of_the_text():
    """Regression: every node kept the text before it; here, a list of 0.8 MB."""
    nodes, text = 64, [0] * 100_000
    chain_bn = jnp.arange(nodes)[None]
    tree = trees.DraftTree(chain_bn, jnp.maximum(chain_bn - 1, 0), chain_bn, -1.0 * chain_bn, chain_bn >= 0)
    tracemalloc.start()
    drawn = drawn_trees._draw(tree, text, drafted=[1, 2], bonus=7, tokenizer=None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert drawn.labels == [str(node) for node in range(nodes)] and drawn.bonus == "bonus 7" and sum(drawn.accepted) == 3
    assert peak < 5e6


def test_texts_follow_the_prompt_with_a_tokenizer_that_strips_the_first_space(tiny, answer, monkeypatch):
    """Those of answers, of streams, of stop strings and of trees; the tokens are words here."""
    words = ["<end>" if i == answer.ids[-1] else f"▁w{i}" for i in range(tiny.verifier.vocab_size)]
    monkeypatch.setattr(tiny, "tokenizer", tokenizer := toy_tokenizers.metaspace(words))
    prompt = answer.prompt_ids
    *chunks, result = tiny.stream(prompt, max_new_tokens=40, **TREE)
    assert result.ids == answer.ids and result.text.startswith(" w")
    assert tokenizer.decode(prompt) + result.text == tokenizer.decode(prompt + result.ids)
    assert "".join(chunk.text for chunk in chunks) == result.text
    tree = result.tree()
    assert all(label.startswith("' w") for label in tree.labels) and "bonus ' w" in str(tree)
    first = words[answer.ids[0]].replace("▁", " ")
    stopped = tiny.generate([prompt], max_new_tokens=40, stop=first + " ", **TREE)[0]
    assert (stopped.text, stopped.finished) == ("", "stop"), "the stop string begins with the space"


def test_dispatches_that_finish_no_answer_copy_no_tokens(tiny, monkeypatch):
    monkeypatch.setattr(prepared_call, "ROUNDS_PER_DISPATCH", 2)
    copied, to_host = [], sharding.to_host

    def watched(tree):
        copied.append(sum(x.size for x in jax.tree.leaves(tree)))
        return to_host(tree)

    monkeypatch.setattr(sharding, "to_host", watched)
    tiny.generate([CHAT], max_new_tokens=40, **TREE)
    assert len(copied) > 9 and sum(size > 1 for size in copied) == 1


def interrupt_if(monkeypatch, holds) -> None:
    """Raises KeyboardInterrupt instead of a program's call once a condition of all calls so far holds."""
    call, calls = programs.call, []

    def interrupted(function, *args, **static):
        calls.append(function)
        if holds(calls):
            raise KeyboardInterrupt
        return call(function, *args, **static)

    monkeypatch.setattr(programs, "call", interrupted)


def test_an_interrupt_keeps_what_there_is(tiny, monkeypatch, answer):
    monkeypatch.setattr(prepared_call, "ROUNDS_PER_DISPATCH", 2)
    interrupt_if(monkeypatch, lambda calls: calls.count(loops.decode) == 3)
    results = tiny.generate([CHAT, CHAT], max_new_tokens=40, batch_size=1, **TREE)
    assert [result.finished for result in results] == ["interrupted", "interrupted"]
    assert 1 < len(results[0].ids) < 40 and (results[1].ids, results[1].text) == ([], "")
    assert results[0].ids == answer.ids[: len(results[0].ids)]
    jax.block_until_ready(tiny.weights.verifier)


def test_an_interrupt_while_answers_are_read_keeps_what_there_is(tiny, monkeypatch, answer):
    monkeypatch.setattr(prepared_call, "ROUNDS_PER_DISPATCH", 2)
    read, calls = ResultReader.read_results, []

    def interrupted(reader, slots):
        calls.extend(slots)
        if calls == [0]:
            raise KeyboardInterrupt
        return read(reader, slots)

    monkeypatch.setattr(ResultReader, "read_results", interrupted)
    results = tiny.generate([CHAT, CHAT], max_new_tokens=[2, 40], **TREE)
    assert calls == [0, 0, 1] and [result.finished for result in results] == ["length", "interrupted"]
    assert results[0].ids == answer.ids[:2] and 1 < len(results[1].ids) < 40
    assert results[1].ids == answer.ids[: len(results[1].ids)]


@pytest.mark.parametrize("batch_size", [1, 2])
def test_an_interrupt_during_prefill_keeps_earlier_answers(tiny, monkeypatch, batch_size):
    """With one place, there is no state while prompts are read; the answers before them stay."""
    prompts = [CHAT, tf.Text("3 + 4 ="), tf.Text("Tom has 3 apples.")]
    whole = tiny.generate(prompts, max_new_tokens=40, batch_size=batch_size, **TREE)
    interrupt_if(monkeypatch, lambda calls: calls[-1] is loops.prefill_chunks and loops.decode in calls)
    results = tiny.generate(prompts, max_new_tokens=40, batch_size=batch_size, **TREE)
    assert len({len(result.ids) for result in whole[:2]}) == 2, "of the first two, only one has ended"
    assert all(result.ids == full.ids[: len(result.ids)] for result, full in zip(results, whole, strict=True))
    assert (results[2].ids, results[2].finished) == ([], "interrupted")
    assert results[0].ids and (batch_size == 2 or results[0].ids == whole[0].ids)


def test_a_stream_is_one_answer(tiny):
    refused(lambda: [*tiny.stream([[5], [6]], samples=3)], "got samples 3 and 2 prompts, expected 1 of each")
    refused(
        lambda: [*tiny.stream([5], session=tf.Session(), batch_size=2)], "batch_size 2, expected 1 or none with a session"
    )


def test_a_stream_has_the_slots_of_its_batch_size(tiny, answer, monkeypatch):
    sizes, call = set(), programs.call

    def record(function, *arguments, **static):
        if function is loops.decode:
            sizes.add(arguments[1].end_b.size)
        return call(function, *arguments, **static)

    monkeypatch.setattr(programs, "call", record)
    assert [*tiny.stream(CHAT, max_new_tokens=40, batch_size=2, **TREE)][-1].ids == answer.ids and sizes == {2}


def test_an_answer_of_nan_is_an_error(tiny):
    """Whatever ids it has: without a largest logit, they are outside the vocabulary."""
    broken = copy.copy(tiny)
    verifier = tiny.weights.verifier
    broken.weights = tiny.weights.replace(verifier=verifier | {"norm": verifier["norm"] * math.nan})
    for temperature in (0.0, 1.0):
        settings = {"max_new_tokens": 2, "temperature": temperature, **TREE}
        refused(lambda settings=settings: broken.generate([[5, 6, 7]], **settings), "NaN as logits of token 0", "float32")
    refused(lambda: [*broken.stream([5, 6, 7], **settings)], "NaN as logits of token 0")


def use_in_child(model: tf.TreeFlash) -> None:
    for call in (lambda: model.generate([5, 6, 7]), lambda: tf.load("tiny")):
        with pytest.raises(RuntimeError, match="spawn"):
            call()


@pytest.mark.filterwarnings("ignore:os.fork", "ignore:This process")
def test_a_forked_process_gets_one_error_instead_of_waiting_for_ever(tiny):
    child = multiprocessing.get_context("fork").Process(target=use_in_child, args=(tiny,))
    child.start()
    child.join(60)
    child.kill()
    assert child.exitcode == 0
