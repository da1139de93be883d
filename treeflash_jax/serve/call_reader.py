"""Reading of calls from HTTP requests: parses bodies, adapts calls to the model, and compiles their constraints."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from treeflash_jax.constraints.compilation import CONSTRAINT_NAMES, as_tag
from treeflash_jax.core.checks import WrongValue
from treeflash_jax.core.error_text import clipped, warn
from treeflash_jax.engine.call.prompts import Prompt
from treeflash_jax.engine.call.requests import Request
from treeflash_jax.formats.messages import find_format
from treeflash_jax.formats.messages.message_format import Demands
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.serve.constraint_compiler import ConstraintCompiler
from treeflash_jax.serve.limits import MOST_BODY_BYTES, parse_body
from treeflash_jax.serve.protocols.exchange import Exchange, Served
from treeflash_jax.serve.protocols.template_messages import template_messages
from treeflash_jax.serve.server_call import ServerCall
from treeflash_jax.serve.threads import Threads
from treeflash_jax.serve.worker import Submission, Worker

READING, COMPILING = 8, 2  # threads for bodies, and for schemas, which take up to 2 GiB each
B = TypeVar("B", bound=BaseModel)


class CallReader:
    """Reads requests to one model.

    Attributes:
      names: accepted names of the model; answers contain the first. Default: the value of `--verifier`, or the last part
        of it if it is a path.
      threads: threads that read bodies.
    """

    def __init__(self, worker: Worker, created: int, names: tuple[str, ...] = ()):
        self.worker = worker
        verifier = worker.model.names[0]
        if Path(verifier).exists():
            verifier = Path(verifier).resolve().name
        self.names = names or (verifier,)
        self.served = Served(self.names[0], created)
        self.threads = Threads(READING)
        self.compiler = ConstraintCompiler(worker.request_maker.compile, COMPILING)

    async def parse(self, request: HttpRequest, kind: type[B]) -> B:
        """Returns the parsed body of a request for this model. Raises ValueError and HTTPException."""
        data = await request.body()
        content_type = request.headers.get("content-type", "")
        limit = self.worker.request_maker.text_limit
        most_text = MOST_BODY_BYTES if limit is None or limit.most_bytes is None else limit.most_bytes

        def read_bytes() -> B:
            body = parse_body(kind, content_type, data, most_text)
            self.check_model(body.model)
            return body

        return await self.threads.run(read_bytes)

    async def read(
        self, request: HttpRequest, kind: type[Exchange], body_kind: type[BaseModel]
    ) -> tuple[Exchange, ServerCall]:
        """Returns the exchange of a request in a form of body, and its call. Raises ValueError and HTTPException."""
        body = await self.parse(request, body_kind)

        def read_body() -> tuple[Exchange, ServerCall]:
            exchange = kind(body, self.served)
            call = exchange.read_call()
            self.served.note(f"{kind.path}: field {clipped(name, 60)!r} is ignored" for name in body.model_extra or {})
            call.tools.check()
            return exchange, call

        return await self.threads.run(read_body)

    def encode(self, call: ServerCall) -> list[list[int]]:
        """Returns the ids of a call's prompts, in any thread. Raises ValueError."""
        return self.worker.request_maker.encode(model_prompts(call, self.worker.model.tokenizer))

    async def make_submission(self, call: ServerCall) -> tuple[Submission, int]:
        """Returns the submission of a call, with its constraints compiled, and its number of prompt tokens.

        Raises ValueError, HTTPException and QueueFull: it checks counts, then sizes, then tokens.
        """
        worker, maker = self.worker, self.worker.request_maker
        worker.check_room(call.num_answers)

        def make_requests() -> tuple[list[Request], int]:
            prompts = self.encode(call)
            settings = model_settings(call, worker.model.tokenizer, prompts)
            if call.ends_with_context:
                room = max(1, maker.context - max(map(len, prompts)))
                settings = settings | {"max_new_tokens": min(settings["max_new_tokens"], room)}
            return maker.make_requests(prompts, **settings), sum(map(len, prompts))

        try:
            requests, num_tokens = await self.threads.run(make_requests)
            constraints = dict.fromkeys(request.constraint for request in requests if request.constraint is not None)
            automata = {constraint: await self.compiler.compile(constraint) for constraint in constraints}
            requests = maker.add_automata(requests, automata)
        except ValueError as error:
            sent_names = dict(call.sent_names)
            if "structural_tag" not in call.settings:  # the tag was made from tools
                sent_names["structural_tag"] = "tools"
            raise _as_sent(error, sent_names) from None
        return Submission(requests, streams=call.streams), num_tokens

    def check_model(self, name: str | None) -> None:
        """Raises HTTPException if this is not a name of the model."""
        if name not in (None, *self.names, self.worker.model.names[0]):
            message = f"got model {clipped(name, 60)!r}, expected {self.names[0]!r}"
            raise HTTPException(404, {"message": message, "param": "model", "code": "model_not_found"})


def model_prompts(call: ServerCall, tokenizer: Tokenizer | None) -> list[Prompt]:
    """Returns the prompts of a call for a model.

    Raises ValueError for tools if the chat template takes none, and for forced calls if the format of calls is unknown.
    """
    if tokenizer is None or not call.is_chat:
        return call.prompts
    message_format = find_format(tokenizer)
    tools = call.tools
    if tools.described and "tools" not in message_format.template:
        raise ValueError("got tools, but the chat template of this model has no place for them: send the request without")
    if tools.described and not message_format.writes_calls:
        reason = "this model writes calls in a format that is not read here"
        if tools.is_forced:
            raise ValueError(f"got tool_choice that demands a call, but {reason}")
        warn(f"got tools, but {reason}: calls stay text")
    template, thoughts_key = message_format.template, message_format.thoughts_key
    return [
        replace(chat, messages=template_messages(chat.messages, template, thoughts_key), tools=tools.described)
        for chat in call.prompts
    ]


def model_settings(call: ServerCall, tokenizer: Tokenizer | None, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Returns the settings of a call. If calls of functions are constrained, its constraint is a structural tag."""
    tools, functions = call.tools, call.tools.functions
    constraints = {name: call.settings[name] for name in CONSTRAINT_NAMES if name in call.settings}
    is_constrained = bool(constraints) or tools.is_forced or not tools.is_parallel or any(x.is_strict for x in functions)
    if tokenizer is None or not functions or not is_constrained or not find_format(tokenizer).writes_calls:
        return call.settings
    content = None
    for name, value in constraints.items():  # a call has at most one
        content = as_tag(name, value)
    if content is not None:  # otherwise an answer could be neither valid content nor a valid call
        functions = [replace(function, is_strict=True) for function in functions]
    demands = Demands(content=content, functions=functions, is_forced=tools.is_forced, is_parallel=tools.is_parallel)
    tag = find_format(tokenizer).answer_tag(prompts[0], demands)
    other_settings = {name: value for name, value in call.settings.items() if name not in constraints}
    return other_settings | {"structural_tag": json.dumps(tag)}


def _as_sent(error: ValueError, sent_names: dict[str, str]) -> ValueError:
    """Returns an error about a setting, with the setting's name replaced by the name of the field that was sent."""
    if not isinstance(error, WrongValue) or error.name not in sent_names:
        return error
    return error.renamed(sent_names[error.name])
