"""Properties of devices: instruction sets, memory, peak rates and the defaults that follow from them.

Only this module queries the devices present. A `Device` is a plain value, also for devices that are not present.
"""

import functools
import math
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp

# Bytes of memory per chip, and JAX's names of TPU kinds. Source: Google Cloud's pages on TPUs; NVIDIA's data sheets.
TPU_MEMORY = {"v4": 32 * 2**30, "v5e": 16 * 2**30, "v5p": 95 * 2**30, "v6e": 32 * 2**30}
GPU_MEMORY = {"a100": 80 * 2**30, "h100": 80 * 2**30, "h200": 139 * 2**30}
TPU_KINDS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}
# Dense bfloat16 FLOP/s and bytes/s of memory per chip, by prefix of JAX's name of its kind. Source: as above.
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
# Above this tau, SmolLM2-135M is faster with trees of 8 nodes than one token at a time, whatever the prompts: the largest
# ratio of tau to speedup of four sets of prompts. By the instructions of the products, then by number of sequences.
BREAK_EVEN_TAU = {"bfloat16": {1: 1.75, 2: 2.2, 4: 3.3}, "float32": {1: 2.15, 2: 2.2, 4: 3.2}}
USUAL_TAU = 2.0  # assumed if a drafter states none
HOPPER = ("NVIDIA H100", "NVIDIA H200")
# Instructions for bfloat16 matrices and vectors, as named in /proc/cpuinfo, and the instruction sets with them, as named in
# --xla_cpu_max_isa.
MATRIX_INSTRUCTIONS = frozenset({"amx_bf16"})
BFLOAT16_INSTRUCTIONS = MATRIX_INSTRUCTIONS | {"avx512_bf16"}
BFLOAT16_SETS = ("AVX512_BF16", "AMX", "AMX_FP16")
# CPU fusions around matrix products give wrong numbers in jaxlib 0.10.2 (jax-ml/jax#39103) and crash in 0.10.2 and 0.11.0
# (#39257). This option passes only products to the library YNNPACK: correct, and as fast. 0.12 does not need it.
WITHOUT_PRODUCT_FUSIONS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
HAS_WRONG_FUSIONS = tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 12)


@dataclass(frozen=True)
class Device:
    """A kind of device that programs run on.

    Attributes:
      backend: JAX's name: "cpu", "gpu" or "tpu".
      kind: JAX's name of the chip.
      features: instruction sets of a CPU, as in the flags of /proc/cpuinfo; empty if unknown.
    """

    backend: str
    kind: str = ""
    features: frozenset[str] = frozenset()

    @property
    def is_cpu(self) -> bool:
        return self.backend == "cpu"

    @property
    def compiler_options(self) -> dict[str, str]:
        """Argument `compiler_options` of `jax.jit` for every program of this device."""
        return WITHOUT_PRODUCT_FUSIONS if self.is_cpu and HAS_WRONG_FUSIONS else {}

    @property
    def dtype(self) -> Any:
        """Default dtype of weights, caches and activations.

        bfloat16, but float32 on a CPU without bfloat16 instructions: XLA would convert every weight to float32 in every
        product, and a one-token step in float32 is faster.
        """
        has_bfloat16 = not self.is_cpu or self.features & BFLOAT16_INSTRUCTIONS
        return jnp.dtype(jnp.bfloat16 if has_bfloat16 else jnp.float32)

    @property
    def dtype_reason(self) -> str:
        if not self.is_cpu:
            return "the default on an accelerator"
        available = sorted(self.features & BFLOAT16_INSTRUCTIONS)
        return f"this CPU has {available[0]}" if available else "this CPU has no bfloat16 instructions"

    def drafting_pays(self, dtype: Any, sequences: int = 1, tau: float | None = None) -> bool:
        """Returns True if drafting a small tree is expected to be faster than one-token decoding.

        An accelerator takes as long for a tree as for a token if both are within its ridge. On a CPU whose products use no
        matrix instructions, as in float32, time grows with the number of tokens: tau must exceed BREAK_EVEN_TAU, for
        `sequences` rounded up to a number in it. False for more sequences than any of its numbers.

        Args:
          sequences: number of sequences decoded together, on a mesh per index of its data axis.
          tau: mean number of tokens that a round adds (`DrafterConfig.tau`); None: USUAL_TAU.
        """
        features = self.in_dtype(dtype).features
        if not self.is_cpu or features & MATRIX_INSTRUCTIONS:
            return self.nodes_within_ridge(2, sequences) == 2
        needed = BREAK_EVEN_TAU["bfloat16" if features & BFLOAT16_INSTRUCTIONS else "float32"]
        return (tau or USUAL_TAU) > min((least for count, least in needed.items() if count >= sequences), default=math.inf)

    def attention(self, dtype: Any, requested: str | None = None, head_dims: Collection[int] = ()) -> str:
        """Returns the requested attention implementation or the default for caches of `dtype` and heads of these sizes.

        On CPUs the fastest measured: "streamed" in float32, "xla" in bfloat16, where copying a part of the cache takes
        longer than it saves unless there are many queries, as in a prefill. On Hopper GPUs the Pallas kernel in bfloat16,
        for head sizes that are powers of two, at least 16: with it, rounds of Qwen3-4B with 16, 64 and 256 nodes take 2, 4
        and 14 % less time on an H200 after 1,024 tokens, and 4, 19 and 32 % less after 4,096. Not measured on an H100 or
        other accelerators.

        Raises ValueError for another backend's Pallas kernel; a CPU interprets all of them.
        """
        if requested is not None:
            if not self.is_cpu and requested.startswith("pallas-") and requested != f"pallas-{self.backend}":
                raise ValueError(f"got attention {requested!r} on a {self.backend}, expected 'xla' or 'streamed'")
            return requested
        if self.kind.startswith(HOPPER) and jnp.dtype(dtype) == jnp.bfloat16:
            return "pallas-gpu" if all(size >= 16 and size.bit_count() == 1 for size in head_dims) else "xla"
        return "streamed" if self.is_cpu and jnp.dtype(dtype) != jnp.bfloat16 else "xla"

    def residual_dtype(self, dtype: Any) -> Any:
        """Returns the dtype of the verifier's residual stream and logits for weights of `dtype`; None: the same.

        With SmolLM2 in bfloat16 and avx512_bf16, float32 keeps more answers equal to one-token decoding, at the same speed.
        On accelerators it would add memory traffic, and nothing was measured.
        """
        return jnp.dtype(jnp.float32) if self.is_cpu and jnp.dtype(dtype).itemsize < 4 else None

    def training_attention(self, requested: str = "auto") -> str:
        """Returns the requested attention implementation for packed sequences; for "auto", the device's kernel.

        cuDNN's needs an Ampere GPU or newer; names of older data-centre GPUs do not start with NVIDIA ("Tesla T4"). Raises
        ValueError for another device's kernel; a CPU interprets "splash".
        """
        kernel = {"tpu": "splash", "gpu": "cudnn" if self.kind.startswith("NVIDIA") else None}.get(self.backend)
        if requested not in ("auto", "chunked", "splash" if self.is_cpu else kernel):
            raise ValueError(f"got attention {requested!r} on a {self.backend}, expected 'auto' or 'chunked'")
        return (kernel or "chunked") if requested == "auto" else requested

    def in_dtype(self, dtype: Any) -> Self:
        """Returns this device without the instructions that weights of `dtype` do not use."""
        return self if jnp.dtype(dtype) == jnp.bfloat16 else replace(self, features=self.features - BFLOAT16_INSTRUCTIONS)

    @property
    def pays_per_token(self) -> bool:
        """True if the time of a pass grows with its number of tokens: on CPUs not using amx_bf16."""
        return self.is_cpu and not self.features & MATRIX_INSTRUCTIONS

    def tree_nodes(self, usual: int) -> int:
        """Returns the default number of tree nodes, given the drafter's.

        With SmolLM2 in bfloat16 and avx512_bf16, 8 nodes are 1 to 9 % faster than 5 for three of four sets of prompts,
        and 4 % slower for the fourth.
        """
        return min(usual, 8) if self.pays_per_token else usual

    def nodes_within_ridge(self, usual: int, sequences: int) -> int:
        """Returns the usual number of tree nodes, or fewer if nodes x sequences would exceed the ridge; 0 if none fits.

        Up to the ridge, a round takes no longer than a one-token step, since both read all weights.
        """
        return usual if self.ridge is None else min(usual, self.ridge // sequences)

    @property
    def ridge(self) -> int | None:
        """Number of tokens whose products with bfloat16 weights take as long as reading the weights; None if unknown."""
        return round(self.peak_rates[0] / self.peak_rates[1]) if self.peak_rates else None

    @property
    def prefill_chunk(self) -> int:
        """Prompt tokens per prefill pass.

        On a known accelerator, the power of two nearest to its ridge. With fewer, prefill is bound by memory; more would
        pad short prompts.

        Padding costs most on a CPU. With SmolLM2 in bfloat16 on two cores, prompts of 40 and 1,500 tokens take 0.31 and 4.8
        CPU seconds in passes of 64, 0.45 and 4.2 in passes of 128; in float32, 0.57 and 6.6, and 0.72 and 6.1.
        """
        if self.is_cpu or self.ridge is None:
            return 64 if self.is_cpu else 128
        return 2 ** round(math.log2(self.ridge))

    @property
    def prefill_attention(self) -> str:
        """Attention implementation of prefill; `streamed` reads only the filled part of a cache."""
        return "streamed" if self.is_cpu else "xla"

    @property
    def prefill_chunks(self) -> int:
        """Prefill passes per dispatch. Ctrl-C waits for a dispatch; on a CPU, a pass takes a tenth of a second or more."""
        return 1 if self.is_cpu else 16

    @property
    def peak_rates(self) -> tuple[float, float] | None:
        """Peak FLOP/s and bytes/s of the chip's data sheet; None for an unknown chip."""
        names = [name for name in PEAK_RATES if self.kind.startswith(name)]
        return PEAK_RATES[max(names, key=len)] if names else None


def here() -> Device:
    """Returns the default device."""
    return describe(jax.devices()[0])


def describe(device: Any) -> Device:
    """Returns the `Device` of a JAX device, which may be an abstract one for compiling ahead of time."""
    is_cpu = device.platform == "cpu"
    features = usable(cpu_features(), os.environ.get("XLA_FLAGS", "")) if is_cpu else frozenset()
    return Device(device.platform, device.device_kind, features)


def describe_mesh(mesh: Any) -> Device:
    """Returns the device of a mesh; the default device for None."""
    return here() if mesh is None else describe(mesh.devices.flat[0])


def usable(features: frozenset[str], flags: str) -> frozenset[str]:
    """Returns the features that XLA_FLAGS allow: for example, AVX512_VNNI as --xla_cpu_max_isa excludes bfloat16."""
    limits = re.findall(r"--xla_cpu_max_isa=(\w+)", flags)
    return features if not limits or limits[-1].upper() in BFLOAT16_SETS else features - BFLOAT16_INSTRUCTIONS


@functools.cache
def cpu_features(path: str = "/proc/cpuinfo") -> frozenset[str]:
    """Returns the instruction sets of the first processor; empty without such a file."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.split(":")[0].strip() in ("flags", "Features")), ":")
    return frozenset(flags.split(":", 1)[1].split())


def jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Returns `jax.jit(function, **options)` with the compiler options of the default device, built at the first call.

    For functions called directly; `programs.call` compiles the others. Not callable inside another jitted function: JAX
    accepts compiler options only for the outermost.
    """
    jitted = functools.cache(lambda: jax.jit(function, compiler_options=here().compiler_options, **options))
    return functools.wraps(function)(lambda *args, **kwargs: jitted()(*args, **kwargs))


def memory(device: Any) -> int | None:
    """Returns the bytes that JAX may use on a device; None if unknown, as on a CPU."""
    try:
        stats = device.memory_stats()
    except (jax.errors.JaxRuntimeError, NotImplementedError):  # abstract devices
        stats = None
    return (stats or {}).get("bytes_limit") or TPU_MEMORY.get(TPU_KINDS.get(device.device_kind))


@functools.cache
def host_memory() -> int | None:
    """Returns the bytes of host memory available to this process, swap included; None if unknown."""

    def number(path: str, name: str) -> int | None:
        """Reads an entry of /proc in KiB or, without a name, the number in a control group's file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError:
            return None
        match = re.search(rf"^{name}:\s*(\d+) kB" if name else r"^(\d+)$", text, flags=re.MULTILINE)
        return int(match[1]) * (1024 if name else 1) if match else None

    memory, swap = (number("/proc/meminfo", name) for name in ("MemTotal", "SwapTotal"))
    groups = [number("/sys/fs/cgroup/memory.max", ""), number("/sys/fs/cgroup/memory/memory.limit_in_bytes", "")]
    return min((size + (swap or 0) for size in (memory, *groups) if size), default=None)
