"""Turns an automaton over bytes into arrays over a vocabulary's tokens, which `decoding.automaton` runs on the device.

Shape suffixes: b batch, q states, c classes, v vocabulary, k classes of bytes, y bytes, e edges.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from treeflash_jax.constraints.compile_bytes import Unusable
from treeflash_jax.constraints.compiler.byte_automaton import ByteAutomaton
from treeflash_jax.constraints.compiler.characters import NO_UTF8
from treeflash_jax.constraints.compiler.structural_tags import marker
from treeflash_jax.decoding.automaton import NOWHERE, Automaton
from treeflash_jax.formats.tokenizer import Tokenizer

MOST_TABLE_BYTES = 64 * 2**20


class AutomatonTable(NamedTuple):
    """The automaton of a sequence; see `decoding.automaton.Automaton`.

    Attributes:
      next_qc: state after a token of each class.
      class_v: class of each token.
    """

    next_qc: np.ndarray
    class_v: np.ndarray

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self)

    def follow(self, ids: Sequence[int]) -> int:
        """Returns the state after allowed tokens."""
        return functools.reduce(lambda state, token: int(self.next_qc[state, self.class_v[token]]), ids, 0)


@functools.lru_cache(maxsize=4)
def allow_all(vocab_size: int) -> AutomatonTable:
    """Returns the automaton that allows every token. Cached, because requests without a constraint share it."""
    return AutomatonTable(np.zeros((1, 1), np.int32), np.zeros(vocab_size, np.int32))


def stack(tables: Sequence[AutomatonTable | None], states: int, classes: int, vocab_size: int) -> Automaton:
    """Returns the automata of a batch, padded to these sizes with unreachable states and unused classes.

    A table that is None allows everything.
    """
    tables = [table or allow_all(vocab_size) for table in tables]
    next_bqc = np.full((len(tables), states, classes), NOWHERE, np.int32)
    for next_qc, table in zip(next_bqc, tables, strict=True):
        used_states, used_classes = table.next_qc.shape
        next_qc[:used_states, :used_classes] = table.next_qc
    return Automaton(next_bqc, np.stack([table.class_v for table in tables]))


def make_table(
    automaton: ByteAutomaton,
    tokenizer: Tokenizer,
    stop_ids: Sequence[int],
    vocab_size: int,
    tokens: Sequence[str] = (),
) -> AutomatonTable:
    """Turns an automaton over bytes into one over tokens. Ids that end an answer are allowed after a complete text.

    An id that ends an answer may also be one of the tokens in the constraint. If so, it is only allowed where it completes
    the text, and no other id may end the answer there.

    Args:
      tokens: texts of the added tokens in the constraint, in the order of their markers.

    Raises Unusable for a table that is too large, if the vocabulary's tokens cannot write a complete text, and for a
    constraint that continues after a token that ends the answer.
    """
    is_final_q = automaton.is_final_q
    added = {token.content: id for id, token in tokenizer.inner.added_tokens_decoder.items()}
    # A token that contains the byte of markers, which is not text, could begin a marker.
    texts = {id: text for id, text in tokenizer.token_bytes.items() if id < vocab_size and NO_UTF8 not in text}
    missing = [text for text in tokens if added[text] >= vocab_size]
    if missing:
        raise Unusable(f"which has the token {missing[0]!r}, for which the model has no embedding")
    texts |= {added[text]: marker(index) for index, text in enumerate(tokens)}
    columns, class_v = _token_classes(automaton, texts, vocab_size)
    complete_q = np.where(is_final_q, np.arange(is_final_q.size), NOWHERE)
    marked = {added[text]: text for text in tokens}
    for id in stop_ids:
        after_q = columns[class_v[id]] if id in marked else np.full_like(complete_q, NOWHERE)
        if not is_final_q[after_q[after_q != NOWHERE]].all():
            raise Unusable(f"which goes on behind {marked[id]!r}, a token that ends an answer")
        class_v[id] = len(columns)
        columns.append(np.where(after_q == NOWHERE, complete_q, after_q))
    classes, class_v = np.unique(class_v, return_inverse=True)
    next_qc = np.stack([columns[number] for number in classes], axis=1)
    is_useful_q = _is_useful(next_qc, is_final_q)
    if not is_useful_q[0]:
        raise Unusable("which no answer in this model's tokens matches")
    number_q = np.where(is_useful_q, np.cumsum(is_useful_q) - 1, NOWHERE)
    next_qc = np.append(number_q, NOWHERE)[next_qc[is_useful_q]]
    return AutomatonTable(next_qc.astype(np.int32), class_v.astype(np.int32))


def _token_classes(
    automaton: ByteAutomaton, texts: Mapping[int, bytes], vocab_size: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the next states of each class of tokens, and the class of each token.

    Texts of one class lead from every state to the same next state. The class of a token follows from the class of its text
    without the last byte, and the class of the last byte.
    """
    columns: list[np.ndarray] = []
    numbers: dict[bytes, int] = {}
    followed: dict[tuple[int, int], int] = {}

    def number(column_q: np.ndarray) -> int:
        kind = numbers.setdefault(column_q.tobytes(), len(columns))
        if kind == len(columns):
            if column_q.nbytes * kind > MOST_TABLE_BYTES:
                raise Unusable(
                    f"whose {column_q.size:,} states x {kind:,} kinds of tokens exceed {MOST_TABLE_BYTES >> 20} MiB"
                )
            columns.append(column_q)
        return kind

    next_qk, class_y, _ = automaton
    nowhere = number(np.full(len(next_qk), NOWHERE, np.int32))
    empty = number(np.arange(len(next_qk), dtype=np.int32))
    byte_class = [number(next_qk[:, kind]) for kind in class_y]
    class_v = np.full(vocab_size, nowhere)
    for token, text in texts.items():
        at = empty
        for byte in text:
            step = at, byte_class[byte]
            if step not in followed:
                followed[step] = number(np.append(columns[step[1]], np.int32(NOWHERE))[columns[at]])
            at = followed[step]
        class_v[token] = at
    return columns, class_v


def _is_useful(next_qc: np.ndarray, is_final_q: np.ndarray) -> np.ndarray:
    """Returns whether each state can be reached from the first one and can reach a final state, [q]."""
    from scipy import sparse  # takes long to import
    from scipy.sparse import csgraph

    source_e, class_e = np.nonzero(next_qc != NOWHERE)
    end, final = len(next_qc), np.flatnonzero(is_final_q)  # a further state, which follows the final ones
    edges = np.append(source_e, final), np.append(next_qc[source_e, class_e], np.full(final.size, end))
    graph = sparse.csr_array((np.ones(edges[0].size, bool), edges), shape=(end + 1, end + 1))
    after = csgraph.breadth_first_order(graph, 0, return_predecessors=False)
    before = csgraph.breadth_first_order(graph.T.tocsr(), end, return_predecessors=False)
    return np.isin(np.arange(end), np.intersect1d(after, before))
