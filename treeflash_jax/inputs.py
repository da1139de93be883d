"""The arrays that a batch starts from: its padded prompts, and what each of its sequences asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeflash_jax import devices
from treeflash_jax import mesh as meshes
from treeflash_jax.decoding.state import Sampling
from treeflash_jax.drafters import DrafterSizes
from treeflash_jax.planning import Row, draft_temperature
from treeflash_jax.settings import GenerateConfig

STOP_SLOTS = 8  # stop ids of a sequence are padded to a multiple of this, so that changing them rarely recompiles

Inputs = tuple[jax.Array, jax.Array, Sampling]  # prompts [b, s], their lengths [b], settings of sampling


def inputs_of(
    rows: Sequence[Row],
    config: GenerateConfig,
    *,
    size: int,
    capacity: int,
    stop_ids: Sequence[int],
    dtype: Any,
    drafter: DrafterSizes | None = None,
    mesh: Any = None,
) -> Inputs:
    """What `prefill` takes besides the weights, in place on the mesh.

    Args:
      size: places of the batch. It is rounded up to what the mesh divides; places without a sequence hold a prompt of one
        token and are done after it.
      capacity: positions of a sequence's caches.
      mesh: None for one device.
    """
    size = meshes.padded(size, mesh)
    spare = size - len(rows)
    tokens_bs = np.zeros((size, capacity), np.int32)
    for i, row in enumerate(rows):
        tokens_bs[i, : row.length] = row.ids
    stops = sorted(set(stop_ids))
    stop_ids_x = np.full(max(1, -(-len(stops) // STOP_SLOTS)) * STOP_SLOTS, -1, np.int32)
    stop_ids_x[: len(stops)] = stops
    dtype = jnp.promote_types(dtype, jnp.float32)
    length_b = np.array([row.length for row in rows] + [1] * spare, np.int32)
    new_b = np.array([config.max_new_tokens] * len(rows) + [1] * spare, np.int32)
    numbers = [(row.seed, row.index, row.sample) for row in rows] + [(0, 0, 0)] * spare
    sharpness = [draft_temperature(config, drafter, row.temperature) for row in rows] + [1.0] * spare
    sampling = Sampling(
        key_b=_keys(*np.array(numbers, np.uint32).T),
        temperature_b=jnp.asarray([row.temperature for row in rows] + [0.0] * spare, dtype),
        top_k_b=jnp.asarray([row.top_k for row in rows] + [0] * spare, jnp.int32),
        top_p_b=jnp.asarray([row.top_p for row in rows] + [1.0] * spare, dtype),
        limit_b=jnp.asarray(length_b + new_b),
        stop_ids_bx=jnp.asarray(np.broadcast_to(stop_ids_x, (size, stop_ids_x.size))),
        drafter_temperature_b=jnp.asarray(sharpness, dtype),
    )
    return meshes.place((jnp.asarray(tokens_bs), jnp.asarray(length_b), sampling), mesh)


@devices.jit
def _keys(seed_b: jax.Array, index_b: jax.Array, sample_b: jax.Array) -> jax.Array:
    """One key per sequence: sample 0 has that of its prompt, sample j > 0 that key with j folded in."""

    def key(seed: jax.Array, index: jax.Array, sample: jax.Array) -> jax.Array:
        prompt = jax.random.fold_in(jax.random.key(seed), index)
        return jnp.where(sample == 0, prompt, jax.random.fold_in(prompt, sample))

    return jax.vmap(key)(seed_b, index_b, sample_b)
