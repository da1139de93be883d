"""Sequences and batches against brute force: first fit, shares of sources, epochs, and members of a host."""

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from train.data import packing
from train.data.packing import Corpus, Document


def numbered(sizes, first: int = 1) -> list[Document]:
    """Document i is made of the token i + first only."""
    return [Document(np.full(n, i), np.full(n, 0.5 + i % 2)) for i, n in enumerate(sizes, start=first)]


@given(st.lists(st.integers(1, 12), max_size=60))
@example([10] * 20 + [2])  # more sequences with room than stay open
@settings(deadline=None, max_examples=60)
def test_packing_is_first_fit_and_keeps_documents_whole_and_apart(sizes):
    packed = packing.pack(numbered(sizes), 12)
    batch = packed.take(np.arange(len(packed)))
    expected: list[list[int]] = []
    for document, size in enumerate(sizes, start=1):
        newest = range(max(0, len(expected) - packing.OPEN_SEQUENCES), len(expected))
        fitting = [b for b in newest if sum(sizes[d - 1] for d in expected[b]) + size <= 12]
        if not fitting:
            expected.append([])
        expected[fitting[0] if fitting else -1].append(document)
    assert len(batch.tokens_bt) == len(expected)
    for b, members in enumerate(expected):
        start = 0
        for segment, d in enumerate(members, start=1):
            stop = start + sizes[d - 1]
            assert set(batch.segments_bt[b, start:stop]) == {segment} and set(batch.tokens_bt[b, start:stop]) == {d}
            np.testing.assert_array_equal(batch.positions_bt[b, start:stop], np.arange(stop - start))
            assert batch.weights_bt[b, start] == 0 and np.all(batch.weights_bt[b, start + 1 : stop] == 0.5 + d % 2)
            start = stop
        for name in ("tokens_bt", "segments_bt", "positions_bt", "weights_bt"):
            assert not getattr(batch, name)[b, start:].any()


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    train = {
        name: packing.pack(numbered([5] * n, first), 5) for name, n, first in (("a", 7, 1), ("b", 23, 100), ("c", 1, 200))
    }
    return Corpus(train, {}, {"a": 0.2, "b": 0.7, "c": 0.1}, {})


def shown(corpus: Corpus, stop: int, **arguments) -> list[int]:
    """Returns the document of each sequence, batch after batch."""
    steps = packing.batches(corpus, start=0, stop=stop, **arguments)
    return np.concatenate([batch.tokens_bt[:, 0] for batch in steps]).tolist()


@given(st.integers(0, 40), st.integers(0, 6), st.integers(0, 2**31))
@settings(deadline=None, max_examples=10)
def test_a_batch_depends_on_seed_and_step_only_and_a_host_reads_its_members(corpus, start, count, seed):
    steps = list(packing.batches(corpus, batch=8, seed=seed, start=start, stop=start + count))
    assert len(steps) == count and all(len(batch.tokens_bt) == 8 for batch in steps)
    for step, batch in enumerate(steps, start=start):
        [alone] = packing.batches(corpus, batch=8, seed=seed, start=step, stop=step + 1)
        jax.tree.map(np.testing.assert_array_equal, batch, alone)
    for members in ([0, 1], [3, 6, 7]):
        part = packing.batches(corpus, batch=8, seed=seed, start=start, stop=start + count, members=members)
        for batch, joined in zip(part, steps, strict=True):
            np.testing.assert_array_equal(batch.tokens_bt, joined.tokens_bt[members])


def test_sources_give_their_shares_and_complete_epochs_in_fresh_orders(corpus):
    seen = shown(corpus, 50, batch=8, seed=5)
    for low, high, count, share in ((1, 99, 7, 0.2), (100, 199, 23, 0.7), (200, 299, 1, 0.1)):
        documents = [d for d in seen if low <= d <= high]
        assert len(documents) == pytest.approx(share * len(seen), abs=2)
        epochs = [documents[at : at + count] for at in range(0, len(documents) - count + 1, count)]
        assert all(len(set(epoch)) == count for epoch in epochs), "one came back before all others were seen"
        assert count == 1 or len(set(map(tuple, epochs))) > len(epochs) // 2
    assert seen != shown(corpus, 50, batch=8, seed=6)
