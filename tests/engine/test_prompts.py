"""Prompts in every form that `generate` takes, and one-line errors for anything else."""

import copy
import re
import shutil
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from model_files import change_json
from refusals import refused
from tokenizers.processors import TemplateProcessing

import treeflash_jax as tf
from treeflash_jax.engine.call import prompts
from treeflash_jax.engine.settings.pairs import locate
from treeflash_jax.formats.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "Name a colour."}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Name a"}, {"type": "text", "text": "colour."}]}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]


@pytest.mark.parametrize("given, expected", [
    ("hello", ["hello"]), (["hello", CHAT, [1, 2]], ["hello", CHAT, [1, 2]]), (CHAT, [CHAT]), ((*CHAT,), [CHAT]),
    ([CHAT], [CHAT]), ([1, 2], [[1, 2]]), (jnp.array([1, 2]), [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]]),
    (iter(["a", "b"]), ["a", "b"]), ([], []),
])  # fmt: skip
def test_one_prompt_or_many(given, expected):
    assert prompts.as_list(given) == expected


def test_ids_become_plain_numbers():
    for ids in ((1, 2), np.array([1, 2]), jnp.array([1, 2]), list(np.array([1, 2], np.int64)), list(jnp.array([1, 2]))):
        encoded = prompts.encode(ids, None)
        assert encoded == [1, 2] and all(type(i) is int for i in encoded)


def test_long_records_get_short_messages():
    for record in ({"k" * 10**5: 1}, {f"k{i}": 1 for i in range(5000)}, {"turns": "x" * 10**6}):
        refused(lambda record=record: prompts.read_messages(record), "got ", ", expected ")


def test_text_parts_are_the_lines_of_a_message(tiny):
    joined = [{"role": "user", "content": "Name a\ncolour."}]
    assert tiny.encode(PARTS) == tiny.encode(joined) != tiny.encode(CHAT)
    assert prompts.plain_messages([{**PARTS[0], "name": "Ann"}]) == [{**joined[0], "name": "Ann"}]


@pytest.mark.parametrize("prompt, words", [
    (3, "got int as a prompt"),
    (np.array(3), "got ndarray as a prompt"),
    (np.array("hi"), "got ndarray as a prompt"),
    (b"hello", "got bytes as a prompt"),
    ([CHAT], "got list among the token ids"),
    ([1, 2.5], "got float among the token ids"),
    ([], "empty prompt"),
    ([{"role": "user"}], "message 0: got no content"),
    ([*CHAT, {"role": "assistant", "content": None}], "message 1: got no content"),
    ([{"role": "user", "content": 3}], "message 0: got content of type int"),
    ([{"content": "hello"}], "message 0: got role None, expected one of system,"),
    ([{"role": "gpt", "content": "x"}], "did you mean assistant?"),
    ([*CHAT, "hello"], "message 1: got str"),
    (IMAGE, "message 0: got a part of type 'image_url'"),
    ([{"role": "user", "content": [{"type": "text"}]}], "message 0: got a text part without text"),
    ([{"role": "user", "content": ["hello"]}], "message 0: got a part of type 'str'"),
])  # fmt: skip
def test_what_is_no_prompt_is_one_line(tiny, prompt, words):
    refused(lambda: tiny.encode(prompt), words)


def test_a_string_is_a_message_if_there_is_a_template_and_a_text_is_continued_as_it_is(tiny):
    text = CHAT[0]["content"]
    assert tiny.encode(text) == tiny.encode(CHAT)
    assert tiny.encode(tf.Text(text)) == tiny.tokenizer.encode(text)
    refused(lambda: tiny.generate(text, raw=True), "raw is not supported: text to be continued is given as tf.Text")
    inner = copy.deepcopy(tiny.tokenizer.inner)
    inner.chat_template = None
    assert prompts.encode(text, Tokenizer(inner)) == tiny.tokenizer.encode(text)
    refused(lambda: prompts.encode(CHAT, Tokenizer(inner)), "no chat template; give text or ids")
    inner.chat_template = "{{ raise_exception('roles must\\nalternate') }}"
    refused(lambda: prompts.encode(CHAT, Tokenizer(inner)), "template refuses: roles must alternate")


# Calls and results of tools, as the templates of Qwen3 and Llama 3.1 read them.
TOOLS_TEMPLATE = """{%- for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}
{%- for message in messages %}<{{ message.role }}>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments | tojson }}){% endfor %}
{%- if not loop.last or add_generation_prompt or message.role != 'assistant' %};{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% if brief %}In short: {% endif %}{% endif %}"""
CALLS = [{"id": "a", "type": "function", "function": {"name": "add", "arguments": {"x": 1, "y": 2}}}]
AGENT = [*CHAT, {"role": "assistant", "content": None, "tool_calls": CALLS}, {"role": "tool", "content": "3"}]


def add(x: int, y: int) -> int:
    """Adds numbers.

    Args:
      x: first number.
      y: second number.
    """
    return x + y


def test_chats_of_agents_are_what_their_template_makes_of_them(tiny):
    inner = copy.deepcopy(tiny.tokenizer.inner)
    inner.chat_template = TOOLS_TEMPLATE
    tokenizer = Tokenizer(inner)
    begun = [*CHAT, {"role": "assistant", "content": "It is"}]
    for prompt, expected in {
        "plain": (AGENT, '<user>Name a colour.;<assistant>(add {"x": 1, "y": 2});<tool>3;<assistant>'),
        "tools": (tf.Chat(CHAT, tools=[add]), "[add]<user>Name a colour.;<assistant>"),
        "begun": (tf.Chat(begun, continued=True), "<user>Name a colour.;<assistant>It is"),
        "template": (tf.Chat(CHAT, template={"brief": True}), "<user>Name a colour.;<assistant>In short: "),
    }.values():
        assert tokenizer.decode(prompts.encode(prompt, tokenizer)) == expected
    assert prompts.as_list(tf.Chat(CHAT)) == [tf.Chat(CHAT)] and tiny.encode(tf.Chat(CHAT)) == tiny.encode(CHAT)
    inner.chat_template = "{% for message in messages %}{{ message['content'] + '.' }}{% endfor %}"
    refused(lambda: prompts.encode(AGENT, tokenizer), "got a chat that the verifier's chat template refuses")


def test_a_text_that_begins_with_the_token_that_the_tokenizer_puts_first_warns(tiny, caplog):
    inner = copy.deepcopy(tiny.tokenizer.inner)
    first, plain = inner.decode([0]), Tokenizer(copy.deepcopy(inner)).encode("hi")
    inner.backend_tokenizer.post_processor = TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 0)])
    tokenizer = Tokenizer(inner)
    assert tokenizer.encode("hi") == [0, *plain]
    assert tokenizer.encode(f"{first}hi") == [0, 0, *plain]
    [warning] = caplog.messages
    assert re.search("begins with '.*', which the tokenizer adds again", warning)
    caplog.clear()
    assert tiny.tokenizer.encode(f"{first}{first}hi") == [0, 0, *plain], "this tokenizer adds nothing"
    assert not caplog.messages


def test_a_drafter_with_a_shorter_context_is_noted(tmp_path, caplog):
    folder = shutil.copytree(locate("tiny", "drafter"), tmp_path / "drafter")
    change_json(folder / "config.json", max_position_embeddings=128)
    tf.load("tiny", drafter=folder)
    [note] = caplog.messages
    assert "the drafter's context is 128 tokens, less than the verifier's 2,048" in note


def test_thinking_is_a_setting_of_the_model_that_its_drafter_should_share(tmp_path, caplog):
    pair = {part: shutil.copytree(locate("tiny", part), tmp_path / part) for part in ("verifier", "drafter")}
    change_json(pair["verifier"] / "tokenizer_config.json", chat_template="{{ enable_thinking }}, {{ effort }}")
    for trained, thinking, words in (
        (None, False, ""),
        (None, True, "the drafter is not known to be trained with thinking, and thinking is True"),
        (False, True, "the drafter was trained without thinking, and thinking is True"),
        (True, False, "the drafter was trained with thinking, and thinking is False"),
        (True, True, ""),
    ):
        caplog.clear()
        change_json(pair["drafter"] / "config.json", thinking=trained)
        model = tf.load(**pair, thinking=thinking, template={"effort": "high"})
        assert model.encode(CHAT) == model.tokenizer.encode(f"{thinking}, high")
        notes = [record.getMessage() for record in caplog.records if "loading" not in record.getMessage()]
        assert [words in note for note in notes] == [True] * bool(words)
    assert tf.load("tiny", thinking=True).encode(CHAT) == tf.load("tiny").encode(CHAT), "its template does not know it"
    refused(lambda: model.generate(CHAT, thinking=True), "thinking is an argument of tf.load")


def test_a_stream_takes_one_prompt_alone_or_in_a_list(tiny):
    alone, in_a_list = (list(tiny.stream(prompt, max_new_tokens=1, builder="none"))[-1] for prompt in (CHAT, [CHAT]))
    assert alone.prompt_ids == in_a_list.prompt_ids and alone.ids == in_a_list.ids
    for several, settings, words in (
        ([CHAT, CHAT], {}, "2 prompts, expected"), ([], {}, "no prompts, expected"), (CHAT, {"samples": 2}, "samples 2"),
        (CHAT, {"rounds_per_dispatch": 0}, "rounds_per_dispatch 0"),
    ):  # fmt: skip
        refused(partial(next, tiny.stream(several, **settings)), words)


def test_a_wrong_prompt_is_named_if_there_are_several(tiny):
    wrong = [{"role": "robot", "content": "Hi"}]
    alone = refused(lambda: tiny.generate([wrong]), "robot")
    assert refused(lambda: tiny.generate([[5], wrong])) == f"prompt 1: {alone}"
