"""What the Responses API keeps between requests: every answer is that of its whole conversation, given at once."""

import copy
import hashlib
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from refusals import refused
from stub_worker import StubRequestMaker, listening, stub_worker

from treeflash_jax.engine.answers.results import Chunk, Result
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.serve.app import make_app
from treeflash_jax.serve.metrics import Metrics
from treeflash_jax.serve.protocols.exchange import Served
from treeflash_jax.serve.protocols.response_memory import ResponseMemory
from treeflash_jax.serve.protocols.responses import ResponsesBody, ResponsesExchange, get_memory
from treeflash_jax.serve.worker import Piece, Submission

CLIENTS, TURNS, KEPT, KEPT_BYTES = 12, 40, 60, 120_000
TOOLS = [{"type": "function", "name": "add"}]


def response(id: str, *texts: str) -> dict[str, Any]:
    return {"id": id, "output": [{"id": f"{id}.{i}", "text": text} for i, text in enumerate(texts)]}


def test_what_is_kept_is_bounded_and_new_each_time():
    memory = ResponseMemory(most=3, most_bytes=400)
    items = [{"a": ["b"]}]
    for number in range(4):
        memory.add(response(str(number), "x"), items)
    items[0]["a"].append("c")
    memory.items("1")[0]["a"].append("d")
    memory.item("1.0")["text"] = "y"
    assert memory.items("0") is None and memory.item("0.0") is None and memory.response("0") is None
    assert memory.items("1") == [{"a": ["b"]}] and memory.item("1.0") == {"id": "1.0", "text": "x"}
    memory.add(response("large", "x" * 260), [])
    assert [id for id in "1 2 3 large".split() if memory.response(id)] == ["3", "large"]
    assert memory.delete("3") and not memory.delete("3")
    memory.add(response("larger", "x" * 400), [])
    assert memory.response("larger") is None, "larger than everything that may be kept"
    assert memory.response("large"), "which stays"
    for number in range(3):
        memory.add(response(f"new {number}", "x"), [])
    assert all(memory.response(f"new {number}") for number in range(3)), "sizes of what is gone do not count"


class Clients:
    """A server whose answer is made of the messages and tools of its prompt, and fails at times; and its clients."""

    def __init__(self):
        self.draw, self.lock = random.Random(0), threading.Lock()
        self.num_failures = self.num_gone = self.num_forgotten = self.num_shown = 0
        self.known: list[tuple[str, list[dict[str, Any]]]] = []  # responses, with the conversations up to their end
        inner = SimpleNamespace(chat_template="tools <think> <tool_call>", decode=lambda ids, **how: "")
        self.worker = stub_worker(
            model=SimpleNamespace(names=("tiny",), tokenizer=Tokenizer(inner)), submit=self.submit, _limit=1000,
            request_maker=StubRequestMaker(encode=self.encode),
        )  # fmt: skip

    def encode(self, prompts: list[Any]) -> list[list[int]]:
        time.sleep(self.random(0.003))
        [chat] = prompts
        messages = [{name: value for name, value in message.items()} for message in chat.messages]
        for message in messages:
            message["tool_calls"] = [call["function"] for call in message.get("tool_calls", [])]
        return [list(hashlib.sha256(json.dumps([messages, chat.tools], sort_keys=True).encode()).digest())]

    def submit(self, submission: Submission) -> None:
        ids = submission.requests[0].ids
        if self.random() < 0.1:
            submission.pieces.put_nowait(RuntimeError("the device is lost"))
            return
        word = bytes(ids[:6]).hex()
        text = (f"<think>{word} hm</think>" * (ids[0] % 2) + f"{word} words" * (ids[1] % 4 > 0)
                + f'<tool_call>{{"name": "add", "arguments": {{"a": "{word}"}}}}</tool_call>' * (ids[2] % 3))  # fmt: skip
        cuts = [0, len(text) // 3, len(text) // 2, len(text)]
        for begin, end, is_last in zip(cuts, cuts[1:], [False, False, True], strict=False):
            result = Result(
                text=text[:end], ids=[5] * end, prompt_ids=ids, builder="none", accept_lengths=[1], finished="stop"
            )
            chunk = Chunk(ids=[5] * (end - begin), text=text[begin:end], rounds=1)
            if submission.streams and begin and self.random() < 0.05:
                submission.pieces.put_nowait(RuntimeError("the device is lost"))
                return
            if submission.streams:
                submission.pieces.put_nowait(Piece(0, chunk, result, is_last))
        if not submission.streams:
            submission.pieces.put_nowait(Piece(0, Chunk(ids=result.ids, text=text, rounds=1), result, True))

    def random(self, most: float = 1.0) -> float:
        with self.lock:
            return self.draw.random() * most

    def choice(self, values: list[Any]) -> Any:
        return values[int(self.random(len(values)))]

    def post(self, http: httpx.Client, **fields: Any) -> dict[str, Any] | None:
        """Returns a response; None if it failed, and the error's message if what it goes on from is gone."""
        body = {"tools": TOOLS} | fields
        answer = http.post("/v1/responses", json=body)
        if answer.status_code == 404:
            return {"gone": answer.json()["error"]["message"]}
        if not body.get("stream"):
            assert answer.status_code in (200, 500), answer.text
            return answer.json() if answer.status_code == 200 else None
        last = json.loads(answer.text.strip().split("\n\n")[-1].partition("data: ")[2])
        assert last["type"] in ("response.completed", "response.failed"), last
        return last["response"] if last["type"] == "response.completed" else None

    def post_whole(self, http: httpx.Client, **fields: Any) -> dict[str, Any]:
        while (answer := self.post(http, store=False, **fields)) is None:
            self.num_failures += 1
        return answer

    def take_turns(self, number: int, port: int) -> None:
        draw = random.Random(number)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            for turn in range(TURNS):
                previous, before = (None, [])
                if self.known and draw.random() < 0.85:
                    recent = self.known[-20:] if draw.random() < 0.9 else self.known
                    previous, before = self.choice(recent)
                new = [{"type": "function_call_output", "call_id": item["call_id"], "output": f"{number}"}
                       for item in before[-3:] if item.get("type") == "function_call"]  # fmt: skip
                new.append({"role": "user", "content": f"client {number}, turn {turn}" + " and more" * draw.randrange(20)})
                fields = {"instructions": draw.choice([None, "Be brief."])}
                fields |= {"stream": draw.random() < 0.5, "store": draw.random() < 0.9}
                self.take_turn(http, previous, before, new, fields, draw)

    def take_turn(self, http: httpx.Client, previous: str | None, before: list, new: list, fields: dict, draw: Any) -> None:
        sent = copy.deepcopy(new)
        if before and draw.random() < 0.3:  # the whole conversation, with references to what was answered
            sent = [{"type": "item_reference", "id": item["id"]} if "id" in item else item for item in before] + sent
            answer = self.post(http, input=sent, **fields)
        else:
            answer = self.post(http, input=sent, previous_response_id=previous, **fields)
        if answer is None:
            self.num_failures += 1
            return
        if "gone" in answer:
            self.num_gone += 1
            return
        fields = {"instructions": fields["instructions"]}
        expected = self.post_whole(http, input=before + new, **fields)
        assert contents(answer["output"]) == contents(expected["output"])
        assert answer["usage"]["output_tokens"] == expected["usage"]["output_tokens"]
        path = f"/v1/responses/{answer['id']}"
        if answer["store"] and draw.random() < 0.15:
            self.num_forgotten += http.delete(path).status_code == 200
            assert http.get(path).status_code == http.delete(path).status_code == 404
        elif answer["store"] and (shown := http.get(path)).status_code == 200:  # others may have pushed it out
            self.num_shown += 1
            assert shown.json() == answer
        self.known.append((answer["id"], before + new + answer["output"]))


def contents(items: list[dict[str, Any]]) -> list[Any]:
    return [(item["type"], item.get("content"), item.get("name"), item.get("arguments")) for item in items]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_many_clients_with_branches_evictions_and_failures():
    """Each answer is that to its own request with the whole conversation in it; what is gone is 404 in one line."""
    clients = Clients()
    app = make_app(clients.worker, Metrics())
    memory = app.state.answers.reader.served.memory[ResponsesExchange]
    memory._most, memory._most_bytes = KEPT, KEPT_BYTES
    with listening(app) as port, ThreadPoolExecutor(CLIENTS) as pool:
        for future in [pool.submit(clients.take_turns, number, port) for number in range(CLIENTS)]:
            future.result()
    counts = clients.num_failures, clients.num_gone, clients.num_forgotten, clients.num_shown
    assert min(counts) >= 10, counts
    stored = memory._responses.values()
    assert len(stored) <= KEPT and memory._size == sum(len(x.response) + len(x.items) for x in stored) <= KEPT_BYTES
    lengths = [len(conversation) for _, conversation in clients.known]
    assert max(lengths) > 8, "some conversations are long"


def test_an_item_is_referenced_once():
    """Each reference is a copy: thousands of them in a small body would be gigabytes."""
    served = Served("tiny", 0)
    get_memory(served).add(response("a", "x"), [])
    reference = {"type": "item_reference", "id": "a.0"}
    assert ResponsesExchange(ResponsesBody(input=[reference]), served)._conversation() == [{"id": "a.0", "text": "x"}]
    exchange = ResponsesExchange(ResponsesBody(input=[reference, reference]), served)
    refused(exchange.read_call, "got input.1.id 'a.0', expected one reference to each item")


def test_a_long_conversation_does_not_hold_up_others(monkeypatch):
    """Reading it takes seconds, beside the event loop."""
    begun, ends = threading.Event(), threading.Event()

    def read_call(self) -> None:
        begun.set()
        ends.wait(2)
        raise ValueError("read")

    monkeypatch.setattr(ResponsesExchange, "read_call", read_call)
    with listening(make_app(stub_worker(), Metrics())) as port, ThreadPoolExecutor() as pool:
        url = f"http://127.0.0.1:{port}"
        reading = pool.submit(httpx.post, f"{url}/v1/responses", json={"input": "Hi"})
        assert begun.wait(60)
        httpx.get(f"{url}/health", timeout=1)
        assert not reading.done()
        ends.set()
        assert "read" in reading.result().text
