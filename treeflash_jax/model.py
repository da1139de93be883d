"""The model as users meet it: prompts in, answers with their statistics out."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import jax.numpy as jnp

from treeflash_jax import devices, drafters, params, quantized, serving
from treeflash_jax import prompts as prompting
from treeflash_jax.adaptive import calibration
from treeflash_jax.adaptive.selector import SelectorConfig
from treeflash_jax.checks import whole
from treeflash_jax.decoding.state import DecodePlan, Weights
from treeflash_jax.drafters import DrafterSizes
from treeflash_jax.formats import selector as selectors
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.inputs import Inputs, inputs_of
from treeflash_jax.planning import Row, plan_of, resolve, why_plain, with_builder
from treeflash_jax.prompts import Prompt
from treeflash_jax.results import Chunk, Result, Results, warn_of_low_tau, with_totals
from treeflash_jax.session import Session
from treeflash_jax.settings import MOST_ROWS, GenerateConfig, Settings, takes_settings
from treeflash_jax.verifiers.config import ModelConfig

logger = logging.getLogger("treeflash_jax")


class TreeFlash:
    """A verifier and its drafter, ready to generate.

    Example:
      >>> import treeflash_jax as tf
      >>> model = tf.load("smollm2")
      >>> result = model.generate("Why is the sky blue?", nodes=16)[0]
      >>> print(result.text, result.tau)
    """

    def __init__(
        self,
        verifier: ModelConfig,
        weights: Weights,
        *,
        drafter: DrafterSizes | None = None,
        tokenizer: Tokenizer | None = None,
        stop_ids: Sequence[int] = (),
        mesh=None,
        budget: Path | None = None,
        names: tuple[str, str] = ("", ""),
    ):
        self.verifier = verifier
        self.drafter = drafter
        self.weights = weights
        self.tokenizer = tokenizer
        self.stop_ids = tuple(sorted({*stop_ids, *(tokenizer.stop_ids if tokenizer else ())}))
        self.mesh = mesh
        self.budget = budget  # file with the calibrations of this pair
        self.calibrations: dict[DecodePlan, calibration.Calibration] = {}
        self.selectors: dict[str, tuple[SelectorConfig, Any]] = {}  # by file
        self.names = names  # of the verifier and the drafter, as they were loaded
        self.noted_plain = False  # whether the note that nothing is drafted was logged

    def __repr__(self) -> str:
        def shown(name: str, kind: str, weights: Any) -> str:
            return f"{name} ({kind}, {params.count(weights) / 1e6:,.1f} M parameters)".lstrip()

        verifier = shown(self.names[0], self.verifier.model_type, self.weights.verifier)
        drafter = self.drafter and shown(self.names[1], self.drafter.kind, self.weights.drafter)
        dtype = self.dtype.name if self.quantize is None else f"{self.dtype.name}, quantize={self.quantize}"
        device = devices.of_mesh(self.mesh)
        place = device.kind or device.backend
        if self.mesh is not None:
            place += f" x {self.mesh.size}"
        return f"TreeFlash(verifier={verifier}, drafter={drafter}, dtype={dtype}, device={place})"

    @property
    def dtype(self) -> Any:
        """Dtype of weights, caches and activations."""
        return jnp.dtype(self.weights.verifier["embed"].dtype)

    @property
    def quantize(self) -> str | None:
        """Scheme in which the verifier's matrices are quantized."""
        return quantized.scheme_of(self.weights.verifier)

    @takes_settings
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        config: GenerateConfig | None = None,
        *,
        indices: Sequence[int] | None = None,
        **settings: Unpack[Settings],
    ) -> list[Result]:
        """Generates an answer to every prompt.

        Ctrl-C ends the call early and returns the answers so far, marked "interrupted".

        Args:
          prompts: a list of prompts, or a single one. A string is a user's message, formatted with the chat template if
            the tokenizer has one; `tf.Text("...")` is continued as it is. A prompt may also be a list of token ids, or a
            chat: a list of {"role", "content"} messages whose content is text or a list of {"type": "text", "text"} parts.
          config: settings. Keyword arguments override single ones.
          indices: one index per prompt, used for its random numbers in place of its position in the list. With them,
            prompts of a larger set get the same answers however the set is split into calls.
          **settings: fields of GenerateConfig.

        Returns:
          One Result per prompt and sample, in the order of the prompts; notebooks show the list as a page.

        Raises:
          ValueError: a setting or prompt cannot be served; this is checked before any computation.
        """
        prompts = prompting.as_list(prompts)
        request = serving.request_of(self, prompts, self.resolve(config, settings, len(prompts)), indices)
        results: dict[int, Result] = {}
        for answers in serving.serve(self, request):
            results |= with_totals(dict(answers))
        plan = self.plan(request.config)
        if plan.drafts and plan.num_nodes > 1 and not drafters.may_offer_nothing(plan.drafter):
            warn_of_low_tau(list(results.values()))
        return Results(results[index] for index in range(len(request.rows)))

    @takes_settings
    def generate_each(
        self,
        prompts: Prompt | Sequence[Prompt],
        config: GenerateConfig | None = None,
        *,
        indices: Sequence[int] | None = None,
        **settings: Unpack[Settings],
    ) -> Iterator[tuple[int, Result]]:
        """Yields each answer as soon as it is finished, in any order.

        The answers are those of `generate`. When a sequence finishes, a waiting prompt takes its place in the batch
        (continuous batching), so short answers do not wait for long ones.

        Args:
          prompts: see `generate`.
          config: see `generate`.
          indices: see `generate`.
          **settings: fields of GenerateConfig.

        Yields:
          Pairs of an index into the list that `generate` would return, and the Result. `Result.seconds` counts from the
          start of the call, without compilation.

        Raises:
          ValueError: see `generate`; raised when the first answer is requested.
        """
        prompts = prompting.as_list(prompts)
        request = serving.request_of(self, prompts, self.resolve(config, settings, len(prompts)), indices)
        for answers in serving.serve(self, request):
            yield from answers

    @takes_settings
    def stream(
        self,
        prompt: Prompt,
        config: GenerateConfig | None = None,
        *,
        rounds_per_dispatch: int = 4,
        session: Session | None = None,
        **settings: Unpack[Settings],
    ) -> Iterator[Chunk | Result]:
        """Yields the answer to one prompt piece by piece: Chunks while it is generated, then the Result.

        The tokens are those of `generate`, whatever `rounds_per_dispatch` is.

        Args:
          prompt: one prompt, alone or in a list; see `generate`.
          config: settings. Keyword arguments override single ones.
          rounds_per_dispatch: number of decoding rounds between two chunks.
          session: caches of the conversation, reused and kept for its next prompt; None reads the whole prompt.
          **settings: fields of GenerateConfig.

        Raises:
          ValueError: see `generate`, or there is more than one prompt; raised when the first chunk is requested.
        """
        config = self.resolve(config, settings)
        rounds_per_dispatch = whole(rounds_per_dispatch, "rounds_per_dispatch", least=1)
        if config.samples != 1:
            raise ValueError(f"got samples {config.samples}, expected 1: a stream is one answer")
        request = serving.request_of(self, [prompting.only(prompt)], replace(config, batch_size=1))
        config = with_builder(config, self.drafter, request.rows[0].temperature)
        reader = serving.reader_of(self, config)
        sent, shown = 0, ""
        for turn in serving.batch_of(self, request.rows, 1, config, session).turns(rounds_per_dispatch, reader.is_over):
            [result] = reader.read(turn, (0,))
            text = (result.text or "") if turn.ready else reader.certain(result.text or "")
            yield Chunk(ids=result.ids[sent:], text=text[len(shown) :], rounds=len(result.accept_lengths))
            sent, shown = len(result.ids), text
        if session:
            session.batch.prepare_next(serving.NEXT_MESSAGE + serving.room_ahead(config))
        yield result

    @takes_settings
    def warmup(
        self,
        prompt_tokens: int = 64,
        num_prompts: int = 1,
        config: GenerateConfig | None = None,
        **settings: Unpack[Settings],
    ) -> float:
        """Compiles the programs that `generate` or `stream` would run with the same settings, without decoding.

        Programs depend on the number of sequences decoded together, on the size of the caches (the longest prompt plus
        `max_new_tokens`, rounded up) and on the drafting settings. They do not depend on prompts, filters or seeds, nor on
        temperatures unless these select the builder. Caches have room for 1,024 new tokens at first; those of longer
        answers grow, and a background thread compiles the programs of the next size before it is needed.

        Example:
          >>> model.warmup(prompt_tokens=200, max_new_tokens=256)
          >>> result = model.generate(prompt, max_new_tokens=256)[0]  # result.compile_seconds is 0

        Args:
          prompt_tokens: length of the longest prompt to come.
          num_prompts: number of prompts in the later call; 1 for `stream`.
          config: settings of the later call. Keyword arguments override single ones.
          **settings: fields of GenerateConfig.

        Returns:
          Seconds spent compiling; 0 if everything was compiled before.

        Raises:
          ValueError: settings or sizes cannot be served.
        """
        prompt_tokens = whole(prompt_tokens, "prompt_tokens", least=1)
        num_prompts = whole(num_prompts, "num_prompts", least=1, most=MOST_ROWS)
        config = self.resolve(config, settings, num_prompts)
        request = serving.request_of(self, [[0] * prompt_tokens] * num_prompts, config)
        seconds = 0.0
        for builder in request.by_builder(self.drafter):
            batch = serving.batch_of(self, request.rows, request.size, replace(config, builder=builder))
            batch.compile()
            seconds += batch.clock.compile_seconds
        return seconds

    def encode(self, prompt: Prompt) -> list[int]:
        """Returns the token ids of a prompt in any form that `generate` takes.

        Raises:
          ValueError: an empty prompt, text without a tokenizer, or a chat with anything but text in it.
        """
        return prompting.encode(prompt, self.tokenizer, self.verifier.max_positions)

    def plan(self, config: GenerateConfig) -> DecodePlan:
        """Returns the plan of the programs for these settings; with nodes "auto", that of the largest trees measured.

        Raises:
          ValueError: nodes is "auto" and there is no calibration for this pair, device and drafting settings; or a selector
            for another pair or rule, or that chooses larger trees.
        """
        plan = plan_of(config, self.verifier, self.drafter, self.dtype)
        if config.selector is not None and plan.drafts:
            return self.selected(config.selector, plan)[0].planned(plan, config.nodes)
        if config.nodes != "auto" or not plan.drafts:
            return plan
        return replace(plan, num_nodes=self.calibrated(plan).nodes[-1])

    def selected(self, path: str, plan: DecodePlan) -> tuple[SelectorConfig, Any]:
        """Returns the config and the weights of the selector in a file, which is read once.

        Raises:
          ValueError: the file is missing or damaged, or was made for another pair.
        """
        if path not in self.selectors:
            config, params = selectors.load(Path(path), self.mesh)
            width = len(plan.taps) * self.verifier.hidden_size
            config.check_pair(calibration.pair_of(self.verifier, self.weights, plan), width)
            self.selectors[path] = config, params
        return self.selectors[path]

    def calibrated(self, plan: DecodePlan) -> calibration.Calibration:
        """Returns what `treeflash calibrate` measured for this pair with the drafting settings of `plan`.

        Raises:
          ValueError: it was never run, or for another pair, device or settings.
        """
        key = replace(plan, num_nodes=1)
        if key not in self.calibrations:
            identity = calibration.identity_of(self.verifier, self.weights, plan, self.mesh)
            self.calibrations[key] = calibration.find(self.budget or calibration.place(None), identity)
        return self.calibrations[key]

    def resolve(self, config: GenerateConfig | None, settings: Settings, num_prompts: int = 1) -> GenerateConfig:
        """Checks the settings of a call and fills in the defaults of this pair.

        Args:
          config: settings; None for the defaults.
          settings: fields of GenerateConfig that override it.
          num_prompts: number of prompts of the call.

        Raises:
          ValueError: a setting is unknown or cannot be served.
        """
        is_default = getattr(config, "builder", None) is None and not (settings.get("builder") or settings.get("method"))
        config = resolve(config, settings, self.verifier, self.drafter)
        size = serving.size_of(config, num_prompts * config.samples)
        why = why_plain(config, self.drafter, devices.of_mesh(self.mesh), self.dtype, size) if is_default else None
        if why is not None:
            config = replace(config, builder="none")
            if not self.noted_plain:
                self.noted_plain = True
                logger.warning(f"{why}: decoding one token at a time (builder 'none' does so without this note)")
        if config.stop and self.tokenizer is None:
            raise ValueError("got stop strings, but the verifier's folder has no tokenizer.json; give stop_ids instead")
        return config

    def inputs(self, rows: Sequence[Row], config: GenerateConfig, *, size: int, capacity: int) -> Inputs:
        """Returns the arrays from which a batch of these sequences starts; see `inputs.inputs_of`."""
        about = {"stop_ids": self.stop_ids_of(config), "dtype": self.dtype, "drafter": self.drafter, "mesh": self.mesh}
        return inputs_of(rows, config, size=size, capacity=capacity, **about)

    def stop_ids_of(self, config: GenerateConfig) -> Sequence[int]:
        """Returns the ids that end an answer with these settings."""
        return self.stop_ids if config.stop_ids is None else config.stop_ids
