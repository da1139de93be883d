"""Text of growing answers: pieces joined are the whole text, whatever tokens they come in."""

import random

import pytest
import toy_tokenizers
from refusals import refused
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models
from toy_tokenizers import ids_of, wrapped

from treeflash_jax.formats.answer_text import REPLACEMENT_CHARACTER, AnswerText
from treeflash_jax.formats.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    return toy_tokenizers.byte_fallback()


def stream(
    tokenizer: Tokenizer, ids: list[int], size: int, stop: tuple[str, ...] = (), prompt: tuple[int, ...] = ()
) -> tuple[str, AnswerText]:
    """The pieces shown while tokens come in groups, joined with the rest of the text; what was shown never changes."""
    answer, shown = AnswerText(tokenizer, prompt, stop), ""
    for first in range(0, len(ids), size):
        answer.extend(ids[first : first + size])
        if answer.has_stop:
            break
        assert answer.certain_text.startswith(shown)
        shown = answer.certain_text
    assert answer.text.startswith(shown)
    return shown + answer.text[len(shown) :], answer


TEXTS = {
    "spaces": ("▁river", "s", "▁of", "▁", "▁", "▁Europe", "\n", "▁e"),
    "emoji": ("▁river", "👩‍🚀🇪🇺", "▁of", "é", "s", "▁Europe"),
    "half a character at the end": ("▁of", "é", "s", "🚀"),
    "special tokens": ("<end>", "▁river", "<end>", "<end>", "s", "▁of", "<end>"),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 99])
def test_streamed_text_is_the_text_of_all_tokens(byte_fallback, name, size):
    ids = ids_of(byte_fallback, *TEXTS[name])
    ids = ids[:-1] if name.startswith("half") else ids
    assert stream(byte_fallback, ids, size)[0] == byte_fallback.decode(ids)


@pytest.mark.parametrize("size", [1, 3, 99])
@pytest.mark.parametrize("stop", [(" of Eu",), ("é",), ("s of", "rivers o"), ("never", "\n e")])
def test_a_stop_string_ends_text_and_tokens_wherever_it_is_split(byte_fallback, size, stop):
    ids = ids_of(byte_fallback, "▁river", "s", "▁of", "▁Europe", "é", "🚀", "\n", "▁e", "s")
    text, answer = stream(byte_fallback, ids, size, stop)
    whole = byte_fallback.decode(answer.ids)
    assert answer.has_stop and answer.ids == ids[: len(answer.ids)]
    assert text == whole[: min(whole.index(part) for part in stop if part in whole)]
    assert not any(part in byte_fallback.decode(answer.ids[:-1]) for part in stop)


def test_every_token_is_decoded_a_few_times(byte_fallback, monkeypatch):
    counted, decode = [], byte_fallback.decode
    monkeypatch.setattr(byte_fallback, "decode", lambda ids: counted.append(len(ids)) or decode(ids))
    stream(byte_fallback, ids_of(byte_fallback, "▁river", "s") * 500, 4)
    assert sum(counted) < 10 * 1000


def write(tokenizer: Tokenizer, numbers: random.Random) -> list[int]:
    """Ids of a random text, with special tokens in it."""
    characters = ["▁river", "s", "▁of", "▁", "\n", "e", "▁Europe"]
    if tokenizer.inner.convert_tokens_to_ids("<0x00>") is None:
        return tokenizer.inner.convert_tokens_to_ids(numbers.choices([*characters, "<end>"], k=numbers.randint(1, 12)))
    return ids_of(tokenizer, *numbers.choices([*characters, "é", "🚀", "👩‍🚀", "川", "<end>"], k=numbers.randint(1, 12)))


def write_bytes(tokenizer: Tokenizer, numbers: random.Random) -> list[int]:
    """Ids of a random text of a byte-level tokenizer."""
    text = "".join(numbers.choices(["rivers ", "of", " ", "\n", "é", "🚀", "👩‍🚀", "川"], k=numbers.randint(1, 12)))
    ids = tokenizer.encode(text)
    ids.insert(numbers.randrange(len(ids) + 1), tokenizer.stop_ids[0])
    return ids


@pytest.mark.parametrize("kind, make", [("byte_fallback", write), ("metaspace", write), ("byte_level", write_bytes)])
def test_texts_of_prompt_and_answer_are_the_text_of_all_tokens(kind, make):
    """Random texts, split anywhere, also in the middle of a character; so are the texts of tokens, and their bytes."""
    tokenizer, numbers = getattr(toy_tokenizers, kind)(), random.Random(kind)
    for _ in range(300):
        ids = make(tokenizer, numbers)
        prompt, ids = ids[: (at := numbers.randrange(len(ids)))], ids[at:]
        whole = tokenizer.decode(prompt + ids)
        befores = [tokenizer.decode(prompt[:end]) for end in range(len(prompt), -1, -1)]
        known = next(before for before in befores if whole.startswith(before))  # a character split here is the answer's
        text, answer = stream(tokenizer, ids, numbers.randint(1, 5), prompt=prompt)
        assert answer.text == text and answer.ids == ids
        assert known + text == whole, (prompt, ids)
        stop = text[(at := numbers.randrange(len(text))) : at + numbers.randint(1, 3)] if text else "x"
        cut, stopped = stream(tokenizer, ids, numbers.randint(1, 5), (stop,), prompt)
        assert cut == stopped.text == text.split(stop)[0] and stopped.has_stop == (stop in text)
        texts, data = read_tokens(tokenizer, prompt, ids)
        assert texts == text and whole.encode().endswith(data)
        assert (len(data) < len(text.encode())) == (known != befores[0]), "bytes before the split are the prompt's"


def read_tokens(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> tuple[str, bytes]:
    """The texts and the bytes of tokens in their places, joined, without special tokens."""
    answer, texts, data = AnswerText(tokenizer, prompt), "", b""
    for token in ids:
        text, part = answer.next_token(token)
        is_special = token in tokenizer.special_tokens
        assert is_special == (part is None) and (not is_special or text in ("<end>", "<|im_end|>"))
        if not is_special:
            texts, data = texts + ("" if text.endswith(REPLACEMENT_CHARACTER) else text), data + part
        answer.extend([token])
    return texts, data


def test_a_chat_s_answer_keeps_the_space_after_the_template(byte_fallback):
    """As vLLM and llama.cpp do, also behind special tokens; more of them than the context holds may come last."""
    prompt = ids_of(byte_fallback, "▁river", *["<end>"] * 20)
    answer = AnswerText(byte_fallback, prompt, [" of"])
    answer.extend(ids_of(byte_fallback, "▁Europe", "▁of"))
    assert (answer.text, answer.has_stop) == (" Europe", True)
    first = AnswerText(byte_fallback, ids_of(byte_fallback, "<end>"))
    first.extend(ids_of(byte_fallback, "▁Europe"))
    assert first.text == "Europe", "the text of all tokens begins without a space"


def test_a_limit_within_a_character_spares_those_before_it(byte_fallback):
    """ByteFallback decodes all bytes in a row as unknown ones if the last character is unfinished."""
    ids = ids_of(byte_fallback, "▁river", "🚀川🚀")[:-1]
    for size in (1, 2, 99):
        text, _ = stream(byte_fallback, ids, size)
        assert text == "river🚀川" + 3 * REPLACEMENT_CHARACTER
    continued = AnswerText(byte_fallback, ids)
    continued.extend(ids_of(byte_fallback, "🚀")[-1:])
    assert continued.text == "🚀"


def test_a_token_outside_of_the_bytes_alphabet_is_refused():
    inner = Inner(models.WordLevel({"a": 0, "▁b": 1}, "a"))
    inner.decoder = decoders.ByteLevel()
    refused(lambda: wrapped(inner).token_bytes, "got token '▁b'")
