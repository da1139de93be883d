"""Blocks of Anthropic's messages, and what a client makes of the events of a stream."""

import copy
import json

from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

PATH = "/v1/messages"
TEXT = {"type": "text", "text": "Hi"}
SCHEMA = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
ADD = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
FORM = {"type": "json_schema", "schema": SCHEMA}
EVENT = TypeAdapter(RawMessageStreamEvent)
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


def parts(*texts: str) -> list[dict]:
    return [{"type": "text", "text": text} for text in texts]


def says(role: str, *blocks: dict) -> dict:
    return {"role": role, "content": [*blocks]}


def gather(events: list[dict]) -> dict:
    """Returns the message that a client makes of the events of a stream, with each block between its start and stop."""
    message, texts = copy.deepcopy(events[0]["message"]), {}
    fields = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
    is_open = False
    for event in events[1:-2]:
        assert event["index"] == len(message["content"]) - (event["type"] != "content_block_start")
        assert is_open != (event["type"] == "content_block_start")
        is_open = event["type"] != "content_block_stop"
        if event["type"] == "content_block_start":
            message["content"].append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            texts[event["index"]] = texts.get(event["index"], "") + event["delta"]["partial_json"]
        elif event["type"] == "content_block_delta":
            name = fields[event["delta"]["type"]]
            message["content"][-1][name] += event["delta"][name]
    for index, text in texts.items():
        message["content"][index]["input"] = json.loads(text)
    assert not is_open and [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message["usage"] |= events[-2]["usage"]
    return message | events[-2]["delta"]
