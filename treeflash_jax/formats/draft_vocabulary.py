"""draft_vocabulary.json beside a block drafter's files: the verifier's tokens that it drafts, the most frequent of answers.

Other tokens are never drafted; the output does not change. A draft then reads a fraction of the vocabulary table.

Source: FR-Spec (arXiv 2502.14856).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeflash_jax.core import devices, files, sharding
from treeflash_jax.core.checks import read_json
from treeflash_jax.formats.keys import Keys
from treeflash_jax.models import vocab

NAME = "draft_vocabulary.json"
SHARE = 4  # a quarter of the vocabulary is listed, as published
SMALLEST = 2**14  # vocabulary for which a list is written


def most_frequent(counts_v: np.ndarray, size: int) -> np.ndarray:
    """Returns the ids of the `size` most frequent tokens in increasing order, [z]; lower ids first among equals."""
    return np.sort(np.argsort(-counts_v, kind="stable")[:size])


def read(folder: Path, vocab_size: int) -> np.ndarray | None:
    """Returns the listed ids in increasing order, [z]; None without a list.

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
    """Lists the most frequent tokens of a large vocabulary in a folder that exists."""
    if counts_v.size >= SMALLEST:
        files.write(folder / NAME, json.dumps({"ids": most_frequent(counts_v, counts_v.size // SHARE).tolist()}) + "\n")


def load(ids_z: np.ndarray, verifier: dict[str, Any], mesh: Any = None) -> dict[str, Any]:
    """Returns the draft vocabulary's weights: its part of the verifier's vocabulary table, and the offsets of its ids."""

    def select(table_vd: Any) -> jax.Array:
        return sharding.constrain(vocab.embed(table_vd, ids_z), ("vocab", "embed"))

    with sharding.ambient(mesh):
        unembed_zd = devices.jit(select)(verifier.get("unembed", verifier["embed"]))
    offsets_z = jnp.asarray(ids_z - np.arange(ids_z.size), jnp.int32)
    return {"unembed": unembed_zd, "offsets": sharding.place(offsets_z, mesh, over_batch=False)}
