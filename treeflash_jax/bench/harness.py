"""The harness of all measurements: systems take turns in answering prompts, and every answer becomes a record.

A `System` is a model with settings of `generate`; a `Peer` is another program. All systems answer a batch of prompts before
the next batch begins. Their order rotates. The first call of a system, and every call that had to compile, is a warm-up: it
is repeated, and only the second answer counts.
"""

import json
import logging
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import treeflash_jax as tf
from treeflash_jax.bench.bench_records import (
    CALL_SETTINGS,
    PEER,
    RECORDED,
    SCHEMA,
    BenchRecord,
    environment,
    is_comparable,
    print_progress,
    record_key,
)
from treeflash_jax.bench.prompt_sets import BenchPrompt, make_chat
from treeflash_jax.bench.shapes import describe_tree
from treeflash_jax.bench.verdicts import explain
from treeflash_jax.core.error_text import logger
from treeflash_jax.core.json_files import parse_json
from treeflash_jax.core.settings import changed
from treeflash_jax.engine.answers.results import LOW_TAU_QUESTION
from treeflash_jax.engine.call.prompts import Prompt
from treeflash_jax.engine.call.requests import find_stops
from treeflash_jax.engine.comparison import FAIL, ROUNDING, find_divergence
from treeflash_jax.engine.settings.defaults import describe_drafter_temperature
from treeflash_jax.formats.answer_text import AnswerText


def is_shown(record: logging.LogRecord) -> bool:
    """Returns False for the warning that few drafted tokens are accepted: in a benchmark, this is a result."""
    return LOW_TAU_QUESTION not in record.getMessage()


@dataclass(frozen=True, kw_only=True)
class System:
    """A named way to answer prompts.

    Attributes:
      config: settings of `generate`. Temperature and seed are replaced by the values being measured.

    Example:
      >>> system = System(name="ar", model=tf.load("tiny"), config=tf.GenerateConfig(builder="none"))
      >>> records = list(measure([system], [BenchPrompt(id="1", turns=("How many legs do 3 cows have?",))]))
    """

    name: str
    model: tf.TreeFlash
    config: tf.GenerateConfig

    def answer(self, prompts: list[Prompt], temperature: float, seeds: list[int]) -> list[tf.Result]:
        """Answers a batch of prompts, each with its seed. The seconds of a result are its share of the call's seconds.

        Raises KeyboardInterrupt after Ctrl-C while decoding, because an incomplete answer is no measurement.
        """
        config = replace(self.config, temperature=temperature, seed=0)
        with ExitStack() as stack:
            logger.addFilter(is_shown)
            stack.callback(logger.removeFilter, is_shown)
            results = self.model.generate(prompts, config, seed=seeds, indices=[0] * len(prompts))  # only the seed decides
        if any(result.finished == "interrupted" for result in results):
            raise KeyboardInterrupt
        return [replace(result, seconds=result.seconds / len(prompts)) for result in results]

    def settings(self) -> dict[str, Any]:
        """Returns the settings that take effect. Settings of drafting are None if nothing is drafted."""
        model, config, plan = self.model, self.config, self.model.plan(self.config)
        settings: dict[str, Any] = {"verifier": model.names[0], "dtype": str(model.dtype), "quantize": model.quantize}
        settings |= {"template": model.tokenizer.template if model.tokenizer else None}
        names = [name for name in CALL_SETTINGS if name in RECORDED or name in changed(config)]
        settings |= describe_tree(plan) | json.loads(json.dumps({name: getattr(config, name) for name in names}))
        settings["batch_size"] = config.batch_size or 1
        if not plan.drafts:
            return settings | dict.fromkeys(("drafter", "drafter_temperature", "nodes", "acceptance"))
        temperature = config.drafter_temperature or describe_drafter_temperature(model.drafter)
        return settings | {"drafter": model.names[1], "drafter_temperature": temperature}


@dataclass(frozen=True, kw_only=True)
class Peer(System):
    """A program that is started once. It reads lines of JSON on standard input and answers them on standard output.

    A question is {"prompt": ids, "max_new_tokens": n, "stop_ids": ids}, to be decoded greedily. The answer is {"ids":
    [...], "seconds": s}, or {"text": "...", "tokens": n, "seconds": s}. Seconds include reading the prompt.

    The peer is compared with `model` and `config`, which provide prompt and stop ids.

    Example:
      >>> with subprocess.Popen(["python", "other.py"], bufsize=0, stdin=PIPE, stdout=PIPE) as program:
      ...     peer = Peer(name="other", model=model, config=config, command="python other.py", program=program)
      ...     records = list(measure([system, peer], prompts))
    """

    command: str
    program: subprocess.Popen

    def answer(self, prompts: list[Prompt], temperature: float, seeds: list[int]) -> list[tf.Result]:
        model, config = self.model, self.config
        stop_ids = model.stop_ids if config.stop_ids is None else config.stop_ids
        stop_ids = find_stops(config.stop, stop_ids, model.tokenizer, model.verifier.vocab_size)[1]
        results = []
        for prompt in prompts:
            prompt_ids = model.encode(prompt)
            answer = self._ask({"prompt": prompt_ids, "max_new_tokens": config.max_new_tokens, "stop_ids": stop_ids})
            ids, text = answer.get("ids", []), answer.get("text")
            seconds = answer["seconds"]
            if text is None and model.tokenizer is not None:  # later turns contain it
                answer_text = AnswerText(model.tokenizer, prompt_ids)
                answer_text.extend(ids)
                text = answer_text.text
            result = tf.Result(
                text=text or "",
                ids=ids,
                prompt_ids=prompt_ids,
                builder=PEER,
                accept_lengths=[],
                finished="stop",
                seconds=seconds,
                tokens_per_second=(answer.get("tokens") or len(ids)) / seconds,
            )
            results.append(result)
        return results

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"builder": PEER, "command": self.command}

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        with suppress(BrokenPipeError):  # the program has ended
            self.program.stdin.write(json.dumps(question).encode() + b"\n")
        line = self.program.stdout.readline().decode()
        with suppress(ValueError, TypeError, KeyError):  # the line is no JSON object with numbers
            answer = parse_json(line)
            if answer["seconds"] > 0 and isinstance(answer.get("ids", []), list):
                return answer
        got = f"got {line.strip()!r} from" if line else "got no answer from"
        raise ValueError(f"{got} {self.command!r}, expected one JSON line per prompt, with seconds above 0")


def measure(
    systems: Sequence[System],
    prompts: Sequence[BenchPrompt],
    *,
    temperatures: Sequence[float] = (0.0,),
    seeds: Sequence[int] = (0,),
    earlier: Sequence[BenchRecord] = (),
    notify: Callable[[str], None] = print_progress,
) -> Iterator[BenchRecord]:
    """Answers every prompt with every system, for all combinations of temperature and seed.

    Each prompt gets a seed that is made from the given seed and the prompt's id. Prompts are therefore independent, and all
    systems use the same noise. If drafting must not change an answer, it is compared with one-token decoding, and every
    difference is printed on stderr.

    Args:
      earlier: records of an earlier run; they are not measured again.
      notify: function that gets a line after every call.
    """
    records = {record_key(record): record for record in earlier}
    warm = set()
    size = systems[0].settings()["batch_size"]
    batches = [prompts[begin : begin + size] for begin in range(0, len(prompts), size)]
    for number, batch in enumerate(batches):
        turn = number % len(systems)
        rotated = [*systems[turn:], *systems[:turn]]
        for temperature, seed, system in product(temperatures, seeds, rotated):
            missing = [p for p in batch if (p.id, system.name, temperature, seed) not in records]
            if not missing:
                continue
            answers = answer_turns(system, batch, temperature, seed)
            has_compiled = any(result.compile_seconds for results in answers for result in results)
            if has_compiled or system.name not in warm:
                answers = answer_turns(system, batch, temperature, seed)
                warm.add(system.name)
            for prompt, results in zip(batch, answers, strict=True):
                if prompt not in missing:
                    continue
                record = make_record(system, prompt, results, temperature, seed)
                same_prompt = [records.get((prompt.id, other.name, temperature, seed)) for other in systems]
                record["differences"] = find_differences(system, record, filter(None, same_prompt), prompt, results)
                records[record_key(record)] = record
                yield record
            notify(f"{number + 1}/{len(batches)} {system.name} at T {temperature:g}, seed {seed}")


def answer_turns(system: System, prompts: Sequence[BenchPrompt], temperature: float, seed: int) -> list[list[tf.Result]]:
    """Answers all turns of prompts, with a call per turn that has earlier answers. Returns results by prompt and turn."""
    answers: list[list[tf.Result]] = [[] for _ in prompts]
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        unfinished = [i for i, prompt in enumerate(prompts) if turn < len(prompt.turns)]
        chats = [make_chat(prompts[i], [result.text for result in answers[i]]) for i in unfinished]
        results = system.answer(chats, temperature, [prompts[i].seed(seed) for i in unfinished])
        for i, result in zip(unfinished, results, strict=True):
            answers[i].append(result)
    return answers


def make_record(
    system: System, prompt: BenchPrompt, results: Sequence[tf.Result], temperature: float, seed: int
) -> BenchRecord:
    """Makes the record of one answered prompt. In lists of lists, the first index is the turn.

    `accept_lengths` counts the tokens that rounds added to the answers. `cut` counts the tokens that the last round of a
    turn accepted after the answer's end. `tokens` includes the token that prefill gives in every turn.
    """
    settings = system.settings() | {"temperature": temperature, "seed": seed}
    record = {"schema": SCHEMA, "prompt_id": prompt.id, "prompt_hash": prompt.hash, "prompt_set": prompt.set}
    record |= {"system": system.name, "settings": settings}
    record["texts"] = [result.text for result in results]
    for name in ("accept_lengths", "cut", "ids"):
        record[name] = [getattr(result, name) for result in results]
    # Some programs return no ids.
    record["tokens"] = sum(len(result.ids) or round(result.tokens_per_second * result.seconds) for result in results)
    return record | {"seconds": sum(result.seconds for result in results), **environment(system.model)}


def find_differences(
    system: System,
    record: BenchRecord,
    others: Iterable[BenchRecord],
    prompt: BenchPrompt,
    results: Sequence[tf.Result],
) -> dict[str, dict[str, Any]]:
    """Compares a drafted answer with one-token answers to the same prompt, or the reverse, and prints the differences.

    Returns {"turn"} and the fields of `Divergence` for each system with a different answer.
    """
    differences = {}
    settings = record["settings"]
    config = replace(system.config, temperature=settings["temperature"], seed=prompt.seed(settings["seed"]))
    for other in others:
        if is_comparable(record, other) and record["ids"] != other["ids"]:
            turn = next(i for i, (a, b) in enumerate(zip(record["ids"], other["ids"], strict=True)) if a != b)
            drafted, plain = (other, record) if settings["builder"] == "none" else (record, other)
            call = system.model.prepare([results[turn].prompt_ids], config, indices=[0])
            ids = drafted["ids"][turn], plain["ids"][turn]
            difference = find_divergence(system.model, *call.requests, *ids, call.weights.processor)
            differences[other["system"]] = {"turn": turn, **asdict(difference)}
            names = " and ".join(sorted((record["system"], other["system"])))
            text = f"{names} from token {difference.index} on: {explain(difference, system.model.dtype)}"
            print_progress(f"{ROUNDING if difference.near_tie else FAIL}: prompt {record['prompt_id']}, {text}")
    return differences
