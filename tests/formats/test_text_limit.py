"""The largest text: never smaller than one that fits, whatever its characters and the tokenizer's steps."""

import pytest
from hypothesis import example, given, settings, strategies
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from treeflash_jax.engine.settings import pairs
from treeflash_jax.formats import tokenizer as tokenizers
from treeflash_jax.formats.text_limit import TextLimit

TEXTS = strategies.text(strategies.sampled_from("ab \n\t<|>▁éü\u1fbe\u0308\u0301\u212a語😀\x00\x04"), max_size=60)
BYTES = sorted(tokenizers.BYTES_OF)


def wrapped(made: Tokenizer) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(PreTrainedTokenizerFast(tokenizer_object=made))


def byte_level(normalizer=None, *, without: str = "", added: AddedToken | None = None, first=None) -> tokenizers.Tokenizer:
    vocabulary = {x: i for i, x in enumerate(x for x in BYTES if x not in without)}
    made = Tokenizer(models.BPE(vocabulary, []))
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = letters if first is None else pre_tokenizers.Sequence([first, letters])
    if normalizer is not None:
        made.normalizer = normalizer
    if added is not None:
        made.add_tokens([added])
    return wrapped(made)


def sentence_piece(**more) -> tokenizers.Tokenizer:
    vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁▁", "▁▁▁▁"]
    merges = [("▁", "▁"), ("▁▁", "▁▁")]
    given = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True} | more
    made = Tokenizer(models.BPE({x: i for i, x in enumerate(vocabulary)}, merges, **given))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return wrapped(made)


KNOWN = {
    "tiny": lambda: tokenizers.Tokenizer.load(pairs.locate("tiny")),
    "byte-level": byte_level,
    "byte-level without some bytes": lambda: byte_level(without="ĀĄ"),
    "NFC": lambda: byte_level(normalizers.NFC()),
    "split": lambda: byte_level(first=pre_tokenizers.Split(Regex(r"\s+"), "isolated")),
    "special": lambda: byte_level(added=AddedToken("<|>", special=True)),
    "SentencePiece": sentence_piece,
}
DROPPING = {
    "white space around a special token": lambda: byte_level(added=AddedToken("<|>", rstrip=True, special=True)),
    "white space at the ends": lambda: byte_level(normalizers.Strip()),
    "a pattern": lambda: byte_level(normalizers.Replace(Regex(" +"), " ")),
    "a long text": lambda: byte_level(normalizers.Replace("aaaa", "a")),
    "white space between words": lambda: byte_level(first=pre_tokenizers.WhitespaceSplit()),
    "what a split removes": lambda: byte_level(first=pre_tokenizers.Split(" ", "removed")),
    "unknown characters": lambda: wrapped(Tokenizer(models.BPE({"a": 0, "b": 1}, []))),
}


@pytest.mark.parametrize("kind", KNOWN)
def test_a_text_that_fits_is_not_refused(kind):
    """A context of as many tokens as the text has takes it."""
    tokenizer = KNOWN[kind]()

    @settings(max_examples=150, deadline=None, derandomize=True, database=None)
    @given(TEXTS)
    @example("    " * 9)
    @example("▁" * 36)
    @example("\u1fbe\u0308\u0301" * 9)
    @example("▁▁" * 9)
    @example("<|>" * 9)
    @example("\x00" * 60)
    def check(text: str) -> None:
        limit = TextLimit(tokenizer, len(tokenizer.encode_texts([text])[0]))
        assert limit.most_bytes is not None
        limit.check(text)

    check()
    limit = TextLimit(tokenizer, 3)
    with pytest.raises(ValueError, match="got a text of .* bytes, expected at most"):
        limit.check("a" * (limit.most_bytes + 1))


@pytest.mark.parametrize("kind", DROPPING)
def test_a_tokenizer_that_may_drop_any_text_has_no_limit(kind):
    assert TextLimit(DROPPING[kind](), 3).most_bytes is None
