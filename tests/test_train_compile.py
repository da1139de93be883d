"""Compiling a step without weights: the numbers it prints are those of the program."""

import json

import jax
import jax.numpy as jnp
import pytest

from train import compile as compiling
from treeflash_jax.bench import shapes
from treeflash_jax.config import DrafterConfig

HEAD = "configs/qwen3-4b/head.toml"
SMALL = ["data.row_tokens=32", "objective.anchors=4", "objective.chunk=2", "loop.batch=8"]


@pytest.fixture
def small_shape(monkeypatch):
    import dataclasses

    sizes = dict(vocab_size=256, hidden_size=32, intermediate_size=64, num_layers=6, num_heads=8, head_dim=8)
    small = dataclasses.replace(shapes.VERIFIERS["qwen3-4b"], **sizes)
    monkeypatch.setitem(shapes.VERIFIERS, "small", small)


def test_collectives_are_counted_with_their_trips():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def body(x):
        return jax.lax.scan(lambda total, _: (total + jax.lax.psum(x, "x") * total.mean(), None), x, length=5)[0]

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=False))
    found = compiling.collectives(program.lower(jnp.ones((8, 16))).compile().as_text())
    assert found in ({"all-reduce": {"count": 5, "bytes": 5 * 64}}, {"all-reduce": {"count": 1, "bytes": 64}})
    assert compiling.collectives(jax.jit(jnp.sin).lower(jnp.ones(3)).compile().as_text()) == {}


def test_a_step_compiles_for_the_devices_at_hand(small_shape, tmp_path, capsys):
    out = tmp_path / "compiled.json"
    out.write_text('{"earlier": {}}')
    words = ["--shape", "small", "--out", str(out), HEAD, *SMALL, "mesh.data=2", "mesh.fsdp=2", "mesh.model=2"]
    assert compiling.main(words) == 0
    results = json.loads(out.read_text())
    (result,) = (results[key] for key in results if key != "earlier")
    assert result["mesh"] == {"data": 2, "fsdp": 2, "model": 2} and result["trains"] == ["backbone", "head"]
    assert result["collectives"]["all-gather"]["count"] > 0
    assert result["bytes_per_chip"]["total"] > result["bytes_per_chip"]["temporary"] > 0
    assert "bytes per chip" in capsys.readouterr().out
    # Masters and both moments lie over all devices but the data axis: a quarter of them on each.
    assert compiling.main(["--shape", "small", HEAD, *SMALL, "mesh.data=8"]) == 0
    replicated = capsys.readouterr().out
    assert "mesh {'data': 8, 'model': 1}" in replicated


def test_errors_are_one_line(small_shape, capsys):
    for words, message in (
        (["--shape", "huge", HEAD], "got shape 'huge'"),
        (["--shape", "small", HEAD, *SMALL, "loop.batch=3"], "expected a multiple"),
        (["--shape", "small"], "the following arguments"),
        (["--shape", "small", "loop.batch=3"], "expected one TOML file"),
    ):
        try:
            assert compiling.main(words) == 1
        except SystemExit as error:
            assert error.code
        error = capsys.readouterr().err
        assert message in error


def test_named_shapes_are_those_published():
    own = shapes.drafter_of(shapes.named("qwen3-4b"))
    assert isinstance(own, DrafterConfig) and own.target_layer_ids == (1, 9, 17, 25, 33)
    own.check_fits(shapes.named("qwen3-4b"))
    for name, billions in (("qwen3-0.6b", 0.596), ("qwen3-4b", 4.022), ("qwen3-8b", 8.19), ("llama-3.1-8b", 8.03)):
        from treeflash_jax import params, verifier

        leaves = jax.tree.leaves(verifier.specs(shapes.named(name)), is_leaf=params.is_spec)
        count = sum(int(jnp.prod(jnp.array(spec.shape, dtype=jnp.float32))) for spec in leaves)
        assert count / 1e9 == pytest.approx(billions, rel=0.01)
