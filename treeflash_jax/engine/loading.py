"""`tf.load`: finds a pair's files, chooses dtype and quantisation, checks that it fits the devices, and reads weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from treeflash_jax.core import programs, sharding
from treeflash_jax.core.checks import coerce, expect, refuse_unknown
from treeflash_jax.core.clock import slow
from treeflash_jax.core.error_text import clipping, logger
from treeflash_jax.core.settings import field_names
from treeflash_jax.decoding.state import Weights
from treeflash_jax.drafters import Drafter
from treeflash_jax.drafters.protocol import EITHER
from treeflash_jax.engine.device_memory import count_bytes, footprint, refuse_if_too_large, usable_memory
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.settings import pairs
from treeflash_jax.engine.settings.defaults import (
    choose_dtype,
    choose_nodes,
    find_defaults,
    keeps_fp8,
    keeps_groups,
    merges_weights,
)
from treeflash_jax.engine.settings.keywords import LoadOptions
from treeflash_jax.engine.settings.model_options import ModelOptions
from treeflash_jax.formats import draft_vocabulary, kept_weights, model_files
from treeflash_jax.formats.model_files import ModelFiles, open_files
from treeflash_jax.formats.tokenizer import Tokenizer, check_same_tokens
from treeflash_jax.models.decoder import merge
from treeflash_jax.models.quantized import NO_SCHEME


@clipping
def load(verifier: str | Path, **options: Unpack[LoadOptions]) -> TreeFlash:
    """Loads a verifier and, if there is one, its drafter. No code from a model repository is run.

    Example:
      >>> model = load("smollm2")
      >>> model = load("Qwen/Qwen3-4B", drafter="peerrh/treeflash-qwen3-4b", dtype="bfloat16")

    Args:
      verifier: language model to serve: a name (tiny, smollm2), or the folder,
        GGUF file, URL (gs://bucket/model) or Hub id of a Qwen (2 to 3.8, dense
        or a mixture of experts), Gemma 4, gpt-oss or Llama model.
      drafter: a name, folder, URL or Hub id of a block drafter (DFlash,
        TreeFlash, Domino, DSpark, DFlash2, JetSpec, LiLiCorr), an EAGLE-3
        drafter, an assistant of Gemma 4, or a small language model of the same
        vocabulary; mtp, the layer of multi-token prediction or the assistant in
        the verifier's files; ngram, which copies what followed the last tokens
        earlier in the text; or none to decode one token at a time (default: the
        drafter that ships for the named verifier, or mtp if its files have it,
        otherwise none).
      revision: Hub revision of the verifier.
      drafter_revision: Hub revision of the drafter.
      local_files_only: read Hub ids from the local cache only.
      dtype: dtype of weights, caches and activations (one of bfloat16, float16,
        float32, float64; default: bfloat16, but float32 on a CPU without
        bfloat16 instructions).
      quantize: store the verifier's matrices in fewer bits: int8, with a scale
        per output channel; fp8, with a scale per block of 128 x 128, or with
        the scales of an FP8 file; int4, with a scale per output and 128 inputs,
        or with the groups of a quantised file; mxfp4, for the experts, as in
        gpt-oss. Drafted output then equals the one-token output of the
        quantised verifier. none expands quantised files to the dtype (one of
        int8, fp8, int4, mxfp4, none; default: none; but quantised files are
        kept as they are on GPUs and TPUs if that reads fewer bytes, or if
        expanded weights do not fit).
      mesh: devices to use: DxM splits the batch D ways, weights and vocabulary
        M ways; with DxMxE, experts E ways. In Python also a mesh of `make_mesh`
        (default: one device).
      thinking: value of `enable_thinking` for the chat template; some templates
        ignore it.
      template: further arguments of the chat template, such as
        {"reasoning_effort": "high"} (default: none).

    Raises:
      TypeError: an unknown argument.
      FileNotFoundError: a path or file does not exist.
      ValueError: files are damaged or do not match, the Hub cannot be reached, or the weights exceed a device's memory.
      RuntimeError: this process was forked from one that had loaded a model.
    """
    refuse_unknown(options, field_names(ModelOptions))
    coerce(str | Path, verifier, "verifier")
    chosen = ModelOptions(verifier=verifier, **options)
    programs.check_process()
    mesh = sharding.make_mesh(**sharding.parse_sizes(chosen.mesh)) if isinstance(chosen.mesh, str) else chosen.mesh
    sharding.check_mesh(mesh)
    dtype = choose_dtype(sharding.device(mesh)) if chosen.dtype is None else _available_dtype(chosen.dtype)
    pair = _open_pair(chosen)
    with slow(f"loading {' and '.join(dict.fromkeys(name for name in pair.names if name != pairs.NO_DRAFTER))}"):
        return _load(pair, chosen, dtype, mesh)


@dataclass(frozen=True)
class _Pair:
    """Files of a verifier and its drafter; `names` are as the caller gave them."""

    names: tuple[str, str]
    verifier: ModelFiles
    drafter: ModelFiles | None


def _open_pair(options: ModelOptions) -> _Pair:
    """Finds a pair's files and reads their configs; downloads Hub ids and URLs."""
    verifier = pairs.locate(options.verifier, "verifier", options.revision, options.local_files_only)
    drafter = pairs.default_drafter(options.verifier, verifier) if options.drafter is None else options.drafter
    names = (str(options.verifier), str(drafter))
    if str(drafter) in (pairs.NO_DRAFTER, pairs.MTP):
        revision = options.drafter_revision
        expect(revision is None, "drafter_revision", revision, "none without a drafter in other files")
        folder = model_files.find_included_drafter(verifier) if str(drafter) == pairs.MTP else None
        expected = "a verifier whose files hold mtp.* tensors (Qwen3.5, Qwen3-Next) or a folder assistant (Gemma 4)"
        expect(folder is not None or str(drafter) == pairs.NO_DRAFTER, "drafter", drafter, expected)
    else:
        folder = pairs.locate(drafter, "drafter", options.drafter_revision, options.local_files_only)
    return _Pair(names, open_files(verifier, "verifier"), None if folder is None else open_files(folder, "drafter"))


def _load(pair: _Pair, chosen: ModelOptions, dtype: jnp.dtype, mesh: Mesh | None) -> TreeFlash:
    config = pair.verifier.config
    drafter = _fit_drafter(pair, chosen.thinking)
    tokenizer = Tokenizer.load(pair.verifier.path, {"enable_thinking": chosen.thinking, **(chosen.template or {})})
    if drafter is not None and drafter.has_tokenizer:
        check_same_tokens(tokenizer, Tokenizer.load(pair.drafter.path))
    schemes = _choose_schemes(pair, chosen.quantize, drafter, dtype, mesh)
    verifier_specs = pair.verifier.find_specs(dtype=dtype, mesh=mesh, quantize=schemes[0])
    drafter_specs = {} if drafter is None else drafter.specs()
    if schemes[1] is not None:
        drafter_specs |= pair.drafter.find_specs(dtype=dtype, mesh=mesh, quantize=schemes[1])
    weight_bytes = tuple(count_bytes(specs, dtype, mesh) for specs in (verifier_specs, drafter_specs))
    needs = footprint(config, drafter, dtype=dtype, mesh=mesh, weight_bytes=weight_bytes)
    refuse_if_too_large(needs, usable_memory(mesh), mesh)
    return TreeFlash(
        config,
        _read_weights(pair, dtype, mesh, schemes),
        drafter=drafter,
        tokenizer=tokenizer,
        stop_ids=model_files.stop_ids(pair.verifier.path, config),
        mesh=mesh,
        names=pair.names,
        recommended=pairs.RECOMMENDED.get(pair.names[0], {}) | model_files.read_generation_config(pair.verifier.path),
    )


def _choose_schemes(
    pair: _Pair, requested: str | None, drafter: Drafter | None, dtype: jnp.dtype, mesh: Mesh | None
) -> tuple[str | None, str | None]:
    """Returns the quantisation schemes of the verifier's and of the drafter's matrices.

    If none is requested, matrices of quantised files are kept as they are when that pays, and expanded otherwise. A
    drafter's matrices are never rounded: a scheme only decides whether quantised ones are kept or expanded.
    """

    def keep_if_it_pays(stored: str | None) -> str | None:
        if stored is None:
            return None
        device = sharding.device(mesh)
        tokens = 1 if drafter is None else choose_nodes(drafter, find_defaults(device, dtype))
        if stored == "fp8":
            return stored if keeps_fp8(device, dtype, tokens) else None
        limit = usable_memory(mesh)
        fits = limit is None or footprint(pair.verifier.config, drafter, dtype=dtype, mesh=mesh).total <= limit
        return stored if keeps_groups(device, dtype, tokens, fits) else None

    drafted = pair.drafter.stored_scheme() if drafter and drafter.keeps_weights else None
    if requested is None:
        return keep_if_it_pays(pair.verifier.stored_scheme()), keep_if_it_pays(drafted)
    scheme = None if requested == NO_SCHEME else requested
    return scheme, drafted if kept_weights.can_keep(requested, drafted) else None


def _fit_drafter(pair: _Pair, thinking: bool) -> Drafter | None:
    """Returns the drafter for this verifier, without its weights; None without a drafter.

    Warns if the drafter was trained with the opposite value of `thinking`, or if its context is shorter.
    """
    if pair.drafter is None:
        return None
    verifier = pair.verifier.config
    drafter = draft_vocabulary.limit(pair.drafter.config.fitted(verifier), pair.drafter.path, verifier.vocab_size)
    if drafter.thinking != EITHER and bool(drafter.thinking) != thinking:
        states = {None: "is not known to be trained with", False: "was trained without", True: "was trained with"}
        logger.warning(f"the drafter {states[drafter.thinking]} thinking, and thinking is {thinking}: tau may be far lower")
    if drafter.max_positions is not None and drafter.max_positions < verifier.max_positions:
        most = f"{drafter.max_positions:,} tokens, less than the verifier's {verifier.max_positions:,}"
        logger.warning(f"the drafter's context is {most}: tau may be far lower in longer texts")
    return drafter


def _read_weights(pair: _Pair, dtype: jnp.dtype, mesh: Mesh | None, schemes: tuple[str | None, str | None]) -> Weights:
    drafter_weights = None
    if pair.drafter is not None:
        pair.drafter.check_copies(pair.verifier)
        drafter_weights = pair.drafter.load(dtype=dtype, mesh=mesh, quantize=schemes[1])
    verifier_weights = pair.verifier.load(dtype=dtype, mesh=mesh, quantize=schemes[0])
    if drafter_weights is not None:
        drafter_weights |= draft_vocabulary.load(pair.drafter.path, drafter_weights, verifier_weights, mesh)
    if merges_weights(sharding.device(mesh)):
        merge(verifier_weights, pair.verifier.config, mesh)
    return Weights(verifier_weights, drafter_weights)


def _available_dtype(name: str) -> jnp.dtype:
    """Returns a float dtype. Raises ValueError for float64 without jax_enable_x64."""
    is_available = name != "float64" or jax.config.jax_enable_x64
    expect(is_available, "dtype", name, 'jax.config.update("jax_enable_x64", True) before it')
    return jnp.dtype(name)
