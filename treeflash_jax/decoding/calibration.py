"""Measurements of `treeflash calibrate`: round times and committed tokens; and the buckets of a call, chosen by them.

A file contains one entry per pair, device, dtype, mesh and draft settings; an entry is valid only for exactly these.
Greedy rounds are timed. For each batch and number of cached positions that a round reads, times are fitted by the nearest
convex, increasing function of the nodes (least squares of relative errors), and interpolated linearly between batches and
positions, clamped at the ends. With a mixture of experts the first nodes cost most, since each reads more experts until
all are read: its times are fitted by an increasing function that need not be convex.

Source: CaDDTree, cost model.
"""

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

from treeflash_jax import drafters
from treeflash_jax.core import devices, files, sharding
from treeflash_jax.core.checks import checked, clipped, parse_json, quoted
from treeflash_jax.core.parameters import is_spec
from treeflash_jax.decoding.budget import PATIENCE, Measured
from treeflash_jax.decoding.state import DecodePlan, Weights
from treeflash_jax.models import quantized
from treeflash_jax.models.quantized import Quantized
from treeflash_jax.models.verifier import specs

FILE = "treeflash_budget.json"
MIN_SPEEDUP = 0.8  # speed on the calibration's prompts, relative to one-token decoding, below which nothing is drafted
NEARLY_BEST = 0.99  # share of the best speed; the largest tree that reaches it is drafted: it leaves the widest choice
SAMPLES = 8  # entries that a digest reads along each axis of a weight
MAX_TIME_RATIO = 0.97  # maximal time of a smaller bucket, relative to the next larger one; slower ones are left out


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measurements of one pair on one device.

    Attributes:
      identity: everything that the measurements depend on (`make_identity`).
      nodes: verified nodes of a round, root included, increasing.
      batch, positions: sequences decoded together, and cached positions that a round reads; increasing.
      round_seconds: seconds of a round that builds the largest tree and verifies a part, [batch][positions][nodes].
      tree_seconds: seconds of building a tree, [batch][positions][nodes].
      step_seconds: seconds of a one-token round, [batch][positions].
      temperatures: temperatures of the verifier, increasing.
      tau: mean number of tokens that a round commits, bonus included, [temperatures][nodes].
      reliability: ratio of accepted to expected tokens, roots excluded, [temperatures].
      sparse: whether the verifier is a mixture of experts.
    """

    identity: dict[str, Any]
    nodes: list[int]
    batch: list[int]
    positions: list[int]
    round_seconds: list[list[list[float]]]
    tree_seconds: list[list[list[float]]]
    step_seconds: list[list[float]]
    temperatures: list[float]
    tau: list[list[float]]
    reliability: list[float]
    sparse: bool = False

    def decide(self, batch: int, positions: int, temperatures: Sequence[float]) -> "Decision":
        """Returns the buckets of a call.

        Args:
          batch: number of sequences decoded together, padding included.
          positions: number of cached positions that the last of their rounds reads.
          temperatures: one per sequence.
        """
        fit = partial(fit_round_times, self.nodes, is_convex=not self.sparse)
        fitted_bcn = np.apply_along_axis(fit, 2, np.array(self.round_seconds))
        round_cn, tree_cn, step_c = (
            _interpolate(batch, self.batch, np.array(x)) for x in (fitted_bcn, self.tree_seconds, self.step_seconds)
        )
        round_n, tree_n, step = (_interpolate(positions, self.positions, x) for x in (round_cn, tree_cn, step_c))

        def seconds(largest: int) -> np.ndarray:
            """Returns seconds of rounds that build `nodes[largest]` nodes, by the number of them that is verified."""
            return (round_n - tree_n[-1] + tree_n[largest])[: largest + 1]

        # Buckets must not depend on a call's temperatures: changing these never recompiles.
        largest = 0
        for tau_n in np.array(self.tau):
            rates = [np.max(tau_n[: k + 1] / seconds(k)) for k in range(len(self.nodes))]
            largest = max(largest, max(k for k, rate in enumerate(rates) if rate >= NEARLY_BEST * max(rates)))
        kept = [largest]
        for k in reversed(range(largest)):
            if seconds(largest)[k] <= MAX_TIME_RATIO * seconds(largest)[kept[0]]:
                kept.insert(0, k)

        tau_n, reliability = (
            np.mean([_interpolate(t, self.temperatures, np.array(x)) for t in temperatures], axis=0)
            for x in (self.tau, self.reliability)
        )
        speedup = float(np.max(tau_n[kept] * step / seconds(largest)[kept]))
        measured = Measured(
            positions_c=np.array(self.positions),
            round_cn=(round_cn - tree_cn[:, -1:] + tree_cn[:, largest, None])[:, kept],
            step_c=step_c,
            reliability=reliability,
            debt=0.0 if speedup >= 1 else PATIENCE - 1,  # less patience if drafting did not quite pay
        )
        return Decision(tuple(self.nodes[k] for k in kept) if speedup >= MIN_SPEEDUP else (), measured, speedup)


@dataclass(frozen=True)
class Decision:
    """Buckets of a call.

    Attributes:
      nodes: number of nodes of each bucket, increasing; empty: one-token decoding.
      measured: measurements for `BudgetPolicy`.
      speedup: speed with the best bucket on the calibration's prompts, relative to one-token decoding.
    """

    nodes: tuple[int, ...]
    measured: Measured
    speedup: float


def fit_round_times(nodes: Sequence[int], seconds: Sequence[float], is_convex: bool = True) -> np.ndarray:
    """Returns the increasing (and with `is_convex`, convex) function with the least relative error, at the nodes.

    A constant plus hinges max(0, n - node), or steps [n > node] if it need not be convex, with weights of 0 or more.
    """
    from scipy.optimize import nnls

    x, y = np.asarray(nodes, float), np.asarray(seconds, float)
    beyond = np.maximum(0, x[:, None] - x[None, :-1])
    basis = np.concatenate([np.ones((x.size, 1)), beyond if is_convex else np.sign(beyond)], axis=1)
    scale = np.linalg.norm(basis, axis=0)  # for conditioning: hinges are in the hundreds, times in milliseconds
    weights, _ = nnls(basis / scale / y[:, None], np.ones(x.size))
    return basis / scale @ weights


def make_identity(weights: Weights, plan: DecodePlan, mesh: Any) -> dict[str, Any]:
    """Returns everything that round times and acceptance depend on: an entry of another identity is stale."""
    return {
        "pair": pair_digest(weights, plan),
        "device": devices.describe_mesh(mesh).kind,
        "mesh": None if mesh is None else dict(mesh.shape),
        "dtype": str(weights.dtype),
        "quantize": quantized.quantization_scheme(weights.verifier),
        "jax": jax.__version__,
        **drafters.get(plan.drafter).identity(plan.drafter, plan.draft),
        "attention": plan.attention,
    }


def pair_digest(weights: Weights, plan: DecodePlan) -> str:
    """Returns a digest of verifier and drafter, the same for every dtype, `quantize` and mesh they can be loaded with.

    It reads entries of every array: the digest of a verifier changes when a LoRA is merged into it.
    """
    pair = hashlib.sha256(repr((plan.verifier, getattr(plan.drafter, "layers", None), plan.drafter.taps)).encode())
    samples = jax.tree.map(lambda spec, x: _sample(x, spec.inputs), specs(plan.verifier), weights.verifier, is_leaf=is_spec)
    drafter = {name: tree for name, tree in weights.drafter.items() if name not in plan.drafter.lent}
    samples = samples, jax.tree.map(partial(_sample, inputs=()), drafter)
    for sample in jax.tree.leaves(sharding.to_host(samples)):
        pair.update(sample.tobytes())
    return pair.hexdigest()[:16]


@partial(devices.jit, static_argnames="inputs")
def _sample(weight: jax.Array | Quantized, inputs: tuple[int, ...]) -> jax.Array:
    """Returns about SAMPLES entries along each axis of an array, or of a matrix's int8 scales, rounded to bfloat16.

    Quantisation over the axes `inputs` (`Spec.inputs`) keeps the scales, and so the digest.
    """
    to_bfloat16 = partial(lax.reduce_precision, exponent_bits=8, mantissa_bits=7)
    is_quantized = isinstance(weight, Quantized)
    entries = (weight.scale if is_quantized else weight).astype(jnp.float32)
    if inputs and not (is_quantized and weight.dtype == jnp.bfloat16):
        peaks = entries * quantized.LARGEST if is_quantized else jnp.max(jnp.abs(entries), axis=inputs)
        entries = to_bfloat16(peaks) * (1 / quantized.LARGEST)
    entries = to_bfloat16(entries)
    return entries[tuple(slice(None, None, max(size // SAMPLES, 1)) for size in entries.shape)]


def default_path(drafter: str | Path | None) -> Path:
    """Returns the file of a drafter's calibrations: in its folder, if it is a local folder; else in the user's cache."""
    is_folder = drafter is not None and os.path.isdir(drafter)
    return (Path(drafter) if is_folder else files.user_cache()) / FILE


def read(path: Path) -> list[Calibration]:
    """Returns the entries of a file. Raises ValueError if it is missing or contains anything else."""
    try:
        return [checked(Calibration(**entry)) for entry in parse_json(files.regular(path).read_bytes())["entries"]]
    except FileNotFoundError:
        raise ValueError(f"{path} not found; nodes 'auto' needs the file that `treeflash calibrate` writes") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: got no calibration ({clipped(error, 120)}); calibrate again") from None


def find(path: Path, identity: dict[str, Any]) -> Calibration:
    """Returns the entry of this identity. Raises ValueError if there is none, with a difference from the nearest entry."""

    def differences(entry: Calibration) -> list[str]:
        return [name for name in identity | entry.identity if entry.identity.get(name) != identity.get(name)]

    nearest = min(read(path), key=lambda entry: len(differences(entry)), default=None)
    if nearest is None:
        raise ValueError(f"{path} contains no calibration; run `treeflash calibrate` with this pair")
    if names := differences(nearest):
        got, expected = (quoted(each.get(names[0])) for each in (nearest.identity, identity))
        raise ValueError(
            f"{path}: got a calibration for {names[0]} {got}, expected {expected}; "
            "run `treeflash calibrate` with this pair, device and settings"
        )
    return nearest


def write(path: Path, entry: Calibration) -> None:
    """Adds an entry to a file, replacing one of its identity. Raises ValueError if the file cannot be read or written."""
    others = [other for other in read(path) if other.identity != entry.identity] if path.exists() else []
    text = json.dumps({"entries": [asdict(entry) for entry in (*others, entry)]}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, text + "\n")
    except (OSError, ValueError) as error:
        reason = f"cannot write {path}: {error.strerror}" if isinstance(error, OSError) else error
        raise ValueError(f"{reason}; name a file with --out") from None


def _interpolate(x: float, points: Sequence[float], values: np.ndarray) -> np.ndarray:
    """Returns values at x along the first axis: linear between the points, clamped at the ends."""
    return np.apply_along_axis(lambda y: np.interp(x, points, y), 0, values)
