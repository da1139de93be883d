"""A tool of the Responses API, and what a client makes of the events of a stream."""

from typing import Any, get_args

from openai.types.responses import ResponseStreamEvent

PARAMETERS = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": PARAMETERS}
FUNCTION = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}
EVENTS = {kind.model_fields["type"].annotation.__args__[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])}


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def replayed(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the items that a client puts together from events, and asserts that each item has its events in order."""
    items: list[dict[str, Any]] = []
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    is_open = False
    for event in events[2:-1]:
        name = event["type"].removeprefix("response.")
        if name == "output_item.added":
            assert not is_open and event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
            is_open = True
            continue
        assert is_open and event["output_index"] == len(items) - 1
        item = items[-1]
        assert event.get("item_id", item["id"]) == item["id"] and event.get("content_index", 0) == 0
        if name == "content_part.added":
            assert item["content"] == []
            item["content"].append(event["part"])
        elif name in ("output_text.delta", "reasoning_text.delta"):
            item["content"][0]["text"] += event["delta"]
            if "logprobs" in event:
                item["content"][0]["logprobs"] += event["logprobs"]
        elif name in ("output_text.done", "reasoning_text.done"):
            assert item["content"][0]["text"] == event["text"]
            assert item["content"][0].get("logprobs") == event.get("logprobs")
        elif name == "content_part.done":
            assert item["content"] == [event["part"]]
        elif name == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif name == "function_call_arguments.done":
            assert (item["arguments"], item["name"]) == (event["arguments"], event["name"])
        else:
            assert name == "output_item.done"
            assert event["item"]["status"] in ("completed", "incomplete")
            only_then = {"status": "in_progress"} | {name: None for name in event["item"] if name == "encrypted_content"}
            assert event["item"] | only_then == item | only_then
            items[-1] = event["item"]
            is_open = False
    assert not is_open
    return items
