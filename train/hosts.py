"""Processes and devices of a run: one laptop, one GPU, or every host of a pod, by the same command."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

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


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """A mesh over `devices`, those of all hosts by default; `data` 0 takes what `fsdp` and `model` leave.

    Raises:
      ValueError: the product is more than the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    data = config.data or max(1, len(devices) // max(1, config.fsdp * config.model))
    return meshes.make_mesh(data, config.model, devices, fsdp=config.fsdp)


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
