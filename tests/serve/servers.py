"""What the tests of the server share: a chat, the sizes of the server in the tests, and its metrics."""

import re
import time

import httpx

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
