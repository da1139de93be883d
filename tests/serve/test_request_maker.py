"""The requests that the server makes of prompts and settings."""

import pytest
from refusals import refused

import treeflash_jax as tf
from treeflash_jax.constraints.compile_bytes import running_with
from treeflash_jax.serve.request_maker import RequestMaker


def test_requests_find_their_constraints_compiled(tiny):
    """A prompt that ends within thoughts needs another constraint than one that does not."""
    prompts, settings = [tiny.tokenizer.encode("a"), tiny.tokenizer.encode("a <think>")], {"pattern": "[017]{1,3}"}
    maker = RequestMaker(tiny, tf.GenerateConfig(), context=64, schema_states=256)
    constraints = maker.find_constraints(prompts, settings)
    assert {constraint.kind for constraint in constraints} == {"pattern", "structural_tag"}
    assert maker.find_constraints(prompts, {}) == set()
    for constraint in constraints:
        maker.compile(constraint)
    with running_with(lambda *_, **__: pytest.fail("a request compiled its constraint again")):
        requests = maker.make_requests(prompts, **settings)
    assert all(request.automaton for request in requests) and requests[0].number + 1 == requests[1].number
    without = RequestMaker(tiny, tf.GenerateConfig(), context=64, schema_states=0)
    refused(lambda: without.find_constraints(prompts, settings), "this server follows no constraints")
