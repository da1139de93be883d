"""Decoding speed beside another program's, interleaved in one run.

    python -m treeflash_jax.bench.compare --verifier DIR --drafter DIR --prompt-ids "3 4 5" --other "COMMAND"

The other program is started once and kept warm. For every line it reads on stdin it decodes the same prompt and answers one
JSON line: {"ids": [...], "tokens_per_second": ...}. Turns alternate; the first of each is warm-up and not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
from typing import Any

import jax

import treeflash_jax as tf
from treeflash_jax import devices, files


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifier", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompt-ids", required=True, metavar="IDS")
    parser.add_argument("--method", default="tree")
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--candidates", type=int, default=16)
    parser.add_argument("--children", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--stop-ids", default="", metavar="IDS")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--other", required=True, metavar="COMMAND")
    parser.add_argument("--out", help="JSON file for the record")
    arguments = parser.parse_args(argv)
    if arguments.out:
        files.check_output(arguments.out, files.json_with("ratio", "same_ids", "tokens_per_second", "settings"))
    record = compare(arguments)
    print(json.dumps(record, indent=2))
    if arguments.out:
        files.write(arguments.out, json.dumps(record, indent=2) + "\n")
    return record


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians of both programs in tokens per second, their ratio, and whether they gave the same ids."""
    model = tf.load(verifier=arguments.verifier, drafter=arguments.drafter)
    prompt = [int(word) for word in arguments.prompt_ids.split()]
    names = ("method", "nodes", "candidates", "children", "max_new_tokens")
    settings = {name: getattr(arguments, name) for name in names}
    settings["stop_ids"] = [int(word) for word in arguments.stop_ids.split()]
    ours: list[float] = []
    theirs: list[float] = []
    with subprocess.Popen(shlex.split(arguments.other), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        for _ in range(arguments.repeats + 1):
            result = model.generate([prompt], **settings)[0]
            other.stdin.write("\n")
            other.stdin.flush()
            line = other.stdout.readline()
            if not line:
                raise ValueError(f"got no answer from {arguments.other!r}, expected one JSON line per turn")
            answer = json.loads(line)
            ours.append(result.tokens_per_second)
            theirs.append(answer["tokens_per_second"])
        other.stdin.close()
    mine, other_speed = statistics.median(ours[1:]), statistics.median(theirs[1:])
    return {
        "tokens_per_second": mine,
        "other_tokens_per_second": other_speed,
        "ratio": mine / other_speed,
        "same_ids": result.ids == answer["ids"],
        "tau": result.tau,
        "all": {"ours": ours[1:], "other": theirs[1:]},
        "settings": settings | {"batch": 1, "temperature": 0.0, "dtype": str(model.dtype)},
        "hardware": {"backend": devices.here().backend, "machine": platform.machine(), "cores": os.cpu_count()},
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
    }


if __name__ == "__main__":
    main()
