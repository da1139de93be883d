"""A small network that scores delayed trees for a sequence's next round from the results of earlier rounds.

The trees are at most MOST buckets (branches, trunk, length), listed by increasing cost. selector_policy.py chooses one.
The network reads these of the paper's inputs:
  - the verifier's state at the last accepted node: the layers that the drafter taps (a language model without steering and
    n-grams tap none), one position before the anchor, whose own state is not computed yet;
  - there, the entropy of the verifier, that of the drafter, and their overlap sum_x min(p(x), q(x)) = 1 - L1 / 2. The
    drafter's distribution is known if the last tree drew children of that node; an indicator says whether it did;
  - the entropy of the drafter below the anchor, over the children that it keeps, and its largest probability;
  - context length, temperature and top-p.
It does not read the drafter's hidden states, which are opaque behind the drafter door; the two Kullback-Leibler
divergences, which are infinite where a filter cuts tokens that were drafted; nor round times, which are constants of the
training. Two inputs are not the paper's: the mean length of recent rounds (as for trunk="auto"), and the last length.

Shape suffixes: b batch, j tapped layers x model, s scalars, a buckets, d width.

Source: neural selector of delayed tree expansion (arXiv 2602.16994); float32, outside of the branches of a round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from treeflash_jax.core.checks import quoted
from treeflash_jax.core.parameters import Spec
from treeflash_jax.trees import Bucket
from treeflash_jax.trees.shape import MAX_NODES

MOST = 12  # buckets
WIDTH, WIDE, NARROW = 128, 512, 32
OBSERVED = ("verifier entropy", "drafter entropy", "overlap", "is known")  # at the last accepted node
SCALARS = (*OBSERVED, "entropy below the anchor", "largest probability", "log context", "temperature", "top-p")
SCALARS += ("recent mean", "last length")
EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class SelectorConfig:
    """Buckets of a selector, and the pair and rule that it was trained for.

    Attributes:
      buckets: sizes of trees, by increasing cost.
      width: width of the verifier's tapped features; 0: none.
      pair: digest of verifier and drafter (`calibration.pair_digest`).
      rule: acceptance rule.
    """

    buckets: tuple[Bucket, ...]
    width: int
    pair: str
    rule: str

    def __post_init__(self) -> None:
        if not 1 <= len(self.buckets) <= MOST:
            raise ValueError(f"got {len(self.buckets)} buckets, expected 1 to {MOST}")
        for bucket in self.buckets:
            if min(bucket.branches, bucket.trunk + 1, bucket.length + 1, bucket.nodes - 1) < 1:
                raise ValueError(f"got bucket {quoted(bucket)}, expected branches of at least 1, and a node to draft")
        if self.nodes > MAX_NODES:
            raise ValueError(f"got a bucket of {quoted(self.nodes)} nodes, expected at most {MAX_NODES}")

    @property
    def nodes(self) -> int:
        """Number of nodes of the largest tree, root included."""
        return max(bucket.nodes for bucket in self.buckets)

    def check_pair(self, pair: str, width: int) -> None:
        """Raises ValueError if the selector was trained for another pair, or for features of another width."""
        if pair != self.pair:
            raise ValueError(
                f"got a selector for the pair {quoted(self.pair)}, expected {quoted(pair)}; train a selector for it"
            )
        if width != self.width:
            raise ValueError(f"got a selector of width {self.width}, expected {width}, the pair's; train it again")


@struct.dataclass
class Features:
    """Inputs of the network, independent of the round's draws.

    Attributes:
      hidden_bj: the verifier's features at the last accepted node; zeros before the first round.
      scalars_bs: the values of SCALARS.
    """

    hidden_bj: jax.Array
    scalars_bs: jax.Array


def specs(config: SelectorConfig) -> dict[str, Spec]:
    """Returns the weights: hidden features to WIDTH and a LayerNorm, joined by the scalars, to WIDE, NARROW and scores."""
    count, joined = len(SCALARS), (WIDTH if config.width else 0) + len(SCALARS)
    shapes: dict[str, tuple[int, ...]] = {"mean": (count,), "scale": (count,)}
    shapes |= {"hidden": (config.width, WIDTH), "hidden_bias": (WIDTH,)} if config.width else {}
    shapes |= {"norm": (WIDTH,), "norm_bias": (WIDTH,)} if config.width else {}
    for name, shape in (("wide", (joined, WIDE)), ("narrow", (WIDE, NARROW)), ("out", (NARROW, len(config.buckets)))):
        shapes |= {name: shape, f"{name}_bias": shape[1:]}
    init = {"scale": "ones", "norm": "ones", "mean": "zeros"}
    return {
        name: Spec(shape, (None,) * len(shape), init.get(name, "zeros" if name.endswith("bias") else "normal"))
        for name, shape in shapes.items()
    }


def scores(params: Any, features: Features, *, dropout: float = 0.0, key: jax.Array | None = None) -> jax.Array:
    """Returns the scores of all buckets, [b, a].

    Args:
      dropout: share of hidden units dropped in training.
      key: random key of dropout; None: no dropout.
    """

    def drop(x_bd: jax.Array, layer: int) -> jax.Array:
        if key is None:
            return x_bd
        kept_bd = jax.random.bernoulli(jax.random.fold_in(key, layer), 1 - dropout, x_bd.shape)
        return jnp.where(kept_bd, x_bd / (1 - dropout), 0)

    with jax.named_scope("select"):
        x_bd = (features.scalars_bs - params["mean"]) * params["scale"]
        if "hidden" in params:
            hidden_bd = features.hidden_bj.astype(jnp.float32) @ params["hidden"] + params["hidden_bias"]
            hidden_bd -= jnp.mean(hidden_bd, axis=-1, keepdims=True)
            hidden_bd *= jax.lax.rsqrt(jnp.mean(jnp.square(hidden_bd), axis=-1, keepdims=True) + EPSILON)
            x_bd = jnp.concatenate([hidden_bd * params["norm"] + params["norm_bias"], x_bd], axis=-1)
        for layer, name in enumerate(("wide", "narrow")):
            x_bd = drop(jax.nn.gelu(x_bd @ params[name] + params[f"{name}_bias"]), layer)
        return x_bd @ params["out"] + params["out_bias"]
