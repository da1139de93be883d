"""Tokens of texts and chats over HTTP: POST /tokenize and /detokenize, as in vLLM and llama.cpp."""

from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from pydantic import BaseModel

from treeflash_jax.core.checks import expect
from treeflash_jax.engine.call.prompts import Chat
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.serve.call_reader import CallReader
from treeflash_jax.serve.protocols.fields import Ids, Objects, check_template
from treeflash_jax.serve.protocols.tools import read_chat_tools
from treeflash_jax.serve.server_call import ServerCall, Tools


class TokenizeBody(BaseModel):
    """Body of a request to /tokenize: a text as `prompt` or `content`, or a chat."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Objects | None = None
    tools: Objects | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def ids(self, reader: CallReader, tokenizer: Tokenizer) -> list[int]:
        """Returns the token ids. Raises ValueError for no text or several, and the errors of encoding."""
        texts = [value for value in (self.prompt, self.content, self.messages) if value is not None]
        expect(len(texts) == 1, "fields with text", len(texts), "one of prompt, content and messages")
        if texts == [""]:
            return []
        if self.messages is None:
            return tokenizer.encode_texts(texts, add_special_tokens=self.add_special_tokens is not False)[0]
        chat = Chat(self.messages, template=check_template(self.chat_template_kwargs))
        call = ServerCall(prompts=[chat], settings={}, tools=Tools(read_chat_tools(self.tools or [])))
        return reader.encode(call)[0]


class DetokenizeBody(BaseModel):
    """Body of a request to /detokenize."""

    model: str | None = None
    tokens: Ids


def add_tokenizing(app: FastAPI, reader: CallReader, needs: list[Any]) -> None:
    """Adds both paths. Errors of the tokenizer become ValueErrors of one line."""

    def tokenizer() -> Tokenizer:
        expect(reader.worker.model.tokenizer is not None, "a text", "", "token ids: this model has no tokenizer")
        return reader.worker.model.tokenizer

    @app.post("/tokenize", dependencies=needs)
    async def tokenize(request: HttpRequest) -> Any:
        body = await reader.parse(request, TokenizeBody)
        ids = await reader.threads.run(lambda: body.ids(reader, tokenizer()))
        return {"count": len(ids), "max_model_len": reader.worker.request_maker.context, "tokens": ids}

    @app.post("/detokenize", dependencies=needs)
    async def detokenize(request: HttpRequest) -> Any:
        body = await reader.parse(request, DetokenizeBody)
        size = reader.worker.model.verifier.vocab_size
        outside = [id for id in body.tokens if not 0 <= id < size]
        expect(not outside, "tokens", outside[:1], f"0 to {size - 1}")
        text = await reader.threads.run(lambda: tokenizer().decode(body.tokens, skip_special_tokens=False))
        return {"prompt": text, "content": text}
