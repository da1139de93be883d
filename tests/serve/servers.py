"""What the tests of the server share: a server with its sizes, a chat, and metrics."""

import copy
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import httpx

import treeflash_jax as tf
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.serve.app import make_app
from treeflash_jax.serve.metrics import Metrics
from treeflash_jax.serve.options import ServeOptions
from treeflash_jax.serve.process import Server, allowed_hosts
from treeflash_jax.serve.worker import Worker

CONTEXT, LIMIT = 384, 34
CHAT = [{"role": "user", "content": "Sam has 2 cats and 3 dogs. How many animals?"}]
GREEDY = {"temperature": 0}


def metric(server, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    return sum(float(value) for value in re.findall(rf"^treeflash_{name}(?:{{.*}})? (\S+)$", text, flags=re.MULTILINE))


def wait_for(is_true, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def running(model: tf.TreeFlash, config: type[tf.GenerateConfig] = tf.GenerateConfig) -> Iterator[SimpleNamespace]:
    """Yields the URL and the worker of a server with two slots, whose settings are of this class."""
    metrics = Metrics()
    options = ServeOptions(slots=2, context=CONTEXT, queue=LIMIT - 2, schema_states=256, ui=True)
    worker = Worker(model, config(nodes=4, ngrams=0), metrics, options)
    worker.start()
    listener = socket.create_server(("127.0.0.1", 0))
    http = Server(make_app(worker, metrics, hosts=allowed_hosts(options), has_page=options.ui), grace=1)
    thread = threading.Thread(target=http.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield SimpleNamespace(url=f"http://127.0.0.1:{listener.getsockname()[1]}", worker=worker)
    finally:
        http.should_exit = True
        thread.join()
        worker.stop()


# A chat template with tools, calls and thoughts, as Qwen's have.
TOOL_TEMPLATE = """{% if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %} Call: <tool_call>JSON</tool_call><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""


def with_tools(model: tf.TreeFlash) -> tf.TreeFlash:
    """Returns the model with a chat template that has tools."""
    inner = copy.deepcopy(model.tokenizer.inner)
    inner.chat_template = TOOL_TEMPLATE
    return with_tokenizer(model, Tokenizer(inner), model.stop_ids)


def with_tokenizer(model: tf.TreeFlash, tokenizer: Tokenizer, stop_ids: tuple[int, ...]) -> tf.TreeFlash:
    """Returns the model with another tokenizer, of at most as many tokens."""
    model = copy.copy(model)
    model.tokenizer, model.stop_ids = tokenizer, stop_ids
    return model
