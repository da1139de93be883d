"""Floating-point operations of a training step (two per multiply-add of a matrix product), and peak rates of devices."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from train.data.packing import PackedBatch
from treeflash_jax.core import parameters, sharding
from treeflash_jax.core.parameters import Params


def step_flops(sums: Any, specs: Any, frozen_specs: Any, batch: PackedBatch) -> float:
    """Counts the operations of a step's matrix products, without recomputation.

    The gradient is counted as the derivative along one direction, which has the same number of operations. Products that
    the attention mask discards also count. `sums` is the objective of a `TrainTask`. It is traced in float32, without
    kernels, for a batch of these shapes.
    """
    params = parameters.abstract(specs, jnp.float32)
    frozen = parameters.abstract(frozen_specs, jnp.float32)
    keys_b = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch.tokens_bt.shape[0]))

    def derivative(params: Params, direction: Params, *inputs: Any) -> Any:
        return jax.jvp(lambda params: sums(params, *inputs)["loss"][0], (params,), (direction,))

    return _product_flops(jax.make_jaxpr(derivative)(params, params, frozen, batch, keys_b).jaxpr)


def _product_flops(jaxpr: Any) -> float:
    """Counts the operations of a traced program's products: all steps of its loops, and the longest of its branches."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (summed, _), _ = equation.params["dimension_numbers"]
            left, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += 2.0 * math.prod(out) * math.prod(left[axis] for axis in summed)
        parts = jax.tree.leaves([*equation.params.values()], is_leaf=lambda x: hasattr(x, "eqns"))
        inside = [_product_flops(part) for part in parts if hasattr(part, "eqns")] or [0.0]
        is_branch = equation.primitive.name == "cond"
        total += (max(inside) if is_branch else sum(inside)) * equation.params.get("length", 1)
    return total


def peak_flops(count: int) -> float | None:
    """Returns the peak FLOP/s of `count` devices in bfloat16, by their data sheet; None if not known, as on CPUs."""
    rates = sharding.device().peak_rates
    return rates[0] * count if rates else None
