"""`Runner`: the compiled programs of a plan, with its weights."""

from dataclasses import dataclass, field
from typing import Any

from jax.sharding import Mesh
from jax.stages import Wrapped

from treeflash_jax.core import programs
from treeflash_jax.core.clock import Clock
from treeflash_jax.decoding.state import DecodePlan, Weights


@dataclass(frozen=True)
class Runner:
    """Runs the compiled programs of one plan with its weights.

    Attributes:
      mesh: mesh of weights and states; None for one device.
      can_cut: whether later prompts may begin with parts of the caches; see `caches.allocate`.
      clock: clock of the time since the start, without compilation.
    """

    plan: DecodePlan
    weights: Weights
    mesh: Mesh | None = None
    can_cut: bool = False
    clock: Clock = field(default_factory=Clock)

    def call(self, function: Wrapped, *args: Any, **static: Any) -> Any:
        """Runs a compiled program. Programs that return the state donate it, except `grow_caches`."""
        return programs.call(function, *args, mesh=self.mesh, clock=self.clock, **static)

    def start_compiling(self, function: Wrapped, *args: Any, **static: Any) -> programs.Program:
        """Starts to compile a program on another thread."""
        return programs.start_compiling(function, *args, mesh=self.mesh, clock=self.clock, **static)
