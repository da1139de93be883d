"""Makes requests of the scheduler from the prompts and settings of a call, in any thread."""

import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from treeflash_jax.constraints.compilation import CONSTRAINT_NAMES, Constraint, compile_constraint
from treeflash_jax.constraints.compile_bytes import Run
from treeflash_jax.constraints.tables import AutomatonTable
from treeflash_jax.core.checks import expect
from treeflash_jax.decoding.processors import PROCESSORS
from treeflash_jax.engine.call.prompts import Prompt, encode_each
from treeflash_jax.engine.call.requests import Request, check_ids
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.schedule.batching import TOKEN_CLASSES, SamplingSizes
from treeflash_jax.engine.settings.generate_config import GenerateConfig
from treeflash_jax.formats.text_limit import TextLimit
from treeflash_jax.serve.options import DEFAULT_CONTEXT

MAX_STOP_IDS = 32
MAX_BIASES = 304


def server_sizes(states: int, vocab_size: int, config: type[GenerateConfig]) -> SamplingSizes:
    """Returns sizes with all sampling settings, and for automata of up to `states` states; 0: no automata."""
    automaton = (states, TOKEN_CLASSES, vocab_size) if states else None
    processed = frozenset(chain(*PROCESSORS))
    return SamplingSizes(config, MAX_STOP_IDS, MAX_BIASES, has_least_end=True, processed=processed, automaton=automaton)


class RequestMaker:
    """Encodes prompts, compiles constraints, and checks and numbers requests.

    Args:
      context: the attribute `context`; None: the verifier's context, but at most DEFAULT_CONTEXT.
      schema_states: number of states of the largest automaton; 0: no constraints.

    Attributes:
      config: default settings of requests.
      context: largest number of tokens of a prompt and its answer together.
      text_limit: size of the longest text that can fit the context; None without a tokenizer.
      sizes: sizes of the arrays of sampling settings; every request fits into them.
    """

    def __init__(self, model: TreeFlash, config: GenerateConfig, *, context: int | None, schema_states: int):
        max_positions = model.verifier.max_positions
        self.context = min(max_positions, DEFAULT_CONTEXT) if context is None else context
        expect(self.context <= max_positions, "context", self.context, f"at most {max_positions}, the verifier's")
        self.model, self.config = model, config
        self.text_limit = None
        if model.tokenizer is None:
            schema_states = 0
        else:
            self.text_limit = TextLimit(model.tokenizer, self.context)
        self.sizes = server_sizes(schema_states, model.verifier.vocab_size, type(config))
        self._numbers = itertools.count()

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Returns the token ids of each prompt.

        Raises ValueError for ids outside the vocabulary. A prompt that cannot fit the context is refused before encoding.
        """
        if not prompts:
            raise ValueError("got no prompts, expected at least one")
        for prompt in prompts:
            if isinstance(prompt, list) and len(prompt) > self.context:
                raise ValueError(f"got {len(prompt)} prompt tokens, expected at most {self.context} (the server's context)")
        encoded = encode_each(prompts, self.model.tokenizer, self.text_limit)
        for number, ids in enumerate(encoded):
            check_ids(number, ids, self.model.verifier.vocab_size)
        return encoded

    def compile(self, constraint: Constraint, run: Run) -> AutomatonTable:
        """Returns the automaton of a constraint. Raises the ValueErrors of `compile_constraint`."""
        model = self.model
        size, depth = model.verifier.vocab_size, self.config.schema_depth
        return compile_constraint(constraint, model.tokenizer, model.stop_ids, size, depth, run)

    def make_requests(self, prompts: Sequence[list[int]], **settings: Any) -> list[Request]:
        """Returns the requests that `TreeFlash.generate` would make, but with new numbers and, by default, a random seed.

        Their constraints are not compiled. Raises ValueError for wrong settings, for more tokens than the context, and for
        any constraint if the server supports none.
        """
        for kind in CONSTRAINT_NAMES:
            if kind in settings:
                expect(self.sizes.automaton is not None, kind, settings[kind], "none: this server follows no constraints")
        longest = max(map(len, prompts))
        max_new_tokens = settings.setdefault("max_new_tokens", max(1, self.context - longest))
        if longest + max_new_tokens > self.context:
            got = f"{longest} prompt tokens + {max_new_tokens} new tokens"
            raise ValueError(f"got {got}, expected at most {self.context} together (the server's context)")
        settings = {"seed": secrets.randbits(32)} | settings
        _, requests = self.model.settings_and_requests(list(prompts), self.config, **settings)
        for request in requests:
            num_stop_ids, num_biases = len(request.settings.stop_ids), len(request.settings.logit_bias or ())
            expect(num_stop_ids <= MAX_STOP_IDS, "number of stop_ids", num_stop_ids, f"at most {MAX_STOP_IDS}")
            expect(num_biases <= MAX_BIASES, "number of bias", num_biases, f"at most {MAX_BIASES}")
        return [replace(request, number=next(self._numbers)) for request in requests]

    def add_automata(self, requests: Sequence[Request], automata: Mapping[Constraint, AutomatonTable]) -> list[Request]:
        """Returns requests with the automata of their constraints. Raises ValueError for an automaton above the sizes."""
        for automaton in automata.values():
            states, classes = automaton.next_qc.shape
            max_states, max_classes, _ = self.sizes.automaton
            expected = f"at most {max_states}: start the server with --schema-states"
            expect(states <= max_states, "states of a schema", states, expected)
            expect(classes <= max_classes, "kinds of tokens of a constraint", classes, f"at most {max_classes}")
        return [replace(request, automaton=automata.get(request.constraint)) for request in requests]
