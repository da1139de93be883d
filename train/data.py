"""Batches of training text: documents tokenised and weighted, packed into rows of fixed length, mixed, dealt to hosts.

A row holds several documents; a token sees its own document only. The rows of a step are a function of (seed, step) alone,
whatever step a run starts at and however many hosts share it, so that a resumed run sees the batches it would have seen.

Shape suffixes: r rows, t tokens of a row, n tokens of a document, k documents in the order of their rows.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from train.documents import DataConfig, Document, documents
from train.records import Source
from treeflash_jax.formats.tokenizer import Tokenizer

OPEN_ROWS = 16  # rows that still take documents while packing
PREFETCH_THREADS, PREFETCHED_STEPS = 2, 8


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
        return jax.tree.map(lambda x_rt: x_rt[rows], self)


@dataclass(frozen=True)
class Packed:
    """Documents and their places in rows. Rows are formed when they are asked for: the documents are kept once, flat.

    Attributes:
      tokens: of all documents, one after the other, int32.
      weights: likewise, float16.
      offsets: where each document begins in them, and the end of the last.
      document_k: documents, row after row.
      start_k: column at which each of them begins.
      first_r: where each row's documents begin in `document_k`, and their number at the end.
      row_tokens: length of a row.
    """

    tokens: np.ndarray
    weights: np.ndarray
    offsets: np.ndarray
    document_k: np.ndarray
    start_k: np.ndarray
    first_r: np.ndarray
    row_tokens: int

    def __len__(self) -> int:
        return len(self.first_r) - 1

    @property
    def num_documents(self) -> int:
        return len(self.document_k)

    def __getitem__(self, row: int) -> Rows:
        return self.take([row])

    def prompt(self, document: int) -> list[int]:
        """What stands before the first trained token of a document; empty where that is less than two tokens."""
        begin, end = self.offsets[document], self.offsets[document + 1]
        (trained,) = np.nonzero(self.weights[begin + 1 : end])
        return self.tokens[begin : begin + 1 + trained[0]].tolist() if len(trained) and trained[0] else []

    def take(self, rows: Sequence[int] | np.ndarray) -> Rows:
        shape = (len(rows), self.row_tokens)
        out = Rows(*(np.zeros(shape, dtype) for dtype in (np.int32, np.int32, np.int32, np.float32)))
        for r, row in enumerate(rows):
            for segment, k in enumerate(range(self.first_r[row], self.first_r[row + 1]), start=1):
                begin, end = self.offsets[self.document_k[k]], self.offsets[self.document_k[k] + 1]
                start, stop = self.start_k[k], self.start_k[k] + end - begin
                out.tokens_rt[r, start:stop] = self.tokens[begin:end]
                out.segments_rt[r, start:stop] = segment
                out.positions_rt[r, start:stop] = np.arange(end - begin)
                out.weights_rt[r, start + 1 : stop] = self.weights[begin + 1 : end]
        return out


@dataclass(frozen=True)
class Corpus:
    """Packed rows of every source, by its name.

    Attributes:
      train: rows to train on.
      held_out: rows to validate on, of other documents; sources that hold none out are missing.
      weights: share of a batch's rows, relative to each other.
      skipped: records left out per source: "malformed", "too long"; or kept in part: "cut".
    """

    train: dict[str, Packed]
    held_out: dict[str, Packed]
    weights: dict[str, float]
    skipped: dict[str, dict[str, int]]

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.train.values()))

    def token_counts(self, vocab_size: int) -> np.ndarray:
        """How often each id occurs, prompts and held-out documents included."""
        packs = (*self.train.values(), *self.held_out.values())
        return sum(np.bincount(packed.tokens, minlength=vocab_size) for packed in packs)

    def digests(self) -> dict[str, str]:
        """SHA-256 of the documents of each source, those held out included: tokens, weights and lengths, in order."""
        digests = {}
        for name, packed in self.train.items():
            digest = hashlib.sha256()
            for part in (packed, self.held_out.get(name, pack([], packed.row_tokens))):
                for array_ in (part.offsets, part.tokens, part.weights):
                    digest.update(array_)
            digests[name] = digest.hexdigest()
        return digests

    def summary(self) -> str:
        """One line a source."""
        lines = []
        for name, packed in self.train.items():
            fill = len(packed.tokens) / (len(packed) * packed.row_tokens)
            held = self.held_out[name].num_documents if name in self.held_out else 0
            rows = f"{packed.num_documents:,} documents in {len(packed):,} rows ({fill:.0%} full)"
            left = "".join(f", {count:,} {reason}" for reason, count in self.skipped[name].items())
            lines.append(f"{name}: {rows}, {held:,} held out{left}")
        return "\n".join(lines)


def open_sources(
    sources: Sequence[Source], config: DataConfig, tokenizer: Tokenizer | None, seed: int, vocab_size: int | None = None
) -> Corpus:
    """Reads, tokenises and packs every source.

    Args:
      config: what documents become.
      tokenizer: None will do where every source holds responses.
      seed: of the order that a source's limit counts in.
      vocab_size: ids must be below it.

    Raises:
      ValueError: a place that is missing, empty, or an evaluation set; by file and line, a record that cannot be used and
        that `config` does not skip; a source of which nothing is left.
    """
    if not sources:
        raise ValueError("got no sources, expected at least one [[sources]] table")
    corpus = Corpus({}, {}, {}, {})
    for source in sources:
        name = _unused(source.name, corpus.train)
        counts: Counter[str] = Counter()
        kept, held_out = _Flat(), _Flat()
        for number, document in documents(source, config, tokenizer, seed, vocab_size, counts):
            is_held_out = source.hold_out and number % source.hold_out == source.hold_out - 1
            (held_out if is_held_out else kept).add(document)
        if not len(kept):
            reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items()) or "all held out or empty"
            raise ValueError(f"{source.path}: got no document to train on ({reasons}), expected at least one")
        corpus.train[name] = kept.pack(config.row_tokens)
        if len(held_out):
            corpus.held_out[name] = held_out.pack(config.row_tokens)
        corpus.weights[name], corpus.skipped[name] = source.weight, dict(counts)
    return corpus


def batches(
    corpus: Corpus, *, batch: int, seed: int, start: int, stop: int, host: int = 0, hosts: int = 1
) -> Iterator[Rows]:
    """This host's rows of every step in [start, stop), formed ahead by threads.

    Host h takes rows [h batch / hosts, (h + 1) batch / hosts) of a step's batch. Sources give their shares in a fixed
    pattern, each passing through its own rows in fresh random orders: a row comes back when all the others have been seen.

    Raises:
      ValueError: a batch that the hosts do not divide.
    """
    import grain  # slow to import; here and below only training needs it

    steps = grain.MapDataset.range(start, max(start, stop)).map(_former(corpus, batch, seed, host, hosts))
    if not len(steps):
        return iter(())
    options = grain.ReadOptions(num_threads=PREFETCH_THREADS, prefetch_buffer_size=PREFETCHED_STEPS)
    return iter(steps.to_iter_dataset(options))


def at(corpus: Corpus, step: int, *, batch: int, seed: int, host: int = 0, hosts: int = 1) -> Rows:
    """What `batches` yields for one step, without threads."""
    return _former(corpus, batch, seed, host, hosts)(step)


def spread(count: int, size: int) -> np.ndarray:
    """`count` indices spread evenly over range(size), in order; from 0 again where there are not so many."""
    return np.arange(count) * size // count if count <= size else np.arange(count) % size


def pack(members: Iterable[Document], row_tokens: int) -> Packed:
    """First fit of documents, none longer than a row, into rows of which the newest few are open."""
    flat = _Flat()
    for document in members:
        flat.add(document)
    return flat.pack(row_tokens)


class _Flat:
    """Grows flat arrays of documents in place, without a copy per document and at the end."""

    def __init__(self) -> None:
        self.tokens, self.weights, self.offsets = array("i"), array("H"), array("q", [0])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def add(self, document: Document) -> None:
        self.tokens.frombytes(np.ascontiguousarray(document.tokens_n, np.int32).tobytes())
        self.weights.frombytes(np.ascontiguousarray(document.weights_n, np.float16).tobytes())
        self.offsets.append(len(self.tokens))

    def pack(self, row_tokens: int) -> Packed:
        offsets = np.frombuffer(self.offsets, np.int64)
        row_d, start_d = _first_fit(np.diff(offsets).tolist(), row_tokens)
        document_k = np.argsort(row_d, kind="stable")
        first_r = np.searchsorted(row_d[document_k], np.arange(row_d.max(initial=-1) + 2))
        tokens, weights = np.frombuffer(self.tokens, np.int32), np.frombuffer(self.weights, np.float16)
        return Packed(tokens, weights, offsets, document_k, start_d[document_k], first_r, row_tokens)


def _first_fit(sizes: Sequence[int], row_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and first column of every document."""
    placed = np.zeros((2, len(sizes)), np.int64)
    free: dict[int, int] = {}  # of the open rows, oldest first
    rows = 0
    for document, size in enumerate(sizes):
        if size > row_tokens:
            raise ValueError(f"got a document of {size} tokens, expected at most {row_tokens}")
        row = next((row for row, room in free.items() if room >= size), rows)
        if row == rows:
            rows += 1
            free[row] = row_tokens
            if len(free) > OPEN_ROWS:
                del free[next(iter(free))]
        placed[:, document] = row, row_tokens - free[row]
        free[row] -= size
    return placed[0], placed[1]


def _former(corpus: Corpus, batch: int, seed: int, host: int, hosts: int) -> Callable[[int], Rows]:
    """The function that forms a host's rows of a step."""
    import grain

    if batch < 1 or hosts < 1 or batch % hosts or not 0 <= host < hosts:
        raise ValueError(f"got a batch of {batch} rows for host {host} of {hosts}, expected a multiple of the hosts")
    share = batch // hosts
    streams = []
    for number, packed in enumerate(corpus.train.values()):
        own_seed = np.random.SeedSequence((seed, number)).generate_state(1)[
            0
        ]  # sources of one length must not march in step
        streams.append(grain.MapDataset.source(packed).seed(int(own_seed)).shuffle().repeat())
    mixed = grain.MapDataset.mix(streams, list(corpus.weights.values()))

    def form(step: int) -> Rows:
        first = step * batch + host * share
        rows = [mixed[index] for index in range(first, first + share)]
        return jax.tree.map(lambda *parts_rt: np.concatenate(parts_rt), *rows)

    return form


def _unused(name: str, taken: Iterable[str]) -> str:
    count = 1
    unused = name
    while unused in taken:
        count += 1
        unused = f"{name}-{count}"
    return unused
