"""Answers in the forms of OpenAI's protocols, without a server."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import toy_tokenizers

import treeflash_jax as tf
from treeflash_jax.engine.answers.results import Chunk
from treeflash_jax.formats.answer_text import AnswerText
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.serve.delta_reader import DeltaReader
from treeflash_jax.serve.metrics import Metrics
from treeflash_jax.serve.protocols.chat_completions import ChatBody, ChatExchange
from treeflash_jax.serve.protocols.completions import CompletionBody, CompletionExchange
from treeflash_jax.serve.protocols.exchange import Served
from treeflash_jax.serve.protocols.fields import with_numbers
from treeflash_jax.serve.server_call import Usage
from treeflash_jax.serve.worker import Piece

CHAT = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "add"}}]
CALL = '<tool_call>{"name": "add"}</tool_call>'
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "string"}}}
# A tokenizer whose template has both kinds of blocks, and begins one.
INNER = SimpleNamespace(chat_template="<think> <tool_call>", decode=lambda ids, **how: "<think>")


def make_result(**fields) -> tf.Result:
    return replace(tf.Result.unanswered([5, 5, 5]), finished="stop", **fields)


class Answer:
    """One answer in the form of a protocol, whole and as a stream."""

    def __init__(self, kind: type, tokenizer: Tokenizer | None, **fields):
        body = ChatBody(messages=CHAT, **fields) if kind is ChatExchange else CompletionBody(**fields)
        self.exchange = kind(body, Served("tiny", 0))
        self.reader = DeltaReader(self.exchange.read_call(), tokenizer)

    def choice(self, result: tf.Result) -> dict:
        chunk = Chunk(ids=result.ids, text=result.text, rounds=0)
        delta = self.reader.read(Piece(0, chunk, result, True))
        return self.exchange.response([delta], Usage(3, 1, 0))["choices"][0]

    def choices(self, piece: Piece) -> list[dict]:
        return [event.data["choices"][0] for event in self.exchange.add(self.reader.read(piece))]


@pytest.mark.parametrize("kind, fields", [(ChatExchange, {}), (CompletionExchange, {"prompt": "a"})])
def test_usage_is_null_before_the_last_chunk(kind, fields):
    """As in OpenAI's API; without `include_usage`, no chunk has the field."""
    piece, usage = Piece(0, Chunk(ids=[5], text="yes", rounds=0), make_result(text="yes", ids=[5]), True), Usage(3, 1, 0)
    for options in {"include_usage": True}, None:
        answer = Answer(kind, None, stream_options=options, **fields)
        events = [*answer.exchange.begin(usage), *answer.exchange.add(answer.reader.read(piece))]
        *chunks, end = [event.data for event in (*events, *answer.exchange.end(usage))]
        assert end == "[DONE]" and len(chunks) >= 1
        if options is None:
            assert not any("usage" in chunk for chunk in chunks)
        else:
            assert all(chunk["usage"] is None for chunk in chunks[:-1]) and chunks[-1]["usage"]["total_tokens"] == 4


@pytest.mark.parametrize("fields, expected", [
    ({}, ("Hm.", None, 1)),
    ({"response_format": {"type": "text"}}, ("Hm.", None, 1)),
    ({"tool_choice": "none"}, ("Hm.", CALL, 0)),
    ({"response_format": {"type": "json_object"}}, ("Hm.", None, 1)),
    ({"response_format": SCHEMA, "tools": None}, ("Hm.", CALL, 0)),
    ({"guided_regex": "a", "tools": []}, ("Hm.", CALL, 0)),
])  # fmt: skip
def test_calls_are_read_if_the_answer_may_call(fields, expected):
    text = f"Hm.</think>{CALL}"
    choice = Answer(ChatExchange, Tokenizer(INNER), **({"tools": TOOLS} | fields)).choice(make_result(text=text))
    message = choice["message"]
    assert (message.get("reasoning_content"), message["content"], len(message.get("tool_calls", []))) == expected
    assert choice["finish_reason"] == ("tool_calls" if expected[2] else "stop")


def test_a_special_token_given_as_a_stop_string_is_the_one_that_ended_the_answer():
    tokenizer = toy_tokenizers.byte_fallback()
    word, end = toy_tokenizers.ids_of(tokenizer, "▁river", "<end>")
    answer = Answer(CompletionExchange, tokenizer, prompt="", stop=["x", "<end>"])
    for ids, expected in (([word, end], "<end>"), ([word], None), ([], None)):
        piece = Piece(0, Chunk(ids=ids, text="", rounds=0), make_result(ids=ids, text=" river" * bool(ids)), True)
        assert answer.reader.read(piece).stop == expected


def read(tokenizer: Tokenizer, form: str, prompt: list[int], ids: list[int], top: list[int] | None = None) -> dict:
    """Log-probabilities of a whole answer, and as a stream in pieces of two tokens, which are the same.

    Args:
      top: the likeliest tokens in the place of each; None for the token itself.
    """
    answer = AnswerText(tokenizer, prompt)
    answer.extend(ids)
    top_log_probs = [[(token, -1.0 - rank) for rank, token in enumerate(top or [id])] for id in ids]
    log_probs = {"log_probs": [-1.0] * len(ids), "top_log_probs": top_log_probs}
    result = make_result(ids=ids, text=answer.text, prompt_ids=prompt, **log_probs)
    kind, fields = CompletionExchange, {"prompt": "", "logprobs": 5}
    if form == "chat":
        kind, fields = ChatExchange, {"logprobs": True, "top_logprobs": 5}
    whole = Answer(kind, tokenizer, **fields).choice(result)["logprobs"]
    streamed, growing = Answer(kind, tokenizer, **fields), AnswerText(tokenizer, prompt)
    parts, sent = [], 0
    for first in range(0, len(ids), 2):
        is_last = first + 2 >= len(ids)
        growing.extend(ids[first : first + 2])
        text = growing.text if is_last else growing.certain_text
        chunk = Chunk(ids=ids[first : first + 2], text=text[sent:], rounds=0)
        so_far = replace(result, ids=ids[: first + 2], text=growing.text)
        [choice] = streamed.choices(Piece(0, chunk, so_far, is_last))
        parts.append(choice["logprobs"])
        offsets = parts[-1].get("text_offset", [])
        assert all(sent <= offset <= len(text) for offset in offsets), "offsets lie in the piece that has the token"
        sent = len(text)
    for name, value in whole.items():
        assert value is None or [item for part in parts for item in part[name]] == value
    return whole


TEXTS = ("▁river", "👩‍🚀", "▁of", "é", "s", "▁Europe")


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut within é"])
def test_log_probabilities_have_the_text_and_the_bytes_of_tokens_in_their_places(is_cut):
    tokenizer = toy_tokenizers.byte_fallback()
    ids = toy_tokenizers.ids_of(tokenizer, *TEXTS[:4])[:-1] if is_cut else toy_tokenizers.ids_of(tokenizer, *TEXTS)
    prompt = toy_tokenizers.ids_of(tokenizer, "▁river", "s")
    answer = AnswerText(tokenizer, prompt)
    answer.extend(ids)
    log_probs = read(tokenizer, "completion", prompt, ids)
    assert "".join(log_probs["tokens"]) == answer.text and answer.text.startswith(" river👩‍🚀 of")
    ends = [*log_probs["text_offset"][1:], len(answer.text)]
    for token, start, end in zip(log_probs["tokens"], log_probs["text_offset"], ends, strict=True):
        assert answer.text[start:end] == token
    entries = read(tokenizer, "chat", prompt, ids)["content"]
    assert [entry["token"] for entry in entries] == log_probs["tokens"]
    data = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert data == (" river👩‍🚀 ofé".encode()[:-1] if is_cut else answer.text.encode())


def test_likeliest_tokens_that_decode_alike_stay_apart():
    """A letter and its byte, a word with its space and without, two parts of characters, and a special token."""
    tokenizer = toy_tokenizers.byte_fallback()
    ids = tokenizer.inner.convert_tokens_to_ids
    letter, top = ids("e"), ids(["<0x65>", "e", "▁e", "<0xC3>", "<end>"])
    prompt = [ids("▁river")]
    [likeliest] = read(tokenizer, "completion", prompt, [letter, letter], top)["top_logprobs"][:1]
    byte, half = f"token_id:{top[0]}", f"token_id:{top[3]}"
    assert likeliest == {byte: -1.0, "e": -2.0, " e": -3.0, half: -4.0, "<end>": -5.0}
    [entry, _] = read(tokenizer, "chat", prompt, [letter, letter], top)["content"]
    expected = [("e", b"e"), ("e", b"e"), (" e", b" e"), ("", b"\xc3"), ("<end>", None)]
    assert [(x["token"], x["bytes"] and bytes(x["bytes"])) for x in entry["top_logprobs"]] == expected
    [part, _] = read(tokenizer, "completion", prompt, ids(["<0xC3>", "<0xA9>"]), top)["top_logprobs"]
    assert part[""] == -4.0, "the token of the answer has its text as its name, whatever that is"


def test_without_a_tokenizer_the_text_of_a_token_is_its_id():
    result = make_result(ids=[7, 8], log_probs=[-1.0, float("-inf")], top_log_probs=[[(7, -1.0)], [(9, -2.0)]])
    answer = Answer(CompletionExchange, None, prompt=[5], logprobs=1)
    log_probs = answer.choice(replace(result, text=""))["logprobs"]
    assert log_probs == {
        "tokens": ["7", "8"],
        "token_logprobs": [-1.0, -9999.0],
        "top_logprobs": [{"7": -1.0}, {"9": -2.0}],
        "text_offset": [0, 0],
    }


def test_top_k_is_off_in_the_form_of_other_clients():
    body = with_numbers(ChatBody, tf.GenerateConfig)
    assert body(messages=CHAT, top_k=-1).settings()["top_k"] == 0
    assert "top_k" not in CompletionBody(prompt="Hi").settings()


def test_the_metric_of_accepted_tokens_counts_drafted_ones():
    """One round accepted nothing, one two tokens, and the last one three; the answer's end cut off two of them."""
    metrics = Metrics()
    metrics.observe(make_result(ids=[1] * 7, accept_lengths=[1, 3, 2], cut=2), 1.0)
    labels = [{"depth": str(depth)} for depth in (1, 2, 3, 4)]
    counts = [metrics.registry.get_sample_value("treeflash_accepted_tokens_total", label) for label in labels]
    assert counts == [2, 2, 1, None]
