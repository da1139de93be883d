"""Attention over a cached prefix by a Pallas kernel; the plain form is "streamed" of `models.attention`."""

from functools import partial

import jax
from jax import lax


def attend(
    kind: str, q_bkqe: jax.Array, keys_bkse: jax.Array, values_bkse: jax.Array, length_b: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the kernel for "gpu" or "tpu"; interpreted, slowly, on a CPU. See `attend` of the kernels' modules."""
    if kind == "gpu":
        from treeflash_jax.models.backend import attention_gpu as kernel
    else:
        from treeflash_jax.models.backend import attention_tpu as kernel
    forms = {"cpu": partial(kernel.attend, interpret=True), "cuda" if kind == "gpu" else "tpu": kernel.attend}
    return lax.platform_dependent(q_bkqe, keys_bkse, values_bkse, length_b, **forms)
