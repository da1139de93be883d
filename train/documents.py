"""Documents: token ids and the loss weight of predicting each of them, made of the records of a source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np

from train.records import Malformed, Messages, Record, Source, read
from treeflash_jax.checks import bounded
from treeflash_jax.formats.tokenizer import Tokenizer

CHATS_AT_ONCE = 256  # tokenised together, by all cores


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What documents become.

    Attributes:
      row_tokens: length of a packed row.
      prompt_weight: loss weight of everything in a chat that is not the assistant's; the assistant's tokens weigh 1.
      malformed: handling of records that cannot be used: stop the run, or skip and count them.
      too_long: handling of chats and responses past `row_tokens`; "cut" loses their end. Plain text is always cut into
        pieces.
    """

    row_tokens: int = bounded(384, least=2)
    prompt_weight: float = bounded(0.0, least=0, most=1)
    malformed: Literal["error", "skip"] = "error"
    too_long: Literal["drop", "cut", "error"] = "drop"


@dataclass(frozen=True)
class Document:
    """Token ids and the loss weight of predicting each of them."""

    tokens_n: np.ndarray
    weights_n: np.ndarray


def documents(
    source: Source,
    config: DataConfig,
    tokenizer: Tokenizer | None,
    seed: int,
    vocab_size: int | None,
    counts: Counter[str],
) -> Iterator[tuple[int, Document]]:
    """(number, document) of every document of a source that can be used.

    Args:
      source: of chats and responses a document's number is its record's, of plain text that of the piece.
      config: says whether the others raise or are counted.
      tokenizer: None will do for responses.
      seed: of the order that the source's limit counts in.
      vocab_size: ids must be below it.
      counts: where those left out ("malformed", "too long") or kept in part ("cut") are counted.

    Raises:
      ValueError: by file and line, a record that cannot be used; a source that cannot be read; no tokenizer.
    """

    def malformed(error: Malformed) -> None:
        if config.malformed == "error":
            raise error
        counts["malformed"] += 1

    for number, where, document in _documents(source, config, tokenizer, seed, malformed):
        size = len(document.tokens_n)
        low, high = int(document.tokens_n.min()), int(document.tokens_n.max())
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            top = "" if vocab_size is None else f" to {vocab_size - 1} (the vocabulary)"
            malformed(Malformed(f"{where}: got token id {low if low < 0 else high}, expected 0{top}"))
            continue
        if size > config.row_tokens:
            if config.too_long == "error":
                raise ValueError(
                    f"{where}: got {size} tokens, expected at most {config.row_tokens} (row_tokens); "
                    "too_long = 'drop' or 'cut' goes on without them"
                )
            document = Document(document.tokens_n[: config.row_tokens], document.weights_n[: config.row_tokens])
            is_cut = config.too_long == "cut" and document.weights_n[1:].any()
            counts["cut" if is_cut else "too long"] += 1
            if not is_cut:
                continue
        yield number, document


def chat_documents(
    tokenizer: Tokenizer, chats: Sequence[Messages], prompt_weight: float = 0.0
) -> list[Document | ValueError]:
    """Chats through the tokenizer's template, thinking off; the assistant's tokens weigh 1, its stop token included.

    A turn of the assistant is what the template adds to its own generation prompt: the chat before the turn, with the
    generation prompt, is a token prefix of the chat that includes it, and that one of the whole chat. So a drafter learns
    exactly the contexts it will draft in. Where a template rewrites earlier turns (Qwen3 drops their thinking), those turns
    fail this test and only the last one is learnt. What follows the last turn of the assistant is left out.

    Returns:
      One Document per chat, or the error that says why there is none.
    """
    rendered: list[list[str] | ValueError] = [_catch(_render, tokenizer, chat) for chat in chats]
    texts = [text for group in rendered if isinstance(group, list) for text in group]
    encoded = iter(tokenizer.encode_texts(texts, add_special_tokens=False) if texts else ())
    ends = {*tokenizer.stop_ids, *tokenizer.inner.all_special_ids}
    return [
        group if isinstance(group, ValueError) else _catch(_weigh, list(islice(encoded, len(group))), ends, prompt_weight)
        for group in rendered
    ]


def text_documents(tokenizer: Tokenizer, text: str, row_tokens: int) -> list[Document]:
    """Plain text cut into pieces of at most `row_tokens` tokens, every token with weight 1."""
    tokens = np.array(tokenizer.encode(text), np.int32)
    pieces = [tokens[begin : begin + row_tokens] for begin in range(0, len(tokens), row_tokens)]
    return [Document(piece_n, np.ones(len(piece_n), np.float32)) for piece_n in pieces if len(piece_n) > 1]


def _documents(
    source: Source,
    config: DataConfig,
    tokenizer: Tokenizer | None,
    seed: int,
    malformed: Callable[[Malformed], None],
) -> Iterator[tuple[int, str, Document]]:
    """(number, place, document); of plain text the pieces are numbered, not the records."""
    if source.format != "responses" and tokenizer is None:
        raise ValueError(
            f"{source.path}: got text, but the verifier's folder has no tokenizer.json; give responses instead"
        )
    records = read(source, seed, malformed)
    if source.format == "responses":
        for record in records:
            prompt, response = record.content.prompt, record.content.response
            weights_n = np.repeat(np.float32([0, 1]), [len(prompt), len(response)])
            try:
                tokens_n = np.array(prompt + response, np.int32)
            except OverflowError:
                malformed(Malformed(f"{record.where}: got a token id past 32 bits, expected one of the vocabulary"))
                continue
            yield record.number, record.where, Document(tokens_n, weights_n)
    elif source.format == "text":
        number = 0
        for record in records:
            pieces = _catch(text_documents, tokenizer, record.content, config.row_tokens)
            if isinstance(pieces, ValueError):
                malformed(Malformed(f"{record.where}: {pieces}"))
                continue
            for document in pieces:
                yield number, record.where, document
                number += 1
    else:
        if not getattr(tokenizer.inner, "chat_template", None):
            raise ValueError(f"{source.path}: got chats, but the tokenizer has no chat template; give responses or text")
        while chunk := list(islice(records, CHATS_AT_ONCE)):
            yield from _chat_documents(chunk, config, tokenizer, malformed)


def _chat_documents(
    records: Sequence[Record], config: DataConfig, tokenizer: Tokenizer, malformed: Callable[[Malformed], None]
) -> Iterator[tuple[int, str, Document]]:
    made = chat_documents(tokenizer, [record.content for record in records], config.prompt_weight)
    for record, document in zip(records, made, strict=True):
        if isinstance(document, ValueError):
            malformed(Malformed(f"{record.where}: {document}"))
        else:
            yield record.number, record.where, document


def _render(tokenizer: Tokenizer, messages: Messages) -> list[str]:
    """For each turn of the assistant the chat before it, with the generation prompt, and the chat after it."""
    turns = [k for k, message in enumerate(messages) if message["role"] == "assistant" and k > 0]
    if not turns:
        raise ValueError("got no assistant turn, expected at least one after another's")

    return [
        tokenizer.render(messages[: k + is_whole], add_generation_prompt=not is_whole) for k in turns for is_whole in (0, 1)
    ]


def _weigh(around: list[list[int]], ends: set[int], prompt_weight: float) -> Document:
    """Weight 1 on the assistant's spans, up to the last special token in each."""
    whole = around[-1]
    weights_n = np.full(len(whole), prompt_weight, np.float32)
    start = None
    for before, after in zip(around[::2], around[1::2], strict=True):
        start = len(before) if whole[: len(before)] == before and whole[: len(after)] == after else None
        if start is not None:
            span = whole[start : len(after)]
            stop = max((n + 1 for n, token in enumerate(span) if token in ends), default=len(span))
            weights_n[start : start + stop] = 1
    if start is None:
        raise ValueError("the chat template's generation prompt is not how it begins an answer, so none can be told apart")
    return Document(np.array(whole, np.int32), weights_n)


def _catch(function: Callable[..., Any], *args: Any) -> Any:
    """The result, or the ValueError in its place."""
    try:
        return function(*args)
    except ValueError as error:
        return error
