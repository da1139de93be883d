"""Answers that follow a schema, a pattern or choices: valid, and equal to one-token decoding whatever is drafted."""

import copy
import json
import re
import weakref
from dataclasses import replace
from typing import Literal

import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from answers import drafted_as_plain, make_pair, read_texts, slow_unless
from conftest import FEW_TOKENS, RANDOM_MODEL, compilations, needs_8_devices
from drafted_pairs import accepted_pair
from pydantic import BaseModel, Field, create_model
from refusals import refused
from scipy import stats

import treeflash_jax as tf
from treeflash_jax.constraints import compilation, tables
from treeflash_jax.constraints.compile_bytes import compile_bytes
from treeflash_jax.constraints.tables import AutomatonTable
from treeflash_jax.formats import tokenizer as tokenizers

NAME = {"type": "string", "maxLength": 8}
PERSON = {
    "type": "object",
    "properties": {"name": NAME, "age": {"enum": [3, 17, 41, 99]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ODD = {"enum": ['a "quoted"\\ word', "\u00e9\U0001f600", 3, None]}
FLAGS = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}
CHATS = ["Tom has 3 apples.", "Add 5 and 6.", "Name a colour.", "Why?"]
SCHEMAS = [PERSON, ODD, None, FLAGS]  # of these chats
DRAFTS = [{"nodes": 8, "ngrams": 0}, {"nodes": 8}, {"builder": "walk", "ngrams": 8}, {"builder": "chain"}]


def assert_valid(results, schemas) -> None:
    for result, schema in zip(results, schemas, strict=True):
        if schema is not None:
            assert result.finished == "stop", result.text
            jsonschema.validate(json.loads(result.text), schema)


@pytest.mark.parametrize("draft", [slow_unless(draft is DRAFTS[0], draft) for draft in DRAFTS])
def test_drafted_answers_are_valid_and_those_of_one_token_decoding(float64, draft):
    """In a batch of two slots with and without schemas; the slot of a finished answer takes the next prompt."""
    tiny = tf.load("tiny", dtype="float64")
    settings = {"max_new_tokens": 48, "batch_size": 2, "schema": SCHEMAS}
    sampled = {"temperature": [0.0, 1.0, 1.0, 0.0], "seed": 3}
    plain = tiny.generate(CHATS, builder="none", **settings | sampled | {"batch_size": 4})
    results = drafted_as_plain(tiny, CHATS, draft, plain=plain, **settings | sampled)
    assert_valid(results, SCHEMAS)
    if "nodes" in draft:
        assert max(length for result in results for length in result.accept_lengths) > 1
        # Regression: trees after the first were drawn as if the answer began there.
        for index, length in enumerate(results[0].accept_lengths[:-1]):
            assert sum(results[0].tree(index).accepted) == length
        assert max(results[0].accept_lengths[1:-1]) > 1
    else:
        free = tiny.generate(CHATS, max_new_tokens=48, batch_size=2, **draft)[2]
        assert tiny.generate(CHATS, **settings, **draft)[2].ids == free.ids
        *_, streamed = tiny.stream(CHATS[0], schema=PERSON, max_new_tokens=48, **draft)
        assert streamed.ids == tiny.generate(CHATS[0], schema=PERSON, max_new_tokens=48, builder="none")[0].ids


@pytest.mark.slow
def test_text_around_a_schema_with_tokens_of_its_own(float64):
    """The last one, which ends answers of this model, ends this one as well."""
    tiny = tf.load("tiny", dtype="float64")
    person = {"type": "json_schema", "json_schema": PERSON}
    call = {"type": "tag", "begin": "<|im_start|>call ", "content": person, "end": "!<|im_end|>"}
    tag = {"type": "sequence", "elements": [{"type": "regex", "pattern": "[A-Z][a-z ]{0,9}"}, call]}
    settings = {"structural_tag": [tag, None], "max_new_tokens": 48, "batch_size": 2, "temperature": 1.0}
    called, free = drafted_as_plain(tiny, CHATS[:2], {"nodes": 8}, **settings)
    assert called.finished == "stop" and max(called.accept_lengths) > 1
    said, arguments = re.fullmatch("([A-Z][a-z ]{0,9})call (.*)!", called.text, re.DOTALL).groups()
    jsonschema.validate(json.loads(arguments), PERSON)
    assert called.ids[len(tiny.tokenizer.encode(said)) :].count(1) == 1 and called.ids[-1] == tiny.stop_ids[0]
    assert free.ids == tiny.generate(CHATS[:2], **settings | {"structural_tag": None}, nodes=8)[1].ids


@pytest.fixture(scope="module")
def small(short) -> tf.TreeFlash:
    """A random verifier of one layer; its n-grams are taken from the prompt."""
    return tf.load(verifier=short, drafter="ngram")


class Person(BaseModel):
    name: str = Field(max_length=8)
    age: Literal[3, 17]


def test_patterns_choices_and_every_form_of_a_schema(small):
    """In one call: a prompt has one constraint or none. Tables are data: others within `schema_states` compile nothing."""

    def answer(pattern: str, choices: list[str], flags: dict) -> list[tf.Result]:
        return small.generate(
            CHATS[:1] * 5,
            pattern=[pattern, None, None, None, None],
            choices=[None, choices, None, None, None],
            schema=[None, None, flags, json.dumps(flags), Person],
            max_new_tokens=400, temperature=1.0, batch_size=5, builder="none",
        )  # fmt: skip

    pattern, choices = r"[0-9]{3}-(ab|\u00e9)", ["yes.", "no (really)", "a\nb \u4e2d"]
    results = answer(pattern, choices, FLAGS)
    assert re.fullmatch(pattern, results[0].text) and results[1].text in choices
    assert_valid(results[2:4], [FLAGS, FLAGS])
    assert results[4].finished == "stop" and Person.model_validate_json(results[4].text)
    with compilations() as compiled:
        results = answer("[0-9]{300}", ["no.", *choices[1:]], FLAGS | {"minItems": 2})
    assert "jit(decode)" not in compiled and len(json.loads(results[2].text)) >= 2


def test_a_constraint_ends_an_answer_that_it_completes(small):
    """Regression: `min_new_tokens` left no token after a complete choice, and other `stop_ids` did not end it."""
    prompts = [tf.Text("yes. yes. yes. "), *CHATS[:2], tf.Text("yes. yes. yes. ")]
    constraints = {"choices": [["yes."], None, None, ["yes."]], "pattern": [None, "[ab]+", None, None]}
    how = {"min_new_tokens": [9, 9, 9, 0], "stop_ids": [[*small.stop_ids]] * 3 + [[5]], "max_new_tokens": 12, "nodes": 8}
    short, long, free, stopped = small.generate(prompts, **constraints, **how)
    for result in short, stopped:
        assert (result.text, result.finished) == ("yes.", "stop")
    assert len(long.ids) >= 9 and re.fullmatch("[ab]+", long.text) and len(free.ids) >= 9
    assert max(short.accept_lengths) > 1, "control: drafts are accepted"


def test_thoughts_come_before_a_constraint(tiny):
    """If the prompt ends inside them; their end may be a token of its own, which is impossible elsewhere."""

    def can_answer(table: AutomatonTable, ids: list[int]) -> bool:
        state = 0
        for token in [*ids, tiny.stop_ids[0]]:
            state = table.next_qc[state, table.class_v[token]]
            if state < 0:
                return False
        return True

    encode = tiny.tokenizer.encode
    prompts = [tf.Text("Hm. <think>\n"), tf.Text("Hm.")]
    thoughtful, plain = tiny.prepare(prompts, choices=["yes", "no"]).requests
    for text in 'a "b" </thi</think>\n\nyes', "</think>no":
        assert can_answer(thoughtful.automaton, encode(text)) and not can_answer(plain.automaton, encode(text))
    for text in "yes", "</think>maybe", "a</think>\n\n\nyes":
        assert not can_answer(thoughtful.automaton, encode(text))
    whole = {"type": "regex", "pattern": "[0-9]"}  # a structural tag describes thoughts as well
    for constraint in {"schema": {"type": "integer"}}, {"pattern": "[0-9]"}, {"structural_tag": whole}:
        [request] = tiny.prepare([tf.Text("Hm. <think>\n")], **constraint).requests
        is_behind = can_answer(request.automaton, encode("Hm.</think>\n5"))
        assert is_behind == ("structural_tag" not in constraint) != can_answer(request.automaton, encode("5"))
    tokenizer = tokenizers.Tokenizer(copy.deepcopy(tiny.tokenizer.inner))
    tokenizer.inner.add_tokens(["</think>"])
    [end] = tokenizer.encode("</think>")
    size = tiny.verifier.vocab_size + 1
    content = compilation.Constraint("pattern", "[^]+")
    constraint = compilation.answer_constraint(content, tokenizer, tokenizer.encode("<think>"))
    table = compilation.compile_constraint(constraint, tokenizer, tiny.stop_ids, size)
    assert can_answer(table, [*encode("a b"), end, *encode("c")]) and not can_answer(table, [end, *encode("c"), end])


def test_answers_share_the_table_of_their_constraint(tiny):
    """Regression: every sample had its own copy, padded to the size of the programs."""
    requests = tiny.prepare(["x"], schema=FLAGS, samples=3).requests
    assert len({id(request.automaton.next_qc) for request in requests}) == 1


def test_the_constraints_of_the_last_calls_are_not_compiled_again(tiny, monkeypatch):
    compiled = []
    monkeypatch.setattr(compilation, "compile_bytes", lambda *args: compiled.append(args[1]) or compile_bytes(*args))
    monkeypatch.setattr(compilation, "_stored", {})
    monkeypatch.setattr(compilation, "_num_stored_bytes", 0)
    [first] = tiny.prepare(["x"], pattern="x").requests
    monkeypatch.setattr(compilation, "MOST_STORED_BYTES", 2.5 * first.automaton.num_bytes)
    for pattern in "yxzxy":  # y is the oldest when z is added
        tiny.prepare(["x"], pattern=pattern)
    assert "".join(compiled) == "xyzy"
    assert first.automaton is tiny.prepare(["another"], pattern="x").requests[0].automaton


def test_stored_tables_keep_no_tokenizer_alive(tiny):
    tokenizer = tokenizers.Tokenizer(tiny.tokenizer.inner)
    constraint = compilation.Constraint("pattern", "x")
    compilation.compile_constraint(constraint, tokenizer, tiny.stop_ids, tiny.verifier.vocab_size)
    is_alive = weakref.ref(tokenizer)
    del tokenizer
    assert is_alive() is None


@pytest.mark.slow
def test_every_draw_is_valid(tiny, smollm2):
    for model, draws, draft in ((tiny, 500, {"nodes": 8, "batch_size": 64}), (smollm2, 50, {"builder": "none"})):
        results = model.generate(CHATS[0], schema=PERSON, samples=draws, temperature=1.0, max_new_tokens=64, **draft)
        assert_valid(results, [PERSON] * draws)
        assert len({result.text for result in results}) > draws / 3


# Two states over twelve tokens; token 0 ends an answer in state 1 alone.
NEXT = np.array([[-1, 1, 0, -1], [1, 0, -1, 1]], np.int32)
CLASS = np.array([0, 1, 1, 1, 2, 2, 2, 3, 3, 1, 2, 3], np.int32)


@pytest.fixture
def small_automaton(monkeypatch):
    """A pattern that has this automaton over FEW_TOKENS, which have no tokenizer."""
    table = AutomatonTable(NEXT, CLASS)
    monkeypatch.setattr(compilation, "compile_constraint", lambda *_: table)


def expected_distribution(pair, text: list[int], state: int, depth: int) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of `depth` tokens, by enumeration."""
    if depth == 0:
        return {(): 1.0}
    logits_v = np.asarray(read_texts(pair.weights.verifier, pair.verifier, jnp.asarray([text]))[1][0, -1])
    after_v = NEXT[state][CLASS]
    share_v = np.where(after_v >= 0, np.exp(logits_v), 0)
    probabilities = {}
    for token in np.flatnonzero(share_v):
        for rest, p in expected_distribution(pair, [*text, token], after_v[token], depth - 1).items():
            probabilities[int(token), *rest] = p * share_v[token] / share_v.sum()
    return probabilities


@pytest.mark.slow
def test_answers_have_the_distribution_of_constrained_one_token_decoding(float64, small_automaton):
    pair, prompt, draws = accepted_pair("language_model"), [3, 4, 5], 1024
    settings = {"temperature": 1.0, "max_new_tokens": 3, "stop_ids": (), "batch_size": 64, "children": 6}
    results = pair.generate([prompt], samples=draws, pattern="small", builder="paths", nodes=8, **settings)
    probabilities = expected_distribution(pair, prompt, 0, 3)
    counts = dict.fromkeys(probabilities, 0)
    for result in results:
        counts[tuple(result.ids)] += 1  # KeyError: an answer that the automaton does not allow
    expected, got = np.array([*probabilities.values()]) * draws, np.array([*counts.values()])
    is_often = expected >= 5
    groups = [np.append(x[is_often], x[~is_often].sum()) for x in (got, expected)]
    assert stats.chisquare(*groups).pvalue > 1e-3
    assert any(length > 1 for result in results for length in result.accept_lengths)


@needs_8_devices
def test_a_mesh_that_splits_the_vocabulary_gives_the_same_answers(float64, small_automaton):
    how, config = {"dtype": jnp.float64, "scale": 0.5}, replace(FEW_TOKENS, num_layers=1)
    one, eight = (make_pair(config, None, mesh=mesh, **how) for mesh in (None, tf.make_mesh(2, 4)))
    settings = {"max_new_tokens": 12, "stop_ids": (), "pattern": ["small", None, "small"], "builder": "none"}
    answers = [[result.ids for result in pair.generate([[3], [4, 5], [6]], **settings)] for pair in (one, eight)]
    assert answers[0] == answers[1]
    for ids in answers[0][0], answers[0][2]:
        state = 0
        for token in ids:
            state = NEXT[state][CLASS[token]]
            assert state >= 0


def test_what_cannot_be_followed_is_refused(tiny, monkeypatch):
    for settings, words in (
        ({"pattern": "("}, ["pattern '('", "cannot be followed", "unmatched ( at position 0"]),
        ({"schema": {"$ref": "#"}}, ["a schema that contains itself"]),
        ({"schema": {"anyOf": [{"type": "lizard"}]}}, ["type 'lizard' is unknown, at #/anyOf/0/type"]),
        ({"schema": {"type": "array", "minItems": 2, "maxItems": 1}}, ["nothing satisfies it"]),
        ({"schema": "{"}, ["got schema '{', not valid JSON"]),
        ({"schema": 5}, ["got schema 5"]),
        ({"structural_tag": {"type": "or", "elements": []}}, ["got structural_tag", "nothing satisfies it"]),
        ({"structural_tag": {"type": {1}}}, ["expected JSON values"]),
        ({"choices": ["\ud800"]}, ["choices", "whole characters"]),
        ({"choices": []}, ["choices []"]),
        ({"pattern": "a", "choices": ["a"]}, ["got pattern and choices", "expected one of them"]),
        ({"pattern": ["a", "b"]}, ["2 values of pattern for 1 prompts"]),
    ):
        refused(lambda settings=settings: tiny.generate("x", **settings), *words)
    monkeypatch.setattr(tables, "MOST_TABLE_BYTES", 2**10)
    refused(lambda: tiny.generate("x", pattern="(a{1,9}b){1,9}"), "pattern", "kinds of tokens exceed")
    ids_only = tf.TreeFlash(RANDOM_MODEL, tiny.weights)
    refused(lambda: ids_only.generate([[1]], pattern="a"), "pattern 'a'", "no tokenizer.json")


MATCHED = {
    r"[0-9]+(\.[0-9]+)?": ["7", "12.5"],  # regression: a match could not go on to a longer one through what is none
    r"(ac|[^a])+": ["acac", "b\u00e9"],
    r'"([^"\\]|\\["n]){0,40}"': ['"\\"' + 'ab\\"' * 12 + '"'],  # regression: 2^40 states
    r'[^"]{0,60}"': ['ab"'],  # a control: 2^30 states if a match may begin later
    "(\U0001f600|x?)y{2}": ["\U0001f600yy", "yy"],
    "(ab)*": ["", "abab"],
}


def test_models_inside_models_are_followed(small):
    """Regression: beyond the third, a model was left out of the answer."""
    inner, tag = create_model("Inner", value=(bool, ...)), (Literal["\u00e9"], Field(description="a letter"))
    for name in "EDCBA":
        inner = create_model(name, inside=(inner, ...), pair=(tuple[bool, None], ...), tag=tag)
    how = {"max_new_tokens": 400, "temperature": 1.0, "batch_size": 5, "builder": "none"}  # programs of the other forms
    [result] = small.generate("x", schema=inner, **how)
    assert result.finished == "stop" and result.text.count("inside") == 5
    inner.model_validate_json(result.text)


@pytest.mark.parametrize("pattern", MATCHED)
def test_walks_through_a_table_are_matches(tiny, pattern):
    constraint = compilation.Constraint("pattern", pattern)
    table = compilation.compile_constraint(constraint, tiny.tokenizer, tiny.stop_ids, tiny.verifier.vocab_size)
    rng, end = np.random.default_rng(0), tiny.stop_ids[0]

    def walk(ids: list[int]) -> bool:
        state = 0
        for token in [*ids, end]:
            state = table.next_qc[state, table.class_v[token]]
            if state < 0:
                return False
        return True

    for text in MATCHED[pattern]:
        ids = tiny.tokenizer.encode(text)
        assert walk(ids) and bool(re.fullmatch(pattern, text)) and not walk([*ids, *tiny.tokenizer.encode("%a")])
    for _ in range(50):
        state, ids = 0, []
        while len(ids) < 200:
            allowed = np.flatnonzero(table.next_qc[state, table.class_v] >= 0)
            token = int(end if end in allowed and rng.random() < 0.3 else rng.choice(allowed))
            if token in tiny.stop_ids:
                assert re.fullmatch(pattern, tiny.tokenizer.decode(ids))
                break
            state = table.next_qc[state, table.class_v[token]]
            ids.append(token)


def test_bytes_of_both_kinds_of_tokenizers(tiny):
    texts = tiny.tokenizer.token_bytes
    ids = tiny.tokenizer.encode("Caf\u00e9, 3\n\U0001f600")
    assert b"".join(texts[id] for id in ids).decode() == "Caf\u00e9, 3\n\U0001f600"
    assert not texts.keys() & tiny.tokenizer.inner.added_tokens_decoder.keys()
    pieces = ["\u2581a", "<0x0A>", "\u2581", "<0xZ"]
    assert [*map(tokenizers._read_sentence_piece, pieces)] == [b" a", b"\n", b" ", b"<0xZ"]
