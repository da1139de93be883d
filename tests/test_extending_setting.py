"""Extending the library: a sampling setting is declared once and has its arithmetic; Python and servers then take it."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import jax
import jax.numpy as jnp
import pytest
from answers import drafted_as_plain, make_pair
from conftest import FEW_TOKENS
from refusals import refused
from serve.servers import CHAT, running

import treeflash_jax as tf
from treeflash_jax.core.setting_options import add_options
from treeflash_jax.decoding.processors import PROCESSORS, Nodes
from treeflash_jax.drafters import NgramDrafter
from treeflash_jax.engine.settings.generate_config import sampling_setting

PROMPT = [3, 4, 5]


@dataclass(frozen=True, kw_only=True)
class Settings(tf.GenerateConfig):
    even_penalty: float | Sequence[float] = sampling_setting(
        0.0, "subtracted from logits of even ids", least=0, dtype=float
    )


def penalize_even(logits_bnv: jax.Array, nodes: Nodes) -> jax.Array:
    penalty_b = nodes.state.sampling.numbers["even_penalty"]
    is_even_v = jnp.arange(logits_bnv.shape[-1]) % 2 == 0
    return logits_bnv - penalty_b[:, None, None] * is_even_v


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(PROCESSORS, ("even_penalty",), penalize_even)


def test_python_takes_it_and_drafted_answers_obey_it():
    model, draft = make_pair(FEW_TOKENS, NgramDrafter(shortest=1, num_depths=3)), {"nodes": 8}
    how = {"max_new_tokens": 24, "stop_ids": ()}
    free, odd = drafted_as_plain(model, [PROMPT] * 2, draft, config=Settings(), even_penalty=[0.0, 1e4], **how)
    assert all(token % 2 for token in odd.ids) and max(odd.accept_lengths) > 1
    assert not all(token % 2 for token in free.ids) and free.ids == model.generate(PROMPT, **draft, **how)[0].ids
    refused(lambda: model.generate(PROMPT, Settings(), even_penalty=-1.0), "got even_penalty -1.0, expected at least 0")
    refused(lambda: model.generate(PROMPT, even_penalty=1.0), "got unknown argument 'even_penalty'")


def test_commands_have_its_option():
    parser = argparse.ArgumentParser()
    add_options(parser, Settings, ["even_penalty"])
    assert parser.parse_args(["--even-penalty", "2"]).even_penalty == 2


@pytest.mark.slow
def test_servers_take_its_field(tiny):
    body = {"messages": CHAT, "max_tokens": 12, "temperature": 0}
    with running(tiny, Settings) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        texts = []
        for penalty in (0, 1e4):
            answer = client.post("/v1/chat/completions", json=body | {"even_penalty": penalty}).json()
            texts.append(answer["choices"][0]["message"]["content"])
            [own] = tiny.generate([CHAT], Settings(), even_penalty=penalty, max_new_tokens=12)
            assert texts[-1] == own.text
        assert all(token % 2 for token in own.ids) and texts[0] != texts[1]
        wrong = client.post("/v1/chat/completions", json=body | {"even_penalty": "much"})
        assert wrong.status_code == 400 and "even_penalty" in wrong.json()["error"]["message"]
        assert "even_penalty" in client.get("/openapi.json").json()["components"]["schemas"]["ChatBody"]["properties"]
