"""Tokenizers of the three kinds that are in use, small enough to see through."""

from collections.abc import Sequence

from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from treeflash_jax.engine.settings import pairs
from treeflash_jax.formats.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁river", "s", "▁of", "▁Europe", "e", "\n", "▁e", "<end>"]


def byte_fallback() -> Tokenizer:
    """A tokenizer like Llama 2's: words begin with a space, which the first one loses; other characters are bytes."""
    vocab = {token: i for i, token in enumerate([*WORDS, *BYTES])}
    inner = Inner(models.BPE(vocab, [], byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    inner.decoder = decoders.Sequence([*steps])
    return wrapped(inner)


def metaspace(words: Sequence[str] = WORDS) -> Tokenizer:
    """A tokenizer of words without bytes, with the same spaces."""
    inner = Inner(models.WordLevel({word: i for i, word in enumerate(words)}, words[0]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return wrapped(inner)


def byte_level() -> Tokenizer:
    """The tokenizer of the pair `tiny`, whose tokens are bytes."""
    return Tokenizer.load(pairs.VERIFIERS["tiny"](None, True))


def wrapped(inner: Inner) -> Tokenizer:
    inner.add_special_tokens(["<end>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner))


def ids_of(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    """Ids of words, and of the bytes of all other texts, as `byte_fallback` has them."""
    vocab, ids = tokenizer.inner.get_vocab(), []
    for piece in pieces:
        ids += [vocab[piece]] if piece in WORDS else [vocab[BYTES[byte]] for byte in piece.encode()]
    return ids
