"""`TreeFlash`, the public model: generates answers to prompts, with statistics of their decoding."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from treeflash_jax.core import sharding
from treeflash_jax.core.checks import fit, whole
from treeflash_jax.core.clock import Clock
from treeflash_jax.engine import planning
from treeflash_jax.engine.batching import BatchDecoder, Session, largest_capacity, refill_size
from treeflash_jax.engine.device_memory import check_memory, footprint, usable_memory
from treeflash_jax.engine.generate_config import MAX_SEQUENCES, GenerateConfig
from treeflash_jax.engine.loaded_pair import LoadedPair
from treeflash_jax.engine.planning import Call
from treeflash_jax.engine.prompts import Prompt, as_list, encode_each
from treeflash_jax.engine.results import Chunk, Reader, Result, Results, warn_of_low_tau, with_totals

ROUNDS_PER_DISPATCH = 256  # Ctrl-C waits for a dispatch
ROUNDS_PER_STOP_CHECK = 8  # the host searches for stop strings between dispatches


def make_call(
    model: LoadedPair,
    prompts: Prompt | Sequence[Prompt],
    config: GenerateConfig | None,
    settings: dict[str, Any],
    indices: Sequence[int] | None = None,
) -> Call:
    """Checks the settings and prompts of a call against the pair, and its largest caches against device memory."""
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
        capacity=largest_capacity(model.plan(config), max(x.length for x in requests), config.max_new_tokens),
        drafts=config.builder != "none",
        quantize=model.quantize,
    )
    check_memory(needs, usable_memory(model.mesh), model.mesh)
    return Call(requests, config, batch_size)


def start_decoder(model: LoadedPair, call: Call, clock: Clock, session: Session | None = None) -> BatchDecoder:
    """Prefills the first requests of a call, which share one tree builder; with a session, its only request."""
    runner = replace(model.make_runner(call.config), clock=clock)
    pad = partial(model.make_batch, config=call.config)
    return BatchDecoder(call.requests, call.batch_size, runner, pad, new=call.config.max_new_tokens, session=session)


def serve(model: LoadedPair, call: Call) -> Iterator[tuple[int, Result]]:
    """Decodes a call; yields each answer with its number.

    Requests are grouped by tree builder, which may depend on their temperature; groups are decoded one after the other.
    """
    clock, unanswered = Clock(), {request.number: request for request in call.requests}
    try:
        for part in call.by_builder(model.drafter):
            reader, decoder = Reader(model, part.config), start_decoder(model, part, clock)
            for ready in decoder.run(ROUNDS_PER_STOP_CHECK if reader.is_over else ROUNDS_PER_DISPATCH, reader.is_over):
                numbers = [decoder.slots.held[slot].number for slot in ready]
                for number, result in zip(numbers, reader.read(decoder, ready), strict=True):
                    del unanswered[number]
                    yield number, result
                if decoder.is_interrupted:
                    raise KeyboardInterrupt
            del decoder  # frees its caches
    except KeyboardInterrupt:  # keeps the answers so far
        if len(unanswered) == len(call.requests):
            raise
    for number, request in unanswered.items():
        yield number, Result.unanswered(request.ids, has_text=model.tokenizer is not None)


class TreeFlash(LoadedPair):
    """A verifier and its drafter, ready to generate.

    Example:
      >>> import treeflash_jax as tf
      >>> model = tf.load("smollm2")
      >>> result = model.generate("Why is the sky blue?", nodes=16)[0]
      >>> print(result.text, result.tau)
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        config: GenerateConfig | None = None,
        *,
        indices: Sequence[int] | None = None,
        **settings: Any,
    ) -> list[Result]:
        """Generates an answer to every prompt.

        Ctrl-C ends the call early and returns the answers so far, marked "interrupted".

        Args:
          prompts: a list of prompts, or a single one. A string is a user's message, formatted with the chat template if
            the tokenizer has one; `tf.Text("...")` is continued as it is. A prompt may also be a list of token ids, or a
            chat: a list of {"role", "content"} messages whose content is text or a list of {"type": "text", "text"} parts.
          config: settings; keyword arguments override its fields.
          indices: one index per prompt, used for its random numbers in place of its position in the list. With them,
            prompts of a larger set get the same answers however the set is split into calls.
          **settings: fields of GenerateConfig.

        Returns:
          One Result per prompt and sample, in the order of the prompts; notebooks show the list as a page.

        Raises:
          TypeError: an unknown setting.
          ValueError: a wrong setting or prompt; checked before any computation.
        """
        call = make_call(self, prompts, config, settings, indices)
        results = with_totals([result for _, result in sorted(serve(self, call), key=lambda pair: pair[0])])
        plan = self.plan(call.config)
        if plan.drafts and plan.num_nodes > 1 and not plan.drafter.may_offer_nothing:
            warn_of_low_tau(results)
        return Results(results)

    def generate_each(
        self,
        prompts: Prompt | Sequence[Prompt],
        config: GenerateConfig | None = None,
        *,
        indices: Sequence[int] | None = None,
        **settings: Any,
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

    def stream(
        self,
        prompt: Prompt,
        config: GenerateConfig | None = None,
        *,
        rounds_per_dispatch: int = 4,
        session: Session | None = None,
        **settings: Any,
    ) -> Iterator[Chunk | Result]:
        """Yields the answer to one prompt piece by piece: Chunks while it is generated, then the Result.

        The tokens are those of `generate`, whatever `rounds_per_dispatch` is.

        Args:
          prompt: one prompt, alone or in a list; see `generate`.
          config, **settings: see `generate`.
          rounds_per_dispatch: number of decoding rounds between two chunks.
          session: caches of the conversation, reused and updated for its next prompt; None prefills the whole prompt.

        Raises:
          ValueError: see `generate`, or there is more than one prompt; raised when the first chunk is requested.
        """
        rounds_per_dispatch = whole(rounds_per_dispatch, "rounds_per_dispatch", least=1)
        fit(Session | None, session, "session", says="a tf.Session")
        call = make_call(self, prompt, config, settings | {"batch_size": 1})
        if len(call.requests) != 1:
            got = f"samples {call.config.samples} and {len(call.requests) // call.config.samples} prompts"
            raise ValueError(f"got {got}, expected 1 of each: a stream is one answer, `generate` takes several prompts")
        [call] = call.by_builder(self.drafter)
        reader, decoder = Reader(self, call.config), start_decoder(self, call, Clock(), session)
        sent, shown = 0, ""
        for ready in decoder.run(rounds_per_dispatch, reader.is_over):
            [result] = reader.read(decoder, [0])
            text = (result.text or "") if ready else reader.certain(result.text or "")
            yield Chunk(ids=result.ids[sent:], text=text[len(shown) :], rounds=len(result.accept_lengths))
            sent, shown = len(result.ids), text
        yield result

    def warmup(
        self,
        prompt_tokens: int = 64,
        num_prompts: int = 1,
        config: GenerateConfig | None = None,
        **settings: Any,
    ) -> float:
        """Compiles the programs that `generate` or `stream` would run with the same settings, without decoding.

        Programs depend on the number of sequences decoded together, on the size of the caches (the longest prompt plus
        `max_new_tokens`, rounded up) and on the drafting settings, but not on prompts, filters or seeds, nor on
        temperatures unless these select the builder. Caches have room for 1,024 new tokens at first; for longer answers
        they grow, and programs of the next size are compiled when it is needed.

        Example:
          >>> model.warmup(prompt_tokens=200, max_new_tokens=256)
          >>> result = model.generate(prompt, max_new_tokens=256)[0]  # result.compile_seconds is 0

        Args:
          prompt_tokens: length of the longest prompt of the later call.
          num_prompts: number of prompts in the later call; 1 for `stream`.
          config, **settings: settings of the later call; see `generate`.

        Returns:
          Seconds spent compiling; 0 if all programs were compiled before.
        """
        prompt_tokens = whole(prompt_tokens, "prompt_tokens", least=1)
        num_prompts = whole(num_prompts, "num_prompts", least=1, most=MAX_SEQUENCES)
        call = make_call(self, [[0] * prompt_tokens] * num_prompts, config, settings)
        clock = Clock()
        for part in call.by_builder(self.drafter):
            start_decoder(self, part, clock).compile()
        return clock.compile_seconds
