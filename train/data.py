"""Training text: JSONL chat sets and the Python standard library, tokenised and packed into rows of fixed length.

A row holds several documents; a token sees its own document only. Which rows a step trains on is a function of
(seed, number of steps, step) alone, so that a resumed run sees the same batches.

Shape suffixes: r rows, b batch, t tokens of a row.
"""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer

CHAT_SETS = ("gsm8k_train", "mbpp_train", "gpteacher_codegen", "gpteacher_roleplay")
STDLIB = "stdlib"
HELD_OUT_EVERY = 50  # every 50th document of a set is kept for validation
PROMPT_WEIGHT = 0.5  # loss weight of the words of a user, against 1 for those of the assistant

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Document:
    """Token ids and the loss weight of predicting each of them."""

    tokens: np.ndarray
    weights: np.ndarray


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Packed documents.

    Attributes:
      tokens_rt: ids; padding is 0.
      segments_rt: 1, 2, ... per document of a row; 0 for padding.
      positions_rt: position inside the document.
      weights_rt: loss weight of predicting this token from those before it; 0 on a document's first token.
    """

    tokens_rt: np.ndarray
    segments_rt: np.ndarray
    positions_rt: np.ndarray
    weights_rt: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens_rt)

    def take(self, rows: np.ndarray) -> Rows:
        return Rows(self.tokens_rt[rows], self.segments_rt[rows], self.positions_rt[rows], self.weights_rt[rows])

    @staticmethod
    def concatenate(parts: Sequence[Rows]) -> Rows:
        names = ("tokens_rt", "segments_rt", "positions_rt", "weights_rt")
        return Rows(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def conversations(folder: Path, name: str) -> list[Messages]:
    """Messages of a training set.

    Raises:
      ValueError: a set that is not for training, so that evaluation prompts can never leak in.
    """
    if name not in CHAT_SETS:
        raise ValueError(f"got training set {name!r}, expected one of {CHAT_SETS}")
    with (folder / f"{name}.jsonl").open(encoding="utf-8") as file:
        return [_messages(json.loads(line)) for line in file]


def stdlib_texts(characters: int, seed: int = 0) -> list[str]:
    """About this much source of the running Python's standard library (tests left out), in a seeded order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "lib2to3", "__pycache__", "pydoc_data"}
    paths = [path for path in sorted(root.rglob("*.py")) if not skipped & set(path.relative_to(root).parts)]
    random.Random(seed).shuffle(paths)
    texts, total = [], 0
    for path in paths:
        if total >= characters:
            break
        text = path.read_text(encoding="utf-8", errors="replace")
        texts.append(text)
        total += len(text)
    return texts


def chat_document(tokenizer: Tokenizer, messages: Messages, prompt_weight: float = PROMPT_WEIGHT) -> Document:
    """ChatML text as in the tokenizer's chat template; the assistant's words and its stop token weigh 1."""
    tokens: list[int] = []
    weights: list[float] = []
    for message in messages:
        own = message["role"] == "assistant"
        head = tokenizer.encode(f"<|im_start|>{message['role']}\n").ids
        body = tokenizer.encode(message["content"] + "<|im_end|>").ids
        tail = tokenizer.encode("\n").ids
        tokens += head + body + tail
        weights += [0.0] * len(head) + [1.0 if own else prompt_weight] * len(body) + [0.0] * len(tail)
    return Document(np.array(tokens, np.int32), np.array(weights, np.float32))


def chat_prompt(tokenizer: Tokenizer, messages: Messages) -> list[int]:
    """Token ids up to where the assistant starts to write."""
    text = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
    return tokenizer.encode(text + "<|im_start|>assistant\n").ids


def text_documents(tokenizer: Tokenizer, texts: Iterable[str], length: int) -> list[Document]:
    """Plain text cut into documents of at most `length` tokens, every token with weight 1."""
    documents = []
    for text in texts:
        ids = np.array(tokenizer.encode(text).ids, np.int32)
        documents += [Document(part, np.ones(len(part), np.float32)) for part in _cut(ids, length)]
    return documents


def response_documents(path: Path) -> list[Document]:
    """What `train.respond` wrote: the verifier's words weigh 1, the prompt 0."""
    with path.open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    return [
        Document(
            np.array(line["prompt"] + line["response"], np.int32),
            np.repeat(np.float32([0, 1]), [len(line["prompt"]), len(line["response"])]),
        )
        for line in lines
    ]


def pack(documents: Sequence[Document], length: int, open_rows: int = 16) -> Rows:
    """First fit into a few open rows. Documents longer than a row lose their end."""
    rows: list[list[Document]] = []
    open_: list[tuple[int, int]] = []  # (row, free tokens)
    for document in documents:
        size = min(len(document.tokens), length)
        at = next((i for i, (_, free) in enumerate(open_) if free >= size), None)
        if at is None:
            rows.append([])
            open_ = [*open_, (len(rows) - 1, length)][-open_rows:]
            at = len(open_) - 1
        row, free = open_[at]
        rows[row].append(document)
        open_[at] = (row, free - size)
    shape = (len(rows), length)
    packed = Rows(*(np.zeros(shape, dtype) for dtype in (np.int32, np.int32, np.int32, np.float32)))
    for r, members in enumerate(rows):
        start = 0
        for segment, document in enumerate(members, start=1):
            stop = min(start + len(document.tokens), length)
            packed.tokens_rt[r, start:stop] = document.tokens[: stop - start]
            packed.weights_rt[r, start:stop] = document.weights[: stop - start]
            packed.weights_rt[r, start] = 0
            packed.segments_rt[r, start:stop] = segment
            packed.positions_rt[r, start:stop] = np.arange(stop - start)
            start = stop
    return packed


def split(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents."""
    held_out = [document for i, document in enumerate(documents) if i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    return [document for i, document in enumerate(documents) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1], held_out


def schedule(sizes: Mapping[str, int], shares: Mapping[str, float], steps: int, batch: int, seed: int) -> np.ndarray:
    """Row indices [steps, b] into the concatenation of the sources, in the order of `sizes`.

    Each source gives its share of all rows, passing through its own rows in fresh random orders.
    """
    rng = np.random.default_rng(seed)
    chosen, offset = [], 0
    for name, size in sizes.items():
        wanted = round(steps * batch * shares[name] / sum(shares[n] for n in sizes))
        passes = [rng.permutation(size) for _ in range(-(-wanted // size))]
        chosen.append((np.concatenate(passes)[:wanted] if passes else np.empty(0, int)) + offset)
        offset += size
    rows = rng.permutation(np.concatenate(chosen))
    return np.resize(rows, (steps, batch))


def _messages(row: dict) -> Messages:
    if "conversations" in row:
        messages = row["conversations"]
    else:
        question, answer = row["turns"][0], row["reference"]["code"]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return [{"role": m["role"], "content": m["content"].replace("\r\n", "\n").strip()} for m in messages]


def _cut(ids: np.ndarray, length: int) -> list[np.ndarray]:
    return [ids[at : at + length] for at in range(0, len(ids), length)]
