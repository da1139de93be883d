"""`bench run`: what is measured, how a run is resumed, and what is refused."""

import doctest
import sys
from collections import Counter
from copy import copy, deepcopy
from dataclasses import replace
from subprocess import PIPE, Popen
from types import SimpleNamespace

import pytest
from conftest import PAIR
from refusals import mistake, refused
from toy_training import read_lines, write_lines

import treeflash_jax as tf
from treeflash_jax.bench import bench_records, harness, report, run
from treeflash_jax.bench.harness import Peer, System
from treeflash_jax.bench.prompt_sets import BenchPrompt
from treeflash_jax.bench.run import parse_systems
from treeflash_jax.cli import commands
from treeflash_jax.cli.commands import main
from treeflash_jax.core import files
from treeflash_jax.engine import comparison, loading
from treeflash_jax.engine.settings.pairs import locate
from treeflash_jax.formats.tokenizer import Tokenizer

FIRST, SECOND = "How many legs do 3 cows have?", "And 5 hens?"
PROMPTS = [{"id": "cows", "turns": [FIRST, SECOND], "reference": "12"}, {"id": 7, "turns": ["Name a colour."]}]
SMALL = "--verifier tiny --systems ar marginal treeflash --nodes 8 --candidates 4 --children 4 --max-new-tokens 8".split()
SYSTEMS = ["ar", "marginal-8", "treeflash-8"]


@pytest.fixture
def small(tmp_path):
    """Options for two prompts, three systems and small sizes."""
    return ["--prompts", str(write_lines(tmp_path / "prompts.jsonl", PROMPTS)), *SMALL]


@pytest.fixture
def fake(tiny, monkeypatch):
    """Answers made up at once, of two rounds with 3 and 1 tokens; `calls` holds what was asked for."""
    fake = SimpleNamespace(calls=[], compiles=lambda call: False, ids=lambda config: [5, 6, 7, 8], finished="stop")

    def generate(_, inputs, config, *, seed, indices):
        assert indices == [0] * len(inputs), "noise of a seed, wherever its prompt stands"
        fake.calls.append(SimpleNamespace(inputs=deepcopy(inputs), config=config, seed=seed))
        call, answer = len(fake.calls), {"prompt_ids": [1], "accept_lengths": [3, 1], "finished": fake.finished}
        seconds, compile_seconds = (1000.0, 9.0) if fake.compiles(call) else (float(len(inputs)), 0.0)
        answer |= {"text": f"answer {call}", "ids": fake.ids(config), "builder": config.builder}
        return [tf.Result(**answer, seconds=seconds, compile_seconds=compile_seconds) for _ in inputs]

    def load(*, thinking, template, **_):
        model = copy(tiny)
        model.tokenizer = Tokenizer(tiny.tokenizer.inner, {"enable_thinking": thinking, **(template or {})})
        return model

    monkeypatch.setattr(tf.TreeFlash, "generate", generate)
    monkeypatch.setattr(loading, "load", load)
    return fake


def bench(out, *options, status=0):
    """Runs the command; returns the records in its file."""
    assert main(["bench", "run", "--out", str(out), *options]) == status
    return read_lines(out)


@pytest.mark.slow
def test_a_run_records_what_generate_gives(tiny, small, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load", lambda **_: tiny)
    records = bench(tmp_path / "out.jsonl", *small, "--temperature", "0", "1")
    keys = [(p, s, t, 0) for p in ("cows", "7") for t in (0.0, 1.0) for s in SYSTEMS]
    assert sorted(map(bench_records.record_key, records)) == sorted(keys)
    assert [r["system"] for r in records] == 2 * SYSTEMS + 2 * (SYSTEMS[1:] + SYSTEMS[:1])  # interleaved, rotating

    chat = [{"role": "user", "content": FIRST}]
    settings = {"max_new_tokens": 8, "nodes": 8, "candidates": 4, "children": 4, "ngrams": 0}
    answer = tiny.generate([chat], **settings)[0]
    chat += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": SECOND}]
    again = tiny.generate([chat], **settings)[0]
    record = next(r for r in records if bench_records.record_key(r) == ("cows", "treeflash-8", 0.0, 0))
    for key in ("ids", "accept_lengths", "texts", "cut"):
        assert record[key] == [getattr(turn, "text" if key == "texts" else key) for turn in (answer, again)]
    assert record["tokens"] == len(answer.ids) + len(again.ids)
    about = {"head": "mlp", "block_size": 8, "builder": "best-first", "acceptance": "sample-and-match", "top_p": 1.0}
    about |= {"drafter_temperature": f"max({tiny.drafter.drafter_temperature:g}, min(T, 1))", "temperature": 0.0}
    about |= {"seed": 0}
    about |= {"template": {"enable_thinking": False}, "dtype": "float32", "quantize": None, "batch_size": 1}
    about |= {"verifier": "tiny", "drafter": "tiny", "stop_ids": None}
    assert (settings | about).items() <= record["settings"].items()
    assert record["hardware"]["backend"] == "cpu" and set(record["versions"]) == {"jax", "treeflash_jax", "python"}
    plain = next(r for r in records if r["system"] == "ar")
    assert plain["settings"]["head"] is plain["settings"]["nodes"] is None and set(plain["accept_lengths"][0]) == {1}

    assert min(record["seconds"] for record in records) > 0
    answers = Counter((record["prompt_id"], str(record["ids"])) for record in records)
    assert [*answers.values()] == 4 * [3], "the systems of one temperature agree"


def test_the_example_of_a_system_runs(fake, tiny, monkeypatch):
    monkeypatch.setattr(tf, "load", lambda name: tiny)
    [example] = doctest.DocTestFinder(recurse=False).find(harness.System, globs={**vars(harness)})
    assert doctest.DocTestRunner().run(example, clear_globs=False) == (0, 2)
    [record] = example.globs["records"]
    assert record["settings"]["batch_size"] == 1


def test_first_calls_and_calls_that_compile_are_made_again(fake, small, tmp_path):
    """Conversations of 2 turns and 1: calls 1 to 4 are the first of ar and its repetition, 5 to 8 the tree's."""
    fake.compiles = lambda call: call in (1, 9)  # the first turn of all, and the tree's call for the second prompt
    records = bench(tmp_path / "out.jsonl", *small, "--systems", "ar", "treeflash")
    assert [call.config.builder for call in fake.calls] == 4 * ["none"] + 6 * ["best-first"] + ["none"]
    assert [record["seconds"] for record in records] == [2.0, 2.0, 1.0, 1.0]


def test_answers_that_differ_fail_unless_it_is_at_a_near_tie(fake, small, tmp_path, monkeypatch, capsys):
    """The record that is written second says how the two differ: the tree's for the first prompt, then that of ar."""
    fake.ids = lambda config: [5, 6, 7, 8] if config.builder == "none" else [5, 6, 9, 8]
    counts = "0 of 2 drafted answers identical to one-token decoding, 6 tokens compared"
    for limit, verdict, line in (
        (1e-4, "FAIL", f"FAIL: {counts}, 2 other differences, of treeflash-8 at T 0"),
        (1e9, "equal up to rounding", f"equal up to rounding: {counts}, 2 near-ties"),
    ):
        monkeypatch.setattr(comparison, "NEAR_TIE", limit)
        records, shown = bench(tmp_path / verdict, *small, "--systems", "ar", "treeflash"), capsys.readouterr()
        told = [(r["prompt_id"], r["system"], *r["differences"]) for r in records if r["differences"]]
        assert told == [("cows", "treeflash-8", "ar"), ("7", "ar", "treeflash-8")]
        apart = {"turn": 0, "index": 2, "drafted": 9, "plain": 7}
        assert records[-1]["differences"]["treeflash-8"].items() >= apart.items()
        assert shown.err.count(f"{verdict}: prompt") == 2 and line in " ".join(shown.out.split())
    records = bench(tmp_path / "sampled", *small, "--systems", "ar", "treeflash:builder=paths", "--temperature", "1")
    assert not any(record["differences"] for record in records), "other samples by design"
    assert "tokens compared" not in capsys.readouterr().out


def test_differences_are_judged_and_recorded_by_all_sampling_settings_of_the_run(fake, tiny, tmp_path, monkeypatch):
    asked, tie = [], comparison.Divergence(index=2, drafted=9, plain=7, gap=0.0, near_tie=True)
    monkeypatch.setattr(harness, "find_divergence", lambda _, *arguments: asked.append(arguments) or tie)
    fake.ids = lambda config: [5, 6, 7, 8] if config.builder == "none" else [5, 6, 9, 8]
    sampling = {"top_k": 5, "min_p": 0.1, "logit_bias": {3: 1.0}, "min_new_tokens": 2, "stop": ("x",), "stop_ids": (4, 2)}
    config = tf.GenerateConfig(max_new_tokens=8, batch_size=1, processor=lambda logits, _: logits, **sampling)
    systems = [System(name=name, model=tiny, config=replace(config, builder=name)) for name in ("none", "best-first")]
    prompt = BenchPrompt(id="1", turns=(FIRST,))
    records = list(harness.measure(systems, [prompt], temperatures=[0.5], seeds=[3]))
    [(request, drafted, plain, processor)] = asked
    judged = {name: getattr(request.settings, name) for name in ("temperature", "seed", *sampling)}
    assert judged == sampling | {"temperature": 0.5, "seed": prompt.seed(3)} and request.index == 0
    assert (drafted, plain) == ([5, 6, 9, 8], [5, 6, 7, 8]) and processor is not None
    recorded = sampling | {"logit_bias": {"3": 1.0}, "stop": ["x"], "stop_ids": [4, 2], "top_p": 1.0}
    assert all(recorded.items() <= record["settings"].items() for record in records)
    read = bench_records.read_records(write_lines(tmp_path / "out.jsonl", records))
    bench_records.check_one_run([*read, *records], "out.jsonl")
    del read[0]["settings"]["min_p"]
    refused(lambda: bench_records.check_one_run(read, "out.jsonl"), "got min_p 0.1, but None in earlier records")
    assert report.summarise(records)["settings"].items() >= recorded.items()


def test_a_batch_shares_its_seconds(fake, small, tmp_path):
    write_lines(tmp_path / "prompts.jsonl", [*PROMPTS, {"id": "c", "turns": ["Why?"]}])
    out, options = tmp_path / "out.jsonl", [*small, "--systems", "ar", "--batch-size", "2"]
    assert [(r["prompt_id"], r["seconds"]) for r in bench(out, *options)] == [("cows", 2.0), ("7", 1.0), ("c", 1.0)]
    assert [len(call.inputs) for call in fake.calls] == [2, 1, 2, 1, 1]  # two turns, again after warm-up, the last prompt
    out.write_text(out.read_text().splitlines(keepends=True)[1])  # "7" is known: its batch is measured for "cows" alone
    assert [r["prompt_id"] for r in bench(out, *options)] == ["7", "cows", "c"]


def test_sets_of_prompts_are_drawn_and_reported_apart(fake, small, tmp_path, capsys):
    other = write_lines(tmp_path / "other.jsonl", PROMPTS[1:])
    records = bench(tmp_path / "out.jsonl", *small[:2], str(other), *SMALL, "--limit", "1")
    cows, colour = ("prompts", "prompts/cows"), ("other", "other/7")
    assert [(r["prompt_set"], r["prompt_id"]) for r in records] == 3 * [cows] + 3 * [colour]
    systems = report.summarise(records)["systems"]
    assert [(s["set"], s["prompts"]) for s in systems] == 3 * [("other", 1)] + 3 * [("prompts", 1)]
    shown = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert ["other", "0", "ar"] in shown and ["prompts", "0", "treeflash-8"] in shown


def test_a_stopped_run_continues_where_it_was(fake, small, tmp_path, caplog):
    out = tmp_path / "out.jsonl"
    records, lines = bench(out, *small), out.read_bytes().splitlines(keepends=True)
    start = b"".join(lines[:4])
    out.write_bytes(start + lines[4][:40])
    fake.calls.clear()
    again = bench(out, *small)
    assert "out.jsonl:5: the last line is cut off" in caplog.text
    assert out.read_bytes().startswith(start)
    assert sorted(map(bench_records.record_key, again)) == sorted(map(bench_records.record_key, records))
    assert [call.config.builder for call in fake.calls].count("none") == 2  # an answer and its warm-up
    assert len(fake.calls) == 4  # two answers and two warm-ups

    out.write_bytes(out.read_bytes()[:-1])  # a whole record without its newline is kept
    fake.calls.clear()
    assert len(bench(out, *small)) == 6 and fake.calls == []
    assert len(bench(out, *small, "--systems", "treeflash-4", "--seed", "1")) == 8, "another system and seed join the file"

    before, fake.finished = out.read_bytes(), "interrupted"
    bench(out, *small, "--systems", "ar", "--seed", "2", status=130)
    assert out.read_bytes() == before


def test_a_file_that_another_command_writes_is_refused(fake, small, tmp_path, monkeypatch, capsys):
    """Given by another name of the same path."""
    out = tmp_path / "out.jsonl"
    bench(out, *small)
    before = out.read_bytes()
    monkeypatch.setenv("HOME", str(tmp_path))
    capsys.readouterr()
    with files.held(f"{out}.lock", "the first"):
        options = ["--out", "~/out.jsonl", *small, "--seed", "1"]
        mistake(capsys, main, ["bench", "run", *options], f"--out {out}: another process works on it", "wait until it has")
    assert out.read_bytes() == before and len(bench(out, *small, "--seed", "1")) == 12
    assert {path.name for path in tmp_path.iterdir()} == {"out.jsonl", "prompts.jsonl"}


def test_each_prompt_has_its_own_noise_which_all_systems_share(fake, small, tmp_path):
    bench(tmp_path / "out.jsonl", *small, "--seed", "0", "1")
    seeds = {(seed, FIRST in str(call.inputs[0])) for call in fake.calls for seed in call.seed}
    assert Counter(dict(seeds).values()) == {True: 2, False: 2}, "one per prompt and seed, whatever the system"
    assert len(seeds) == 4


def test_mistakes_end_with_one_line_and_keep_the_results(fake, small, tmp_path, capsys):
    out, fresh = tmp_path / "out.jsonl", tmp_path / "fresh.jsonl"
    bench(out, *small)
    before = out.read_bytes()
    fake.calls.clear()
    capsys.readouterr()
    other = write_lines(tmp_path / "other.jsonl", [{"id": 7, "turns": ["Name a colour!"]}])
    for path, more, words in (
        (out, ["--max-new-tokens", "9"], "got max_new_tokens 9, but 8 in earlier records"),
        (out, ["--template", '{"effort": "high"}'], "got template {'effort': 'high', 'enable_thinking': False}, but"),
        (out, ["--systems", "treeflash-0"], "nodes 0"),
        (out, ["--prompts", str(other)], "another text for prompt '7'"),
        (out, ["--prompts", str(other), str(other)], "expected files of different names"),
        (out, ["--prompts", "nowhere.jsonl"], "cannot read nowhere.jsonl: No such file"),
        (fresh, ["--max-new-tokens", "1500"], "prompt 'cows': got 30"),
        (fresh, ["--out", "nowhere/out.jsonl"], "cannot write nowhere/out.jsonl: No such file"),
        (out, ["--stop-ids", "7"], "got stop_ids [7], but None in earlier records"),
        (fresh, ["--other", "ar=cat"], "got --other 'ar=cat', expected NAME=COMMAND with a name that no other system has"),
        (fresh, ["--other", "cat"], "got --other 'cat', expected NAME=COMMAND"),
        (fresh, ["--prompt-ids", " "], "got --prompt-ids and --prompts"),
    ):
        mistake(capsys, main, ["bench", "run", "--out", str(path), *small, *more], words)
        assert fake.calls == [] and out.read_bytes() == before and not fresh.exists()


@pytest.mark.parametrize("code", [
    "pass", "input(); print('[1]')", "input(); print('{\"ids\": [5]}')",
    "input(); print('{\"ids\": [5], \"seconds\": \"1.0\"}')", "input(); print('{\"ids\": 5, \"seconds\": 1.0}')",
])  # fmt: skip
def test_other_programs_without_an_answer_are_refused(tiny, code):
    with Popen([sys.executable, "-c", code], bufsize=0, stdin=PIPE, stdout=PIPE) as program:
        peer = Peer(name="other", model=tiny, config=tf.GenerateConfig(), command="python", program=program)
        refused(lambda: peer.answer([[5, 6]], 0.0, [0]), "got ", "expected one JSON line per prompt")


def test_names_of_systems_hold_their_settings():
    sampled = {"head": "marginal", "ngrams": 0, "drafter_temperature": 0.7}
    systems = {
        "ar": {"builder": "none"},
        "chain@0.7": sampled | {"builder": "chain"},
        "marginal-4@0.7:builder=paths:acceptance=block": sampled | {"builder": "paths", "acceptance": "block", "nodes": 4},
        "joined-4": {"ngrams": 8, "nodes": 4},
        "treeflash-8:builder=delayed:trunk=1": {"ngrams": 0, "builder": "delayed", "trunk": 1, "nodes": 8},
    }
    assert parse_systems(systems, [2]) == systems
    names = "ar marginal@0.7 treeflash-64 treeflash:trunk=1"
    several = "ar marginal-4@0.7 marginal-16@0.7 treeflash-64 treeflash-4:trunk=1 treeflash-16:trunk=1"
    assert list(parse_systems(names.split(), [4, 16])) == several.split()
    for name, words in {
        **dict.fromkeys("medusa ar:trunk=1 chain-4 treeflash+skeleton".split(), "unknown system"),
        "treeflash:temperature=1": "got setting 'temperature' of a system, expected one of", "treeflash:trunk=-1": "trunk",
        "treeflash:builder=heap": "builder",
    }.items():  # fmt: skip
        refused(lambda name=name: parse_systems([name], [4]), words)


def test_trees_of_equal_settings_are_measured_once(tiny, monkeypatch):
    names = ["marginal:builder=skeleton", "treeflash:builder=skeleton"]
    names.append(f"treeflash@{tiny.drafter.drafter_temperature:g}:builder=skeleton")  # fixed, also at T = 1
    words = ["bench", "run", "--out", "out", "--verifier", "tiny", "--nodes", "8", "--systems", *names]
    arguments = commands.parser().parse_args(words)
    for head, expected in (("marginal", 2), ("mlp", 3)):
        model = tf.TreeFlash(tiny.verifier, tiny.weights, drafter=replace(tiny.drafter, head=head))
        monkeypatch.setattr(loading, "load", lambda model=model, **_: model)
        assert len(run.load_systems(arguments, parse_systems(arguments.systems, arguments.nodes))) == expected


def test_drafters_are_systems_with_one_baseline_and_their_own_options():
    words = ["--verifier", "tiny", "--drafter", "shipped=tiny", "ngram", "--nodes", "4", "--candidates", "5", "--out", "x"]
    arguments = commands.parser().parse_args(["bench", "run", *words])
    systems = run.load_systems(arguments, parse_systems(arguments.systems, arguments.nodes))
    trees = [f"{name}, shipped" for name in ("chain", "marginal-4", "treeflash-4", "joined-4")]
    assert [system.name for system in systems] == ["ar", *trees, "chain, ngram", "treeflash-4, ngram"]
    assert [system.settings()["candidates"] for system in systems] == [None, 5, 5, 5, 5, None, None]
    assert [system.settings()["drafter"] for system in systems[1:]] == 4 * ["tiny"] + 2 * ["ngram"]
    assert systems[1].model.weights.verifier is systems[-1].model.weights.verifier, "one copy in memory"


def test_a_drafter_of_two_labels_is_measured_under_both(tmp_path):
    """A path may contain the sign that ends a label."""
    (tmp_path / "lr=1").symlink_to(run.pairs.locate("tiny", "drafter"))
    for words, labels in (("a=tiny b=tiny", "ab"), (f"a={tmp_path}/lr=1 {tmp_path}/lr=1", ["a", f"{tmp_path}/lr=1"])):
        words = f"bench run --verifier tiny --drafter {words} --systems ar treeflash-4 --out x".split()
        arguments = commands.parser().parse_args(words)
        systems = run.load_systems(arguments, parse_systems(arguments.systems, arguments.nodes))
        assert [system.name for system in systems] == ["ar", *(f"treeflash-4, {label}" for label in labels)]


@pytest.mark.parametrize("verifier, drafters, words", [
    ("tiny", ["a=tiny", "a=ngram"], "got --drafter a=tiny a=ngram, expected one or more drafters of different labels"),
    ("tiny", ["none"], "got --drafter none, expected one or more drafters"),
    (str(PAIR / "verifier"), [], "got --drafter none, expected one or more drafters"),
    ("tiny", ["ngram", "--systems", "marginal"], "drafters of kind 'ngram' have no such setting"),
])  # fmt: skip
def test_bad_drafters_end_with_one_line(tmp_path, capsys, verifier, drafters, words):
    drafters = drafters and ["--drafter", *drafters]
    options = ["--verifier", verifier, *drafters, "--out", str(tmp_path / "out.jsonl")]
    mistake(capsys, main, ["bench", "run", *options], words)
    assert not [*tmp_path.iterdir()]


STAND_IN = """
import json, sys
for line in sys.stdin:
    question = json.loads(line)
    assert question["max_new_tokens"] == 12 and question["stop_ids"] == []
    answer = {"ids": question["prompt"][-4:]} if sys.argv[1:] else {"text": "an answer", "tokens": 4}
    print(json.dumps(answer | {"seconds": 0.1}), flush=True)
"""
GREEDY = ["--verifier", str(PAIR / "verifier"), "--drafter", str(PAIR / "drafter"), "--stop-ids", ""]
GREEDY += ["--prompt-ids", "3 4 5"]
GREEDY += "--systems ar treeflash-16 --seed 0 1 --candidates 8 --children 8 --max-new-tokens 12".split()


@pytest.mark.slow
def test_other_programs_are_systems(tmp_path, capsys):
    (tmp_path / "other.py").write_text(STAND_IN)
    command = f"{sys.executable} {tmp_path / 'other.py'}"
    others = ["--other", f"text={command}", "--other", f"ids={command} ids"]
    records = bench(tmp_path / "out.jsonl", *GREEDY, *others, "--dtype", "float32")
    assert [record["system"] for record in records] == 2 * ["ar", "treeflash-16", "text", "ids"]
    answers = {record["system"]: record for record in records}
    assert answers["text"]["texts"] == ["an answer"] and answers["text"]["tokens"] == 4
    assert answers["ids"]["ids"] == [[3, 4, 5]] and answers["ids"]["seconds"] == 0.1
    assert answers["treeflash-16"]["ids"] == answers["ar"]["ids"]
    shown = capsys.readouterr().out
    speeds = next(line.split() for line in shown.splitlines() if line.split()[1:2] == ["text"])
    assert speeds[2] == "40" and speeds[-3:] == ["0", "of", "2"]


@pytest.mark.slow
def test_a_later_turn_follows_the_ids_of_another_program(tmp_path):
    """Without a text of its own, the text of its ids: here the last four of the prompt, which the next prompt repeats."""
    (tmp_path / "other.py").write_text(STAND_IN)
    words = [
        "--prompts",
        str(write_lines(tmp_path / "prompts.jsonl", PROMPTS[:1])),
        *SMALL[:2],
        *GREEDY[-2:],
        "--stop-ids",
        "",
    ]
    records = bench(tmp_path / "out.jsonl", *words, "--other", f"ids={sys.executable} {tmp_path / 'other.py'} ids")
    decode = Tokenizer.load(locate("tiny")).decode
    [record] = [record for record in records if record["system"] == "ids"]
    assert len(record["ids"]) == 2 and record["texts"] == [decode(ids) for ids in record["ids"]]
