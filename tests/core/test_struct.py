"""Frozen dataclasses of arrays and static fields."""

from dataclasses import FrozenInstanceError
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from treeflash_jax.core import struct


@struct.dataclass
class Pair:
    first: jax.Array
    second: jax.Array | None
    name: str = struct.static(default="plain")


def test_arrays_are_leaves_and_static_fields_are_structure():
    pair = Pair(jnp.ones(2), None)
    doubled = jax.jit(partial(jax.tree.map, lambda x: 2 * x))(pair)
    assert (doubled.first.tolist(), doubled.second, doubled.name) == ([2, 2], None, "plain")
    named = pair.replace(second=jnp.zeros(1), name="other")
    assert len(jax.tree.leaves(named)) == 2 and named.first is pair.first
    assert jax.tree.structure(named) != jax.tree.structure(named.replace(name="plain"))
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(named)] == [".first", ".second"]
    with pytest.raises(FrozenInstanceError):
        pair.first = None
