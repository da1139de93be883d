"""Footprints and limits of devices: pairs and requests that cannot fit are refused before weights are read or computed."""

from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import FOLDERS, PAIR, RANDOM_DRAFTER, RANDOM_MODEL, needs_8_devices, random_pair
from refusals import refused

import treeflash_jax as tf
from treeflash_jax.core import programs
from treeflash_jax.engine import device_memory, loading
from treeflash_jax.engine import model as engine
from treeflash_jax.engine.device_memory import Footprint, footprint, refuse_if_too_large, usable_memory
from treeflash_jax.engine.schedule import batching
from treeflash_jax.formats import model_files

MEMORY = {"/proc/meminfo": "MemTotal: 64 kB\nSwapTotal: 32 kB\n"}
LIMIT, SWAP_LIMIT = "memory.max", "memory.swap.max"
OLD_LIMIT, OLD_SUM = "memory/memory.limit_in_bytes", "memory/memory.memsw.limit_in_bytes"


@pytest.mark.parametrize("files, expected", [
    ({}, None), ({"/proc/meminfo": "MemTotal: 64 kB\n"}, 64), (MEMORY, 96), (MEMORY | {LIMIT: "max"}, 96),
    (MEMORY | {LIMIT: 8, SWAP_LIMIT: 0}, 8), (MEMORY | {LIMIT: 8, SWAP_LIMIT: 4}, 12),
    (MEMORY | {LIMIT: 8, SWAP_LIMIT: "max"}, 40),
    (MEMORY | {OLD_LIMIT: 2**50}, 96), (MEMORY | {OLD_LIMIT: 8}, 40), (MEMORY | {OLD_LIMIT: 8, OLD_SUM: 10}, 10),
])  # fmt: skip
def test_a_container_has_the_memory_and_the_swap_that_its_groups_allow(files, expected, monkeypatch):
    """Sizes in KiB. A group without a limit says "max" or, in the old files, a huge number."""

    def read(path, **_):
        name = str(path).removeprefix("/sys/fs/cgroup/")
        if name not in files:
            raise FileNotFoundError(name)
        return files[name] if isinstance(files[name], str) else f"{files[name] * 1024}\n"

    monkeypatch.setattr(device_memory.Path, "read_text", read)
    assert device_memory.host_memory.__wrapped__() == (expected and expected * 1024)


def test_impossible_pairs_are_refused_before_weights_are_read(monkeypatch):
    monkeypatch.setattr(model_files.ModelFiles, "load", lambda *_, **__: pytest.fail("weights were read"))
    configs = model_files.read_verifier_config(PAIR / "verifier"), model_files.read_drafter_config(PAIR / "drafter")
    needs = footprint(*configs, dtype=jnp.float32)
    monkeypatch.setattr(loading, "usable_memory", lambda mesh: needs.total - 1)
    shown = "got {:.2f} MiB verifier + {:.2f} MiB drafter = {:.2f} MiB"
    sizes = (size / 2**20 for size in (needs.verifier, needs.drafter, needs.total))
    refused(lambda: tf.load(**FOLDERS), shown.format(*sizes))
    monkeypatch.setattr(loading, "usable_memory", lambda mesh: needs.total)
    with pytest.raises(pytest.fail.Exception, match="weights were read"):
        tf.load(**FOLDERS)


@pytest.fixture
def no_compute(monkeypatch):
    """A request that is not refused fails with "computed"."""
    monkeypatch.setattr(programs, "call", lambda *_, **__: pytest.fail("computed"))


def computes(model, *prompts, **settings) -> None:
    with pytest.raises(pytest.fail.Exception, match="computed"):
        model.generate(list(prompts), **{"max_new_tokens": 8} | settings)


def test_impossible_requests_are_refused_before_any_compute(no_compute, monkeypatch, trained):
    needs = footprint(trained.verifier, trained.drafter, dtype=jnp.float32, batch=2, capacity=256)
    monkeypatch.setattr(engine, "usable_memory", lambda mesh: needs.total)
    words = "verifier + ", " drafter + ", " caches = ", " on a device of ", " (1 device)"
    monkeypatch.setattr(batching, "ROOM", 100)
    refused(lambda: trained.generate([[1], [2]], max_new_tokens=500), *words)
    refused(lambda: next(trained.stream([1], max_new_tokens=1000)), "caches")
    # Two sequences, and a third that takes a place.
    refused(lambda: trained.generate([[1]] * 6, batch_size=2, max_new_tokens=8), "smaller batch")
    computes(trained, [1], [2])
    computes(trained, *[[1]] * 6, batch_size=1)
    computes(trained, [1], max_new_tokens=200)
    # 256 positions grow to 512: while the caches are copied, both exist.
    refused(lambda: trained.generate([1], max_new_tokens=400), "caches")
    monkeypatch.setattr(engine, "usable_memory", lambda mesh: needs.total + needs.verifier_cache + needs.drafter_cache)
    computes(trained, [1], max_new_tokens=400)
    monkeypatch.setattr(engine, "usable_memory", lambda mesh: needs.total - needs.drafter_cache)
    computes(trained, [1], [2], builder="none")
    refused(lambda: trained.generate([[1], [2]], max_new_tokens=8, nodes=16), "caches")


@needs_8_devices
def test_a_mesh_shares_what_one_device_cannot_hold(no_compute, monkeypatch):
    request = {"dtype": jnp.float32, "batch": 4, "capacity": 256}
    mesh, alone = tf.make_mesh(4, 2), footprint(RANDOM_MODEL, RANDOM_DRAFTER, **request)
    shared = footprint(RANDOM_MODEL, RANDOM_DRAFTER, mesh=mesh, **request)
    refuse_if_too_large(shared, alone.total - 1, mesh)
    refused(lambda: refuse_if_too_large(shared, shared.total - 1, mesh), "(mesh 4 x 2)")
    asked = []
    monkeypatch.setattr(batching, "ROOM", 100)
    monkeypatch.setattr(engine, "usable_memory", lambda mesh: asked.append(mesh) or shared.total)
    model = random_pair(mesh)
    computes(model, [1], [1], [1])
    refused(lambda: model.generate([[1]] * 5, max_new_tokens=8), "mesh 4 x 2")  # five sequences are padded to eight
    assert asked == [mesh, mesh]


def test_limits_of_devices_that_say_and_of_kinds_that_are_known():
    def device(kind, limit=None, error=None):
        stats = Mock(return_value=limit and {"bytes_limit": limit}, side_effect=error)
        return SimpleNamespace(device_kind=kind, platform="any", memory_stats=stats)

    def limit(*devices):
        return usable_memory(SimpleNamespace(local_devices=devices, devices=np.array(devices)))

    gib, silent = 2**30, jax.errors.JaxRuntimeError("only supported for addressable devices")
    assert limit(device("NVIDIA H200", 100 * gib), device("NVIDIA L4", 18 * gib)) == 18 * gib
    for kind, size in (("TPU v4", 32), ("TPU v5 lite", 16), ("TPU v5", 95), ("TPU v6 lite", 32)):
        assert limit(device(kind, error=silent)) == size * gib and limit(device(kind, 3 * gib)) == 3 * gib
    assert limit(device("cpu")) is None
    refuse_if_too_large(Footprint(verifier=10**18), None)
    assert [device_memory.in_units(size) for size in (3 * gib // 2, gib // 2, 5 * 2**20, 1000)] == [
        "1.50 GiB", "0.50 GiB", "5.00 MiB", "0.98 KiB",
    ]  # fmt: skip
