"""The body of POST /v1/chat/completions to a typed request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from server.api.fields import (
    Field,
    Json,
    Table,
    array,
    boolean,
    integer,
    invalid,
    json_object,
    one_of,
    read,
    string,
    unsupported,
    wrong_type,
)
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
        "chat_template_kwargs": Field(json_object),
        "enable_thinking": Field(boolean),
        "reasoning_effort": Field(string),
        "add_generation_prompt": Field(boolean),
        "continue_final_message": Field(boolean, False),
        "response_format": Field(response_format),
        "modalities": Field(array(one_of("text"), of="strings")),
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


def _template_kwargs(fields: Mapping[str, Any]) -> dict[str, Json]:
    """The client's own template arguments, with the two top-level spellings where it did not give them itself."""
    kwargs: dict[str, Json] = dict(fields["chat_template_kwargs"] or {})
    for name in ("enable_thinking", "reasoning_effort"):
        if fields[name] is not None:
            kwargs.setdefault(name, fields[name])
    return kwargs


def _refuse_tools(body: Mapping[str, Json]) -> None:
    """Tools are for a later release. An empty list is no list, and a list nobody may call is of no consequence."""
    refuse_later(body, _REFUSED_IN_CHAT)
    choice = body.get("tool_choice")
    for name in ("tools", "functions"):
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, list):
            wrong_type(name, "an array of objects", value)
        chosen = choice if name == "tools" else body.get("function_call")
        if value and chosen != "none":
            unsupported(name, f"Unsupported parameter: '{name}' is not supported by this server.")
    for name in ("tool_choice", "function_call"):
        value = body.get(name)
        if value is None or value in ("none", "auto"):
            continue
        if not isinstance(value, (str, dict)):
            wrong_type(name, "a string or an object", value)
        if value == "required" or isinstance(value, dict):
            unsupported(name, f"Unsupported value: '{name}' must be 'none' or 'auto'; there are no tools to choose.")
        one_of("none", "auto", "required")(value, name)
