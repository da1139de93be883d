"""Processors of logits: biases, penalties, minimum lengths, the user's own function, and automata.

The text of a node is its sequence up to the root, followed by the tokens of its path. A node's logits are processed as
one-token decoding would process them after that text. Acceptance rules read only processed logits, so every rule is
lossless for the processed distribution. Drafters do not see processed logits.

The order is that of transformers: `logit_bias` (there `sequence_bias`), `repetition_penalty`, then vLLM's
`presence_penalty` and `frequency_penalty`, `min_new_tokens`, the user's processor, the automaton. Temperature and filters
follow (`acceptance.target`).

The compiled programs call a user's processor as `processor(logits_bnv, history)`; it returns logits. If all logits of a
position are -inf, the answer ends there. A processor is a jittable function, or a pytree with `__call__` whose arrays are
arguments of the programs: `jax.tree_util.Partial(function, *arrays)`, or a dataclass (`jax.tree_util.register_dataclass`).
A processor with a state has two more methods:

    start(tokens_bs, length_b): returns the state [b, ...] after each prompt.
    advance(state, tokens): returns the state after one more token; both have leading axes [b] or [b, n].

Shape suffixes: b batch, n tree nodes, i depth, s token slots, p emitted tokens, x entries of a list, v vocabulary.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treeflash_jax.core.checks import expect
from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.core.error_text import clipped
from treeflash_jax.decoding.state import Biases, Counts, DecodeState, Sampling
from treeflash_jax.models import vocab
from treeflash_jax.models.backend.indexing import pick
from treeflash_jax.trees import NO_TOKEN


@struct.dataclass
class History:
    """The text of every node, for a user's processor.

    Attributes:
      tokens_bs: prompt and answer up to the root; entries from `length_b` on are undefined.
      length_b: number of tokens of prompt and answer, the root included.
      path_bni: tokens of the path from depth 1 to the node; `NO_TOKEN` (2**31 - 1) after the node.
      state: state of the processor after each node, leading axes [b, n]; None if it has none.
    """

    tokens_bs: jax.Array
    length_b: jax.Array
    path_bni: jax.Array
    state: Any = None

    @property
    def last_bn(self) -> jax.Array:
        """The last token of each node's text."""
        root_b11 = pick(self.tokens_bs, self.length_b[:, None] - 1)[..., None]
        nodes = self.path_bni.shape[1]
        text_bni = jnp.concatenate([jnp.repeat(root_b11, nodes, axis=1), self.path_bni], axis=2)
        depth_bn1 = jnp.sum(self.path_bni != NO_TOKEN, axis=2, keepdims=True)
        return jnp.take_along_axis(text_bni, depth_bn1, axis=2)[..., 0]


@struct.dataclass
class Nodes:
    """Nodes of a tree, in the form that the processors of settings read.

    Attributes:
      state: state at the root; `state.sampling.numbers` has the settings of each sequence.
      path_bni: tokens of the path from depth 1 to each node; NO_TOKEN after the node.
      automaton_bn: state of the automaton after each node; None without one.
    """

    state: DecodeState
    path_bni: jax.Array
    automaton_bn: jax.Array | None


def is_needed(sampling: Sampling, processor: Any = None) -> bool:
    """Returns whether `process` changes logits."""
    has_numbers = any(names[0] in sampling.numbers for names in PROCESSORS)
    optional = sampling.biases, sampling.least_end_b, sampling.automaton, processor
    return has_numbers or any(setting is not None for setting in optional)


def init_processors(state: DecodeState, vocab_size: int, processor: Any = None) -> DecodeState:
    """Returns the state with the token counts and processor states after its prompts, as far as a processor needs them."""
    if PENALTIES[0] in state.sampling.numbers:
        is_prompt_bs = jnp.arange(state.capacity) < state.end_b[:, None]
        ids_bs = jnp.where(is_prompt_bs, state.tokens_bs, NO_TOKEN)
        none_bv = jnp.zeros((state.end_b.size, vocab_size), bool)
        in_prompt_bv = vocab.put(none_bv, ids_bs, jnp.ones_like(ids_bs, bool))
        state = state.replace(counts=Counts(in_prompt_bv, jnp.zeros(none_bv.shape, jnp.float32)))
    if has_state(processor):
        state = state.replace(processor_state=processor.start(state.tokens_bs, state.end_b))
    if state.sampling.automaton is not None:
        state = state.replace(automaton_b=state.sampling.automaton.start(state.tokens_bs, state.end_b))
    return state


def count_tokens(state: DecodeState, tokens_bp: jax.Array, kept_b: jax.Array, processor: Any = None) -> DecodeState:
    """Returns the state after the first `kept_b` of these tokens.

    Counts the tokens, and advances the states of the user's processor and of the automaton.
    """
    is_kept_bp = jnp.arange(tokens_bp.shape[1]) < kept_b[:, None]
    if state.counts is not None:
        ids_bp = jnp.where(is_kept_bp, tokens_bp, NO_TOKEN)
        counted_bp = _count_with(state.counts.in_answer_bv, ids_bp[:, None])[:, 0]
        in_answer_bv = vocab.put(state.counts.in_answer_bv, ids_bp, counted_bp)
        state = state.replace(counts=state.counts.replace(in_answer_bv=in_answer_bv))
    if has_state(processor):
        state = state.replace(processor_state=_advance(processor, state.processor_state, tokens_bp, is_kept_bp))
    if state.sampling.automaton is not None:
        after_b = _advance(state.sampling.automaton, state.automaton_b, tokens_bp, is_kept_bp)
        state = state.replace(automaton_b=after_b)
    return state


def process(logits_bnv: jax.Array, state: DecodeState, path_bni: jax.Array, processor: Any = None) -> jax.Array:
    """Returns the processed logits of the nodes with these paths (`trees.path_tokens`), in float32 at least."""
    with jax.named_scope("process"):
        logits_bnv = logits_bnv.astype(at_least_float32(logits_bnv.dtype))
        sampling = state.sampling
        automaton = sampling.automaton
        automaton_bn = None if automaton is None else _advance_nodes(automaton, state.automaton_b, path_bni)
        nodes = Nodes(state, path_bni, automaton_bn)
        if sampling.biases is not None:
            logits_bnv = _add_biases(logits_bnv, sampling.biases)
        for names, change in PROCESSORS.items():
            if names[0] in sampling.numbers:
                logits_bnv = change(logits_bnv, nodes)
        if sampling.least_end_b is not None:
            logits_bnv = _delay_end(logits_bnv, nodes)
        if processor is not None:
            history = History(state.tokens_bs, state.end_b, path_bni)
            if has_state(processor):
                history = history.replace(state=_advance_nodes(processor, state.processor_state, path_bni))
            logits_bnv = _check_logits(processor(logits_bnv, history), logits_bnv.shape, processor)
        if automaton is not None:
            logits_bnv = automaton.constrain(logits_bnv, automaton_bn)
        return logits_bnv


def _check_logits(returned: Any, shape: tuple[int, ...], processor: Any) -> jax.Array:
    """Returns the logits of a user's processor unchanged. Raises ValueError, while tracing, if they are not logits."""
    is_logits = getattr(returned, "shape", None) == shape and jnp.issubdtype(returned.dtype, jnp.floating)
    if not is_logits:
        is_array = hasattr(returned, "shape") and hasattr(returned, "dtype")
        got = f"{returned.dtype} {returned.shape}" if is_array else type(returned).__name__
        got = f"{got} from processor {processor_name(processor)}"
        raise ValueError(
            f"got {clipped(got, 160)}, expected logits {shape} of a floating dtype: b sequences, n nodes, v tokens"
        )
    return returned


def processor_name(processor: Any) -> str:
    """Returns the name of a processor: of the function, or of its class if it is no function."""
    function = getattr(processor, "func", processor)
    return getattr(function, "__name__", type(function).__name__)


def has_state(processor: Any) -> bool:
    return hasattr(processor, "advance")


def as_pytree(processor: Any) -> Any:
    """Returns a user's processor as a pytree of arrays.

    Raises ValueError for a processor that takes other arguments, or that has a state but is no pytree.
    """
    name = processor_name(processor)
    is_pytree = not jax.tree_util.all_leaves([processor])
    _check_arguments(name, processor, ("logits_bnv", "history"))
    if has_state(processor):
        expected = "a pytree (jax.tree_util.register_dataclass), since it has a state"
        expect(is_pytree, "processor", processor, expected)
        expect(hasattr(processor, "start"), "processor", name, "one with start(tokens_bs, length_b), since it has advance")
        _check_arguments(f"{name}.start", processor.start, ("tokens_bs", "length_b"))
        _check_arguments(f"{name}.advance", processor.advance, ("state", "tokens"))
    return jax.device_put(processor) if is_pytree else jax.tree_util.Partial(processor)


def _check_arguments(name: str, function: Any, arguments: tuple[str, ...]) -> None:
    """Raises ValueError for a user's function that cannot be called with these arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # functions written in C may have no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        got = clipped(f"{name}{signature}", 160)
        raise ValueError(f"got processor {got}, expected one that takes ({', '.join(arguments)})") from None


def _add_biases(logits_bnv: jax.Array, biases: Biases) -> jax.Array:
    return logits_bnv + vocab.put(_zeros(logits_bnv), biases.ids_bx, biases.added_bx)[:, None]


def _delay_end(logits_bnv: jax.Array, nodes: Nodes) -> jax.Array:
    """Returns logits without stop ids at nodes whose answer is too short, unless their automaton allows only the end."""
    state = nodes.state
    sampling = state.sampling
    length_bn = state.end_b[:, None] + jnp.sum(nodes.path_bni != NO_TOKEN, axis=2)
    is_short_bn = length_bn < sampling.least_end_b[:, None]
    never_bx = jnp.full(sampling.stop_ids_bx.shape, -jnp.inf, logits_bnv.dtype)
    endless_bnv = logits_bnv + vocab.put(_zeros(logits_bnv), sampling.stop_ids_bx, never_bx)[:, None]
    if sampling.automaton is not None:
        allowed_bnv = sampling.automaton.constrain(endless_bnv, nodes.automaton_bn)
        is_short_bn &= jnp.any(allowed_bnv > -jnp.inf, axis=-1)
    return jnp.where(is_short_bn[..., None], endless_bnv, logits_bnv)


def _zeros(logits_bnv: jax.Array) -> jax.Array:
    return jnp.zeros((logits_bnv.shape[0], logits_bnv.shape[2]), logits_bnv.dtype)


def _penalize_texts(logits_bnv: jax.Array, nodes: Nodes) -> jax.Array:
    """Returns penalised logits. Tokens of the text up to the root count, and the tokens of each node's path."""
    counts, path_bni = nodes.state.counts, nodes.path_bni
    penalties = [nodes.state.sampling.numbers[name] for name in PENALTIES]
    in_answer_bv = counts.in_answer_bv
    is_seen_bv = counts.in_prompt_bv | (in_answer_bv > 0)
    penalized_bnv = _penalize(logits_bnv, penalties, in_answer_bv[:, None], is_seen_bv[:, None])
    at_path_bni = vocab.take(logits_bnv, jnp.minimum(path_bni, logits_bnv.shape[-1] - 1))
    at_path_bni = _penalize(at_path_bni, penalties, _count_with(in_answer_bv, path_bni), jnp.bool_(True))
    return vocab.put(penalized_bnv, path_bni, at_path_bni)


def _penalize(logits: jax.Array, penalties: list[jax.Array], count: jax.Array, is_seen: jax.Array) -> jax.Array:
    """Returns logits [b, n, ...] after the penalties of transformers (repetition) and of vLLM (presence, frequency).

    Args:
      penalties: the three penalties of each sequence.
      count: number of times that the answer contains each token.
      is_seen: whether the prompt or the answer contains each token.
    """
    repetition, presence, frequency = [penalty_b[:, None, None].astype(logits.dtype) for penalty_b in penalties]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(is_seen, repeated, logits)
    return logits - frequency * count.astype(logits.dtype) - presence * (count > 0)


def _count_with(in_answer_bv: jax.Array, path_bni: jax.Array) -> jax.Array:
    """Returns how often the answer and the path contain each token of the path, [b, n, i]."""
    ids_bx = jnp.minimum(path_bni, in_answer_bv.shape[1] - 1).reshape(path_bni.shape[0], -1)
    in_path_bni = jnp.sum(path_bni[..., None] == path_bni[..., None, :], axis=-1)
    return vocab.take(in_answer_bv, ids_bx).reshape(path_bni.shape) + in_path_bni


PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
# Arithmetic of settings that are numbers, in the order in which it is applied, between biases and minimum lengths. A key
# names all settings that its function reads. A program contains the function if a request of its batch changes one of them.
PROCESSORS: dict[tuple[str, ...], Callable[[jax.Array, Nodes], jax.Array]] = {
    PENALTIES: _penalize_texts,
}


def _advance_nodes(processor: Any, root: Any, path_bni: jax.Array) -> Any:
    """Returns the states [b, n, ...] after the path of every node, given the states at the roots."""
    shape = path_bni.shape[:2]
    root = jax.tree.map(lambda x: jnp.broadcast_to(x[:, None], (*shape, *x.shape[1:])), root)
    return _advance(processor, root, path_bni, path_bni != NO_TOKEN)


def _advance(processor: Any, state: Any, tokens_xi: jax.Array, is_token_xi: jax.Array) -> Any:
    """Returns the states [x, ...] after reading the tokens along the last axis; x is one or two axes."""

    def step(state: Any, inputs: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        token_x, is_token_x = inputs

        def choose(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(jnp.expand_dims(is_token_x, range(is_token_x.ndim, old.ndim)), new, old)

        return jax.tree.map(choose, processor.advance(state, token_x), state), None

    # This is a loop because XLA's GPU compiler takes exponential time for a chain of gathers.
    tokens_ix = jnp.moveaxis(jnp.where(is_token_xi, tokens_xi, 0), -1, 0)
    return lax.scan(step, state, (tokens_ix, jnp.moveaxis(is_token_xi, -1, 0)))[0]
