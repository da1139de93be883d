"""Processes, devices and locks of a run. The same command runs on a laptop, on one GPU and on every host of a pod."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from jax.experimental.compilation_cache import compilation_cache

from train.data.packing import PackedBatch
from train.runtime.run_config import MeshConfig
from treeflash_jax.core import files, sharding, terminal
from treeflash_jax.core.checks import coerce
from treeflash_jax.core.error_text import clipped

# Beginnings of JAX's errors if it detects no cluster, and if this process has already used its devices.
ALONE = ("coordinator_address should be defined", "jax.distributed.initialize() must be called before")


def connect() -> None:
    """Joins the other processes of this job, if there are any.

    JAX detects Cloud TPU pods (through their metadata server), GKE, Slurm, Open MPI and Kubernetes. Elsewhere, set
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID for every process. JAX_NUM_PROCESSES=1 turns detection
    off.

    SIGTERM ends this process as usual: JAX's own handler, which only notes the signal, is removed.

    Raises ValueError if a variable is no number, or the other processes cannot be joined.
    """
    job_settings: dict[str, int] = {}
    for name, variable in (("num_processes", "JAX_NUM_PROCESSES"), ("process_id", "JAX_PROCESS_ID")):
        if variable in os.environ:
            job_settings[name] = coerce(int, os.environ[variable], variable, from_text=True)
    if jax.distributed.is_initialized() or job_settings.get("num_processes") == 1:
        return
    try:
        jax.distributed.initialize(**job_settings)
    except (OSError, RuntimeError, ValueError) as error:
        if job_settings or not str(error).startswith(ALONE):
            raise ValueError(
                f"the other processes of this job cannot be joined ({clipped(error, 200)}); set JAX_COORDINATOR_ADDRESS, "
                "JAX_NUM_PROCESSES and JAX_PROCESS_ID for every process, or JAX_NUM_PROCESSES=1 to use this one alone"
            ) from error
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if jax.process_count() > 1 and sharding.device().is_cpu:  # XLA:CPU programs from a cache wait for each other forever
        jax.config.update("jax_enable_compilation_cache", False)


def wait(name: str) -> None:
    """Waits for all hosts. JAX ends a job if its first host takes much longer to finish than the others."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def introduce(mesh: jax.sharding.Mesh, output: str) -> None:
    """Prints on every process its number, its devices, the mesh, and the output folder or file."""
    sizes = " ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    terminal.show(
        f"process {jax.process_index() + 1} of {jax.process_count()}: {jax.local_device_count()} of {jax.device_count()} "
        f"devices ({sharding.device().kind}), mesh {sizes}, {output}"
    )


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Makes a mesh over `devices` (default: those of all hosts). If `data` is 0, that axis takes all remaining devices."""
    devices = jax.devices() if devices is None else devices
    data = config.data or max(1, len(devices) // max(1, config.fsdp * config.model))
    mesh = sharding.make_mesh(data, config.model, devices, fsdp=config.fsdp)
    if mesh.size > 1 and sharding.device(mesh).is_cpu and jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_enable_compilation_cache", False)  # for the same reason as above
        compilation_cache.reset_cache()  # JAX reads the setting only once
    return mesh


@contextmanager
def held(path: epath.Path, what: str) -> Iterator[None]:
    """Holds a lock as `files.held` does, for all hosts of this job.

    Object stores have no locks, so nothing is held there. Raises ValueError on every host if the first one cannot hold it.
    """
    error = ""
    with ExitStack() as stack:
        if is_first() and not files.is_remote(path):
            try:
                stack.enter_context(files.held(path, what))
            except ValueError as refused:
                error = str(refused)
        if jax.process_count() > 1 and not multihost_utils.broadcast_one_to_all(np.int32(not error)):
            error = error or f"{what}: another process works on it; see the first host's message"
        if error:
            raise ValueError(error)
        yield


def is_first() -> bool:
    """Returns True on the process that prints and logs."""
    return jax.process_index() == 0


def say(text: str) -> None:
    """Prints on the first host."""
    if is_first():
        terminal.show(text)


def check_batch(batch_size: int, accumulate: int, mesh: jax.sharding.Mesh) -> None:
    """Raises ValueError if a batch cannot be divided into equal parts for all devices."""
    devices = mesh.shape["data"] * mesh.shape.get("fsdp", 1)
    if batch_size % (accumulate * devices):
        raise ValueError(
            f"got loop.batch {batch_size} in {accumulate} parts, expected a multiple of {accumulate} parts x {devices} "
            "devices along data and fsdp"
        )


def local_members(batch_size: int, mesh: jax.sharding.Mesh) -> list[int]:
    """Returns the indices of the sequences of a batch that lie on devices of this process."""
    placed = sharding.sharding(("batch",), (batch_size,), mesh).addressable_devices_indices_map((batch_size,))
    return sorted({i for [part] in placed.values() for i in range(batch_size)[part]})


def place_batch(batch: PackedBatch, batch_size: int, mesh: jax.sharding.Mesh) -> PackedBatch:
    """Makes global arrays, sharded over data and fsdp, from the `local_members` of all hosts."""

    def place(x: np.ndarray) -> jax.Array:
        shape = (batch_size, *x.shape[1:])
        layout = sharding.sharding(("batch",) + (None,) * (x.ndim - 1), shape, mesh)
        return jax.make_array_from_process_local_data(layout, x, shape)

    return jax.tree.map(place, batch)
