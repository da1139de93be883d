"""Distils a small language model into a drafter for one verifier, with or without steering by the verifier's states.

    python -m train.language_model configs/tiny/language_model.toml run=runs/small verifier=tiny
    python -m train.language_model configs/tiny/language_model.toml run=runs/steered steers=true
    python -m train.language_model ... language_model=Qwen/Qwen3-0.6B train_model=false steers=true

The loss is that of the small model's next-token law against the verifier's, over the verifier's own answers. With `steers`
the feed-forward layers of the small model are shifted by what the verifier knew one to `offset` tokens earlier, as they are
when a draft of that length follows a committed token. Leaves the folder of the small model in RUN/model, with its steering.

Source: SD squared (arXiv 2511.09844) section 4; Osprey (arXiv 2609.09338) for a start from the verifier's first layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from train import config, losses
from train.data import Rows
from train.drafting import DraftingStage
from train.drafting import train as main
from train.state import Sums
from train.teacher import document_mask, teach
from treeflash_jax import mesh as meshes
from treeflash_jax import params as parameters
from treeflash_jax import vocab
from treeflash_jax.checks import bounded
from treeflash_jax.costs import Counter
from treeflash_jax.drafters import language_model, steering
from treeflash_jax.drafters.language_model import LanguageModelConfig
from treeflash_jax.drafters.steering import SteeringConfig
from treeflash_jax.formats import models
from treeflash_jax.pairs import locate
from treeflash_jax.trees import pick
from treeflash_jax.verifiers import forward as model_of
from treeflash_jax.verifiers.config import ModelConfig

TABLES = ("embed", "groups", "norm", "unembed")  # of the model, apart from its steering


@dataclass(frozen=True, kw_only=True)
class LanguageModelStage(DraftingStage):
    """Settings of this stage, besides those of DraftingStage.

    Attributes:
      language_model: the name of a pair, a folder, a GGUF file or a Hub id of the small model; it may be steered already.
        Empty: the verifier's tables and its first `num_layers` layers.
      num_layers: layers of a model that is cut from the verifier.
      train_model: trains the small model; false leaves it as it is, and needs `steers`.
      steers: trains steering too, from zero, or from that of the small model.
      taps: layers of the verifier that steering reads, low to high; empty takes the published rule.
      rank: rank of the projection to the shifts; 0 is one whole matrix, as published.
      offset: the farthest a draft is from the state that steers it; drawn from 1 to `offset` for every row.
      loss: name in LOSSES.
      chunk: tokens of a row whose logits exist at a time; divides the row.
      num_depths, num_nodes, drafter_temperature: settings of evaluations; folders of language models cannot hold them.
    """

    language_model: str = bounded("", nonempty=False)
    num_layers: int = bounded(2, least=1)
    train_model: bool = True
    steers: bool = False
    taps: tuple[int, ...] = bounded((), least=0)
    rank: int = bounded(0, least=0)
    offset: int = bounded(8, least=1)
    loss: Literal["cross-entropy", "forward-kl", "total-variation"] = "forward-kl"
    chunk: int = bounded(64, least=1)
    num_depths: int = bounded(8, least=1)
    num_nodes: int = bounded(16, least=1)
    drafter_temperature: float = bounded(1.0, above=0)

    def __post_init__(self) -> None:
        if not (self.train_model or self.steers):
            raise ValueError("got train_model=false and steers=false, expected one of them: nothing would be trained")
        if not (self.train_model or self.language_model):
            raise ValueError("got train_model=false and no language_model, expected the model that is to be steered")
        if self.data.row_tokens % self.chunk:
            raise ValueError(f"got chunk {self.chunk}, expected a divisor of data.row_tokens {self.data.row_tokens}")
        if len(self.taps) not in (0, 3):
            raise ValueError(f"got {len(self.taps)} taps, expected three layers of the verifier (low, mid, high) or none")

    @property
    def trains(self) -> tuple[str, ...]:
        return TABLES * self.train_model + ("steering",) * self.steers

    @property
    def noun(self) -> str:
        return " and ".join(["language model"] * self.train_model + ["steering"] * self.steers)

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        return any(name in raw for name in ("language_model", "train_model", "steers"))

    def drafter_config(self, model: ModelConfig) -> LanguageModelConfig:
        if self.language_model:
            made = models.read_drafter_config(self._folder)
            if not isinstance(made, LanguageModelConfig):
                raise ValueError(f"{self.language_model}: got a drafter of kind {made.kind!r}, expected a language model")
            layers, steered = made.layers, made.steering
        else:
            if self.num_layers > model.num_layers:
                raise ValueError(f"got num_layers {self.num_layers}, expected at most {model.num_layers} (verifier)")
            dense = tuple(layer for layer in model.dense_layers if layer < self.num_layers)
            layers, steered = dataclasses.replace(model, num_layers=self.num_layers, dense_layers=dense), None
        if self.steers and steered is None:
            taps = self.taps or steering.default_taps(model.num_layers)
            sizes = dict(width=model.hidden_size, num_layers=layers.num_layers, ffn=layers.intermediate_size)
            steered = SteeringConfig(taps=taps, rank=self.rank, **sizes)
        return LanguageModelConfig(
            layers=layers,
            steering=steered,
            num_depths=self.num_depths,
            num_nodes=self.num_nodes,
            drafter_temperature=self.drafter_temperature,
        ).fitted(model)

    def fresh(self, drafter: LanguageModelConfig, weights: Any) -> dict[str, Any]:
        made = self._model(drafter, weights) if self.train_model else {}
        return made | ({"steering": self._steering(drafter)} if self.steers else {})

    def kept(self, drafter: LanguageModelConfig) -> dict[str, Any]:
        stored = self._stored() if self.language_model else {}
        return {name: tree for name, tree in stored.items() if name not in self.trains}

    def sums(
        self,
        params: Any,
        frozen: Any,
        rows: Rows,
        keys_b: jax.Array,
        *,
        verifier: ModelConfig,
        drafter: LanguageModelConfig,
    ) -> Sums:
        return language_model_sums(params, frozen, rows, keys_b, settings=self, verifier=verifier, drafter=drafter)

    def flops(self, verifier: ModelConfig, drafter: LanguageModelConfig) -> float:
        count, row = Counter(dtype=jnp.float32, batch=self.loop.batch), self.data.row_tokens
        own = count.layers(drafter.layers, row, row / 2) + count.vocabulary(drafter.layers, row)
        teacher = count.layers(verifier, row, row / 2) + count.vocabulary(verifier, row)
        return float(teacher.flops + (3 if self.train_model else 2) * own.flops)

    def described(self, drafter: LanguageModelConfig) -> tuple[str, dict[str, Any]]:
        sizes = {
            "layers, width": f"{drafter.layers.num_layers}, {drafter.layers.hidden_size}",
            "depths": drafter.num_depths,
        }
        if drafter.steering is None:
            return "language model as a drafter", sizes
        sizes["reads verifier layers"] = ", ".join(map(str, drafter.steering.taps))
        return "steered language model as a drafter", sizes | {"rank of the steering": drafter.steering.rank or "full"}

    @property
    def _folder(self) -> Any:
        return locate(self.language_model, "drafter")

    def _stored(self) -> dict[str, Any]:
        return models.load_drafter(self._folder, dtype=jnp.float32)[1]

    def _model(self, drafter: LanguageModelConfig, weights: Any) -> Any:
        if self.language_model:
            return {name: tree for name, tree in self._stored().items() if name in TABLES}
        sizes = [size for _, size in drafter.layers.runs]
        groups = [group[:size] for group, size in zip(weights["groups"], sizes, strict=False)]
        return meshes.to_host(weights | {"groups": groups})

    def _steering(self, drafter: LanguageModelConfig) -> Any:
        if self.language_model and models.read_drafter_config(self._folder).steering is not None:
            return self._stored()["steering"]
        key = jax.random.key(self.loop.seed)
        return steering.start(parameters.initialize(steering.specs(drafter.steering), key, scale=self.init_scale))


def language_model_sums(
    params: Any,
    frozen: Any,
    rows: Rows,
    keys_b: jax.Array,
    *,
    settings: LanguageModelStage,
    verifier: ModelConfig,
    drafter: LanguageModelConfig,
) -> Sums:
    """Weighted sums over the tokens of the answers.

    Returns:
      "loss"; "top1", how often the likeliest token is the one that followed; and "overlap", sum min(p, q), where the loss
      reads the verifier's distribution.
    """
    tables = frozen["verifier"]
    dtype = tables["embed"].dtype
    own = jax.tree.map(lambda x: x.astype(dtype), {name: (params | frozen)[name] for name in language_model.specs(drafter)})
    teacher = teach(tables, verifier, drafter.taps, rows)
    shift = None
    if drafter.steering is not None:
        shift = training_shift(own["steering"], rows, keys_b, teacher.features_bsj, settings.offset)
    mask_btu = document_mask(rows.segments_rt)
    run = jax.checkpoint(
        lambda own: (
            model_of.forward(
                own, drafter.layers, rows.tokens_rt, rows.positions_rt, mask_btu, attention="chunked", shift=shift
            ).hidden_btd
        )
    )
    hidden_btd = run(own)
    labels_bt, weights_bt = (jnp.roll(x, -1, axis=1).at[:, -1].set(0) for x in (rows.tokens_rt, rows.weights_rt))
    needs_verifier = settings.loss in losses.NEEDS_VERIFIER

    @jax.checkpoint
    def part(hidden_btd: jax.Array, verifier_btd: jax.Array, labels_bt: jax.Array, weights_bt: jax.Array) -> Sums:
        logits_btv = model_of.logits(own, hidden_btd)
        log_p_btv = losses.log_softmax(model_of.logits(tables, verifier_btd)) if needs_verifier else None
        targets = losses.Targets(labels_bt, log_p_btv)
        total = jnp.sum(weights_bt)
        found = {"loss": (jnp.sum(weights_bt * losses.LOSSES[settings.loss](logits_btv, targets)), total)}
        logits_btv = lax.stop_gradient(logits_btv)
        found["top1"] = (jnp.sum(weights_bt * (vocab.argmax(logits_btv) == labels_bt)), total)
        if needs_verifier:
            found["overlap"] = (jnp.sum(weights_bt * losses.overlap(logits_btv, targets)), total)
        return found

    def chunks(x_bt: jax.Array) -> jax.Array:
        return jnp.moveaxis(x_bt.reshape(x_bt.shape[0], -1, settings.chunk, *x_bt.shape[2:]), 1, 0)

    parts = tuple(chunks(x_bt) for x_bt in (hidden_btd, teacher.hidden_bsd, labels_bt, weights_bt))
    names = ("loss", "top1", "overlap") if needs_verifier else ("loss", "top1")
    start = {name: (jnp.zeros(()), jnp.zeros(())) for name in names}
    return lax.scan(lambda sums, one: (jax.tree.map(jnp.add, sums, part(*one)), None), start, parts)[0]


def training_shift(
    own: Any, rows: Rows, keys_b: jax.Array, features_bsj: jax.Array, offset: int
) -> Callable[[int], jax.Array]:
    """The shift of a layer at every token, [b, t, f], by the verifier's state a few tokens earlier.

    As in a draft, all tokens of a row are as far from the state that steers them; a state of another document never does.
    Tokens before the last one of a prompt are not steered.
    """
    size = rows.tokens_rt.shape[1]
    offset_b = jax.vmap(lambda key: jax.random.randint(key, (), 1, offset + 1))(keys_b)
    place_t = jnp.arange(size)
    source_bt = jnp.maximum(place_t - offset_b[:, None], place_t - rows.positions_rt)
    answers_bt = jnp.roll(rows.weights_rt, -1, axis=1).at[:, -1].set(0) > 0
    of_layer = steering.layer_shifts(own, pick(steering.normed(own, features_bsj), source_bt))
    return lambda layer: jnp.where(answers_bt[..., None], of_layer(layer), 0)


if __name__ == "__main__":
    config.run(main, LanguageModelStage, __doc__)
