"""Float dtypes: their names in `tf.load`, command lines and training settings, and the dtype in which sums are computed."""

from contextlib import suppress
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from treeflash_jax.core.settings import setting

FLOATS = ("bfloat16", "float16", "float32", "float64")
ABBREVIATIONS = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "double": "float64",
}


def dtype_name(dtype: Any) -> Any:
    """Returns the name of a dtype that is a name, an abbreviation or an object. Returns any other value unchanged."""
    if dtype is None or isinstance(dtype, str):
        return ABBREVIATIONS.get(dtype, dtype)
    with suppress(TypeError, ValueError):
        return jnp.dtype(dtype).name
    return dtype


def at_least_float32(dtype: DTypeLike) -> jnp.dtype:
    """Returns the dtype for sums over numbers of this dtype: float64 for float64, float32 for all others."""
    return jnp.promote_types(dtype, jnp.float32)


def dtype_setting(default: str | None, help: str, *names: str, **keywords: Any) -> Any:
    """Returns a dataclass field (`settings.setting`) that accepts the dtypes in `names`, and their abbreviations."""
    return setting(default, help, choices=lambda: names, spelled=dtype_name, **keywords)


def bits(dtype: jnp.dtype) -> int:
    """Returns the number of bits that an element takes on a device. NumPy stores a four-bit element in a whole byte."""
    return 4 if dtype.name in ("int4", "uint4", "float4_e2m1fn") else 8 * dtype.itemsize
