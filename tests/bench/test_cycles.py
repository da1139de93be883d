"""Estimates of the compiler for TPUs, read from the text of a program: phases, trip counts, and what is left out."""

from treeflash_jax.bench import cycles, memory
from treeflash_jax.core.devices import Device


def operation(name: str, path: str, estimated: int, kind: str = "fusion") -> str:
    config = f'backend_config={{"estimated_cycles":"{estimated}"}}'
    return f'  %{name} = f32[8]{{0}} {kind}(%p), metadata={{op_name="{path}"}}, {config}'


TEXT = "\n".join([
    "HloModule rounds",
    "%bounded (p: s32[]) -> pred[] {", "  %eight = s32[] constant(8)",
    "  ROOT %less = pred[] compare(%i, %eight), direction=LT", "}",
    "%unbounded (p: s32[]) -> pred[] {", "  ROOT %both = pred[] and(%p, %q)", "}",
    "%inner (p: f32[8]) -> f32[8] {", operation("f.1", "jit(decode)/while/body/tree/while/body/add", 10), "}",
    "%body (p: f32[8]) -> f32[8] {",
    operation("f.2", "jit(decode)/while/body/verify/layer_0/jit(layer)/cond/branch_1_fun/a,b->c/dot_general", 1000),
    operation("f.3", "jit(decode)/while/body/verify/layer_11/jit(layer)/cond/branch_1_fun/a,b->c/dot_general", 1000),
    operation("f.4", "jit(decode)/while/body/draft/verify_me/neg", 7, "copy"),
    "  %copied = (bf16[8,64]{1,0:T(4,128)S(1)}, bf16[8,64]{1,0:T(4,128)}, u32[]{:S(2)}) copy-start(%p)",
    "  %w.1 = f32[8]{0} while(%p), condition=%bounded, body=%inner",
    '  %w.2 = f32[8]{0} while(%p), condition=%unbounded, body=%inner, metadata={op_name="jit(x)/while/body/accept/while"}',
    '  %c = f32[8]{0} conditional(%p, %p), metadata={op_name="jit(decode)/while/body/accept/cond"}',
    '  %r = f32[8]{0} all-reduce(%p), metadata={op_name="jit(decode)/while/body/verify/layer_0/add"}',
    '  %s = f32[8]{0} sort(%p), metadata={op_name="jit(decode)/while/body/tree/sort"}',
    '  %t = (f32[8]{0}, s32[8]{0}) custom-call(%p), custom_call_target="TopK", metadata={op_name="while/body/draft/k"}',
    '  %gather_fusion.1 = f32[8]{0} fusion(%p), kind=kCustom, metadata={op_name="jit(decode)/while/body/commit/gather"}',
    operation("f.5", "", 3).replace(' metadata={op_name=""},', ""),
    "}",
    "ENTRY %main (p: f32[8]) -> f32[8] {", operation("f.6", "jit(decode)/before", 10**6),
    "  %w.3 = f32[8]{0} while(%p), condition=%unbounded, body=%body", "}", "",
])  # fmt: skip


def test_an_estimate_adds_up_one_iteration_by_phase():
    estimate = cycles.estimate(TEXT)
    assert estimate.by_phase() == {"draft": 7, "tree": 8 * 10, "verify": 2000, "other": 3}
    assert estimate.counts["verify", "layer/a,b->c/dot_general"] == 2 and estimate.counts["tree", "add"] == 8
    assert estimate.copied == 2 * 8 * 64
    kinds = "accept while", "accept conditional", "verify all-reduce", "tree sort", "draft TopK", "commit gather"
    assert estimate.missing == {tuple(kind.split()): 1 for kind in kinds}


def test_gradients_belong_to_the_scope_of_their_function():
    paths = "jvp(draft)/mul", "transpose(jvp(draft))/while/body/closed_call/mul", "jvp()/while/body/draft/mul", "update/mul"
    entry = [operation(f"f.{index}", f"jit(update)/{path}", 10**index) for index, path in enumerate(paths)]
    text = "\n".join(["ENTRY %main (p: f32[8]) -> f32[8] {", *entry, "}", ""])
    estimate = cycles.estimate(text, ("draft", "update"), is_loop=False)
    assert estimate.by_phase() == {"draft": 111, "update": 1000}
    assert estimate.operations["draft", "mul"] == 101


def test_an_estimate_continues_after_a_kernel():
    """The metadata of Pallas kernels has lines of its own, and the last one begins like the end of a computation."""
    kernel = '  %k = f32[8] custom-call(%p), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={'
    end = '}}, metadata={op_name="jit(update)/jvp(draft)/pallas_call"}'
    product = operation("f.1", "jit(update)/jvp(draft)/mul", 7)
    text = "\n".join(["ENTRY %main (p: f32[8]) -> f32[8] {", kernel, '"block": 512', end, product, "}", ""])
    estimate = cycles.estimate(text, ("draft",), is_loop=False)
    assert estimate.by_phase() == {"draft": 7} and estimate.missing == {("draft", "tpu_custom_call"): 1}


def test_a_record_has_milliseconds_and_the_largest_operations():
    times = memory.estimate_times(TEXT, Device("tpu", "TPU v5 lite"), read=820_000, operations=1)
    assert times == {
        "milliseconds": {"draft": 0.0, "tree": 0.0, "verify": 0.001, "other": 0.0},
        "reading": 0.001,
        "copying": 0.0,
        "missing": {
            "accept conditional": 1,
            "accept while": 1,
            "commit gather": 1,
            "draft TopK": 1,
            "tree sort": 1,
            "verify all-reduce": 1,
        },
        "operations": [["verify", "layer/a,b->c/dot_general", 2, 0.001]],
    }
    shown = "\n".join(memory.describe_estimate(times, "step"))
    assert "estimate, not a measurement: 0.00 ms for a step" in shown and "left out: 1 x accept conditional" in shown
    assert "2 x verify: layer/a,b->c/dot_general" in shown


def test_only_tpus_have_a_clock():
    assert Device("tpu", "TPU v6 lite").clock == 1.75e9
    assert Device("gpu", "NVIDIA H200").clock is None and Device("cpu").clock is None
