"""From the engine's synchronous events to a handler that awaits: one channel a call, one ending a call.

The engine never waits for a client: `emit` appends to a list and wakes the handler. The list has no bound of its own;
max_tokens bounds it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from server.errors import EngineFailed, TwinpaneError
from server.metrics import Metrics
from server.request import (
    ChoiceFailed,
    ChoiceFinished,
    Event,
    FinishReason,
    OutputStream,
    SampledToken,
    TextDelta,
)

logger = logging.getLogger("twinpane.api")


class EventChannel:
    """Events of all choices of one call, in the order the engine emitted them.

    Owner: the handler of the call, on the event-loop thread.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._wake = asyncio.Event()

    def emit(self, event: Event) -> None:
        """Take an event; never blocks."""
        self._events.append(event)
        self._wake.set()

    def wake(self) -> None:
        """Let the handler look up, though nothing came."""
        self._wake.set()

    async def take(self) -> list[Event]:
        """What came since the last call; empty if only `wake` was called."""
        await self._wake.wait()
        self._wake.clear()
        events, self._events = self._events, []
        return events


class CountedOutput:
    """An output stream that also knows how many tokens it was given, for running usage counts."""

    def __init__(self, inner: OutputStream) -> None:
        self._inner = inner
        self.tokens = 0

    def push(self, token: SampledToken) -> FinishReason | None:
        self.tokens += 1
        return self._inner.push(token)

    def fail(self, error: TwinpaneError) -> None:
        self._inner.fail(error)

    def cancel(self) -> None:
        self._inner.cancel()


class Endings:
    """Makes sure that a call ends in exactly one way: every choice finished, or one error.

    `admit` lets through what may be shown and returns the error if there is one; whatever comes for a choice after its
    end is dropped and counted as a violation, which is a bug of ours and never the client's problem.
    """

    def __init__(self, *, choices: int, metrics: Metrics, request_id: str) -> None:
        self._open = set(range(choices))
        self._metrics = metrics
        self._request_id = request_id

    @property
    def finished(self) -> bool:
        return not self._open

    def admit(self, events: Iterable[Event]) -> tuple[list[TextDelta | ChoiceFinished], TwinpaneError | None]:
        shown: list[TextDelta | ChoiceFinished] = []
        for event in events:
            if event.choice not in self._open:
                self._violated(event)
                continue
            match event:
                case ChoiceFailed():
                    return shown, event.error
                case ChoiceFinished():
                    self._open.remove(event.choice)
                    shown.append(event)
                case TextDelta():
                    shown.append(event)
        return shown, None

    def broken(self, error: BaseException) -> TwinpaneError:
        """The handler itself failed in mid-answer: the error that ends the call instead."""
        self._metrics.stream_violation()
        logger.error("event=answer_broken request_id=%s", self._request_id, exc_info=error)
        return error if isinstance(error, TwinpaneError) else EngineFailed("the answer could not be written")

    def _violated(self, event: Event) -> None:
        self._metrics.stream_violation()
        logger.error(
            "event=late_event request_id=%s choice=%d kind=%s", self._request_id, event.choice, type(event).__name__
        )
