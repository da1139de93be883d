"""A task small enough to be written out: a regression with noise."""

import jax
import jax.numpy as jnp
import numpy as np

from train.runtime import training_state
from train.runtime.run_config import OptimizerConfig
from treeflash_jax.core.parameters import Spec

WIDTH, BATCH, SEED = 8, 16, 3
SPECS = {"gate": Spec((WIDTH, 4), ("embed", "ffn"), inputs=(0,), outputs=(1,)), "scale": Spec((4,), (None,))}
FROZEN = {"offset": Spec((WIDTH,), ("embed",))}
OPTIMIZER = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, clip=1.0, warmup=0.25, final=0.1)


def sums(params, frozen, batch, keys_b):
    """A regression with noise: a loss per sequence, weighted, and a metric per output."""
    x_bd = batch.tokens_bt / 64 + frozen["offset"]
    y_bf = (x_bd @ params["gate"]) * params["scale"]
    noise_b = jax.vmap(jax.random.uniform)(keys_b)
    loss_b, weight_b = jnp.sum((y_bf - 1) ** 2, axis=1) * (1 + noise_b), batch.weights_bt[:, 1]
    return {"loss": (jnp.sum(loss_b * weight_b), jnp.sum(weight_b)), "y": (jnp.sum(y_bf, 0), jnp.full(4, len(y_bf), float))}


TASK = training_state.TrainTask(specs=SPECS, frozen_specs=FROZEN, sums=sums, compute_dtype=jnp.float32, flops=1e6)


def weights():
    rng = np.random.default_rng(0)
    params = {"gate": rng.normal(size=(WIDTH, 4)), "scale": rng.normal(size=4)}
    return jax.tree.map(np.float32, params), {"offset": rng.normal(size=WIDTH).astype(np.float32)}
