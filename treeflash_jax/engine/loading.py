"""Loading a verifier with its drafter."""

import argparse
import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from treeflash_jax.core import programs, sharding
from treeflash_jax.core.checks import clipping, expect, fit, quoted, suggesting
from treeflash_jax.core.clock import slow
from treeflash_jax.core.settings import option_values
from treeflash_jax.decoding.state import Weights
from treeflash_jax.drafters import DrafterConfig
from treeflash_jax.engine import pairs
from treeflash_jax.engine.defaults import choose_dtype, merges_weights
from treeflash_jax.engine.device_memory import check_memory, footprint, usable_memory
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.model_options import ModelOptions
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

    Args:
      verifier: "smollm2" (SmolLM2-135M-Instruct), the toy model "tiny", or the folder, GGUF file, URL (gs://bucket/model)
        or Hub id of a Qwen3 (dense or a mixture of experts), Qwen2 or Llama model.
      drafter: the folder, URL or Hub id of a block drafter (DFlash, TreeFlash, Domino, DSpark, DFlash2, JetSpec, LiLiCorr),
        an EAGLE-3 drafter, or a small language model of the same vocabulary; "ngram", which copies what followed the last
        tokens earlier in the text; or "none". The default is the drafter that ships for "smollm2" and "tiny", else none.
      mesh: a (data, model) mesh from `make_mesh`. The default is one device.
      dtype: dtype of weights, caches and activations; default bfloat16, or float32 on CPUs without such instructions.
      quantize: "int8" stores the verifier's matrices in int8, with a scale per output channel; drafted output then equals
        the one-token output of the quantized verifier.
      revision, drafter_revision: Hub revisions.
      steering: folder of weights that steer a drafting language model by the verifier's hidden states (SD squared). The
        default is those in the drafter's folder, if any.
      local_files_only: read Hub ids from the local cache only.
      thinking: value of `enable_thinking` for the chat template; some templates ignore it.
      template: further arguments of the chat template, by name.

    Raises:
      TypeError: an unknown argument.
      FileNotFoundError: a path or file does not exist.
      ValueError: files are damaged or do not match, the Hub cannot be reached, or the weights exceed a device's memory.
      RuntimeError: this process was forked from one that had loaded a model.
    """
    fit(bool, thinking, "thinking")
    fit(Mapping[str, Any] | None, template, "template", says="a dictionary")
    programs.check_process()
    sharding.check(mesh)
    quantized.check_scheme(quantize)
    dtype = choose_dtype(sharding.device(mesh)) if dtype is None else float_type(dtype)
    pair = _locate(verifier, drafter, steering, (revision, drafter_revision), local_files_only)
    config = model_files.read_verifier_config(pair.verifier)
    drafter_config = _read_drafter_config(pair, config, thinking)
    tokenizer = Tokenizer.load(pair.verifier, {"enable_thinking": thinking, **(template or {})})
    if drafter_config is not None and drafter_config.has_tokenizer:
        check_same_tokens(tokenizer, Tokenizer.load(pair.drafter))
    check_memory(footprint(config, drafter_config, dtype=dtype, mesh=mesh, quantize=quantize), usable_memory(mesh), mesh)
    weights, stop_ids = _read_weights(pair, dtype, mesh, quantize), model_files.stop_ids(pair.verifier, config)
    parts = {"drafter": drafter_config, "tokenizer": tokenizer, "stop_ids": stop_ids}
    recommended = model_files.read_generation_config(pair.verifier)
    return TreeFlash(config, weights, **parts, mesh=mesh, names=pair.names, recommended=recommended)


@dataclass(frozen=True)
class _Pair:
    """Files of a verifier and its drafter, and of steering weights; `names` are those that the caller gave."""

    names: tuple[str, str]
    verifier: Path
    drafter: Path | None
    steering: Path | None


def _locate(
    verifier: str | Path,
    drafter: str | Path | None,
    steering: str | Path | None,
    revisions: tuple[str | None, str | None],
    local_files_only: bool,
) -> _Pair:
    """Finds the files of a pair, downloading those of Hub ids and URLs. Arguments are those of `load`."""
    for argument, path in {"verifier": verifier, "drafter": drafter, "steering": steering}.items():
        fit(str | Path if argument == "verifier" else str | Path | None, path, argument)
    drafter = pairs.default_drafter(verifier) if drafter is None else drafter
    names, has_drafter = (str(verifier), str(drafter)), str(drafter) != pairs.NO_DRAFTER
    verifier = pairs.locate(verifier, "verifier", revisions[0], local_files_only)
    if has_drafter:
        drafter = pairs.locate(drafter, "drafter", revisions[1], local_files_only)
        return _Pair(names, verifier, drafter, None if steering is None else Path(steering))
    if steering is not None:
        raise ValueError(f"got steering {quoted(steering)} and no drafter, expected a language model to steer")
    expect(revisions[1] is None, "drafter_revision", revisions[1], "none without a drafter")
    return _Pair(names, verifier, None, None)


def _read_drafter_config(pair: _Pair, verifier: ModelConfig, thinking: bool) -> DrafterConfig | None:
    """Returns the config of the drafter for this verifier; None without a drafter.

    Warns if the drafter was trained for the other value of `thinking`, or has a shorter context.
    """
    if pair.drafter is None:
        return None
    config = model_files.read_drafter_config(pair.drafter)
    if pair.steering is not None:
        config = config.steered(language_model_folder.read_steering_config(pair.steering))
    config = draft_vocabulary.limit(config.fitted(verifier), pair.drafter, verifier.vocab_size)
    trained = getattr(config, "thinking", thinking)
    if bool(trained) != thinking:
        state = {None: "is not known to be trained with", False: "was trained without", True: "was trained with"}
        logger.warning(f"the drafter {state[trained]} thinking, and thinking is {thinking}: tau may be far lower")
    context = getattr(config, "layers", verifier).max_positions
    if context < verifier.max_positions:
        most = f"{context:,} tokens, less than the verifier's {verifier.max_positions:,}"
        logger.warning(f"the drafter's context is {most}: tau may be far lower in longer texts")
    return config


def _read_weights(pair: _Pair, dtype: Any, mesh: Any, quantize: str | None) -> Weights:
    drafter = None
    if pair.drafter is not None:
        model_files.check_copies(pair.drafter, pair.verifier)
        drafter = model_files.load_drafter(pair.drafter, dtype=dtype, mesh=mesh)[1]
        if pair.steering is not None:
            drafter["steering"] = language_model_folder.load_steering(pair.steering, dtype, mesh)
    config, verifier = model_files.load_verifier(pair.verifier, dtype=dtype, mesh=mesh, quantize=quantize)
    if drafter is not None:
        drafter |= draft_vocabulary.load(pair.drafter, drafter, verifier, mesh)
    if merges_weights(sharding.device(mesh), config.num_kv_heads, mesh):
        merge(verifier)
    return Weights(verifier, drafter)


def float_type(dtype: Any) -> Any:
    """Returns a float dtype. Raises ValueError for any other, and for float64 without jax_enable_x64."""
    name = ""
    with suppress(TypeError):
        name = jnp.dtype(dtype).name
    expect(name in DTYPES, "dtype", dtype, f"one of {', '.join(DTYPES)}")
    is_available = name != "float64" or jax.config.jax_enable_x64
    expect(is_available, "dtype", dtype, 'jax.config.update("jax_enable_x64", True) before it')
    return jnp.dtype(dtype)


def choose_verifier(name: str | None) -> str:
    """Returns the name of the verifier, by default smollm2; prints a line if that is not on this machine."""
    if name is None and (name := pairs.default_verifier()) == "tiny":
        why = f"SmolLM2 is not on this machine ({pairs.GET_SMOLLM2} adds it)"
        print(f"treeflash: loading the toy pair tiny, since {why}", file=sys.stderr)
    return name


def load_model(arguments: argparse.Namespace, **changed: Any) -> TreeFlash:
    """Loads the model of the options; `changed` replaces some of them."""
    given = option_values(arguments, ModelOptions) | changed
    given["verifier"] = choose_verifier(given.get("verifier"))
    if given.get("mesh"):
        given["mesh"] = sharding.make_mesh(**sharding.parse_sizes(given["mesh"]))
    loaded = [name for name in (given["verifier"], given.get("drafter")) if name not in (None, pairs.NO_DRAFTER)]
    with slow(f"loading {' and '.join(loaded)}"):
        return load(**given)
