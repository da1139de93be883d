"""OpenAI's `tool_choice`, which allows or demands calls of tools."""

from typing import Any

from treeflash_jax.core.checks import expect
from treeflash_jax.serve.server_call import Tools


def flat_choice(choice: Any) -> Any:
    """Returns a choice of the chat API in the form of the Responses API, which does not nest names and modes."""
    if not isinstance(choice, dict) or not isinstance(choice.get("type"), str):
        return choice
    nested = choice.get(choice["type"])
    if not isinstance(nested, dict):
        return choice
    if isinstance(nested.get("tools"), list):
        nested = nested | {"tools": [flat_choice(tool) for tool in nested["tools"]]}
    return choice | nested


def offered_tools(functions: list[dict[str, Any]], choice: Any, is_parallel: bool) -> Tools:
    """Returns the tools of a call.

    Args:
      functions: functions in the form of the chat API.
      choice: `tool_choice` in the form of the Responses API.
      is_parallel: whether an answer may have several calls.

    Raises ValueError for a wrong choice, and for a choice that demands a tool that is not a function.
    """
    if choice in (None, "auto"):
        return Tools(functions, is_parallel=is_parallel)
    if choice == "none":
        return Tools()
    if choice == "required":
        return Tools(functions, is_forced=True, is_parallel=is_parallel)
    kind = choice.get("type") if isinstance(choice, dict) else None
    expect(kind in ("function", "allowed_tools"), "tool_choice", choice,
           "'none', 'auto', 'required', a function, or allowed_tools")  # fmt: skip
    if kind == "function":
        expect(isinstance(choice.get("name"), str), "tool_choice.name", choice.get("name"), "the name of a function")
        return Tools(functions, frozenset([choice["name"]]), is_forced=True, is_parallel=False)
    mode, allowed = choice.get("mode"), choice.get("tools")
    expect(mode in ("auto", "required"), "tool_choice.mode", mode, "'auto' or 'required'")
    are_tools = isinstance(allowed, list) and all(isinstance(tool, dict) for tool in allowed)
    expect(are_tools, "tool_choice.tools", allowed, "a list of tools")
    names = [tool.get("name") for tool in allowed if tool.get("type") == "function"]
    expect(all(isinstance(name, str) for name in names), "tool_choice.tools", allowed, "functions with names")
    return Tools(functions, frozenset(names), is_forced=mode == "required", is_parallel=is_parallel)
