"""What the devices are, and the defaults that follow from it: the only place that asks which backend runs.

Everything here is a plain value, so that the defaults of a device can be tested without it.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

# Bytes of a chip, and what JAX calls its kind. Source: Google Cloud's pages on each TPU version; NVIDIA's data sheets.
TPU_MEMORY = {"v4": 32 * 2**30, "v5e": 16 * 2**30, "v5p": 95 * 2**30, "v6e": 32 * 2**30}
GPU_MEMORY = {"a100": 80 * 2**30, "h100": 80 * 2**30, "h200": 139 * 2**30}
TPU_KINDS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}
# Instructions that multiply bfloat16 numbers, by their names in the flags of /proc/cpuinfo; and what XLA calls the
# instruction sets that hold them in --xla_cpu_max_isa.
BFLOAT16_INSTRUCTIONS = frozenset({"amx_bf16", "avx512_bf16"})
BFLOAT16_SETS = ("AVX512_BF16", "AMX", "AMX_FP16")


@dataclass(frozen=True)
class Device:
    """A kind of device that programs run on.

    Attributes:
      backend: JAX's name: "cpu", "gpu" or "tpu".
      kind: JAX's name of the chip.
      features: instruction sets of a CPU, as in the flags of /proc/cpuinfo; empty where they are not known.
    """

    backend: str
    kind: str = ""
    features: frozenset[str] = frozenset()

    @property
    def is_cpu(self) -> bool:
        return self.backend == "cpu"

    @property
    def dtype(self) -> Any:
        """Of weights, caches and activations where nobody asks for one.

        bfloat16, except on a CPU without instructions for it: there XLA widens every weight as it multiplies, and a
        one-token step in float32 is faster.
        """
        narrow = not self.is_cpu or bool(self.features & BFLOAT16_INSTRUCTIONS)
        return jnp.dtype(jnp.bfloat16 if narrow else jnp.float32)

    @property
    def dtype_reason(self) -> str:
        """Why `dtype` is the default, in words."""
        if not self.is_cpu:
            return "the default on an accelerator"
        found = sorted(self.features & BFLOAT16_INSTRUCTIONS)
        return f"this CPU has {found[0]}" if found else "this CPU has no bfloat16 instructions"

    def attention(self, dtype: Any) -> str:
        """The implementation that reads caches of `dtype` fastest, as far as that was measured.

        On CPUs "streamed" is faster in float32; in bfloat16 XLA would convert every slice, and "xla" is. Elsewhere nothing
        was measured.
        """
        return "streamed" if self.is_cpu and jnp.dtype(dtype) != jnp.bfloat16 else "xla"

    @property
    def prefill_chunk(self) -> int:
        """Prompt tokens of a prefill pass; a CPU pays for every padded one."""
        return 32 if self.is_cpu else 128

    @property
    def nodes(self) -> tuple[int, ...]:
        """Sizes of trees that a calibration tries."""
        return (4, 8, 16, 32) if self.is_cpu else (8, 16, 32, 64, 128, 256)


def here() -> Device:
    """The devices that programs run on by default."""
    backend = jax.default_backend()
    features = usable(cpu_features(), os.environ.get("XLA_FLAGS", "")) if backend == "cpu" else frozenset()
    return Device(backend, jax.devices()[0].device_kind, features)


def usable(features: frozenset[str], flags: str) -> frozenset[str]:
    """The features that XLA may use under XLA_FLAGS: --xla_cpu_max_isa=AVX512_VNNI, say, leaves none for bfloat16."""
    limits = re.findall(r"--xla_cpu_max_isa=(\w+)", flags)
    return features if not limits or limits[-1].upper() in BFLOAT16_SETS else features - BFLOAT16_INSTRUCTIONS


@functools.cache
def cpu_features(path: str = "/proc/cpuinfo") -> frozenset[str]:
    """Instruction sets of this machine's first processor; empty on systems that have no such file."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.split(":")[0].strip() in ("flags", "Features")), ":")
    return frozenset(flags.split(":", 1)[1].split())


def memory(device: Any) -> int | None:
    """Bytes that JAX may use on a device, or None where nobody says, as on a CPU."""
    try:
        stats = device.memory_stats()
    except (jax.errors.JaxRuntimeError, NotImplementedError):  # devices that are described, not here
        stats = None
    return (stats or {}).get("bytes_limit") or TPU_MEMORY.get(TPU_KINDS.get(device.device_kind))
