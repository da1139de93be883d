"""Block efficiency (tau) of a drafter on held-out prompts while it trains."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from train.data import packing
from train.runtime.loop import Report
from train.runtime.training_state import TrainTask, gather
from treeflash_jax.core import programs
from treeflash_jax.core.parameters import Params
from treeflash_jax.core.settings import setting
from treeflash_jax.decoding.state import Weights
from treeflash_jax.drafters import Drafter
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.trees.tree_inputs import MAX_NODES

CANDIDATES = 16  # candidates per depth, the same on every machine


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Tree decoding of held-out prompts during training."""

    prompts: int = setting(16, "number of held-out prompts; 0 measures no tau", least=0)
    new_tokens: int = setting(64, "tokens generated per prompt", least=2)
    nodes: tuple[int, ...] = setting(
        (16, 64), "numbers of tree nodes that tau is measured for, root included", least=1, most=MAX_NODES
    )
    temperature: float = setting(0.0, "sampling temperature of the verifier; 0 is greedy", least=0)
    batch: int = setting(8, "prompts decoded together", least=1)


def make_tau_measure(
    settings: Any, task: TrainTask, pair: TreeFlash, corpus: packing.Corpus, frozen: Params
) -> Callable[[Params, Report], dict[str, float]]:
    """Returns a function that measures tau of trained weights, for each number of nodes and each system of the stage.

    Args:
      settings: a `drafting.DraftingStage`.
      pair: the verifier, and the config of the drafter.
      frozen: the drafter's other weights, by name.
    """
    config = settings.evaluate
    prompts = held_out_prompts(corpus, config.prompts)
    cast = programs.jit(lambda params: gather(params, task.specs, task.compute_dtype))
    sizes = {"candidates": CANDIDATES} if "candidates" in pair.drafter.settings else {}

    def measure(params: Params, report: Report) -> dict[str, float]:
        metrics = dict[str, float]()
        if not prompts:
            return metrics
        pair.weights = Weights(pair.weights.verifier, assemble(pair.drafter, {**frozen, **cast(params)}))
        for (name, system), nodes in product(settings.systems.items(), config.nodes):
            metric = f"held_out/{name}_{nodes}"
            what = " ".join([f"of {len(prompts)} prompts with", *map(str, system.values()), f"trees of {nodes} nodes"])
            report(f"evaluating 0 {what}")
            lengths = list[int]()
            answers = pair.generate_each(
                prompts,
                nodes=nodes,
                temperature=config.temperature,
                max_new_tokens=config.new_tokens,
                batch_size=min(config.batch, len(prompts)),
                **sizes | system,
            )
            for done, (_, result) in enumerate(answers, start=1):
                lengths += result.accept_lengths
                report(f"evaluating {done} {what}")
            if lengths:  # empty if every answer ends at its first token
                metrics[metric] = statistics.fmean(lengths)
        return metrics

    return measure


def assemble(drafter: Drafter, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the weights of a drafter from its parts, by name. Parts without weights may be missing."""
    return {name: parts.get(name, {}) for name in drafter.specs()}


def held_out_prompts(corpus: packing.Corpus, count: int) -> list[list[int]]:
    """Returns at most `count` prompts of held-out documents, spread evenly over all of them."""
    prompts = [document.prompt for packed in corpus.held_out.values() for document in packed.documents]
    return packing.pick_spread([prompt for prompt in prompts if prompt], count)
