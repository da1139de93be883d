"""Defaults of devices that are not here."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

import treeflash_jax as tf
from treeflash_jax.core import devices
from treeflash_jax.core.devices import Device
from treeflash_jax.drafters import NgramDrafter
from treeflash_jax.drafters.eagle3_drafter import Eagle3Drafter
from treeflash_jax.drafters.language_model_drafter import LanguageModelDrafter
from treeflash_jax.engine.settings import defaults
from treeflash_jax.engine.settings.plan import resolve
from treeflash_jax.models.config import KindSizes, Rope
from treeflash_jax.models.kernels import KERNEL_SETS, KERNELS

ZEN5, AMX = (Device("cpu", features=frozenset({"avx512_bf16", *more})) for more in ((), ("amx_bf16",)))
H100, H200 = Device("gpu", "NVIDIA H100 80GB HBM3"), Device("gpu", "NVIDIA H200")

PER_LEVEL = (  # drafters whose network runs once per level
    lambda model: LanguageModelDrafter(layers=model.verifier),
    lambda model: Eagle3Drafter(
        layers=model.drafter.layers, target_hidden_size=model.verifier.hidden_size, draft_vocab_size=64, taps=(0, 1, 2)
    ),
)


def plan(model, device, dtype=jnp.bfloat16, drafter=None, sequences=1, **settings):
    drafter = drafter or model.drafter
    return resolve(tf.GenerateConfig(**settings), model.verifier, drafter, dtype=dtype, device=device, sequences=sequences)


@pytest.mark.parametrize("device, dtype", [
    (Device("cpu", features=frozenset({"avx2", "avx512f", "avx512_vnni"})), "float32"), (ZEN5, "bfloat16"),
    (AMX, "bfloat16"), (H200, "bfloat16"),
])  # fmt: skip
def test_the_default_dtype_is_the_faster_one(device, dtype):
    assert defaults.choose_dtype(device) == jnp.dtype(dtype)


@pytest.mark.parametrize("device, nodes, candidates, block_size", [(ZEN5, 8, 8, 8), (AMX, 16, 16, 16), (H200, 16, 16, 16)])
def test_trees_and_blocks_are_smaller_where_every_token_costs(device, nodes, candidates, block_size, tiny):
    def sizes(drafter=tiny.drafter, dtype=jnp.bfloat16, **settings):
        made = plan(tiny, device, dtype, drafter, **{"builder": "best-first"} | settings)
        draft = made.configured_drafter
        return made.num_nodes, getattr(draft, "candidates", None), getattr(draft, "block_size", None)

    assert (tiny.drafter.num_nodes, tiny.drafter.block_size) == (16, 16)
    assert sizes() == (nodes, candidates, block_size)
    assert sizes(dtype=jnp.float32) == ((8, 8, 8) if device.is_cpu else (nodes, candidates, block_size))
    assert sizes(nodes=24, candidates=5) == (24, 5, 16), "a larger tree has the whole block"
    assert sizes(replace(tiny.drafter, num_nodes=4)) == (4, candidates, 4 if nodes == 8 else 16)
    assert sizes(nodes=5) == (5, candidates, 5 if nodes == 8 else 16)
    assert sizes(block_size=3) == (nodes, candidates, 3)
    assert sizes(NgramDrafter(num_nodes=16)) == (nodes, None, None)
    assert sizes(builder="chain") == (16, candidates, 16), "a chain is the whole block"


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v5", "TPU v6 lite"])
def test_trees_on_tpus_are_larger_the_fewer_sequences_there_are(kind, tiny):
    device = Device("tpu", kind)
    counts = [plan(tiny, device, sequences=count).num_nodes for count in (1, 2, 3, 8, 64, 65)]
    assert counts == [64, 64, 42, 16, 2, 1]
    assert plan(tiny, device, drafter=replace(tiny.drafter, num_nodes=100)).num_nodes == 100
    assert plan(tiny, device, sequences=8, nodes=40).num_nodes == 40


@pytest.mark.parametrize("builder", ["best-first", "walk", "chain"])
@pytest.mark.parametrize("device", [Device("cpu"), ZEN5, AMX, H100])
def test_the_default_number_of_nodes_can_be_given(device, builder, tiny):
    """Other defaults follow from the number of nodes, whether a call gives it or not."""
    drafters = tiny.drafter, replace(tiny.drafter, num_nodes=4), NgramDrafter(), *(make(tiny) for make in PER_LEVEL)
    for drafter in drafters:
        for dtype in (jnp.float32, jnp.bfloat16):
            default = plan(tiny, device, dtype, drafter, builder=builder)
            assert plan(tiny, device, dtype, drafter, builder=builder, nodes=default.num_nodes) == default


@pytest.mark.parametrize("make", PER_LEVEL)
def test_small_trees_of_a_network_per_level_are_shallow_and_narrow_where_every_token_costs(make, tiny):
    drafter = make(tiny)

    def sizes(device, **settings):
        made = plan(tiny, device, drafter=drafter, builder="best-first", **settings)
        return made.num_nodes, made.configured_drafter.num_depths, made.shape.lanes

    whole = drafter.num_depths, drafter.lanes
    assert sizes(ZEN5) == sizes(ZEN5, nodes=8) == (8, 4, 2)
    assert sizes(ZEN5, nodes=16) == sizes(AMX) == (16, *whole) and sizes(AMX, nodes=8) == (8, *whole)


def test_a_server_has_one_slot_where_every_token_costs():
    slots = {device: defaults.find_defaults(device, jnp.bfloat16).slots for device in (Device("cpu"), ZEN5, AMX, H100)}
    assert slots == {Device("cpu"): 1, ZEN5: 1, AMX: 8, H100: 8}


@pytest.mark.parametrize("device, most, most_if_stated", [(Device("cpu"), 0, 2), (ZEN5, 1, 2), (AMX, 9, 9)])
def test_the_default_drafts_if_that_pays(device, most, most_if_stated, tiny):
    """On a CPU without bfloat16 matrix instructions only a few sequences together, more if the drafter states its tau."""

    def drafts(tau=None, dtype=jnp.bfloat16):
        drafter = replace(tiny.drafter, tau=tau)
        return [plan(tiny, device, dtype, drafter, sequences=count).drafts for count in (1, 2, 3, 5)]

    for tau, at_most in ((None, most), (2.5, most_if_stated), (3.5, max(4, most))):
        assert drafts(tau) == [count <= at_most for count in (1, 2, 3, 5)]
    assert drafts(2.5, jnp.float32) == [True, True, False, False]
    assert plan(tiny, device, jnp.float32, nodes=4).drafts and plan(tiny, device, jnp.float32, builder="walk").drafts
    assert not plan(tiny, device, builder="none").drafts
    assert plan(tiny, device, drafter=NgramDrafter()).drafts, "without a match, it costs nothing"


def test_a_reason_is_given_for_decoding_one_token_at_a_time(tiny):
    def why(device, sequences=1, **settings):
        return plan(tiny, device, jnp.bfloat16, replace(tiny.drafter, tau=2.5), sequences, **settings).why_plain

    assert why(ZEN5) is None and why(ZEN5, 4, nodes=4) is None
    assert "not pay on this CPU in bfloat16 for 4 sequences at a time; nodes=8 (--nodes 8) drafts anyway" in why(ZEN5, 4)
    assert "does not pay on NVIDIA H100" in why(H100, 256)


def test_attention_follows_from_the_backend_and_the_dtype():
    choose, cpu = defaults.choose_attention, Device("cpu")
    assert [choose(cpu, dtype) for dtype in (jnp.float32, jnp.float64, jnp.bfloat16)] == ["streamed", "streamed", "xla"]
    assert choose(H200, jnp.bfloat16, head_dims=(128, 64)) == "pallas-gpu"
    others = *((jnp.bfloat16, sizes) for sizes in ((96, 64), (128, 8), (256,))), (jnp.float32, (128,))
    assert {choose(H200, dtype, head_dims=sizes) for dtype, sizes in others} == {"xla"}
    a100 = Device("gpu", "NVIDIA A100-SXM4-80GB")
    assert choose(a100, jnp.bfloat16, head_dims=(128,)) == "xla"
    defaults_of_devices = {choose(Device(*kind), jnp.bfloat16, (128,)) for kind in (("cpu",), ("tpu",), ("gpu", H200.kind))}
    never_ran = {name for name, kernel in KERNELS["attention"].items() if not kernel.has_run}
    assert never_ran == {"mosaic-gpu"} and not defaults_of_devices & never_ran
    needed = {kernels["mosaic-gpu"].oldest_jax for kernels in KERNELS.values() if "mosaic-gpu" in kernels}
    assert needed == {(0, 12)}, "as the help of `attention` and `kernels` says"
    kernels_of_sets = [kernel for kernels in KERNELS.values() for name, kernel in kernels.items() if name in KERNEL_SETS]
    assert not any(kernel.has_run for kernel in kernels_of_sets), "as the help of `kernels` says"


def test_kernels_of_another_device_are_refused(tiny):
    """A CPU interprets all of them."""
    cpu, gpu, tpu, a100 = Device("cpu"), Device("gpu"), Device("tpu"), Device("gpu", "NVIDIA A100-SXM4-80GB")

    def refusal(device, **settings):
        with pytest.raises(ValueError) as error:
            plan(tiny, device, jnp.bfloat16, **settings)
        return str(error.value)

    for device in (cpu, gpu):
        assert plan(tiny, device, jnp.float32, attention="pallas-gpu").attention == "pallas-gpu"
    for device in (cpu, H200):
        made = plan(tiny, device, jnp.bfloat16, attention="xla", kernels="mosaic-gpu")
        assert (made.attention, made.shared.prefill_attention, made.shared.kernels) == ("xla", "xla", "mosaic-gpu")
    assert plan(tiny, tpu, jnp.bfloat16, kernels="pallas-tpu").shared.kernels == "pallas-tpu"
    words = "got {} {!r} on {}, expected {}; leave it out"
    chips = "NVIDIA H100 or NVIDIA H200"
    assert refusal(a100, attention="mosaic-gpu") == words.format("attention", "mosaic-gpu", a100.kind, chips)
    assert refusal(a100, kernels="mosaic-gpu") == words.format("kernels", "mosaic-gpu", a100.kind, chips)
    assert refusal(H200, kernels="pallas-tpu") == words.format("kernels", "pallas-tpu", H200.kind, "a tpu")
    assert refusal(tpu, attention="pallas-gpu") == words.format("attention", "pallas-gpu", "tpu", "a gpu")


def test_the_cache_is_stacked_for_kernels_that_read_one_layer_of_it(tiny):
    shaped = replace(tiny.verifier, head_dim=64)
    plans = [
        resolve(tf.GenerateConfig(builder="none", **settings), shaped, None, dtype=jnp.bfloat16, device=device)
        for device, settings in [(H200, {}), (H200, {"attention": "xla"}), (ZEN5, {}), (ZEN5, {"attention": "pallas-gpu"})]
    ]
    assert [plan.shared.stacks_cache for plan in plans] == [True, False, False, True]
    assert plans[0].one_token().shared.stacks_cache


def test_heads_of_every_kind_of_layer_decide_on_the_attention_kernel(tiny):
    wide = KindSizes(num_kv_heads=1, head_dim=256, rope=Rope(), intermediate_size=64)
    config, kinds = tf.GenerateConfig(builder="none"), ("sliding_attention", "full_attention")
    for sizes, expected in (((), "pallas-gpu"), ((("full_attention", wide),), "xla")):
        model = replace(tiny.verifier, head_dim=128, num_layers=2, layer_types=kinds, sizes=sizes)
        assert resolve(config, model, None, dtype=jnp.bfloat16, device=H200).attention == expected


def test_a_pair_is_loaded_in_the_default_dtype(monkeypatch):
    monkeypatch.setattr(devices, "cpu_features", lambda: frozenset({"amx_bf16"}))
    assert tf.load("tiny").dtype == jnp.float32, "the tests run without these instructions"
    monkeypatch.setenv("XLA_FLAGS", "")
    model = tf.load("tiny")
    assert model.dtype == jnp.bfloat16 and model.plan(tf.GenerateConfig()).attention == "xla"
    model = tf.load("tiny", dtype=jnp.float32)
    assert model.dtype == jnp.float32 and model.plan(tf.GenerateConfig()).attention == "streamed"


def test_prefill_passes_are_as_long_as_the_ridge_of_the_chip():
    """Peak FLOP/s over bytes/s, for weights of two bytes and two FLOPs: 206, 240, 166 and 560 tokens."""
    chunks = {"NVIDIA H200 NVL": 256, "TPU v5 lite": 256, "TPU v5": 128, "TPU v6 lite": 512, "NVIDIA X": 128, "cpu": 64}
    kinds = {kind: Device("cpu" if kind == "cpu" else "any", kind) for kind in chunks}
    assert {kind: defaults.choose_prefill_chunk(device) for kind, device in kinds.items()} == chunks


@pytest.mark.parametrize("kind, chunk, attention, prefill, wide", [
    ("cpu", 64, ["streamed", "xla"], "streamed", jnp.dtype("float32")), ("gpu", 128, ["xla", "xla"], "blocked", None),
    ("tpu", 128, ["xla", "xla"], "blocked", None),
])  # fmt: skip
def test_a_plan_is_made_for_a_device_that_is_not_here(tiny, kind, chunk, attention, prefill, wide):
    """On a CPU, the residual stream is wider than weights in 16 bits."""
    dtypes = jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64
    plans = {dtype: plan(tiny, Device(kind), dtype, builder="best-first") for dtype in dtypes}
    assert {made.shared.prefill_chunk for made in plans.values()} == {chunk}
    assert [made.attention for made in plans.values()][:2] == attention
    assert {made.shared.prefill_attention for made in plans.values()} == {prefill}
    for dtype, made in plans.items():
        residual = {part.shared.residual_dtype for part in (made, made.one_token())}
        assert residual == {wide if dtype in (jnp.bfloat16, jnp.float16) else None}
