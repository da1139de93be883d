"""Devices that this machine lacks, for compiling programs ahead of time."""

from __future__ import annotations

import os
from typing import Any

import jax

from treeflash_jax.core.clock import slow
from treeflash_jax.core.devices import GPU_MEMORY, PEAK_RATES

# Targets of the compiler: multiprocessors, compute capability, L2 cache, shared memory of a multiprocessor.
# Source: NVIDIA's data sheets.
GPUS = {"a100": (108, 8, 40 * 2**20, 167_936), "h100": (132, 9, 50 * 2**20, 233_472), "h200": (132, 9, 50 * 2**20, 233_472)}
_GPU_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {block}
  core_count: {cores} fpus_per_core: {fpus} clock_rate_ghz: 1.755 cuda_compute_capability {{ major: {major} }}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {cache} device_memory_size: {memory}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{name}"
"""


def find_devices(topology: str | None) -> list[Any]:
    """Returns the devices at hand, or those of a topology: TPUs (v5e:4x4), or GPUs of one machine (h200, h200:8).

    With a topology, the devices at hand stay unused. Raises ValueError if it is unknown or has no compiler here.
    """
    if topology is None:
        return jax.devices()
    from jax.experimental import topologies

    jax.config.update("jax_platforms", "cpu")
    family, _, count = topology.partition(":")
    if family in GPUS:
        cores, major, cache, shared = GPUS[family]
        chip = f"NVIDIA {family.upper()}"
        target = _GPU_TARGET.format(
            shared=shared, block=shared - 1024, cores=cores, fpus=64 if major == 8 else 128, major=major, cache=cache,
            bandwidth=int(PEAK_RATES[chip][1]), memory=GPU_MEMORY[family], name=chip,
        )  # fmt: skip
        described = {"platform": "cuda", "target_config": target, "topology": f"1x1x{count or 1}"}
        expected = f'topology {topology} needs the GPU compiler; pip install "jax[cuda12]"'
    else:
        try:
            import libtpu
        except ImportError:
            raise ValueError(f'topology {topology} needs the TPU compiler; pip install "jax[tpu]"') from None
        os.environ.setdefault("TPU_LIBRARY_PATH", libtpu.get_library_path())
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        described = {"platform": "tpu", "topology_name": topology}
        expected = f"got topology {topology!r}, expected one like v5e:4x4 or v5p:2x2x2"
    try:
        with slow(f"starting the compiler for {topology}"):
            return list(topologies.get_topology_desc(**described).devices)
    except Exception as error:
        raise ValueError(f"{expected} ({str(error).splitlines()[0]})") from None
