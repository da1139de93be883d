"""The model as users meet it: prompts in, answers with their statistics out."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import jax.numpy as jnp

from treeflash_jax import drafters
from treeflash_jax.core import devices, parameters, sharding
from treeflash_jax.core.checks import whole
from treeflash_jax.core.clock import Clock
from treeflash_jax.decoding.runner import Runner
from treeflash_jax.decoding.state import DecodePlan, Weights
from treeflash_jax.drafters import DrafterSizes
from treeflash_jax.engine import batching, planning
from treeflash_jax.engine.batching import Batch, BatchDecoder, Session, capacity_bucket, refill_size
from treeflash_jax.engine.device_memory import check_memory, footprint, usable_memory
from treeflash_jax.engine.planning import Call, Request
from treeflash_jax.engine.policies import Policies
from treeflash_jax.engine.prompts import Prompt, as_list, encode, encode_each
from treeflash_jax.engine.results import Chunk, Reader, Result, Results, warn_of_low_tau, with_totals
from treeflash_jax.engine.settings import MOST_ROWS, GenerateConfig, Settings, takes_settings
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.models import quantized
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.trees import DraftTree

INITIAL_ROOM = 1024  # new tokens for which caches are made at first; longer answers grow them
NEXT_MESSAGE = 64  # tokens of a conversation's next message for which programs are compiled ahead
ROUNDS_PER_DISPATCH = 256  # Ctrl-C waits for a dispatch
ROUNDS_PER_STOP_CHECK = 8  # stop strings are looked for on the host
logger = logging.getLogger("treeflash_jax")


class LoadedPair:
    """A verifier and its drafter in memory, and the plans, batches and runners of calls to them.

    Attributes:
      budget: file with the calibrations of this pair.
      names: of the verifier and the drafter, as they were loaded.
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
        self.verifier, self.drafter, self.tokenizer = verifier, drafter, tokenizer
        self.stop_ids = tuple(sorted({*stop_ids, *(tokenizer.stop_ids if tokenizer else ())}))
        self.mesh, self.names = mesh, names
        self.policies = Policies(verifier, weights, mesh, budget)
        self.noted_plain = False  # whether the note that nothing is drafted was logged

    @property
    def weights(self) -> Weights:
        """Weights of verifier and drafter; training replaces them before every evaluation."""
        return self.policies.weights

    @weights.setter
    def weights(self, weights: Weights) -> None:
        self.policies.weights = weights

    @property
    def budget(self) -> Path | None:
        return self.policies.budget

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
        return jnp.dtype(self.weights.verifier["embed"].dtype)

    @property
    def quantize(self) -> str | None:
        """Scheme in which the verifier's matrices are quantized."""
        return quantized.quantization_scheme(self.weights.verifier)

    def encode(self, prompt: Prompt) -> list[int]:
        """Returns the token ids of a prompt in any form that `generate` takes; see `prompts.encode`."""
        return encode(prompt, self.tokenizer, self.verifier.max_positions)

    def resolve(self, config: GenerateConfig | None, settings: Settings, num_prompts: int = 1) -> GenerateConfig:
        """Checks the settings of a call and fills in the defaults of this pair; `settings` override those of `config`."""
        is_default = getattr(config, "builder", None) is None and not settings.get("builder")
        config = planning.resolve(config, settings, self.verifier, self.drafter)
        size = planning.default_batch_size(config, num_prompts * config.samples)
        device = devices.describe_mesh(self.mesh)
        reason = planning.explain_plain(config, self.drafter, device, self.dtype, size) if is_default else None
        if reason is not None:
            config = replace(config, builder="none")
            if not self.noted_plain:
                self.noted_plain = True
                logger.warning(f"{reason}: decoding one token at a time (builder 'none' does so without this note)")
        if config.stop and self.tokenizer is None:
            raise ValueError("got stop strings, but the verifier's folder has no tokenizer.json; give stop_ids instead")
        return config

    def plan(self, config: GenerateConfig) -> DecodePlan:
        """Returns the plan of the programs for these settings; with nodes "auto", that of the largest trees measured.

        Raises:
          ValueError: no calibration for this pair, device and drafting settings; a selector for another pair or rule.
        """
        return self.policies.largest_plan(config, planning.make_plan(config, self.verifier, self.drafter, self.dtype))

    def find_stop_ids(self, config: GenerateConfig) -> Sequence[int]:
        """Returns the ids that end an answer with these settings."""
        return self.stop_ids if config.stop_ids is None else config.stop_ids

    def make_batch(self, requests: Sequence[Request], config: GenerateConfig, *, batch_size: int, capacity: int) -> Batch:
        """Pads prompts and sampling settings into device arrays; see `batching.make_batch`."""
        shared = {"stop_ids": self.find_stop_ids(config), "dtype": self.dtype, "drafter": self.drafter, "mesh": self.mesh}
        return batching.make_batch(requests, config, batch_size=batch_size, capacity=capacity, **shared)

    def make_runner(
        self, config: GenerateConfig, requests: Sequence[Request] = (), batch_size: int = 1, room: int = 0
    ) -> Runner:
        """Makes the runner of a batch whose caches have room for `room` new tokens at first; see `Policies.make_runner`."""
        plan = self.plan(config)
        positions = capacity_bucket(max((request.length for request in requests), default=0) + room + plan.path_length)
        temperatures = [request.temperature for request in requests]
        return self.policies.make_runner(config, plan, batch_size, positions, temperatures)


def make_call(
    model: LoadedPair,
    prompts: Prompt | Sequence[Prompt],
    config: GenerateConfig | None,
    settings: Settings,
    indices: Sequence[int] | None = None,
) -> Call:
    """Checks the settings and prompts of a call against the pair, and its caches at full length against device memory."""
    prompts = as_list(prompts)
    config = model.resolve(config, settings, len(prompts))
    requests = planning.make_requests(encode_each(prompts, model.encode), config, model.verifier, indices)
    batch_size = planning.default_batch_size(config, len(requests))
    batches = (batch_size, refill_size(batch_size)) if 1 < batch_size < len(requests) else (batch_size,)
    needs = footprint(
        model.verifier,
        model.drafter,
        dtype=model.dtype,
        mesh=model.mesh,
        batch=sum(sharding.padded(size, model.mesh) for size in batches),
        capacity=capacity_bucket(max(request.length for request in requests) + config.max_new_tokens),
        drafts=config.builder != "none",
        quantize=model.quantize,
    )
    check_memory(needs, usable_memory(model.mesh), model.mesh)
    return Call(requests, config, batch_size)


def start_decoder(model: LoadedPair, call: Call, clock: Clock, session: Session | None = None) -> BatchDecoder:
    """Prefills the first requests of a call with one builder; with a session, there is only one."""
    room = initial_room(call.config)
    runner = model.make_runner(call.config, call.requests, call.batch_size, room)
    pad = partial(model.make_batch, config=call.config)
    return BatchDecoder(call.requests, call.batch_size, runner, pad, room=room, clock=clock, session=session)


def initial_room(config: GenerateConfig) -> int:
    return min(config.max_new_tokens, INITIAL_ROOM) + 1


def make_reader(model: LoadedPair, config: GenerateConfig) -> Reader:
    """Makes the reader of results of a batch with these settings."""

    def draft(request: Request, ids: list[int]) -> DraftTree:
        *before, anchor = ids
        runner = model.make_runner(config)
        capacity = capacity_bucket(len(before) + runner.plan.path_length + 1)
        batch = model.make_batch([replace(request, ids=before)], config, batch_size=1, capacity=capacity)
        return runner.draft(batch, len(before), anchor)

    return Reader(config=config, stop_ids=model.find_stop_ids(config), tokenizer=model.tokenizer, draft=draft)


def serve(model: LoadedPair, call: Call) -> Iterator[tuple[int, Result]]:
    """Decodes a call; yields each answer with its index.

    Builders decode one after the other, so that no answer depends on the temperatures of the others.
    """
    clock, unanswered = Clock(), set(range(len(call.requests)))
    try:
        for part, indices in call.by_builder(model.drafter):
            reader = make_reader(model, part.config)
            max_rounds = ROUNDS_PER_STOP_CHECK if reader.is_over else ROUNDS_PER_DISPATCH
            for index, result in reader.read_all(start_decoder(model, part, clock).run(max_rounds, reader.is_over)):
                unanswered.remove(indices[index])
                yield indices[index], result
    except KeyboardInterrupt:  # answers that were read before are kept
        if len(unanswered) == len(call.requests):
            raise
    for index in sorted(unanswered):
        yield index, Result.unanswered(call.requests[index].ids, has_text=model.tokenizer is not None)


class TreeFlash(LoadedPair):
    """A verifier and its drafter, ready to generate.

    Example:
      >>> import treeflash_jax as tf
      >>> model = tf.load("smollm2")
      >>> result = model.generate("Why is the sky blue?", nodes=16)[0]
      >>> print(result.text, result.tau)
    """

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
        call = make_call(self, prompts, config, settings, indices)
        results = with_totals([result for _, result in sorted(serve(self, call), key=lambda pair: pair[0])])
        plan = self.plan(call.config)
        if plan.drafts and plan.num_nodes > 1 and not drafters.is_declared("MAY_OFFER_NOTHING", plan.drafter):
            warn_of_low_tau(results)
        return Results(results)

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

        The answers are those of `generate`, which describes the arguments. When a sequence finishes, a waiting prompt takes
        its place in the batch (continuous batching), so short answers do not wait for long ones.

        Yields:
          Pairs of an index into the list that `generate` would return, and the Result. `Result.seconds` counts from the
          start of the call, without compilation.

        Raises:
          ValueError: see `generate`; raised when the first answer is requested.
        """
        yield from serve(self, make_call(self, prompts, config, settings, indices))

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
          config, **settings: see `generate`.
          rounds_per_dispatch: number of decoding rounds between two chunks.
          session: caches of the conversation, reused and kept for its next prompt; None reads the whole prompt.

        Raises:
          ValueError: see `generate`, or there is more than one prompt; raised when the first chunk is requested.
        """
        rounds_per_dispatch = whole(rounds_per_dispatch, "rounds_per_dispatch", least=1)
        call = make_call(self, prompt, config, settings | {"batch_size": 1})
        if call.config.samples != 1:
            raise ValueError(f"got samples {call.config.samples}, expected 1: a stream is one answer")
        if len(call.requests) != 1:
            raise ValueError(
                f"got {len(call.requests)} prompts, expected one: a stream is one answer, `generate` takes several prompts"
            )
        [(call, _)] = call.by_builder(self.drafter)
        reader, decoder = make_reader(self, call.config), start_decoder(self, call, Clock(), session)
        sent, shown = 0, ""
        for snapshot in decoder.run(rounds_per_dispatch, reader.is_over):
            [result] = reader.read(snapshot, (0,))
            text = (result.text or "") if snapshot.ready else reader.certain(result.text or "")
            yield Chunk(ids=result.ids[sent:], text=text[len(shown) :], rounds=len(result.accept_lengths))
            sent, shown = len(result.ids), text
        if session:
            session.prepare_next(NEXT_MESSAGE + initial_room(call.config))
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
          config, **settings: settings of the later call; see `generate`.

        Returns:
          Seconds spent compiling; 0 if everything was compiled before.
        """
        prompt_tokens = whole(prompt_tokens, "prompt_tokens", least=1)
        num_prompts = whole(num_prompts, "num_prompts", least=1, most=MOST_ROWS)
        call = make_call(self, [[0] * prompt_tokens] * num_prompts, config, settings)
        clock = Clock()
        for part, _ in call.by_builder(self.drafter):
            start_decoder(self, part, clock).compile()
        return clock.compile_seconds
