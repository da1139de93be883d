"""Other programs that decode the same model, as systems of the harness; each runs in its own environment, as a script."""

from __future__ import annotations

import json
import shlex
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import treeflash_jax as tf
from treeflash_jax.bench.bench_records import PEER, SYSTEM
from treeflash_jax.bench.harness import System
from treeflash_jax.core.checks import parse_json


@dataclass(frozen=True, kw_only=True)
class Peer(System):
    """A program that is started once and answers lines of JSON on its standard input with lines on its standard output.

    It reads {"prompt": ids, "max_new_tokens": n, "stop_ids": ids} and decodes greedily. It answers {"ids": [...],
    "seconds": s}, or {"text": "...", "tokens": n, "seconds": s}; seconds include reading the prompt.

    `model` and `config`, with which it is compared, give prompt and stop ids.

    Example:
      >>> with Peer(name="other", model=model, config=config, command="python other.py") as peer:
      ...     records = list(measure([system, peer], prompts))
    """

    command: str
    programs: list[subprocess.Popen] = field(default_factory=list, repr=False)

    def __enter__(self) -> Peer:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.programs.append(subprocess.Popen(shlex.split(self.command), **pipes))
        return self

    def __exit__(self, *_: object) -> None:
        program = self.programs.pop()
        with suppress(BrokenPipeError):  # it has ended
            program.stdin.close()
        program.wait()

    def answer(self, prompts: list[Any], temperature: float, seeds: list[int]) -> list[tf.Result]:
        stop_ids = list(self.model.find_stop_ids(self.config))
        settings = {"max_new_tokens": self.config.max_new_tokens, "stop_ids": stop_ids}
        results = []
        for prompt in prompts:
            ids = self.model.encode(prompt)
            answer = self._ask({"prompt": ids} | settings)
            count = answer.get("tokens") or len(answer.get("ids", ()))
            given = {"text": answer.get("text"), "ids": answer.get("ids", []), "seconds": answer["seconds"]}
            given |= {"prompt_ids": ids, "tokens_per_second": count / answer["seconds"], "compile_seconds": 0.0}
            results.append(tf.Result(**given, builder=PEER, accept_lengths=[], finished="stop"))
        return results

    def settings(self) -> dict[str, Any]:
        return super().settings() | dict.fromkeys(SYSTEM) | {"builder": PEER}

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        program = self.programs[-1]
        with suppress(BrokenPipeError):
            program.stdin.write(json.dumps(question) + "\n")
            program.stdin.flush()
        line = program.stdout.readline()
        with suppress(ValueError):
            answer = parse_json(line)
            if isinstance(answer, dict) and answer.get("seconds", 0) > 0:
                return answer
        got = f"got {line.strip()!r} from" if line else "got no answer from"
        raise ValueError(f"{got} {self.command!r}, expected one JSON line per prompt, with seconds above 0")
