"""`bench run`: what is measured, how a run is resumed, and what is refused."""

from __future__ import annotations

import json
import random
import sys
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from conftest import PAIR
from refusals import mistake, refused
from toy_training import read_lines as read
from toy_training import write_lines

import treeflash_jax as tf
from treeflash_jax.bench import bench_records, harness, prompt_sets, report, run
from treeflash_jax.bench.harness import System
from treeflash_jax.bench.systems import parse_systems
from treeflash_jax.cli import check, commands
from treeflash_jax.cli.commands import main
from treeflash_jax.formats.tokenizer import Tokenizer

FIRST, SECOND = "How many legs do 3 cows have?", "And 5 hens?"
PROMPTS = [{"id": "cows", "turns": [FIRST, SECOND], "reference": "12"}, {"id": 7, "turns": ["Name a colour."]}]
SMALL = "--systems ar marginal treeflash --nodes 8 --candidates 4 --children 4 --max-new-tokens 8".split()
SYSTEMS = ["ar", "marginal-8", "treeflash-8"]


@pytest.fixture
def prompts(tmp_path):
    return write_lines(tmp_path / "prompts.jsonl", PROMPTS)


@pytest.fixture
def fake(tiny, monkeypatch):
    """Answers made up at once, of two rounds with 3 and 1 tokens; `calls` holds what was asked for."""
    calls = []

    def generate(_, inputs, config, *, seed):
        calls.append(SimpleNamespace(inputs=deepcopy(inputs), config=config, seed=seed))
        seconds, compile_seconds = (1000.0, 9.0) if fake.compiles(len(calls)) else (float(len(inputs)), 0.0)
        answer = {"prompt_ids": [1], "ids": fake.ids(config), "text": f"answer {len(calls)}", "accept_lengths": [3, 1]}
        answer |= {"builder": config.builder, "finished": fake.finished, "tokens_per_second": 4.0}
        return [tf.Result(**answer, seconds=seconds, compile_seconds=compile_seconds) for _ in inputs]

    fake = SimpleNamespace(calls=calls, compiles=lambda call: False, finished="stop", model=tiny)
    fake.ids = lambda config: [5, 6, 7, 8]

    def load(*_, thinking, template, **__):
        model = copy(tiny)
        model.tokenizer = Tokenizer(tiny.tokenizer.inner, {"enable_thinking": thinking, **(template or {})})
        return model

    monkeypatch.setattr(tf.TreeFlash, "generate", generate)
    monkeypatch.setattr(run.tf, "load", load)
    return fake


def bench(prompts, out, more=()):
    return main(["bench", "run", "--prompts", str(prompts), "--out", str(out), *SMALL, *more])


@pytest.mark.slow
def test_a_run_records_what_generate_gives(tiny, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(run.tf, "load", lambda *_, **__: tiny)
    out = tmp_path / "out.jsonl"
    assert bench(prompts, out, ["--temperature", "0", "1"]) == 0
    records = read(out)
    keys = [(p, s, t, 0) for p in ("cows", "7") for t in (0.0, 1.0) for s in SYSTEMS]
    assert sorted(bench_records.record_key(record) for record in records) == sorted(keys)
    assert [r["system"] for r in records] == 2 * SYSTEMS + 2 * (SYSTEMS[1:] + SYSTEMS[:1])  # interleaved, rotating

    chat = [{"role": "user", "content": FIRST}]
    settings = {"max_new_tokens": 8, "nodes": 8, "candidates": 4, "children": 4, "ngrams": 0}
    answer = tiny.generate([chat], **settings)[0]
    chat += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": SECOND}]
    again = tiny.generate([chat], **settings)[0]
    record = next(r for r in records if bench_records.record_key(r) == ("cows", "treeflash-8", 0.0, 0))
    assert record["ids"] == [answer.ids, again.ids] and record["tokens"] == len(answer.ids) + len(again.ids)
    assert record["accept_lengths"] == [answer.accept_lengths, again.accept_lengths]
    assert record["texts"] == [answer.text, again.text] and record["cut"] == [answer.cut, again.cut]
    assert record["finished"] == [answer.finished, again.finished]
    drafts = {"nodes": 8, "candidates": 4, "children": 4, "shortlist": 0, "depths": None, "head": "mlp", "block_size": 16}
    drafts |= {"builder": "best-first", "acceptance": "sample-and-match"}
    drafts |= dict.fromkeys(("branches", "trunk", "selector", "skeleton", "leaves", "lanes"))  # sizes of sampled trees only
    drafts |= {"drafter_temperature": tiny.drafter.drafter_temperature, "drafter_temperature_rule": "max(it, min(T, 1))"}
    drafts |= {"attention": None, "ngrams": 0, "draft_vocabulary": "all"}
    others = {"temperature": 0.0, "seed": 0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 8, "format": "chat"}
    model = {"dtype": "float32", "quantize": None, "batch_size": 1, "verifier": "tiny", "drafter": "tiny"}
    model |= {"template": {"enable_thinking": False}}
    assert record["settings"] == drafts | others | model
    assert record["hardware"]["backend"] == "cpu" and set(record["versions"]) == {"jax", "treeflash_jax", "python"}
    plain = next(r for r in records if r["system"] == "ar")
    assert plain["settings"]["head"] is plain["settings"]["nodes"] is None and set(plain["accept_lengths"][0]) == {1}

    for record in records:
        assert record["seconds"] > 0
        same = [r["ids"] for r in records if r["prompt_id"] == record["prompt_id"]]
        assert same.count(record["ids"]) == 3, "the systems of one temperature agree"


def test_first_calls_and_calls_that_compile_are_made_again(fake, prompts, tmp_path):
    """Conversations of 2 turns and 1: calls 1 to 4 are the first of ar and its repetition, 5 to 8 the tree's."""
    fake.compiles = lambda call: call in (1, 9)  # the first turn of all, and the tree's call for the second prompt
    out = tmp_path / "out.jsonl"
    assert bench(prompts, out, ["--systems", "ar", "treeflash"]) == 0
    assert [call.config.builder for call in fake.calls] == 4 * ["none"] + 6 * ["best-first"] + ["none"]
    assert [r["seconds"] for r in read(out)] == [2.0, 2.0, 1.0, 1.0]
    assert [r["compile_seconds"] for r in read(out)] == [9.0, 0.0, 9.0, 0.0]


def test_answers_that_differ_pass_at_a_near_tie_and_fail_elsewhere(fake, prompts, tmp_path, monkeypatch, capsys):
    """The record that is written second says how the two differ: the tree's for the first prompt, then that of ar."""
    fake.ids = lambda config: [5, 6, 7, 8] if config.builder == "none" else [5, 6, 9, 8]
    arguments = ["--systems", "ar", "treeflash"]
    for limit, verdict in ((1e-4, "FAIL"), (1e9, "PASS")):
        monkeypatch.setattr(check, "NEAR_TIE", limit)
        assert bench(prompts, tmp_path / verdict, arguments) == 0
        shown, records = capsys.readouterr(), read(tmp_path / verdict)
        told = [(r["prompt_id"], r["system"], *r["differences"]) for r in records if r["differences"]]
        assert told == [("cows", "treeflash-8", "ar"), ("7", "ar", "treeflash-8")]
        apart = records[-1]["differences"]["treeflash-8"]
        assert (apart["turn"], apart["index"], apart["drafted"], apart["plain"]) == (0, 2, 9, 7)
        assert shown.err.count(f"{verdict}: prompt") == 2
        assert f"lossless: {verdict}" in shown.out
    assert "0 of 2 answers identical, 2 near-ties, one in 3 tokens" in " ".join(shown.out.split())
    assert bench(prompts, tmp_path / "sampled", ["--systems", "ar", "treeflash+paths", "--temperature", "1"]) == 0
    assert not any(record["differences"] for record in read(tmp_path / "sampled")), "other samples by design"
    assert "lossless" not in capsys.readouterr().out


def test_a_batch_shares_its_seconds(fake, tmp_path):
    prompts = write_lines(tmp_path / "prompts.jsonl", [*PROMPTS, {"id": "c", "turns": ["Why?"]}])
    out = tmp_path / "out.jsonl"
    assert bench(prompts, out, ["--systems", "ar", "--batch-size", "2"]) == 0
    assert [len(call.inputs) for call in fake.calls] == [2, 1, 2, 1, 1]  # two turns, again after warm-up, the last prompt
    assert [(r["prompt_id"], r["seconds"]) for r in read(out)] == [("cows", 2.0), ("7", 1.0), ("c", 1.0)]
    out.write_text(out.read_text().splitlines(keepends=True)[1])  # "7" is known: its batch is measured for "cows" alone
    assert bench(prompts, out, ["--systems", "ar", "--batch-size", "2"]) == 0
    assert [r["prompt_id"] for r in read(out)] == ["7", "cows", "c"]


def test_sets_of_prompts_are_drawn_and_reported_apart(fake, prompts, tmp_path, capsys):
    other, out = write_lines(tmp_path / "other.jsonl", PROMPTS[1:]), tmp_path / "out.jsonl"
    assert main(["bench", "run", "--prompts", str(prompts), str(other), *SMALL, "--limit", "1", "--out", str(out)]) == 0
    records, cows, colour = read(out), ("prompts", "prompts/cows"), ("other", "other/7")
    assert [(r["prompt_set"], r["prompt_id"]) for r in records] == 3 * [cows] + 3 * [colour]
    systems = report.summarise(records)["systems"]
    assert [(s["set"], s["prompts"]) for s in systems] == 3 * [("other", 1)] + 3 * [("prompts", 1)]
    shown = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert ["other", "0", "ar"] in shown and ["prompts", "0", "treeflash-8"] in shown
    twice = ["--prompts", str(prompts), str(prompts), "--out", str(out)]
    mistake(capsys, main, ["bench", "run", *twice], "expected files of different names")


def test_a_stopped_run_continues_where_it_was(fake, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    assert bench(prompts, out) == 0
    whole = out.read_bytes().splitlines(keepends=True)
    start = b"".join(whole[:4])
    out.write_bytes(start + whole[4][:40])
    fake.calls.clear()
    with pytest.warns(UserWarning, match=r"out.jsonl:5: the last line is cut off"):
        assert bench(prompts, out) == 0
    assert out.read_bytes().startswith(start)
    keys = sorted(map(bench_records.record_key, read(out)))
    assert keys == sorted(bench_records.record_key(json.loads(line)) for line in whole)
    assert [call.config.builder for call in fake.calls].count("none") == 2  # an answer and its warm-up
    assert len(fake.calls) == 4  # two answers and two warm-ups

    out.write_bytes(out.read_bytes()[:-1])  # a whole record without its newline is kept
    fake.calls.clear()
    assert bench(prompts, out) == 0
    assert fake.calls == [] and len(read(out)) == 6
    assert bench(prompts, out, ["--systems", "treeflash-4", "--seed", "1"]) == 0  # another system and seed join the file
    assert len(read(out)) == 8

    before, fake.finished = out.read_bytes(), "interrupted"
    assert bench(prompts, out, ["--systems", "ar", "--seed", "2"]) == 130
    assert out.read_bytes() == before


def test_each_prompt_has_its_own_noise_which_all_systems_share(fake, prompts, tmp_path):
    assert bench(prompts, tmp_path / "out.jsonl", ["--seed", "0", "1"]) == 0
    seeds = {}
    for call in fake.calls:
        seeds.setdefault(call.inputs[0][0]["content"], set()).update(call.seed)
    assert [len(values) for values in seeds.values()] == [2, 2], "one per seed, whatever the system"
    assert len(set.union(*seeds.values())) == 4


def test_mistakes_end_with_one_line_and_keep_the_results(fake, prompts, tmp_path, capsys):
    out, fresh = tmp_path / "out.jsonl", tmp_path / "fresh.jsonl"
    assert bench(prompts, out) == 0
    before = out.read_bytes()
    fake.calls.clear()
    capsys.readouterr()
    other = write_lines(tmp_path / "other.jsonl", [{"id": 7, "turns": ["Name a colour!"]}])
    for path, more, words in (
        (out, ["--max-new-tokens", "9"], "got max_new_tokens 9, but 8 in the file"),
        (out, ["--template", '{"effort": "high"}'], "got template {'effort': 'high', 'enable_thinking': False}, but"),
        (out, ["--systems", "treeflash-0"], "nodes 0"),
        (out, ["--prompts", str(other)], "another text for prompt '7'"),
        (out, ["--prompts", "nowhere.jsonl"], "cannot read nowhere.jsonl: No such file"),
        (fresh, ["--max-new-tokens", "1500"], "prompt 'cows': got 30"),
        (fresh, ["--format", "raw"], "prompt 'cows': got 2 turns, expected one turn alone"),
        (fresh, ["--out", "nowhere/out.jsonl"], "cannot write nowhere/out.jsonl: No such file"),
    ):
        mistake(capsys, partial(bench, prompts, path), more, words)
        assert fake.calls == [] and out.read_bytes() == before and not fresh.exists()


@pytest.mark.parametrize("text, words", [
    ("", "prompts.jsonl: got no prompts"),
    ('{"id": null, "turns": ["x"]}\n', "prompts.jsonl:1: got id None"),
    ('{"id": "prompts-2", "turns": ["x"]}\n{"turns": ["x"]}\n', "prompts.jsonl:2: got id 'prompts-2'"),
    ('{"words": "x"}\n', "prompts.jsonl:1: got keys 'words', expected 'conversations' or 'messages'"),
    ('{"messages": [{"role": "assistant", "content": "x"}]}\n', "prompts.jsonl:1: got no user turn"),
    ('{"messages": [{"role": "tool", "content": "x"}]}\n', "prompts.jsonl:1: got a message of the role 'tool'"),
    ('{"id": "a", "turns": ["x"]}\n\n{"id": "a", "turns": ["y"]}\n', "prompts.jsonl:3: got id 'a'"),
    ('{"id": "a", "turns": ["x", 3]}\n', "prompts.jsonl:1: got turns ['x', 3]"),
])  # fmt: skip
def test_bad_prompts_are_named_by_file_and_line(tmp_path, text, words):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    refused(lambda: prompt_sets.read_prompts(path), words)


def test_training_files_are_prompt_files_too(tiny, tmp_path):
    """Every form of a chat gives the prompt that the published one gives; ids are invented where there are none."""
    forms = [
        {"id": "a", "turns": ["x", "y"], "reference": None},
        {"conversations": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "an answer"}]},
        {"messages": [{"role": "system", "content": "s"}, {"from": "human", "value": "x"}]},
        {"prompt": "x"},
    ]
    prompts = prompt_sets.read_prompts(write_lines(tmp_path / "mixed.jsonl", forms))
    assert [prompt.id for prompt in prompts] == ["a", "mixed-2", "mixed-3", "mixed-4"]
    assert [prompt.turns for prompt in prompts] == [("x", "y"), ("x",), ("x",), ("x",)]
    assert [prompt.system for prompt in prompts] == [None, None, "s", None]
    assert prompts[1].hash == prompts[3].hash != prompts[2].hash
    opening = [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    assert prompt_sets.empty_chat(prompts[2], "chat") == opening
    assert isinstance(prompt_sets.empty_chat(prompts[1], "raw"), tf.Text)
    [[result]] = harness.converse(plain_system(tiny, max_new_tokens=2, batch_size=1), prompts[2:3], "chat", 0.0, 0)
    assert result.prompt_ids == tiny.encode(opening)
    words = "'mixed-3': got a system message, expected one turn alone with the format raw"
    refused(lambda: run.check([plain_system(tiny)], prompts[2:], "raw", [], "out"), words)


def plain_system(model, **settings):
    return System(name="ar", model=model, config=tf.GenerateConfig(builder="none", **settings))


def test_names_of_systems_hold_their_settings():
    systems = parse_systems(["ar", "chain@0.5", "marginal@0.7", "treeflash-64", "treeflash", "treeflash-auto"], [4, 16])
    trees = "marginal-4@0.7 marginal-16@0.7 treeflash-64 treeflash-4 treeflash-16 treeflash-auto"
    assert list(systems) == ["ar", "chain@0.5", *trees.split()]
    assert systems["marginal-16@0.7"] == {"head": "marginal", "ngrams": 0, "nodes": 16, "drafter_temperature": 0.7}
    assert systems["treeflash-64"] == {"ngrams": 0, "nodes": 64} and systems["treeflash-auto"]["nodes"] == "auto"
    assert systems["chain@0.5"]["drafter_temperature"] == 0.5 and parse_systems(["joined"], [4])["joined-4"]["ngrams"]
    systems = parse_systems(["treeflash-8+delayed:trunk=auto:branches=3", "treeflash:selector=a:b.safetensors"], [4])
    assert list(systems) == ["treeflash-8+delayed:trunk=auto:branches=3", "treeflash-4:selector=a:b.safetensors"]
    delayed, selector = systems.values()
    assert delayed == {"ngrams": 0, "builder": "delayed", "acceptance": None, "nodes": 8, "trunk": "auto", "branches": 3}
    assert selector == {"ngrams": 0, "nodes": 4, "selector": "a:b.safetensors"}
    systems = parse_systems(["treeflash-8+hybrid", "treeflash+one-path+block", "marginal+paths+traversal@0.7"], [4])
    assert list(systems) == ["treeflash-8+hybrid", "treeflash-4+one-path+block", "marginal-4+paths+traversal@0.7"]
    hybrid, one_path, marginal = systems.values()
    assert hybrid == {"ngrams": 0, "builder": "hybrid", "acceptance": None, "nodes": 8}
    assert one_path["branches"] == 1 and marginal["acceptance"] == "traversal"
    unknown = "got setting 'temperature' of a system, expected one of"
    names = ("medusa", "ar:trunk=1", "chain+hybrid", "treeflash+heap", "treeflash+hybrid+luck")
    bad = dict.fromkeys(names, "unknown system") | {"treeflash:temperature=1": unknown, "treeflash:trunk=-1": "trunk"}
    for name, words in bad.items():
        refused(partial(parse_systems, [name], [4]), words)


def test_a_preset_leaves_out_trees_of_equal_settings(tiny, monkeypatch):
    names = ["marginal+hybrid+traversal", "treeflash+hybrid+traversal"]
    words = ["bench", "run", "--out", "out", "--preset", "rules", "--nodes", "8", "--systems", *names]
    arguments = commands.parser().parse_args(words)
    for head, expected in (("marginal", 1), ("mlp", 2)):
        model = tf.TreeFlash(tiny.verifier, tiny.weights, drafter=replace(tiny.drafter, head=head))
        monkeypatch.setattr(run.tf, "load", lambda *_, model=model, **__: model)
        assert len(run.load_systems(arguments, parse_systems(arguments.systems, arguments.nodes))) == expected


def test_drafters_are_systems_with_one_baseline_and_their_own_options():
    words = ["--pair", "tiny", "shipped=tiny", "ngram", "--nodes", "4", "--candidates", "5", "--out", "x"]
    arguments = commands.parser().parse_args(["bench", "run", *words])
    systems = run.load_systems(arguments, parse_systems(arguments.systems, arguments.nodes))
    trees = [f"{name}, shipped" for name in ("chain", "marginal-4", "treeflash-4", "joined-4")]
    assert [system.name for system in systems] == ["ar", *trees, "chain, ngram", "treeflash-4, ngram"]
    assert [system.settings()["candidates"] for system in systems] == [None, 5, 5, 5, 5, None, None]
    assert [system.settings()["drafter"] for system in systems[1:]] == 4 * ["shipped"] + 2 * ["ngram"]
    assert systems[1].model.weights.verifier is systems[-1].model.weights.verifier, "one copy in memory"


@pytest.mark.slow
def test_drafters_are_compared_in_turns_with_the_times_of_their_phases(short, prompts, tmp_path, capsys):
    out, plot = tmp_path / "out.jsonl", tmp_path / "tau.png"
    words = ["bench", "run", "--pair", str(short), f"itself={short}", "ngram", "--systems", "ar", "chain", "treeflash"]
    words += ["--prompts", str(prompts), "--nodes", "2", "4", "--max-new-tokens", "8", "--phases", "30"]
    assert main([*words, "--out", str(out), "--plot", str(plot)]) == 0
    printed, records = capsys.readouterr().out, read(out)
    names = [f"{name}, {drafter}" for drafter in ("itself", "ngram") for name in ("chain", "treeflash-2", "treeflash-4")]
    assert [record["system"] for record in records[:7]] == ["ar", *names] and len(records) == 14
    assert plot.stat().st_size > 1000 and "ms by phase, after 30 tokens" in printed and "FAIL" not in printed
    phases = {record["system"]: record["phases"] for record in records}
    assert phases.pop("ar") is None
    assert {*phases["treeflash-4, itself"]["ms"]} == {*"draft tree verify accept commit round step prefill".split()}
    assert all(times["context"] == 30 and min(times["ms"].values()) > 0 for times in phases.values())
    systems = {system["system"]: system for system in report.summarise(records)["systems"]}
    assert systems["treeflash-4, itself"]["acceptance_by_depth"][0] == 1, "a model accepts what it drafted itself"
    out.write_text("".join(map("{}\n".format, out.read_text().splitlines()[:9])))
    assert main([*words, "--out", str(out)]) == 0
    assert {record["system"]: record["phases"] for record in read(out)} == phases | {"ar": None}, "times are kept"


@pytest.mark.parametrize("pair, words", [
    (["tiny"], "got --pair tiny, expected a verifier and drafters"),
    (["tiny", "a=tiny", "a=ngram"], "expected a verifier and drafters of different labels"),
    (["tiny", "none"], "expected a verifier and drafters of different labels"),
    (["tiny", "ngram", "--systems", "marginal"], "drafters of kind 'ngram' do not have it"),
    (["tiny", "tiny", "--phases", "9999"], "got --context 9999, expected at most"),
])  # fmt: skip
def test_bad_drafters_and_sizes_end_with_one_line(tmp_path, capsys, pair, words):
    out = tmp_path / "out.jsonl"
    mistake(capsys, main, ["bench", "run", "--pair", *pair, "--out", str(out)], words)
    assert not out.exists()


def test_published_formats_and_draw(fake):
    def worded(turn, format):
        chat = prompt_sets.make_chat(prompt_sets.BenchPrompt(id="1", turns=(turn,)), format, [])
        return chat if format == "raw" else chat[0]["content"]

    assert worded("1 + {turn}?", "chat") == worded("1 + {turn}?", "raw") == "1 + {turn}?"
    boxed = "Q\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert worded("def f():", "humaneval").endswith("passes the tests:\n```python\ndef f():\n```")
    every = prompt_sets.read_prompts(prompt_sets.BUNDLED)
    chosen = sorted(random.Random(42).sample(range(len(every)), 5))
    assert prompt_sets.draw(every, 5) == [every[i] for i in chosen]
    assert prompt_sets.draw(every, None) == prompt_sets.draw(every, 99) == every
    run.check([plain_system(fake.model, max_new_tokens=512)], every, "chat", [], "out.jsonl")  # all fit
    for format, expected in (("raw", tf.Text("Q")), ("math", [{"role": "user", "content": boxed}])):
        harness.converse(plain_system(fake.model), [prompt_sets.BenchPrompt(id="a", turns=("Q",))], format, 0.0, 0)
        assert fake.calls[-1].inputs == [expected] and isinstance(fake.calls[-1].inputs[0], type(expected))


STAND_IN = """
import json, sys
for line in sys.stdin:
    question = json.loads(line)
    assert question["max_new_tokens"] == 12 and question["stop_ids"] == []
    answer = {"ids": question["prompt"][:1]} if sys.argv[1:] else {"text": "an answer", "tokens": 4}
    print(json.dumps(answer | {"seconds": 0.1}), flush=True)
"""
GREEDY = ["--pair", str(PAIR / "verifier"), str(PAIR / "drafter"), "--prompt-ids", "3 4 5", "--stop-ids", ""]
GREEDY += ["--systems", "ar", "treeflash-16", "--seed", "0", "1"]
GREEDY += ["--candidates", "8", "--children", "8", "--max-new-tokens", "12"]


def test_other_programs_are_systems(tmp_path, capsys):
    (tmp_path / "other.py").write_text(STAND_IN)
    command = f"{sys.executable} {tmp_path / 'other.py'}"
    out = tmp_path / "out.jsonl"
    others = ["--other", f"text={command}", "--other", f"ids={command} ids"]
    assert main(["bench", "run", *GREEDY, *others, "--dtype", "float32", "bfloat16", "--out", str(out)]) == 0
    records = read(out)
    names = ["ar, float32", "treeflash-16, float32", "ar, bfloat16", "treeflash-16, bfloat16", "text", "ids"]
    assert [record["system"] for record in records] == 2 * names
    answers = {record["system"]: record for record in records}
    assert answers["text"]["texts"] == ["an answer"] and answers["text"]["tokens"] == 4
    assert answers["ids"]["ids"] == [[3]] and answers["ids"]["seconds"] == 0.1
    assert answers["treeflash-16, float32"]["ids"] == answers["ar, float32"]["ids"]
    shown = capsys.readouterr().out
    speeds = next(line.split() for line in shown.splitlines() if line.split()[1:2] == ["text"])
    assert speeds[2:4] == ["40", "40"] and speeds[-3:] == ["0", "of", "2"]


@pytest.mark.parametrize("code", ["pass", "print('hello')"])
def test_a_program_without_answers_is_one_line(tmp_path, capsys, code):
    other = ["--other", f'gone={sys.executable} -c "{code}"']
    assert main(["bench", "run", *GREEDY, *other, "--out", str(tmp_path / "out.jsonl")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "expected one JSON line per prompt" in error and "got " in error
