"""Reads tools of requests. All protocols turn them into the form of OpenAI's chat API."""

from collections.abc import Mapping, Sequence
from typing import Any

from treeflash_jax.core.checks import expect
from treeflash_jax.core.error_text import quoted
from treeflash_jax.serve.protocols.exchange import Served


def read_chat_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns tools of OpenAI's chat API. Raises ValueError for a tool that is not a function with a name."""
    for number, tool in enumerate(tools):
        place = f"tools.{number}"
        function = tool.get("function")
        has_name = isinstance(function, dict) and _is_name(function.get("name"))
        expect(has_name, place, tool, "a function with a name: {'type': 'function', 'function': {'name': ...}}")
        _check_parameters(function.get("parameters"), f"{place}.function.parameters")
    return [dict(tool) for tool in tools]


def read_response_tools(tools: Sequence[dict[str, Any]], served: Served) -> list[dict[str, Any]]:
    """Returns the functions among tools of the Responses API. Raises ValueError for a function without a name.

    Tools that OpenAI's servers run are left out with a line in the log, because clients such as Codex send some with each
    request. A function without `strict` stays not strict. OpenAI would make it strict if possible, but its schema was not
    written for that, and may have more states than this server can follow.
    """
    functions = []
    left_out = set()
    for number, tool in enumerate(tools):
        if tool.get("type") != "function":
            left_out.add(quoted(tool.get("type")))
            continue
        expect(_is_name(tool.get("name")), f"tools.{number}.name", tool.get("name"), "the name of a function")
        _check_parameters(tool.get("parameters"), f"tools.{number}.parameters")
        keys = (key for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None)
        functions.append({"type": "function", "function": {key: tool[key] for key in keys}})
    _note_left_out("/v1/responses", left_out, served)
    return functions


def read_anthropic_tools(tools: Sequence[dict[str, Any]], served: Served) -> list[dict[str, Any]]:
    """Returns tools of Anthropic's API. Those that Anthropic's servers run are left out with a line in the log.

    Raises ValueError for a tool without a name or a schema.
    """
    functions = []
    left_out = set()
    for number, tool in enumerate(tools):
        if tool.get("type") not in (None, "custom"):
            left_out.add(quoted(tool["type"]))
            continue
        name, schema = tool.get("name"), tool.get("input_schema")
        expect(_is_name(name), f"tools.{number}.name", name, "the name of a tool")
        expect(isinstance(schema, dict), f"tools.{number}.input_schema", schema, "a JSON schema")
        optional = {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
        functions.append({"type": "function", "function": {"name": name, "parameters": schema, **optional}})
    _note_left_out("/v1/messages", left_out, served)
    return functions


def _note_left_out(path: str, types: set[str], served: Served) -> None:
    """Logs the types of a request's tools that are left out, in one line however many there are."""
    if types:
        served.note([f"{path}: tools of type {', '.join(sorted(types))} are left out"])


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _check_parameters(value: Any, place: str) -> None:
    expect(value is None or isinstance(value, dict), place, value, "a schema")
