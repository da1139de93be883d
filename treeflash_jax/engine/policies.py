"""Rounds that choose their trees: calibrations (nodes="auto") and selectors of a loaded pair, each read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from treeflash_jax.core import sharding
from treeflash_jax.decoding import calibration
from treeflash_jax.decoding.runner import Runner, make_calibrated_runner
from treeflash_jax.decoding.state import DecodePlan, Weights
from treeflash_jax.decoding.tree_selector import SelectorConfig, plan_selection
from treeflash_jax.engine.settings import GenerateConfig
from treeflash_jax.formats import selector_file
from treeflash_jax.models.config import ModelConfig


class Policies:
    """Calibrations and selectors of a loaded pair.

    Attributes:
      budget: file of the calibrations; None for the default path.
    """

    def __init__(self, verifier: ModelConfig, weights: Weights, mesh: Any, budget: Path | None):
        self.verifier, self.weights, self.mesh, self.budget = verifier, weights, mesh, budget
        self._calibrations: dict[DecodePlan, calibration.Calibration] = {}
        self._selectors: dict[str, tuple[SelectorConfig, Any]] = {}

    def calibration(self, plan: DecodePlan) -> calibration.Calibration:
        """Returns what `treeflash calibrate` measured for this pair with the drafting settings of `plan`.

        Raises:
          ValueError: it was never run, or for another pair, device or settings.
        """
        key = replace(plan, num_nodes=1)
        if key not in self._calibrations:
            identity = calibration.make_identity(self.verifier, self.weights, plan, self.mesh)
            self._calibrations[key] = calibration.find(self.budget or calibration.default_path(None), identity)
        return self._calibrations[key]

    def selector(self, path: str, plan: DecodePlan) -> tuple[SelectorConfig, Any]:
        """Returns the config and the weights of the selector in a file.

        Raises:
          ValueError: the file is missing or damaged, or was made for another pair.
        """
        if path not in self._selectors:
            config, params = selector_file.load(Path(path), self.mesh)
            width = len(plan.taps) * self.verifier.hidden_size
            config.check_pair(calibration.pair_digest(self.verifier, self.weights, plan), width)
            self._selectors[path] = config, params
        return self._selectors[path]

    def largest_plan(self, config: GenerateConfig, plan: DecodePlan) -> DecodePlan:
        """Returns the plan of the largest trees that rounds with these settings may verify."""
        if plan.drafts and config.selector is not None:
            return plan_selection(self.selector(config.selector, plan)[0], plan, config.nodes)
        return replace(plan, num_nodes=self.calibration(plan).nodes[-1]) if plan.drafts and config.nodes == "auto" else plan

    def make_runner(
        self, config: GenerateConfig, plan: DecodePlan, batch_size: int, positions: int, temperatures: Sequence[float]
    ) -> Runner:
        """Makes the runner of a batch.

        Args:
          plan: from `largest_plan`.
          positions: number of cache positions per sequence at first.
          temperatures: of the requests; without any, nodes "auto" verifies the largest trees.
        """
        if plan.drafts and config.selector is not None:
            return Runner(plan, self.weights, self.mesh, policy_weights=self.selector(config.selector, plan)[1])
        runner = Runner(plan, self.weights, self.mesh)
        if not plan.drafts or config.nodes != "auto" or not temperatures:
            return runner
        batch, measured = sharding.padded(batch_size, self.mesh), self.calibration(plan)
        return make_calibrated_runner(runner, measured, batch=batch, positions=positions, temperatures=temperatures)
