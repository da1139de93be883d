"""Completions that echo their prompt, over HTTP with the openai client: texts, log-probabilities and streams."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from answers import slow_unless
from openai.types import Completion
from servers import CHAT, CONTEXT, metric

import treeflash_jax as tf
from treeflash_jax.core import programs

TEXTS = ["Sam has 2 cats and 3 dogs.", "There are 5 red"]
LONG = " ".join(TEXTS * 10)


def complete(client, prompt, **given) -> Completion:
    return client.completions.create(model="tiny", prompt=prompt, echo=True, temperature=0, **given)


def joined(chunks: list[Completion], index: int) -> tuple[str, dict | None, str | None]:
    """Returns the text, the log-probabilities and the finish reason of an answer in a stream."""
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    log_probs = [choice.logprobs.model_dump() for choice in choices if choice.logprobs is not None]
    lists = {name: [x for part in log_probs for x in part[name]] for name in log_probs[0]} if log_probs else None
    return "".join(choice.text for choice in choices), lists, choices[-1].finish_reason


# Every value of each, and every pair of the last two; the other combinations are slow.
QUICK = [(None, False, 0), (None, True, 5), (0, True, 1), (0, False, 5), (1, True, 0), (5, False, 1), (5, True, 5)]


@pytest.mark.parametrize(
    "top, as_ids, max_tokens",
    [slow_unless(case in QUICK, *case) for case in itertools.product([None, 0, 1, 5], [False, True], [0, 1, 5])],
)
def test_answers_begin_with_their_prompt(tiny, client, top, as_ids, max_tokens):
    before = programs.compiled()
    ids = [tiny.encode(tf.Text(text)) for text in TEXTS]
    given = {"max_tokens": max_tokens, "n": 2, "logprobs": top}
    whole = complete(client, ids if as_ids else TEXTS, **given)
    assert programs.compiled() == before, "settings of requests are data"
    assert whole.usage.prompt_tokens == sum(map(len, ids))
    assert whole.usage.completion_tokens == 4 * max_tokens
    scores = tiny.score([tf.Text(text) for text in TEXTS], top_log_probs=max(top or 0, 1))
    answers = tiny.generate(
        [tf.Text(text) for text in TEXTS], max_new_tokens=max(max_tokens, 1), log_probs=True, builder="none"
    )
    for choice in whole.choices:
        prompt = choice.index // 2
        text, score, answer = TEXTS[prompt], scores[prompt], answers[prompt]
        assert choice.text == text + (answer.text if max_tokens else "") and choice.finish_reason == "length"
        if top is None:
            assert choice.logprobs is None
            continue
        places = choice.logprobs
        assert "".join(places.tokens) == choice.text and len(places.tokens) == len(ids[prompt]) + max_tokens
        assert all(choice.text.startswith(token, at) for token, at in zip(places.tokens, places.text_offset, strict=True))
        assert places.token_logprobs[0] is None and places.top_logprobs[0] is None
        expected = score.log_probs[1:] + (answer.log_probs if max_tokens else [])
        assert places.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
        assert {len(entry) for entry in places.top_logprobs[1:]} == {top}
        for entry, likeliest in zip(places.top_logprobs[1:] if top else [], score.top_log_probs[1:], strict=False):
            assert max(entry.values()) == pytest.approx(likeliest[0][1], abs=1e-4)
    chunks = [*client.completions.create(model="tiny", prompt=TEXTS, echo=True, temperature=0, stream=True, **given)]
    for choice in whole.choices:
        log_probs = None if choice.logprobs is None else choice.logprobs.model_dump()
        assert joined(chunks, choice.index) == (choice.text, log_probs, choice.finish_reason)
        first = next(x.choices[0] for x in chunks if x.choices[0].index == choice.index)
        assert first.text.startswith(TEXTS[choice.index // 2]), "the first piece has the prompt"


def test_a_scored_prompt_is_read_from_its_start_each_time(tiny, client):
    """Also one whose caches are there; in the meantime, others are answered."""
    expected = tiny.generate(tf.Text(TEXTS[0]), max_new_tokens=8, builder="none")[0].text
    with ThreadPoolExecutor(8) as pool:
        echoed = [pool.submit(complete, client, LONG, max_tokens=1, logprobs=1) for _ in range(4)]
        others = [pool.submit(complete, client, TEXTS[0], max_tokens=8) for _ in range(4)]
    assert all(answer.result().choices[0].text == TEXTS[0] + expected for answer in others)
    unscored = [complete(client, LONG, max_tokens=1) for _ in range(2)]
    answers = [*(answer.result() for answer in echoed), *unscored, complete(client, LONG, max_tokens=1, logprobs=1)]
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
    assert cached[:4] == [0] * 4 and cached[5] > 0 and cached[6] == 0
    [score] = tiny.score(tf.Text(LONG))
    for answer in (*answers[:4], answers[6]):
        assert answer.choices[0].logprobs.token_logprobs[1:-1] == pytest.approx(score.log_probs[1:], abs=1e-4)


def test_special_tokens_have_the_places_where_they_are_written(tiny, client):
    name = tiny.tokenizer.inner.eos_token
    text = f"Sam{name} has"
    for prompt in (text, tiny.encode(tf.Text(text))):
        [choice] = complete(client, prompt, max_tokens=2, logprobs=0).choices
        places = choice.logprobs
        assert choice.text.startswith(text) and name in places.tokens
        assert all(choice.text.startswith(token, at) for token, at in zip(places.tokens, places.text_offset, strict=True))


def test_wrong_requests_are_refused(server, client):
    for given, words in (
        ({"prompt": "x", "max_tokens": 0}, "got max_tokens 0, expected at least 1"),
        ({"prompt": "x", "max_tokens": -1, "echo": True}, "got max_tokens -1, expected at least 0"),
        ({"prompt": [5] * (CONTEXT + 1), "max_tokens": 0, "echo": True}, "(the server's context)"),
        ({"prompt": [5] * CONTEXT, "max_tokens": 1, "echo": True, "logprobs": 1}, "(the server's context)"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", **given)
        assert words in caught.value.message
    whole = complete(client, [5] * CONTEXT, max_tokens=0, logprobs=1)
    assert len(whole.choices[0].logprobs.tokens) == CONTEXT
    chat = {"model": "tiny", "messages": CHAT, "max_tokens": 0}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=600).status_code == 400
    assert metric(server, "running") == metric(server, "waiting") == 0
