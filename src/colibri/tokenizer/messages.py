"""Checks of what a caller gives to a chat template: messages, tools and further variables, as plain JSON data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from colibri.errors import UsageError

# Names under which interfaces pass an answer's reasoning; templates read the first, some the second.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_DEEPEST_NESTING = 100


def plain_data(value: Any, where: str, depth: int = 0) -> Any:
    """A copy of `value` in plain JSON types, so that a template never sees an object with methods of its own.

    Raises UsageError naming the item (`where` and the path below it) for any other type.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth > _DEEPEST_NESTING:
        raise UsageError(f"{where} is nested too deeply; use at most {_DEEPEST_NESTING} levels.")
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UsageError(f"{where} has the key {key!r}; keys must be strings.")
        return {str.__str__(key): plain_data(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise UsageError(f"{where} is of type {type(value).__name__}; give plain JSON data.")


def normalized_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`messages` as a template gets them: content parts joined, fields that are None left out.

    Each message is a mapping with `role` (str) and `content`: str, a list of `{"type": "text", "text": str}`, or None
    when the message has `tool_calls`. Raises UsageError naming the message and field.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise UsageError("messages must be a list of objects with 'role' and 'content'.")
    if not messages:
        raise UsageError("messages is empty; give at least one message.")
    return [_normalized_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalized_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UsageError(f"{where} is a {type(message).__name__}; it must be an object with 'role' and 'content'.")
    plain = plain_data(message, where)
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise UsageError(f"{where}.role must be a string such as 'user'.")
    content = plain.get("content")
    if content is None and not plain.get("tool_calls"):
        raise UsageError(f"{where}.content is missing; it may only be left out of a message with 'tool_calls'.")
    if content is not None:
        plain["content"] = _content_text(content, f"{where}.content")
    # Templates print "None" for such fields, or fail, while they handle a missing one.
    plain = {key: value for key, value in plain.items() if value is not None}
    reasoning = next((plain[field] for field in _REASONING_FIELDS if field in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _content_text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UsageError(f"{where} must be a string or a list of text parts, not {type(content).__name__}.")
    texts: list[str] = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UsageError(f'{where}[{index}] must be {{"type": "text", "text": "..."}}; only text is supported.')
        texts.append(part["text"])
    return "".join(texts)


def checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """`tools` as plain JSON schemas. Raises UsageError naming the tool that is not an object."""
    if tools is None:
        return None
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise UsageError("tools must be a list of JSON schemas.")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise UsageError(f"tools[{index}] is of type {type(tool).__name__}; it must be a JSON schema object.")
    return plain_data(tools, "tools")
