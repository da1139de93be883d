"""The server, over HTTP: it answers as `generate` does, in the forms that the openai client reads."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import jsonschema
import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from servers import CHAT, CONTEXT, GREEDY, LIMIT, metric, wait_for

import treeflash_jax as tf
from treeflash_jax.core import programs
from treeflash_jax.serve.limits import MOST_BODY_BYTES

PROCESSED = {"frequency_penalty": 0.5, "logit_bias": {7: 2.0, 9: -3.0}}
LARGE = {"type": "string", "pattern": "[a-z]{300}"}  # more states than the server's


@pytest.fixture(scope="module")
def generate(tiny):
    """Answers of `generate`, one token at a time; of calls with penalties and biases, all by the same two programs."""
    return partial(tiny.generate, builder="none", batch_size=1, top_log_probs=2)


def test_concurrent_chats_are_those_of_generate_and_compile_nothing(generate, server, client):
    before = programs.compiled()
    chats = [[{"role": "user", "content": f"Sam has {i} cats. How many legs have they?"}] for i in range(16)]
    settings = {
        "seed": [*range(16)],
        "max_new_tokens": [4 + i % 9 for i in range(16)],
        "temperature": [0.0 if i % 3 else 0.8 for i in range(16)],
        "top_p": [0.9 if i % 2 else 1.0 for i in range(16)],
        "frequency_penalty": [0.5 if i % 4 == 1 else 0.0 for i in range(16)],
        "logit_bias": [{7: 2.0, 9: -3.0} if i % 5 == 2 else {} for i in range(16)],
        "stop": [["."] if i % 4 == 3 else [] for i in range(16)],
    }

    def ask(i: int) -> str:
        given = {name: values[i] for name, values in settings.items()}
        given["max_tokens"] = given.pop("max_new_tokens")
        given |= {"logit_bias": {str(token): value for token, value in given["logit_bias"].items()}}
        return client.chat.completions.create(model="tiny", messages=chats[i], **given).choices[0]

    with ThreadPoolExecutor(16) as pool:
        answers = [*pool.map(ask, range(16))]
    assert programs.compiled() == before, "settings of requests are data"
    expected = generate(chats, **settings)
    assert [answer.message.content for answer in answers] == [result.text for result in expected]
    reasons = {"stop": "stop", "length": "length"}
    assert [answer.finish_reason for answer in answers] == [reasons[result.finished] for result in expected]
    assert metric(server, "running") == metric(server, "waiting") == 0
    assert metric(server, "answers_total") >= 16 and metric(server, "tau") >= 1


def test_streams_have_the_text_and_usage_of_whole_answers(server, client):
    given = {"model": "tiny", "messages": CHAT, "max_tokens": 20, **GREEDY}
    whole = client.chat.completions.create(**given)
    ChatCompletion.model_validate(whole.model_dump(), strict=True)
    chunks = [*client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True})]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    *pieces, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == whole.choices[0].message.content
    assert [chunk.choices[0].delta.role for chunk in pieces] == ["assistant", *[None] * (len(pieces) - 1)]
    reasons = [chunk.choices[0].finish_reason for chunk in pieces]
    assert reasons == [*[None] * (len(pieces) - 1), whole.choices[0].finish_reason] and len(pieces) > 3
    assert last.choices == [] and last.usage == whole.usage and all(chunk.usage is None for chunk in pieces)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    lines = httpx.post(f"{server.url}/v1/chat/completions", json=given | {"stream": True}, timeout=600).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""] and "usage" not in lines[0]


def test_several_prompts_samples_and_log_probabilities(tiny, generate, client):
    prompts = ["Sam has 2", "There are 5 red"]
    given = {"temperature": 0.9, "seed": 7, **PROCESSED}
    whole = client.completions.create(model="tiny", prompt=prompts, n=2, max_tokens=6, logprobs=2, **given)
    Completion.model_validate(whole.model_dump(), strict=True)
    expected = generate([*map(tf.Text, prompts)], samples=2, max_new_tokens=6, **given)
    assert [choice.text for choice in whole.choices] == [result.text for result in expected]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    ids = [tiny.encode(tf.Text(prompt)) for prompt in prompts]
    assert whole.usage.prompt_tokens == sum(map(len, ids))
    by_ids = client.completions.create(model="tiny", prompt=ids, n=2, max_tokens=6, **given)
    assert [choice.text for choice in by_ids.choices] == [choice.text for choice in whole.choices]
    for choice, result in zip(whole.choices, expected, strict=True):
        assert choice.logprobs.token_logprobs == pytest.approx(result.log_probs, abs=1e-4)
        assert "".join(choice.logprobs.tokens).startswith(choice.text)
        for entry, top in zip(choice.logprobs.top_logprobs, result.top_log_probs, strict=True):
            assert [*entry.values()] == pytest.approx([log_prob for _, log_prob in top], abs=1e-4)
    chat = {"model": "tiny", "messages": CHAT, "max_tokens": 8, "logprobs": True, "top_logprobs": 3, **GREEDY}
    content = client.chat.completions.create(**chat).choices[0].logprobs.content
    for entry in content:
        assert entry.token == entry.top_logprobs[0].token and entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert len(entry.top_logprobs) == 3 and bytes(entry.bytes).decode() == entry.token
    streamed = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(**chat, stream=True)]
    assert [entry for log_probs in streamed if log_probs for entry in log_probs.content] == content


def test_prompts_that_begin_alike_are_read_once(tiny, generate, server, client):
    """The next turn of a chat, the same chat again, and another chat with the same system prompt."""
    system = {"role": "system", "content": "Sam counts red and blue cats. " * 8}
    first = [system, {"role": "user", "content": "How many cats?"}]
    reused = metric(server, "reused_tokens_total")

    def ask(chat: list) -> tuple[str, int]:
        answer = client.chat.completions.create(model="tiny", messages=chat, max_tokens=12, **GREEDY, **PROCESSED)
        assert answer.choices[0].message.content == generate([chat], max_new_tokens=12, **PROCESSED)[0].text
        assert answer.usage.prompt_tokens == len(tiny.encode(chat))
        return answer.choices[0].message.content, answer.usage.prompt_tokens_details.cached_tokens

    text, none = ask(first)
    length = len(tiny.encode(first))
    assert none == 0 and length > 64
    _, next_turn = ask([*first, {"role": "assistant", "content": text}, {"role": "user", "content": "And dogs?"}])
    assert next_turn >= length - 4
    _, again = ask(first)
    assert again == length - 1
    _, shared = ask([system, {"role": "user", "content": "Name a dog."}])
    assert 64 <= shared < length
    assert metric(server, "reused_tokens_total") == reused + next_turn + again + shared


def test_answers_follow_a_schema(server, client):
    """Beside one without a schema, and as `generate` follows it; nothing compiles."""
    schema = {"type": "object", "properties": {"age": {"enum": [3, 17]}, "tall": {"type": "boolean"}}}
    schema |= {"required": ["age", "tall"], "additionalProperties": False}
    before, given = programs.compiled(), {"model": "tiny", "messages": CHAT, "temperature": 1.0, "seed": 2}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    free = client.chat.completions.create(**given, stream=True, max_tokens=60)
    next(free)
    for body in ({"response_format": form}, {"response_format": form, "stream": True}):
        answer = client.chat.completions.create(**given, **body)
        parts = [chunk.choices[0].delta.content or "" for chunk in answer] if "stream" in body else None
        text = "".join(parts) if parts else answer.choices[0].message.content
        jsonschema.validate(json.loads(text), schema)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in free)
    assert text.startswith(client.chat.completions.create(**given, max_tokens=8).choices[0].message.content)
    assert programs.compiled() == before


@pytest.mark.parametrize("fields, pattern", [
    ({"guided_regex": "[ab]{3}"}, "[ab]{3}"), ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"guided_json": {"enum": [3]}}, "3"),
    ({"structured_outputs": {"json": {"const": "a"}}}, '"a"'), ({"structured_outputs": {"choice": ["x"]}}, "x"),
    ({"structured_outputs": {"regex": "x|y"}}, "x|y"), ({"json_schema": '{"const": 1}'}, "1"), ({"regex": "[01]"}, "[01]"),
    ({"guided_json": None, "grammar": None, "guided_decoding_backend": "x", "guided_choice": ["z"]}, "z"),
])  # fmt: skip
def test_constraints_of_other_servers_are_followed(server, fields, pattern):
    """vLLM's, llama.cpp's and SGLang's fields."""
    body = {"model": "tiny", "messages": CHAT, "max_tokens": 20} | fields
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=600).json()
    assert re.fullmatch(pattern, response["choices"][0]["message"]["content"]), response


@pytest.mark.parametrize("change, status, words", [
    ({"response_format": {"type": "json_schema"}}, 400, "got response_format.json_schema.schema None"),
    ({"response_format": {"type": "yaml"}}, 400, "response_format.type: "),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "lizard"}}}}, 400, "got response_form"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": LARGE}}}, 400, "--schema-states"),
    ({"guided_json": {"type": "lizard"}}, 400, "got guided_json '{\"type\": \"lizard\"}', which"),
    ({"guided_regex": "("}, 400, "unmatched ( at position 0"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, 400, "got guided_regex and guided_choice"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, 400, "expected one of them"),
    ({"structured_outputs": {"grammar": "root"}}, 400, "got structured_outputs.grammar 'root', expected none"),
    ({"grammar": "root ::= x"}, 400, "got grammar 'root ::= x', expected none"),
    ({"guided_grammar": "x"}, 400, "got guided_grammar 'x', expected none"),
    ({"temperature": -1}, 400, "got temperature -1.0, expected at least 0"),
    ({"temperature": "warm"}, 400, "temperature: "),
    ({"top_logprobs": 21, "logprobs": True}, 400, "got top_logprobs 21, expected 0 to 20"),
    ({"top_logprobs": -1, "logprobs": True}, 400, "got top_logprobs -1, expected 0 to 20"),
    ({"chat_template_kwargs": {"chat_template": "x", "my": 1}}, 400, "got chat_template_kwargs ['chat_template']"),
    ({"chat_template_kwargs": {"messages": []}}, 400, "got chat_template_kwargs ['messages']"),
    ({"chat_template_kwargs": {"self": 1, "tokenize": True}}, 400, "got chat_template_kwargs ['self', 'tokenize']"),
    ({"n": 129}, 400, "got n 129, expected at most 128"),
    ({"messages": []}, 400, "got an empty prompt"),
    ({"messages": [{"role": "robot", "content": "Hi"}]}, 400, "message 0: got role 'robot'"),
    ({"messages": None}, 400, "messages: "),
    ({"max_tokens": 400}, 400, f"prompt tokens + 400 new tokens, expected at most {CONTEXT} together"),
    ({"messages": [{"role": "user", "content": "cat " * 500}]}, 400, f"expected at most {CONTEXT} together"),
    ({"logit_bias": {"999999": 1}}, 400, "got logit_bias of id 999999"),
    ({"tool_choice": "required"}, 400, "got tool_choice that demands a call, but no tools"),
    ({"max_tokens": 0}, 400, "got max_tokens 0, expected at least 1"),
    ({"max_completion_tokens": 0}, 400, "got max_completion_tokens 0, expected at least 1"),
    ({"min_tokens": 3}, 400, "min_tokens"),
    ({"best_of": 2}, 400, "got best_of 2, expected none: it is not supported"),
    ({"model": "gpt"}, 404, "got model 'gpt', expected 'tiny'"),
    ({"n": LIMIT + 1}, 400, f"got number of answers {LIMIT + 1}, expected at most {LIMIT}, "),
    ({"user": "x" * MOST_BODY_BYTES}, 413, "got a body of over 4,194,304 bytes"),
])  # fmt: skip
def test_wrong_requests_are_errors_of_one_line(server, change, status, words):
    body = {"model": "tiny", "messages": CHAT, "max_tokens": 2, "no_such_field": 1}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body | change, timeout=600)
    reason = response.json()["error"]
    assert reason["param"] is None or reason["param"].split(".")[0] in {*change, "model"}
    assert response.status_code == status and words in reason["message"] and "\n" not in reason["message"]
    assert reason.keys() == {"message", "type", "param", "code"}


def test_paths_models_and_health(server, client):
    [card] = client.models.list().data
    Model.model_validate(card.model_dump())
    assert client.models.retrieve("tiny") == card
    with pytest.raises(openai.NotFoundError, match="got model 'gpt', expected 'tiny'"):
        client.models.retrieve("gpt")
    assert card.id == "tiny" and httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{server.url}/v2").json()["error"]["message"] == "Not Found"
    response = httpx.post(f"{server.url}/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert response.status_code == 400 and "JSON" in response.json()["error"]["message"]
    with pytest.raises(openai.NotFoundError, match="got model 'other', expected 'tiny'"):
        client.completions.create(model="other", prompt="x")


def test_texts_and_chats_are_tokenized(tiny, server):
    def post(path: str, **body) -> httpx.Response:
        return httpx.post(f"{server.url}{path}", json=body, timeout=600)

    ids = tiny.encode(tf.Text("Sam has 2 cats"))
    for name in ("prompt", "content"):
        assert post("/tokenize", **{name: "Sam has 2 cats"}).json() == {
            "count": len(ids),
            "max_model_len": CONTEXT,
            "tokens": ids,
        }
    assert post("/tokenize", messages=CHAT).json()["tokens"] == tiny.encode(CHAT)
    assert post("/tokenize", prompt="").json()["tokens"] == []
    assert post("/detokenize", tokens=ids).json() == {"prompt": "Sam has 2 cats", "content": "Sam has 2 cats"}
    special = tiny.encode(CHAT)  # with the template's tokens
    assert post("/detokenize", tokens=special).json()["prompt"] == tiny.tokenizer.render(CHAT, add_generation_prompt=True)
    for path, body, words in (
        ("/tokenize", {}, "got fields with text 0, expected one of prompt, content and messages"),
        ("/tokenize", {"prompt": "x", "tools": [], "messages": CHAT}, "got fields with text 2"),
        ("/tokenize", {"messages": [{"role": "robot"}]}, "got role 'robot'"),
        ("/tokenize", {"messages": CHAT, "tools": [{}]}, "got tools.0 {}"),
        ("/detokenize", {"tokens": [-1]}, "got tokens [-1], expected 0 to"),
        ("/detokenize", {"tokens": ["x"]}, "tokens.0: "),
        ("/v1/completions", {"prompt": [-1], "guided_choice": ["yes"]}, "prompt 0: got id -1, expected 0 to"),
    ):
        response = post(path, **body)
        assert response.status_code == 400 and words in response.json()["error"]["message"]
    assert post("/tokenize", prompt="x", model="gpt").status_code == 404


def test_answers_may_be_longer_than_the_model_ends_them(tiny, server, client):
    """`min_tokens` and `ignore_eos` of other servers; an end is likely by its bias."""
    bias = {str(id): 50 for id in tiny.stop_ids}
    given = {"model": "tiny", "messages": CHAT, "max_tokens": 9, "logit_bias": bias, **GREEDY}
    lengths = [
        client.chat.completions.create(**given, extra_body=more).usage.completion_tokens
        for more in ({}, {"min_tokens": 4}, {"ignore_eos": True}, {"ignore_eos": False})
    ]
    assert lengths == [1, 5, 9, 1]


def test_clients_that_leave_free_their_slots(tiny, server, client):
    """Two of three have slots, one of them does not stream; the third waits."""
    bias = {str(i): -100 for i in tiny.stop_ids}
    body = {"model": "tiny", "messages": CHAT, "max_tokens": CONTEXT - 60, "logit_bias": bias, "temperature": 0}
    before = metric(server, "answers_total")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/chat/completions", json=body | {"n": 2}, timeout=0.3)
    streams = [client.chat.completions.create(**body, stream=True) for _ in range(3)]
    next(streams[0])
    for stream in streams:
        stream.close()
    wait_for(lambda: metric(server, "running") == metric(server, "waiting") == 0)
    assert metric(server, "answers_total") < before + 3
    assert client.chat.completions.create(**body | {"max_tokens": 2}).usage.completion_tokens == 2
