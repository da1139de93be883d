"""Distils a small language model into a drafter for one verifier, with or without steering by the verifier's states.

    python -m train.language_model configs/tiny/language_model.toml run=runs/small verifier=tiny
    python -m train.language_model ... language_model=Qwen/Qwen3-0.6B steering=joint

The loss compares the small model's next-token distribution with the verifier's, over the verifier's answers. Writes a
folder with the small model, RUN/model.

Shape suffixes: b sequences, t tokens of a sequence, j tapped layers x verifier width, d model, f feed-forward width of the
small model, v vocabulary.

Source: Osprey (arXiv 2609.09338) for a start from the verifier's first layers; SD squared (arXiv 2511.09844), section 4,
for steering.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from train.data.packing import PackedBatch
from train.runtime import run_config
from train.runtime.training_state import Sums, SumsFunction, split_chunks, sum_chunks
from train.stages import losses
from train.stages.drafting import DraftingStage, check_kind
from train.stages.drafting import train as main
from train.stages.objective import counted, sample_vocabulary, sampled_vectors
from train.stages.teacher import teach
from treeflash_jax.core import parameters, sharding
from treeflash_jax.core.checks import expect
from treeflash_jax.core.parameters import Params
from treeflash_jax.core.settings import setting
from treeflash_jax.drafters import steering
from treeflash_jax.drafters.language_model_drafter import LanguageModelDrafter
from treeflash_jax.drafters.steering import Steering
from treeflash_jax.models import quantized, vocab
from treeflash_jax.models.backend.indexing import pick
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.decoder import forward
from treeflash_jax.models.packed_attention import PackedMask

MODEL = ("embed", "groups", "norm", "unembed")  # weights of the small model without its steering


@dataclass(frozen=True, kw_only=True)
class LanguageModelStage(DraftingStage):
    """Settings that this stage adds to DraftingStage."""

    lists_tokens = True

    stage: Literal["language_model"] = setting("language_model", "kind of the run, which it stores")
    language_model: str = setting(
        "",
        "name of a pair, folder, GGUF file or Hub id of the small model. Empty: the verifier's tables and its first "
        "`num_layers` layers",
        min_length=0,
    )
    num_layers: int = setting(2, "number of layers taken from the verifier", least=1)
    steering: Literal["none", "alone", "joint"] = setting(
        "none",
        "trains shifts of the small model's layers by the verifier's hidden states (SD squared), from zero or from the "
        "small model's: alone, on a frozen small model, or jointly with it. none: leaves them out",
    )
    loss: losses.LossName = setting("forward-kl", "loss of a token; the forward KL is from the verifier's distribution")
    chunk: int = setting(
        64, "tokens of a sequence whose logits are computed at a time; divides the sequence length", least=1
    )
    vocabulary: int = setting(
        0, "size of the sample of the vocabulary that distributions are compared over (`ObjectiveConfig`); 0: all", least=0
    )

    def __post_init__(self) -> None:
        if self.steering == "alone" and not self.language_model:
            raise ValueError("got steering=alone and no language_model, expected the model to steer, or steering=joint")
        length = self.data.sequence_length
        expect(length % self.chunk == 0, "chunk", self.chunk, f"a divisor of data.sequence_length {length}")

    @property
    def trains(self) -> tuple[str, ...]:
        return {"none": MODEL, "alone": ("steering",), "joint": (*MODEL, "steering")}[self.steering]

    def make_held_out_sums(self, verifier: ModelConfig, drafter: LanguageModelDrafter) -> SumsFunction:
        return dataclasses.replace(self, vocabulary=0).make_sums(verifier, drafter)

    @property
    def starts_from(self) -> str:
        return self.language_model

    def drafter_config(self, verifier: ModelConfig, start: Any) -> LanguageModelDrafter:
        if start is not None:
            check_kind(self.language_model, start, LanguageModelDrafter, "language model")
            layers = start.layers
        else:
            if self.num_layers > verifier.num_layers:
                raise ValueError(f"got num_layers {self.num_layers}, expected at most {verifier.num_layers} (verifier)")
            if verifier.layer_types:
                got = f"got a verifier of type {verifier.model_type!r} to take layers from, expected layers of one kind"
                raise ValueError(f"{got}; give language_model=, a smaller model with the same vocabulary")
            dense = tuple(layer for layer in verifier.dense_layers if layer < self.num_layers)
            layers = dataclasses.replace(verifier, num_layers=self.num_layers, dense_layers=dense)
        fresh = Steering(taps=steering.default_taps(verifier.num_layers), width=verifier.hidden_size)
        steers = None if self.steering == "none" else getattr(start, "steering", None) or fresh
        return LanguageModelDrafter(layers=layers, steering=steers).fitted(verifier)

    def fresh(self, drafter: LanguageModelDrafter, weights: Params, stored: Mapping[str, Any]) -> dict[str, Any]:
        fresh = {name: stored[name] for name in self.trains if name in stored}
        if not stored:
            sizes = [size for *_, size in drafter.layers.runs]
            groups = [group[:size] for group, size in zip(weights["groups"], sizes, strict=False)]
            groups = quantized.expand(drafter.specs()["groups"], groups)
            fresh = sharding.to_host(weights | {"groups": groups})
        if "steering" in self.trains and "steering" not in fresh:
            fresh["steering"] = parameters.initialize(drafter.specs()["steering"], jax.random.key(self.loop.seed))
            fresh["steering"]["mix"] = jnp.tile(jnp.eye(drafter.steering.width), 3)  # as published
        return fresh

    def make_sums(self, verifier: ModelConfig, drafter: LanguageModelDrafter) -> SumsFunction:
        return partial(language_model_sums, settings=self, verifier=verifier, drafter=drafter, attention=self.attention)


def language_model_sums(
    params: Params,
    frozen: Params,
    batch: PackedBatch,
    keys_b: jax.Array,
    *,
    settings: LanguageModelStage,
    verifier: ModelConfig,
    drafter: LanguageModelDrafter,
    attention: str = "chunked",
) -> Sums:
    """Returns sums over answer tokens: "loss", "top1", and "overlap" if the loss reads the verifier's distribution.

    If the vocabulary is sampled, distributions are over the sample.
    """
    tables = frozen["verifier"]
    dtype = tables["embed"].dtype
    trees = frozen | params
    weights = jax.tree.map(lambda x: x.astype(dtype), {name: trees[name] for name in drafter.specs()})
    teacher = teach(tables, verifier, drafter.taps, batch, attention)
    mask = PackedMask(batch.segments_bt, batch.segments_bt)

    @jax.checkpoint
    def run(weights: Params) -> jax.Array:
        if drafter.steering is not None:
            shifts = drafted_shifts(weights["steering"], batch, keys_b, teacher.features_btj, drafter.num_depths)
            weights = steering.steer(weights, shifts)
        inputs = batch.tokens_bt, batch.positions_bt, mask
        return forward(weights, drafter.layers, *inputs, attention=attention).hidden_btd

    labels_bt = jnp.roll(batch.tokens_bt, -1, axis=1).at[:, -1].set(0)
    weights_bt = jnp.roll(batch.weights_bt, -1, axis=1).at[:, -1].set(0)
    sample = sample_vocabulary(batch, settings.vocabulary, verifier.vocab_size, keys_b)
    labels_bt = labels_bt if sample is None else sample.places(labels_bt)
    table = sampled_vectors(weights.get("unembed", weights["embed"]), sample)
    verifier_table = sampled_vectors(tables.get("unembed", tables["embed"]), sample)

    @jax.checkpoint
    def chunk_sums(hidden_btd: jax.Array, verifier_btd: jax.Array, labels_bt: jax.Array, weights_bt: jax.Array) -> Sums:
        logits_btv = counted(vocab.cap(vocab.unembed(table, hidden_btd), drafter.layers.logit_cap), sample)
        log_p_btv = None
        if settings.loss != "cross-entropy":
            verifier_btv = vocab.cap(vocab.unembed(verifier_table, verifier_btd), verifier.logit_cap)
            log_p_btv = losses.log_softmax(counted(verifier_btv, sample))
        loss_bt = losses.drafting_loss(settings.loss, logits_btv, labels_bt, log_p_btv)
        total = jnp.sum(weights_bt)
        sums = {"loss": (jnp.sum(weights_bt * loss_bt), total)}
        logits_btv = lax.stop_gradient(logits_btv)
        sums["top1"] = (jnp.sum(weights_bt * (vocab.argmax(logits_btv) == labels_bt)), total)
        if log_p_btv is not None:
            sums["overlap"] = (jnp.sum(weights_bt * losses.overlap(logits_btv, log_p_btv)), total)
        return sums

    chunks = split_chunks((run(weights), teacher.hidden_btd, labels_bt, weights_bt), settings.chunk)
    return sum_chunks(lambda chunk: chunk_sums(*chunk), chunks)


def drafted_shifts(
    params: Params, batch: PackedBatch, keys_b: jax.Array, features_btj: jax.Array, depths: int
) -> tuple[jax.Array, ...]:
    """Returns the shift of each layer at every token, [b, t, f].

    As in a draft, a shift comes from the verifier's state 1 to `depths` tokens earlier in the document. One distance is
    drawn for each sequence. Tokens before the last one of a prompt are not shifted. The last one is shifted, as published,
    although drafting reads it unshifted.
    """
    # `sample_vocabulary` folds the keys alike, but `randint` splits its key, so these are other draws.
    keys_b = jax.vmap(partial(jax.random.fold_in, data=1))(keys_b)
    distance_b = jax.vmap(lambda key: jax.random.randint(key, (), 1, depths + 1))(keys_b)
    index_t = jnp.arange(batch.tokens_bt.shape[1])
    source_bt = jnp.maximum(index_t - distance_b[:, None], index_t - batch.positions_bt)
    precedes_answer_bt = jnp.roll(batch.weights_bt, -1, axis=1).at[:, -1].set(0) == 1  # prompts may have smaller weights
    shifts = steering.make_shifts(params, pick(features_btj, source_bt))
    return tuple(jnp.where(precedes_answer_bt[..., None], shift_btf, 0) for shift_btf in shifts)


if __name__ == "__main__":
    run_config.run_command(main, LanguageModelStage, __doc__)
