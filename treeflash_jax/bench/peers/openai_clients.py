"""Tokens per second that clients get from a server of OpenAI's API, greedily, by number of clients.

    python openai_clients.py http://127.0.0.1:8000/v1 --prompts configs/prompts.jsonl --clients 1 4 8

Every number of clients answers the same prompts, each client one at a time; passes alternate between the numbers, and the
first pass is not counted. Needs the standard library only.
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
    parser.add_argument("url")
    parser.add_argument("--prompts", required=True, help='a file with {"prompt": ...} or {"messages": ...} on each line')
    parser.add_argument("--limit", type=int, default=16, help="number of prompts")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--passes", type=int, default=3)
    arguments = parser.parse_args()
    lines = Path(arguments.prompts).read_text(encoding="utf-8").splitlines()[: arguments.limit]
    prompts, speeds = [json.loads(line) for line in lines], defaultdict(list)
    for number in range(1 + arguments.passes):
        for clients in arguments.clients:
            since = time.perf_counter()
            with ThreadPoolExecutor(clients) as pool:
                tokens = sum(pool.map(lambda line: ask(arguments.url, line, arguments.max_tokens), prompts))
            if number > 0:
                speeds[clients].append(tokens / (time.perf_counter() - since))
    for clients, values in speeds.items():
        print(json.dumps({"clients": clients, "tokens_per_second": round(statistics.median(values), 1)}), flush=True)


if __name__ == "__main__":
    main()
