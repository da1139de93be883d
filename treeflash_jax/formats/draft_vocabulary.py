"""draft_vocabulary.json, an additional file of a block drafter, language model or multi-token prediction layer.

It lists the tokens that may be drafted: the most frequent tokens of answers. A draft then reads only a fraction of the
vocabulary table. Other tokens are never drafted, but the output does not change.

Source: FR-Spec (arXiv 2502.14856).
"""

import json
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from treeflash_jax.core import files, programs, sharding
from treeflash_jax.core.json_files import read_json
from treeflash_jax.core.parameters import Params
from treeflash_jax.drafters.protocol import Drafter
from treeflash_jax.formats.keys import Keys
from treeflash_jax.models import vocab
from treeflash_jax.models.quantized_weight import Quantized

NAME = "draft_vocabulary.json"
SHARE = 6  # one token in SHARE is listed
SMALLEST = 2**14  # smallest vocabulary for which a list is written


def most_frequent(counts_v: np.ndarray, size: int) -> np.ndarray:
    """Returns the ids of the `size` most frequent tokens, [z], in increasing order; among equals, lower ids are chosen."""
    return np.sort(np.argsort(-counts_v, kind="stable")[:size])


def read(folder: Path, vocab_size: int) -> np.ndarray | None:
    """Returns the listed ids in increasing order, [z]; None if there is no list.

    Raises ValueError for ids that are repeated or outside the vocabulary.
    """
    path = folder / NAME
    if not path.exists():
        return None
    keys = Keys(read_json(path), str(path))
    keys.check_known({"ids"})
    ids = sorted(keys.ids("ids", vocab_size - 1))
    if len({*ids}) < len(ids):
        raise ValueError(f"{path}: got an id twice, expected different ids of the verifier's vocabulary")
    return np.array(ids, np.int32)


def write(folder: Path, counts_v: np.ndarray) -> None:
    """Writes a list of the most frequent tokens into an existing folder, if the vocabulary is large."""
    if counts_v.size >= SMALLEST:
        files.write(folder / NAME, json.dumps({"ids": most_frequent(counts_v, counts_v.size // SHARE).tolist()}) + "\n")


def limit(drafter: Drafter, folder: str | Path, vocab_size: int) -> Drafter:
    """Returns a drafter, limited to the tokens that its folder lists, if any. Raises `read`'s ValueError."""
    ids_z = read(Path(folder), vocab_size)
    return drafter if ids_z is None else drafter.limited(ids_z.size)


def load(folder: str | Path, drafter_weights: Params, verifier_weights: Params, mesh: Mesh | None = None) -> Params:
    """Returns the weights of a list: its part of the vocabulary table, and the ids' offsets; {} without a list.

    The table is the drafter's; if the drafter has none, the verifier's.
    """
    tables = drafter_weights if "embed" in drafter_weights else verifier_weights
    table_vd = tables.get("unembed", tables["embed"])
    ids_z = read(Path(folder), table_vd.shape[0])
    if ids_z is None:
        return {}
    lists = jax.device_put((ids_z, ids_z - np.arange(ids_z.size, dtype=np.int32)))
    ids_z, offsets_z = sharding.place(lists, mesh, over_batch=False)
    unembed_zd = programs.call(_select, table_vd, ids_z, mesh=mesh)
    return {"unembed": unembed_zd, "offsets": offsets_z}


@jax.jit
def _select(table_vd: jax.Array | Quantized, ids_z: jax.Array) -> jax.Array:
    return sharding.constrain(vocab.embed(table_vd, ids_z), ("vocab", "embed"))
