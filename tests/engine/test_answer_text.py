"""Text of growing answers: pieces joined are the whole text, whatever tokens they come in."""

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from treeflash_jax.engine.answer_text import AnswerText
from treeflash_jax.formats.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁river", "s", "▁of", "▁Europe", "e", "\n", "▁e", "<end>"]


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """A SentencePiece-like tokenizer: words begin with a space, which the first one loses; other characters are bytes."""
    vocab = {token: i for i, token in enumerate([*WORDS, *BYTES])}
    inner = Inner(models.BPE(vocab, [], byte_fallback=True))
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    inner.decoder = decoders.Sequence([*steps])
    inner.add_special_tokens(["<end>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner))


def ids_of(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    """Ids of words, and of the bytes of all other texts."""
    vocab, ids = tokenizer.inner.get_vocab(), []
    for piece in pieces:
        ids += [vocab[piece]] if piece in WORDS else [vocab[BYTES[byte]] for byte in piece.encode()]
    return ids


def stream(tokenizer: Tokenizer, ids: list[int], size: int, stop: tuple[str, ...] = ()) -> tuple[str, AnswerText]:
    """The pieces shown while tokens come in groups, joined with the rest of the text; what was shown never changes."""
    answer, shown = AnswerText(tokenizer, stop), ""
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
