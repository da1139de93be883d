"""Block efficiency (tau) of a drafter on held-out prompts while it trains."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax

import treeflash_jax as tf
from train.data import packing
from train.runtime.loop import Evaluating
from train.runtime.training_state import Stage, gather
from treeflash_jax import drafters
from treeflash_jax.core import devices
from treeflash_jax.core.checks import bounded
from treeflash_jax.decoding.loops import Weights
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.trees.shape import Nodes


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Tree decoding of held-out prompts during training.

    Attributes:
      prompts: number of held-out prompts; 0 measures no tau.
      new_tokens: tokens generated per prompt.
      nodes: numbers of tree nodes that tau is measured for, root included.
      temperature: sampling temperature of the verifier; 0 is greedy.
      candidates: candidate tokens per depth (M) and children per candidate (K) of the tree.
      batch: prompts decoded together.
    """

    prompts: int = bounded(16, least=0)
    new_tokens: int = bounded(64, least=1)
    nodes: tuple[Nodes, ...] = (16, 64)
    temperature: float = bounded(0.0, least=0)
    candidates: int = bounded(16, least=1)
    batch: int = bounded(8, least=1)


class TreeTau:
    """Measures tau of the drafter being trained, with every way of decoding that its stage names.

    Args:
      settings: a `stages.drafting.DraftingStage`.
    """

    def __init__(
        self,
        settings: Any,
        stage: Stage,
        model: ModelConfig,
        drafter: Any,
        corpus: packing.Corpus,
        frozen: Any,
        mesh: jax.sharding.Mesh,
        stop_ids: Sequence[int],
    ):
        self.settings, self.frozen = settings, frozen
        self.prompts = held_out_prompts(corpus, settings.evaluate.prompts)
        self.model = tf.TreeFlash(model, Weights(frozen["verifier"]), drafter=drafter, stop_ids=stop_ids, mesh=mesh)
        self.cast = devices.jit(lambda params: gather(params, stage.specs, stage.compute_dtype))
        module, candidates = drafters.of(drafter), settings.evaluate.candidates
        self.options = {name: candidates for name in ("candidates", "children") if hasattr(module.OPTIONS, name)}
        self.names = tuple(module.specs(drafter))
        self.known: dict[str, float] = {}

    def __call__(self, params: Any, report: Evaluating) -> dict[str, float]:
        """Measures tau of these weights by number of nodes; `report` receives the number of finished prompts."""
        if not self.prompts:
            return {}
        parts, config, count = self.frozen | self.cast(params), self.settings.evaluate, len(self.prompts)
        self.model.weights = Weights(self.frozen["verifier"], {name: parts.get(name, {}) for name in self.names})
        for (name, options), nodes in product(self.settings.systems.items(), config.nodes):
            metric = f"held_out/{name}_{nodes}"
            if name in self.settings.constant and metric in self.known:
                continue
            what = " ".join(["prompts with", *map(str, options.values()), f"trees of {nodes} nodes"])
            report(0, count, what)
            answers = self.model.generate_each(
                self.prompts,
                nodes=nodes,
                **self.options | options,
                temperature=config.temperature,
                max_new_tokens=config.new_tokens,
                batch_size=min(config.batch, count),
            )
            lengths: list[int] = []
            for done, (_, result) in enumerate(answers, start=1):
                lengths += result.accept_lengths
                report(done, count, what)
            self.known[metric] = statistics.fmean(lengths)
        return dict(self.known)


def held_out_prompts(corpus: packing.Corpus, count: int) -> list[list[int]]:
    """Returns at most `count` prompts of held-out documents, spread evenly over all of them."""
    prompts = [packed.prompt(number) for packed in corpus.held_out.values() for number in range(packed.num_documents)]
    return packing.pick_spread([prompt for prompt in prompts if prompt], count)
