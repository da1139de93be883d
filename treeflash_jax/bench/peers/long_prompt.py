"""Longest pause of a streamed answer while another client's long prompt is read, and the time to that prompt's answer.

    python long_prompt.py before=http://127.0.0.1:8000/v1 after=http://127.0.0.1:8001/v1 --words 1500

Passes alternate between the servers of OpenAI's API; the first is not counted. Needs the standard library only.
"""

import argparse
import json
import statistics
import threading
import time
from collections import defaultdict
from typing import Any
from urllib.request import Request, urlopen

PAUSE = 2.0  # seconds that the stream runs alone before the long prompt is sent


def post(url: str, prompt: str, **settings: Any) -> Any:
    body = {"prompt": prompt, "temperature": 0, **settings}
    return urlopen(Request(f"{url}/completions", json.dumps(body).encode(), {"content-type": "application/json"}))


def measure(url: str, words: int, max_tokens: int, number: int) -> dict[str, float]:
    """Returns the longest gaps between events before and while the long prompt is read, and the seconds that it took."""
    times = [time.perf_counter()]

    def stream() -> None:
        with post(url, "Once upon a time", max_tokens=max_tokens, stream=True) as events:
            for line in events:
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())

    reader = threading.Thread(target=stream)
    reader.start()
    time.sleep(PAUSE)
    start = time.perf_counter()
    with post(url, f"Story {number}. " + "hello world " * (words // 2), max_tokens=1) as answer:  # no common prefix
        answer.read()
    end = time.perf_counter()
    reader.join()
    gaps = [(after - before, after) for before, after in zip(times[1:], times[2:], strict=False)]
    return {
        "alone": max(gap for gap, at in gaps if at < start),
        "beside": max(gap for gap, at in gaps if start <= at),
        "long prompt": end - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", help="name=URL")
    parser.add_argument("--words", type=int, default=1500)
    parser.add_argument("--max-tokens", type=int, default=400, help="of the stream, which has to outlast the prompt")
    parser.add_argument("--passes", type=int, default=3)
    arguments = parser.parse_args()
    servers = [server.split("=", 1) for server in arguments.servers]
    seconds = defaultdict(list)
    for number in range(1 + arguments.passes):
        for name, url in servers:
            result = measure(url, arguments.words, arguments.max_tokens, number)
            if number > 0:
                seconds[name].append(result)
    for name, results in seconds.items():
        medians = {key: round(statistics.median(result[key] for result in results), 2) for key in results[0]}
        print(json.dumps({"server": name, "words": arguments.words, **medians}), flush=True)


if __name__ == "__main__":
    main()
