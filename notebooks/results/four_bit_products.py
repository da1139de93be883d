"""Products with weights of four bits: what the compiler for TPUs estimates for each form, and steps of SmolLM2 on a CPU.

    python notebooks/results/four_bit_products.py tpu --out four_bit_products.json
    python notebooks/results/four_bit_products.py cpu

The first command compiles a loop over four pairs of matrices with the sizes of Qwen3-4B's feed-forward part, for each chip,
form, group and number of vectors; it needs libtpu but no TPU. The second takes turns between models.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp

import treeflash_jax as tf
from treeflash_jax.bench import cycles, memory
from treeflash_jax.core import programs, sharding
from treeflash_jax.models import quantized
from treeflash_jax.models.backend import group_products
from treeflash_jax.models.quantized_weight import Quantized

WIDTH, INNER, LAYERS = 2560, 9728, 4
CHIPS = ("v5e:2x2", "v6e:2x2")
VECTORS = (1, 16, 64, 256)
FORMS = {"sums of groups": "_scale_sums", "scales spread by a product": "_scale_weight"}  # of group_products


def estimate(chip: str, group: int | None, count: int) -> float:
    """Returns the estimated time of a pass over the matrices, over that of reading them in bfloat16."""
    mesh = sharding.make_mesh(1, 1, devices=memory.find_devices(chip)[:1])
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def weight(outputs: int, inputs: int) -> Any:
        if group is None:
            return array(outputs, inputs)
        return Quantized(array(outputs, inputs, dtype=jnp.int4), array(outputs, inputs // group))

    def run(layers: Any, x_td: jax.Array, count: jax.Array) -> jax.Array:
        def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x_td = state[1]
            for up, down in layers:
                h_tf = jax.nn.silu(quantized.product("td,fd->tf", x_td, up))
                x_td += quantized.product("tf,df->td", h_tf, down)
            return state[0] + 1, x_td

        return jax.lax.while_loop(lambda state: state[0] < count, step, (jnp.int32(0), x_td))[1]

    layers = [(weight(INNER, WIDTH), weight(WIDTH, INNER)) for _ in range(LAYERS)]
    traced = jax.jit(run).trace(layers, array(count, WIDTH), array(dtype=jnp.int32))
    text = programs.compile_lowered(traced.lower(), mesh).as_text()
    device = memory.describe_topology(chip)[1]
    reading = LAYERS * 2 * WIDTH * INNER * 2 / device.peak_rates[1]
    return sum(cycles.estimate(text).by_phase().values()) / device.clock / reading


def multiply_with_zeros(multiply: Callable[..., jax.Array], x_ni: jax.Array, weight: Any) -> jax.Array:
    """Adds a vector of zeros to the only one, which a TPU would multiply on its vector unit."""
    return multiply(jnp.pad(x_ni, ((0, 1), (0, 0))), weight)[:1]


def compile_all(out: Path) -> None:
    results = json.loads(out.read_text()) if out.exists() else []
    chosen = {name: getattr(group_products, name) for name in FORMS.values()}
    for chip in CHIPS:
        for form, name in {"bfloat16": None, **FORMS}.items():
            variants = dict.fromkeys(FORMS.values(), chosen.get(name))
            variants["_scale_sums_of_masked_inputs"] = partial(multiply_with_zeros, chosen.get(name))
            for group in (None,) if name is None else (128, 32):
                for count in VECTORS:
                    place = {"chip": chip, "form": form, "group": group, "vectors": count}
                    if not any(place.items() <= result.items() for result in results):
                        with patch.multiple(group_products, **variants):  # refuses names that the module has not
                            over = round(estimate(chip, group, count), 3)
                        results.append(place | {"over_reading_bfloat16": over})
                        print(results[-1], flush=True)
                        out.write_text(json.dumps(results, indent=1) + "\n")


def time_steps(rounds: int = 7) -> None:
    """Prints the medians of milliseconds per token of an answer, prefill included."""
    settings = {"builder": "none", "max_new_tokens": 24}
    forms = [(dtype, scheme) for dtype in ("float32", "bfloat16") for scheme in ("none", "int4")]
    models = {form: tf.load(verifier="smollm2", drafter="none", dtype=form[0], quantize=form[1]) for form in forms}
    times: dict[Any, list[float]] = {form: [] for form in forms}
    for turn in range(rounds + 1):
        for form, model in models.items():
            begin = time.perf_counter()
            [result] = model.generate(["Tell me about the sea."], **settings)
            if turn:
                times[form].append(1e3 * (time.perf_counter() - begin) / len(result.ids))
    for form, taken in times.items():
        print(*form, f"{statistics.median(taken):.1f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", choices=("tpu", "cpu"))
    parser.add_argument("--out", type=Path, default=Path("four_bit_products.json"))
    arguments = parser.parse_args()
    compile_all(arguments.out) if arguments.where == "tpu" else time_steps()
