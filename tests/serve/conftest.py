"""A server of the pair `tiny`, and a client."""

import socket
import threading
from types import SimpleNamespace

import openai
import pytest
from servers import CONTEXT, LIMIT

import treeflash_jax as tf
from treeflash_jax.serve.app import make_app
from treeflash_jax.serve.metrics import Metrics
from treeflash_jax.serve.options import ServeOptions
from treeflash_jax.serve.process import Server, allowed_hosts
from treeflash_jax.serve.worker import Worker


@pytest.fixture(scope="module")
def server(tiny):
    """A server of the pair `tiny` with two slots; yields its URL and its worker."""
    metrics = Metrics()
    options = ServeOptions(slots=2, context=CONTEXT, queue=LIMIT - 2, schema_states=256)
    worker = Worker(tiny, tf.GenerateConfig(nodes=4), metrics, options)
    worker.start()
    listener = socket.create_server(("127.0.0.1", 0))
    http = Server(make_app(worker, metrics, hosts=allowed_hosts(options), has_page=True), grace=1)
    thread = threading.Thread(target=http.run, kwargs={"sockets": [listener]})
    thread.start()
    yield SimpleNamespace(url=f"http://127.0.0.1:{listener.getsockname()[1]}", worker=worker)
    http.should_exit = True
    thread.join()
    worker.stop()


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", timeout=600, max_retries=0)
