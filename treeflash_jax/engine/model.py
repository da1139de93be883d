"""`TreeFlash`, the public model: generates answers to prompts, with statistics of their decoding.

`prepare` makes requests (call/) and the plan of their programs (settings/plan.py). A `PreparedCall` decodes the requests
together (schedule/, decoding/). Results are then read from the state of the batch (answers/).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, Unpack

import jax.numpy as jnp
from jax.sharding import Mesh

from treeflash_jax.constraints import compilation
from treeflash_jax.core import parameters, sharding
from treeflash_jax.core.checks import coerce, integer
from treeflash_jax.core.error_text import warn
from treeflash_jax.decoding.state import DecodePlan, Weights
from treeflash_jax.drafters import Drafter
from treeflash_jax.engine.answers.results import Chunk, Result, Results, Score, warn_of_low_tau, with_totals
from treeflash_jax.engine.call.prompts import Prompt, as_list, encode, encode_each
from treeflash_jax.engine.call.requests import Request, make_requests
from treeflash_jax.engine.device_memory import device_bytes, footprint, refuse_if_too_large, usable_memory
from treeflash_jax.engine.prepared_call import PreparedCall, call_weights
from treeflash_jax.engine.schedule.batching import choose_batch_size, largest_caches
from treeflash_jax.engine.schedule.session import Session
from treeflash_jax.engine.settings.generate_config import MAX_SEQUENCES, GenerateConfig
from treeflash_jax.engine.settings.keywords import GenerateSettings
from treeflash_jax.engine.settings.plan import resolve
from treeflash_jax.engine.settings.recommended import call_settings
from treeflash_jax.formats.messages import find_format
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.models import quantized
from treeflash_jax.models.config import ModelConfig


@dataclass(eq=False, repr=False)
class TreeFlash:
    """A verifier and its drafter, ready to generate.

    `generate`, `generate_each` and `stream` answer prompts. `encode`, `plan` and `prepare` return what these read and run.
    `check_memory` and `settings_and_requests` are for the server and for training, and may change.

    Example:
      >>> import treeflash_jax as tf
      >>> model = tf.load("smollm2")
      >>> result = model.generate("Why is the sky blue?", nodes=16)[0]
      >>> print(result.text, result.tau)

    Attributes:
      verifier: config of the verifier.
      weights: weights of verifier and drafter; training replaces them before every evaluation. On accelerators, `load`
        joins some of the verifier's matrices (`decoder.merge`).
      drafter: the drafter; None decodes one token at a time.
      tokenizer: tokenizer of the verifier; None takes and returns token ids only.
      stop_ids: token ids that end an answer, unless a call gives others.
      mesh: mesh of the weights; None for one device.
      device: kind of the devices that the programs run on.
      names: names under which the verifier and the drafter were loaded.
      recommended: content of the verifier's generation_config.json, for the setting `sampling="model"`.
    """

    verifier: ModelConfig
    weights: Weights
    _: KW_ONLY
    drafter: Drafter | None = None
    tokenizer: Tokenizer | None = None
    stop_ids: Sequence[int] = ()
    mesh: Mesh | None = None
    names: tuple[str, str] = ("", "")
    recommended: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stop_ids = {*self.stop_ids}
        if self.tokenizer:
            stop_ids |= {*self.tokenizer.stop_ids, *find_format(self.tokenizer).stop_ids}
        self.stop_ids = tuple(sorted(stop_ids))
        self.device = sharding.device(self.mesh)

    def __repr__(self) -> str:
        def show(name: str, kind: str, weights: Any) -> str:
            return f"{name} ({kind}, {parameters.count(weights) / 1e6:,.1f} M parameters)".lstrip()

        verifier = show(self.names[0], self.verifier.model_type, self.weights.verifier)
        drafter = self.drafter and show(self.names[1], self.drafter.kind, self.weights.drafter)
        dtype = self.dtype.name if self.quantize is None else f"{self.dtype.name}, quantize={self.quantize}"
        chips = (self.device.kind or self.device.backend) + ("" if self.mesh is None else f" x {self.mesh.size}")
        return f"TreeFlash(verifier={verifier}, drafter={drafter}, dtype={dtype}, device={chips})"

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of weights, caches and activations."""
        return jnp.dtype(self.weights.dtype)

    @property
    def quantize(self) -> str | None:
        """Quantisation scheme of the verifier's matrices; None if they are not quantised."""
        return quantized.quantization_scheme(self.weights.verifier)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        config: GenerateConfig | None = None,
        *,
        indices: Sequence[int] | None = None,
        **settings: Unpack[GenerateSettings],
    ) -> list[Result]:
        """Generates an answer to every prompt.

        Ctrl-C ends the call early and returns the answers so far, marked "interrupted".

        Args:
          prompts: a list of prompts, or a single one. A string is a user's message, formatted with the chat template if
            the tokenizer has one; `tf.Text("...")` is continued as it is. A prompt may also be a list of token ids, or a
            chat: a list of {"role", "content"} messages whose content is text or a list of {"type": "text", "text"} parts;
            `tf.Chat` adds tools, and continues the last message.
          config, **settings: fields of GenerateConfig; keyword arguments override those of `config`.
          indices: one index per prompt, used for its random numbers in place of its position in the list. With them,
            prompts of a larger set get the same answers however the set is split into calls.

        Returns:
          One Result per prompt and sample, in the order of the prompts; notebooks show the list as a page.

        Raises:
          TypeError: an unknown setting.
          ValueError: an invalid setting or prompt, before any computation; or NaN in the verifier's logits.
          RuntimeError: this process was forked from the one that loaded the model.
        """
        call = self.prepare(prompts, config, indices=indices, **settings)
        results = with_totals([result for _, result in sorted(call.answer(), key=itemgetter(0))])
        if call.plan.num_nodes > 1 and not self.drafter.may_offer_nothing:
            warn_of_low_tau(results)
        return Results(results)

    def generate_each(
        self,
        prompts: Prompt | Sequence[Prompt],
        config: GenerateConfig | None = None,
        *,
        indices: Sequence[int] | None = None,
        **settings: Unpack[GenerateSettings],
    ) -> Iterator[tuple[int, Result]]:
        """Yields each answer as soon as it is finished, in any order.

        Answers, arguments and exceptions are as in `generate`. Exceptions are raised when the first answer is requested. A
        waiting prompt takes the place of a finished one (continuous batching), so short answers do not wait for long ones.

        Yields:
          Pairs of an index into `generate`'s list and the Result, whose `seconds` count from the start of the call.
        """
        yield from self.prepare(prompts, config, indices=indices, **settings).answer()

    def stream(
        self,
        prompt: Prompt | Sequence[Prompt],
        config: GenerateConfig | None = None,
        *,
        rounds_per_dispatch: int = 4,
        session: Session | None = None,
        **settings: Unpack[GenerateSettings],
    ) -> Iterator[Chunk | Result]:
        """Yields the answer to one prompt piece by piece: Chunks while it is generated, then the Result.

        Args:
          prompt, config, **settings: as in `generate`, but one prompt, alone or in a list.
          rounds_per_dispatch: number of decoding rounds between two chunks. It does not change the tokens.
          session: caches of the conversation, reused and updated for its next prompt; None prefills the whole prompt.

        Raises:
          TypeError, ValueError: as in `generate`, and for more than one prompt, or a `batch_size` other than 1 with a
            session. Raised when the first chunk is requested.
        """
        rounds_per_dispatch = integer(rounds_per_dispatch, "rounds_per_dispatch", least=1)
        coerce(Session | None, session, "session", says="a tf.Session")
        call = self.prepare(prompt, config, for_session=session is not None, **settings)
        yield from call.stream(rounds_per_dispatch, session)

    def score(self, prompts: Prompt | Sequence[Prompt], *, top_log_probs: int = 0) -> list[Score]:
        """Returns the log-probabilities of the tokens of prompts under the verifier (temperature 1, unprocessed).

        Prompts and exceptions are as in `generate`, except that Ctrl-C raises KeyboardInterrupt. Prompts are read in
        chunks, so that the logits of only one chunk exist at a time.

        Example:
          >>> [score] = model.score(tf.Text("Paris is in France."))
          >>> sum(score.log_probs[1:])  # the first token has None

        Args:
          top_log_probs: number of likeliest tokens to return for the position of every token, up to 20.
        """
        empty = self.generate(prompts, builder="none", max_new_tokens=0, prompt_log_probs=True, top_log_probs=top_log_probs)
        scores = [result.prompt_score for result in empty]
        if None in scores:  # generate keeps the answers so far
            raise KeyboardInterrupt
        return scores

    def warmup(
        self,
        prompt_tokens: int = 64,
        num_prompts: int = 1,
        config: GenerateConfig | None = None,
        **settings: Unpack[GenerateSettings],
    ) -> float:
        """Compiles the programs that `generate` or `stream` would run with the same settings, without decoding.

        Returns the seconds spent compiling; 0 if all programs were compiled before. Programs depend on the number of
        sequences decoded together, on the size of the caches (the longest prompt plus room for new tokens, rounded up) and
        on the drafting settings. They do not depend on prompts, `max_new_tokens`, temperatures, filters or seeds. Decoding
        compiles others if an answer outgrows its caches. If the verifier has layers with windows or states, streams of a
        session have caches of another shape: their programs are not compiled here.

        Example:
          >>> model.warmup(prompt_tokens=200, max_new_tokens=256)
          >>> result = model.generate(prompt, max_new_tokens=256)[0]  # result.compile_seconds is 0

        Args:
          prompt_tokens: length of the longest prompt of the later call.
          num_prompts: number of prompts in the later call; 1 for `stream`.
          config, **settings: settings of the later call; see `generate`.
        """
        prompt_tokens = integer(prompt_tokens, "prompt_tokens", least=1)
        num_prompts = integer(num_prompts, "num_prompts", least=1, most=MAX_SEQUENCES)
        scheduler = self.prepare([[0] * prompt_tokens] * num_prompts, config, **settings).schedule()
        scheduler.compile_programs()
        return scheduler.runner.clock.compile_seconds

    def encode(self, prompt: Prompt) -> list[int]:
        """Returns the token ids of a prompt in any form that `generate` takes; see `prompts.encode`."""
        return encode(prompt, self.tokenizer)

    def plan(self, config: GenerateConfig, batch_size: int = 1) -> DecodePlan:
        """Returns the plan of the programs for these settings and a batch of this size; see `plan.resolve`."""
        sequences = sharding.per_shard(batch_size, self.mesh)
        return resolve(config, self.verifier, self.drafter, dtype=self.dtype, device=self.device, sequences=sequences)

    def prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        config: GenerateConfig | None = None,
        *,
        indices: Sequence[int] | None = None,
        for_session: bool = False,
        **settings: Unpack[GenerateSettings],
    ) -> PreparedCall:
        """Checks a call against the pair and the memory of its device, and compiles its constraints; runs no model.

        Arguments and exceptions are as in `generate`. `for_session` counts the larger caches from which a session can
        continue. Logs once why nothing is drafted, and which of the model's recommended settings apply.
        """
        config, requests = self.settings_and_requests(prompts, config, indices=indices, **settings)
        tokenizer, size, depth = self.tokenizer, self.verifier.vocab_size, config.schema_depth
        automata = {
            constraint: compilation.compile_constraint(constraint, tokenizer, self.stop_ids, size, depth)
            for constraint in dict.fromkeys(request.constraint for request in requests if request.constraint is not None)
        }
        requests = [replace(request, automaton=automata.get(request.constraint)) for request in requests]
        batch_size = config.batch_size or choose_batch_size(len(requests))
        plan = self.plan(config, batch_size)
        if plan.why_plain is not None:
            warn(f"decoding one token at a time (builder 'none' does so without this note): {plan.why_plain}")
        batch, capacity = largest_caches(plan, requests, batch_size, self.mesh)
        self.check_memory(batch=batch, capacity=capacity, drafts=plan.drafts, can_cut=for_session)
        return PreparedCall(self, call_weights(self, config, plan), requests, plan, batch_size)

    def check_memory(self, *, batch: int, capacity: int, drafts: bool, can_cut: bool) -> None:
        """Raises ValueError if weights and caches do not fit on the devices; `footprint` describes the arguments."""
        needs = footprint(
            self.verifier,
            self.drafter,
            dtype=self.dtype,
            mesh=self.mesh,
            batch=batch,
            capacity=capacity,
            drafts=drafts,
            can_cut=can_cut,
            weight_bytes=self._weight_bytes,
        )
        refuse_if_too_large(needs, usable_memory(self.mesh), self.mesh)

    @cached_property
    def _weight_bytes(self) -> tuple[int, int]:
        """Bytes of the weights of verifier and drafter on each device. Other weights of the same pair have equal sizes."""
        return device_bytes(self.weights.verifier), device_bytes(self.weights.drafter)

    def settings_and_requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        config: GenerateConfig | None = None,
        *,
        indices: Sequence[int] | None = None,
        **settings: Unpack[GenerateSettings],
    ) -> tuple[GenerateConfig, list[Request]]:
        """Returns the checked settings of a call, and what `make_requests` returns. It is the first part of `prepare`."""
        config = call_settings(config, settings, self.recommended, self.names[0])
        return config, make_requests(
            encode_each(as_list(prompts), self.tokenizer),
            config,
            self.verifier,
            self.drafter,
            tokenizer=self.tokenizer,
            stop_ids=self.stop_ids,
            indices=indices,
        )
