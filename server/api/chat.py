"""POST /v1/chat/completions: OpenAI's chat shapes, whole and streamed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from server.api.answer import Collected
from server.api.logprobs import chat_entries
from server.api.usage import PromptTokens, usage
from server.request import ChoiceFinished, TextDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every object of one answer repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamUsage:
    """Whether a stream tells its usage: at the end, and on every chunk. The prompt's are those of all."""

    at_end: bool
    on_chunks: bool
    prompt: PromptTokens
    tokens_so_far: Callable[[], int]

    def running(self) -> bytes:
        return orjson.dumps(usage(self.prompt, completion_tokens=self.tokens_so_far()))


class Chunks:
    """Builds chunks of one stream from bytes prepared once: only what changes is encoded for each token.

    Owner: the handler of the call.
    """

    def __init__(self, head: Head, kind: str, *, choices: int, stream_usage: StreamUsage) -> None:
        self._head = orjson.dumps(head.fields(kind))[:-1]
        self._usage = stream_usage
        self._starts = [b'data: %b,"choices":[{"index":%d,' % (self._head, i) for i in range(choices)]
        self._tail = b'}],"usage":null}\n\n' if stream_usage.at_end else b"}]}\n\n"
        self._output_tokens = 0

    def chunk(self, choice: int, inner: bytes) -> bytes:
        """`inner`: the members of the choice object after its index."""
        if self._usage.on_chunks:
            return b'%b%b}],"usage":%b}\n\n' % (self._starts[choice], inner, self._usage.running())
        return self._starts[choice] + inner + self._tail

    def finished(self, event: ChoiceFinished) -> None:
        self._output_tokens += event.output_tokens

    def closing(self) -> bytes:
        """The usage chunk, where asked for."""
        if not self._usage.at_end:
            return b""
        total = usage(self._usage.prompt, completion_tokens=self._output_tokens)
        return b'data: %b,"choices":[],"usage":%b}\n\n' % (self._head, orjson.dumps(total))


def finish_members(event: ChoiceFinished) -> bytes:
    return b'"finish_reason":"%b","stop_reason":%b' % (event.reason.value.encode(), orjson.dumps(event.matched))


class ChatStream:
    """Chat chunks: a role chunk, text chunks without a finish reason, a finish chunk without text."""

    def __init__(self, head: Head, *, choices: int, stream_usage: StreamUsage) -> None:
        self._chunks = Chunks(head, "chat.completion.chunk", choices=choices, stream_usage=stream_usage)
        self._choices = choices

    def opening(self) -> bytes:
        role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return b"".join(self._chunks.chunk(i, role) for i in range(self._choices))

    def delta(self, event: TextDelta) -> bytes:
        if not event.text and not event.logprobs:
            return b""
        text = orjson.dumps(event.text)
        if not event.logprobs:
            return self._chunks.chunk(
                event.choice, b'"delta":{"content":%b},"logprobs":null,"finish_reason":null' % text
            )
        entries = orjson.dumps({"content": chat_entries(event.logprobs), "refusal": None})
        return self._chunks.chunk(
            event.choice, b'"delta":{"content":%b},"logprobs":%b,"finish_reason":null' % (text, entries)
        )

    def finish(self, event: ChoiceFinished) -> bytes:
        self._chunks.finished(event)
        return self._chunks.chunk(event.choice, b'"delta":{},"logprobs":null,' + finish_members(event))

    def closing(self) -> bytes:
        return self._chunks.closing()


def chat_completion(head: Head, choices: Sequence[Collected], *, prompt: PromptTokens) -> bytes:
    """The whole answer as one object."""
    return orjson.dumps(
        {
            **head.fields("chat.completion"),
            "choices": [_choice(i, collected) for i, collected in enumerate(choices)],
            "usage": usage(prompt, completion_tokens=sum(c.output_tokens for c in choices)),
        }
    )


def _choice(index: int, collected: Collected) -> dict[str, Any]:
    finish = collected.finish
    assert finish is not None, "a collected choice has ended"
    return {
        "index": index,
        "message": {"role": "assistant", "content": collected.text, "refusal": None},
        "logprobs": collected.report.whole(),
        "finish_reason": finish.reason.value,
        "stop_reason": finish.matched,
    }
