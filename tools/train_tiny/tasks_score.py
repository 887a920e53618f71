"""When an answer is right: the one rule for every server and for the trainer's own loop.

1. Thoughts do not count. What a message holds up to its last `</think>` is dropped; servers that know the model send
   thoughts apart from the content anyway.
2. Calls are the message's `tool_calls`. If it has none, they are read from the text, in the form in which the model
   writes them: `<tool_call>`, `<function=NAME>`, `<parameter=P>VALUE</parameter>`. A value is taken verbatim where the
   tool declares a string (or nothing), and as JSON otherwise. The content ends where the first call begins.
3. An answer is right if its content is the expected one, blanks at both ends aside, and its calls are the expected
   ones: as many, in the same order, each with the same name and the same arguments as JSON values. 7 is not "7".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """calls: (name, arguments) in order. A call that could not be read has its text as the name and no arguments."""

    content: str
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = field(default=())


def read_text(text: str, tools: Sequence[Mapping[str, Any]]) -> Answer:
    """What the model itself wrote, as text. tools: as they were declared to the API."""
    said = text.rpartition("</think>")[2]
    content = said.partition("<tool_call>")[0]
    kinds = {tool["function"]["name"]: _kinds(tool) for tool in tools}
    return Answer(content=content.strip(), calls=tuple(_read_call(found[1], kinds) for found in _CALL.finditer(said)))


def read_message(message: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> Answer:
    """A message as the API gives it, with its calls apart or in the text."""
    read = read_text(str(message.get("content") or ""), tools)
    calls = message.get("tool_calls")
    if not calls:
        return read
    return Answer(content=read.content, calls=tuple(_apart(call["function"]) for call in calls))


def is_right(answer: Answer, expected: Answer) -> bool:
    return answer.content.strip() == expected.content.strip() and _canonical(answer) == _canonical(expected)


def _canonical(answer: Answer) -> list[tuple[str, str]]:
    """As text, so that 1 is not true and 7 is not 7.0."""
    return [(name, json.dumps(arguments, sort_keys=True)) for name, arguments in answer.calls]


def _kinds(tool: Mapping[str, Any]) -> dict[str, str]:
    properties = tool["function"].get("parameters", {}).get("properties", {})
    return {name: schema.get("type", "string") for name, schema in properties.items()}


def _apart(function: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        return str(function), {}
    return str(function["name"]), arguments


def _read_call(text: str, kinds: Mapping[str, Mapping[str, str]]) -> tuple[str, Mapping[str, Any]]:
    function = _FUNCTION.fullmatch(text)
    if not function or _PARAMETER.sub("", function[2]).strip():
        return text, {}
    declared = kinds.get(function[1], {})
    return function[1], {
        name: _value(value, declared.get(name, "string")) for name, value in _PARAMETER.findall(function[2])
    }


def _value(text: str, kind: str) -> Any:
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
