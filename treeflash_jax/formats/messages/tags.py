"""Structural tags (see constraints) for parts of messages that several formats have."""

from collections.abc import Sequence

from treeflash_jax.formats.messages.message_format import Demands, Function, Tag


def sequence(*elements: Tag) -> Tag:
    return {"type": "sequence", "elements": [*elements]}


def const(value: str) -> Tag:
    return {"type": "const_string", "value": value}


def any_text(*excludes: str) -> Tag:
    return {"type": "any_text", "excludes": [*excludes]}


def either(*elements: Tag) -> Tag:
    return {"type": "or", "elements": [*elements]}


def content_or_calls(demands: Demands, calls: Sequence[Tag], trigger: str, separator: str) -> Tag:
    """Returns the structural tag of content and calls, for a format in which calls may be inside text.

    Args:
      calls: a tag for each function.
      trigger: beginning of every call.
      separator: text between two calls.
    """
    if not calls:
        return demands.content or any_text()
    more = {"tags": [*calls], "stop_after_first": not demands.is_parallel}
    if demands.content is None and not demands.is_forced:
        return {"type": "triggered_tags", "triggers": [trigger], **more}
    only_calls = {"type": "tags_with_separator", "separator": separator, "at_least_one": True, **more}
    return only_calls if demands.is_forced else either(demands.content, only_calls)


def arguments(function: Function, schema_type: str = "json_schema", default: Tag | None = None) -> Tag:
    """Returns the structural tag of the arguments of a call.

    Args:
      schema_type: type of the tag that holds the schema of a strict function.
      default: tag for functions that are not strict; None: any text.
    """
    if function.is_strict:
        return {"type": schema_type, "json_schema": function.parameters}
    return any_text() if default is None else default
