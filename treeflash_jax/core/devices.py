"""Properties of devices: instruction sets, memory and peak rates. `engine.settings.defaults` derives default settings.

A `Device` is a plain value, also for devices that are not present; `sharding.device` returns the Device of a mesh.
"""

import functools
import os
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

# Bytes of memory per chip, then JAX's names for TPU kinds. Source: Google Cloud's pages on TPUs; NVIDIA's data sheets.
TPU_MEMORY = {"v4": 32 * 2**30, "v5e": 16 * 2**30, "v5p": 95 * 2**30, "v6e": 32 * 2**30}
GPU_MEMORY = {"a100": 80 * 2**30, "h100": 80 * 2**30, "h200": 139 * 2**30}
# Cycles per second. Source: Jouppi et al. (arXiv 2304.01433) for v4; jax-ml.github.io/scaling-book for v5e and v5p. The
# clock of v6e is not published. It is derived from the peak rate below, assuming four units of 256 x 256 multipliers.
TPU_CLOCKS = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9}
TPU_KINDS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}
# Dense bfloat16 FLOP/s and bytes/s of memory per chip. Keys are prefixes of JAX's names for the chips. Source: as above.
PEAK_RATES = {
    "NVIDIA H200": (989e12, 4.8e12),
    "NVIDIA H100": (989e12, 3.35e12),
    "NVIDIA A100": (312e12, 2.04e12),
    "NVIDIA L4": (121e12, 0.3e12),
    "Tesla T4": (65e12, 0.32e12),
    "TPU v4": (275e12, 1.23e12),
    "TPU v5 lite": (197e12, 0.82e12),
    "TPU v5": (459e12, 2.77e12),
    "TPU v6 lite": (918e12, 1.64e12),
}
# Instructions for bfloat16 matrices and vectors, as named in /proc/cpuinfo. ALLOWED_INSTRUCTIONS has those that each value
# of --xla_cpu_max_isa allows; values that are not listed allow none.
MATRIX_INSTRUCTIONS = frozenset({"amx_bf16"})
BFLOAT16_INSTRUCTIONS = MATRIX_INSTRUCTIONS | {"avx512_bf16"}
ALLOWED_INSTRUCTIONS = {"AMX": BFLOAT16_INSTRUCTIONS, "AMX_FP16": BFLOAT16_INSTRUCTIONS, "AVX512_BF16": {"avx512_bf16"}}
# CPU fusions around matrix products give wrong numbers in jaxlib 0.10.2 (jax-ml/jax#39103) and crash in 0.10.2 and 0.11.0
# (#39257). With this option, only products go to the library YNNPACK: correct, and as fast. 0.12 does not need it.
WITHOUT_PRODUCT_FUSIONS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
# Since jax 0.11, XLA moves gathers of a round to a TPU's sparse cores. Rounds can then take half as long again (#40553).
WITHOUT_SPARSE_CORES = {"xla_tpu_offload_gather_to_sparsecore": "false"}
HAS_WRONG_FUSIONS = tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 12)


@dataclass(frozen=True)
class Device:
    """A kind of device that programs run on.

    Attributes:
      backend: JAX's name: "cpu", "gpu" or "tpu".
      kind: JAX's name of the chip.
      features: instruction sets of a CPU, as in the flags of /proc/cpuinfo; empty if unknown.
      compute_capability: JAX's name of a GPU's architecture, such as "9.0" (NVIDIA) or "gfx942" (AMD); empty if unknown.
    """

    backend: str
    kind: str = ""
    features: frozenset[str] = frozenset()
    compute_capability: str = ""

    @property
    def is_cpu(self) -> bool:
        return self.backend == "cpu"

    @property
    def compiler_options(self) -> dict[str, str]:
        """Compiler options that `jax.jit` gets for every program of this device."""
        return WITHOUT_PRODUCT_FUSIONS if self.is_cpu and HAS_WRONG_FUSIONS else {}

    @property
    def decoding_options(self) -> dict[str, str]:
        """Compiler options for programs that run rounds."""
        return WITHOUT_SPARSE_CORES if self.backend == "tpu" else self.compiler_options

    @property
    def ridge(self) -> int | None:
        """Number of tokens for which products with bfloat16 weights take as long as reading the weights. None: unknown."""
        return round(self.peak_rates[0] / self.peak_rates[1]) if self.peak_rates else None

    @property
    def peak_rates(self) -> tuple[float, float] | None:
        """Peak FLOP/s and bytes/s of the chip's data sheet; None for an unknown chip."""
        names = [name for name in PEAK_RATES if re.match(rf"{name}\b", self.kind)]  # whole words: an L40 is not an L4
        return PEAK_RATES[max(names, key=len)] if names else None

    @property
    def clock(self) -> float | None:
        """Cycles per second of a TPU; None for other chips."""
        return TPU_CLOCKS.get(TPU_KINDS.get(self.kind))

    @property
    def memory(self) -> int | None:
        """Bytes of memory of a TPU; None for other chips, for which JAX reports it."""
        return TPU_MEMORY.get(TPU_KINDS.get(self.kind))


def describe(device: Any) -> Device:
    """Returns the `Device` of a JAX device, which may be an abstract one for compiling ahead of time."""
    is_cpu = device.platform == "cpu"
    features = usable_features(cpu_features(), os.environ.get("XLA_FLAGS", "")) if is_cpu else frozenset()
    return Device(device.platform, device.device_kind, features, getattr(device, "compute_capability", ""))


def usable_features(features: frozenset[str], flags: str) -> frozenset[str]:
    """Returns the features that XLA_FLAGS allows. For example, --xla_cpu_max_isa=AVX512_VNNI excludes bfloat16."""
    limits = re.findall(r"--xla_cpu_max_isa=(\w+)", flags)
    if not limits:
        return features
    return features - (BFLOAT16_INSTRUCTIONS - ALLOWED_INSTRUCTIONS.get(limits[-1].upper(), set()))


@functools.cache
def cpu_features(path: str = "/proc/cpuinfo") -> frozenset[str]:
    """Returns the instruction sets of the first processor; empty without such a file."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.split(":")[0].strip() in ("flags", "Features")), ":")
    return frozenset(flags.split(":", 1)[1].split())
