"""Generation as users meet it: prompts in, texts and statistics out; batching, streaming, checks before any compute."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeflash_jax import decode as core
from treeflash_jax import hf
from treeflash_jax import mesh as meshes
from treeflash_jax.config import DrafterConfig, HeadName, ModelConfig
from treeflash_jax.decode import DecodePlan, DecodeState, Method, Sampling, Weights
from treeflash_jax.heads import DraftSettings
from treeflash_jax.tokenizer import Chat, Tokenizer

Prompt = str | Sequence[int] | Chat
PREFILL_CHUNK = 128
ROOM_AHEAD = 1024  # new tokens a cache is made for at first; longer answers grow it
STOP_SLOTS = 8  # stop ids per row are padded to a multiple of this, so that changing them rarely recompiles
LOW_TAU, LOW_TAU_ROUNDS = 1.2, 50
# Named so that asking for them is an answer, not a silent difference.
REFUSED = {
    "repetition_penalty": "penalties change the verifier's distribution with every token",
    "presence_penalty": "penalties change the verifier's distribution with every token",
    "frequency_penalty": "penalties change the verifier's distribution with every token",
    "num_beams": "beam search does not sample from the verifier",
    "grammar": "constrained decoding needs a mask per tree node",
    "min_p": "only temperature, top-k and top-p are implemented",
}


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Settings of one call.

    Attributes:
      max_new_tokens: at most so many generated tokens, the stop token included.
      method: "tree", "walk" (greedy chain), "chain" (the published rank-0 chain), "ar" (one token at a time).
      nodes: verified rows a round, root included; the drafter's default if None.
      candidates: previous tokens per depth (M).
      children: children kept per transition row (K).
      head: "mlp", "linear" or "marginal"; the drafter's own if None.
      temperature: of the verifier; 0 is greedy. One value, or one per prompt.
      top_k: keep the k likeliest tokens; 0 keeps all.
      top_p: keep the likeliest tokens of this mass; 1 keeps all.
      drafter_temperature: sharpens or flattens the draft, never the output; the drafter's default if None.
      seed: one value, or one per prompt. Row i draws from fold_in(seed, i).
      stop_ids: ids that end an answer; None: the model's own.
      batch_size: rows decoded together; None: all prompts, 8 at most.
      log_probs: keep the verifier's log-probability of every token.
    """

    max_new_tokens: int = 128
    method: Method = "tree"
    nodes: int | None = None
    candidates: int = 16
    children: int = 16
    head: HeadName | None = None
    temperature: float | Sequence[float] = 0.0
    top_k: int | Sequence[int] = 0
    top_p: float | Sequence[float] = 1.0
    drafter_temperature: float | None = None
    seed: int | Sequence[int] = 0
    stop_ids: Sequence[int] | None = None
    batch_size: int | None = None
    log_probs: bool = False


@dataclass(frozen=True, kw_only=True)
class Result:
    """One answer.

    Attributes:
      prompt_ids: what was read.
      ids: generated ids, the stop token included.
      text: decoded without special tokens; None where there is no tokenizer.
      accept_lengths: tokens committed per round, bonus included. The token that prefill yields is in no entry, and the last
        round counts in full even where the answer was cut.
      finished: "stop" (a stop id) or "length".
      seconds: decoding time of the batch this row was in, compilation excluded, prefill included.
      compile_seconds: spent compiling for this call.
      tokens_per_second: generated tokens of the batch over `seconds`.
      log_probs: of every generated token under the verifier (temperature 1, no filters), if asked for.
    """

    prompt_ids: list[int]
    ids: list[int]
    text: str | None
    accept_lengths: list[int]
    finished: str
    seconds: float
    compile_seconds: float
    tokens_per_second: float
    log_probs: list[float] | None = None

    @property
    def tau(self) -> float:
        """Block efficiency: mean tokens committed per round, bonus included; 1 where there was no round."""
        return sum(self.accept_lengths) / len(self.accept_lengths) if self.accept_lengths else 1.0


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """New tokens of one row while streaming: `ids` since the last chunk, `text` where it is already certain."""

    ids: list[int]
    text: str
    rounds: int


class TreeFlash:
    """A verifier and its drafter, ready to generate.

    Example:
      >>> import treeflash_jax as tf
      >>> model = tf.load("tiny")
      >>> result = model.generate(["Tom has 3 apples and buys 4 more. How many apples does he have?"])[0]
      >>> print(result.text, result.tau)
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
    ):
        self.verifier = verifier
        self.drafter = drafter
        self.weights = weights
        self.tokenizer = tokenizer
        self.stop_ids = tuple(sorted({*stop_ids, *(tokenizer.stop_ids if tokenizer else ())}))
        self.mesh = mesh
        self.programs: dict[Any, Callable] = {}

    def generate(self, prompts: Prompt | Sequence[Prompt], config: GenerateConfig | None = None, **settings: Any):
        """Answers every prompt.

        Args:
          prompts: strings, lists of ids, or chats (lists of {"role", "content"}); a list of them, or one.
          config: settings; keyword arguments override single ones.
          **settings: fields of GenerateConfig.

        Returns:
          A list of Result in the order of the prompts.

        Raises:
          ValueError: settings or prompts that cannot be served, before any compute.
        """
        config = self._config(config, settings)
        ids = [self.encode(prompt) for prompt in _as_list(prompts)]
        rows = self._rows(ids, config)
        plan = self.plan(config)
        size = config.batch_size or min(8, len(ids))
        results: list[Result] = []
        for at in range(0, len(ids), size):
            results += self._generate_batch(rows[at : at + size], size, plan, config)
        _warn_if_wiring_looks_wrong(results, plan)
        return results

    def stream(
        self, prompt: Prompt, config: GenerateConfig | None = None, *, rounds_per_dispatch: int = 4, **settings: Any
    ) -> Iterator[Chunk | Result]:
        """Yields Chunks of one answer as rounds finish, then its Result.

        The same tokens as `generate` gives, whatever `rounds_per_dispatch`.
        """
        config = self._config(config, settings)
        row = self._rows([self.encode(prompt)], config)
        if rounds_per_dispatch < 1:
            raise ValueError(f"got rounds_per_dispatch {rounds_per_dispatch}, expected at least 1")
        plan = self.plan(config)
        sent, shown = row[0].length, ""
        for state, clock in self._run(row, 1, plan, config, rounds_per_dispatch):  # noqa: B007 (the last clock is used)
            end, rounds, done = (np.asarray(x)[0] for x in (state.end_b, state.rounds_b, state.done_b))
            ids = np.asarray(state.tokens_bs)[0, row[0].length : end].tolist()
            text = self._decode(ids) or ""
            if not done:  # the last bytes may be half a character, or change with the next token
                text = text[: max(len(shown), len(text) - 1)] if text.endswith("\ufffd") else text
            yield Chunk(ids=ids[sent - row[0].length :], text=text[len(shown) :], rounds=int(rounds))
            sent, shown = end, text
        yield self._results(state, row, config, clock)[0]

    def encode(self, prompt: Prompt) -> list[int]:
        """Ids of a prompt. Strings and chats need a tokenizer; strings are taken as they are, chats through the template.

        Raises:
          ValueError: an empty prompt, or text without a tokenizer.
        """
        if isinstance(prompt, str) or (len(prompt) and isinstance(prompt[0], dict)):
            if self.tokenizer is None:
                raise ValueError("got text, but the verifier's folder has no tokenizer.json; give ids instead")
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else self.tokenizer.encode_chat(prompt)
        else:
            ids = [int(i) for i in prompt]
        if not ids:
            raise ValueError("got an empty prompt, expected at least one token")
        return ids

    def plan(self, config: GenerateConfig) -> DecodePlan:
        """The compiled program's shape for these settings."""
        if config.method == "ar":
            return DecodePlan(
                verifier=self.verifier,
                method="ar",
                num_nodes=1,
                log_probs=config.log_probs,
                prefill_chunk=PREFILL_CHUNK,
            )
        nodes = config.nodes or self.drafter.num_nodes
        return DecodePlan(
            verifier=self.verifier,
            drafter=self.drafter,
            method=config.method,
            head=config.head or self.drafter.head,
            num_nodes=nodes if config.method == "tree" else min(config.nodes or nodes, self.drafter.block_size),
            draft=DraftSettings(candidates=config.candidates, children=config.children),
            log_probs=config.log_probs,
            prefill_chunk=PREFILL_CHUNK,
        )

    def _config(self, config: GenerateConfig | None, settings: dict[str, Any]) -> GenerateConfig:
        for name in settings:
            if name in REFUSED:
                raise ValueError(f"{name} is not supported: {REFUSED[name]}")
            if name not in GenerateConfig.__dataclass_fields__:
                raise ValueError(
                    f"got unknown setting {name!r}, expected one of {list(GenerateConfig.__dataclass_fields__)}"
                )
        config = replace(config or GenerateConfig(), **settings)
        vocabulary = self.verifier.vocab_size

        def expect(ok: bool, what: str, got: Any, expected: str) -> None:
            if not ok:
                raise ValueError(f"got {what} {got}, expected {expected}")

        expect(config.max_new_tokens >= 1, "max_new_tokens", config.max_new_tokens, "at least 1")
        methods = ("ar", *core.BUILDER_OF_METHOD)
        expect(config.method in methods, "method", repr(config.method), f"one of {methods}")
        if config.method != "ar":
            expect(self.drafter is not None, "method", repr(config.method), "'ar', since no drafter is loaded")
            expect(config.nodes is None or config.nodes >= 1, "nodes", config.nodes, "at least 1 (the root counts)")
            for name in ("candidates", "children"):
                value = getattr(config, name)
                expect(1 <= value <= vocabulary, name, value, f"1 to {vocabulary} (the vocabulary)")
            own = self.drafter.head
            expect(
                config.head in (None, "marginal", own),
                "head",
                repr(config.head),
                f"'marginal' or {own!r}, the drafter's",
            )
            t = config.drafter_temperature
            expect(t is None or t > 0, "drafter_temperature", t, "above 0")
        expect(config.batch_size is None or config.batch_size >= 1, "batch_size", config.batch_size, "at least 1")
        for value in _values(config.temperature):
            expect(value >= 0 and np.isfinite(value), "temperature", value, "0 (greedy) or more")
        for value in _values(config.top_k):
            expect(value >= 0, "top_k", value, "0 (all tokens) or more")
        for value in _values(config.top_p):
            expect(0 < value <= 1, "top_p", value, "above 0 and at most 1")
        for value in _values(config.seed):
            expect(0 <= value < 2**32, "seed", value, "0 to 2**32 - 1")
        for value in config.stop_ids or ():
            expect(0 <= value < vocabulary, "stop id", value, f"0 to {vocabulary - 1}")
        return config

    def _rows(self, prompts: list[list[int]], config: GenerateConfig) -> list[_Row]:
        if not prompts:
            raise ValueError("got no prompts, expected at least one")
        vocabulary, context = self.verifier.vocab_size, self.verifier.max_positions

        def each(values: Any, name: str) -> list[Any]:
            if not isinstance(values, Sequence | np.ndarray):
                return [values] * len(prompts)
            if len(values) != len(prompts):
                raise ValueError(f"got {len(values)} values of {name} for {len(prompts)} prompts, expected one per prompt")
            return list(values)

        settings = zip(*(each(getattr(config, n), n) for n in ("temperature", "top_k", "top_p", "seed")), strict=True)
        rows = []
        for index, (ids, (temperature, top_k, top_p, seed)) in enumerate(zip(prompts, settings, strict=True)):
            outside = [i for i in ids if not 0 <= i < vocabulary]
            if outside:
                raise ValueError(f"prompt {index}: got id {outside[0]}, expected 0 to {vocabulary - 1}")
            if len(ids) + config.max_new_tokens > context:
                raise ValueError(
                    f"prompt {index}: got {len(ids)} prompt tokens + {config.max_new_tokens} new tokens, "
                    f"expected at most {context} together (the verifier's context)"
                )
            rows.append(_Row(index, ids, temperature, top_k, top_p, seed))
        return rows

    def _generate_batch(self, rows: list[_Row], size: int, plan: DecodePlan, config: GenerateConfig) -> list[Result]:
        *_, (state, clock) = self._run(rows, size, plan, config, None)
        return self._results(state, rows, config, clock)

    def _run(
        self, rows: list[_Row], size: int, plan: DecodePlan, config: GenerateConfig, rounds: int | None
    ) -> Iterator[tuple[DecodeState, _Clock]]:
        """Prefill, then dispatches of `rounds` rounds (all of them if None); yields the state after each dispatch.

        The state is donated to the next dispatch: read it before asking for more.
        """
        longest = max(row.length for row in rows)
        capacity = capacity_bucket(longest + min(config.max_new_tokens, ROOM_AHEAD) + plan.path_rows + 1)
        inputs = self._inputs(rows, size, capacity, config)
        clock = _Clock()
        state = self._call(core.prefill, (self.weights, *inputs), clock, plan=plan.for_prefill())
        limit = jnp.int32(rounds if rounds is not None else np.iinfo(np.int32).max)
        while True:
            done = bool(np.all(np.asarray(state.done_b)))
            if done or rounds is not None:
                clock.stop()
                yield state, clock
                clock.start()
            if done:
                return
            if int(np.max(np.asarray(state.end_b))) + plan.path_rows > state.capacity:
                state = self._call(core.grow, (state,), clock, capacity=capacity_bucket(2 * state.capacity))
            state = self._call(core.decode, (self.weights, state, limit), clock, plan=plan)

    def _inputs(self, rows: list[_Row], size: int, capacity: int, config: GenerateConfig):
        """Padded arrays of a batch. Padding rows have a one-token prompt and are done after it."""
        if self.mesh is not None:
            ways = dict(self.mesh.shape)["data"]
            size = -(-size // ways) * ways
        spare = size - len(rows)
        tokens_bs = np.zeros((size, capacity), np.int32)
        for i, row in enumerate(rows):
            tokens_bs[i, : row.length] = row.ids
        stops = sorted(set(self.stop_ids if config.stop_ids is None else config.stop_ids))
        stop_ids_x = np.full(max(1, -(-len(stops) // STOP_SLOTS)) * STOP_SLOTS, -1, np.int32)
        stop_ids_x[: len(stops)] = stops
        default_t = self.drafter.drafter_temperature if self.drafter else 1.0
        drafter_t = config.drafter_temperature if config.drafter_temperature is not None else default_t
        dtype = jnp.promote_types(self.weights.verifier["embed"].dtype, jnp.float32)
        length_b = np.array([row.length for row in rows] + [1] * spare, np.int32)
        new_b = np.array([config.max_new_tokens] * len(rows) + [1] * spare, np.int32)
        seeds_b = np.array([row.seed for row in rows] + [0] * spare, np.uint32)
        index_b = np.array([row.index for row in rows] + [0] * spare, np.uint32)
        sampling = Sampling(
            key_b=_row_keys(seeds_b, index_b),
            temperature_b=jnp.asarray([row.temperature for row in rows] + [0.0] * spare, dtype),
            top_k_b=jnp.asarray([row.top_k for row in rows] + [0] * spare, jnp.int32),
            top_p_b=jnp.asarray([row.top_p for row in rows] + [1.0] * spare, dtype),
            limit_b=jnp.asarray(length_b + new_b),
            stop_ids_bx=jnp.asarray(np.broadcast_to(stop_ids_x, (size, stop_ids_x.size))),
            drafter_temperature=jnp.asarray(drafter_t, dtype),
        )
        return self._place((jnp.asarray(tokens_bs), jnp.asarray(length_b), sampling))

    def _place(self, batch: Any) -> Any:
        """Puts rows over the mesh's data axis; scalars everywhere."""
        if self.mesh is None:
            return batch

        def put(x: jax.Array) -> jax.Array:
            axes = ("batch",) + (None,) * (x.ndim - 1) if x.ndim else ()
            return jax.device_put(x, meshes.sharding(axes, x.shape, self.mesh))

        return jax.tree.map(put, batch)

    def _call(self, function: Any, args: tuple[Any, ...], clock: _Clock, **static: Any) -> Any:
        """Runs a compiled program, compiling it first (off the clock) where these shapes are new."""
        leaves, structure = jax.tree.flatten(args)
        shapes = tuple((x.shape, x.dtype, x.sharding) for x in leaves)
        key = (function, tuple(static.items()), structure, shapes)
        with jax.set_mesh(self.mesh) if self.mesh is not None else nullcontext():
            if key not in self.programs:
                with clock.compiling():
                    self.programs[key] = function.lower(*args, **static).compile()
            return self.programs[key](*args)

    def _results(self, state: DecodeState, rows: list[_Row], config: GenerateConfig, clock: _Clock) -> list[Result]:
        tokens_bs, end_b, rounds_b, accepted_bs = (
            np.asarray(x) for x in (state.tokens_bs, state.end_b, state.rounds_b, state.accepted_bs)
        )
        log_probs_bs = None if state.log_probs_bs is None else np.asarray(state.log_probs_bs)
        stops = set(self.stop_ids if config.stop_ids is None else config.stop_ids)
        new_tokens = sum(int(end_b[i]) - row.length for i, row in enumerate(rows))
        results = []
        for i, row in enumerate(rows):
            ids = tokens_bs[i, row.length : end_b[i]].tolist()
            results.append(
                Result(
                    prompt_ids=row.ids,
                    ids=ids,
                    text=self._decode(ids),
                    accept_lengths=accepted_bs[i, : rounds_b[i]].tolist(),
                    finished="stop" if ids[-1] in stops else "length",
                    seconds=clock.seconds,
                    compile_seconds=clock.compile_seconds,
                    tokens_per_second=new_tokens / max(clock.seconds, 1e-9),
                    log_probs=None if log_probs_bs is None else log_probs_bs[i, row.length : end_b[i]].tolist(),
                )
            )
        return results

    def _decode(self, ids: list[int]) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode(ids)


def load(
    name: str | None = None,
    *,
    verifier: str | Path | None = None,
    drafter: str | Path | None = None,
    mesh=None,
    dtype: Any = None,
) -> TreeFlash:
    """Loads a verifier and, if given, its drafter.

    Args:
      name: "tiny", the pair that ships with the package; or give folders.
      verifier: Hugging Face folder of a Qwen3 (dense) or Llama model.
      drafter: folder of a DFlash or TreeFlash drafter; None for plain decoding.
      mesh: a (data, model) mesh of `make_mesh`; None: one device.
      dtype: of weights, caches and activations; float32 on a CPU, bfloat16 elsewhere if None.

    Raises:
      ValueError: missing, damaged or mismatched files, one line each.
    """
    if name is not None:
        if name != "tiny" or verifier is not None or drafter is not None:
            raise ValueError(f"got name {name!r}, expected 'tiny' alone, or verifier= and drafter= folders")
        assets = resources.files("treeflash_jax") / "assets" / "tiny"
        verifier, drafter = Path(str(assets / "verifier")), Path(str(assets / "drafter"))
    if verifier is None:
        raise ValueError("got no verifier, expected 'tiny' or verifier=<folder>")
    dtype = dtype or (jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    drafter_config = None
    drafter_params = head_params = None
    if drafter is not None:  # the cheap checks first: no weight is read for a pair that does not fit
        drafter_json = Path(drafter) / "config.json"
        drafter_config = DrafterConfig.from_hf(hf.read_json(drafter_json), str(drafter_json))
        verifier_json = Path(verifier) / "config.json"
        drafter_config.check_fits(ModelConfig.from_hf(hf.read_json(verifier_json), str(verifier_json)))
        drafter_config, drafter_params, head_params = hf.load_drafter(drafter, dtype=dtype, mesh=mesh)
    config, verifier_params = hf.load_verifier(verifier, dtype=dtype, mesh=mesh)
    return TreeFlash(
        config,
        Weights(verifier_params, drafter_params, head_params),
        drafter=drafter_config,
        tokenizer=Tokenizer.load(verifier),
        stop_ids=hf.stop_ids(verifier, config),
        mesh=mesh,
    )


def capacity_bucket(positions: int) -> int:
    """The smallest cache capacity of the ladder 256, 384, 512, 768, 1024, 1536, ... that holds `positions`."""
    size = 256
    while size < positions:
        if size * 3 // 2 >= positions:
            return size * 3 // 2
        size *= 2
    return size


@dataclass(frozen=True)
class _Row:
    index: int
    ids: list[int]
    temperature: float
    top_k: int
    top_p: float
    seed: int

    @property
    def length(self) -> int:
        return len(self.ids)


class _Clock:
    """Decoding seconds, with compilation counted apart."""

    def __init__(self):
        self.seconds = self.compile_seconds = 0.0
        self.start()

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self._since

    def compiling(self):
        clock = self

        class Pause:
            def __enter__(self):
                clock.stop()
                self.since = time.perf_counter()

            def __exit__(self, *_):
                clock.compile_seconds += time.perf_counter() - self.since
                clock.start()

        return Pause()


@jax.jit
def _row_keys(seed_b: jax.Array, index_b: jax.Array) -> jax.Array:
    return jax.vmap(lambda seed, index: jax.random.fold_in(jax.random.key(seed), index))(seed_b, index_b)


def _as_list(prompts: Any) -> list[Any]:
    """One prompt or many: a string, a chat, or a list of ids is one."""
    if isinstance(prompts, str):
        return [prompts]
    prompts = list(prompts)
    if prompts and isinstance(prompts[0], int | np.integer | dict):
        return [prompts]
    return prompts


def _values(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence | np.ndarray) else [value]


def _warn_if_wiring_looks_wrong(results: list[Result], plan: DecodePlan) -> None:
    rounds = [length for result in results for length in result.accept_lengths]
    if plan.drafts and plan.num_nodes > 1 and len(rounds) >= LOW_TAU_ROUNDS:
        tau = sum(rounds) / len(rounds)
        if tau < LOW_TAU:
            warnings.warn(
                f"tau is {tau:.2f} over {len(rounds)} rounds, expected above {LOW_TAU}: a drafter that was trained for "
                "another verifier, revision or prompt format looks like this",
                stacklevel=3,
            )
