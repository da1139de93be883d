"""Tokens per second that clients get from servers of OpenAI's API, greedily, by number of clients.

    python openai_clients.py ours=http://127.0.0.1:8000/v1 theirs=http://127.0.0.1:8001/v1 --prompts prompts.jsonl

In each pass, the clients together send every prompt once, each client one request at a time. Passes alternate between the
servers and the numbers of clients; the first is not counted. Needs the standard library only.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen


def ask(url: str, line: dict[str, Any], max_tokens: int) -> int:
    """Returns the number of tokens of an answer to a line of the file."""
    messages = line.get("messages") or [{"role": "user", "content": line["prompt"]}]
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0}
    request = Request(f"{url}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request) as response:
        return json.load(response)["usage"]["completion_tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", help="name=URL")
    parser.add_argument("--prompts", required=True, help='a file with {"prompt": ...} or {"messages": ...} on each line')
    parser.add_argument("--limit", type=int, default=16, help="number of prompts")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--passes", type=int, default=3)
    arguments = parser.parse_args()
    lines = Path(arguments.prompts).read_text(encoding="utf-8").splitlines()[: arguments.limit]
    prompts = [json.loads(line) for line in lines]
    speeds = defaultdict(list)
    servers = [server.split("=", 1) for server in arguments.servers]
    for number in range(1 + arguments.passes):
        for clients in arguments.clients:
            for name, url in servers:
                since = time.perf_counter()
                with ThreadPoolExecutor(clients) as pool:
                    tokens = sum(pool.map(lambda line, url=url: ask(url, line, arguments.max_tokens), prompts))
                if number > 0:
                    speeds[name, clients].append(tokens / (time.perf_counter() - since))
    for (name, clients), values in speeds.items():
        record = {"server": name, "clients": clients, "tokens_per_second": round(statistics.median(values), 1)}
        print(json.dumps(record | {"passes": [round(value, 1) for value in values]}), flush=True)


if __name__ == "__main__":
    main()
