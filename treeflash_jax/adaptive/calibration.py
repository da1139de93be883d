"""What `treeflash calibrate` measured: times of rounds and what they commit, and what follows for a call.

A file holds one entry per pair, device, dtype, mesh and draft settings; an entry serves exactly what it was measured with.
Round times are fitted, for each batch and number of cached positions that a round reads, by the convex and increasing
function of the nodes that is nearest (least squares of relative errors), and taken linearly between batches and positions,
clamped at the ends. They are those of greedy rounds. The first nodes cost most with a mixture of experts, since each brings
experts of its own, until all are read: its times are fitted by an increasing function, convex or not.

Source: CaDDTree, cost model.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from treeflash_jax import devices, drafters, files, quantized
from treeflash_jax import mesh as meshes
from treeflash_jax.adaptive.budget import PATIENCE
from treeflash_jax.checks import bounded, checked, clipped, parse_json, quoted
from treeflash_jax.decoding.state import DecodePlan, Weights
from treeflash_jax.params import is_spec
from treeflash_jax.quantized import Quantized
from treeflash_jax.verifiers import forward
from treeflash_jax.verifiers.config import ModelConfig

SCHEMA = 2
FILE = "treeflash_budget.json"
WORTH_TRYING = 0.8  # of one-token speed: below it on the calibration's prompts, nothing is ever drafted
AS_GOOD = 0.99  # of the best speed: a larger tree that reaches it leaves more to choose from
SPREAD = 8  # entries that a digest reads along each axis of an array of weights
APART = 0.97  # of a larger bucket's time: a smaller bucket that takes more is left out


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """One pair on one device.

    Attributes:
      identity: what it was measured with (`identity_of`).
      nodes: rows a round verified, root included, increasing.
      batch, positions: rows decoded together, and positions of their caches that a round reads; increasing.
      round_seconds: of a whole round, [batch][positions][nodes], its tree built at the largest number of nodes and cut.
      tree_seconds: of building a tree of so many nodes, [batch][positions][nodes].
      step_seconds: of a one-token round, [batch][positions].
      temperatures: of the verifier, increasing.
      tau: tokens that rounds of so many nodes committed on prompts, bonus included, [temperatures][nodes].
      reliability: tokens committed over those drafted, both below the root, [temperatures].
      sparse: whether the verifier is a mixture of experts.
    """

    identity: dict[str, Any]
    nodes: list[int] = bounded(least=1)
    batch: list[int] = bounded(least=1)
    positions: list[int] = bounded(least=0)
    round_seconds: list[list[list[float]]] = bounded(above=0)
    tree_seconds: list[list[list[float]]] = bounded(least=0)
    step_seconds: list[list[float]] = bounded(above=0)
    temperatures: list[float] = bounded(least=0)
    tau: list[list[float]] = bounded(least=0)
    reliability: list[float] = bounded(least=0)
    sparse: bool = False

    def decide(self, batch: int, positions: int, temperatures: Sequence[float]) -> Decision:
        """How a call should decode.

        Args:
          batch: rows decoded together, padding included.
          positions: of their caches, read by the last of their rounds.
          temperatures: of the rows, one each.
        """
        fit = partial(fit_round_times, self.nodes, is_convex=not self.sparse)
        fitted_bcn = np.apply_along_axis(fit, 2, np.array(self.round_seconds))
        round_cn, tree_cn, step_c = (
            _between(batch, self.batch, np.array(x)) for x in (fitted_bcn, self.tree_seconds, self.step_seconds)
        )
        round_n, tree_n, step = (_between(positions, self.positions, x) for x in (round_cn, tree_cn, step_c))

        def seconds(largest: int) -> np.ndarray:
            """Of rounds that build `nodes[largest]` nodes and verify as many or fewer."""
            return (round_n - tree_n[-1] + tree_n[largest])[: largest + 1]

        # The same whatever the temperatures of a call, which must not compile anything.
        largest = 0
        for tau_n in np.array(self.tau):
            rates = [np.max(tau_n[: k + 1] / seconds(k)) for k in range(len(self.nodes))]
            largest = max(largest, max(k for k, rate in enumerate(rates) if rate >= AS_GOOD * max(rates)))
        kept = [largest]
        for k in reversed(range(largest)):
            if seconds(largest)[k] <= APART * seconds(largest)[kept[-1]]:
                kept.append(k)
        kept = kept[::-1]

        tau_n, reliability = (
            np.mean([_between(t, self.temperatures, np.array(x)) for t in temperatures], axis=0)
            for x in (self.tau, self.reliability)
        )
        speedup = float(np.max(tau_n[kept] * step / seconds(largest)[kept]))
        return Decision(
            buckets=tuple(self.nodes[k] for k in kept) if speedup >= WORTH_TRYING else (),
            positions=self.positions,
            round_seconds=(round_cn - tree_cn[:, -1:] + tree_cn[:, largest, None])[:, kept],
            step_seconds=step_c,
            reliability=float(reliability),
            speedup=speedup,
        )


@dataclass(frozen=True, kw_only=True)
class Decision:
    """How a call decodes.

    Attributes:
      buckets: that its rounds choose from; none: one token at a time, without a draft.
      positions, round_seconds [positions, buckets], step_seconds [positions]: what choices are made by.
      reliability, debt: to begin with, as in `budget.start`.
      speedup: over one-token decoding, on the calibration's prompts, every round taking the best bucket.
    """

    buckets: tuple[int, ...]
    positions: Sequence[int]
    round_seconds: np.ndarray
    step_seconds: np.ndarray
    reliability: float
    speedup: float

    @property
    def debt(self) -> float:
        """Less patience where drafting did not quite pay."""
        return 0.0 if self.speedup >= 1 else PATIENCE - 1


def fit_round_times(nodes: Sequence[int], seconds: Sequence[float], is_convex: bool = True) -> np.ndarray:
    """The increasing and, if wanted, convex function of the nodes that is nearest to the measured seconds, relatively.

    A constant plus hinges max(0, n - node), or steps [n > node], with weights of 0 or more: all such functions, piecewise
    linear between the measured nodes, and no other.
    """
    from scipy.optimize import nnls

    x, y = np.asarray(nodes, float), np.asarray(seconds, float)
    beyond = np.maximum(0, x[:, None] - x[None, :-1])
    basis = np.concatenate([np.ones((x.size, 1)), beyond if is_convex else np.sign(beyond)], axis=1)
    scale = np.linalg.norm(basis, axis=0)  # hinges are hundreds, times are milliseconds
    weights, _ = nnls(basis / scale / y[:, None], np.ones(x.size))
    return basis / scale @ weights


def identity_of(verifier: ModelConfig, weights: Weights, plan: DecodePlan, mesh: Any) -> dict[str, Any]:
    """Everything that round times and acceptance depend on: an entry of another identity is stale."""
    return {
        "pair": pair_of(verifier, weights, plan),
        "device": devices.of_mesh(mesh).kind,
        "mesh": None if mesh is None else dict(mesh.shape),
        "dtype": str(weights.verifier["embed"].dtype),
        "quantize": quantized.scheme_of(weights.verifier),
        "jax": jax.__version__,
        **drafters.of(plan.drafter).identity(plan.drafter, plan.draft),
        "attention": plan.attention,
    }


def pair_of(verifier: ModelConfig, weights: Weights, plan: DecodePlan) -> str:
    """Returns a digest of verifier and drafter, the same for every dtype, `quantize` and mesh they can be loaded with.

    It reads entries of every array: the digest of a verifier changes when a LoRA is merged into it.
    """
    pair = hashlib.sha256(repr((verifier, getattr(plan.drafter, "layers", None), plan.drafter.taps)).encode())
    spreads = jax.tree.map(
        lambda spec, x: _spread(x, spec.inputs), forward.specs(verifier), weights.verifier, is_leaf=is_spec
    )
    spreads = spreads, jax.tree.map(partial(_spread, inputs=()), weights.drafter)
    for spread in jax.tree.leaves(meshes.to_host(spreads)):
        pair.update(spread.tobytes())
    return pair.hexdigest()[:16]


@partial(devices.jit, static_argnames="inputs")
def _spread(weight: jax.Array | Quantized, inputs: tuple[int, ...]) -> jax.Array:
    """Returns about SPREAD entries along each axis of an array, rounded to bfloat16; of a matrix, of its scales in int8.

    Args:
      weight: of any dtype. Quantisation keeps a digest because it keeps the scales.
      inputs: axes over which a matrix has its scales (`Spec.inputs`).
    """
    narrow = partial(lax.reduce_precision, exponent_bits=8, mantissa_bits=7)
    is_quantized = isinstance(weight, Quantized)
    entries = (weight.scale if is_quantized else weight).astype(jnp.float32)
    if inputs and not (is_quantized and weight.dtype == jnp.bfloat16):
        peaks = entries * quantized.LARGEST if is_quantized else jnp.max(jnp.abs(entries), axis=inputs)
        entries = narrow(peaks) * (1 / quantized.LARGEST)
    entries = narrow(entries)
    return entries[tuple(slice(None, None, max(size // SPREAD, 1)) for size in entries.shape)]


def place(drafter: str | Path | None) -> Path:
    """Where a calibration is kept: in the drafter's folder, if a caller's own folder it is; else in the user's cache.

    The folder of an installed package or of the Hub's cache is not ours to write to.
    """
    if drafter is not None and os.path.isdir(drafter):
        return Path(drafter) / FILE
    return user_cache() / FILE


def user_cache() -> Path:
    """Where this package keeps what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treeflash"


def read(path: Path) -> list[Calibration]:
    """The entries of a file.

    Raises:
      ValueError: a file that is missing or holds anything else.
    """
    try:
        held = parse_json(files.regular(path).read_bytes())
        if held["schema"] != SCHEMA:
            raise ValueError(f"schema {quoted(held['schema'])}")
        return [_entry(raw) for raw in held["entries"]]
    except FileNotFoundError:
        raise ValueError(f"{path} not found; nodes 'auto' needs what `treeflash calibrate` writes") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path}: got no calibration of schema {SCHEMA} ({clipped(error, 120)}); calibrate again"
        ) from None


def _entry(raw: Any) -> Calibration:
    """Raises ValueError or TypeError where values or the shapes of tables are not those of a calibration."""
    made = checked(Calibration(**raw))
    rounds, tau = (len(made.batch), len(made.positions), len(made.nodes)), (len(made.temperatures), len(made.nodes))
    shapes = {
        "round_seconds": rounds,
        "tree_seconds": rounds,
        "step_seconds": rounds[:2],
        "tau": tau,
        "reliability": tau[:1],
    }
    for name, shape in shapes.items():
        if np.shape(getattr(made, name)) != shape or 0 in shape:
            raise ValueError(f"{name} of another shape than {list(shape)}")
    return made


def find(path: Path, identity: dict[str, Any]) -> Calibration:
    """The entry of this identity.

    Raises:
      ValueError: none is there; the nearest is named with the first thing that differs.
    """
    entries = read(path)
    for entry in entries:
        if entry.identity == identity:
            return entry

    def differences(entry: Calibration) -> list[str]:
        return [name for name in identity if entry.identity.get(name) != identity[name]]

    if not entries:
        raise ValueError(f"{path} holds no calibration; run `treeflash calibrate` with this pair")
    nearest = min(entries, key=lambda entry: len(differences(entry)))
    name = differences(nearest)[0]
    raise ValueError(
        f"{path}: got a calibration for {name} {quoted(nearest.identity.get(name))}, expected {quoted(identity[name])}; "
        "run `treeflash calibrate` with this pair, device and settings"
    )


def write(path: Path, entry: Calibration) -> None:
    """Adds an entry to a file, in place of one of the same identity.

    Raises:
      ValueError: a path that cannot be written, or a file that holds anything else.
    """
    others = [other for other in read(path) if other.identity != entry.identity] if path.exists() else []
    text = json.dumps({"schema": SCHEMA, "entries": [asdict(one) for one in (*others, entry)]}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, text + "\n")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"cannot write {path}: {reason}; name a file with --out") from None


def _between(x: float, points: Sequence[float], values: np.ndarray) -> np.ndarray:
    """Values at x along the first axis: linear between the points, clamped at the ends."""
    return np.apply_along_axis(lambda y: np.interp(x, points, y), 0, values)
