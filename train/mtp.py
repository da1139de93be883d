"""Continues to train the multi-token prediction layer of a verifier's files, on the verifier's own responses.

    python -m train.mtp mtp.toml run=runs/mtp verifier=Qwen/Qwen3.5-9B

The published layer was trained to predict one token ahead. Here it is unrolled over its outputs, like an EAGLE-3 drafter
(`train.eagle3`), so that tokens at deeper levels are accepted more often. A settings file has `stage = "mtp"` and the
settings of `train.eagle3`, except those that only EAGLE-3 has. Embedding and vocabulary table are shared with the verifier,
which stays frozen.

Writes a folder, RUN/model, with the published names of the layer's tensors.

Shape suffixes: as in `train.stages.rollout`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax

from train.runtime import run_config
from train.runtime.training_state import SumsFunction
from train.stages.drafting import DraftingStage, check_kind
from train.stages.drafting import train as main
from train.stages.rollout import RolloutConfig, RolloutNetwork, check_chunks, rollout_sums
from train.stages.teacher import Teacher
from treeflash_jax.core.parameters import Params
from treeflash_jax.core.settings import setting
from treeflash_jax.drafters import MtpDrafter, mtp_drafter
from treeflash_jax.models import layers, vocab
from treeflash_jax.models.attention_layer import queries_keys_values
from treeflash_jax.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class MtpStage(DraftingStage):
    """Settings that this stage adds to DraftingStage."""

    trains = ("fc", "embed_norm", "hidden_norm", "groups", "norm")

    stage: Literal["mtp"] = setting("mtp", "kind of the run, which it stores")
    objective: RolloutConfig

    def __post_init__(self) -> None:
        check_chunks(self.objective, self.data.sequence_length)

    @property
    def starts_from(self) -> str:
        return self.verifier

    def drafter_config(self, verifier: ModelConfig, start: Any) -> MtpDrafter:
        check_kind(self.verifier, start, MtpDrafter, "verifier with a layer of multi-token prediction")
        return start.fitted(verifier)

    def fresh(self, drafter: MtpDrafter, weights: Params, stored: Mapping[str, Any]) -> dict[str, Any]:
        return {name: stored[name] for name in self.trains}

    def make_sums(self, verifier: ModelConfig, drafter: MtpDrafter) -> SumsFunction:
        network = MtpNetwork(drafter)
        return partial(rollout_sums, settings=self.objective, verifier=verifier, network=network, attention=self.attention)


@dataclass(frozen=True)
class MtpNetwork(RolloutNetwork):
    """The layer of multi-token prediction."""

    drafter: MtpDrafter

    def carried(self, weights: Params, teacher: Teacher) -> jax.Array:
        return teacher.hidden_btd

    def layer_input(self, weights: Params, tables: Params, token_bn: jax.Array, carried_bnd: jax.Array) -> jax.Array:
        return mtp_drafter.layer_input(weights, tables, self.drafter, token_bn, carried_bnd)

    def keys_values(self, weights: Params, input_bn: jax.Array, position_bn: jax.Array) -> tuple[jax.Array, jax.Array]:
        _, k_bnke, v_bnke, _ = self._heads(weights, input_bn, position_bn)
        return k_bnke, v_bnke

    def output(
        self, weights: Params, input_bn: jax.Array, carried_bnd: jax.Array, position_bn: jax.Array, attend: Callable
    ) -> jax.Array:
        [[layer]], sizes = weights["groups"], self.drafter.layers
        q_bnhe, _, _, gate_bnhe = self._heads(weights, input_bn, position_bn)
        mixed_bnhe = attend(q_bnhe)
        if gate_bnhe is not None:
            mixed_bnhe *= jax.nn.sigmoid(gate_bnhe)
        x_bnd = input_bn + layers.project_output(layer, mixed_bnhe)
        x_bnd += layers.feed_forward(layer, sizes, x_bnd)
        return layers.norm(sizes, x_bnd, weights["norm"])

    def _heads(self, weights: Params, input_bn: jax.Array, position_bn: jax.Array) -> tuple[Any, ...]:
        [[layer]], sizes = weights["groups"], self.drafter.layers
        table = layers.rotary_table(sizes.rope, sizes.head_dim, position_bn)
        return queries_keys_values(layer, sizes, layers.norm(sizes, input_bn, layer["attention_norm"]), table)

    def feed_back(self, weights: Params, hidden_bnd: jax.Array) -> jax.Array:
        return hidden_bnd

    def logits(self, weights: Params, tables: Params, hidden_bnd: jax.Array) -> jax.Array:
        return vocab.unembed(tables.get("unembed", tables["embed"]), hidden_bnd)


if __name__ == "__main__":
    run_config.run_command(main, MtpStage, __doc__)
