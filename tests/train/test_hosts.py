"""Joining the other processes of a job by JAX's own detection, in the environments that it knows."""

import signal
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import jax
import pytest
import toy_training
from jax._src import distributed, xla_bridge
from jax._src.clusters import cloud_tpu_cluster

from train.runtime import hosts

SLURM = {
    "SLURM_JOB_ID": "4097", "SLURM_STEP_NODELIST": "node[07-10]", "SLURM_NTASKS": "4", "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "4096.0;tcp://10.96.0.1,10.148.0.1:34911", "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}  # fmt: skip
GIVEN = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}
GKE = {"TPU_SKIP_MDS_QUERY": "true", "TPU_WORKER_HOSTNAMES": "localhost,x", "TPU_WORKER_ID": "1"}
ENDPOINTS = "worker-network-endpoints"
WORKER = {"agent-worker-number": "2", ENDPOINTS: "a:1:localhost,b:2:x,c:3:y,d:4:z", "tpu-env": "ZONE: 'z'\n"}
SLICE = "MEGASCALE_COORDINATOR_ADDRESS: 'localhost:81'\nMEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\n"


@pytest.fixture
def cluster(monkeypatch):
    """Returns a function that joins in an environment and returns (coordinator, number of processes, id); None if alone."""
    calls = {}
    client = SimpleNamespace(connect=lambda: None)
    service = SimpleNamespace(
        get_distributed_runtime_service=lambda address, processes, **_: calls.update(processes=processes),
        get_distributed_runtime_client=lambda *joined, **_: calls.update(joined=joined) or client,
        create_preemption_sync_manager=lambda: SimpleNamespace(initialize=lambda client: None),
    )
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(distributed, "_jax", service)
    for name in (*GIVEN, "TPU_SKIP_MDS_QUERY"):
        monkeypatch.delenv(name, raising=False)

    def join(environment, is_tpu_vm=False, **how):
        state = distributed.State()
        monkeypatch.setattr(distributed, "global_state", state)
        monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", is_tpu_vm)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        hosts.connect(**how)
        return (*calls.get("joined", ()), state.num_processes) if jax.distributed.is_initialized() else None

    yield join
    for platform in ("cuda", "rocm"):  # on GPUs, JAX gives each task of Slurm and Open MPI one device
        jax.config.update(f"jax_{platform}_visible_devices", "all")


@pytest.mark.parametrize(
    "environment, joined",
    [(SLURM, ("node07:61441", 2, 4)), (OPEN_MPI, ("10.96.0.1:61441", 2, 4)), (GIVEN, ("10.0.0.1:1234", 2, 4))],
    ids=["Slurm", "Open MPI", "variables"],
)
def test_launchers_are_detected(cluster, environment, joined):
    assert cluster(environment) == joined


@contextmanager
def metadata_server(attributes):
    """Yields the value of GCE_METADATA_IP for a worker of a TPU pod, whose attributes a local server gives."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            value = attributes.get(self.path.rpartition("/")[2])
            self.send_response(404 if value is None else 200)
            self.end_headers()
            self.wfile.write((value or "").encode())

        def log_message(self, *_): ...

    with ThreadingHTTPServer(("localhost", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"localhost:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("attributes, environment, joined", [
    (WORKER, {}, ("localhost:8482", 2, 4)),
    (WORKER | {"tpu-env": SLICE}, {}, ("localhost:8482", 6, 8)),
    ({"tpu-env": ""}, GKE, ("localhost:8482", 1, 2)),
    (WORKER | {"agent-worker-number": "0", ENDPOINTS: "localhost"}, {}, ("localhost:8482", 0, 1)),
], ids=["pod", "two slices", "GKE", "one TPU machine"])  # fmt: skip
def test_tpu_machines_are_detected_by_their_metadata(cluster, attributes, environment, joined):
    with metadata_server(attributes) as address:
        assert cluster({"GCE_METADATA_IP": address} | environment, is_tpu_vm=True) == joined


@pytest.mark.parametrize("processes, how, ends", [
    ("4", {}, True), ("4", {"notes_sigterm": True}, False), (None, {"notes_sigterm": True}, True),
])  # fmt: skip
def test_sigterm_ends_a_process_unless_all_hosts_are_to_stop_at_one_step(cluster, monkeypatch, processes, how, ends):
    """JAX notes the signal in its own handler, which replaces the default, of one process too."""
    monkeypatch.setattr(jax, "process_count", lambda: int(processes or 1))
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert cluster(GIVEN | {"JAX_NUM_PROCESSES": "4"}, **how)
        assert (signal.getsignal(signal.SIGTERM) == signal.SIG_DFL) == ends
    finally:
        signal.signal(signal.SIGTERM, before)


def test_one_process_on_one_machine_is_alone_without_a_network(cluster, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", None)
    monkeypatch.setattr("socket.getaddrinfo", None)
    assert cluster({}) is None
    assert cluster({"JAX_NUM_PROCESSES": "1"}, is_tpu_vm=True) is None


def test_a_process_whose_devices_are_in_use_is_alone(cluster, monkeypatch):
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: True)
    assert cluster(SLURM) is None


def test_processes_that_cannot_be_joined_are_one_error(cluster):
    """A worker whose metadata server does not answer, and one that lacks a variable, must not train alone."""
    place = {"GCE_METADATA_IP": f"localhost:{toy_training.free_port()}"}
    for environment, is_tpu_vm in ((place, True), ({"JAX_NUM_PROCESSES": "4"}, False)):
        with pytest.raises(ValueError, match="cannot be joined .*; set JAX_COORDINATOR_ADDRESS") as caught:
            cluster(environment, is_tpu_vm)
        assert "\n" not in str(caught.value)
