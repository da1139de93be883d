"""Example: trains a tokenizer and a small language model from scratch, like the verifier of the `tiny` pair.

    python -m train.from_scratch configs/shipped/from_scratch.toml run=runs/verifier

Writes a Hugging Face folder with the tokenizer, RUN/model, which all other stages can read as their verifier. On several
hosts, the tokenizer must already exist.

Shape suffixes: b sequences, t tokens of a sequence, d model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from train.data import packing
from train.data.documents import DataConfig
from train.data.records import Source, read_records
from train.runtime import frozen_inputs, hosts, loop, run_config, watch
from train.runtime.training_state import Sums, TrainTask, place_weights
from train.stages import losses
from treeflash_jax.core import files, parameters, sharding
from treeflash_jax.core.dtypes import dtype_setting
from treeflash_jax.core.parameters import Params
from treeflash_jax.core.settings import setting
from treeflash_jax.engine.settings.pairs import locate
from treeflash_jax.formats import architectures, model_files
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.models import decoder
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.packed_attention import PackedMask


@dataclass(frozen=True, kw_only=True)
class FromScratchConfig:
    """Settings of this example."""

    run: str = setting(help="folder of checkpoints, log and result, local or gs://")
    tokenizer: str = setting(help="folder of a Hugging Face tokenizer; trained on `tokenizer_sources` if it does not exist")
    tokenizer_sources: tuple[Source, ...] = setting((), "chats and texts; a source listed twice counts twice")
    vocab_size: int = setting(2048, "entries of a new tokenizer, 4 special tokens and 256 bytes included", least=260)
    sources: tuple[Source, ...] = setting(help="training text of the model")
    data: DataConfig = DataConfig()
    model: dict[str, Any] = setting(
        help="keys of a Hugging Face config.json, of any architecture that this library reads", default_factory=dict
    )
    init_scale: float = setting(0.02, "standard deviation of initial weights", above=0)
    compute_dtype: str = dtype_setting("bfloat16", "dtype of activations", "float32", "bfloat16")
    optimizer: run_config.OptimizerConfig
    loop: run_config.LoopConfig
    mesh: run_config.MeshConfig = run_config.MeshConfig()


def training_texts(sources: Sequence[Source], seed: int) -> Iterator[str]:
    """Yields every message of chats, and every plain text."""
    for source in sources:
        if source.format == "responses":
            raise ValueError(f"{source.path}: got responses, which are token ids already; expected chats or texts")
        for record in read_records(source, seed):
            if isinstance(record.content, str):
                yield record.content
            else:
                yield from (message["content"] for message in record.content)


def train_tokenizer(settings: FromScratchConfig) -> None:
    """Trains a tokenizer like the `tiny` pair's: byte-level BPE, single digits and a ChatML-like chat template."""
    texts = training_texts(settings.tokenizer_sources, settings.loop.seed)
    alike = Tokenizer.load(locate("tiny", "verifier")).inner
    trained = alike.train_new_from_iterator(texts, settings.vocab_size, show_progress=False)
    with files.filled(settings.tokenizer) as folder:
        trained.save_pretrained(folder)
    hosts.say(f"tokenizer of {len(trained)} entries in {settings.tokenizer}")


def next_token_sums(
    params: Params, frozen: Params, batch: packing.PackedBatch, keys_b: jax.Array, *, config: ModelConfig, dtype: DTypeLike
) -> Sums:
    """Returns the weighted sum of -log p(token | document so far), and of the weights."""
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    mask = PackedMask(batch.segments_bt, batch.segments_bt)
    out = decoder.forward(params, config, batch.tokens_bt, batch.positions_bt, mask, attention="chunked")
    labels_bt = jnp.roll(batch.tokens_bt, -1, axis=1).at[:, -1].set(0)
    weights_bt = jnp.roll(batch.weights_bt, -1, axis=1).at[:, -1].set(0)
    loss_bt = losses.cross_entropy(decoder.logits(params, config, out.hidden_btd), labels_bt)
    return {"loss": (jnp.sum(weights_bt * loss_bt), jnp.sum(weights_bt))}


def main(settings: FromScratchConfig) -> None:
    hosts.connect()
    path = files.local(settings.tokenizer)
    if not path.exists():
        train_tokenizer(settings)
    tokenizer = Tokenizer.load(path, {"enable_thinking": bool(settings.data.thinking)})
    keys = Keys(settings.model | {"vocab_size": len(tokenizer.inner), "eos_token_id": list(tokenizer.stop_ids)}, "model")
    architecture = architectures.recognise(keys)
    dtype = jnp.dtype(settings.compute_dtype)
    config = architecture.read(keys)
    architecture.to_hf(config)  # raises before training if the family can only be read
    specs = decoder.specs(config)
    mesh = hosts.make_mesh(settings.mesh)
    hosts.introduce(mesh, f"run={settings.run}")
    corpus = packing.load_corpus(settings.sources, settings.data, tokenizer, settings.loop.seed)
    initial = parameters.initialize(specs, jax.random.key(settings.loop.seed), scale=settings.init_scale)
    params = place_weights(initial, specs, mesh, jnp.float32)
    length = settings.data.sequence_length
    sums = partial(next_token_sums, config=config, dtype=dtype)
    flops = 6.0 * parameters.count(params) * settings.loop.batch * length
    task = TrainTask(specs=specs, frozen_specs={}, sums=sums, compute_dtype=dtype, flops=flops)
    hosts.say(f"{parameters.count(params):,} weights, {corpus.num_sequences} sequences of {length} tokens")
    inputs = {"tokenizer": frozen_inputs.note(settings.tokenizer, path)}
    params = loop.fit(task, settings=settings, mesh=mesh, params=params, frozen={}, corpus=corpus, inputs=inputs)
    params = sharding.to_host(params)
    if hosts.is_first():
        target = files.absolute(settings.run) / "model"
        with files.filled(target, overwrite=True) as folder:
            model_files.save_verifier(folder, config, params)
            tokenizer.inner.save_pretrained(folder)
        hosts.say(f"model in {target}: {watch.summary(settings.run)}")
    hosts.wait("model")


if __name__ == "__main__":
    run_config.run_command(main, FromScratchConfig, __doc__)
