"""Documents: records of a source as token ids, each with its loss weight."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from typing import Literal

import numpy as np

from train.data.records import Messages, Record, Source, read_records
from treeflash_jax.core.settings import setting
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.models.packed_attention import MAX_CONTEXT

CHATS_AT_ONCE = 256  # number of chats that are tokenised together, by all cores


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Settings that turn records into training sequences."""

    sequence_length: int = setting(
        384,
        "tokens of a packed sequence; longer chats and responses are left out, plain text is cut into pieces",
        least=2,
        most=MAX_CONTEXT,
    )
    thinking: bool | None = setting(
        None,
        "render chats with thinking; drafters record it",
        unset="as the settings of `train.respond` say, otherwise without",
    )
    prompt_weight: float = setting(
        0.0, "loss weight of chat tokens outside of the assistant's turns, whose tokens weigh 1", least=0, most=1
    )
    unfinished: Literal["keep", "drop"] = setting(
        "keep", 'handling of unfinished responses: "drop" leaves out those cut by the length limit of `train.respond`'
    )
    record: str = setting(
        "",
        "local folder for the verifier's outputs of every sequence, which are then read in every step instead of being "
        'computed (`mfu` still counts them); "" records nothing',
        min_length=0,
    )


@dataclass(frozen=True)
class Document:
    """Token ids, and the loss weight of predicting each token.

    Attributes:
      prompt_length: number of tokens before the first answer; 0 for text.
    """

    tokens_n: np.ndarray
    weights_n: np.ndarray
    prompt_length: int = 0

    @property
    def prompt(self) -> list[int]:
        """Tokens before the first answer; empty if fewer than two."""
        return self.tokens_n[: self.prompt_length].tolist() if self.prompt_length > 1 else []


def read_documents(
    source: Source,
    config: DataConfig,
    tokenizer: Tokenizer | None,
    seed: int,
    vocab_size: int | None,
    skipped: Counter[str],
) -> Iterator[tuple[int, Document]]:
    """Yields (number, document) for every usable document of a source.

    Chats and responses have the numbers of their records. Pieces of plain text are numbered in order.

    Args:
      tokenizer: tokenizer of the verifier; may be None for responses.
      seed: seed of the order to which the source's limit applies.
      vocab_size: upper bound of ids.
      skipped: counter to which the numbers of skipped records ("too long", "unfinished") are added.

    Raises ValueError for a record that cannot be used, with its file and line, for an unreadable source, and for texts
    without a tokenizer.
    """
    for number, where, document in _tokenise(source, config, tokenizer, read_records(source, seed), skipped):
        largest = int(document.tokens_n.max())
        if vocab_size is not None and largest >= vocab_size:
            raise ValueError(f"{where}: got token id {largest}, expected 0 to {vocab_size - 1} (the vocabulary)")
        if len(document.tokens_n) > config.sequence_length:
            skipped["too long"] += 1
        else:
            yield number, document


def chat_documents(tokenizer: Tokenizer, records: Sequence[Record], prompt_weight: float = 0.0) -> list[Document]:
    """Renders chats with the tokenizer's template. The assistant's tokens have weight 1, stop tokens included.

    A drafter should be trained on the contexts in which it drafts. So an assistant turn is the text that follows the
    template's generation prompt. The chat before the turn, with the generation prompt, must be a token prefix of the chat
    that includes the turn, and this must be a prefix of the whole chat. Earlier turns that a template rewrites (Qwen3 drops
    their thinking) fail this test, and have no weight. Messages after the last assistant turn are left out.

    Raises ValueError, with the place, for a chat without assistant turns, and if the last of them fails.
    """
    rendered = []
    for record in records:
        with _placed(record):
            rendered.append(_render(tokenizer, record.content))
    texts = [text for group in rendered for text in group]
    encoded = iter(tokenizer.encode_texts(texts, add_special_tokens=False))
    ends = {*tokenizer.stop_ids, *tokenizer.inner.all_special_ids}
    documents = []
    for record, group in zip(records, rendered, strict=True):
        with _placed(record):
            documents.append(_weigh(list(islice(encoded, len(group))), ends, prompt_weight))
    return documents


def text_documents(tokenizer: Tokenizer, text: str, length: int) -> list[Document]:
    """Cuts plain text into pieces of at most `length` tokens. All tokens have weight 1."""
    tokens = np.array(tokenizer.encode(text), np.int32)
    pieces = [tokens[begin : begin + length] for begin in range(0, len(tokens), length)]
    return [Document(piece_n, np.ones(len(piece_n), np.float32)) for piece_n in pieces if len(piece_n) > 1]


@contextmanager
def _placed(record: Record) -> Iterator[None]:
    """Adds the place of a record to a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{record.where}: {error}") from None


def _tokenise(
    source: Source, config: DataConfig, tokenizer: Tokenizer | None, records: Iterator[Record], skipped: Counter[str]
) -> Iterator[tuple[int, str, Document]]:
    """Yields the number, the place and the document of each record, or of each piece of a text."""
    if source.format == "responses":
        for record in records:
            prompt, response = record.content.prompt, record.content.response
            if config.unfinished == "drop" and not record.content.is_finished:
                skipped["unfinished"] += 1
                continue
            weights_n = np.repeat(np.float32([0, 1]), [len(prompt), len(response)])
            yield record.number, record.where, Document(np.array(prompt + response, np.int32), weights_n, len(prompt))
        return
    if tokenizer is None:
        raise ValueError(
            f"{source.path}: got text, but the verifier's folder has no tokenizer.json; give responses instead"
        )
    if source.format == "text":
        numbers = count()
        for record in records:
            with _placed(record):
                pieces = text_documents(tokenizer, record.content, config.sequence_length)
            yield from ((next(numbers), record.where, piece) for piece in pieces)
        return
    if not tokenizer.has_chat_template:
        raise ValueError(f"{source.path}: got chats, but the tokenizer has no chat template; give responses or text")
    while chunk := list(islice(records, CHATS_AT_ONCE)):
        for record, document in zip(chunk, chat_documents(tokenizer, chunk, config.prompt_weight), strict=True):
            yield record.number, record.where, document


def _render(tokenizer: Tokenizer, messages: Messages) -> list[str]:
    """Renders two texts for each assistant turn: the chat before it with the generation prompt, and the chat with it."""
    turns = [k for k, message in enumerate(messages) if message["role"] == "assistant" and k > 0]
    if not turns:
        raise ValueError("got no assistant turn, expected at least one after another's")
    texts = []
    for k in turns:
        texts.append(tokenizer.render(messages[:k], add_generation_prompt=True))
        texts.append(tokenizer.render(messages[: k + 1], add_generation_prompt=False))
    return texts


def _weigh(prefixes: list[list[int]], ends: set[int], prompt_weight: float) -> Document:
    """Gives weight 1 to the assistant's spans, up to the last special token in each."""
    whole = prefixes[-1]
    weights_n = np.full(len(whole), prompt_weight, np.float32)
    starts = []
    for before, after in zip(prefixes[::2], prefixes[1::2], strict=True):
        start = len(before)
        is_taught = whole[:start] == before and whole[: len(after)] == after
        if is_taught:
            starts.append(start)
            span = whole[start : len(after)]
            stop = max((n + 1 for n, token in enumerate(span) if token in ends), default=len(span))
            weights_n[start : start + stop] = 1
    if not is_taught:
        raise ValueError("got a last answer that does not begin with the template's generation prompt, expected it to")
    return Document(np.array(whole, np.int32), weights_n, starts[0])
