"""`check`, `chat` and `convert`, as a user runs them."""

import io
import json
import re
from copy import copy
from dataclasses import replace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DATA, PAIR, random_pair
from refusals import mistake, refused
from rich.console import Console
from safetensors.numpy import load_file

import treeflash_jax as tf
from treeflash_jax.bench import verdicts
from treeflash_jax.cli import chat, commands
from treeflash_jax.cli.chat_commands import COMMANDS, SETTING, Conversation, obey, parse_value
from treeflash_jax.cli.commands import main
from treeflash_jax.cli.prompt_options import parse_prompts
from treeflash_jax.core.checks import NoRoom
from treeflash_jax.core.json_files import read_jsonl
from treeflash_jax.engine import comparison, loading
from treeflash_jax.engine.call.prompts import read_messages
from treeflash_jax.engine.call.requests import Request
from treeflash_jax.engine.comparison import compare_decodings, find_divergence
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.formats import hub, model_files
from treeflash_jax.models import decoder

CHAT = "chat --verifier tiny --nodes 8 --candidates 4 --children 4".split()


@pytest.fixture(scope="module")
def random() -> TreeFlash:
    return random_pair()


def test_commands_that_ctrl_c_ended_say_so_and_fail(monkeypatch, capsys):
    cut = tf.Result(
        text="", ids=[5], prompt_ids=[1], builder="none", accept_lengths=[], seconds=1.0, finished="interrupted"
    )
    monkeypatch.setattr(tf.TreeFlash, "generate", lambda *_, **__: [cut, cut])
    prompts = ["--verifier", "tiny", "--prompt-ids", "1 2 3", "--prompt-ids", "4"]
    assert main(["check", *prompts, "--nodes", "8"]) == 130 and "FAIL" not in capsys.readouterr().out
    assert main(["generate", *prompts]) == 130 and ", interrupted]" in capsys.readouterr().err


def test_check_finds_the_first_difference_and_says_what_it_means(random, monkeypatch, capsys):
    model = copy(random)
    sizes = {"max_new_tokens": 12, "nodes": 4, "candidates": 4, "children": 4, "ngrams": 0}
    [honest] = compare_decodings(model, [[1, 2, 3]], **sizes)
    assert honest.divergence is None
    monkeypatch.setattr(loading, "load", lambda **_: model)
    command = ["check", *(f"--{name}={value}".replace("_", "-") for name, value in sizes.items()), "--prompt-ids", "1 2 3"]
    assert main([*command, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["identical"] and record["verdict"] == "identical" and record["divergence"] is None
    assert record["tokens"] == len(honest.plain.ids) and record["tau"] == honest.drafted.tau
    generate = model.generate

    def tampered(prompts, **settings):
        results = generate(prompts, **settings)
        if settings.get("builder") != "none":
            results[0].ids[5] = (results[0].ids[5] + 1) % 64
        return results

    monkeypatch.setattr(model, "generate", tampered)
    [case] = compare_decodings(model, [[1, 2, 3]], **sizes)
    assert case.divergence.index == 5
    assert case.divergence.drafted != case.divergence.plain == honest.plain.ids[5]
    assert case.divergence.gap > 1e-4 and case.verdict == "FAIL"

    assert main(command) == 1
    words = (
        "not lossless: 1 answer differs from token 5 on\n0 of 1 .* 6 tokens compared, 1 other difference; .*\n"
        "tokens that end an answer: none\nprompt 0: FAIL, differs from token 5 on .* rounding does not explain it.* apart\n"
    )
    assert re.fullmatch(words, capsys.readouterr().out)
    mistake(capsys, main, [*command, "--builder", "none"], "got builder 'none'", "nothing to compare")
    monkeypatch.setattr(comparison, "NEAR_TIE", 1e9)
    assert main(command) == 0
    words = "lossless: equal up to 1 near-tie at token 5\n0 of 1 .* 6 tokens compared, 1 near-tie; .*\n"
    words += "tokens that end an answer: none\n"
    words += "prompt 0: equal up to rounding, .*near-tie: float32 rounding decides .*; not an error\n"
    assert re.fullmatch(words, out := capsys.readouterr().out)
    assert "PASS" not in out and "--dtype" not in out
    assert "; float32 has far fewer: add --dtype float32" in verdicts.conclude(3, 1, 2, 90, "bfloat16")


def test_the_verdict_names_the_first_difference_and_an_error_before_a_near_tie():
    near, error = (comparison.Divergence(index=i, drafted=1, plain=2, near_tie=i == 9) for i in (9, 4))
    by_divergences = {
        (None, None): "lossless: equal",
        (None, near): "lossless: equal up to 1 near-tie at token 9 of prompt 1",
        (near, near): "lossless: equal up to 2 near-ties, the first at token 9 of prompt 0",
        (near, error): "not lossless: 1 answer differs from token 4 of prompt 1 on",
        (error, near, error): "not lossless: 2 answers differ, the first from token 4 of prompt 0 on",
    }
    for divergences, expected in by_divergences.items():
        answers = [comparison.Comparison(drafted=None, plain=None, divergence=divergence) for divergence in divergences]
        assert verdicts.describe_verdict(answers) == expected


def test_the_gap_counts_the_noise_that_draws_the_token(random):
    """The drawn token has the largest score, so its distances to two others differ by the distance between these."""
    [drawn] = random.generate([[5]], builder="none", max_new_tokens=4, temperature=20.0, seed=7, indices=[1])
    drawn, row = drawn.ids, Request(ids=[5], settings=tf.GenerateConfig(temperature=20.0, seed=7, stop_ids=()), index=1)
    for index, token in enumerate(drawn):
        first, *others = (i for i in range(10) if i != token)
        at = {i: find_divergence(random, row, [*drawn[:index], i], drawn).gap for i in (first, *others)}
        between = [find_divergence(random, row, [*drawn[:index], i], [*drawn[:index], first]).gap for i in others]
        np.testing.assert_allclose([abs(at[i] - at[first]) for i in others], between, rtol=1e-3, atol=1e-3)


def test_logits_of_a_comparison_come_from_passes_over_chunks(random, monkeypatch):
    """A pass over a whole text has an array of attention scores that grows with the square of its length."""
    text, widths, forward = [7 * i % 64 for i in range(300)], [], decoder.forward

    @jax.jit
    def run_whole(weights, tokens_bt):
        inputs = tokens_bt, jnp.arange(300)[None], decoder.causal_mask(1, 300)
        return decoder.logits(weights, random.verifier, forward(weights, random.verifier, *inputs).hidden_btd)

    def record(params, config, tokens_bt, *arguments, **how):
        widths.append(tokens_bt.shape[1])
        return forward(params, config, tokens_bt, *arguments, **how)

    monkeypatch.setattr(decoder, "forward", record)
    logits = [comparison._compute_logits(random, ids) for ids in (text[:1], text)]
    assert widths and max(widths) <= 128
    expected_bv = run_whole(random.weights.verifier, jnp.array([text]))[0, jnp.array([0, 299])]
    np.testing.assert_allclose(logits, expected_bv, rtol=1e-4, atol=1e-4)


@pytest.fixture
def judge(random, monkeypatch):
    """Judges two tokens by given logits; returns whether they are a near-tie, for 16 seeds."""

    def judge(logits, drafted: int, plain: int, temperature: float = 1.0, dtype=jnp.float32, **filters) -> np.ndarray:
        model = copy(random)
        model.weights = jax.tree.map(lambda x: np.asarray(x).astype(dtype), random.weights)
        with monkeypatch.context() as patch:
            patch.setattr(comparison, "_compute_logits", lambda model, ids: np.float32(logits))
            settings = [tf.GenerateConfig(temperature=temperature, seed=seed, stop_ids=(), **filters) for seed in range(16)]
            requests = [Request(ids=[1], settings=own) for own in settings]
            return np.array([find_divergence(model, request, [drafted], [plain]).near_tie for request in requests])

    return judge


@pytest.mark.parametrize("gap, dtype, expected", [
    (0.9e-4, jnp.float32, True), (1.1e-4, jnp.float32, False), (0.45, jnp.bfloat16, True), (0.55, jnp.bfloat16, False),
])  # fmt: skip
def test_a_near_tie_is_a_few_units_of_rounding_of_the_logits(judge, gap, dtype, expected):
    """8 units of bfloat16 between 8 and 16 are 0.5."""
    assert (judge([9.0, 0.0, 9.0 + gap], 0, 2, temperature=0.0, dtype=dtype) == expected).all()


def test_a_token_that_rounding_moves_across_a_filter_is_a_near_tie(judge):
    """The tokens' shares are 50, 30, 15 and 5 %; a filter keeps two or three of them."""
    logits_v = np.log(np.float32([0.5, 0.3, 0.15, 0.05]))
    assert not judge(logits_v, 0, 2).any()
    for near, far in ((0.8 + 1e-6, 0.8 + 1e-3), (0.8 - 1e-6, 0.8 - 1e-3)):
        assert judge(logits_v, 0, 2, top_p=near).any() and not judge(logits_v, 0, 2, top_p=far).any()
    for near, far in ((0.3 + 1e-6, 0.3 + 1e-3), (0.3 - 1e-6, 0.3 - 1e-3)):  # the third token's share of the first
        assert judge(logits_v, 0, 2, min_p=near).any() and not judge(logits_v, 0, 2, min_p=far).any()
    assert judge(logits_v[[0, 1, 1, 3]], 0, 2, top_k=2).any(), "rounding decides which of two equal tokens is kept"
    assert not judge(logits_v[[0, 1, 1, 3]], 0, 2, temperature=0.0, top_k=2).any(), "greedy decoding has no filters"


def test_the_gap_is_that_of_processed_logits(random):
    """Raised by 1.5 beside the other tokens, each token is so much closer to, or further above, all others."""
    answer = random.generate([[1, 2, 3]], builder="none", max_new_tokens=6)[0].ids
    [drawn, other] = answer[5], (answer[5] + 1) % 64

    def gap(**settings) -> float:
        [request] = random.prepare([1, 2, 3], **settings).requests
        return find_divergence(random, request, [*answer[:5], other], answer).gap

    np.testing.assert_allclose(gap(logit_bias={drawn: 1.5}), gap() + 1.5, rtol=1e-5)
    often = answer[:5].count(drawn) - answer[:5].count(other)
    np.testing.assert_allclose(gap(frequency_penalty=-0.5), abs(gap() + 0.5 * often), rtol=1e-4)
    assert gap(min_new_tokens=9, stop_ids=[other]) == np.inf


def test_a_head_is_dropped_only_on_request(tmp_path, capsys):
    source, target = PAIR / "drafter", tmp_path / "a"
    convert = ["convert", str(source), str(target), "--to", "dflash"]
    mistake(capsys, main, convert, "--drop-head")
    assert not target.exists()
    assert main([*convert, "--drop-head"]) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (source, target))
    assert set(after) == {name.removeprefix("model.") for name in before if name.startswith("model.")}
    for name, array in after.items():
        np.testing.assert_array_equal(array, before[f"model.{name}"])
    assert json.loads((target / "config.json").read_text())["architectures"] == ["DFlashDraftModel"]
    capsys.readouterr()
    mistake(capsys, main, [*convert, "--drop-head"], "exists")


def test_convert_knows_the_names_of_models(tmp_path):
    """`tiny` names a drafter with --to, and a verifier, which has no other format, without it."""
    target = tmp_path / "dflash"
    assert main(["convert", "tiny", str(target), "--to", "dflash", "--drop-head"]) == 0
    assert model_files.read_drafter_config(target).head == "marginal"


@pytest.mark.parametrize("folder, options, words", [
    (DATA / "eagle3" / "speculators", ["--to", "speculators", "--drop-head"], "speculators files have no head"),
    ("nowhere", ["--to", "dflash"], "nowhere not found; expected a model folder"),
    (PAIR / "verifier", [], "verifier without --to, or with --dtype; expected a GGUF file, or a drafter folder with --to"),
])  # fmt: skip
def test_conversions_that_cannot_be_end_with_one_line(tmp_path, capsys, folder, options, words):
    mistake(capsys, main, ["convert", str(folder), str(tmp_path / "new"), *options], words)


@pytest.mark.parametrize("target, options, words", [
    ("new", [], "owner/model without --to, or with --dtype"),
    ("old", ["--to", "dflash"], "old exists; give a new folder"),
])  # fmt: skip
def test_conversions_of_hub_ids_are_refused_before_a_download(tmp_path, capsys, monkeypatch, target, options, words):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes.txt").touch()
    monkeypatch.setattr(hub, "download", lambda *_: pytest.fail("downloaded"))
    mistake(capsys, main, ["convert", "owner/model", str(tmp_path / target), *options], words)


@pytest.fixture
def converse(monkeypatch, capsys):
    """Types turns into `treeflash chat` and returns what is printed."""

    def converse(*turns, options=()):
        monkeypatch.setattr("builtins.input", Mock(side_effect=[*turns, EOFError]))
        assert main([*CHAT, *options]) == 0
        return capsys.readouterr().out

    return converse


def test_chat_streams_turns_and_survives_mistakes(converse):
    turns = "/tree", "Sam has 2 cats and 3 dogs. How many pets?", "/tree", "x " * 4000, "/reset", "/hepl", "/help"
    printed = converse(*turns, options=["--max-new-tokens", "24", "--ngrams", "0"])
    assert "no draft tree yet" in printed and "tau" in printed and "(anchor; " in printed
    assert "context" in printed and "error: got command /hepl; did you mean /help?\n" in printed
    assert [line.split()[0] for line in printed.splitlines() if line.startswith("/")] == ["/help", *COMMANDS, "/quit"]


@pytest.fixture
def heard(monkeypatch):
    """Chats and settings that reach `stream`; every answer is "Yes."."""
    heard = []

    def stream(model, chat, session, **settings):
        heard.append((list(chat), settings))
        yield tf.Chunk(ids=[5], text="Yes.", rounds=1)
        yield replace(tf.Result.unanswered([1]), finished="stop")

    monkeypatch.setattr(TreeFlash, "stream", stream)
    return heard


def test_a_value_may_begin_with_equals_signs():
    values = {
        "stop ==": "==",
        "stop = ==": "==",
        "stop==x": "==x",
        "stop =x=": "x=",
        "stop =": "",
        "stop": "",
        "stop a b": "a b",
    }
    for text, value in values.items():
        assert SETTING.fullmatch(text).groups() == ("stop", value)


def test_chat_sets_settings_and_the_system_message(heard, converse):
    turns = "/set", "/set temperature 0.7", "/set max-new-tokens = 9", '/set logit_bias {"5": 1.5}', "/set stop The end."
    mistakes = "/set temprature 1", "/set temperature -1", "/set samples 2", "/set candidates 99999", "/set num_beams 4"
    mistakes += "/set = 5", "/set -- 5"
    printed = converse(*turns, *mistakes, "/set", "Hi", "/set temperature", "/system Be short.", "Hi", "/system", "Hi")
    assert "all settings have their defaults" not in printed, "the options are set"
    errors = re.findall("error: (.*)", printed)
    words = (
        "did you mean temperature",
        "got temperature -1.0, expected at least 0",
        "samples is no setting",
        "candidates 999",
    )
    nameless = "got /set '= 5', expected /set NAME VALUE", "got /set '-- 5', expected"
    for error, expected in zip(errors, (*words, "num_beams is not supported", *nameless), strict=True):
        assert expected in error
    assert "\ntemperature 0.7\nmax_new_tokens 9\nlogit_bias {5: 1.5}\nstop ('The end.',)\n" in printed
    (chat, settings), (with_system, later), (without, _) = heard
    given = {
        "sampling": "model",
        "nodes": 8,
        "candidates": 4,
        "children": 4,
        "max_new_tokens": 9,
        "logit_bias": {5: 1.5},
        "stop": ("The end.",),
    }
    assert later == given and settings == given | {"temperature": 0.7}
    assert [message["role"] for message in with_system] == ["system", "user", "assistant", "user"]
    assert with_system[0]["content"] == "Be short." and without[0] == {"role": "user", "content": "Hi"} == chat[0]


@pytest.mark.parametrize("name, text, value", [
    ("pattern", "[0-9]{3}-[a-z]+", "[0-9]{3}-[a-z]+"),
    ("choices", "yes", ("yes",)),
    ("choices", '["yes", "no"]', ("yes", "no")),
    ("stop_ids", "3, 4", (3, 4)),
    ("schema", '{"type": "string"}', '{"type": "string"}'),
    ("structural_tag", '{"type": "any_text"}', '{"type": "any_text"}'),
])  # fmt: skip
def test_values_of_settings_are_typed_as_they_are(name, text, value):
    assert parse_value(name, text) == value


def test_texts_that_begin_with_a_bracket_go_into_a_list():
    refused(lambda: parse_value("stop", "[END]"), "got stop '[END]' (not valid JSON", 'list; for this text: ["[END]"]')
    assert "for this text" not in refused(lambda: parse_value("logit_bias", "{5}"), "not valid JSON")


def test_chat_saves_messages_that_a_prompt_file_reads(heard, converse, tmp_path, monkeypatch, capsys):
    path = tmp_path / "talk.jsonl"
    taken = tmp_path / "taken.jsonl"
    taken.write_text("taken")
    monkeypatch.setenv("HOME", str(tmp_path))
    saves = f"/save {path}", "/save ~/taken.jsonl", f"/save {path}.txt", f"/save {tmp_path}/nowhere/a.jsonl"
    printed = converse(saves[0], "Say “yes”.\nNow.", *saves, options=["--system", "Be short."])
    assert re.findall("error: (.{12})", printed.replace(str(tmp_path), "")) == [
        "got no messa", "got file '~/", "got file '/t", "cannot write",
    ]  # fmt: skip
    assert taken.read_text() == "taken" and f"wrote {path}" in printed.replace("\n", "")
    system, user = {"role": "system", "content": "Be short."}, {"role": "user", "content": "Say “yes”.\nNow."}
    [(_, record)] = read_jsonl(path)
    assert read_messages(record) == [system, user, {"role": "assistant", "content": "Yes."}]
    [prompt] = parse_prompts(commands.parser().parse_args(["generate", "--prompt-file", str(path)]))
    assert prompt == [system, user]


def test_chat_prints_text_as_it_is(monkeypatch, capsys):
    """Rich would turn parts of slices into emoji."""
    monkeypatch.setattr(loading, "load", lambda **_: None)

    def converse(_, console, *_system, **_settings):
        with chat.Lines(console) as lines:
            lines.write("x = items[:100:2]")

    monkeypatch.setattr(commands, "converse", converse)
    assert main(["chat"]) == 0 and capsys.readouterr().out == "x = items[:100:2]\n"


def test_chat_remembers_the_conversation(heard, converse):
    printed = converse("Sam has 2 cats.", "How many?", "/reset", "/usr/bin or // is text", "/quit now", "not read")
    chats = [chat for chat, _ in heard]
    assert [[message["role"] for message in chat] for chat in chats] == [["user"], ["user", "assistant", "user"], ["user"]]
    assert chats[1][1]["content"] == "Yes." and printed.count("Yes.") == 3


@pytest.mark.parametrize(("pieces", "stop", "message", "answers"), [
    (["Yes"], jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: memory"), "error: RESOURCE_EXHAUSTED: memory", []),
    (["Yes"], KeyboardInterrupt(), "interrupted", ["A", "Yes"]),
    ([], KeyboardInterrupt(), "interrupted", []),
    ([], None, "interrupted", []),  # between two pieces: the stream ends with what there is
])  # fmt: skip
def test_a_turn_that_does_not_end_leaves_a_conversation_that_goes_on(tiny, monkeypatch, pieces, stop, message, answers):
    """A failed turn is removed, as is one that Ctrl-C ends before its first text."""
    heard = []

    def stream(model, messages, **_):
        heard.append([message["content"] for message in messages])
        yield from (tf.Chunk(ids=[5], text=text, rounds=1) for text in pieces)
        if stop is None:
            yield replace(tf.Result.unanswered([1]), finished="interrupted")
        else:
            raise stop

    monkeypatch.setattr(TreeFlash, "stream", stream)
    monkeypatch.setattr("builtins.input", Mock(side_effect=["A", "B", "/quit"]))
    console = Console(file=io.StringIO(), width=200)
    chat.converse(tiny, console)
    assert heard == [["A"], [*answers, "B"]] and console.file.getvalue().count(message) == 2


@pytest.mark.parametrize("stop", [RuntimeError, KeyboardInterrupt])
def test_a_turn_that_fails_forgets_nothing(tiny, monkeypatch, stop):
    talk = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "Yes."}]
    console, settings = Console(file=io.StringIO(), width=200), {"max_new_tokens": 8}
    conversation = Conversation(model=tiny, console=console, settings=settings, messages=[*talk])
    monkeypatch.setattr(TreeFlash, "prepare", Mock(side_effect=[NoRoom("got caches, expected less"), None]))
    monkeypatch.setattr(TreeFlash, "stream", Mock(side_effect=stop))
    with pytest.raises(stop):
        chat.answer(conversation, "B")
    assert conversation.messages == talk and conversation.forgotten == 0
    assert "first 2 messages are no longer read" in console.file.getvalue()


def test_chat_answers_up_to_the_end_of_the_context_or_of_memory(tiny, monkeypatch):
    context, rooms, prepare = tiny.verifier.max_positions, [], TreeFlash.prepare
    length = len(tiny.encode("Hello."))

    def stream(model, messages, session, max_new_tokens, sampling):
        rooms.append(max_new_tokens)
        ids = [5] * max_new_tokens
        yield tf.Result(text="", ids=ids, prompt_ids=[1] * length, builder="none", accept_lengths=[], finished="length")

    monkeypatch.setattr(TreeFlash, "stream", stream)
    console = Console(file=io.StringIO(), width=200)
    for limit in (None, 50):
        monkeypatch.setattr("builtins.input", Mock(side_effect=["Hello.", "/quit"]))
        chat.converse(tiny, console, max_new_tokens=limit)
    assert rooms == [context - length, 50]
    assert "cut at the context's end, 2,048 tokens" in (out := console.file.getvalue())
    assert "cut: /set max_new_tokens removes the limit" in out

    def refuse(model, prompts, max_new_tokens, **_):
        if max_new_tokens > 600:
            raise NoRoom("got caches, expected less")
        return prepare(model, prompts, max_new_tokens=max_new_tokens)

    monkeypatch.setattr(TreeFlash, "prepare", refuse)
    monkeypatch.setattr("builtins.input", Mock(side_effect=["Hello.", "/quit"]))
    chat.converse(tiny, console)
    assert rooms[-1] == (context - length) // 4
    assert "cut: no memory for a longer answer" in console.file.getvalue()


def test_answers_have_room_for_their_least_number_of_tokens(tiny):
    messages = [{"role": role, "content": "A"} for role in ("user", "assistant", "user")]
    least = tiny.verifier.max_positions - len(tiny.encode(messages[2:]))
    conversation = Conversation(model=tiny, console=Console(file=io.StringIO()), settings={}, messages=messages)
    obey(conversation, f"/set min_new_tokens {least}")
    assert conversation.make_room() == least and conversation.forgotten == 2


def test_a_wrong_setting_is_not_taken_for_a_lack_of_room(tiny):
    messages = [{"role": role, "content": "A"} for role in ("user", "assistant", "user")]
    conversation = Conversation(model=tiny, console=Console(file=io.StringIO()), settings={}, messages=messages)
    refused(lambda: obey(conversation, "/set max_new_tokens [9]"), "max_new_tokens (9,), expected one value")
    conversation.settings = {"temperature": -1.0}
    refused(conversation.make_room, "temperature -1.0")
    assert conversation.forgotten == 0


def test_a_conversation_that_outgrows_the_context_forgets_its_oldest_turns(tiny, heard, converse, tmp_path):
    turns, path = [f"{name}: {'cat ' * 280}" for name in "ABCDE"], tmp_path / "talk.jsonl"
    printed = converse(*turns, "x " * 4000, "F", f"/save {path}", "/reset", "G", options=["--system", "Be short."])
    begun = [[message["content"][0] for message in chat] for chat, _ in heard]
    *before, after_error, after_reset = begun
    assert before[:2] == [["B", "A"], ["B", "A", "Y", "B"]] and after_reset == ["B", "G"]
    assert {len(chat) for chat in before} == {2, 4, 6} and before[-1] == ["B", "C", "Y", "D", "Y", "E"]
    assert after_error == [*before[-1], "Y", "F"], "a message that is too long for any context drops nothing"
    assert all(tiny.verifier.max_positions - len(tiny.encode(chat)) >= 128 for chat, _ in heard)
    note = r"its first (\d) messages are no longer read; /reset starts a new one"
    notes = re.findall(note, " ".join(printed.split()))
    assert notes == ["2", "4"] and printed.count("error: ") == 1
    [(_, record)] = read_jsonl(path)
    assert [message["content"][0] for message in record["messages"]] == [*"BAYBYCYDYEYFY"]


def test_a_conversation_that_outgrows_the_memory_forgets_its_oldest_turns(heard, converse, monkeypatch):
    def prepare(model, prompts, **_):
        if len(prompts) > 3:
            raise NoRoom("got caches, expected less")

    monkeypatch.setattr(TreeFlash, "prepare", prepare)
    for options in ([], ["--max-new-tokens", "24"]):
        printed = converse("A", "B", "C", options=options)
        assert [message["content"] for message in heard[-1][0]] == ["B", "Yes.", "C"] and "error" not in printed


def test_answers_in_a_terminal_break_between_words():
    text = "def add(a, b):\n    return a + b  # a comment that is long\n\nThat is all there is to it."
    for pieces in (list(text), [text], re.findall(r".{1,3}", text, flags=re.DOTALL)):
        console = Console(file=io.StringIO(), width=20, force_terminal=True, color_system=None)
        with chat.Lines(console) as lines:
            for piece in pieces:
                lines.write(piece)
        printed = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", console.file.getvalue())  # a line is written again after "\r"
        assert max(map(len, re.split(r"[\r\n]", printed))) <= 20
        assert "def add(a, b):\n" in printed and "\n    \n" not in printed
        assert re.search(r"    return a \+ b  # ?\na comment that is ?\nlong\n", printed)
        assert printed.endswith("That is all there is\nto it.\n")


def test_every_command_has_help(capsys):
    """`treeflash` and `treeflash bench` alone list all there are."""
    commands = ["generate", "chat", "serve", "check", "convert", "demo", "bench"]
    for words, expected in ([], commands), (["bench"], ["run", "report", "latency", "memory"]):
        assert main(words) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"usage: {' '.join(['treeflash', *words])} ")
        assert set(re.findall(r"^    ([a-z]+)(?: |$)", text, flags=re.MULTILINE)) == set(expected)
        for name in expected:
            with pytest.raises(SystemExit, match="0"):
                main([*words, name, "--help"])
            text = capsys.readouterr().out
            assert text.startswith(f"usage: {' '.join(['treeflash', *words, name])} ") and "show this help" in text
