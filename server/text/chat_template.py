"""A conversation to the tokens of its prompt, by the model's own template."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import jinja2

from server.errors import BadRequest, StartupError
from server.request import Conversation, Message
from server.text.budget import Abandoned, Budget
from server.text.guard import END_MARK, MARK, Guard, Prompt
from server.text.template_sandbox import CompiledTemplate, Deadline, TemplateTimeout
from server.text.tokenizer import Tokenizer

RENDER_LIMIT_S = 5.0
_OURS = frozenset({"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now", "range"})
_MAX_NESTING = 64
_BETWEEN_MERGED = "\n\n"


class ChatTemplate:
    """One model's chat template, compiled once. Immutable, so it may be used from any thread.

    What users wrote never becomes a control token (see `guard.py`); control tokens that the template writes do. For
    text without control spellings the ids are those that transformers' `apply_chat_template` gives.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, *, now: Callable[[], datetime] = datetime.now) -> None:
        """`now` is the local time that a template may put into the prompt. Raises StartupError for a bad source."""
        try:
            self._template = CompiledTemplate(source, now=now)
        except (jinja2.TemplateError, ValueError) as error:
            raise StartupError(f"The model's chat template is not usable: {error}") from error
        self._tokenizer = tokenizer
        self._guard = Guard(tokenizer.control)
        self._reserved = _OURS | tokenizer.special_names.keys()

    def encode(
        self, conversation: Conversation, *, limit_s: float = RENDER_LIMIT_S, budget: Budget | None = None
    ) -> list[int]:
        """Token ids of the rendered conversation.

        Raises BadRequest: `chat_template_error` with the template's own words if it refuses the conversation, does not
        understand it, or takes longer than limit_s (then its cause is TemplateTimeout); `invalid_value` for arguments
        that contradict each other or would replace our own. Raises what `budget` raises.
        """
        budget = budget or Budget()
        prompt = self.render(conversation, limit_s=limit_s, budget=budget)
        encode, text = self._tokenizer.encode, prompt.text
        own = iter(prompt.control)
        if all(span == next(own, None) for span in self._tokenizer.control.matches(text, budget.check)):
            return encode(text, parse_special=True, add_bos=False, budget=budget)
        # A user spelled out a control token: cut at the template's own ones, and take the rest as plain text.
        ids: list[int] = []
        position = 0
        for span in prompt.control:
            ids += encode(text[position : span.start], parse_special=False, add_bos=False, budget=budget)
            ids.append(self._tokenizer.encode_control(text[span.start : span.stop]))
            budget.spend(1)
            position = span.stop
        return ids + encode(text[position:], parse_special=False, add_bos=False, budget=budget)

    def render(
        self, conversation: Conversation, *, limit_s: float = RENDER_LIMIT_S, budget: Budget | None = None
    ) -> Prompt:
        """The prompt as text, with the places of the template's control tokens. Raises as `encode`.

        If the template refuses the conversation, it is tried once more in a form that strict templates want: all
        system messages merged into one at the front, and neighbours of the same role merged.
        """
        self._check(conversation)
        budget = budget or Budget()
        budget.foresee(self._tokenizer.least_tokens(_certain_chars(conversation)))
        deadline = Deadline(limit_s=limit_s, before=budget.check)
        try:
            return self._render(conversation, deadline)
        except Abandoned:
            raise
        except TemplateTimeout as error:
            raise _template_error(error) from error
        except Exception as error:  # a template can raise anything
            merged = replace(conversation, messages=merge_turns(conversation.messages))
            if merged == conversation:
                raise _template_error(error) from error
            try:
                return self._render(merged, deadline)
            except Abandoned:
                raise
            except TemplateTimeout as late:
                raise _template_error(late) from late
            except Exception:
                raise _template_error(error) from error

    def _check(self, conversation: Conversation) -> None:
        if conversation.continue_final_message and conversation.add_generation_prompt:
            raise BadRequest(
                "'continue_final_message' and 'add_generation_prompt' cannot both be true.",
                param="continue_final_message",
            )
        for name in conversation.template_kwargs:
            if name in self._reserved:
                raise BadRequest(
                    f"The template argument '{name}' is set by the server.", param=f"chat_template_kwargs.{name}"
                )

    def _render(self, conversation: Conversation, deadline: Deadline) -> Prompt:
        check = deadline.check
        messages = [self._variables(message, check) for message in conversation.messages]
        if conversation.continue_final_message:
            _mark_end(messages[-1])
        arguments = {name: self._guard.option(value, check) for name, value in conversation.template_kwargs.items()}
        variables = {
            "tools": None,
            "documents": None,
            **arguments,
            **self._tokenizer.special_names,
            "messages": messages,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        rendered = self._template.render(variables, deadline)
        if conversation.continue_final_message:
            rendered, end, _ = rendered.rpartition(END_MARK)
            if not end:
                raise jinja2.TemplateError("The final message is not part of the prompt, so it cannot be continued.")
        return self._guard.read(rendered, check)

    def _variables(self, message: Message, check: Callable[[], None]) -> dict[str, Any]:
        """The message as templates know it. Text parts are joined by line breaks; no content is the empty text."""

        def guarded(text: str) -> str:
            return self._guard.user_text(text, check)

        made: dict[str, Any] = {"role": message.role, "content": guarded("\n".join(message.texts))}
        if message.name is not None:
            made["name"] = guarded(message.name)
        if message.reasoning is not None:
            made["reasoning_content"] = made["reasoning"] = guarded(message.reasoning)
        if message.tool_call_id is not None:
            made["tool_call_id"] = guarded(message.tool_call_id)
        if message.tool_calls:
            made["tool_calls"] = [
                {
                    "id": guarded(call.id),
                    "type": "function",
                    "function": {
                        "name": guarded(call.name),
                        "arguments": self._guard.user_value(_arguments(call.arguments), check),
                    },
                }
                for call in message.tool_calls
            ]
        return made


def merge_turns(messages: Sequence[Message]) -> tuple[Message, ...]:
    """One system message at most, at the front; neighbouring user (or assistant) messages as one, blank line between.

    Messages with tool calls, with reasoning or of tools stay as they are.
    """
    system = [message for message in messages if message.role == "system"]
    groups = [system] if system else []
    for message in messages:
        if message.role == "system":
            continue
        last = groups[-1][-1] if groups else None
        if last and last.role == message.role and _only_text(last) and _only_text(message):
            groups[-1].append(message)
        else:
            groups.append([message])
    return tuple(map(_joined, groups))


def _only_text(message: Message) -> bool:
    return message.role in {"user", "assistant"} and not message.tool_calls and message.reasoning is None


def _joined(messages: Iterable[Message]) -> Message:
    first, *others = messages
    if not others:
        return first
    return replace(first, texts=(_BETWEEN_MERGED.join("\n".join(message.texts) for message in (first, *others)),))


def _mark_end(message: dict[str, Any]) -> None:
    """Mark where the message to continue ends, so that the prompt can be cut there.

    A mark and not a search: the text may be empty, be trimmed, or stand elsewhere in the prompt too. A message that
    has reasoning and no content yet is continued in its reasoning. A mark before leading blanks keeps them.
    """
    reasoning = not message["content"] and bool(message.get("reasoning"))
    keys = ("reasoning", "reasoning_content") if reasoning else ("content",)
    for key in keys:
        text = message[key]
        message[key] = (MARK if text[:1].isspace() else "") + text + END_MARK


def _certain_chars(conversation: Conversation) -> int:
    """Characters that every template puts into the prompt; earlier thoughts of the assistant are often left out."""
    return sum(len(text) for message in conversation.messages if message.role != "assistant" for text in message.texts)


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of an earlier call as an object; what a model wrote wrong is kept under `_raw`.

    So is what is nested deeper than templates, which recurse, can follow.
    """
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) and not _deeper_than(value, _MAX_NESTING) else {"_raw": text}


def _deeper_than(value: Any, levels: int) -> bool:
    """Whether a JSON value holds more than `levels` objects and lists in each other."""
    layer = [value]
    for _ in range(levels):
        layer = [
            item
            for outer in layer
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, dict | list)
        ]
        if not layer:
            return False
    return True


def _template_error(error: Exception) -> BadRequest:
    return BadRequest(
        str(error) or type(error).__name__,
        param="messages",
        code="chat_template_error",
    )
