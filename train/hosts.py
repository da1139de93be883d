"""Processes and devices of a run: one laptop, one GPU, or every host of a pod, by the same command."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from train.config import MeshConfig
from treeflash_jax import mesh as meshes


def connect() -> None:
    """Joins the other processes of this job where there are any.

    JAX finds them by itself on Cloud TPU pods and under Slurm and Open MPI; elsewhere set JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID for every process.
    """
    environ = os.environ
    several = (
        "JAX_COORDINATOR_ADDRESS" in environ
        or int(environ.get("SLURM_NTASKS", "1")) > 1
        or int(environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1
        or "," in environ.get("TPU_WORKER_HOSTNAMES", "")
        or "MEGASCALE_COORDINATOR_ADDRESS" in environ
    )
    if several and not jax.distributed.is_initialized():
        if "JAX_NUM_PROCESSES" in environ:
            jax.distributed.initialize(
                num_processes=int(environ["JAX_NUM_PROCESSES"]), process_id=int(environ["JAX_PROCESS_ID"])
            )
        else:
            jax.distributed.initialize()


def make_mesh(config: MeshConfig) -> jax.sharding.Mesh:
    """The mesh of a run over all devices of all hosts; `data` 0 takes what `fsdp` and `model` leave."""
    count = len(jax.devices())
    data = config.data or max(1, count // (config.fsdp * config.model))
    return meshes.make_mesh(data, config.model, fsdp=config.fsdp)


def is_first() -> bool:
    """Whether this process prints and logs."""
    return jax.process_index() == 0


def say(text: str) -> None:
    """Prints once, whatever the number of hosts."""
    if is_first():
        print(text, flush=True)


def check_batch(batch: int, accumulate: int, mesh: jax.sharding.Mesh) -> None:
    """Raises ValueError where a batch does not divide into parts, devices and hosts."""
    rows = mesh.shape["data"] * mesh.shape.get("fsdp", 1)
    if accumulate < 1 or batch % (accumulate * rows) or batch % jax.process_count():
        raise ValueError(
            f"got loop.batch {batch} in {accumulate} parts, expected a multiple of {accumulate} parts x {rows} devices "
            f"along data and fsdp, and of {jax.process_count()} hosts"
        )


def place_rows(rows: Any, mesh: jax.sharding.Mesh) -> Any:
    """This host's rows of a batch as part of the global arrays, rows over data and fsdp."""
    count = jax.process_count()

    def place(x: np.ndarray) -> jax.Array:
        shape = (len(x) * count, *x.shape[1:])
        sharding = meshes.sharding(("batch",) + (None,) * (x.ndim - 1), shape, mesh)
        return jax.make_array_from_process_local_data(sharding, x, shape)

    return jax.tree.map(place, rows)


def to_host(tree: Any) -> Any:
    """NumPy copies of small arrays, whole on every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)
