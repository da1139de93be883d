"""Rules by which `train.pair` chooses the sizes of a drafter, with reasons, and checks of values that users give."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from train.data.packing import Corpus
from train.runtime import hosts
from treeflash_jax.core import devices
from treeflash_jax.drafters.block.block_drafter import BlockConfig, default_target_layers, fresh_layers
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.models import layers
from treeflash_jax.models.config import ModelConfig

MOST_TAPS = 5  # as in the published drafters


@dataclass(frozen=True)
class Choice:
    """Value of a setting, and the reason for it in one clause."""

    value: Any
    reason: str


def mask_token(tokenizer: Tokenizer | None, counts_v: np.ndarray, stop_ids: tuple[int, ...] = ()) -> Choice:
    """Chooses the token that fills the open slots of a block: an unused one, or else the rarest.

    Tried in this order: unused special tokens named mask or reserved, ids past the tokenizer's last, other unused special
    tokens outside the chat template, and the rarest ordinary token.

    Args:
      tokenizer: the verifier's tokenizer; None if it has none.
      counts_v: occurrences of each token of the verifier's vocabulary in the training data.
      stop_ids: ids that end an answer.
    """
    inner = None if tokenizer is None else tokenizer.inner
    special = {} if inner is None else {i: t.content for i, t in inner.added_tokens_decoder.items() if t.special}
    template = str(getattr(inner, "chat_template", None) or "")
    roles = {*stop_ids, *(getattr(inner, f"{role}_token_id", None) for role in ("bos", "eos", "pad", "unk"))}
    unused = [i for i in np.flatnonzero(counts_v == 0).tolist() if i not in roles]
    free = [(i, f"{special[i]}, a token that no text has") for i in unused if i in special and special[i] not in template]
    named = [(i, reason) for word in ("mask", "reserved") for i, reason in free if word in special[i].lower()]
    past = [(i, "an id that no text has") for i in unused if inner is not None and i >= len(inner)]
    if candidates := [*named, *past, *free]:
        return Choice(*candidates[0])
    rarest = min((i for i in range(len(counts_v)) if i not in roles and i not in special), key=lambda i: (counts_v[i], -i))
    times = f"{counts_v[rarest]:,} times in the training data"
    return Choice(rarest, f"an ordinary token that occurs {times}, as no special token is unused")


def tapped_layers(num_layers: int) -> Choice:
    """Chooses the verifier layers that a drafter reads: up to five by the published rule."""
    taps = default_target_layers(num_layers, max(1, min(MOST_TAPS, num_layers - 3)))
    return Choice(taps, f"{len(taps)} of the verifier's {num_layers} layers by the published rule, the last near its end")


def drafter_layers(num_layers: int) -> Choice:
    count = min(MOST_TAPS, max(2, round(num_layers / 10)))
    return Choice(count, f"about a tenth of the verifier's {num_layers} layers, from 2 to {MOST_TAPS}")


def initial_layers(model: ModelConfig, count: int) -> Choice:
    """Chooses the verifier layers whose copies a backbone of `count` layers starts with."""
    if not _has_drafter_layers(model):
        return Choice((), "random, as the verifier's layers are of another kind")
    last = tuple(range(model.num_layers - count, model.num_layers))
    return Choice(last, "copies of the verifier's last layers, which train faster")


def _has_drafter_layers(model: ModelConfig) -> bool:
    return not model.num_experts and layers.layer_specs(fresh_layers(model, 1)).keys() == layers.layer_specs(model).keys()


def backbone(
    model: ModelConfig, tokenizer: Tokenizer | None, counts_v: np.ndarray, given: Mapping[str, Any]
) -> dict[str, Choice]:
    """Chooses the settings of a backbone and its head, but for those that are given: neither None nor empty.

    `counts_v` are the occurrences of each token of the verifier's vocabulary in the training data.
    """
    on_cpu = devices.here().is_cpu
    block = Choice(8, "every drafted slot costs time on a CPU") if on_cpu else Choice(16, "the published size")
    chosen = {
        "mask_token_id": mask_token(tokenizer, counts_v, model.eos_token_ids),
        "target_layer_ids": tapped_layers(model.num_layers),
        "block_size": block,
        "num_layers": drafter_layers(model.num_layers),
    }
    chosen |= {name: Choice(given[name], "as given") for name in chosen if given[name] not in (None, ())}
    chosen["initial_layers"] = initial_layers(model, chosen["num_layers"].value)
    return chosen | {"head": Choice("mlp", "TreeFlash's, trained with the backbone")}


def check_initial(initial_layers: Sequence[int], drafter: BlockConfig, model: ModelConfig) -> None:
    """Raises ValueError if the backbone's layers cannot start as copies of these verifier layers."""
    if not initial_layers:
        return
    got, count = f"got initial_layers {list(initial_layers)}", drafter.layers.num_layers
    if len(initial_layers) != count or max(initial_layers) >= model.num_layers:
        raise ValueError(
            f"{got}, expected {count} verifier layers from 0 to {model.num_layers - 1}, one for each layer of the backbone"
        )
    if not _has_drafter_layers(model):
        raise ValueError(f"{got}, expected none: the layers of this verifier are of another kind than a drafter's")


def check_taps(drafter: BlockConfig, model: ModelConfig) -> None:
    """Raises ValueError if all tapped layers are in the verifier's first half, as with the recipe of a smaller verifier."""
    if max(drafter.target_layer_ids) < model.num_layers // 2:
        raise ValueError(
            f"got target_layer_ids {list(drafter.target_layer_ids)}, all in the first half of the verifier's "
            f"{model.num_layers} layers, expected some that span it, such as {list(tapped_layers(model.num_layers).value)}"
        )


def check_mask(drafter: BlockConfig, model: ModelConfig, corpus: Corpus, tokenizer: Tokenizer | None) -> None:
    """Refuses a mask token that occurs in the training data, or warns if every other token does too."""
    counts_v = corpus.token_counts(model.vocab_size)
    count = int(counts_v[drafter.mask_token_id])
    if not count:
        return
    got = f"mask_token_id {drafter.mask_token_id}, which occurs {count:,} times in the training data"
    better = mask_token(tokenizer, counts_v, model.eos_token_ids)
    if not counts_v[better.value]:
        raise ValueError(f"got {got}, expected an unused token, such as {better.value} ({better.reason})")
    hosts.say(f"warning: got {got}, and every token does: it will be drafted poorly")
