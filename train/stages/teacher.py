"""The frozen verifier in training: its outputs, computed in every step, or once per training sequence and recorded.

Recording is worth its disk if the verifier's pass is a large part of a step, and several passes or runs read the same
documents: 2 x (layers + 1) x hidden size bytes per token in bfloat16.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import struct

from train.data.packing import Batch, Corpus, PackedDataset
from train.runtime import hosts, watch
from treeflash_jax.core import files, programs, sharding
from treeflash_jax.models import verifier
from treeflash_jax.models.backend.packed_attention import PackedMask
from treeflash_jax.models.config import ModelConfig

HIDDEN = "hidden"  # file of the final states; the others are named by their layer
SAMPLES = 8  # entries that the digest reads along each axis of a weight


@struct.dataclass
class Teacher:
    """Outputs of the frozen verifier.

    Attributes:
      features_btj: outputs of the tapped layers, j = layers x model.
      hidden_btd: final states, from which logits are computed.
    """

    features_btj: jax.Array
    hidden_btd: jax.Array


def teach(params: Any, config: ModelConfig, taps: tuple[int, ...], batch: Batch, attention: str = "chunked") -> Teacher:
    """Runs the verifier over packed sequences, unless the batch contains its outputs.

    `taps` are 0-based layers, in the order in which the drafter reads them; `attention` is one of `attention.TRAINING`.
    """
    if batch.hidden_btd is not None:
        return Teacher(batch.features_btj, batch.hidden_btd)
    mask = PackedMask(batch.segments_bt, batch.segments_bt)
    out = verifier.forward(params, config, batch.tokens_bt, batch.positions_bt, mask, taps=taps, attention=attention)
    return jax.lax.stop_gradient(Teacher(out.features_btj, out.hidden_btd))


def record(
    corpus: Corpus,
    folder: str,
    *,
    weights: Any,
    model: ModelConfig,
    taps: Sequence[int],
    batch_size: int,
    attention: str,
    mesh: jax.sharding.Mesh,
) -> Corpus:
    """Returns the corpus with the outputs of the verifier, computed unless `folder` has those of all these layers.

    Every layer has its own file. Other documents, sequence lengths, weights or dtypes have other files. `weights` are the
    verifier's, on the mesh; `taps` as in `teach`.
    """
    if jax.process_count() > 1:
        raise ValueError(f"got data.record on {jax.process_count()} processes, expected one; leave data.record out")
    dtype, packed_sets = np.dtype(weights["embed"].dtype), [*corpus.train.values(), *corpus.held_out.values()]
    shape = (packed_sets[0].sequence_length, model.hidden_size)
    key = hashlib.sha256(repr((model, dtype.name, shape, corpus.digest())).encode())
    for x in jax.tree.leaves(weights):
        key.update(sharding.to_host(x[tuple(slice(None, None, max(n // SAMPLES, 1)) for n in x.shape)]).tobytes())
    place = Path(folder) / key.hexdigest()[:16]
    place.mkdir(parents=True, exist_ok=True)
    run = partial(programs.jit(partial(teach, config=model, taps=tuple(taps), attention=attention)), weights)

    def with_outputs(packed: PackedDataset, name: str) -> PackedDataset:
        paths = [place / f"{name}-{layer}" for layer in (*taps, HIDDEN)]
        if not all(path.exists() for path in paths):
            run_batch = lambda batch: run(batch=hosts.place_batch(batch, batch_size, mesh))  # noqa: E731
            _write(packed, paths, batch_size, run_batch)
        maps = (np.memmap(path, dtype, "r", shape=(len(packed), *shape)) for path in paths)
        return replace(packed, outputs=tuple(maps))

    train = {name: with_outputs(packed, f"{name}-train") for name, packed in corpus.train.items()}
    held_out = {name: with_outputs(packed, f"{name}-held-out") for name, packed in corpus.held_out.items()}
    return replace(corpus, train=train, held_out=held_out)


def _write(packed: PackedDataset, paths: Sequence[Path], batch_size: int, run: Callable[[Batch], Teacher]) -> None:
    """Writes the outputs of all sequences to PATH.part, tapped layers before final states, and renames it to PATH."""
    parts = [path.with_name(path.name + ".part") for path in paths]
    hosts.say(f"recording {len(packed):,} sequences in {paths[0].parent}")
    with ExitStack() as stack:
        stack.enter_context(files.naming(paths[0].parent))
        streams = [stack.enter_context(part.open("wb")) for part in parts]
        bar = stack.enter_context(watch.Bar("recording", total=len(packed)))
        for first in range(0, len(packed), batch_size):
            index = np.arange(first, first + batch_size)
            out = sharding.to_host(run(packed.take(np.minimum(index, len(packed) - 1))))
            features = np.split(out.features_btj, len(paths) - 1, axis=-1) if len(paths) > 1 else []
            for stream, array in zip(streams, [*features, out.hidden_btd], strict=True):
                stream.write(array[index < len(packed)].tobytes())
            bar.show(first + batch_size)
    for part, path in zip(parts, paths, strict=True):
        part.rename(path)
