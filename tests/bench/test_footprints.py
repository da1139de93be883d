"""Sizes of weights and caches by arithmetic: those of real arrays, of published models, and of committed results."""

import gc
import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from answers import planned_batch
from conftest import RANDOM_DRAFTER, RANDOM_MODEL, needs_8_devices, random_pair
from jax.sharding import AbstractMesh

import treeflash_jax as tf
from treeflash_jax.bench import memory, shapes
from treeflash_jax.core import programs
from treeflash_jax.decoding import loops
from treeflash_jax.engine.device_memory import footprint
from treeflash_jax.engine.schedule.prefill import Prefill
from treeflash_jax.engine.schedule.runner import Runner
from treeflash_jax.engine.settings import pairs

RESULTS = Path(__file__).parents[2] / "notebooks" / "results"


def bytes_on_one_device(tree) -> int:
    """Of real arrays, counted shard by shard."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.fixture(scope="module")
def small_pair() -> tf.TreeFlash:
    """A random pair on one device."""
    return random_pair()


@needs_8_devices
@pytest.mark.parametrize("sizes", [None, (4, 2), (2, 4)])
def test_weights_and_caches_are_the_bytes_of_real_arrays(small_pair, sizes):
    model = random_pair(tf.make_mesh(*sizes)) if sizes else small_pair
    plan, batch = planned_batch(model, [[1]] * 4, builder="best-first")
    state = programs.call(loops.init_state, *batch, mesh=model.mesh, plan=plan.shared, dtype=model.dtype)
    count = partial(footprint, RANDOM_MODEL, RANDOM_DRAFTER, batch=4, capacity=256)
    whole = count(mesh=model.mesh, dtype=jnp.float32)
    assert asdict(whole) == {
        "verifier": bytes_on_one_device(model.weights.verifier),
        "drafter": bytes_on_one_device(model.weights.drafter),
        "verifier_cache": bytes_on_one_device(state.cache.states),
        "drafter_cache": bytes_on_one_device(state.drafter.context.states),
    }
    assert whole.total == sum(asdict(whole).values())
    assert not sizes or count(mesh=AbstractMesh(sizes, ("data", "model")), dtype=jnp.float32) == whole
    assert count(mesh=model.mesh, dtype=jnp.float32, drafts=False) == replace(whole, drafter_cache=0)
    assert 2 * count(mesh=model.mesh, dtype=jnp.bfloat16).total == whole.total


def test_a_pass_reads_the_experts_that_its_tokens_can_choose():
    """Four per token; each has three matrices of 2,880 x 2,880 and their biases, and a row of the router."""
    model, how = shapes.find_verifier("gpt-oss-20b"), {"dtype": jnp.bfloat16, "batch": 1, "capacity": 256}
    expert = 24 * 2 * (3 * 2880 * 2880 + 3 * 2880 + 2880 + 1)
    whole = footprint(model, **how).total
    read = [memory.bytes_read(model, None, tokens, **how) for tokens in (1, 3, 8, 64)]
    assert read == [whole - 28 * expert, whole - 20 * expert, whole, whole]
    dense = shapes.find_verifier("qwen3-0.6b")
    assert memory.bytes_read(dense, None, 1, **how) == footprint(dense, **how).total


@needs_8_devices
@pytest.mark.slow
def test_programs_compiled_from_shapes_take_what_real_ones_take():
    model = random_pair(tf.make_mesh(4, 2))
    plan, batch = planned_batch(model, [[1]] * 4, nodes=4, candidates=4, children=4, ngrams=0)
    state = Prefill(Runner(plan, model.weights, model.mesh), batch).read_all()
    _, decode = memory.compile_programs(plan, model.mesh, 4, 256, jnp.float32)
    held = decode.memory_analysis()
    assert held.argument_size_in_bytes == bytes_on_one_device((model.weights, state)) + 4  # the number of rounds
    generated = decode(model.weights, state, jnp.int32(3))  # the very program that `generate` would run
    assert int(generated.rounds_b[0]) > 0


def test_weights_of_gpt_oss_120b_in_four_bits():
    needs = footprint(shapes.SHAPES["gpt-oss-120b"], dtype=jnp.bfloat16, quantize="mxfp4")
    assert 60.5 * 2**30 < needs.verifier < 61 * 2**30


@pytest.mark.parametrize("shape, billions, attention_layers, kv_heads, recurrent_layers, value_heads", [
    ("qwen3.5-9b", 9, 8, 4, 24, 32), ("qwen3.6-27b", 27, 16, 4, 48, 48), ("qwen3.6-35b-a3b", 35, 10, 2, 30, 32),
])  # fmt: skip
def test_hybrids_have_caches_in_few_layers_and_a_state_in_the_others(
    shape, billions, attention_layers, kv_heads, recurrent_layers, value_heads
):
    def count(mesh: tuple[int, int], context: int):
        model, axes = shapes.find_verifier(shape), ("data", "model")
        return footprint(model, dtype=jnp.bfloat16, mesh=AbstractMesh(mesh, axes), batch=8, capacity=context)

    per_token = attention_layers * 2 * kv_heads * 256 * 2
    state = 128 * 128 * value_heads * 4 + 3 * (2 * 16 + value_heads) * 128 * 2  # the rule's, and the convolution's window
    needs = count((1, 1), 4096)
    assert needs.verifier_cache == 8 * (4096 * per_token + recurrent_layers * state)
    assert round(needs.verifier / 2e9) == billions
    assert count((4, 2), 4096).verifier_cache == needs.verifier_cache // 8, "split by sequences and heads"


def test_a_layer_of_multi_token_prediction_needs_no_file():
    """Its input, gated attention and feed-forward part have 243 million weights, beside the verifier's tables."""
    model, drafter = shapes.find_pair("qwen3.5-9b", "mtp")
    assert drafter.taps == (31,)
    assert round(footprint(model, drafter, dtype=jnp.bfloat16).drafter / 2e6) == 243


@pytest.mark.parametrize("shape, billions, num_layers", [("gpt-oss-20b", 20.9, 24), ("gpt-oss-120b", 116.8, 36)])
def test_sizes_of_gpt_oss_and_of_their_config_files(shape, billions, num_layers, tmp_path):
    """Layers with windows hold 128 positions, for sessions all."""
    model = shapes.find_verifier(shape)
    mesh = AbstractMesh((1, 2, 4), ("data", "model", "experts"))
    alone, split = (
        footprint(model, dtype=jnp.bfloat16, mesh=mesh, batch=1, capacity=1024)
        for mesh in (AbstractMesh((1, 1), ("data", "model")), mesh)
    )
    assert round(alone.verifier / 2e9, 1) == billions
    assert alone.verifier_cache == (1024 + 128) * num_layers // 2 * 2 * 8 * 64 * 2
    session = footprint(model, dtype=jnp.bfloat16, batch=1, capacity=1024, can_cut=True)
    assert session.verifier_cache == 1024 * num_layers * 2 * 8 * 64 * 2
    assert alone.verifier / 8 < split.verifier < alone.verifier / 6, "experts are split eight ways"
    published = {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": num_layers, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "num_local_experts": model.num_experts, "num_experts_per_tok": 4, "experts_per_token": 4, "rms_norm_eps": 1e-05,
        "max_position_embeddings": 131072, "initial_context_length": 4096, "sliding_window": 128, "swiglu_limit": 7.0,
        "rope_theta": 150000, "attention_bias": True, "tie_word_embeddings": False, "eos_token_id": 200002,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert shapes.find_verifier(str(tmp_path)) == model


def test_sizes_of_the_toy_pair_are_those_of_its_config():
    assert shapes.find_verifier("tiny") == shapes.find_verifier(str(pairs.locate("tiny")))


def test_no_batch_holds_the_caches_of_the_one_before(monkeypatch, small_pair):
    call, held, allocated = programs.call, [], []

    def count() -> int:
        return sum(x.shape[2:4] == (small_pair.verifier.num_kv_heads, 384) for x in jax.live_arrays())

    def counted(function, *args, **static):
        if function is not loops.init_state:
            return call(function, *args, **static)
        held.append(count())
        state = call(function, *args, **static)
        allocated.append(count() - held[-1])
        return state

    monkeypatch.setattr(programs, "call", counted)
    gc.collect()  # caches of earlier tests
    small_pair.generate([[1]] * 3, max_new_tokens=4, batch_size=1, builder="none")
    assert len(held) >= 3 and len({*held}) == 1 and min(allocated) > 0


@pytest.mark.parametrize("name", ["tpu_rounds", "experts_rounds", "hybrid_rounds", "fits", "fits_h100"])
def test_committed_sizes_are_those_of_today(name):
    for result in json.loads((RESULTS / f"{name}.json").read_text()).values():
        model, dtype = shapes.find_verifier(result["shape"]), jnp.dtype(result["dtype"])
        mesh = AbstractMesh(tuple(result["mesh"].values()), tuple(result["mesh"]))
        request = {"batch": result["batch"], "capacity": result["context"], "quantize": result["quantize"]}
        drafter = None if result["builder"] == "none" else shapes.find_drafter(model)
        needs = asdict(footprint(model, drafter, dtype=dtype, mesh=mesh, **request))
        sizes = result["bytes_per_device"]
        sizes["drafter"] += sizes.get("head", 0)  # records of the first edition count the head apart
        assert {part: sizes[part] for part in needs} == needs
        assert (sizes["total"] <= result["bytes_limit"]) == result["fits"] and (result["fits"] or name == "fits")


@pytest.mark.parametrize("shape, billions, drafter_millions", [
    ("gemma4-e4b", 7.5, 79), ("gemma4-12b", 11.9, 423), ("gemma4-26b-a4b", 25.2, 420), ("gemma4-31b", 30.7, 470),
])  # fmt: skip
def test_sizes_of_gemma_and_its_assistants(shape, billions, drafter_millions):
    """Layers that share have no caches, those with windows hold their window, and an assistant has none."""
    model, drafter = shapes.find_pair(shape, "mtp")
    needs = footprint(model, drafter, dtype=jnp.bfloat16, batch=1, capacity=4096)
    assert round(needs.verifier / 2e9, 1) == billions and round(needs.drafter / 2e6) == drafter_millions
    assert needs.drafter_cache == 2 * model.hidden_size
    sizes, held = dict(model.sizes), {"full_attention": 4096, "sliding_attention": model.window}
    slots = {kind: held[kind] * sizes[kind].num_kv_heads * sizes[kind].head_dim for kind in held}
    assert needs.verifier_cache == sum(2 * 2 * slots[kind] for kind in model.kinds if kind in slots)
