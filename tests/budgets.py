"""Calibrations that were never measured, and models that go by them."""

from __future__ import annotations

from treeflash_jax import GenerateConfig, TreeFlash
from treeflash_jax.decoding import calibration
from treeflash_jax.decoding.calibration import Calibration

BUCKETS = [2, 4, 8, 16]
SIZES = {"candidates": 8, "children": 8}
AUTO = {"nodes": "auto"} | SIZES
FLAT, STEEP, MIXED = [1.0] * 4, [1.0, 2.0, 4.0, 8.0], [1.0, 1.2, 1.5, 2.1]


def table(model, seconds, step, *, tau=(1.8, 2.5, 3.2, 3.8), nodes=BUCKETS, settings=SIZES, **changes) -> Calibration:
    """A calibration that was never measured."""
    plan = model.plan(GenerateConfig(builder="best-first", nodes=nodes[-1], **settings))
    return Calibration(
        identity=calibration.make_identity(model.verifier, model.weights, plan, model.mesh) | changes,
        nodes=list(nodes),
        batch=[1],
        positions=[256],
        round_seconds=[[list(seconds)]],
        tree_seconds=[[[0.0] * len(nodes)]],
        step_seconds=[[step]],
        temperatures=[0.0, 1.0],
        tau=[list(tau)] * 2,
        reliability=[1.0, 1.0],
    )


def beside(model: TreeFlash, path, *entries: Calibration) -> TreeFlash:
    """The same model, which reads these entries."""
    for entry in entries:
        calibration.write(path, entry)
    return TreeFlash(model.verifier, model.weights, drafter=model.drafter, mesh=model.mesh, budget=path)
