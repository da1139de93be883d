"""Trains a DFlash backbone, alone or together with a head, from scratch or from layers of the verifier, on the verifier's
own responses.

    python -m train.drafter configs/tiny/drafter.toml run=runs/drafter verifier=tiny

The verifier stays frozen. Leaves a Hugging Face folder in RUN/model, which `treeflash_jax.load`, `train.head` and the
published code read.

Source: DFlash (arXiv 2602.06036) sections 4.2 and 5.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train import choices, config
from train.data import Corpus, Rows
from train.drafting import DraftingStage
from train.drafting import train as main
from train.objective import ObjectiveConfig, drafting_flops, drafting_sums
from train.state import Sums
from treeflash_jax import mesh as meshes
from treeflash_jax import params as parameters
from treeflash_jax.checks import bounded, quoted
from treeflash_jax.drafters import block
from treeflash_jax.drafters.block.config import DrafterConfig, default_target_layers, fresh_layers
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.trees.shape import MOST_NODES
from treeflash_jax.verifiers.config import ModelConfig

WITH_HEAD = {"tau": {}, "tau_marginal": {"head": "marginal"}}


@dataclass(frozen=True, kw_only=True)
class BlockStage(DraftingStage):
    """What the stages of block drafters share: their objective."""

    objective: ObjectiveConfig

    @property
    @abstractmethod
    def trains(self) -> tuple[str, ...]:
        """ "backbone" and/or "head"."""

    def sums(
        self, params: Any, frozen: Any, rows: Rows, keys_b: jax.Array, *, verifier: ModelConfig, drafter: DrafterConfig
    ) -> Sums:
        return drafting_sums(params, frozen, rows, keys_b, settings=self.objective, verifier=verifier, drafter=drafter)

    @property
    def held_out(self) -> DraftingStage:
        return dataclasses.replace(self, objective=dataclasses.replace(self.objective, vocabulary=0))

    def flops(self, verifier: ModelConfig, drafter: DrafterConfig) -> float:
        return drafting_flops(
            self.objective,
            verifier,
            drafter,
            batch=self.loop.batch,
            row_tokens=self.data.row_tokens,
            trains_backbone="backbone" in self.trains,
        )

    @property
    def sizes(self) -> dict[str, int]:
        return {"anchors": self.objective.anchors, "chunk": self.objective.chunk}

    def check(self, drafter: DrafterConfig, model: ModelConfig, corpus: Corpus, tokenizer: Tokenizer | None) -> None:
        if "backbone" in self.trains:
            choices.check_taps(drafter, model)
            choices.check_mask(drafter, model, corpus, tokenizer)

    def described(self, drafter: DrafterConfig) -> tuple[str, dict[str, Any]]:
        kinds = {"marginal": "DFlash drafter", "mlp": "TreeFlash drafter"}
        return kinds.get(drafter.head, f"drafter with a {drafter.head} head"), {
            "block": f"{drafter.block_size} tokens, the anchor included",
            "layers, width": f"{drafter.layers.num_layers}, {drafter.layers.hidden_size}",
            "reads verifier layers": ", ".join(map(str, drafter.target_layer_ids)),
            "head": drafter.head,
        }


@dataclass(frozen=True, kw_only=True)
class DrafterStage(BlockStage):
    """Settings of this stage, besides those of DraftingStage.

    Attributes:
      objective: loss and blocks.
      num_layers, block_size, mask_token_id: sizes of the backbone; all others are the verifier's.
      target_layer_ids: verifier layers it reads; empty takes the published rule, one per layer of the backbone.
      head: a name in drafters.block.heads. With any but "marginal", which has no weights, the head is trained with the
        backbone from the start: the objective is that of the head, plus `objective.base_weight` times that of the
        backbone's marginals, which offer the candidates and need a weight above 0.
      initial_layers: verifier layers that the backbone's layers start as copies of, one for each; empty starts all of them
        at random, as published. With copies a short training gets much further.
      drafter_temperature, num_nodes: defaults stored with the drafter.
    """

    num_layers: int = bounded(5, least=1)
    block_size: int = bounded(16, least=2, most=MOST_NODES)
    mask_token_id: int = bounded(least=0)
    target_layer_ids: tuple[int, ...] = bounded((), least=0)
    head: str = "marginal"
    initial_layers: tuple[int, ...] = bounded((), least=0)
    drafter_temperature: float = bounded(1.0, above=0)
    num_nodes: int = bounded(16, least=1, most=MOST_NODES)

    def __post_init__(self) -> None:
        if self.head not in block.HEADS:
            raise ValueError(f"got head {quoted(self.head)}, expected one of {', '.join(block.HEADS)}")
        if "head" in self.trains and not self.objective.base_weight:
            raise ValueError(
                f"got head {quoted(self.head)} and objective.base_weight 0, expected more, to train the candidates"
            )

    @property
    def trains(self) -> tuple[str, ...]:
        return ("backbone", "head") if block.HEADS[self.head].ENTRIES else ("backbone",)

    @property
    def systems(self) -> Mapping[str, Mapping[str, Any]]:
        return WITH_HEAD if "head" in self.trains else super().systems

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        return "mask_token_id" in raw  # heads take theirs from the backbone

    def drafter_config(self, model: ModelConfig) -> DrafterConfig:
        made = DrafterConfig(
            layers=fresh_layers(model, self.num_layers),
            block_size=self.block_size,
            mask_token_id=self.mask_token_id,
            target_layer_ids=self.target_layer_ids or default_target_layers(model.num_layers, self.num_layers),
            num_target_layers=model.num_layers,
            num_nodes=self.num_nodes,
            drafter_temperature=self.drafter_temperature,
            head=self.head,
        )
        choices.check_initial(self.initial_layers, made, model)
        return made.fitted(model)

    def fresh(self, drafter: DrafterConfig, weights: Any) -> dict[str, Any]:
        specs = block.specs(drafter)
        backbone = parameters.initialize(specs["backbone"], jax.random.key(self.loop.seed), scale=self.init_scale)
        # The vocabulary matrix was trained behind this scale.
        backbone["norm"] = _copied(weights["norm"])
        if self.initial_layers:
            backbone |= _from_verifier(drafter, weights, self.initial_layers)
        made = {"backbone": backbone}
        if "head" in self.trains:
            made["head"] = parameters.initialize(specs["head"], jax.random.key(self.loop.seed + 1), scale=self.init_scale)
        return made


def _from_verifier(drafter: DrafterConfig, weights: Any, initial_layers: Sequence[int]) -> dict[str, Any]:
    """Copies of verifier layers that read the last tapped layer as they read the residual stream there.

    With one layer, the next one after the tap, the context's keys and values are those of the verifier itself.
    """
    every = [layer for group in weights["groups"] for layer in group]
    copies = [jax.tree.map(_copied, every[i]) for i in initial_layers]
    width, taps = drafter.layers.hidden_size, len(drafter.target_layer_ids)
    last = int(np.argmax(drafter.target_layer_ids))
    rest = iter(copies)
    return {
        "fc": jnp.zeros((taps, width, width)).at[last].set(jnp.eye(width)).reshape(taps * width, width),
        "hidden_norm": sum(layer["attention_norm"] for layer in copies) / len(copies),
        "groups": [[next(rest) for _ in range(size)] for size in drafter.layers.groups],
    }


def _copied(weight: Any) -> jax.Array:
    return jnp.asarray(meshes.to_host(weight), jnp.float32)


if __name__ == "__main__":
    config.run(main, DrafterStage, __doc__)
