"""Steps and rounds compiled for TPUs that are not here: no weight is multiplied on the vector unit."""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from compiled import reductions_of_weights

from treeflash_jax.bench import memory, shapes
from treeflash_jax.core import sharding
from treeflash_jax.drafters import MtpDrafter
from treeflash_jax.drafters.mtp_drafter import layer_sizes
from treeflash_jax.engine.settings.generate_config import GenerateConfig
from treeflash_jax.engine.settings.plan import resolve
from treeflash_jax.models.config import ModelConfig

QWEN3 = replace(shapes.VERIFIERS["qwen3-0.6b"], num_layers=2, vocab_size=2**14)
HYBRID = replace(
    shapes.VERIFIERS["qwen3.6-35b-a3b"], num_layers=2, layer_types=("linear_attention", "full_attention"), vocab_size=2**14,
    num_experts=32,
)  # fmt: skip
GPT_OSS = replace(
    shapes.VERIFIERS["gpt-oss-20b"], num_layers=2, layer_types=("sliding_attention", "full_attention"), vocab_size=2**14
)
SMALLEST_WEIGHT = 2**18  # numbers of a weight, at least, and more than any activations of one token have


def compile_rounds(
    model: ModelConfig,
    topology: str,
    *,
    nodes: int = 1,
    dtype: str = "bfloat16",
    quantize: str | None = None,
    data: int = 1,
    ways: int = 1,
    drafter=None,
):
    """Compiles a loop of rounds, of one-token steps for one node, with one sequence per device."""
    mesh = sharding.make_mesh(data, ways, devices=memory.find_devices(topology)[: data * ways])
    drafter = drafter or shapes.find_drafter(model, num_layers=1)
    _, device, _ = memory.describe_topology(topology)
    plan = resolve(GenerateConfig(nodes=nodes), model, drafter.fitted(model), dtype=jnp.dtype(dtype), device=device)
    return memory.compile_programs(plan, mesh, data, 512, jnp.dtype(dtype), quantize)[1]


@pytest.mark.slow
@pytest.mark.parametrize("model, options", [
    (QWEN3, {}), (QWEN3, {"dtype": "float32"}), (QWEN3, {"dtype": "float16"}), (QWEN3, {"quantize": "int8"}),
    (QWEN3, {"data": 4}), (QWEN3, {"data": 2, "ways": 2, "quantize": "fp8"}), (HYBRID, {}), (HYBRID, {"ways": 4}),
    (HYBRID, {"drafter": MtpDrafter(layers=layer_sizes(HYBRID)), "nodes": 4}), (GPT_OSS, {}), (GPT_OSS, {"ways": 4}),
])  # fmt: skip
def test_no_weight_is_multiplied_on_the_vector_unit(model, options):
    pytest.importorskip("libtpu", reason='needs pip install "jax[tpu]"')
    for topology in ("v5e:2x2",):
        text = compile_rounds(model, topology, **options).as_text()
        assert reductions_of_weights(text, SMALLEST_WEIGHT) == []
