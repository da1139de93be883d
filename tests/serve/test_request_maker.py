"""The requests that the server makes of prompts and settings."""

import pytest
from refusals import refused
from stub_worker import ask, stub_worker

import treeflash_jax as tf
from treeflash_jax.constraints import compilation
from treeflash_jax.constraints.compile_bytes import compile_bytes
from treeflash_jax.serve.request_maker import RequestMaker


def test_a_request_has_the_automata_that_were_compiled_for_it(tiny, monkeypatch):
    """It compiles none again, however many others came in between: here, none is stored."""
    compiled, submitted = [], []
    monkeypatch.setattr(compilation, "MOST_STORED_BYTES", 0)
    monkeypatch.setattr(compilation, "compile_bytes", lambda *args: compiled.append(args[0]) or compile_bytes(*args))
    maker = RequestMaker(tiny, tf.GenerateConfig(), context=64, schema_states=256)
    worker = stub_worker(model=tiny, request_maker=maker)
    answer = worker.submit
    worker.submit = lambda submission: submitted.append(submission) or answer(submission)
    # A prompt that ends within thoughts needs another constraint than one that does not.
    assert ask(worker, {"prompt": ["a", "a <think>", "b"], "regex": "[017]{1,3}"}).status_code == 200
    assert sorted(compiled) == ["pattern", "structural_tag"]
    first, second, third = submitted[0].requests
    assert first.automaton is third.automaton and len(first.automaton.next_qc) < len(second.automaton.next_qc)
    assert [request.number for request in submitted[0].requests] == [0, 1, 2]


def test_constraints_of_prompts(tiny):
    prompts, pattern = [tiny.tokenizer.encode("a"), tiny.tokenizer.encode("a <think>")], "[017]{1,3}"
    maker, without = (RequestMaker(tiny, tf.GenerateConfig(), context=64, schema_states=states) for states in (256, 0))
    kinds = [request.constraint.kind for request in maker.make_requests(prompts, pattern=pattern)]
    assert kinds == ["pattern", "structural_tag"]
    assert {request.constraint for request in maker.make_requests(prompts)} == {None}
    refused(lambda: without.make_requests(prompts, pattern=pattern), "this server follows no constraints")


@pytest.mark.parametrize("field, fields", [
    ("json_schema", {"json_schema": "{"}),
    ("structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": "{"}}),
])  # fmt: skip
def test_wrong_json_is_an_error_of_its_field(tiny, field, fields):
    worker = stub_worker(model=tiny, request_maker=RequestMaker(tiny, tf.GenerateConfig(), context=64, schema_states=256))
    response = ask(worker, {"prompt": "a"} | fields)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == field
    assert error["message"].startswith(f"got {field} '{{', not valid JSON: ")
