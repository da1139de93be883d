"""A verifier and its drafter in memory, with the plans, batches and runners of calls to them."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from treeflash_jax.core import devices, parameters, sharding
from treeflash_jax.decoding.runner import Runner
from treeflash_jax.decoding.state import DecodePlan, Weights
from treeflash_jax.drafters import DrafterConfig
from treeflash_jax.engine import batching, planning
from treeflash_jax.engine.batching import Batch
from treeflash_jax.engine.generate_config import GenerateConfig
from treeflash_jax.engine.planning import Request
from treeflash_jax.engine.prompts import Prompt, encode
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.models import quantized
from treeflash_jax.models.config import ModelConfig

logger = logging.getLogger("treeflash_jax")


class LoadedPair:
    """A verifier and its drafter in memory, and the plans, batches and runners of calls to them.

    Attributes:
      weights: weights of verifier and drafter; training replaces them before every evaluation.
      names: names under which the verifier and the drafter were loaded.
    """

    def __init__(
        self,
        verifier: ModelConfig,
        weights: Weights,
        *,
        drafter: DrafterConfig | None = None,
        tokenizer: Tokenizer | None = None,
        stop_ids: Sequence[int] = (),
        mesh=None,
        names: tuple[str, str] = ("", ""),
    ):
        self.verifier, self.drafter, self.tokenizer = verifier, drafter, tokenizer
        self.stop_ids = tuple(sorted({*stop_ids, *(tokenizer.stop_ids if tokenizer else ())}))
        self.mesh, self.names, self.weights = mesh, names, weights
        self.noted_plain = False  # whether the note that nothing is drafted was logged

    def __repr__(self) -> str:
        def show(name: str, kind: str, weights: Any) -> str:
            return f"{name} ({kind}, {parameters.count(weights) / 1e6:,.1f} M parameters)".lstrip()

        verifier = show(self.names[0], self.verifier.model_type, self.weights.verifier)
        drafter = self.drafter and show(self.names[1], self.drafter.kind, self.weights.drafter)
        dtype = self.dtype.name if self.quantize is None else f"{self.dtype.name}, quantize={self.quantize}"
        device = devices.describe_mesh(self.mesh)
        chips = (device.kind or device.backend) + ("" if self.mesh is None else f" x {self.mesh.size}")
        return f"TreeFlash(verifier={verifier}, drafter={drafter}, dtype={dtype}, device={chips})"

    @property
    def dtype(self) -> Any:
        """Dtype of weights, caches and activations."""
        return jnp.dtype(self.weights.dtype)

    @property
    def quantize(self) -> str | None:
        """Scheme in which the verifier's matrices are quantized."""
        return quantized.quantization_scheme(self.weights.verifier)

    def encode(self, prompt: Prompt) -> list[int]:
        """Returns the token ids of a prompt in any form that `generate` takes; see `prompts.encode`."""
        return encode(prompt, self.tokenizer)

    def resolve(self, config: GenerateConfig | None, settings: dict[str, Any], num_prompts: int = 1) -> GenerateConfig:
        """Checks the settings of a call and fills in the defaults of this pair; `settings` override `config`."""
        is_default = getattr(config, "builder", None) is None and not settings.get("builder")
        config = planning.resolve(config, settings, self.verifier, self.drafter)
        sequences = sharding.per_shard(planning.default_batch_size(config, num_prompts * config.samples), self.mesh)
        device = devices.describe_mesh(self.mesh)
        reason = planning.explain_plain(config, self.drafter, device, self.dtype, sequences) if is_default else None
        if reason is not None:
            config = replace(config, builder="none")
            if not self.noted_plain:
                self.noted_plain = True
                logger.warning(f"{reason}: decoding one token at a time (builder 'none' does so without this note)")
        config = planning.fit_nodes(config, self.drafter, device, sequences)
        if config.stop and self.tokenizer is None:
            raise ValueError("got stop strings, but the verifier's folder has no tokenizer.json; give stop_ids instead")
        if config.stop:  # a special token is not part of the text
            special = {x.content: i for i, x in self.tokenizer.inner.added_tokens_decoder.items() if x.special}
            ids = [special[stop] for stop in config.stop if stop in special]
            strings = tuple(stop for stop in config.stop if stop not in special)
            config = replace(config, stop=strings, stop_ids=[*self.find_stop_ids(config), *ids] if ids else config.stop_ids)
        return config

    def plan(self, config: GenerateConfig) -> DecodePlan:
        """Returns the plan of the programs for these settings."""
        return planning.make_plan(config, self.verifier, self.drafter, self.dtype)

    def find_stop_ids(self, config: GenerateConfig) -> Sequence[int]:
        return self.stop_ids if config.stop_ids is None else config.stop_ids

    def make_batch(self, requests: Sequence[Request], config: GenerateConfig, *, batch_size: int, capacity: int) -> Batch:
        """Pads prompts and sampling settings into device arrays; see `batching.make_batch`."""
        shared = {"stop_ids": self.find_stop_ids(config), "dtype": self.dtype, "drafter": self.drafter, "mesh": self.mesh}
        return batching.make_batch(requests, config, batch_size=batch_size, capacity=capacity, **shared)

    def make_runner(self, config: GenerateConfig) -> Runner:
        """Makes the runner of a batch."""
        return Runner(self.plan(config), self.weights, self.mesh)
