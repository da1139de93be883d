"""Launches and memory of a recurrent layer on devices that are not here, at the sizes of Qwen3.6-27B.

One token or a tree of 64 nodes: norm, maps, convolution, rule, gated norm, map back and commit, no feed-forward part.
"""

import jax
import jax.numpy as jnp
import pytest
from conftest import needs_mosaic
from jax.sharding import NamedSharding, PartitionSpec

from treeflash_jax.bench import memory
from treeflash_jax.core import parameters, programs, sharding
from treeflash_jax.decoding import loops
from treeflash_jax.models import caches, kernels, layers
from treeflash_jax.models.config import DeltaSizes, ModelConfig
from treeflash_jax.models.layer_kinds import KINDS
from treeflash_jax.models.layer_protocol import PassInputs

CONFIG = ModelConfig(
    vocab_size=1024, hidden_size=5120, intermediate_size=17408, num_layers=4, num_heads=24, num_kv_heads=4, head_dim=256,
    layer_types=("linear_attention",) * 4, offset_norms=True,
    delta=DeltaSizes(key_heads=16, value_heads=48, key_dim=128, value_dim=128, conv_width=4),
)  # fmt: skip
KIND, DTYPE, PATH = KINDS["linear_attention"], jnp.bfloat16, 17


def compiled_rounds(topology: str, size: int, num_layers: int, kernel_set: str | None):
    """A loop of passes over a number of layers, each with a commit of a path."""
    mesh = sharding.make_mesh(1, 1, devices=memory.find_devices(topology)[:1])
    place = NamedSharding(mesh, PartitionSpec())

    def placed(shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    specs = KIND.specs(CONFIG, is_merged=True) | {"attention_norm": layers.norm_spec(CONFIG, CONFIG.hidden_size)}
    weights = [parameters.abstract(specs, DTYPE, mesh)] * num_layers
    states = [jax.tree.map(lambda x: placed(x.shape, x.dtype), jax.eval_shape(lambda: KIND.init(CONFIG, 1, 0, DTYPE)))]

    def body(carry, weights, mask_btu, path_bp, positions_bt):
        index, x_btd, states, length_b = carry
        inputs, news = PassInputs(positions_bt + length_b[:, None], mask_btu, length_b, None, "xla"), []
        for params, state in zip(weights, states, strict=True):
            normed_btd = layers.norm(CONFIG, x_btd, params["attention_norm"])
            y_btd, new = KIND.mix(params, CONFIG, normed_btd, inputs, state, None)
            x_btd = x_btd + y_btd
            news.append(new)
        count_b = caches.count_after(path_bp[:, 0] % 3, x_btd[:, 0, 0].astype(jnp.float32))
        states = [state.commit((new,), length_b, count_b, path_bp) for state, new in zip(states, news, strict=True)]
        return index + 1, x_btd, states, length_b + count_b

    def run(states, x_btd, length_b, *others):
        return jax.lax.while_loop(lambda c: c[0] < 9, lambda c: body(c, *others), (0, x_btd, states, length_b))

    arrays = placed((1, size, CONFIG.hidden_size), DTYPE), placed((1,))
    others = weights, placed((1, size, size), bool), placed((1, min(size, PATH))), placed((1, size))
    with jax.set_mesh(mesh), kernels.use(kernel_set):
        lowered = jax.jit(run, donate_argnums=0).lower(states * num_layers, *arrays, *others)
        return programs.compile_lowered(lowered, mesh, loops.decode)


@pytest.mark.slow
@pytest.mark.parametrize("topology, compiler, kernel_set, most", [
    ("h200", "jax_plugins.xla_cuda12", None, {1: 16, 64: 30}), ("v5e:2x2", "libtpu", None, {1: 31}),
    pytest.param("h200", "jax_plugins.xla_cuda12", "mosaic-gpu", {1: 16, 64: 18}, marks=needs_mosaic),
])  # fmt: skip
def test_a_recurrent_layer_launches_few_operations_and_keeps_no_state_per_node(topology, compiler, kernel_set, most):
    pytest.importorskip(compiler, reason='needs pip install "jax[cuda12]" or "jax[tpu]"')
    for size, launches in most.items():
        small, large = (compiled_rounds(topology, size, count, kernel_set) for count in (2, 4))
        counts = [memory.count_launches(compiled.as_text()) for compiled in (small, large)]
        assert counts[1] - counts[0] <= 2 * launches
        temporaries = [compiled.memory_analysis().temp_size_in_bytes for compiled in (small, large)]
        assert temporaries[1] - temporaries[0] < 2 * 4 * 2**20, "states per node would be 192 MiB a layer"
