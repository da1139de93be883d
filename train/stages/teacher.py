"""Outputs of the frozen verifier in training, which are computed in every step, or recorded once per training sequence.

Recorded outputs take 2 x (tapped layers + 1) x hidden size bytes per token in bfloat16. This pays if the verifier's pass is
a large part of a step, and several passes or runs read the same documents.

Shape suffixes: b sequences, t tokens of a sequence, j tapped layers x model, d model, o = j + d outputs.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from train.data.packing import Corpus, PackedBatch, PackedDataset
from train.runtime import hosts, watch
from treeflash_jax.core import files, programs, sharding
from treeflash_jax.core.parameters import Params
from treeflash_jax.models import decoder, quantized
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.packed_attention import PackedMask


@struct.dataclass
class Teacher:
    """Outputs of the frozen verifier.

    Attributes:
      features_btj: outputs of the tapped layers, j = layers x model.
      hidden_btd: final states, from which logits are computed.
      logit_cap: `ModelConfig.logit_cap` of the verifier; static.
    """

    features_btj: jax.Array
    hidden_btd: jax.Array
    logit_cap: float = struct.field(pytree_node=False, default=0.0)


def teach(
    params: Params, verifier: ModelConfig, taps: tuple[int, ...], batch: PackedBatch, attention: str = "chunked"
) -> Teacher:
    """Runs the verifier over packed sequences, unless the batch already contains its outputs.

    `taps` are 0-based layers in the order in which the drafter reads them. `attention` is a name in `packed_attention`.
    """
    if batch.outputs_bto is not None:
        outputs_bto, size = batch.outputs_bto, verifier.hidden_size
        return Teacher(outputs_bto[..., :-size], outputs_bto[..., -size:], verifier.logit_cap)
    mask = PackedMask(batch.segments_bt, batch.segments_bt)
    with jax.named_scope("teach"):
        out = decoder.forward(params, verifier, batch.tokens_bt, batch.positions_bt, mask, taps=taps, attention=attention)
    return jax.lax.stop_gradient(Teacher(out.features_btj, out.hidden_btd, verifier.logit_cap))


def record(
    corpus: Corpus,
    folder: str,
    *,
    digest: str,
    weights: Params,
    verifier: ModelConfig,
    taps: Sequence[int],
    batch_size: int,
    attention: str,
    mesh: jax.sharding.Mesh,
) -> Corpus:
    """Returns the corpus with the outputs of the verifier. They are computed unless `folder` already has them.

    Other documents, sequence lengths, layers, weights or dtypes have other files in the folder.

    Args:
      digest: digest of the verifier's files.
      weights: weights of the verifier, on the mesh.
      taps: layers, as in `teach`.
    """
    if jax.process_count() > 1:
        raise ValueError(f"got data.record on {jax.process_count()} processes, expected one; leave data.record out")
    dtype = np.dtype(weights["embed"].dtype)
    width = (len(taps) + 1) * verifier.hidden_size
    facts = (verifier, dtype.name, taps, corpus.digest(), digest)
    scheme = quantized.quantization_scheme(weights)
    if scheme is not None:
        facts = (*facts, scheme)
    key = hashlib.sha256(repr(facts).encode())

    @programs.jit
    def run(weights: Params, batch: PackedBatch) -> jax.Array:
        parts = jax.tree.leaves(teach(weights, verifier, tuple(taps), batch, attention))
        return jnp.concatenate(parts, axis=-1)

    def outputs(packed: PackedDataset) -> Iterator[bytes]:
        with watch.Bar("recording", total=len(packed)) as bar:
            for start in range(0, len(packed), batch_size):
                index = np.arange(start, start + batch_size)
                batch = hosts.place_batch(packed.take(np.minimum(index, len(packed) - 1)), batch_size, mesh)
                yield sharding.to_host(run(weights, batch))[index < len(packed)].tobytes()
                bar.show(start + batch_size)

    def with_outputs(packed: PackedDataset, name: str) -> PackedDataset:
        path = Path(folder) / f"{key.hexdigest()[:16]}-{packed.sequence_length}-{name}"
        if not path.exists():
            hosts.say(f"recording {len(packed):,} sequences in {path}")
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write(path, outputs(packed))
        return replace(packed, outputs=np.memmap(path, dtype, "r", shape=(len(packed), packed.sequence_length, width)))

    train = {name: with_outputs(packed, f"{name}-train") for name, packed in corpus.train.items()}
    held_out = {name: with_outputs(packed, f"{name}-held-out") for name, packed in corpus.held_out.items()}
    return replace(corpus, train=train, held_out=held_out)
