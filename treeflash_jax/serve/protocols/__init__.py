"""Protocols: forms of requests and answers over HTTP. A file and a line each; parsing of answers knows none of them."""

from treeflash_jax.serve.protocols.chat_completions import ChatExchange
from treeflash_jax.serve.protocols.completions import CompletionExchange
from treeflash_jax.serve.protocols.exchange import Exchange
from treeflash_jax.serve.protocols.messages import MessagesExchange
from treeflash_jax.serve.protocols.responses import ResponsesExchange

PROTOCOLS: list[type[Exchange]] = [ChatExchange, CompletionExchange, ResponsesExchange, MessagesExchange]


def protocol_at(path: str) -> type[Exchange]:
    """Returns the protocol of a path, for the form of its errors; OpenAI's chat completions for an unknown path."""
    return next((kind for kind in PROTOCOLS if path in (kind.path, kind.counting_path)), ChatExchange)
