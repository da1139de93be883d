"""What a stage cannot be faster than: the bytes and FLOPs of one device (costs.py) over rates measured on the same machine.

Bytes of a stage, on one device of the mesh:

- weights that the stage uses, read once; of a mixture of experts, those of the experts that some row was routed to, as
  measured on the rows that are timed (in a prefill: as many as routing at random would choose).
- keys and values of the `context` committed positions, read once; new ones that are kept, written once. Slots of the cache
  beyond the context are nobody's need, though an implementation may read them.
- what a stage hands to the next one (block, transition table, logits, features, new keys and values), where it is timed as
  a program of its own: written once by the one, read once by the other. A whole round need not move any of it, so its floor
  leaves that out: a round's floor lies below the sum of its stages' floors.

FLOPs: every weight with every token it meets, queries with the context and with the token itself. Other new tokens
(ancestors, half a prompt) are counted for prefill and the drafter's block only.

Floor = max(bytes / copy rate, FLOPs / matmul rate). Collectives count as nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treeflash_jax import drafters
from treeflash_jax.costs import Counter, Work
from treeflash_jax.decoding.state import DecodePlan


def stages_of(plan: DecodePlan) -> list[str]:
    """Names of the stages of a round, in order."""
    drafting = drafters.of(plan.drafter).stages(plan.drafter) if plan.drafts else ()
    return [*drafting, "tree", "verify", "accept", "commit"]


def stage_work(
    plan: DecodePlan,
    *,
    batch: int,
    context: int,
    dtype: Any,
    mesh: Any = None,
    quantize: str | None = None,
    experts: Mapping[int, float] | None = None,
) -> dict[str, Work]:
    """The work of every stage of a plan that drafts; see the module for what counts.

    Args:
      plan: sizes, nodes, candidates and children.
      context: committed positions of each of them.
      mesh: sizes of one device's share; None: one device.
      quantize: scheme of the verifier's matrices.
      experts: distinct experts that a layer reads on one device, by tokens of a sequence, where that was measured; others
        are those of routing at random.

    Returns:
      By name: those of `stages_of`, "round", "step" (one token without drafting) and "prefill" (one token of a prompt of
      `context` tokens, all sequences of the batch counted).
    """
    count = Counter(dtype=dtype, batch=batch, context=context, mesh=mesh)
    model, drafter, nodes, path = plan.verifier, plan.drafter, plan.num_nodes, plan.path_rows
    own = drafters.of(drafter)

    def verify(tokens: int) -> Work:
        read = (experts or {}).get(tokens)
        passes = count.layers(model, tokens, context + 1, quantize, read) + count.vocabulary(model, tokens, quantize)
        return passes + count.cached(model, context)

    def features(tokens: int) -> Work:
        shape = (tokens, len(drafter.taps) * model.hidden_size)
        return count.numbers((None, None), shape) + count.cached(model, tokens)

    logits = count.numbers((None, "vocab"), (nodes, model.vocab_size))
    commit = own.extend_work(count, drafter, path) + count.cached(model, path)
    stages = own.work(count, drafter, plan.draft, model, quantize)  # what each needs, and what it hands on
    stages = stages | {"tree": stages.get("tree", (Work(), Work())), "verify": (verify(nodes), logits + features(nodes))}
    work, before = {}, Work()
    for stage, (need, after) in stages.items():
        work[stage] = need + before + after
        before = after
    prompt = count.layers(model, context, (context + 1) / 2, quantize) + count.vocabulary(model, 1, quantize)
    prompt += count.cached(model, context) + own.extend_work(count, drafter, context)
    return {
        **work,
        "accept": logits,
        "commit": commit + features(path),
        "round": sum((need for need, _ in stages.values()), commit),
        "step": verify(1) + count.cached(model, 1),
        "prefill": prompt.over(batch * context),
    }
