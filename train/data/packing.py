"""Sequence packing: several documents share a training sequence of fixed length; batches mix sequences of all sources.

Tokens attend only within their document. The batch of a step depends on seed and step alone, not on the first step of a run
or the number of hosts, so that a resumed run sees the same batches.

Shape suffixes: b sequences, t tokens of a sequence, n tokens of a document.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import numpy as np

from train.data.documents import DataConfig, Document, read_documents
from train.data.records import Source
from treeflash_jax.formats.tokenizer import Tokenizer

T = TypeVar("T")
OPEN_SEQUENCES = 16  # number of newest sequences that still take documents while packing
PREFETCH_THREADS, PREFETCHED_STEPS = 2, 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedBatch:
    """Packed sequences; NumPy arrays until they are on devices (`hosts.place_batch`).

    Attributes:
      tokens_bt: ids; padding is 0.
      segments_bt: 1, 2, ... per document of a sequence; 0 for padding.
      positions_bt: position inside the document.
      weights_bt: loss weight of predicting each token: 1 for answers and texts, 0 for a document's first token.
      outputs_bto: recorded outputs of the verifier (`teacher.record`): tapped layers, then final states.
      progress_b: share of the run's steps that are done, the same for all sequences; None outside training steps.
    """

    tokens_bt: jax.Array
    segments_bt: jax.Array
    positions_bt: jax.Array
    weights_bt: jax.Array
    outputs_bto: jax.Array | None = None
    progress_b: jax.Array | None = None


@dataclass(frozen=True)
class PackedDataset:
    """Documents of a source, and the sequences that they share. Sequences are assembled on access.

    Attributes:
      documents: all documents in the order of the source.
      sequences: indices of the documents of each sequence.
      sequence_length: number of tokens of a sequence, padding included.
      outputs: `PackedBatch.outputs_bto` of all sequences.
    """

    documents: Sequence[Document]
    sequences: Sequence[Sequence[int]]
    sequence_length: int
    outputs: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def tokens(self) -> np.ndarray:
        """Token ids of all documents, one after another."""
        return np.concatenate([document.tokens_n for document in self.documents])

    def __getitem__(self, index: int) -> PackedBatch:
        return self.take([index])

    def take(self, indices: Sequence[int] | np.ndarray) -> PackedBatch:
        shape = (len(indices), self.sequence_length)
        out = PackedBatch(*(np.zeros(shape, dtype) for dtype in (np.int32, np.int32, np.int32, np.float32)))
        if self.outputs is not None:
            out = replace(out, outputs_bto=self.outputs[indices])
        for b, index in enumerate(indices):
            start = 0
            for segment, number in enumerate(self.sequences[index], start=1):
                document = self.documents[number]
                stop = start + len(document.tokens_n)
                out.tokens_bt[b, start:stop] = document.tokens_n
                out.segments_bt[b, start:stop] = segment
                out.positions_bt[b, start:stop] = np.arange(stop - start)
                out.weights_bt[b, start + 1 : stop] = document.weights_n[1:]
                start = stop
        return out


@dataclass(frozen=True)
class Corpus:
    """Packed datasets by the name of their source.

    Attributes:
      train: sequences to train on.
      held_out: sequences of other documents, for validation; it lacks sources without held-out documents.
      weights: relative share of each source in a batch.
      skipped: number of skipped records per source and reason; see `documents.read_documents`.
    """

    train: dict[str, PackedDataset]
    held_out: dict[str, PackedDataset]
    weights: dict[str, float]
    skipped: dict[str, dict[str, int]]

    @property
    def num_sequences(self) -> int:
        return sum(map(len, self.train.values()))

    @property
    def num_documents(self) -> int:
        return sum(len(packed.documents) for packed in self.train.values())

    def token_counts(self, vocab_size: int) -> np.ndarray:
        """Returns the number of occurrences of each id, including prompts and held-out documents."""
        counts = [np.bincount(p.tokens, minlength=vocab_size) for p in (*self.train.values(), *self.held_out.values())]
        return sum(counts, np.zeros(vocab_size, np.int64))

    def answer_counts(self, vocab_size: int) -> np.ndarray:
        """Returns the number of occurrences of each id among the tokens that are trained on."""
        answers = [x.tokens_n[x.weights_n > 0] for packed in self.train.values() for x in packed.documents]
        return np.bincount(np.concatenate(answers), minlength=vocab_size)

    def digest(self) -> str:
        """Returns the SHA-256 of all documents by source, held-out documents included: lengths, tokens and weights."""
        digest = hashlib.sha256()
        for name, packed in (*self.train.items(), *self.held_out.items()):
            digest.update(name.encode())
            for document in packed.documents:
                digest.update(b"%d:" % len(document.tokens_n))
                digest.update(document.tokens_n)
                digest.update(document.weights_n)
        return digest.hexdigest()

    def summary(self) -> str:
        """Returns one line per source."""
        lines = []
        for name, packed in self.train.items():
            fill = packed.tokens.size / (len(packed) * packed.sequence_length)
            held = len(self.held_out[name].documents) if name in self.held_out else 0
            sequences = f"{len(packed.documents):,} documents in {len(packed):,} sequences ({fill:.0%} full)"
            skipped = "".join(f", {count:,} {reason}" for reason, count in self.skipped[name].items())
            lines.append(f"{name}: {sequences}, {held:,} held out{skipped}")
        return "\n".join(lines)


def load_corpus(
    sources: Sequence[Source], config: DataConfig, tokenizer: Tokenizer | None, seed: int, vocab_size: int | None = None
) -> Corpus:
    """Reads, tokenises and packs every source. Ids must be below `vocab_size`.

    Raises ValueError for a source without a usable document, and the errors of `records.read_records` and
    `documents.read_documents`.
    """
    if not sources:
        raise ValueError("got no sources, expected at least one [[sources]] table")
    corpus = Corpus({}, {}, {}, {})
    for source in sources:
        name = source.name
        duplicates = 1
        while name in corpus.train:
            duplicates += 1
            name = f"{source.name}-{duplicates}"
        skipped: Counter[str] = Counter()
        kept: list[Document] = []
        held_out: list[Document] = []
        for number, document in read_documents(source, config, tokenizer, seed, vocab_size, skipped):
            (held_out if source.holds_out(number) else kept).append(document)
        if not kept:
            reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "all held out or empty"
            raise ValueError(f"{source.path}: got no document to train on ({reasons}), expected at least one")
        corpus.train[name] = pack(kept, config.sequence_length)
        if held_out:
            corpus.held_out[name] = pack(held_out, config.sequence_length)
        corpus.weights[name] = source.weight
        corpus.skipped[name] = dict(skipped)
    return corpus


def batches(
    corpus: Corpus, *, batch: int, seed: int, start: int, stop: int, members: Sequence[int] | None = None
) -> Iterator[PackedBatch]:
    """Yields the batch of every step in [start, stop), prefetched by threads.

    Sources contribute their shares in a fixed pattern. The sequences of each are in a new random order every epoch.

    Args:
      members: indices of the sequences to yield of each batch; None: all.
    """
    import grain  # slow to import, and only training needs it

    members = range(batch) if members is None else members
    streams = []
    for number, packed in enumerate(corpus.train.values()):
        # Sources of equal length must be shuffled differently.
        [source_seed] = np.random.SeedSequence((seed, number)).generate_state(1)
        streams.append(grain.MapDataset.source(packed).seed(int(source_seed)).shuffle().repeat())
    mixed = grain.MapDataset.mix(streams, list(corpus.weights.values()))

    def form(step: int) -> PackedBatch:
        return jax.tree.map(lambda *x_bt: np.concatenate(x_bt), *(mixed[step * batch + i] for i in members))

    if start >= stop:
        return iter(())
    options = grain.ReadOptions(num_threads=PREFETCH_THREADS, prefetch_buffer_size=PREFETCHED_STEPS)
    return iter(grain.MapDataset.range(start, stop).map(form).to_iter_dataset(options))


def spread(count: int, size: int) -> np.ndarray:
    """Returns `count` indices spread evenly over range(size), in order. Some are repeated if `size` is smaller."""
    return np.arange(count) * size // count if count <= size else np.arange(count) % size


def pick_spread(items: Sequence[T], count: int) -> list[T]:
    """Returns at most `count` of the items, spread evenly over them, in order."""
    return [items[i] for i in spread(min(count, len(items)), len(items))]


def pack(documents: Sequence[Document], sequence_length: int) -> PackedDataset:
    """Packs each document into the oldest of the OPEN_SEQUENCES newest sequences that has room for it."""
    sequences: list[list[int]] = []
    room: list[int] = []  # free tokens of each sequence
    for number, document in enumerate(documents):
        size = len(document.tokens_n)
        newest = range(max(0, len(sequences) - OPEN_SEQUENCES), len(sequences))
        chosen = next((index for index in newest if room[index] >= size), len(sequences))
        if chosen == len(sequences):
            sequences.append([])
            room.append(sequence_length)
        sequences[chosen].append(number)
        room[chosen] -= size
    return PackedDataset(documents, sequences, sequence_length)
