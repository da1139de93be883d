"""Answers training prompts with the verifier, because a drafter has to predict the verifier's text, not a data set's.

    python -m train.respond configs/shipped/respond.toml out=runs/responses.jsonl sources.0.path=data/gsm8k_train.jsonl

Writes one JSON object per line, shortest prompts first: {"index", "source", "temperature", "finished": "stop" or "length",
"prompt": ids, "response": ids}. An answer depends on the seed and the index of its prompt, not on batches or hosts. So the
same command continues an interrupted run, on any number of hosts, and results in the same file. The settings are stored in
OUT.settings.toml, and the digest of the verifier in OUT.inputs.json. A file of other settings, or of another verifier, is
never continued or overwritten. OUT.lock prevents a second command from writing the file.

With several hosts, all of them must see `out`. With replicas = "host", each host runs a verifier on its devices, answers
its share of the prompts and writes part files; the first host merges the parts at the end. With replicas = "all", one
verifier is sharded over all devices, for verifiers that do not fit into one host.
"""

import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import jax
from etils import epath

from train.data import answers
from train.data.records import Record, Source, read_records
from train.runtime import hosts, run_config, watch
from train.runtime.run_config import MeshConfig
from treeflash_jax.bench.prompt_sets import read_prompts
from treeflash_jax.core import files
from treeflash_jax.core.checks import expect
from treeflash_jax.core.settings import setting
from treeflash_jax.engine.answers.results import Result
from treeflash_jax.engine.call.prompts import Text, encode
from treeflash_jax.engine.loading import load
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.settings.pairs import NO_DRAFTER, locate
from treeflash_jax.formats.tokenizer import Tokenizer

SECONDS_BETWEEN_LINES = 10.0  # time between two lines of progress
OVERLAP = 8  # number of consecutive words that make two prompts overlap
FREE = ("out", "batch", "mesh", "replicas")  # settings that may change when a run continues: no answer depends on them


@dataclass(frozen=True, kw_only=True)
class RespondConfig:
    """Settings of this stage."""

    verifier: str = setting(help="name of a pair, folder, GGUF file or Hub id")
    drafter: str | None = setting(
        None, "a drafter, named as for `load`, for the same answers in less time", unset="none: one-token decoding"
    )
    sources: tuple[Source, ...] = setting(
        help="sources of prompts: chats up to their first assistant turn, whole texts, or prompts of earlier responses. "
        "Records held out for validation are not answered",
        min_length=1,
    )
    out: str = setting(help="the JSONL file, local or gs://")
    temperatures: tuple[float, ...] = setting(
        (0.0, 0.7, 0.0, 1.0), "sampling temperatures, which successive prompts use in turn", min_length=1, least=0
    )
    max_new_tokens: int = setting(160, "largest number of tokens of an answer", least=1)
    max_prompt_tokens: int = setting(192, "longer prompts are left out", least=1)
    exclude: tuple[str, ...] = setting(
        (),
        "JSONL files of prompts that the drafter will be evaluated on. Prompts that share eight consecutive words with "
        "any of these, or are the same in fewer words, are left out",
    )
    thinking: bool = setting(False, "ask the chat template for answers with thinking; drafters trained on them record it")
    template: dict[str, Any] = setting(help="further arguments of the chat template, by name", default_factory=dict)
    malformed: Literal["error", "skip"] = setting("error", "handling of records that cannot be used")
    batch: int = setting(128, "number of answers that a replica decodes together", least=1, most=2**16)
    seed: int = setting(0, "random seed of limits and answers", least=0, most=run_config.MAX_SEED)
    mesh: MeshConfig = MeshConfig()  # devices of a replica; `fsdp` stays 1
    replicas: Literal["host", "all"] = setting("host", "one verifier per host, or one over all hosts")


@dataclass(frozen=True)
class SourcePrompt:
    """Token ids of a prompt, and the name of its source."""

    source: str
    ids: list[int]


def main(settings: RespondConfig) -> None:
    hosts.connect()
    out = files.absolute(settings.out)
    with hosts.held(out.with_name(f"{out.name}.lock"), f"out={settings.out}"):
        answers.check_settings(settings, out, FREE)
        model = load_answering_model(settings)
        answer(settings, model, collect_prompts(settings, model), out)


def load_answering_model(settings: RespondConfig) -> TreeFlash:
    """Loads the verifier and the drafter, if any, on the devices of this replica."""
    expect(settings.mesh.fsdp == 1, "mesh.fsdp", settings.mesh.fsdp, "1: answers are made over data and model")
    mesh = hosts.make_mesh(settings.mesh, jax.local_devices() if settings.replicas == "host" else jax.devices())
    hosts.introduce(mesh, f"out={settings.out}")
    is_alone = mesh.size == 1 and (settings.replicas == "host" or jax.process_count() == 1)
    return load(
        verifier=locate(settings.verifier, "verifier"),
        drafter=NO_DRAFTER if settings.drafter is None else settings.drafter,
        mesh=None if is_alone else mesh,
        thinking=settings.thinking,
        template=settings.template,
    )


def collect_prompts(settings: RespondConfig, model: TreeFlash, *, held_out: bool = False) -> list[SourcePrompt]:
    """Returns the prompts of all sources, sorted by length to reduce padding.

    Args:
      held_out: whether to return the prompts held out for validation instead of the others.

    Raises ValueError for a source that cannot be read, if no prompt is short enough, for more tokens than the context
    holds, or for prompts to exclude without a tokenizer.
    """
    prompts: list[SourcePrompt] = []
    left_out: Counter[str] = Counter()
    if settings.exclude and model.tokenizer is None:
        raise ValueError(f"got exclude and a verifier without a tokenizer, expected tokenizer.json in {settings.verifier}")
    excluded: set[tuple[str, ...]] = set()
    for path in settings.exclude:
        for prompt in read_prompts(path):
            excluded |= word_sequences(prompt.turns[0]) | word_sequences(" ".join(prompt.turns))

    skipped = left_out if settings.malformed == "skip" else None
    for source in settings.sources:
        for record in read_records(source, settings.seed, skipped):
            if source.holds_out(record.number) != held_out:
                left_out["to be answered" if held_out else "held out"] += 1
                continue
            ids = encode_question(record, model.tokenizer, skipped)
            if ids is None:
                continue
            if len(ids) > settings.max_prompt_tokens:
                left_out["too long"] += 1
            elif excluded and not excluded.isdisjoint(word_sequences(question_text(record.content, model.tokenizer))):
                left_out["excluded"] += 1
            else:
                prompts.append(SourcePrompt(source.name, ids))
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())
    if not prompts:
        expected = "at least one that is held out; give the source hold_out=8" if held_out else "at least one"
        raise ValueError(f"got no prompt of at most {settings.max_prompt_tokens} tokens ({reasons}), expected {expected}")
    prompts.sort(key=lambda prompt: len(prompt.ids))
    longest = len(prompts[-1].ids)
    context = model.verifier.max_positions
    if longest + settings.max_new_tokens > context:
        raise ValueError(
            f"got a prompt of {longest} tokens + {settings.max_new_tokens} new tokens, expected at most {context} together "
            "(the verifier's context); lower max_prompt_tokens or max_new_tokens"
        )
    left_out_note = f"; left out: {reasons}" if reasons else ""
    hosts.say(f"{len(prompts):,} prompts{left_out_note}")
    return prompts


def word_sequences(text: str) -> set[tuple[str, ...]]:
    """Returns all sequences of OVERLAP consecutive words, in lower case and without punctuation.

    A shorter text is one sequence, which is only equal to that of a text with the same words.
    """
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[start : start + OVERLAP]) for start in range(max(1, len(words) - OVERLAP + 1))}


def question_text(content: Any, tokenizer: Tokenizer) -> str:
    """Returns the text of a record's prompt: the user's turns of a chat without its template, a text, or decoded ids."""
    question = _question(content)
    if isinstance(question, str):
        return question
    if isinstance(question[0], int):
        return tokenizer.decode(question)
    return " ".join(message["content"] for message in question if message["role"] == "user")


def encode_question(record: Record, tokenizer: Tokenizer | None, skipped: Counter[str] | None) -> list[int] | None:
    """Returns the ids of a record's prompt: a chat up to its first assistant turn, a text, or ids.

    For a record without a prompt, returns None and counts it in `skipped`. Raises ValueError if `skipped` is None.
    """
    try:
        return encode(_question(record.content), tokenizer)
    except ValueError as error:
        if skipped is None:
            raise ValueError(f"{record.where}: {error}") from None
        skipped["malformed"] += 1
        return None


def _question(content: Any) -> Any:
    if isinstance(content, str):
        return Text(content)
    if not isinstance(content, list):
        return content.prompt
    roles = [message["role"] for message in content]
    if roles[:1] == ["assistant"]:
        raise ValueError("got a chat that the assistant opens, expected another turn first")
    return content[: roles.index("assistant")] if "assistant" in roles else content


def answer(settings: RespondConfig, model: TreeFlash, prompts: Sequence[SourcePrompt], out: epath.Path) -> None:
    """Answers the prompts that have no answer in `out` yet, and merges the answers of all hosts in order."""
    by_host = settings.replicas == "host" and jax.process_count() > 1
    prompts, done = answers.match(out, prompts)
    hosts.wait("read")  # no host writes while another reads
    if hosts.is_first():
        answers.save_settings(settings, out)
    missing = [index for index in range(len(prompts)) if index not in done]
    share = missing[jax.process_index() :: jax.process_count()] if by_host else missing
    temperatures = [settings.temperatures[index % len(settings.temperatures)] for index in share]
    results: Iterable[tuple[int, Result]] = ()
    if share:
        results = model.generate_each(
            [prompts[index].ids for index in share],
            indices=share,
            builder="none" if settings.drafter is None else "best-first",
            acceptance="sample-and-match",  # gives the answers of one-token decoding, drafted or not
            temperature=temperatures,
            seed=settings.seed,
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.batch,
        )
    began = time.perf_counter()
    printed = time.perf_counter()
    tokens = 0
    adding = answers.adding(out) if by_host or hosts.is_first() else nullcontext(lambda *_: None)
    with adding as add, watch.Bar("answers", len(done) + len(share), len(done)) as bar:
        for number, (at, result) in enumerate(results, start=1):
            if result.finished == "interrupted":
                hosts.say("interrupted; the same command continues from here")
                raise SystemExit(130)
            prompt = prompts[share[at]]
            line = {
                "index": share[at],
                "source": prompt.source,
                "temperature": temperatures[at],
                "finished": result.finished,
                "prompt": prompt.ids,
                "response": result.ids,
            }
            add(share[at], json.dumps(line) + "\n")
            tokens += len(result.ids)
            bar.show(len(done) + number)
            if time.perf_counter() - printed > SECONDS_BETWEEN_LINES or number == len(share):
                printed = time.perf_counter()
                speed = tokens / max(result.seconds, 1e-9)
                hosts.say(f"{number:,} of {len(share):,} answers, {speed:,.0f} tokens/s")
    seconds = time.perf_counter() - began
    hosts.wait("merge")
    if hosts.is_first():
        answers.merge(out, len(prompts))
        hosts.say(f"{len(prompts):,} answers in {out}; {tokens:,} new tokens in {watch.duration(seconds)}")
    hosts.wait("merged")


if __name__ == "__main__":
    run_config.run_command(main, RespondConfig, __doc__)
