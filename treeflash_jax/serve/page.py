"""The chat page for browsers, with the rounds and the draft trees of the latest answers."""

import base64
import hashlib
from collections.abc import Mapping
from functools import partial
from importlib import resources
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response
from starlette.exceptions import HTTPException

from treeflash_jax.core.error_text import clipped
from treeflash_jax.engine.answers.results import Result
from treeflash_jax.formats.answer_text import AnswerText
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.serve.http_answers import KEPT_ANSWERS, Submitted
from treeflash_jax.serve.threads import Threads


def add_page(
    app: FastAPI, needs: list[Any], latest: Mapping[str, Submitted], tokenizer: Tokenizer, threads: Threads
) -> None:
    """Adds the chat page, and the rounds and trees of the latest answers.

    Args:
      needs: FastAPI dependencies of the paths that need the key.
      latest: the last answers, by id of the request.
      threads: one thread at a time, which drafts and draws trees.
    """
    page = resources.files("treeflash_jax.serve").joinpath("page.html").read_text(encoding="utf-8")
    headers = {"content-security-policy": make_policy(page), "x-content-type-options": "nosniff"}

    def find(answer_id: str) -> Result:
        result = latest[answer_id].results.get(0) if answer_id in latest else None
        if result is None:
            message = f"got answer {clipped(answer_id, 60)!r}, expected one of the last {KEPT_ANSWERS}"
            raise HTTPException(404, message)
        return result

    @app.get("/", include_in_schema=False)
    async def show_page() -> Response:
        return HTMLResponse(page, headers=headers)

    @app.get("/ui/trees/{answer_id}", dependencies=needs, include_in_schema=False)
    async def list_rounds(answer_id: str) -> Any:
        return await threads.run(partial(describe_rounds, find(answer_id), tokenizer))

    @app.get("/ui/trees/{answer_id}/{round_index:int}", dependencies=needs, include_in_schema=False)
    async def draw_tree(answer_id: str, round_index: int) -> Any:
        result = find(answer_id)
        if round_index >= len(result.accept_lengths):
            message = f"got round {round_index}, expected one of the {len(result.accept_lengths)} of this answer, from 0"
            raise HTTPException(404, message)
        return await threads.run(partial(describe_tree, result, round_index))


def make_policy(page: str) -> str:
    """Returns the Content-Security-Policy of a page. Only the page's own script may run, and only talk to this server."""
    script = page.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = {
        "default-src": "'none'",
        "script-src": f"'sha256-{digest}'",
        "style-src": "'unsafe-inline'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in allowed.items())


def describe_rounds(result: Result, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns tau, the first token's text, and for each round its length and the texts of accepted and bonus tokens."""
    text = AnswerText(tokenizer, result.prompt_ids)
    end = 0

    def read(ids: list[int]) -> str:
        nonlocal end
        start = end
        text.extend(ids)
        end = len(text.certain_text)
        return result.text[start:end]  # may be shorter: a stop string may have cut the text

    first_text = read(result.ids[:1])
    start = 1
    rounds: list[dict[str, Any]] = []
    for length in result.accept_lengths:
        is_last = len(rounds) == len(result.accept_lengths) - 1
        num_accepted = length if is_last and result.cut else length - 1  # a cut removes the bonus token
        accepted = read(result.ids[start : start + num_accepted])
        bonus = read(result.ids[start + num_accepted : start + length])
        rounds.append({"length": length, "accepted": accepted, "bonus": bonus})
        start += length
    return {"tau": result.tau, "drafts": result.draft_again is not None, "first": first_text, "rounds": rounds}


def describe_tree(result: Result, round_index: int) -> dict[str, Any]:
    """Drafts the tree of a round again, and returns its nodes; the anchor comes first.

    Raises ValueError for an answer without trees.
    """
    tree = result.tree(round_index)
    names = "text", "parent", "probability", "accepted"
    nodes = zip(tree.labels, tree.parents, tree.probabilities, tree.accepted, strict=True)
    return {"nodes": [dict(zip(names, node, strict=True)) for node in nodes], "bonus": tree.bonus}
