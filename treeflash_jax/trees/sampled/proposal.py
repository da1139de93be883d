"""The distribution that the nodes of a tree were drawn from, read by acceptance rules.

Shape suffixes: b batch, n tree nodes (root included), c children kept per node, x draws.
"""

import jax
from flax import struct

DETERMINISTIC, WITHOUT_REPLACEMENT, WITH_REPLACEMENT = 0, 1, 2  # kinds of nodes


@struct.dataclass
class Proposal:
    """Distribution that sampled nodes were drawn from.

    The children of a node are tested in the order of their draws. The first sampled child has the distribution `log_q`.
    With replacement, a later child has the same distribution. Without replacement, its distribution is renormalised on the
    remaining tokens. Deterministic children have probability 0 under `log_q`: they were chosen before anything was drawn.

    Attributes:
      support_bnc: possible token ids of a node's children: distinct, except for entries of NO_TOKEN.
      log_q_bnc: log-probabilities of these tokens; -inf for tokens that could not be drawn, and for nodes without draws.
      node_bx: the node of each draw, in the order of the tests; i.i.d. duplicates share a node but are tested with
        multiplicity. 0 (the root) if there was no draw.
      slot_bx: index of the drawn token in the support of the parent.
      kind_bx: DETERMINISTIC, WITHOUT_REPLACEMENT or WITH_REPLACEMENT.
      depths: the deepest level that a node can have; static.
    """

    support_bnc: jax.Array
    log_q_bnc: jax.Array
    node_bx: jax.Array
    slot_bx: jax.Array
    kind_bx: jax.Array
    depths: int = struct.field(pytree_node=False)
