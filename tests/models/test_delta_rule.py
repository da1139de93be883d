"""The gated delta rule over chunks, trees, chains and single tokens against the recurrence, one token after another."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import ONE_H100
from conftest import needs_mosaic
from jax.experimental import topologies

from treeflash_jax.models import delta_rule
from treeflash_jax.models.delta_rule import BLOCK, DeltaState, NewDelta
from treeflash_jax.models.kernels import delta_rule_mosaic, delta_rule_tpu

G, H, E, F, C, J, LENGTH = 2, 4, 6, 5, 7, 4, 9
attend, convolve, commit = (
    jax.jit(delta_rule.attend, static_argnames="is_tree"),
    jax.jit(delta_rule.convolve),
    jax.jit(delta_rule.commit),
)


def draw_tree(size: int, seed: int, reach: int = 4) -> list[list[int]]:
    """The path from the root to each node of a random tree; reach 1: a chain."""
    rng, paths = np.random.default_rng(seed), [[0]]
    for node in range(1, size):
        paths.append([*paths[int(rng.integers(max(0, node - reach), node))], node])
    return paths


def draw_mask(paths: list[list[int]]) -> np.ndarray:
    mask = np.zeros((len(paths), len(paths)), bool)
    for node, path in enumerate(paths):
        mask[node, path] = True
    return mask


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def draw_inputs(
    size: int, seed: int = 0, *, alike: float = 0.0, batch: int = 2, key_dim: int = E, value_dim: int = F
) -> dict[str, np.ndarray]:
    """Inputs of the rule and the state before them; with `alike` near 1, the hard case: equal keys, hardly any decay."""
    rng = np.random.default_rng([seed, size])
    spread = (1 - alike) * unit(rng.normal(size=(batch, size, G, key_dim)))
    beta = 1 / (1 + np.exp(-rng.normal(size=(batch, size, H))))
    return {
        "q": unit(rng.normal(size=(batch, size, G, key_dim))) * key_dim**-0.5,
        "k": unit(alike * np.ones(key_dim) / key_dim**0.5 + spread),
        "v": rng.normal(size=(batch, size, H, value_dim)),
        "decay": -np.exp(rng.normal(size=(batch, size, H)) - 1) * (1 - alike) ** 3,
        "beta": beta if alike == 0 else np.full_like(beta, 0.99),
        "state": rng.normal(size=(batch, H, key_dim, value_dim)),
    }


def recur(inputs: dict[str, np.ndarray], path: list[int], b: int) -> tuple[np.ndarray, np.ndarray]:
    """The output of the last position of a path, and the state after it."""
    q, k, v, decay, beta, state = (inputs[name][b] for name in ("q", "k", "v", "decay", "beta", "state"))
    q, k = (np.repeat(x, H // G, axis=1) for x in (q, k))
    out = None
    for t in path:
        state = state * np.exp(decay[t])[:, None, None]
        update = beta[t][:, None] * (v[t] - np.einsum("hef,he->hf", state, k[t]))
        state = state + np.einsum("he,hf->hef", k[t], update)
        out = np.einsum("hef,he->hf", state, q[t])
    return out, state


def packed(state: np.ndarray) -> np.ndarray:
    """States by key head, as caches hold them."""
    key_dim, value_dim = state.shape[-2:]
    return state.reshape(-1, G, H // G, key_dim, value_dim).swapaxes(2, 3).reshape(-1, G, key_dim, H // G * value_dim)


def as_arrays(inputs: dict[str, np.ndarray], dtype=np.float64) -> list[jax.Array]:
    return [jax.device_put(np.asarray(x, dtype)) for x in (inputs | {"state": packed(inputs["state"])}).values()]


def run(inputs: dict[str, np.ndarray], mask: np.ndarray, dtype=np.float64, is_tree=False):
    arrays = as_arrays(inputs, dtype)
    return attend(*arrays, jnp.broadcast_to(jnp.asarray(mask), (len(arrays[0]), *mask.shape[-2:])), is_tree=is_tree)


def passed(inputs: dict[str, np.ndarray], updates: jax.Array, x: np.ndarray) -> NewDelta:
    """What the pass leaves for a commit."""
    return NewDelta(*jax.device_put((x, inputs["k"])), updates, jax.device_put(inputs["decay"]))


@pytest.mark.parametrize("size, reach", [(1, 1), (14, 1), (14, 4), (14, 14), (BLOCK, 9), (BLOCK + 26, 30)])
def test_outputs_and_commits_of_every_path_are_those_of_the_recurrence(float64, size, reach):
    paths, inputs = draw_tree(size, reach, reach), draw_inputs(size)
    mask, x, window = draw_mask(paths), *(np.random.default_rng(7).normal(size=(2, n, C)) for n in (size, J - 1))
    out, updates = run(inputs, mask, is_tree=True)
    new, before = passed(inputs, updates, x), DeltaState(jnp.asarray(window), jnp.asarray(packed(inputs["state"])))
    for node in sorted({*range(0, size, 5), size - 1}):
        path = paths[node]
        padded = jnp.asarray([path + [size - 1] * (size - len(path))] * 2)
        after = commit(before, new, jnp.asarray([len(path), 0]), padded)
        want_out, want_state = recur(inputs, path, 0)
        np.testing.assert_allclose(out[0, node], want_out, atol=1e-12)
        np.testing.assert_allclose(after.state_bgez[0], packed(want_state)[0], atol=1e-12)
        np.testing.assert_array_equal(after.window_bjc[0], np.concatenate([window[0], x[0, path]])[-(J - 1) :])
        np.testing.assert_array_equal(after.state_bgez[1], before.state_bgez[1], err_msg="nothing is committed")
        np.testing.assert_array_equal(after.window_bjc[1], window[1])


def test_a_long_chunk_is_its_blocks_one_after_the_other(float64):
    """Outputs, and commits of any number of its positions: the others are padding."""
    size = 2 * BLOCK + 9
    inputs = draw_inputs(size)
    mask, x = np.tri(size, dtype=bool), np.random.default_rng(7).normal(size=(2, size, C))
    out, updates = run(inputs, mask)
    new, before = passed(inputs, updates, x), DeltaState(jnp.zeros((2, J - 1, C)), jnp.asarray(packed(inputs["state"])))
    for count in (1, 2, BLOCK, size - 5, size):
        want_out, want_state = recur(inputs, list(range(count)), 1)
        after = commit(before, new, jnp.asarray([0, count]))
        np.testing.assert_allclose(out[1, count - 1], want_out, atol=1e-12)
        np.testing.assert_allclose(after.state_bgez[1], packed(want_state)[0], atol=1e-12)
        np.testing.assert_array_equal(after.window_bjc[1], np.pad(x[1], ((J - 1, 0), (0, 0)))[count : count + J - 1])


def test_texts_in_one_chunk_do_not_see_each_other(float64):
    """States start anew with each text, at the start of a block or inside it."""
    starts, size = [0, 20, BLOCK, BLOCK + 50], 2 * BLOCK
    text = np.searchsorted(starts, np.arange(size), side="right") - 1
    inputs = draw_inputs(size, batch=1)
    out, _ = run(inputs, np.tri(size, dtype=bool) & (text[:, None] == text))
    anew = inputs | {"state": np.zeros_like(inputs["state"])}
    for t in (0, 19, 20, 40, BLOCK - 1, BLOCK, BLOCK + 9, BLOCK + 50, size - 1):
        want, _ = recur(inputs if text[t] == 0 else anew, list(range(starts[text[t]], t + 1)), 0)
        np.testing.assert_allclose(out[0, t], want, atol=1e-12, err_msg=str(t))


@pytest.mark.parametrize("reach", [1, 4])
def test_keys_that_resemble_each_other_cost_no_digits(reach):
    """In float32: powers of the system's matrix grow like binomials before they cancel, so their sum must fail here."""
    paths, inputs = draw_tree(BLOCK, 1, reach), draw_inputs(BLOCK, alike=0.95)
    mask = draw_mask(paths)
    want = np.stack([recur(inputs, path, 0)[0] for path in paths])
    out, _ = run(inputs, mask, np.float32)
    np.testing.assert_allclose(out[0], want, atol=2e-5)
    if reach == 1:
        assert np.abs(by_powers(inputs, mask) - want).max() > 1


def by_powers(inputs: dict[str, np.ndarray], mask: np.ndarray) -> np.ndarray:
    """Outputs of the first sequence with the system solved by doubled powers of its matrix, in float32."""
    q, k, v, decay, beta, state = (np.float32(inputs[name][0]) for name in ("q", "k", "v", "decay", "beta", "state"))
    q, k = (np.repeat(x, H // G, axis=1) for x in (q, k))
    total = np.einsum("tu,uh->ht", np.float32(mask), decay)
    fade = np.where(mask, np.exp(np.where(mask, total[:, :, None] - total[:, None], 0)), 0)
    power = -np.tril(beta.T[..., None] * fade * np.einsum("the,uhe->htu", k, k), -1)
    inverse = np.eye(len(mask), dtype=np.float32) + power
    for _ in range(6):
        power = power @ power
        inverse = inverse + inverse @ power
    decayed = np.exp(total)[..., None]
    right = beta.T[..., None] * (v.swapaxes(0, 1) - decayed * np.einsum("hef,the->htf", state, k))
    scores = fade * np.einsum("the,uhe->htu", q, k)
    return (decayed * np.einsum("hef,the->htf", state, q) + scores @ (inverse @ right)).swapaxes(0, 1)


def test_products_are_of_highest_precision_and_a_step_of_one_token_launches_no_solver():
    for size in (1, 2):
        with jax.default_matmul_precision("default"):
            program = attend.lower(*as_arrays(draw_inputs(size), np.float32), np.ones((2, size, size), bool)).as_text()
        products = [line for line in program.splitlines() if "dot_general" in line]
        assert products and all("HIGHEST, HIGHEST" in line for line in products)
        assert ("trsm" in program or "triangular_solve" in program) == (size > 1)


@pytest.mark.parametrize("size, reach", [(1, 1), (14, 1), (14, 4)])
def test_the_convolution_follows_each_path(float64, size, reach):
    rng, paths = np.random.default_rng(3), draw_tree(size, 3, reach)
    x, window, weight = (rng.normal(size=shape) for shape in ((2, size, C), (2, J - 1, C), (C, J)))
    positions = np.array([LENGTH + len(path) - 1 for path in paths])
    mask = np.broadcast_to(draw_mask(paths), (2, size, size))
    got = convolve(x, window, weight, np.stack([positions, positions + 5]), mask, np.array([LENGTH, LENGTH + 5]))
    for b, node in np.ndindex(2, size):
        inputs = np.concatenate([window[b], x[b, paths[node]]])[-J:]
        np.testing.assert_allclose(got[b, node], np.sum(inputs * weight.T, axis=0), atol=1e-12)


def test_the_convolution_of_a_text_begins_with_zeros(float64):
    """Also if another text stands before it in the same chunk."""
    x, weight = np.random.default_rng(3).normal(size=(1, 9, C)), np.random.default_rng(4).normal(size=(C, J))
    text, positions = np.array([0] * 4 + [1] * 5), np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    mask = np.tri(9, dtype=bool)[None] & (text[:, None] == text)
    got = convolve(x, np.zeros((1, J - 1, C)), weight, positions, mask, np.array([0]))
    for start, end in ((0, 4), (4, 9)):
        before = np.pad(x[0, start:end], ((J - 1, 0), (0, 0)))
        want = [np.sum(before[t : t + J] * weight.T, axis=0) for t in range(end - start)]
        np.testing.assert_allclose(got[0, start:end], want, atol=1e-12)


@pytest.mark.parametrize("size, reach, alike", [(1, 1, 0.0), (14, 4, 0.0), (BLOCK, 9, 0.95)])
def test_the_kernel_for_tpus_computes_the_rule(size, reach, alike):
    """Interpreted."""
    paths, inputs = draw_tree(size, reach, reach), draw_inputs(size, alike=alike)
    mask, arrays = draw_mask(paths), as_arrays(inputs, jnp.float32)
    masks = jnp.broadcast_to(jnp.asarray(mask), (2, size, size))
    for got, x in zip(jax.jit(delta_rule_tpu.run)(*arrays, masks), run(inputs, mask, np.float32), strict=True):
        np.testing.assert_allclose(got, x, atol=2e-5)


@needs_mosaic
@pytest.mark.parametrize("size, reach, alike", [(14, 4, 0.0), (BLOCK, 9, 0.95)])
def test_the_kernel_for_hopper_computes_the_rule(size, reach, alike):
    """Interpreted, and lowered for a GPU; its products are as exact as in float32."""
    paths, inputs = draw_tree(size, reach, reach), draw_inputs(size, alike=alike, batch=1, key_dim=128, value_dim=64)
    mask, kernel = draw_mask(paths), jax.jit(delta_rule_mosaic.run)
    arrays = *as_arrays(inputs, jnp.float32), mask[None]
    out, updates = kernel(*arrays)
    np.testing.assert_allclose(out[0], np.stack([recur(inputs, path, 0)[0] for path in paths]), atol=1e-6)
    np.testing.assert_allclose(updates, run(inputs, mask, np.float32)[1], atol=2e-5)
    with jax.sharding.use_abstract_mesh(ONE_H100):
        assert "mosaic" in kernel.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1"])
def test_the_kernel_compiles_for_tpus_that_are_not_here(topology):
    """A layer of Qwen3.6-27B and a tree of 64 nodes: one kernel, without a copy of the states."""
    libtpu = pytest.importorskip("libtpu", reason='needs pip install "jax[tpu]"')
    os.environ.setdefault("TPU_LIBRARY_PATH", libtpu.get_library_path())
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    mesh = jax.sharding.Mesh([device], ("model",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = [(1, 64, 16, 128)] * 2 + [(1, 64, 48, 128), (1, 64, 48), (1, 64, 48), (1, 16, 128, 384)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place) for shape in shapes]
    mask = jax.ShapeDtypeStruct((1, 64, 64), bool, sharding=place)
    with jax.set_mesh(mesh):  # Pallas reads the kind of TPU from it
        compiled = jax.jit(delta_rule_tpu.run).lower(*arrays, mask).compile()
    assert compiled.as_text().count("tpu_custom_call") >= 1
    copied = re.search(r"f32\[1,16,128,384\]\S* (copy|fusion)\(", compiled.as_text())
    assert copied is None and compiled.memory_analysis().temp_size_in_bytes < 2**23, "a v5p turns heads in its memory"
