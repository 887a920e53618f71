"""Exchanges to the server's own `Conversation`, to messages of an API call, and to text by the shipped template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from server.request import Conversation, Message, ToolCall
from server.text.chat_template import ChatTemplate
from server.text.template_sandbox import CompiledTemplate, Deadline
from server.text.tokenizer import Tokenizer
from tools.train_tiny.grammar import Exchange, Tool, Turn

TEMPLATE_PATH = Path(__file__).parent / "chat_template.jinja"
DEFAULT_SYSTEM = "You are Twinpane Tiny."
RENDER_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Characters [start, stop) of a rendered conversation that the assistant wrote."""

    start: int
    stop: int
    turn: Turn


class Renderer:
    """The shipped chat template, with the server's rendering.

    The server's `ChatTemplate` takes no tools yet. It does not have to: the template writes them at the end of the
    system text, so a system text that ends with that section renders to the same prompt. `section` asks the template.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        source = TEMPLATE_PATH.read_text(encoding="utf-8")
        self.tokenizer = tokenizer
        self._template = ChatTemplate(source, tokenizer)
        self._plain = CompiledTemplate(source)

    def section(self, tools: Sequence[Tool]) -> str:
        """How the template declares tools: what it appends to the system text."""
        if not tools:
            return ""
        rendered = self.prompt([{"role": "system", "content": ""}], [tool.declared() for tool in tools])
        return rendered.removeprefix("<|im_start|>system\n").removesuffix("<|im_end|>")

    def prompt(
        self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **arguments: Any
    ) -> str:
        """Messages of an API call, with tools, as text. Without the server's marks around what users wrote, which our
        own words do not need, so it is quicker by far."""
        prepared = [with_argument_objects(message) for message in messages]
        return self.prepared(prepared, tools=tools, **arguments)

    def prepared(self, messages: Sequence[dict[str, Any]], **arguments: Any) -> str:
        """As `prompt`, where the arguments of calls are objects already."""
        variables = {"messages": messages, "add_generation_prompt": False, **arguments}
        return self._plain.render(variables, Deadline(limit_s=RENDER_LIMIT_S))

    def encode(self, conversation: Conversation) -> list[int]:
        return self._template.encode(conversation, limit_s=RENDER_LIMIT_S)


class Talk:
    """A conversation of some exchanges, with everything that is rendered of it."""

    def __init__(
        self,
        renderer: Renderer,
        exchanges: Sequence[Exchange],
        *,
        system: str | None,
        tools: Sequence[Tool],
        thinking: bool,
        section: str | None = None,
    ) -> None:
        """section: that of the tools, where it is known already."""
        self._renderer = renderer
        self._exchanges = tuple(exchanges)
        self.turns = tuple(chain.from_iterable(exchanges))
        self._system = system
        self._tools = tuple(tools)
        self._section = renderer.section(tools) if section is None else section
        self.thinking = thinking

    @cached_property
    def ids(self) -> list[int]:
        """By the server's own rendering and tokenizer."""
        conversation = Conversation(
            messages=(
                *([] if self._full_system is None else [Message(role="system", texts=(self._full_system,))]),
                *(_server_message(turn, ids) for turn, ids in zip(self.turns, self._ids, strict=True)),
            ),
            add_generation_prompt=False,
            template_kwargs={"enable_thinking": self.thinking},
        )
        return self._renderer.encode(conversation)

    @cached_property
    def text(self) -> str:
        return self._ending(self._prepared, generate=False)

    def written(self) -> Iterator[Written]:
        """Every turn of the assistant: from where a prompt ends that asks for it, to its end of turn, included.

        Found by rendering: the prompt that ends before the turn, and the conversation that ends with it. Each exchange
        is rendered alone, which is the same text as in the whole: that is checked, and costs a fraction of it.
        """
        system = [{"role": "system", "content": ""}]
        head = len(self._renderer.prepared(system))
        given = len(self._prepared) - len(self.turns)
        base = len(self._renderer.prepared(self._prepared[:given]))
        for exchange in self._exchanges:
            alone = system + self._prepared[given : given + len(exchange)]
            whole = ""
            for index, turn in enumerate(exchange, start=1):
                if turn.role == "assistant":
                    before = self._ending(alone[:index], generate=True)[head:]
                    whole = self._ending(alone[: index + 1], generate=False)[head:]
                    assert whole.startswith(before) and self.text.startswith(whole, base)
                    yield Written(start=base + len(before), stop=base + len(whole), turn=turn)
            base += len(whole)
            given += len(exchange)
        assert base == len(self.text)

    def messages(self, count: int) -> list[dict[str, Any]]:
        """The first turns as an API takes them, the system's in front."""
        made = [{"role": "system", "content": self._system}] if self._system is not None else []
        return made + [_api_message(turn, ids) for turn, ids in zip(self.turns[:count], self._ids, strict=False)]

    @property
    def tools(self) -> list[dict[str, Any]]:
        return [tool.declared() for tool in self._tools]

    def _ending(self, messages: Sequence[dict[str, Any]], *, generate: bool) -> str:
        return self._renderer.prepared(messages, add_generation_prompt=generate, enable_thinking=self.thinking)

    @property
    def _full_system(self) -> str | None:
        if self._section:
            return (DEFAULT_SYSTEM if self._system is None else self._system) + self._section
        return self._system

    @cached_property
    def _prepared(self) -> list[dict[str, Any]]:
        system = [] if self._full_system is None else [{"role": "system", "content": self._full_system}]
        return system + [
            with_argument_objects(_api_message(turn, ids)) for turn, ids in zip(self.turns, self._ids, strict=True)
        ]

    @cached_property
    def _ids(self) -> list[list[str]]:
        """Ids of a turn's calls; for a result, of the call that it answers."""
        made: list[list[str]] = []
        waiting: list[str] = []
        number = 0
        for turn in self.turns:
            if turn.role == "tool":
                made.append([waiting.pop(0)])
                continue
            waiting = [f"call_{number + index}" for index in range(len(turn.calls))]
            number += len(waiting)
            made.append(list(waiting))
        return made


def _server_message(turn: Turn, ids: list[str]) -> Message:
    calls = tuple(
        ToolCall(id=index, name=call.name, arguments=json.dumps(call.arguments))
        for call, index in zip(turn.calls, ids, strict=turn.role == "assistant")
    )
    return Message(
        role=turn.role,
        texts=(turn.text,) if turn.text else (),
        reasoning=turn.thought or None,
        tool_calls=calls,
        tool_call_id=ids[0] if turn.role == "tool" else None,
    )


def _api_message(turn: Turn, ids: list[str]) -> dict[str, Any]:
    made: dict[str, Any] = {"role": turn.role, "content": turn.text}
    if turn.thought:
        made["reasoning_content"] = turn.thought
    if turn.calls:
        made["tool_calls"] = [
            {
                "id": index,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call, index in zip(turn.calls, ids, strict=True)
        ]
    if turn.role == "tool":
        made["tool_call_id"] = ids[0]
    return made


def with_argument_objects(message: dict[str, Any]) -> dict[str, Any]:
    """Templates want the arguments of earlier calls as objects; the API has them as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}
