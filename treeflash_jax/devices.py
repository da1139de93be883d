"""What a backend or chip is: facts, defaults and peak rates. The only place that asks which backend runs.

A `Device` is a plain value, so that what follows from a device can be asked and tested without it.
"""

from __future__ import annotations

import functools
import os
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from treeflash_jax import products

# Bytes of a chip, and what JAX calls its kind. Source: Google Cloud's pages on each TPU version; NVIDIA's data sheets.
TPU_MEMORY = {"v4": 32 * 2**30, "v5e": 16 * 2**30, "v5p": 95 * 2**30, "v6e": 32 * 2**30}
GPU_MEMORY = {"a100": 80 * 2**30, "h100": 80 * 2**30, "h200": 139 * 2**30}
TPU_KINDS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}
# Dense bfloat16 peak of one chip in FLOP/s, by the start of JAX's name of its kind. Source: as above.
PEAK_FLOPS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100": 989e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L4": 121e12,
    "Tesla T4": 65e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}
# Instructions that multiply bfloat16 numbers, by their names in the flags of /proc/cpuinfo: of matrices, and of vectors;
# and what XLA calls the instruction sets that hold them in --xla_cpu_max_isa.
MATRIX_INSTRUCTIONS = frozenset({"amx_bf16"})
BFLOAT16_INSTRUCTIONS = MATRIX_INSTRUCTIONS | {"avx512_bf16"}
BFLOAT16_SETS = ("AVX512_BF16", "AMX", "AMX_FP16")
# jaxlib 0.10.2 computes wrong numbers in CPU fusions around matrix products (jax-ml/jax#39103), and 0.10.2 and 0.11.0 crash
# in some (#39257). With this option products alone go to the library YNNPACK: right, and as fast. 0.12 needs no option.
WITHOUT_PRODUCT_FUSIONS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
HAS_WRONG_FUSIONS = tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 12)


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
    def compiler_options(self) -> dict[str, str]:
        """Options that every program for this device is compiled with: the argument of `jax.jit` of the same name."""
        return WITHOUT_PRODUCT_FUSIONS if self.is_cpu and HAS_WRONG_FUSIONS else {}

    @property
    def dtype(self) -> Any:
        """Default dtype of weights, caches and activations.

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

    def drafting_pays(self, dtype: Any, sequences: int = 1) -> bool:
        """Whether a round that drafts a small tree usually commits more tokens than one-token steps do in the same time.

        An accelerator reads the same weights for a tree and for a token. A CPU multiplies row after row, unless it has
        instructions for matrices of bfloat16. With avx512_bf16 alone, a round of 8 nodes of SmolLM2-135M takes 1.7
        one-token steps for one sequence, which is less than tau, 2.3 for two, and 2.3 in float32.
        """
        if not self.is_cpu:
            return True
        enough = MATRIX_INSTRUCTIONS if sequences > 1 else BFLOAT16_INSTRUCTIONS
        return jnp.dtype(dtype) == jnp.bfloat16 and bool(self.features & enough)

    def attention(self, dtype: Any) -> str:
        """The implementation that reads caches of `dtype` fastest, as far as that was measured.

        On CPUs "streamed" is faster in float32; in bfloat16 XLA would convert every slice, and "xla" is. Elsewhere nothing
        was measured.
        """
        return "streamed" if self.is_cpu and jnp.dtype(dtype) != jnp.bfloat16 else "xla"

    @property
    def multiplies_by_row(self) -> bool:
        """Whether verifying many rows takes many times as long as one: a CPU without instructions for matrices."""
        return self.is_cpu and not self.features & MATRIX_INSTRUCTIONS

    def tree_nodes(self, usual: int) -> int:
        """Nodes of a tree by default, where `usual` are the drafter's.

        With SmolLM2 in bfloat16 and avx512_bf16, trees of 8 nodes answer faster than trees of 16 on GSM8K, HumanEval,
        MT-Bench and Vicuna.
        """
        return min(usual, 8) if self.multiplies_by_row else usual

    @property
    def candidates(self) -> int:
        """Candidate tokens per depth (M) by default.

        With SmolLM2, 16 in place of 8 add 3 ms to a round of 8 nodes on such a CPU, and nothing to tau.
        """
        return 8 if self.multiplies_by_row else 16

    def shortlist(self, vocab_size: int) -> int:
        """Tokens per depth that the second stage of a draft scores; 0: all.

        An accelerator reads the table of the vocabulary once for all rows of the stage. A CPU pays for every row: with
        SmolLM2's 49,152 tokens, the stage takes 85 ms over all of them and 16 ms over 32 a depth, at the same tau
        (bfloat16, two cores with avx512_bf16, batch 1).
        """
        return 32 if self.is_cpu and vocab_size >= 2**14 else 0

    @property
    def prefill_chunk(self) -> int:
        """Prompt tokens of a prefill pass; a CPU computes padding too.

        With SmolLM2 in bfloat16 on two cores, prompts of 40 and 1,500 tokens take 0.31 and 4.8 CPU seconds in passes of 64,
        0.45 and 4.2 in passes of 128; in float32, 0.57 and 6.6, and 0.72 and 6.1.
        """
        return 64 if self.is_cpu else 128

    @property
    def prefill_attention(self) -> str:
        """Attention implementation of prefill passes: on CPUs, `streamed` reads only the filled part of a cache."""
        return "streamed" if self.is_cpu else "xla"

    @property
    def prefill_chunks(self) -> int:
        """Prefill passes per dispatch. Ctrl-C waits for a dispatch; on a CPU, a pass takes a tenth of a second or more."""
        return 1 if self.is_cpu else 16

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s that the maker of the chip states, or None for a chip that is not in the table."""
        names = [name for name in PEAK_FLOPS if self.kind.startswith(name)]
        return PEAK_FLOPS[max(names, key=len)] if names else None

    @property
    def nodes(self) -> tuple[int, ...]:
        """Sizes of trees that a calibration tries."""
        return (4, 8, 16, 32) if self.is_cpu else (8, 16, 32, 64, 128, 256)


def here() -> Device:
    """The devices that programs run on by default."""
    return _device(jax.default_backend(), jax.devices()[0].device_kind)


def of(device: Any) -> Device:
    """What JAX's device is; it may be one that is only described, for compiling ahead of time."""
    return _device(device.platform, device.device_kind)


def of_mesh(mesh: Any) -> Device:
    """What the devices of a mesh are; None: where programs run by default."""
    return here() if mesh is None else of(mesh.devices.flat[0])


def _device(backend: str, kind: str) -> Device:
    features = usable(cpu_features(), os.environ.get("XLA_FLAGS", "")) if backend == "cpu" else frozenset()
    return Device(backend, kind, features)


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


def jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Returns `jax.jit(function, **options)` with the compiler options of the default device, built at the first call.

    For functions called directly; `programs.call` compiles the others. Not callable from inside another jitted function:
    JAX accepts compiler options of the outermost one only.
    """
    jitted = functools.cache(lambda: jax.jit(function, compiler_options=here().compiler_options, **options))
    return functools.wraps(function)(lambda *args, **kwargs: jitted()(*args, **kwargs))


def memory(device: Any) -> int | None:
    """Returns the bytes that JAX may use on a device; None if it is not known, as on a CPU."""
    try:
        stats = device.memory_stats()
    except (jax.errors.JaxRuntimeError, NotImplementedError):  # devices that are described, not here
        stats = None
    return (stats or {}).get("bytes_limit") or TPU_MEMORY.get(TPU_KINDS.get(device.device_kind))


@functools.cache
def host_memory() -> int | None:
    """Returns the bytes of memory that this process can have on its host, swap included; None if not known."""

    def number(path: str, name: str) -> int | None:
        """A number of KiB that /proc names, or the one in a file of a control group."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError:
            return None
        found = re.search(rf"^{name}:\s*(\d+) kB" if name else r"^(\d+)$", text, flags=re.MULTILINE)
        return int(found[1]) * (1024 if name else 1) if found else None

    memory = number("/proc/meminfo", "MemTotal")
    swap = number("/proc/meminfo", "SwapTotal") or 0
    groups = [number("/sys/fs/cgroup/memory.max", ""), number("/sys/fs/cgroup/memory/memory.limit_in_bytes", "")]
    known = [size + swap for size in (memory, *groups) if size]
    return min(known, default=None)


@dataclass(frozen=True)
class Ceilings:
    """Rates of one device. Bytes of a copy count twice: read and written."""

    copy_bytes_per_second: float
    matmul_flops_per_second: float


def measure_ceilings(dtype: Any) -> Ceilings:
    """Measures the first device: a large pass that reads and writes every byte once, and a large matrix product."""
    size, calls = (2**27, 1) if here().is_cpu else (2**30, 8)
    negate = jit(jnp.negative, donate_argnums=0)  # in place, so that a CPU does not spend the time on fresh pages
    numbers = jit(lambda: jnp.arange(size // 4, dtype=jnp.float32))()
    return Ceilings(2 * size / _seconds(negate, numbers, calls), measure_flops(dtype))


def measure_flops(dtype: Any) -> float:
    """FLOP/s of a large matrix product on the first device, in the form that the model's products have there.

    The numbers are random, since zeros multiply faster, and the precision is JAX's ambient one.
    """
    side, calls = (1024, 1) if here().is_cpu else (8192, 8)
    left, right = (jax.random.normal(jax.random.key(i), (side, side), dtype) for i in range(2))
    multiply = jit(functools.partial(products.product, "ri,io->ro"))
    return 2 * side**3 / _seconds(lambda _: multiply(left, right), None, calls)


def peak_flops(count: int, dtype: Any) -> float | None:
    """Returns the peak FLOP/s of `count` devices: stated by the chip's maker or, on one CPU, measured; None if not known.

    Args:
      dtype: that is computed in, for CPUs; makers state the rate of bfloat16.
    """
    device = here()
    if device.peak_flops:
        return device.peak_flops * count
    return measure_flops(dtype) if device.is_cpu and jax.process_count() == 1 else None  # its devices share the cores


def _seconds(step: Callable[[Any], Any], carry: Any, calls: int, samples: int = 8) -> float:
    """Median seconds of one of `calls` steps in a row; the first sample is warm-up."""
    seconds = []
    for _ in range(samples):
        since = time.perf_counter()
        for _ in range(calls):
            carry = step(carry)
        jax.block_until_ready(carry)
        seconds.append((time.perf_counter() - since) / calls)
    return statistics.median(seconds[1:])
