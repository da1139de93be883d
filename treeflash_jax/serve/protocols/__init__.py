"""Protocols: forms of requests and answers over HTTP. Each has a file and a line here. Other code names none of them."""

from treeflash_jax.serve.protocols.chat_completions import ChatExchange
from treeflash_jax.serve.protocols.completions import CompletionExchange
from treeflash_jax.serve.protocols.exchange import Exchange
from treeflash_jax.serve.protocols.messages import MessagesExchange
from treeflash_jax.serve.protocols.responses import ResponsesExchange

PROTOCOLS: list[type[Exchange]] = [ChatExchange, CompletionExchange, ResponsesExchange, MessagesExchange]


def protocol_at(path: str) -> type[Exchange]:
    """Returns the protocol of a path, which decides the form of errors. Unknown paths: OpenAI's chat completions."""
    return next((kind for kind in PROTOCOLS if path in (kind.path, kind.counting_path)), ChatExchange)
