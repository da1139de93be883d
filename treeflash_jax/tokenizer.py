"""Text in and out: a thin layer over the Hugging Face tokenizer of a model folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treeflash_jax.files import regular
from treeflash_jax.formats import gguf, gguf_tokenizer


class Tokenizer:
    """Encodes prompts and chats, decodes answers.

    Example:
      >>> tokenizer = Tokenizer.load("Qwen3-4B")
      >>> tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    """

    def __init__(self, inner: Any):
        self.inner = inner

    @staticmethod
    def load(folder: str | Path) -> Tokenizer | None:
        """The tokenizer of a model folder or GGUF file, or None where it has none."""
        folder = gguf_tokenizer.folder(folder) if gguf.is_gguf(folder) else Path(folder)
        if folder is None or not (folder / "tokenizer.json").exists():
            return None
        for path in (*folder.glob("*.json"), *folder.glob("*.jinja")):
            regular(path)
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns that PyTorch is missing; nothing here needs it
        from transformers import PreTrainedTokenizerFast  # slow to import, and ids need no tokenizer

        return Tokenizer(PreTrainedTokenizerFast.from_pretrained(folder))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return () if self.inner.eos_token_id is None else (int(self.inner.eos_token_id),)

    def encode(self, text: str) -> list[int]:
        return list(self.inner(text)["input_ids"])

    @property
    def has_chat_template(self) -> bool:
        return bool(self.inner.chat_template)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """A chat up to the point where the assistant speaks; thinking switched off where the template knows it.

        Raises:
          ValueError: no chat template, or a chat that the template refuses.
        """
        if not self.has_chat_template:
            raise ValueError("got a chat, but the verifier's tokenizer has no chat template; give text or ids instead")
        from jinja2.exceptions import TemplateError  # what transformers renders templates with

        try:
            encoded = self.inner.apply_chat_template(
                list(messages), add_generation_prompt=True, enable_thinking=False, tokenize=True, return_dict=True
            )
        except TemplateError as error:
            raise ValueError(
                f"got a chat that the verifier's chat template refuses: {' '.join(str(error).split())}"
            ) from None
        return list(encoded["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
