"""The size of the longest text that fits a context. It is known before a text is encoded."""

import json
from typing import Any

from treeflash_jax.formats.tokenizer import BYTES_OF, Tokenizer

NFC_SHRINKS = 4  # largest factor: U+1FBE U+0308 U+0301, 7 bytes, become U+0390, 2 bytes


class TextLimit:
    """The size above which no text fits a context.

    Attributes:
      most_bytes: this size in bytes of UTF-8: the context times the longest text that can become one token. None: no limit,
        if the tokenizer may drop any text, such as white space around a special token, or has an unknown step.
    """

    def __init__(self, tokenizer: Tokenizer, context: int):
        spec = json.loads(tokenizer.inner.backend_tokenizer.to_str())
        vocabulary = tokenizer.inner.get_vocab()
        normalizers = _steps(spec["normalizer"], "normalizers")
        splits = _steps(spec["pre_tokenizer"], "pretokenizers")
        if any(step["type"] == "ByteLevel" for step in splits):
            self._dropped = bytes(byte for character, byte in BYTES_OF.items() if character not in vocabulary)
            knows_all = True
        else:
            self._dropped = b""
            knows_all = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
        keeps_all = spec["model"]["type"] == "BPE" and knows_all and all(map(_keeps_text, normalizers + splits))
        strips = any(token["lstrip"] or token["rstrip"] for token in spec["added_tokens"])
        # In a vocabulary, a byte is written as a character, and a space may be "▁", of three bytes. So no token is shorter
        # than its text.
        longest = max(len(token.encode()) for token in vocabulary)
        shrinks = NFC_SHRINKS if any(step["type"] == "NFC" for step in normalizers) else 1
        self.most_bytes = context * longest * shrinks if keeps_all and not strips else None

    def check(self, text: str) -> None:
        """Raises ValueError for a text that is too long for the context."""
        if self.most_bytes is None or len(text) * 4 <= self.most_bytes:
            return
        size = len(text.encode("utf-8", "surrogatepass").translate(None, self._dropped))
        if size > self.most_bytes:
            got = f"a text of {size:,} bytes"
            raise ValueError(f"got {got}, expected at most {self.most_bytes:,}: no longer one fits the server's context")


def _steps(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return [inner for part in step[name] for inner in _steps(part, name)] if step["type"] == "Sequence" else [step]


def _keeps_text(step: dict[str, Any]) -> bool:
    """Returns whether a step drops no characters. NFC drops none; it only makes them shorter."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(step["content"].encode()) >= len(pattern.encode())
    if step["type"] == "Split":
        return step["behavior"] != "Removed"
    return step["type"] in ("NFC", "Prepend", "ByteLevel", "Digits", "Metaspace")
