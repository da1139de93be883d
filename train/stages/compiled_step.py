"""Memory and FLOPs of a training step, compiled for devices that need not be here: `treeflash bench memory --train`.

Needs neither weights nor data: sizes are those of a named shape, whatever verifier the settings name.
"""

from collections.abc import Sequence
from typing import Any

import jax

from train.runtime import hosts, training_state
from train.stages.drafting import DraftingStage, make_task
from train.stages.registry import read_stage
from treeflash_jax.bench import shapes
from treeflash_jax.core import parameters, sharding
from treeflash_jax.engine.settings.defaults import choose_training_attention


def read_settings(words: Sequence[str]) -> DraftingStage:
    """Returns the settings of a stage that trains a drafter: one TOML file, and words key=value."""
    names = [word for word in words if "=" not in word]
    if len(names) != 1:
        raise ValueError(f"got {len(names)} files, expected one TOML file of a stage that trains a drafter")
    return read_stage(names[0], [word for word in words if "=" in word])


def compile_step(settings: DraftingStage, shape: str, devices: Sequence[Any]) -> dict[str, Any]:
    """Compiles one training step of these settings for these devices; returns a record."""
    model = shapes.find_verifier(shape)
    mesh = hosts.make_mesh(settings.mesh, devices)
    start = shapes.find_drafter(model) if settings.starts_from else None
    task = make_task(settings, model, settings.drafter_config(model, start), mesh)
    hosts.check_batch(settings.loop.batch, settings.loop.accumulate, mesh)
    with sharding.ambient(mesh):
        batch = training_state.abstract_batch(settings.loop.batch, settings.data.sequence_length, mesh)
        steps = 1000
        transform = training_state.make_optimizer(settings.optimizer, steps, task.specs)
        state = training_state.abstract_state(task, transform, batch, mesh)
        frozen = parameters.abstract(task.frozen_specs, task.compute_dtype, mesh)
        accumulate = settings.loop.accumulate
        update = training_state.make_update(task, transform, steps=steps, seed=0, accumulate=accumulate, log_every=10)
        update = jax.jit(update, donate_argnums=0, out_shardings=jax.tree.map(lambda x: x.sharding, state))
        memory = update.lower(state, frozen, batch).compile().memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "shape": shapes.short_name(shape),
        "trains": list(settings.trains),
        "mesh": dict(mesh.shape),
        "batch": settings.loop.batch,
        "accumulate": accumulate,
        "sequence_length": settings.data.sequence_length,
        "attention": choose_training_attention(sharding.device(mesh), settings.attention),
        "bytes_per_device": {
            "state_and_weights": held,
            "temporary": memory.temp_size_in_bytes,
            "total": held + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes,
        },
        "flops_per_step": task.flops,
        "flops_per_device": task.flops / mesh.size,
        "jax": jax.__version__,
    }
