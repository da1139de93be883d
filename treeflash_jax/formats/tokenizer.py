"""Text in and out: a thin layer over the Hugging Face tokenizer of a model folder.

Tokenizers and chat templates come with models. What they raise becomes one line here, and lone surrogates and text that no
context holds are refused before they are tokenised. Templates run in the sandbox of transformers, which opens no files and
changes nothing; one that never ends is stopped by Ctrl-C.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from treeflash_jax.core.checks import clipped, quoted
from treeflash_jax.core.files import regular
from treeflash_jax.formats import gguf_reader, gguf_tokenizer

SHORT = 2**17  # characters of a text that is tokenised before its length is looked at
LONGEST_CHAT = 2**26  # characters, before and after the template


class Tokenizer:
    """Encodes prompts and chats, decodes answers.

    Attributes:
      template: arguments of the chat template, by name; templates ignore those that they do not know.

    Example:
      >>> tokenizer = Tokenizer.load("Qwen3-4B")
      >>> tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    """

    def __init__(self, inner: Any, template: Mapping[str, Any] | None = None):
        self.inner, self.template = inner, {"enable_thinking": False, **(template or {})}

    @staticmethod
    def load(folder: str | Path, template: Mapping[str, Any] | None = None) -> Tokenizer | None:
        """The tokenizer of a model folder or GGUF file, or None where it has none.

        Raises:
          ValueError: files that no tokenizer can be made of.
        """
        folder = gguf_tokenizer.folder(folder) if gguf_reader.is_gguf(folder) else Path(folder)
        if folder is None or not (folder / "tokenizer.json").exists():
            return None
        for path in (*folder.glob("*.json"), *folder.glob("*.jinja")):
            regular(path)
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns that PyTorch is missing; nothing here needs it
        from transformers import PreTrainedTokenizerFast  # slow to import, and ids need no tokenizer

        with _one_line(f"{folder}: tokenizer.json or tokenizer_config.json is damaged"):
            return Tokenizer(PreTrainedTokenizerFast.from_pretrained(folder), template)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return () if self.inner.eos_token_id is None else (int(self.inner.eos_token_id),)

    def encode(self, text: str, context: int | None = None) -> list[int]:
        """Ids of a text as it is.

        Args:
          context: most tokens that are of use; None: any number.

        Raises:
          ValueError: half a character (a lone surrogate), text that must have more tokens, or that the tokenizer refuses.
        """
        return self.encode_texts([text], context)[0]

    def encode_texts(
        self, texts: Sequence[str], context: int | None = None, *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Ids of several texts, encoded together by all cores.

        Args:
          add_special_tokens: whether the tokenizer adds those that it puts around a text.

        Raises:
          ValueError: as `encode`, of any of them.
        """
        for text in texts:
            self._check(text, context)
        with _one_line("the tokenizer refuses the text"):
            return [list(ids) for ids in self.inner(list(texts), add_special_tokens=add_special_tokens)["input_ids"]]

    @property
    def has_chat_template(self) -> bool:
        return bool(self.inner.chat_template)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], context: int | None = None) -> list[int]:
        """A chat up to the point where the assistant speaks.

        Raises:
          ValueError: no chat template, a chat that the template refuses, or text as for `encode`.
        """
        return self.encode_texts([self.render(messages)], context, add_special_tokens=False)[0]

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """Returns a chat as the template writes it.

        Args:
          add_generation_prompt: whether to begin an answer of the assistant.

        Raises:
          ValueError: no chat template, a chat that the template refuses, or more than LONGEST_CHAT characters.
        """
        if not self.has_chat_template:
            raise ValueError("got a chat, but the verifier's tokenizer has no chat template; give text or ids instead")
        _check_chat("a chat of", sum(len(str(message.get("content"))) for message in messages))
        with _one_line("got a chat that the verifier's chat template refuses"):
            how = {"add_generation_prompt": add_generation_prompt, "tokenize": False}
            text = self.inner.apply_chat_template(list(messages), **how, **self.template)
        _check_chat("a chat template that writes", len(text))
        self._check(text, None)
        return text

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _check(self, text: str, context: int | None) -> None:
        try:
            size = len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            half = f"U+{ord(text[error.start]):04X}"
            raise ValueError(
                f"got half a character ({half}, a lone surrogate) at position {error.start}, expected whole ones"
            ) from None
        if context is not None and size > SHORT and size > context * self._longest:
            raise ValueError(
                f"got a prompt of {len(text):,} characters, at least {size // self._longest:,} tokens, "
                f"expected at most {context:,} tokens (the verifier's context)"
            )

    @cached_property
    def _longest(self) -> int:
        """Bytes of the longest token."""
        return max((len(token.encode("utf-8", "replace")) for token in self.inner.get_vocab()), default=1)


def _check_chat(what: str, size: int) -> None:
    if size > LONGEST_CHAT:
        raise ValueError(f"got {what} {size:,} characters, expected at most {LONGEST_CHAT:,}")


def check_same_tokens(verifier: Tokenizer | None, drafter: Tokenizer | None) -> None:
    """Compares the tokens of all ids, added ones included; where one of them has no tokenizer there is nothing to compare.

    Raises:
      ValueError: an id that stands for another token, or for none.
    """
    if verifier is None or drafter is None:
        return
    ours, theirs = ({id: token for token, id in tokenizer.inner.get_vocab().items()} for tokenizer in (verifier, drafter))
    different = [id for id in ours.keys() | theirs.keys() if ours.get(id) != theirs.get(id)]
    if different:
        first = min(different)
        got, expected = ("no token" if t.get(first) is None else quoted(t[first]) for t in (theirs, ours))
        raise ValueError(
            f"drafter does not fit the verifier: got {got} as token {first} of the language model that drafts, expected "
            f"{expected} ({len(different)} tokens differ); use a smaller model of the same family"
        )


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Makes one ValueError of whatever the libraries behind a tokenizer raise: their errors have no common ancestor."""
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # of Rust code, derived from BaseException
        if not isinstance(error, Exception) and not is_panic:
            raise
        raise ValueError(f"{what}: {clipped(str(error) or type(error).__name__, 160)}") from None
