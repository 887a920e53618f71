"""From the engine's synchronous events to a handler that awaits: one channel a call, one ending a call.

The engine never waits for a client: `emit` appends to a queue and wakes the handler. The queue is bounded in bytes: a
client that reads too slowly loses its call, and nobody else notices.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable

from server.api.errors import HttpRefusal
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

    Owner: the handler of the call, on the event-loop thread. on_overflow is called once, in a later turn of the loop,
    when more than max_bytes wait: the last event is then the failure of the call, and later ones are dropped.
    """

    def __init__(self, *, max_bytes: int, on_overflow: Callable[[], object]) -> None:
        self._events: deque[Event] = deque()
        self._awake = False  # take need not wait
        self._sleeper: asyncio.Future[None] | None = None  # take, while it waits
        self._max_bytes = max_bytes
        self._on_overflow = on_overflow
        self._held_bytes = 0
        self._overflowed = False

    def emit(self, event: Event) -> None:
        """Take an event; never blocks."""
        if self._overflowed:
            return
        self._held_bytes += held_bytes(event)
        if self._held_bytes > self._max_bytes:
            self._overflowed = True
            event = ChoiceFailed(choice=event.choice, error=_too_slow())
            asyncio.get_running_loop().call_soon(self._on_overflow)
        self._events.append(event)
        self.wake()

    def wake(self) -> None:
        """Let the handler look up, whether or not something came."""
        self._awake = True
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)

    async def take(self, at_most: int) -> list[Event]:
        """The next events; empty if only `wake` was called. One handler at a time."""
        if not self._awake:
            self._sleeper = asyncio.get_running_loop().create_future()
            await self._sleeper
        if len(self._events) <= at_most:
            events = list(self._events)
            self._events.clear()
            self._held_bytes = 0
            self._awake = False
        else:
            events = [self._events.popleft() for _ in range(at_most)]
            self._held_bytes -= sum(map(held_bytes, events))
        return events

    @property
    def more(self) -> bool:
        return bool(self._events)


EVENT_BYTES = 128
ENTRY_BYTES = 128


def held_bytes(event: Event) -> int:
    """Memory that an event holds, roughly: the object, its text, and every reported log-probability."""
    if not isinstance(event, TextDelta):
        return EVENT_BYTES
    reported = sum(1 + len(entry.top) for entry in event.logprobs) if event.logprobs else 0
    return EVENT_BYTES + len(event.text) + ENTRY_BYTES * reported


def _too_slow() -> HttpRefusal:
    return HttpRefusal(
        "The answer was cut off: it was read more slowly than it grew.", status=408, code="client_too_slow"
    )


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
                case TextDelta():
                    shown.append(event)
                case ChoiceFinished():
                    self._open.remove(event.choice)
                    shown.append(event)
                case ChoiceFailed():
                    return shown, event.error
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
