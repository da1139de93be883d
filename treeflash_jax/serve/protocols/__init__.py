"""Protocols: forms of requests and answers over HTTP. A file and a line each; parsing of answers knows none of them."""

from treeflash_jax.serve.protocols.chat import ChatExchange
from treeflash_jax.serve.protocols.completions import CompletionExchange
from treeflash_jax.serve.protocols.exchange import Exchange

PROTOCOLS: tuple[type[Exchange], ...] = (ChatExchange, CompletionExchange)
