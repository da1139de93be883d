"""Answers are functions of seed and prompt; a run that was stopped anywhere, on any number of hosts, ends with one file."""

import json
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from conftest import DATA
from refusals import refused, snapshot
from toy_training import change_weights, run_job, write_lines

import treeflash_jax as tf
from train import respond
from train.data import answers
from train.data.records import Source
from train.respond import RespondConfig
from train.runtime import run_config
from train.runtime.run_config import MeshConfig
from treeflash_jax.core import files
from treeflash_jax.engine.settings.pairs import locate

QUESTIONS = ["Tom has 3 apples.", "How many?", "Write a function.", "What is 12 + 30? Explain it at length.", "Hi", "Why?"]
QUESTIONS += [f"Question {i}" for i in range(5)]
ASKED = dict(temperatures=(0.0, 0.7, 1.0), max_new_tokens=12, seed=7)
BOTH = """
import sys
from train import respond
from train.runtime import run_config
for path in sys.argv[1:]:
    respond.main(run_config.load(respond.RespondConfig, path))
"""


def chat(question: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "An answer."}]}


@pytest.fixture
def model(tiny, monkeypatch):
    """The shipped pair with its compiled programs; keeps what it was asked: the indices of every call."""
    generate_each = tiny.generate_each

    def noted(*args, **named):
        tiny.calls.append(list(named["indices"]))
        return generate_each(*args, **named)

    monkeypatch.setattr(tiny, "generate_each", noted)
    monkeypatch.setattr(tiny, "calls", [], raising=False)
    monkeypatch.setattr(respond, "load_answering_model", lambda settings: tiny)
    return tiny


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Source:
    path = write_lines(tmp_path_factory.mktemp("questions") / "asked.jsonl", [chat(question) for question in QUESTIONS])
    return Source(path=str(path), hold_out=0)


@pytest.fixture
def settings(tmp_path, questions) -> RespondConfig:
    out = str(tmp_path / "out" / "answers.jsonl")
    return RespondConfig(verifier="tiny", sources=(questions,), out=out, batch=4, mesh=MeshConfig(data=1), **ASKED)


@pytest.fixture(scope="module")
def whole(tiny, questions, tmp_path_factory) -> bytes:
    """What an uninterrupted run writes, in batches of other sizes."""
    out = tmp_path_factory.mktemp("whole") / "answers.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(respond, "load_answering_model", lambda settings: tiny)
        respond.main(RespondConfig(verifier="tiny", sources=(questions,), out=str(out), batch=7, **ASKED))
    return out.read_bytes()


def lines_of(content: bytes) -> list[dict]:
    return [json.loads(line) for line in content.splitlines()]


def test_lines_hold_what_was_asked_and_answered(tiny, whole):
    lines = lines_of(whole)
    prompts = [tiny.encode([{"role": "user", "content": question}]) for question in QUESTIONS]
    assert [line["prompt"] for line in lines] == sorted(prompts, key=len)
    for index, line in enumerate(lines):
        assert line["index"] == index and line["source"] == "asked"
        assert line["temperature"] == (0.0, 0.7, 1.0)[index % 3]
        is_stopped = line["response"][-1] in tiny.stop_ids
        assert line["finished"] == ("stop" if is_stopped else "length") and (is_stopped or len(line["response"]) == 12)


@pytest.mark.slow
def test_an_answer_depends_on_seed_and_index_only(tiny, whole):
    for line in lines_of(whole):
        named = dict(builder="none", seed=7, max_new_tokens=12, batch_size=4)
        [alone] = tiny.generate([line["prompt"]], indices=[line["index"]], temperature=line["temperature"], **named)
        assert alone.ids == line["response"]
    hot = [line for line in lines_of(whole) if line["temperature"] == 1]
    moved = tiny.generate([line["prompt"] for line in hot], indices=[99] * len(hot), temperature=1.0, **named)
    assert [result.ids for result in moved] != [line["response"] for line in hot]


@pytest.mark.slow
def test_drafted_answers_are_the_same(model, settings, whole):
    respond.main(replace(settings, drafter="tiny"))
    assert Path(settings.out).read_bytes() == whole


def interrupted(generate_each, prompts, **named):
    """Four answers, then an interrupt."""
    for number, (at, result) in enumerate(generate_each(prompts, **named)):
        yield at, replace(result, finished="interrupted") if number >= 4 else result


@pytest.mark.parametrize("place", ["local", "gs://bucket"])
def test_a_stopped_run_ends_with_the_same_file(bucket, model, settings, whole, monkeypatch, capsys, place):
    """Answers are parts until they are merged, and only unanswered prompts are asked again."""
    out = files.absolute(settings.out if place == "local" else f"{place}/answers.jsonl")
    settings = replace(settings, out=str(out))
    monkeypatch.setattr(answers, "SECONDS_PER_PART", 0)
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(model, "generate_each", partial(interrupted, model.generate_each))
        respond.main(settings)
    assert "interrupted; the same command continues from here\n" in capsys.readouterr().out
    parts = [path for path in out.parent.iterdir() if ".part-" in path.name]
    assert sum(len(lines_of(path.read_bytes())) for path in parts) == len(parts) == 4 and not out.exists()
    respond.main(settings)
    assert out.read_bytes() == whole and len(model.calls[1]) == 7
    respond.main(settings)
    assert len(model.calls) == 2 and out.read_bytes() == whole
    assert {*out.parent.glob(f"{out.name}*")} == {out, answers.settings_path(out), answers.inputs_path(out)}


def test_parts_of_other_hosts_are_merged(model, settings, whole):
    """As three hosts leave them that were killed: batches dealt out, some answers twice."""
    out = Path(settings.out)
    out.parent.mkdir()
    answers.save_settings(settings, out)
    lines = whole.splitlines(keepends=True)
    out.write_bytes(lines[3] * 2 + lines[8])
    out.with_name("answers.jsonl.part-0").write_bytes(b"".join(lines[8:]) + b"".join(lines[:2]))
    out.with_name("answers.jsonl.part-2").write_bytes(b"".join(lines[8:10]))
    respond.main(settings)
    assert out.read_bytes() == whole
    assert model.calls == [[2, 4, 5, 6, 7]]
    names = ["answers.jsonl", "answers.jsonl.inputs.json", "answers.jsonl.settings.toml"]
    assert sorted(path.name for path in out.parent.iterdir()) == names


def test_settings_may_change_only_where_no_answer_depends_on_them(model, settings, whole):
    out = Path(settings.out)
    respond.main(settings)
    out.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    respond.main(replace(settings, batch=7, mesh=MeshConfig(data=2), replicas="all"))
    assert out.read_bytes() == whole
    for changed in ({"seed": 8}, {"temperatures": (0.0,)}, {"max_new_tokens": 13}, {"verifier": "other"}):
        words = f"was begun with {next(iter(changed))} = ", "or another out="
        refused(partial(respond.main, replace(settings, **changed)), *words)
    out.with_name("answers.jsonl.settings.toml").unlink()
    refused(lambda: respond.main(settings), "exists without its settings")
    assert out.read_bytes() == whole


def test_answers_of_another_verifier_are_not_added(model, settings, whole, tmp_path, capsys):
    """In files of an earlier version, which do not say whose answers they are, they are from the next command on."""
    shutil.copytree(locate("tiny"), tmp_path / "verifier")
    settings, out = replace(settings, verifier=str(tmp_path / "verifier")), Path(settings.out)
    respond.main(settings)
    out.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    before = snapshot(out.parent)
    change_weights(tmp_path / "verifier")
    refused(lambda: respond.main(settings), f"{tmp_path}/verifier: got a verifier that changed after out={out} had begun")
    assert snapshot(out.parent) == before and "earlier version" not in capsys.readouterr().out
    answers.inputs_path(out).unlink()
    respond.main(settings)
    assert f"{out}: begun by an earlier version, so the verifier cannot be compared" in capsys.readouterr().out
    change_weights(tmp_path / "verifier")  # back to what it was
    refused(lambda: respond.main(settings), "another out=")


def test_a_larger_limit_adds_answers_and_keeps_those_there(model, settings, questions):
    def limited(limit):
        return replace(settings, sources=(replace(questions, limit=limit),))

    out = Path(settings.out)
    respond.main(limited(4))
    four = out.read_bytes()
    respond.main(limited(9))
    nine = out.read_bytes()
    assert nine.startswith(four) and model.calls[-1] == [4, 5, 6, 7, 8]
    assert len({line.partition(b"prompt")[2] for line in nine.splitlines()}) == 9
    lines = nine.splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:5] + lines[6:7]))
    respond.main(limited(9))
    assert out.read_bytes() == nine and model.calls[-1] == [5, 7, 8]
    with pytest.raises(ValueError, match="was begun with sources.0.limit = 9, got 5; give sources.0.limit=9"):
        respond.main(limited(5))


@pytest.mark.parametrize("index", [1, 99])
def test_a_file_that_answers_other_prompts_is_left_alone(model, settings, whole, index):
    respond.main(settings)
    content = whole.splitlines(keepends=True)[0] + b'{"index": %d, "prompt": [5]}\n' % index
    Path(settings.out).write_bytes(content)
    refused(lambda: respond.main(settings), f"line 2 answers another prompt than number {index} of these sources")
    assert Path(settings.out).read_bytes() == content


def test_prompts_of_every_kind_of_source(model, settings, tmp_path):
    asked = [{"role": "user", "content": "Only asked"}]
    several = [*chat("First")["messages"], *chat("Second")["messages"]]
    lines = [{"messages": asked}, {"messages": several}, chat("word " * 300), chat("Held out")]
    chats = write_lines(tmp_path / "chats.jsonl", lines)
    texts = write_lines(tmp_path / "texts.jsonl", [{"text": "Once upon a time"}])
    before = write_lines(tmp_path / "before.jsonl", [{"prompt": [7, 8, 9], "response": [1]}])
    sources = (
        Source(path=str(chats), hold_out=4),
        Source(path=str(texts), format="text"),
        Source(path=str(before), format="responses"),
    )
    prompts = respond.collect_prompts(replace(settings, sources=sources), model)
    expected = [("before", [7, 8, 9]), ("texts", model.encode(tf.Text("Once upon a time")))]
    expected += [("chats", model.encode(messages)) for messages in (asked, several[:1])]
    assert [(prompt.source, prompt.ids) for prompt in prompts] == sorted(expected, key=lambda item: len(item[1]))


def test_prompts_like_those_of_an_evaluation_are_left_out(model, settings, tmp_path):
    turns = ["How many pens", "fit into seven boxes of twelve, if one is half full?"]
    short = ["Who wrote it?", "Why?"]
    lines = [{"id": "pens", "turns": turns}, {"id": "short", "turns": short}, {"id": "sky", "turns": ["Is it blue?"]}]
    evaluated = write_lines(tmp_path / "evaluated_test.jsonl", lines)
    asked = ["fit into SEVEN boxes of twelve - if one lies here", "fit into seven boxes of twelve, if they are red"]
    asked += ["who wrote it", "Is it blue", "Who wrote it, and is it blue?"]
    source = Source(path=str(write_lines(tmp_path / "asked.jsonl", [chat(text) for text in asked])), hold_out=0)
    prompts = respond.collect_prompts(replace(settings, sources=(source,), exclude=(str(evaluated),)), model)
    assert sorted(prompt.ids for prompt in prompts) == sorted(map(model.encode, (asked[1], asked[4])))
    missing = replace(settings, exclude=(str(tmp_path / "missing.jsonl"),))
    refused(partial(respond.main, missing), "cannot read", "missing.jsonl")


def test_bad_input_is_one_line(model, settings, tmp_path):
    def source(name, *lines):
        return Source(path=str(write_lines(tmp_path / name, lines)), hold_out=0)

    bad = source("bad.jsonl", {"messages": [{"role": "assistant", "content": "Hello"}]})
    half = source("half.jsonl", {"prompt": "fine"}, {"prompt": "half \ud800"})
    unreadable = source("unreadable.jsonl", {"prompt": 5})
    assert len(respond.collect_prompts(replace(settings, sources=(half,), malformed="skip"), model)) == 1
    cases = [
        ({"sources": (half,)}, "half.jsonl, line 2.*U+D800"),
        ({"sources": (bad,)}, "bad.jsonl, line 1: got a chat that the assistant opens"),
        ({"sources": (bad,), "malformed": "skip"}, "got no prompt of at most 192 tokens (1 malformed)"),
        ({"sources": (unreadable,), "malformed": "skip"}, "got no prompt of at most 192 tokens (1 malformed)"),
        ({"max_prompt_tokens": 3}, "got no prompt of at most 3 tokens (11 too long)"),
        ({"max_new_tokens": 2040}, "expected at most 2048 together"),
        ({"sources": (Source(path="gsm8k_test.jsonl"),)}, "gsm8k_test.jsonl: no such file"),
    ]
    for changed, message in cases:
        refused(partial(respond.main, replace(settings, **changed)), *message.split(".*"))
    assert not Path(settings.out).exists()
    for changed in ({"sources": ()}, {"temperatures": ()}, {"batch": 0}):
        refused(partial(run_config.replaced, settings, changed), "got ", next(iter(changed)))


def test_models_that_cannot_be_loaded_are_named(settings):
    no_fsdp, too_many = ({"mesh": MeshConfig(**sizes)} for sizes in ({"fsdp": 2}, {"data": 64}))
    cases = ((no_fsdp, "got mesh.fsdp 2, expected 1"), (too_many, "a product of at most"), ({"verifier": "/no"}, "/no"))
    for changed, message in cases:
        refused(partial(respond.load_answering_model, replace(settings, **changed)), message)


def test_a_layer_in_the_verifiers_files_is_a_drafter_only_if_it_is_named(settings):
    asked = replace(settings, verifier=str(DATA / "hybrid" / "qwen3_5"))
    assert respond.load_answering_model(asked).drafter is None
    assert respond.load_answering_model(replace(asked, drafter="mtp")).drafter.kind == "mtp"


def test_the_template_is_asked_and_stays_with_the_answers(settings):
    thinking, out = replace(settings, thinking=True, template={"effort": "high"}), Path(settings.out)
    assert respond.load_answering_model(thinking).tokenizer.template == {"enable_thinking": True, "effort": "high"}
    assert answers.read_thinking(settings.out) is None
    out.parent.mkdir()
    answers.save_settings(thinking, out)
    assert answers.read_thinking(settings.out) is True
    refused(lambda: answers.check_settings(settings, out, respond.FREE), "was begun with thinking = True, got False")


@pytest.mark.slow
def test_two_processes_write_the_file_of_one(settings, whole, tmp_path):
    """Two processes of four devices: a replica each over uneven batches, then one verifier over all eight."""
    paths = []
    for replicas, mesh in (("host", MeshConfig()), ("all", MeshConfig(data=4, model=2))):
        path = tmp_path / f"{replicas}.settings"
        run_config.save(replace(settings, out=str(tmp_path / f"{replicas}.jsonl"), replicas=replicas, mesh=mesh), path)
        paths.append(str(path))
    logs = run_job([sys.executable, "-c", BOTH, *paths], 2, JAX_NUM_CPU_DEVICES="4")
    for replicas in ("host", "all"):
        assert (tmp_path / f"{replicas}.jsonl").read_bytes() == whole, replicas
    assert not list(tmp_path.glob("*.part-*"))
    assert logs[0].count("6 of 6 answers") == 1 and logs[0].count("11 of 11 answers") == 1, "a share, then all"
    assert "answers in" in logs[0] and "answers in" not in logs[1], "one process speaks"
