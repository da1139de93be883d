"""A worker that answers without a model, and clients of an application with it."""

import asyncio
import socket
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx

import treeflash_jax as tf
from treeflash_jax.constraints.compilation import CONSTRAINT_NAMES, Constraint
from treeflash_jax.constraints.compile_bytes import Run
from treeflash_jax.engine.answers.results import Chunk, Result
from treeflash_jax.engine.call.requests import Request
from treeflash_jax.serve.app import make_app
from treeflash_jax.serve.metrics import Metrics
from treeflash_jax.serve.process import Server
from treeflash_jax.serve.worker import Piece, Submission, Worker


class StubRequestMaker:
    """Makes a request of each prompt without a model; methods may be replaced."""

    config, context, text_limit = tf.GenerateConfig(), 64, None

    def __init__(self, **methods: Callable[..., Any]):
        vars(self).update(methods)

    def encode(self, prompts: list[Any]) -> list[list[int]]:
        return [[1]] * len(prompts)

    def compile(self, constraint: Constraint, run: Run) -> None:
        pass

    def make_requests(self, prompts: list[list[int]], samples: int = 1, **settings: Any) -> list[Request]:
        constraints = [Constraint(kind, str(settings[kind])) for kind in CONSTRAINT_NAMES if kind in settings]
        return [Request(ids=ids, constraint=next(iter(constraints), None)) for ids in prompts * samples]

    def add_automata(self, requests: list[Request], automata: dict[Constraint, None]) -> list[Request]:
        return requests


def stub_worker(**more: Any) -> SimpleNamespace:
    """A worker that gives each prompt the answer "yes"."""

    def submit(submission: Submission) -> None:
        for index in range(len(submission.requests)):
            result = Result(text="yes", ids=[5], prompt_ids=[1], builder="none", accept_lengths=[1], finished="length")
            submission.pieces.put_nowait(Piece(index, Chunk(ids=[5], text="yes", rounds=1), result, True))

    worker = SimpleNamespace(
        model=SimpleNamespace(names=("tiny",), tokenizer=None), request_maker=StubRequestMaker(), error=None,
        _limit=4, _num_unfinished=0, submit=submit, cancel=lambda submission: submission.pieces.put_nowait(None),
    )  # fmt: skip
    worker.check_room = partial(Worker.check_room, worker)
    vars(worker).update(more)
    return worker


def client_of(worker: SimpleNamespace, **options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(make_app(worker, Metrics(), **options))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=60)


def ask(worker: SimpleNamespace, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
    async def post() -> httpx.Response:
        async with client_of(worker) as http:
            return await http.post(path, json=body)

    return asyncio.run(post())


def message(response: httpx.Response) -> str:
    return response.json()["error"]["message"]


class listening:
    """Serves an application at a free port."""

    def __init__(self, app: Any):
        self.server = Server(app, grace=1)

    def __enter__(self) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]})
        self.thread.start()
        return listener.getsockname()[1]

    def __exit__(self, *_: Any) -> None:
        self.server.should_exit = True
        self.thread.join()
