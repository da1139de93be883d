"""Documents of every kind of source; every kind of bad input ends in one line that names its place. See test_packing.py."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from unittest.mock import Mock, call

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from toy_training import write_lines

from train import from_scratch
from train.data import packing, records
from train.data.documents import chat_documents, text_documents
from train.data.packing import Corpus, DataConfig, Document, Source, load_corpus
from train.runtime import run_config, watch
from train.stages.evaluation import held_out_prompts
from treeflash_jax.engine.settings.pairs import locate
from treeflash_jax.formats import model_files
from treeflash_jax.formats.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "2 + 3 = 5"}]
THINKING = (  # as Qwen3's: an empty thought opens the last answer and every generation prompt, not earlier answers
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
HEADERS = (  # as Llama 3's: a token in front of everything, blank lines after headers
    "{{ '<|endoftext|>' }}{% for m in messages %}{{ '[' + m['role'] + ']\n\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n\n' }}{% endif %}"
)
FORGETFUL = (  # generation prompts fit, but what follows them changes once a turn is past
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'] if loop.last or m['role'] == 'user' else 'I said something.' }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
UNLIKE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}{{ 'Answer: ' }}{% endif %}"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(locate("tiny", "verifier"))


@pytest.fixture
def templated(tokenizer, monkeypatch):
    """The shipped vocabulary under another chat template."""

    def change(template: str | None) -> Tokenizer:
        monkeypatch.setattr(tokenizer.inner, "chat_template", template)
        return tokenizer

    return change


def load(path, tokenizer=None, *, data=(), seed=0, **source) -> Corpus:
    return load_corpus([Source(path=str(path), **source)], DataConfig(**dict(data)), tokenizer, seed, vocab_size=2048)


def recorded(*chats) -> list[records.Record]:
    return [records.Record(number, "", chat) for number, chat in enumerate(chats)]


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<|>", exclude_categories=("Cs",)), max_size=30)


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
@settings(deadline=None, max_examples=60)
def test_the_assistants_words_weigh_one(tokenizer, turns):
    raw = [
        {"role": role, "content": text} for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    messages = records.parse_chat({"messages": raw})
    [document] = chat_documents(tokenizer, recorded(messages), 0.25)
    pieces, weights = [], []
    for message in messages:
        texts = (f"<|im_start|>{message['role']}\n", message["content"] + "<|im_end|>", "\n")
        for text, weight in zip(texts, (0.25, 1.0 if message["role"] == "assistant" else 0.25, 0.25), strict=True):
            pieces += tokenizer.encode(text)
            weights += [weight] * (len(pieces) - len(weights))
    assert document.tokens_n.tolist() == pieces, "as the shipped pair was trained"
    assert document.weights_n.tolist() == weights


def supervised(tokenizer: Tokenizer, document: Document) -> list[str]:
    """Decoded runs of weight 1."""
    edges = np.flatnonzero(np.diff(np.pad(document.weights_n == 1, 1).astype(int)))
    return [tokenizer.inner.decode(document.tokens_n[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


TWO_TURNS = [*CHAT, {"role": "user", "content": "And twice that?"}, {"role": "assistant", "content": "10"}]


@pytest.mark.parametrize("template", [THINKING, FORGETFUL, HEADERS])
def test_a_template_that_rewrites_earlier_turns_teaches_the_last(templated, template):
    tokenizer = templated(template)
    [document] = chat_documents(tokenizer, recorded(TWO_TURNS), 0.5)
    learnt = ["2 + 3 = 5<|im_end|>", "10<|im_end|>"]
    assert supervised(tokenizer, document) == (learnt if template == HEADERS else learnt[1:])
    if template != HEADERS:
        assert document.prompt == tokenizer.encode_chat(TWO_TURNS[:-1]), "as in drafting"
        assert document.weights_n[document.prompt_length] == 1


def test_turns_after_the_last_answer_and_answers_that_open_a_chat_are_left_out(tokenizer):
    asked_again = [*CHAT, {"role": "user", "content": "Thanks"}]
    greeting = [{"role": "assistant", "content": "Hello"}, *CHAT]
    documents = chat_documents(tokenizer, recorded(CHAT, asked_again, greeting))
    assert documents[0].tokens_n.tolist() == documents[1].tokens_n.tolist()
    assert supervised(tokenizer, documents[2]) == ["2 + 3 = 5<|im_end|>"]


@pytest.mark.parametrize("form", [
    {"id": "0", "messages": CHAT, "conversations": None},
    {"conversations": [{"from": "human", "value": " What is 2 + 3?\r\n"}, {"from": "gpt", "value": "2 + 3 = 5"}]},
    {"id": "mt/1", "turns": ["What is 2 + 3?", "And now?"], "reference": {"code": "2 + 3 = 5\n"}},
    {"prompt": "What is 2 + 3?", "reference": {"code": "2 + 3 = 5\n"}},
    {"prompt": CHAT},
])  # fmt: skip
def test_chat_forms(form):
    assert records.parse_chat(form) == CHAT


def test_what_is_held_out_depends_on_neither_limit_nor_seed(tmp_path):
    path = write_lines(tmp_path / "answers.jsonl", ({"prompt": [1, 2], "response": [10 + i, 3]} for i in range(40)))

    def parts(limit: int, seed: int) -> tuple[set[int], set[int]]:
        opened = load(path, format="responses", limit=limit, hold_out=4, seed=seed, data={"sequence_length": 4})
        return tuple({*(part["answers"].tokens[2::4] - 10)} for part in (opened.train, opened.held_out))

    kept, held_out = parts(0, 0)
    assert held_out == set(range(3, 40, 4)) and kept == set(range(40)) - held_out
    few = [parts(12, seed) for seed in (0, 1)]
    assert few[0] != few[1] and few[0] == parts(12, 0)
    for some_kept, some_held_out in few:
        assert some_kept < kept and some_held_out < held_out and len(some_kept) + len(some_held_out) == 12


def test_what_is_measured_is_spread_over_what_is_held_out(tmp_path):
    assert packing.spread(3, 10).tolist() == [0, 3, 6] and packing.spread(5, 2).tolist() == [0, 1, 0, 1, 0]
    lines = ({"prompt": [1] * (1 + i % 3), "response": [10 + i, 3]} for i in range(40))
    path = write_lines(tmp_path / "answers.jsonl", lines)
    opened = load(path, format="responses", hold_out=2, data={"sequence_length": 5})
    packed = opened.held_out["answers"]
    assert [document.prompt for document in packed.documents[:6]] == [[1, 1], [], [1, 1, 1], [1, 1], [], [1, 1, 1]]
    usable = [document.prompt for document in packed.documents if document.prompt]
    assert len(usable) == 13
    assert held_out_prompts(opened, 4) == [usable[i] for i in (0, 3, 6, 9)]
    assert held_out_prompts(opened, 50) == usable


def test_responses_weigh_one_and_those_that_reached_their_limit_may_be_left_out(tmp_path):
    answers = [{"prompt": [5, 6], "response": [7 + i, 3], "finished": "length" if i % 2 else "stop"} for i in range(4)]
    path = write_lines(tmp_path / "r.jsonl", answers)
    kept, dropped = (
        load(path, format="responses", hold_out=4, data={"sequence_length": 6, "unfinished": how})
        for how in ("keep", "drop")
    )
    assert kept.train["r"].take([0]).weights_bt.tolist() == [[0, 0, 1, 1, 0, 0]]
    assert kept.train["r"].tokens[2::4].tolist() == [7, 8, 9] and not kept.skipped["r"]
    assert kept.num_sequences == 3 == kept.num_documents and len(kept.held_out["r"]) == 1
    assert kept.token_counts(11).tolist() == [0, 0, 0, 4, 0, 4, 4, 1, 1, 1, 1], "those held out too"
    assert dropped.train["r"].tokens[2::4].tolist() == [7, 9] and dropped.skipped["r"] == {"unfinished": 2}


def test_the_digest_changes_with_the_documents(tmp_path):
    answers = [{"prompt": [1, 2], "response": [10 + i, 3]} for i in range(8)]

    def digest(changed: list) -> str:
        path = write_lines(tmp_path / "answers.jsonl", changed)
        return load(path, format="responses", hold_out=4, data={"sequence_length": 8}).digest()

    others = {
        "a token": [*answers[:2], {"prompt": [1, 2], "response": [12, 4]}, *answers[3:]],
        "a weight": [{"prompt": [1], "response": [2, 10, 3]}, *answers[1:]],
        "one held out": [*answers[:3], {"prompt": [1, 2], "response": [13, 4]}, *answers[4:]],
        "the order": [answers[1], answers[0], *answers[2:]],
        "one more": [*answers, answers[0]],
        "one less": answers[:-1],
    }
    assert digest(answers) == digest(answers)
    assert len({digest(answers), *map(digest, others.values())}) == 7


def test_files_folders_globs_and_repeated_names(tmp_path, tokenizer):
    for folder, name in (("x", "one"), ("x", "two"), ("y", "one")):
        (tmp_path / folder).mkdir(exist_ok=True)
        write_lines(tmp_path / folder / f"{name}.jsonl", ["\n", {"messages": CHAT}, "\n"])
    for path, count in (("x", 2), ("*/one.jsonl", 2), ("**/*.jsonl", 3), ("x/two.jsonl", 1)):
        [packed] = load(f"{tmp_path}/{path}", tokenizer, hold_out=0).train.values()
        assert len(packed.documents) == count
    twice = [Source(path=f"{tmp_path}/{folder}/one.jsonl", weight=weight) for folder, weight in (("x", 1.0), ("y", 3.0))]
    assert load_corpus(twice, DataConfig(), tokenizer, 0).weights == {"one": 1.0, "one-2": 3.0}


def test_plain_text_is_cut(tmp_path, tokenizer):
    for i in range(8):
        (tmp_path / f"test_{i}.txt").write_text(f"word {i} " * 50)
    (tmp_path / ".hidden").write_bytes(b"\xff\xfe")
    data = {"sequence_length": 32, "prompt_weight": 0.5}
    [packed] = load(tmp_path, tokenizer, format="text", hold_out=0, data=data).train.values()
    ids = [tokenizer.encode(f"word {i} " * 50) for i in range(8)]
    assert packed.tokens.tolist() == [t for each in ids for t in each], "every text, in order"
    assert len(packed.documents) == sum(-(-len(each) // 32) for each in ids)
    assert set(np.unique(packed.take(np.arange(len(packed))).weights_bt)) == {0, 1}, "a text has no prompt"
    source = Source(path=str(tmp_path), format="text", limit=3)
    chosen = [[record.content for record in records.read_records(source, seed)] for seed in (0, 0, 1)]
    assert [len(texts) for texts in chosen] == [3, 3, 3] and chosen[0] == chosen[1] != chosen[2]
    [short] = text_documents(tokenizer, "one two three", len(tokenizer.encode("one two three")) - 1)
    assert len(short.tokens_n) > 1, "and no piece of one token, which has nothing to predict"
    lines = write_lines(tmp_path / "t.jsonl", [{"text": "one"}, {"text": "two"}])
    assert [record.content for record in records.read_records(Source(path=str(lines), format="text"), 0)] == ["one", "two"]


@pytest.mark.slow
def test_the_standard_library_is_text_without_its_tests():
    places = [Path(record.where).parts for record in records.read_records(Source(path=records.STDLIB, format="text"), 0)]
    assert len(places) > 300 and not any({"test", "site-packages"} & set(parts) for parts in places)


def test_a_hub_set(monkeypatch, tokenizer):
    load_dataset = Mock(return_value=datasets.Dataset.from_list([{"messages": CHAT}] * 3))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for path in ("hub:owner/chats", "hub:owner/chats:maths:train_sft"):
        assert len(load(path, tokenizer, limit=2).train["chats"].documents) == 2
    asked = [call("owner/chats", None, split="train"), call("owner/chats", "maths", split="train_sft")]
    assert load_dataset.call_args_list == asked
    unreachable = ConnectionError("Couldn't reach 'owner/chats' on the Hub (LocalEntryNotFoundError)\nmore lines")
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=unreachable))
    refused(lambda: load("hub:owner/chats", tokenizer), "hub:owner/chats: Couldn't reach", "give the path of a JSONL file")


GOOD = {"messages": CHAT}
LONG = {"messages": [{"role": "user", "content": "one " * 90}, {"role": "assistant", "content": "two"}]}


@pytest.mark.parametrize("format, line, message", [
    ("chat", '{"messages": [\n', "line 2: not valid JSON: Expecting value"),
    ("chat", {"text": "x"}, "line 2: got keys 'text', expected 'conversations' or 'messages'"),
    ("chat", {"messages": [{"role": "user"}]}, "line 2: got a message without role and content"),
    ("chat", {"messages": CHAT[:1]}, "line 2: got no assistant turn"),
    ("text", {"text": "half \ud800 " * 9}, "line 2.*U+D800"),
    ("text", {"words": "x"}, "line 2: got no 'text', expected a string"),
    ("responses", {"prompt": [1]}, "line 2: got no 'response', expected a list of token ids"),
    ("responses", {"prompt": [1], "response": ["2"]}, "line 2: got no 'response'"),
    ("responses", {"prompt": [1], "response": [2048]}, "line 2: got token id 2048, expected 0 to 2047"),
    ("responses", {"prompt": [-1], "response": [2]}, "line 2: got no 'prompt'"),
])  # fmt: skip
def test_malformed_records_are_named(tmp_path, tokenizer, format, line, message):
    good = {"chat": GOOD, "text": {"text": "words of a text"}, "responses": {"prompt": [1], "response": [2]}}[format]
    path = write_lines(tmp_path / "set.jsonl", [good, line, good])
    refused(lambda: load(path, tokenizer, format=format), str(path), *message.split(".*"))


@pytest.mark.parametrize("name, content, message", [
    ("missing.jsonl", None, "missing.jsonl: no such file; expected a JSONL file, a text file"),
    ("empty.jsonl", "\n \n", "empty.jsonl: got no records, expected at least one"),
    ("list.json", '[{"messages": []}]', "list.json: got a JSON list, expected one JSON object a line"),
    ("long.jsonl", json.dumps(LONG), "long.jsonl: got no document to train on (1 too long)"),
    ("set.jsonl", b'{"messages": "\xff"}\n', "set.jsonl.*can't decode"),
])  # fmt: skip
def test_bad_places(tmp_path, tokenizer, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(lambda: load(tmp_path / name, tokenizer, data={"sequence_length": 64}), *message.split(".*"))


def test_records_that_are_too_long_are_left_out(tmp_path, tokenizer):
    opened = load(write_lines(tmp_path / "set.jsonl", [GOOD, LONG, GOOD]), tokenizer, data={"sequence_length": 64})
    assert opened.skipped == {"set": {"too long": 1}} and len(opened.train["set"].documents) == 2
    assert "1 too long" in opened.summary()


def test_bad_settings_and_tokenizers(tmp_path, templated):
    path = write_lines(tmp_path / "set.jsonl", [GOOD])
    refused(lambda: Source(path="x", hold_out=1), "got hold_out 1")
    refused(lambda: load_corpus([], DataConfig(), None, 0), "got no sources")
    refused(lambda: load(path), "no tokenizer.json")
    for template, message in (
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "line 1: .*chat template refuses: roles must alternate"),
        (UNLIKE, "line 1: got a last answer that does not begin with the template's generation prompt"),
    ):
        refused(partial(load, path, templated(template)), *message.split(".*"))


def test_a_tokenizer_and_a_model_are_trained_and_read(tmp_path):
    source = Source(path=str(write_lines(tmp_path / "set.jsonl", [GOOD] * 20)), hold_out=0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    words = [f"run={tmp_path}/run", f"tokenizer={tmp_path}/tokenizer", "vocab_size=300", "data.sequence_length=64"]
    words += ["model.num_hidden_layers=1"]
    words += ["loop.steps=6", "loop.batch=8", "loop.log_every=1", "mesh.data=1", "optimizer.learning_rate=1e-2"]
    shipped = Path(__file__).parents[2] / "configs" / "shipped" / "from_scratch.toml"
    words += [f"model.{name}={size}" for name, size in sizes.items()]
    stage = run_config.load(from_scratch.FromScratchConfig, shipped, [*words, "init_scale=0.02"])
    stage = replace(stage, sources=(source,), tokenizer_sources=(source, source))
    from_scratch.main(stage)
    trained = Tokenizer.load(tmp_path / "run" / "model")
    assert trained.decode(trained.encode("What is 2 + 3?")) == "What is 2 + 3?"
    assert trained.inner.vocab_size <= 300 and trained.stop_ids == (2,)
    model, params = model_files.load_verifier(tmp_path / "run" / "model")
    assert model.vocab_size == len(trained.inner) == len(params["embed"])
    first, *_, last = [line["loss"] for line in watch.read_log(tmp_path / "run")]
    assert first == pytest.approx(np.log(model.vocab_size), rel=0.05) and last < first - 0.1
    texts = islice(from_scratch.training_texts([source, source], 0), 100)
    assert Counter(texts) == {message["content"]: 40 for message in CHAT}
    refused(lambda: list(from_scratch.training_texts([Source(path=source.path, format="responses")], 0)), "ids already")
