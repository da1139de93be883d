"""What the chat page reads of the server: the page itself, the rounds of an answer, and the tree of each."""

import ast
import asyncio
import re

import httpx
import pytest
from servers import CHAT
from stub_worker import StubRequestMaker, stub_worker

from treeflash_jax.constraints.tables import allow_all
from treeflash_jax.core import programs
from treeflash_jax.engine.call.requests import Request
from treeflash_jax.serve import http_answers
from treeflash_jax.serve.app import make_app
from treeflash_jax.serve.metrics import Metrics
from treeflash_jax.serve.page import describe_rounds

KEPT = 64


@pytest.fixture(scope="module")
def answer(server) -> dict:
    body = {"messages": CHAT, "max_tokens": 60, "temperature": 0}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=600).json()


def fetch(server, path: str) -> httpx.Response:
    return httpx.get(f"{server.url}/ui/trees/{path}", timeout=600)


def test_the_page_comes_with_a_policy_that_lets_its_script_alone_run(server):
    page = httpx.get(server.url)
    policy = page.headers["content-security-policy"]
    assert page.headers["content-type"].startswith("text/html") and page.text.count("<script") == 1
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert re.search(r"script-src 'sha256-[\w+/]{43}='(;|$)", policy)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page.text)


def test_rounds_are_the_whole_answer(tiny, server, answer):
    described = fetch(server, answer["id"]).json()
    rounds = described["rounds"]
    [result] = tiny.generate([CHAT], max_new_tokens=60, nodes=4, ngrams=0, temperature=0)
    assert [entry["length"] for entry in rounds] == result.accept_lengths and described["drafts"]
    assert described["tau"] == pytest.approx(result.tau) and result.tau > 1
    texts = [described["first"], *(entry["accepted"] + entry["bonus"] for entry in rounds)]
    assert "".join(texts) == answer["choices"][0]["message"]["content"] == result.text
    alone = [entry for entry in rounds[:-1] if entry["length"] == 1]
    assert alone and all(entry["accepted"] == "" and entry["bonus"] for entry in alone)
    assert any(entry["accepted"] for entry in rounds)


def test_rounds_of_an_answer_cut_by_a_stop_string_are_its_text(tiny):
    usual = tiny.generate([CHAT], max_new_tokens=60, nodes=4, ngrams=0)[0]
    for start in range(2, 12):
        result = tiny.generate([CHAT], max_new_tokens=60, nodes=4, ngrams=0, stop=usual.text[start : start + 3])[0]
        described = describe_rounds(result, tiny.tokenizer)
        texts = [described["first"], *(entry["accepted"] + entry["bonus"] for entry in described["rounds"])]
        assert "".join(texts) == result.text


def test_an_answer_cut_within_a_round_ends_with_accepted_tokens(tiny):
    results = [tiny.generate([CHAT], max_new_tokens=count, nodes=4, ngrams=0)[0] for count in range(3, 12)]
    assert {bool(result.cut) for result in results} == {True, False}
    for result in results:
        last = describe_rounds(result, tiny.tokenizer)["rounds"][-1]
        assert bool(last["bonus"]) == (not result.cut)


def test_every_round_has_its_tree_and_nothing_compiles(server, answer):
    rounds = fetch(server, answer["id"]).json()["rounds"]
    before = programs.compiled()
    for index, entry in enumerate(rounds):
        tree = fetch(server, f"{answer['id']}/{index}").json()
        anchor, *nodes = tree["nodes"]
        assert anchor["accepted"] and anchor["probability"] == 1
        for place, node in enumerate(nodes, start=1):
            parent = tree["nodes"][node["parent"]]
            assert node["parent"] < place and 0 < node["probability"] <= parent["probability"]
            assert parent["accepted"] or not node["accepted"]
        accepted = [node["text"] for node in nodes if node["accepted"]]
        if index < len(rounds) - 1:
            assert len(accepted) == entry["length"] - 1
            assert "".join(map(ast.literal_eval, accepted)) == entry["accepted"]
            assert tree["bonus"] == f"bonus {entry['bonus']!r}"
    assert programs.compiled() == before, "the server has compiled the programs of trees"


def test_what_is_not_there_is_status_404_with_one_line(server, answer):
    count = len(fetch(server, answer["id"]).json()["rounds"])
    for path, words in [
        (f"{answer['id']}/{count}", f"got round {count}, expected one of the {count} of this answer, from 0"),
        ("none", f"got answer 'none', expected one of the last {KEPT}"),
        ("none/0", "got answer 'none', expected one of the last"),
        (f"{answer['id']}/-1", "Not Found"),
        (f"{answer['id']}/best", "Not Found"),
    ]:
        response = fetch(server, path)
        assert response.status_code == 404 and response.json()["error"]["message"].startswith(words), path


def test_an_answer_without_drafts_has_no_trees(tiny):
    result = tiny.generate([CHAT], max_new_tokens=8, builder="none")[0]
    assert not describe_rounds(result, tiny.tokenizer)["drafts"]


def test_the_server_forgets_old_answers(server, answer, monkeypatch):
    assert http_answers.KEPT_ANSWERS == KEPT
    monkeypatch.setattr(http_answers, "KEPT_ANSWERS", 8)
    body = {"prompt": "x", "max_tokens": 1}
    assert fetch(server, answer["id"]).status_code == 200
    for _ in range(8):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=600)
    assert fetch(server, answer["id"]).status_code == 404


def test_the_server_forgets_answers_whose_automata_are_too_large_together(monkeypatch):
    """Here, of two tables. Requests of one client have the same table."""
    tables = {name: allow_all.__wrapped__(8) for name in "abc"}
    monkeypatch.setattr(http_answers, "MOST_STORED_BYTES", 2 * sum(array.nbytes for array in tables["a"]))
    maker = StubRequestMaker(
        encode=lambda prompts: prompts,
        make_requests=lambda prompts, **_: [Request(ids=[], automaton=tables[prompts[0]])],
    )
    app = make_app(stub_worker(request_maker=maker), Metrics(), has_page=True)

    async def run() -> list[str]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
            answers = [await http.post("/v1/completions", json={"prompt": prompt}) for prompt in "aabc"]
        return [answer.json()["id"] for answer in answers]

    ids = asyncio.run(run())
    assert [*app.state.answers.latest] == ids[-2:]
