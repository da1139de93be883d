"""Greedy decoding speed beside other programs on the same prompts, batch 1, interleaved in one run.

    python -m treeflash_jax.bench.compare --verifier smollm2 --prompts prompts.jsonl --limit 8 \\
        --other "transformers=python treeflash_jax/bench/peers/torch_generate.py FOLDER" \\
        --other "llama.cpp=python treeflash_jax/bench/peers/llama_cpp.py FILE.gguf"

Every other program is started once and kept warm. For each line it reads on stdin, {"prompt": ids, "max_new_tokens": n,
"stop_ids": ids}, it decodes that prompt greedily and answers one JSON line: {"ids": [...], "tokens_per_second": ...}, or
"text" in place of "ids". The systems take turns on every prompt; the first pass over the prompts is warm-up and does not
count. Seconds include reading the prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import jax
import jax.numpy as jnp

import treeflash_jax as tf
from treeflash_jax import devices, files
from treeflash_jax.arguments import add_fields, values_of
from treeflash_jax.bench.prompts import read_prompts
from treeflash_jax.checks import parse_json
from treeflash_jax.settings import GenerateConfig, without_method

Decode = Callable[[list[int]], dict[str, Any]]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifier", required=True)
    parser.add_argument("--drafter", help="also decode with this drafter; default: the one that belongs to the verifier")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt-ids", metavar="IDS", help="one prompt of token ids, separated by spaces")
    prompts.add_argument("--prompts", metavar="FILE", help="JSONL file of prompts, as for `treeflash bench run`")
    parser.add_argument("--limit", type=int, help="use the first so many prompts of the file")
    parser.add_argument("--dtypes", nargs="+", help="decode in each of these dtypes; default: the device's default")
    add_fields(parser, GenerateConfig, "builder nodes candidates children max_new_tokens stop_ids", max_new_tokens=96)
    parser.add_argument("--repeats", type=int, default=9, help="passes over the prompts; default: %(default)s")
    parser.add_argument("--other", action="append", default=[], metavar="NAME=COMMAND", help="may be given several times")
    parser.add_argument("--out", help="JSON file for the record")
    arguments = parser.parse_args(argv)
    if arguments.out:
        files.check_output(arguments.out, files.json_with("systems", "prompts", "settings"))
    record = compare(arguments)
    print(json.dumps(record, indent=2))
    if arguments.out:
        files.write(arguments.out, json.dumps(record, indent=2) + "\n")
    return record


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Median tokens per second of every system, and how many answers equal those of the first.

    Returns:
      "systems": by name, "tokens_per_second", its samples under "all", and "same": prompts whose answer is that of the
      first system, one-token decoding in the first dtype.

    Raises:
      ValueError: a pair or prompts that cannot be loaded, a program that gives no answer.
    """
    models = {
        dtype: tf.load(verifier=arguments.verifier, drafter=arguments.drafter, dtype=jnp.dtype(dtype))
        for dtype in arguments.dtypes or [devices.here().dtype.name]
    }
    model = next(iter(models.values()))
    drafting = without_method(values_of(arguments, GenerateConfig))
    drafting["builder"] = drafting["builder"] or "best-first"
    limit, stop_ids = drafting.pop("max_new_tokens"), drafting.pop("stop_ids")
    shared = {"max_new_tokens": limit, "stop_ids": list(model.stop_ids if stop_ids is None else stop_ids)}
    if arguments.prompt_ids is not None:
        prompts = [[int(word) for word in arguments.prompt_ids.split()]]
    else:
        found = read_prompts(arguments.prompts)[: arguments.limit]
        prompts = [model.encode([*prompt.opening, {"role": "user", "content": prompt.turns[0]}]) for prompt in found]
    with ExitStack() as stack:
        systems: dict[str, Decode] = {}
        for dtype, own in models.items():
            systems[f"one token, {dtype}"] = _ours(own, builder="none", **shared)
            if own.drafter is not None:
                systems[f"drafted, {dtype}"] = _ours(own, **drafting, **shared)
        for given in arguments.other:
            name, _, command = given.partition("=")
            systems[name] = _other(stack, command, shared)
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
        for _ in range(arguments.repeats + 1):
            for prompt in prompts:
                for name, decode in systems.items():
                    answers[name].append(decode(prompt))
    first = next(iter(answers.values()))
    return {
        "systems": {name: _summary(found, first, len(prompts)) for name, found in answers.items()},
        "prompts": len(prompts),
        "settings": drafting | shared | {"batch": 1, "temperature": 0.0, "repeats": arguments.repeats},
        "hardware": {"backend": devices.here().backend, "machine": platform.machine(), "cores": os.cpu_count()},
        "versions": {"jax": jax.__version__, "treeflash_jax": tf.__version__, "python": platform.python_version()},
    }


def _summary(answers: list[dict[str, Any]], first: list[dict[str, Any]], prompts: int) -> dict[str, Any]:
    counted = [answer["tokens_per_second"] for answer in answers[prompts:]]
    pairs = list(zip(answers, first, strict=True))[-prompts:]
    same = sum(
        all(mine[key] == other[key] for key in ("ids", "text") if key in mine and key in other) for mine, other in pairs
    )
    taus = [answer["tau"] for answer in answers[-prompts:] if "tau" in answer]
    record = {"tokens_per_second": statistics.median(counted), "same": same, "all": counted}
    return record | ({"tau": statistics.mean(taus)} if taus else {})


def _ours(model: tf.TreeFlash, **settings: Any) -> Decode:
    def decode(prompt: list[int]) -> dict[str, Any]:
        result = model.generate([prompt], **settings)[0]
        record = {"ids": result.ids, "tokens_per_second": result.tokens_per_second, "tau": result.tau}
        return record | ({} if result.text is None else {"text": result.text})

    return decode


def _other(stack: ExitStack, command: str, shared: dict[str, Any]) -> Decode:
    """A program that answers lines with lines; it ends with the stack."""
    program = subprocess.Popen(shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @stack.callback
    def end() -> None:
        with suppress(BrokenPipeError):  # it ended before
            program.stdin.close()
        program.wait()

    def decode(prompt: list[int]) -> dict[str, Any]:
        with suppress(BrokenPipeError):
            program.stdin.write(json.dumps({"prompt": prompt} | shared) + "\n")
            program.stdin.flush()
        line = program.stdout.readline()
        if not line:
            raise ValueError(f"got no answer from {command!r}, expected one JSON line per prompt")
        try:
            return parse_json(line)
        except ValueError as error:
            raise ValueError(f"got an answer of {command!r} that is {error}, expected one JSON line per prompt") from None

    return decode


if __name__ == "__main__":
    main()
