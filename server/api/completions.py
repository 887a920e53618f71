"""POST /v1/completions: OpenAI's older text shapes, whole and streamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from server.api.answer import Collected
from server.api.chat import Chunks, Head, StreamUsage, finish_members
from server.api.logprobs import LegacyOffsets
from server.api.usage import PromptTokens, usage
from server.request import ChoiceFinished, TextDelta


class CompletionStream:
    """Text chunks without a finish reason, then a finish chunk without text.

    echoes: for each choice the prompt's text to say first, or "".
    """

    def __init__(self, head: Head, *, echoes: Sequence[str], logprobs: bool, stream_usage: StreamUsage) -> None:
        self._chunks = Chunks(head, "text_completion", choices=len(echoes), stream_usage=stream_usage)
        self._echoes = echoes
        self._logprobs = logprobs
        self._offsets = [LegacyOffsets() for _ in echoes]

    def opening(self) -> bytes:
        return b"".join(self._text(i, echo, b"null") for i, echo in enumerate(self._echoes) if echo)

    def delta(self, event: TextDelta) -> bytes:
        if not event.text and not event.logprobs:
            return b""
        if not self._logprobs:
            return self._text(event.choice, event.text, b"null")
        lists = self._offsets[event.choice].entries(event.text, event.logprobs)
        return self._text(event.choice, event.text, orjson.dumps(lists) if event.logprobs else b"null")

    def finish(self, event: ChoiceFinished) -> bytes:
        self._chunks.finished(event)
        return self._chunks.chunk(event.choice, b'"text":"","logprobs":null,' + finish_members(event))

    def closing(self) -> bytes:
        return self._chunks.closing()

    def _text(self, choice: int, text: str, logprobs: bytes) -> bytes:
        return self._chunks.chunk(
            choice, b'"text":%b,"logprobs":%b,"finish_reason":null' % (orjson.dumps(text), logprobs)
        )


def text_completion(head: Head, choices: Sequence[Collected], *, echoes: Sequence[str], prompt: PromptTokens) -> bytes:
    """The whole answer as one object."""
    return orjson.dumps(
        {
            **head.fields("text_completion"),
            "choices": [
                _choice(i, collected, echo=echo)
                for i, (collected, echo) in enumerate(zip(choices, echoes, strict=True))
            ],
            "usage": usage(prompt, completion_tokens=sum(c.output_tokens for c in choices)),
        }
    )


def _choice(index: int, collected: Collected, *, echo: str) -> dict[str, Any]:
    finish = collected.finish
    assert finish is not None, "a collected choice has ended"
    return {
        "index": index,
        "text": echo + collected.text,
        "logprobs": collected.report.whole(),
        "finish_reason": finish.reason.value,
        "stop_reason": finish.matched,
    }
