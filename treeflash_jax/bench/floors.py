"""Least times of the phases of a round: bytes and FLOPs of one device (costs.py) over rates measured on the same machine.

Bytes of a phase, on one device of the mesh:

- weights that the phase uses, read once; of a mixture of experts, those of the experts that a token was routed to, as
  measured on the tokens that are timed (in a prefill: the number that routing at random would choose).
- keys and values of the `context` committed positions, read once; new ones that are kept, written once. Slots of the cache
  beyond the context do not count, though an implementation may read them.
- data that a phase hands to the next (block, transition table, logits, features, new keys and values), when it is timed as
  its own program: written once and read once. A whole round need not move any of it, so its floor leaves that out: a
  round's floor is below the sum of its phases' floors.

FLOPs: every weight with every token it meets, queries with the context and with the token itself. Other new tokens
(ancestors, half a prompt) count for prefill and the drafter's block only.

Floor = max(bytes / copy rate, FLOPs / matmul rate). Collectives count as nothing.
"""

from collections.abc import Mapping
from typing import Any

from treeflash_jax.bench.draft_work import draft_work, extend_work
from treeflash_jax.decoding.state import DecodePlan
from treeflash_jax.models.costs import Counter, Work


def phase_work(
    plan: DecodePlan,
    *,
    batch: int,
    context: int,
    dtype: Any,
    mesh: Any = None,
    quantize: str | None = None,
    experts: Mapping[int, float] | None = None,
) -> dict[str, Work]:
    """Counts the work of every phase of a plan that drafts, on one device; see the module for what counts.

    Args:
      context: committed positions per sequence.
      experts: distinct experts that a layer reads on one device, by tokens per sequence, as measured; for other numbers of
        tokens, routing at random is assumed.

    Returns:
      By name: "draft", "tree", "verify", "accept", "commit", "round", "step" (one token without drafting) and
      "prefill" (one token of a prompt of `context` tokens, all sequences of the batch counted).
    """
    count = Counter(dtype=dtype, batch=batch, context=context, mesh=mesh)
    model, drafter, nodes, path = plan.verifier, plan.drafter, plan.num_nodes, plan.path_length

    def verify(tokens: int) -> Work:
        read = (experts or {}).get(tokens)
        passes = count.layers(model, tokens, context + 1, quantize, read) + count.vocabulary(model, tokens, quantize)
        return passes + count.cached(model, context)

    def features(tokens: int) -> Work:
        shape = (tokens, len(drafter.taps) * model.hidden_size)
        return count.numbers((None, None), shape) + count.cached(model, tokens)

    logits = count.numbers((None, "vocab"), (nodes, model.vocab_size))
    commit = extend_work(count, drafter, path) + count.cached(model, path)
    draft, levels = draft_work(count, plan, quantize)
    # The needs of each phase, and what it hands on.
    phases = {"draft": (draft, Work()), "tree": (levels, Work()), "verify": (verify(nodes), logits + features(nodes))}
    work, before = {}, Work()
    for phase, (need, after) in phases.items():
        work[phase] = need + before + after
        before = after
    prompt = count.layers(model, context, (context + 1) / 2, quantize) + count.vocabulary(model, 1, quantize)
    prompt += count.cached(model, context) + extend_work(count, drafter, context)
    return {
        **work,
        "accept": logits,
        "commit": commit + features(path),
        "round": sum((need for need, _ in phases.values()), commit),
        "step": verify(1) + count.cached(model, 1),
        "prefill": prompt.over(batch * context),
    }
