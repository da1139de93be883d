"""Joining the other processes of a job: signals, processes that are alone, and errors. JAX detects the job itself."""

import signal
from types import SimpleNamespace

import jax
import pytest
import toy_training
from jax._src import distributed, xla_bridge
from jax._src.clusters import cloud_tpu_cluster
from refusals import refused

from train.runtime import hosts

GIVEN = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}


@pytest.fixture
def cluster(monkeypatch):
    """Returns a function that joins in an environment and returns whether there are other processes."""
    service = SimpleNamespace(
        get_distributed_runtime_service=lambda *_, **__: None,
        get_distributed_runtime_client=lambda *_, **__: SimpleNamespace(connect=lambda: None),
        create_preemption_sync_manager=lambda: SimpleNamespace(initialize=lambda client: None),
    )
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(distributed, "_jax", service)
    for name in (*GIVEN, "TPU_SKIP_MDS_QUERY"):
        monkeypatch.delenv(name, raising=False)

    def join(environment, is_tpu_vm=False):
        state = distributed.State()
        monkeypatch.setattr(distributed, "global_state", state)
        monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", is_tpu_vm)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        hosts.connect()
        return jax.distributed.is_initialized()

    return join


def test_sigterm_ends_a_process(cluster):
    """JAX notes the signal in its own handler, which replaces the default."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert cluster(GIVEN) and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_one_process_on_one_machine_is_alone_without_a_network(cluster, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", None)
    monkeypatch.setattr("socket.getaddrinfo", None)
    assert not cluster({})
    assert not cluster({"JAX_NUM_PROCESSES": "1"}, is_tpu_vm=True)


def test_a_process_whose_devices_are_in_use_is_alone(cluster, monkeypatch):
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: True)
    tasks = {"JOB_ID": "4097", "STEP_NODELIST": "node[07-10]", "NTASKS": "4", "PROCID": "2", "LOCALID": "0"}
    assert not cluster({f"SLURM_{name}": value for name, value in tasks.items()})


def test_a_number_that_is_none_is_refused_by_its_name(cluster):
    refused(lambda: cluster({"JAX_NUM_PROCESSES": "two"}), "got JAX_NUM_PROCESSES 'two', expected an integer")


def test_processes_that_cannot_be_joined_are_one_error(cluster):
    """A worker whose metadata server does not answer, and one that lacks a variable, must not train alone."""
    place = {"GCE_METADATA_IP": f"localhost:{toy_training.free_port()}"}
    for environment, is_tpu_vm in ((place, True), ({"JAX_NUM_PROCESSES": "4"}, False)):
        with pytest.raises(ValueError, match="cannot be joined .*; set JAX_COORDINATOR_ADDRESS") as caught:
            cluster(environment, is_tpu_vm)
        assert "\n" not in str(caught.value)
