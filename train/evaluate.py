"""Block efficiency (tau) of a drafter on held-out prompts while it trains."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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
    """Measures tau of the drafter being trained, with every way of decoding that its stage names."""

    def __init__(
        self,
        config: EvaluateConfig,
        systems: Mapping[str, Mapping[str, Any]],
        constant: Collection[str],
        stage: Stage,
        model: ModelConfig,
        drafter: Any,
        corpus: packing.Corpus,
        frozen: Any,
        mesh: jax.sharding.Mesh,
        stop_ids: Sequence[int],
    ):
        self.config, self.frozen = config, frozen
        self.prompts = held_out_prompts(corpus, config.prompts)
        self.model = tf.TreeFlash(model, Weights(frozen["verifier"]), drafter=drafter, stop_ids=stop_ids, mesh=mesh)
        self.cast = devices.jit(lambda params: gather(params, stage.specs, stage.compute_dtype))
        self.systems, self.constant = systems, constant
        module = drafters.of(drafter)
        self.options = {name: config.candidates for name in ("candidates", "children") if hasattr(module.OPTIONS, name)}
        self.names = tuple(module.specs(drafter))
        self.known: dict[str, dict[str, float]] = {}

    def __call__(self, params: Any, report: Evaluating) -> dict[str, float]:
        """Measures tau of these weights by number of nodes; `report` receives the number of finished prompts."""
        if not self.prompts:
            return {}
        parts = self.frozen | self.cast(params)
        self.model.weights = Weights(self.frozen["verifier"], {name: parts.get(name, {}) for name in self.names})
        for name, options in self.systems.items():
            if name not in self.constant or name not in self.known:
                self.known[name] = self._tau(name, options, report)
        return {name: tau for taus in self.known.values() for name, tau in taus.items()}

    def _tau(self, name: str, options: Mapping[str, Any], report: Evaluating) -> dict[str, float]:
        config, taus, count = self.config, {}, len(self.prompts)
        settings = " ".join(map(str, options.values()))
        for nodes in config.nodes:
            what = f"prompts with {f'{settings} trees' if settings else 'trees'} of {nodes} nodes"
            report(0, count, what)
            answers = self.model.generate_each(
                self.prompts,
                nodes=nodes,
                **self.options | options,
                temperature=config.temperature,
                max_new_tokens=config.new_tokens,
                batch_size=min(config.batch, count),
            )
            lengths: list[float] = []
            for done, (_, result) in enumerate(answers, start=1):
                lengths += [float(length) for length in result.accept_lengths]
                report(done, count, what)
            taus[f"held_out/{name}_{nodes}"] = statistics.fmean(lengths)
        return taus


def held_out_prompts(corpus: packing.Corpus, count: int) -> list[list[int]]:
    """Returns at most `count` prompts of held-out documents, spread evenly over all of them."""
    prompts = [packed.prompt(number) for packed in corpus.held_out.values() for number in range(packed.num_documents)]
    prompts = [prompt for prompt in prompts if prompt]
    return [prompts[i] for i in packing.spread(min(count, len(prompts)), len(prompts))]
