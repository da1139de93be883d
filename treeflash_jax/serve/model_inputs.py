"""Turns a call into inputs of the served model: messages for its chat template, and the constraint of answers."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from treeflash_jax.constraints.compilation import CONSTRAINT_NAMES, as_tag
from treeflash_jax.core.error_text import warn
from treeflash_jax.engine.call.prompts import Prompt
from treeflash_jax.formats.messages import find_format
from treeflash_jax.formats.messages.message_format import Demands
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.serve.protocols.template_messages import template_messages
from treeflash_jax.serve.server_call import ServerCall


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
    given = {name: call.settings[name] for name in CONSTRAINT_NAMES if name in call.settings}
    is_constrained = bool(given) or tools.is_forced or not tools.is_parallel or any(x.is_strict for x in functions)
    if tokenizer is None or not functions or not is_constrained or not find_format(tokenizer).writes_calls:
        return call.settings
    [content] = [as_tag(name, value) for name, value in given.items()] or [None]
    if content is not None:  # otherwise an answer could be neither valid content nor a valid call
        functions = [replace(function, is_strict=True) for function in functions]
    demands = Demands(content=content, functions=functions, is_forced=tools.is_forced, is_parallel=tools.is_parallel)
    tag = find_format(tokenizer).answer_tag(prompts[0], demands)
    others = {name: value for name, value in call.settings.items() if name not in given}
    return others | {"structural_tag": json.dumps(tag)}
