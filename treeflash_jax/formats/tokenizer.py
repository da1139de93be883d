"""Encoding and decoding of text with the Hugging Face tokenizer of a model folder.

Tokenizers and chat templates come with models. Their errors become one-line errors. Templates run in the sandbox of
transformers; Ctrl-C stops a template that never ends.
"""

import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from treeflash_jax.core.error_text import clipped, quoted, warn
from treeflash_jax.formats import gguf_reader, gguf_tokenizer

FILES = """tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json chat_template.jinja
    chat_template.json""".split()
SEEN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # bytes that Latin-1 shows as visible characters
UNSEEN = [byte for byte in range(256) if byte not in SEEN]
BYTES_OF = {chr(byte): byte for byte in SEEN} | {chr(256 + i): byte for i, byte in enumerate(UNSEEN)}


class Tokenizer:
    """Encodes prompts and chats, and decodes answers.

    Attributes:
      template: arguments of the chat template, by name; templates ignore unknown ones.

    Example:
      >>> tokenizer = Tokenizer.load("Qwen3-4B")
      >>> tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    """

    def __init__(self, inner: Any, template: Mapping[str, Any] | None = None):
        self.inner = inner
        self.template = {"enable_thinking": False, **(template or {})}

    @classmethod
    def load(cls, path: str | Path, template: Mapping[str, Any] | None = None) -> Self | None:
        """Returns the tokenizer of a model folder or GGUF file; None if it has none. Raises ValueError if it is damaged."""
        path, is_gguf = Path(path), gguf_reader.is_gguf(path)
        arguments = gguf_tokenizer.tokenizer_arguments(gguf_reader.read(path)) if is_gguf else {}
        if not (arguments if is_gguf else (path / "tokenizer.json").exists()):
            return None
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns of missing PyTorch, which is not needed
        from transformers import PreTrainedTokenizerFast  # slow to import, and ids need no tokenizer

        with _one_line(f"{path}: tokenizer.json or tokenizer_config.json is damaged"):
            inner = PreTrainedTokenizerFast(**arguments) if is_gguf else PreTrainedTokenizerFast.from_pretrained(path)
            inner.backend_tokenizer.no_truncation()  # or transformers does it later, while another thread encodes
            inner.backend_tokenizer.no_padding()
            return cls(inner, template)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return () if self.inner.eos_token_id is None else (int(self.inner.eos_token_id),)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without a chat template. Raises ValueError if the tokenizer refuses the text.

        Warns if the text begins with the token that the tokenizer itself adds at the start.
        """
        ids = self.encode_texts([text])[0]
        if len(ids) > 1 and ids[0] == ids[1] and self.encode_texts([text], add_special_tokens=False)[0] == ids[1:]:
            token = quoted(self.inner.decode(ids[:1]))
            warn(f"got text that begins with {token}, which the tokenizer adds again; leave it out")
        return ids

    def encode_texts(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Returns the ids of several texts, encoded in parallel. Raises `encode`'s ValueError."""
        for text in texts:
            _check_characters(text)
        with _one_line("the tokenizer refuses the text"):
            return [list(ids) for ids in self.inner(list(texts), add_special_tokens=add_special_tokens)["input_ids"]]

    @property
    def has_chat_template(self) -> bool:
        return bool(self.inner.chat_template)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> list[int]:
        """Returns the ids of a chat up to the start of the next answer; arguments and exceptions as in `render`."""
        return self.encode_texts([self.render(messages, **arguments)], add_special_tokens=False)[0]

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **arguments: Any) -> str:
        """Returns a chat as its template writes it. With `add_generation_prompt`, it ends with the start of an answer.

        Args:
          **arguments: further arguments of transformers' `apply_chat_template`, and of the template.

        Raises ValueError if there is no chat template, or if it refuses the chat.
        """
        if not self.has_chat_template:
            raise ValueError("got a chat, but the verifier's tokenizer has no chat template; give text or ids instead")
        with _one_line("got a chat that the verifier's chat template refuses"):
            arguments = {**self.template, **arguments, "add_generation_prompt": add_generation_prompt, "tokenize": False}
            text = self.inner.apply_chat_template(list(messages), **arguments)
        _check_characters(text)
        return text

    @functools.cached_property
    def special_tokens(self) -> dict[int, str]:
        """Names, by id, of the tokens that `decode` skips."""
        return {id: token.content for id, token in self.inner.added_tokens_decoder.items() if token.special}

    @functools.cached_property
    def token_bytes(self) -> dict[int, bytes]:
        """Bytes that each token stands for, without added tokens. Raises ValueError for other kinds of tokenizers."""
        decoder = self.inner.backend_tokenizer.decoder
        decoder = {} if decoder is None else json.loads(decoder.__getstate__())  # quicker than the whole tokenizer as JSON
        kinds = {part["type"] for part in (decoder, *decoder.get("decoders", ())) if part}
        if "ByteLevel" in kinds:
            read = _read_byte_level
        elif "ByteFallback" in kinds:
            read = _read_sentence_piece
        else:
            raise ValueError(f"got a tokenizer that decodes by {quoted(sorted(kinds))}, expected ByteLevel or ByteFallback")
        added = self.inner.added_tokens_decoder
        return {id: read(token) for token, id in self.inner.get_vocab().items() if id not in added}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of ids. Raises ValueError if the tokenizer refuses them."""
        with _one_line("the tokenizer refuses the ids"):
            return self.inner.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


def _read_byte_level(token: str) -> bytes:
    """Reads GPT-2's alphabet, which has a character for each byte: Latin-1's, if it is visible."""
    if not BYTES_OF.keys() >= {*token}:
        raise ValueError(f"got token {quoted(token)}, expected characters of GPT-2's alphabet, each for a byte")
    return bytes(BYTES_OF[character] for character in token)


def _read_sentence_piece(token: str) -> bytes:
    """Reads tokens of SentencePiece, such as ▁word, and <0x0A> for a byte."""
    is_byte = len(token) == 6 and token.startswith("<0x")
    return bytes([int(token[3:5], 16)]) if is_byte else token.replace("▁", " ").encode()


def _check_characters(text: str) -> None:
    """Raises ValueError for a lone surrogate, because tokenizers crash on it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        got = f"half a character (U+{ord(text[error.start]):04X}, a lone surrogate) at position {error.start}"
        raise ValueError(f"got {got}, expected whole ones") from None


def check_same_tokens(verifier: Tokenizer | None, drafter: Tokenizer | None) -> None:
    """Raises ValueError if two tokenizers give an id different tokens, added tokens included. None fits any tokenizer."""
    if verifier is None or drafter is None:
        return
    ours = {id: token for token, id in verifier.inner.get_vocab().items()}
    theirs = {id: token for token, id in drafter.inner.get_vocab().items()}
    different = [id for id in ours.keys() | theirs.keys() if ours.get(id) != theirs.get(id)]
    if different:
        first = min(different)
        got = "no token" if theirs.get(first) is None else quoted(theirs[first])
        expected = "no token" if ours.get(first) is None else quoted(ours[first])
        raise ValueError(
            f"drafter does not fit the verifier: got {got} as token {first} of the language model that drafts, expected "
            f"{expected} ({len(different)} tokens differ); use a smaller model of the same family"
        )


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Converts any error of a tokenizer's libraries to a one-line ValueError: the errors have no common base class."""
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # raised by Rust code, derived from BaseException
        if not isinstance(error, Exception) and not is_panic:
            raise
        raise ValueError(f"{what}: {clipped(str(error) or type(error).__name__, 160)}") from None
