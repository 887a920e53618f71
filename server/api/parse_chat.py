"""The body of POST /v1/chat/completions to a typed request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import orjson

from server.api.fields import (
    Field,
    Json,
    Table,
    array,
    boolean,
    integer,
    invalid,
    json_object,
    name,
    one_of,
    read,
    too_many,
    too_many_keys,
    unsupported,
    wrong_type,
)
from server.api.limits import MAX_TEMPLATE_ARGUMENT_BYTES, MAX_TEMPLATE_ARGUMENTS, MAX_TOOLS
from server.api.parse_messages import messages
from server.api.parse_sampling import (
    Border,
    Generation,
    parse_generation,
    refuse_later,
    response_format,
    shared_fields,
    unknown_names,
)
from server.request import Conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    conversation: Conversation
    generation: Generation


def parse_chat(body: Mapping[str, Json], *, border: Border) -> ChatRequest:
    table = _chat(border)
    fields = read(table, body)
    refuse_later(body)
    _refuse_tools(body)
    generation = parse_generation(body, border=border, logprobs=_logprobs(fields))
    continues = fields["continue_final_message"]
    adds_prompt = fields["add_generation_prompt"]
    if continues and adds_prompt:
        invalid(
            "continue_final_message",
            "Only one of 'continue_final_message' and 'add_generation_prompt' can be true.",
        )
    conversation = Conversation(
        messages=fields["messages"],
        add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
        continue_final_message=continues,
        template_kwargs=_template_kwargs(fields),
    )
    return ChatRequest(
        conversation=conversation,
        generation=replace(
            generation, ignored=unknown_names(body, table, shared_fields(border), _TOOL_FIELDS, _REFUSED_IN_CHAT)
        ),
    )


@lru_cache(maxsize=8)
def _chat(border: Border) -> Table:
    return {
        "messages": Field(messages, required=True),
        "logprobs": Field(boolean, False),
        "top_logprobs": Field(integer(minimum=0, maximum=border.max_logprobs)),
        "chat_template_kwargs": Field(_template_arguments),
        "enable_thinking": Field(boolean),
        "reasoning_effort": Field(name),
        "add_generation_prompt": Field(boolean),
        "continue_final_message": Field(boolean, False),
        "response_format": Field(response_format),
        "modalities": Field(array(one_of("text"), of="strings", maximum=16)),
        "parallel_tool_calls": Field(boolean),
    }


_TOOL_FIELDS = frozenset({"tools", "tool_choice", "functions", "function_call"})
_REFUSED_IN_CHAT = frozenset({"echo", "audio", "web_search_options", "chat_template", "documents"})


def _logprobs(fields: Mapping[str, Any]) -> int | None:
    top = fields["top_logprobs"]
    if fields["logprobs"]:
        return top or 0
    if top:
        invalid("top_logprobs", "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.")
    return None


def _template_arguments(value: Json, path: str) -> dict[str, Json]:
    arguments = json_object(value, path)
    if len(arguments) > MAX_TEMPLATE_ARGUMENTS:
        too_many_keys(path, len(arguments), MAX_TEMPLATE_ARGUMENTS)
    if len(orjson.dumps(arguments)) > MAX_TEMPLATE_ARGUMENT_BYTES:
        invalid(path, f"Invalid '{path}': larger than {MAX_TEMPLATE_ARGUMENT_BYTES} bytes of JSON.")
    return arguments


def _template_kwargs(fields: Mapping[str, Any]) -> dict[str, Json]:
    """The client's own template arguments, with the two top-level spellings where it did not give them itself."""
    kwargs: dict[str, Json] = dict(fields["chat_template_kwargs"] or {})
    for field in ("enable_thinking", "reasoning_effort"):
        if fields[field] is not None:
            kwargs.setdefault(field, fields[field])
    return kwargs


def _refuse_tools(body: Mapping[str, Json]) -> None:
    """Tools are for a later release. An empty list is no list, and a list nobody may call is of no consequence."""
    refuse_later(body, _REFUSED_IN_CHAT)
    choice = body.get("tool_choice")
    for field in ("tools", "functions"):
        value = body.get(field)
        if value is None:
            continue
        if not isinstance(value, list):
            wrong_type(field, "an array of objects", value)
        if len(value) > MAX_TOOLS:
            too_many(field, len(value), MAX_TOOLS)
        chosen = choice if field == "tools" else body.get("function_call")
        if value and chosen != "none":
            unsupported(field, f"Unsupported parameter: '{field}' is not supported by this server.")
    for field in ("tool_choice", "function_call"):
        value = body.get(field)
        if value is None or value in ("none", "auto"):
            continue
        if not isinstance(value, (str, dict)):
            wrong_type(field, "a string or an object", value)
        if value == "required" or isinstance(value, dict):
            unsupported(field, f"Unsupported value: '{field}' must be 'none' or 'auto'; there are no tools to choose.")
        one_of("none", "auto", "required")(value, field)
