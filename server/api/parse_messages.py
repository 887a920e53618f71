"""The `messages` array of a chat request to typed turns. Nothing is dropped: what is not understood is refused by path.

Content is a string, an array of text parts, or nothing; every role may use every form. An answer of ours, cut short or
not, is valid input again: its broken tool arguments stay the text they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import orjson

from server.api.fields import (
    Field,
    Json,
    Table,
    array,
    at,
    elements,
    empty_array,
    invalid,
    json_object,
    name,
    one_of,
    read,
    shown,
    string,
    too_many,
    unsupported,
    wrong_type,
)
from server.api.limits import MAX_ALL_NAMES_CHARACTERS, MAX_MESSAGES, MAX_PARTS, MAX_TOOL_CALLS
from server.request import Message, ToolCall

ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}

TEXT_PARTS: Mapping[str, str] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
"""Part type to the key that holds its text."""

MEDIA_PARTS = frozenset(
    {
        "image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video", "video_url", "input_video",
        "file", "input_file",
    }
)  # fmt: skip


def messages(value: Json, path: str) -> tuple[Message, ...]:
    if not isinstance(value, list):
        wrong_type(path, "an array of objects", value)
    if not value:
        empty_array(path)
    if len(value) > MAX_MESSAGES:
        too_many(path, len(value), MAX_MESSAGES)
    turns = elements(_message, value, path)
    if sum(map(_name_characters, turns)) > MAX_ALL_NAMES_CHARACTERS:
        invalid(
            path, f"Invalid '{path}': the names and ids in it are longer than {MAX_ALL_NAMES_CHARACTERS} characters."
        )
    return turns


def _name_characters(turn: Message) -> int:
    calls = sum(len(call.id) + len(call.name) for call in turn.tool_calls)
    return len(turn.name or "") + len(turn.tool_call_id or "") + calls


def _message(value: Json, path: str) -> Message:
    source = json_object(value, path)
    fields = read(_MESSAGE, source, path)
    role = ROLES[fields["role"]]
    calls: tuple[ToolCall, ...] = fields["tool_calls"]
    legacy_call = fields["function_call"]
    for field, given in (("tool_calls", calls), ("function_call", legacy_call)):
        if given and role != "assistant":
            unsupported(at(path, field), f"'{at(path, field)}' is only allowed with role 'assistant'.")
    if legacy_call is not None:
        calls = (*calls, legacy_call)
    if source.get("audio") is not None:
        unsupported(at(path, "audio"), "This model reads text only: audio is not supported.")
    texts, thoughts = fields["content"]
    if not texts and fields["refusal"]:
        texts = (fields["refusal"],)
    reasoning = fields["reasoning"] if fields["reasoning"] is not None else fields["reasoning_content"]
    if reasoning is None and thoughts:
        reasoning = "".join(thoughts)
    return Message(
        role=role,
        texts=texts,
        name=fields["name"],
        reasoning=reasoning,
        tool_calls=calls,
        tool_call_id=fields["tool_call_id"],
    )


def _content(value: Json, path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The text parts and the thinking parts of a turn, each in the client's order."""
    if isinstance(value, str):
        return (value,), ()
    if not isinstance(value, list):
        wrong_type(path, "a string or an array of content parts", value)
    if len(value) > MAX_PARTS:
        too_many(path, len(value), MAX_PARTS)
    parts = elements(_part, value, path)
    return tuple(text for kind, text in parts if kind != "thinking"), tuple(
        text for kind, text in parts if kind == "thinking"
    )


def _part(value: Json, path: str) -> tuple[str, str]:
    """The type of a part and its text."""
    part = json_object(value, path)
    kind: str = read(_PART, part, path)["type"]
    key = "thinking" if kind == "thinking" else TEXT_PARTS.get(kind)
    if key is None:
        _refuse_part(kind, at(path, "type"))
    return kind, read(_PART_TEXTS[key], part, path)[key]


def _refuse_part(kind: str, path: str) -> NoReturn:
    reason = "This model reads text only." if kind in MEDIA_PARTS else "Unknown content part type."
    unsupported(path, f"Invalid value: '{shown(kind)}'. {reason} Supported values are: 'text' and 'input_text'.")


def _arguments(value: Json, path: str) -> str:
    """JSON text as the client sent it, valid or not; some clients send the object itself."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return orjson.dumps(value).decode()
    wrong_type(path, "a string", value)


def _function(value: Json, path: str) -> tuple[str, str]:
    fields = read(_FUNCTION, json_object(value, path), path)
    return fields["name"], fields["arguments"]


def _tool_call(value: Json, path: str) -> ToolCall:
    fields = read(_TOOL_CALL, json_object(value, path), path)
    if fields["type"] != "function":
        unsupported(at(path, "type"), f"Invalid value: '{shown(fields['type'])}'. Supported values are: 'function'.")
    called, arguments = fields["function"]
    return ToolCall(id=fields["id"], name=called, arguments=arguments)


def _function_call(value: Json, path: str) -> ToolCall:
    called, arguments = _function(value, path)
    return ToolCall(id="", name=called, arguments=arguments)


def _role(value: Json, path: str) -> str:
    if not isinstance(value, str):
        wrong_type(path, f"one of {', '.join(ROLES)}", value)
    return one_of(*ROLES)(value, path)


_MESSAGE: Table = {
    "role": Field(_role, required=True),
    "content": Field(_content, ((), ())),
    "name": Field(name),
    "refusal": Field(string),
    "reasoning": Field(string),
    "reasoning_content": Field(string),
    "tool_calls": Field(array(_tool_call, of="tool calls", maximum=MAX_TOOL_CALLS), ()),
    "function_call": Field(_function_call),
    "tool_call_id": Field(name),
}
_PART: Table = {"type": Field(string, required=True)}
_PART_TEXTS: Mapping[str, Table] = {
    key: {key: Field(string, required=True)} for key in {"thinking", *TEXT_PARTS.values()}
}
_TOOL_CALL: Table = {
    "id": Field(name, ""),
    "type": Field(string, "function"),
    "function": Field(_function, required=True),
}
_FUNCTION: Table = {"name": Field(name, required=True), "arguments": Field(_arguments, "")}
