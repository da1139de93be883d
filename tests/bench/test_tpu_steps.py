"""Steps and rounds compiled for TPUs that are not here: what multiplies the weights, and the compiler's estimates."""

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest
from compiled import reductions_of_weights, written_weights

from treeflash_jax.bench import memory, shapes
from treeflash_jax.core import sharding
from treeflash_jax.drafters import MtpDrafter, NgramDrafter
from treeflash_jax.drafters.mtp_drafter import layer_sizes
from treeflash_jax.engine.device_memory import footprint
from treeflash_jax.engine.settings.generate_config import GenerateConfig
from treeflash_jax.engine.settings.plan import resolve
from treeflash_jax.models import decoder
from treeflash_jax.models.config import ModelConfig

QWEN3 = replace(shapes.SHAPES["qwen3-0.6b"], num_layers=2, vocab_size=2**14)
HYBRID = replace(
    shapes.SHAPES["qwen3.6-35b-a3b"], num_layers=2, layer_types=("linear_attention", "full_attention"), vocab_size=2**14,
    num_experts=32,
)  # fmt: skip
GPT_OSS = replace(
    shapes.SHAPES["gpt-oss-20b"], num_layers=2, layer_types=("sliding_attention", "full_attention"), vocab_size=2**14
)
SMALLEST_WEIGHT = 2**20  # numbers of a weight, at least; activations of a token and recurrent states have fewer
pytestmark = pytest.mark.slow


def compile_rounds(
    model: ModelConfig,
    topology: str,
    *,
    nodes: int = 1,
    capacity: int = 512,
    dtype: str = "bfloat16",
    quantize: str | None = None,
    data: int = 1,
    ways: int = 1,
    drafter: Any = None,
) -> str:
    """Returns the text of a loop of rounds, of one-token steps for one node, with one sequence per device."""
    pytest.importorskip("libtpu", reason='needs pip install "jax[tpu]"')
    mesh = sharding.make_mesh(data, ways, devices=memory.find_devices(topology)[: data * ways])
    drafter = (drafter or shapes.find_drafter(model)).fitted(model)
    _, device, _ = memory.describe_topology(topology)
    plan = resolve(GenerateConfig(nodes=nodes), model, drafter, dtype=jnp.dtype(dtype), device=device)
    return memory.compile_programs(plan, mesh, data, capacity, jnp.dtype(dtype), quantize)[1].as_text()


@pytest.mark.parametrize("model, options", [
    (QWEN3, {}), (QWEN3, {"dtype": "float32"}), (QWEN3, {"dtype": "float16"}), (QWEN3, {"quantize": "int8"}),
    (QWEN3, {"data": 4}), (QWEN3, {"data": 2, "ways": 2, "quantize": "fp8"}), (HYBRID, {}), (HYBRID, {"ways": 4}),
    (HYBRID, {"drafter": MtpDrafter(layers=layer_sizes(HYBRID)), "nodes": 4}), (GPT_OSS, {}), (GPT_OSS, {"ways": 4}),
])  # fmt: skip
def test_no_weight_is_multiplied_on_the_vector_unit(model, options):
    assert reductions_of_weights(compile_rounds(model, "v5e:2x2", **options), SMALLEST_WEIGHT) == []


@pytest.mark.parametrize("nodes", [1, 64])
def test_no_loop_on_a_mesh_writes_a_weight_of_four_bits(nodes):
    """Not even on the chip, where XLA would lay weights out anew in every pass, or widen them."""
    model = replace(shapes.SHAPES["qwen3-8b"], num_layers=1, vocab_size=2**14)
    text = compile_rounds(model, "v5e:2x2", nodes=nodes, quantize="int4", ways=4, drafter=NgramDrafter())
    matrices = [spec for spec in decoder.specs(model, is_merged=True)["groups"][0][0].values() if spec.inputs]
    assert written_weights(text, [(math.prod(spec.shape) // 4,) for spec in matrices], nodes, on_chip=True) == []


@pytest.mark.parametrize("nodes", [1, 64])
def test_recurrent_layers_on_a_mesh_send_no_channels_to_other_chips(nodes):
    """A chip has the queries, keys and values of the same heads, although four chips do not divide attention's heads."""
    text = compile_rounds(HYBRID, "v5e:2x2", nodes=nodes, ways=4, drafter=NgramDrafter())
    assert "collective-permute" not in text and "all-to-all" not in text


@pytest.mark.parametrize("topology, step_over_reading, round_over_step", [("v5e:2x2", 1.4, 1.65), ("v6e:2x2", 1.4, 1.6)])
def test_ratios_of_estimates(topology, step_over_reading, round_over_step):
    """Qwen3-4B: a step would take four times as long as reading its bytes if the vector unit multiplied the weights.

    A round would take 1.9 and 1.7 steps if the vector unit added the weights of attention.
    """
    model, (_, device, _) = shapes.SHAPES["qwen3-4b"], memory.describe_topology(topology)
    needs = footprint(model, dtype=jnp.bfloat16, batch=1, capacity=4096)
    step, tree = (
        memory.estimate_times(compile_rounds(model, topology, nodes=nodes, capacity=4096), device, needs.total)
        for nodes in (1, 64)
    )
    times = [sum(found["milliseconds"].values()) for found in (step, tree)]
    assert times[0] / step["reading"] < step_over_reading
    assert times[1] / times[0] < round_over_step
