"""Verifiers of Qwen3.5, Qwen3-Next, gpt-oss and Gemma 4 against what transformers computed in float32 for random weights.

Their layers are of two kinds: most of Qwen's are gated delta rules, every second one of gpt-oss sees a window, and so do
most of Gemma's, some of which keep no keys and values. The fixtures have logits, features of some layers and 32 greedy ids
after prompts of 5, 40 and 150 tokens, and a random tree below each prompt; every node was computed as a text of its own.
"""

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import slow_unless
from conftest import DATA, needs_8_devices

from treeflash_jax.core import parameters, sharding
from treeflash_jax.formats import model_files
from treeflash_jax.models import caches, decoder, kernels
from treeflash_jax.models.backend import block_scales
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.quantized_weight import Quantized

GEMMAS = ("gemma4", "gemma4_moe", "gemma4_edge")
NAMES = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_next", "gpt_oss", *GEMMAS)
CAPACITY, CHUNK = 256, 80  # a chunk of the prompt is more than one block
TAPS = {4: (0, 1), 6: (0, 3, 4), 8: (0, 4, 6)}  # of the fixtures, by their number of layers
# Prompts whose caches cannot be cut: windows in rings, no copies of states. Their programs are others: not all verifiers
# run both.
NOT_CUT = {"qwen3_next": (2,), "gpt_oss": (2,), "gemma4": (0, 1, 2), "gemma4_moe": (0, 1, 2), "gemma4_edge": (2,)}
ATOL = 4e-3  # of the reference's own rounding: logits reach 13, and these random layers amplify it
GEMMA_ATOL = 5e-4


@lru_cache
def load(name: str, dtype: Any = jnp.float32) -> tuple[ModelConfig, dict, dict]:
    folder = DATA / "hybrid" / name
    return *model_files.load_verifier(folder, dtype=dtype), dict(np.load(folder / "expected.npz"))


@partial(jax.jit, static_argnames="config")
def run_pass(params, config, tokens_bt, positions_bt, mask_btu, cache):
    out = decoder.forward(params, config, tokens_bt, positions_bt, mask_btu, cache, taps=TAPS[config.num_layers])
    return out, decoder.logits(params, config, out.hidden_btd)


commit = jax.jit(caches.commit)


def read_prompt(params: Any, config: ModelConfig, tokens: np.ndarray, can_cut: bool = True):
    """The logits and features of a prompt that is read in chunks, padded as in decoding, and the cache after it."""
    cache = caches.allocate(config, 1, CAPACITY, params["norm"].dtype, can_cut=can_cut)
    logits, features = [], []
    for begin in range(0, len(tokens), CHUNK):
        part = tokens[begin : begin + CHUNK]
        padded = np.pad(part, (0, CHUNK - len(part)))[None]
        positions = begin + np.arange(CHUNK)[None]
        out, out_logits = run_pass(params, config, padded, positions, np.tri(CHUNK, dtype=bool)[None], cache)
        cache = commit(cache, out.new, jnp.asarray([len(part)]))
        logits.append(out_logits[0, : len(part)])
        features.append(out.features_btj[0, : len(part)])
    return np.concatenate(logits), np.concatenate(features), cache


def tree_arrays(expected: dict, i: int) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
    """The mask, the depths and the path to every node of a fixture's tree."""
    paths: list[list[int]] = [[0]]
    for node, parent in enumerate(expected[f"tree_parent{i}"][1:], 1):
        paths.append([*paths[parent], node])
    mask = np.zeros((1, len(paths), len(paths)), bool)
    for node, path in enumerate(paths):
        mask[0, node, path] = True
    return mask, np.array([len(path) - 1 for path in paths]), paths


# "qwen3_next" and "gemma4_moe" have what "qwen3_5_moe" and "gemma4" have. The kernel's test reads a tree of "qwen3_5_text".
QUICK = ("qwen3_5", "qwen3_next", "gpt_oss", "gemma4_moe", "gemma4_edge")


@pytest.mark.parametrize("name", [slow_unless(name in QUICK, name) for name in NAMES])
def test_logits_features_and_trees_in_one_pass(name):
    config, params, expected = load(name)
    assert len({*config.layer_types}) == (4 if name == "gemma4_edge" else 2)
    assert (*expected["taps"],) == TAPS[config.num_layers]
    atol = GEMMA_ATOL if name in GEMMAS else ATOL
    for i in range(3):
        prompt = expected[f"prompt{i}"]
        logits, features, cache = read_prompt(params, config, prompt, can_cut=i not in NOT_CUT.get(name, ()))
        last = len(expected[f"logits{i}"])
        np.testing.assert_allclose(logits[-last:], expected[f"logits{i}"], atol=atol)
        mask, depths, _ = tree_arrays(expected, i)
        tree = expected[f"tree_tokens{i}"][None], len(prompt) + depths[None], mask
        out, tree_logits = run_pass(params, config, *tree, cache)
        np.testing.assert_allclose(tree_logits[0], expected[f"tree_logits{i}"], atol=atol)
        if f"features{i}" in expected:
            np.testing.assert_allclose(features[-last:], expected[f"features{i}"], atol=atol)
            np.testing.assert_allclose(out.features_btj[0], expected[f"tree_features{i}"], atol=atol)


CHANGES = {
    "a longer window": ("gemma4", {"window": 13}),
    "a shorter window": ("gemma4", {"window": 11}),
    "no norm of values": ("gemma4", {"value_norm": False}),
    "no cap": ("gemma4", {"logit_cap": 0.0}),
    "no factor": ("gemma4", {"embedding_factor": 1.0}),
    "silu": ("gemma4_moe", {"activation": "silu"}),
    "shared earlier": ("gemma4_edge", {}),
    "no scalars": ("gemma4", {}),
    "no scales of experts": ("gemma4_moe", {}),
}


SEEN = ("a longer window", "shared earlier", "no scalars", "no scales of experts")


@pytest.mark.parametrize("change", [slow_unless(change in SEEN, change) for change in CHANGES])
def test_every_part_of_gemma_counts(monkeypatch, change):
    """Each is seen at once: logits differ by far more than by rounding."""
    name, fields = CHANGES[change]
    config, params, expected = load(name)
    if change == "shared earlier":
        monkeypatch.setattr(decoder, "find_sources", lambda config: (0, 1, 2, 3, 1, 2, 1, 2))
    dropped = {"no scalars": "scalar", "no scales of experts": "expert_scale"}.get(change)
    params = jax.tree.map_with_path(lambda path, x: jnp.ones_like(x) if path[-1].key == dropped else x, params)
    if not dropped:
        config = replace(config, max_positions=999, **fields)  # a program of its own
    logits, *_ = read_prompt(params, config, expected["prompt1"], can_cut=False)
    assert np.max(np.abs(logits[-8:] - expected["logits1"])) > 0.02


@pytest.mark.parametrize("name", ["qwen3_5", "gemma4_edge"])
def test_a_tree_and_a_commit_of_any_path_equal_texts_of_their_own(float64, name):
    """In float64: every node has the logits of its path as a text, and after a commit the next tree has those too."""
    config, params, expected = load(name, jnp.float64)
    prompt, tokens = expected["prompt1"], expected["tree_tokens1"]
    mask, depths, paths = tree_arrays(expected, 1)
    _, _, cache = read_prompt(params, config, prompt)
    tree = tokens[None], len(prompt) + depths[None], mask
    out, logits = run_pass(params, config, *tree, cache)
    for path in (paths[0], paths[5], max(paths, key=len)):
        text = np.concatenate([prompt, tokens[path]])
        want, _, _ = read_prompt(params, config, text)
        np.testing.assert_allclose(logits[0, path[-1]], want[-1], atol=1e-9)
        padded = jnp.asarray([path + [0] * (8 - len(path))])
        after = commit(cache, out.new, jnp.asarray([len(path)]), padded)
        _, again = run_pass(params, config, tree[0], len(text) + depths[None], mask, after)
        node = max(paths, key=len)
        want, _, _ = read_prompt(params, config, np.concatenate([text, tokens[node]]))
        np.testing.assert_allclose(again[0, node[-1]], want[-1], atol=1e-9)


def test_a_cut_keeps_all_or_the_prompt_or_nothing(float64):
    config, params, expected = load("qwen3_5", jnp.float64)
    prompt, answer = expected["prompt0"], expected["greedy0"][:3]
    _, _, cache = read_prompt(params, config, prompt)
    tokens, mask = np.pad(answer, (0, 11))[None], np.tri(14, dtype=bool)[None]  # a chain, padded to the size of the trees
    out, _ = run_pass(params, config, tokens, 5 + np.arange(14)[None], mask, cache)
    cache = commit(cache, out.new, jnp.asarray([3]), jnp.asarray([[0, 1, 2, 0, 0, 0, 0, 0]]))
    for kept, want in ((8, 8), (7, 5), (5, 5), (4, 0), (0, 0)):
        assert cache.longest_cut(jnp.asarray([kept])).tolist() == [want]
        cut = cache.cut(jnp.asarray([want]))
        text = np.concatenate([prompt, answer])[:want]
        again, _, _ = read_prompt(params, config, np.concatenate([text, answer]))
        _, got = run_pass(params, config, tokens, want + np.arange(14)[None], mask, cut)
        np.testing.assert_allclose(got[0, :3], again[-3:], atol=1e-9, err_msg=str(kept))


@pytest.mark.parametrize(
    "name", [slow_unless(name in QUICK, name) for name in ("qwen3_5", "qwen3_5_moe", "gemma4", "gemma4_edge")]
)
def test_merged_weights_compute_the_same(float64, name):
    config, params, expected = load(name, jnp.float64)
    merged = jax.tree.map(lambda x: x, params)
    decoder.merge(merged, config)
    layer = merged["groups"][0][0]
    joined, part = ("qkv", "k") if name in GEMMAS else ("delta_in", "delta_z")
    assert joined in layer and part not in layer
    specs = decoder.specs(config, is_merged=True)
    assert jax.tree.map(lambda x: x.shape, merged) == jax.tree.map(lambda x: x.shape, specs)
    want, _, _ = read_prompt(params, config, expected["prompt0"])
    got, _, _ = read_prompt(merged, config, expected["prompt0"])
    np.testing.assert_allclose(got, want, atol=1e-9)


@needs_8_devices
@pytest.mark.slow
@pytest.mark.parametrize("scheme", [None, "int8"])
@pytest.mark.parametrize("ways", [2, 4])
def test_merged_weights_of_a_mesh_compute_the_same(float64, ways, scheme):
    """Each of two devices has one key head. Four devices do not divide the key heads."""
    config, _, expected = load("qwen3_5", jnp.float64)
    _, whole = model_files.load_verifier(DATA / "hybrid" / "qwen3_5", dtype=jnp.float64, quantize=scheme)
    want, *_ = read_prompt(whole, config, expected["prompt1"])
    mesh = sharding.make_mesh(2, ways)
    _, parts = model_files.load_verifier(DATA / "hybrid" / "qwen3_5", dtype=jnp.float64, mesh=mesh, quantize=scheme)
    for is_merged in (False, True):
        if is_merged:
            decoder.merge(parts, config, mesh)
        with jax.set_mesh(mesh):
            got, *_ = read_prompt(parts, config, expected["prompt1"])
        np.testing.assert_allclose(got, want, atol=1e-9)
    assert all(x.sharding.spec[0] == "model" for x in jax.tree.leaves(parts["groups"][0][0]["delta_in"]))


def test_the_kernel_for_tpus_is_a_choice():
    """Interpreted, for a tree; a chunk of more than one block takes the plain variant."""
    config, params, expected = load("qwen3_5_text")
    mask, depths, _ = tree_arrays(expected, 0)
    _, _, cache = read_prompt(params, config, expected["prompt0"])
    tree = expected["tree_tokens0"][None], 5 + depths[None], mask
    run = jax.jit(partial(decoder.forward, config=config))
    inputs = {"tokens_bt": tree[0], "positions_bt": tree[1], "mask_btu": mask, "cache": cache}
    assert "gated_delta_rule" not in run.lower(params, **inputs).as_text(debug_info=True)
    with kernels.use("pallas-tpu"):
        lowered = run.lower(params, **inputs)
    assert "gated_delta_rule" in lowered.as_text(debug_info=True)
    logits = decoder.logits(params, config, lowered.compile()(params, **inputs).hidden_btd)
    np.testing.assert_allclose(logits[0], expected["tree_logits0"], atol=ATOL)


def widened(spec: parameters.Spec, x: Any) -> jax.Array:
    """A weight in 8 bits as its numbers."""
    if not isinstance(x, Quantized):
        return x
    return block_scales.widen(x, x.dtype) if x.block else x.values * jnp.expand_dims(x.scale, spec.inputs)


@partial(jax.jit, static_argnames="config")
def widen_all(params: Any, config: ModelConfig) -> Any:
    return jax.tree.map(widened, decoder.specs(config), params, is_leaf=parameters.is_spec)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp8", "int8"])
@pytest.mark.parametrize("name", ["gemma4_moe", "gemma4_edge"])
def test_quantised_gemma(name, scheme):
    """Answers are those of the rounded numbers, and nearly those of the file. Blocks of FP8 span heads."""
    config, _, expected = load(name)
    rounded = model_files.load_verifier(DATA / "hybrid" / name, quantize=scheme)[1]
    want, got = (read_prompt(weights, config, expected["prompt0"])[0] for weights in (widen_all(rounded, config), rounded))
    np.testing.assert_allclose(got, want, atol=ATOL)
    least = {"gemma4_moe": 0.97, "gemma4_edge": 0.98}[name]
    assert np.corrcoef(got.ravel(), expected["logits0"].ravel())[0, 1] > least


def test_int8_rounds_the_maps_and_nothing_else():
    config, _, expected = load("qwen3_5")
    rounded = model_files.load_verifier(DATA / "hybrid" / "qwen3_5", quantize="int8")[1]
    delta, attention = rounded["groups"][0][0], rounded["groups"][1][0]
    wide = {name for layer in (delta, attention) for name, x in layer.items() if not isinstance(x, Quantized)}
    assert wide == {
        "attention_norm", "mlp_norm", "conv", "log_rate", "time_bias", "gated_norm", "q_norm", "k_norm",
    }  # fmt: skip

    want, _, _ = read_prompt(widen_all(rounded, config), config, expected["prompt0"])
    got, _, _ = read_prompt(rounded, config, expected["prompt0"])
    np.testing.assert_allclose(got, want, atol=ATOL)
