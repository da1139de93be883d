"""Rules for what a recipe leaves open: mask token, tapped layers, number and start of layers, attention of training."""

import numpy as np

from treeflash_jax.core.devices import Device
from treeflash_jax.drafters.block.block_drafter import default_target_layers, fresh_layers
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.models import layers
from treeflash_jax.models.config import ModelConfig

MOST_TAPS = 5  # as in the published drafters


def mask_token(tokenizer: Tokenizer | None, counts_v: np.ndarray, stop_ids: tuple[int, ...] = ()) -> int:
    """Chooses the token that fills the open slots of a block: the rarest token of the training data.

    Among equally rare tokens, special tokens named mask come first, then special tokens named reserved, ids past the
    tokenizer's last, other special tokens, and ordinary tokens. Tokens that end answers or are in the chat template are
    left out.

    Args:
      counts_v: number of occurrences of each token of the verifier's vocabulary in the training data.
      stop_ids: ids that end an answer.
    """
    inner = None if tokenizer is None else tokenizer.inner
    special = {} if inner is None else {i: t.content for i, t in inner.added_tokens_decoder.items() if t.special}
    template = str(getattr(inner, "chat_template", None) or "")
    taken = {*stop_ids, *(getattr(inner, f"{role}_token_id", None) for role in ("bos", "eos", "pad", "unk"))}
    taken |= {token for token, name in special.items() if name in template}
    counts = counts_v.tolist()

    def order(token: int) -> tuple[int, int, int]:
        name = special.get(token, "").lower()
        kinds = ("mask" in name, "reserved" in name, inner is not None and token >= len(inner), bool(name), True)
        return counts[token], kinds.index(True), token

    return min((token for token in range(len(counts)) if token not in taken), key=order)


def tapped_layers(num_layers: int) -> tuple[int, ...]:
    """Chooses the verifier layers that a drafter reads: up to five, by the published rule."""
    return default_target_layers(num_layers, max(1, min(MOST_TAPS, num_layers - 3)))


def drafter_layers(num_layers: int) -> int:
    return min(MOST_TAPS, max(2, round(num_layers / 10)))


def initial_layers(verifier: ModelConfig, count: int) -> tuple[int, ...]:
    """Chooses the verifier layers that a backbone starts from as copies: the last ones, or none if their kind differs."""
    return tuple(range(verifier.num_layers - count, verifier.num_layers)) if has_drafter_layers(verifier) else ()


def has_drafter_layers(verifier: ModelConfig) -> bool:
    """Returns whether the verifier's layers have the same weights as a drafter's layers."""
    return not verifier.num_experts and layers.layer_specs(fresh_layers(verifier, 1)) == layers.layer_specs(verifier)


def attention(device: Device, requested: str = "auto") -> str:
    """Returns the requested attention implementation for packed sequences; for "auto", the device's kernel.

    cuDNN's kernel needs an Ampere GPU (compute capability 8.0) or newer. CPUs can run "splash" in the interpreter. Raises
    ValueError for a kernel of another device.
    """
    major = device.compute_capability.partition(".")[0]
    has_cudnn = major.isdecimal() and int(major) >= 8
    kernel = {"tpu": "splash", "gpu": "cudnn" if has_cudnn else None}.get(device.backend)
    if requested not in ("auto", "chunked", "splash" if device.is_cpu else kernel):
        raise ValueError(f"got attention {requested!r} on a {device.backend}, expected 'auto' or 'chunked'")
    if requested == "auto":
        return kernel or "chunked"
    return requested
