"""What `train.pair` chooses by rule, each choice with its reason, and checks of choices made by users."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from train import hosts
from train.data import Corpus
from treeflash_jax import devices
from treeflash_jax.drafters.block.config import DrafterConfig, default_target_layers, fresh_layers
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.verifiers import layers
from treeflash_jax.verifiers.config import ModelConfig

MOST_TAPS = 5  # of the published drafters
LAYERS_PER_DRAFTER_LAYER = 10


@dataclass(frozen=True)
class Choice:
    """A setting and, in one clause, why it is what it is."""

    value: Any
    reason: str


def mask_token(tokenizer: Tokenizer | None, counts_v: np.ndarray, stop_ids: tuple[int, ...] = ()) -> Choice:
    """A token for the open slots of a block: a reserved one that the training data does not have.

    In this order: a token called mask, one called reserved, a row of the vocabulary that the tokenizer has no text for,
    another special token that is not part of the chat template, and last the rarest ordinary token.

    Args:
      tokenizer: of the verifier; None where its ids have no text.
      counts_v: how often each id of the verifier's vocabulary occurs in the training data.
      stop_ids: ids that end an answer.
    """
    unused = counts_v == 0
    inner = None if tokenizer is None else tokenizer.inner
    names = {} if inner is None else {i: token.content for i, token in inner.added_tokens_decoder.items() if token.special}
    template = str(getattr(inner, "chat_template", None) or "")
    roles = {*stop_ids} | {
        getattr(inner, f"{role}_token_id", None) for role in ("bos", "eos", "pad", "unk") if inner is not None
    }
    free = {
        i: name for i, name in sorted(names.items())
        if i < len(unused) and unused[i] and i not in roles and name not in template
    }  # fmt: skip
    for word in ("mask", "reserved"):
        for i, name in free.items():
            if word in name.lower():
                return Choice(i, f"{name}, which the training data does not have")
    past = len(inner) if inner is not None else len(unused)
    for i in range(past, len(unused)):
        if unused[i] and i not in roles:
            return Choice(i, "a row of the vocabulary that no text has")
    for i, name in free.items():
        return Choice(i, f"{name}, a special token that the training data does not have")
    ordinary = [i for i in range(len(unused)) if i not in roles and i not in names]
    rarest = min(ordinary, key=lambda i: (counts_v[i], -i))
    times = f"{counts_v[rarest]:,} times in the training data"
    return Choice(rarest, f"an ordinary token that occurs {times}, as no special token is unused")


def tapped_layers(num_layers: int) -> Choice:
    """Verifier layers that a drafter reads: up to five by the published rule."""
    count = max(1, min(MOST_TAPS, num_layers - 3))
    taps = default_target_layers(num_layers, count)
    return Choice(taps, f"{len(taps)} of the verifier's {num_layers} layers by the published rule, the last near its end")


def drafter_layers(num_layers: int) -> Choice:
    count = min(MOST_TAPS, max(2, round(num_layers / LAYERS_PER_DRAFTER_LAYER)))
    return Choice(count, f"about a tenth of the verifier's {num_layers} layers, from 2 to {MOST_TAPS}")


def compute_dtype() -> Choice:
    device = devices.here()
    return Choice(device.dtype.name, device.dtype_reason)


def block_size() -> Choice:
    if devices.here().is_cpu:
        return Choice(8, "a CPU pays for every drafted slot")
    return Choice(16, "the published size")


def initial_layers(model: ModelConfig, count: int) -> Choice:
    """Verifier layers that a backbone of `count` layers starts from."""
    if not _has_layers_like(model):
        return Choice((), "random, as the verifier's layers are of another kind")
    return Choice(
        tuple(range(model.num_layers - count, model.num_layers)), "copies of the verifier's last layers, which train sooner"
    )


def _has_layers_like(model: ModelConfig) -> bool:
    """Whether the layers of a new drafter (`fresh_layers`) have the weights of this verifier's."""
    return not model.num_experts and layers.layer_specs(fresh_layers(model, 1)).keys() == layers.layer_specs(model).keys()


def check_initial(initial_layers: Sequence[int], drafter: DrafterConfig, model: ModelConfig) -> None:
    """Raises ValueError where the backbone's layers cannot start as copies of these layers of the verifier."""
    if not initial_layers:
        return
    got, count = f"got initial_layers {list(initial_layers)}", drafter.layers.num_layers
    if len(initial_layers) != count or max(initial_layers) >= model.num_layers:
        raise ValueError(
            f"{got}, expected {count} verifier layers from 0 to {model.num_layers - 1}, one for each layer of the backbone"
        )
    if not _has_layers_like(model):
        raise ValueError(f"{got}, expected none: the layers of this verifier are of another kind than a drafter's")


def check_taps(drafter: DrafterConfig, model: ModelConfig) -> None:
    """Raises ValueError where all tapped layers lie in the first half of the verifier, as a recipe of a smaller one has."""
    if max(drafter.target_layer_ids) < model.num_layers // 2:
        raise ValueError(
            f"got target_layer_ids {list(drafter.target_layer_ids)}, all in the first half of the verifier's "
            f"{model.num_layers} layers, expected some that span it, such as {list(tapped_layers(model.num_layers).value)}"
        )


def check_mask(drafter: DrafterConfig, model: ModelConfig, corpus: Corpus, tokenizer: Tokenizer | None) -> None:
    """Refuses a mask token that means something, and warns where every token does.

    Raises:
      ValueError: a mask token that occurs in the training data, where an unused one could be had.
    """
    counts_v = corpus.token_counts(model.vocab_size)
    count = int(counts_v[drafter.mask_token_id])
    if not count:
        return
    got = f"mask_token_id {drafter.mask_token_id}, which occurs {count:,} times in the training data"
    better = mask_token(tokenizer, counts_v, model.eos_token_ids)
    if not counts_v[better.value]:
        raise ValueError(f"got {got}, expected an unused token, such as {better.value} ({better.reason})")
    hosts.say(f"warning: got {got}, and every token does: it will be drafted poorly")
