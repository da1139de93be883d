"""Shared fixtures: 8 fake CPU devices, highest matmul precision, strict ranks, tiny random pairs.

Settings must be in place before JAX starts its backend, hence the module-level configuration.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

if os.environ["JAX_PLATFORMS"] == "cpu":
    jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")

import pytest  # noqa: E402

DATA = Path(__file__).parent / "data"
CONFORMANCE = ("a_treeflash", "b_trained", "c_dflash")


@pytest.fixture(scope="session")
def data() -> Path:
    return DATA
