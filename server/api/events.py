"""From the engine's synchronous events to a handler that awaits: one channel a call, one ending a call.

The engine never waits for a client: `emit` appends to a queue and notes that the call has something. The queue is
bounded in bytes: a client that reads too slowly loses its call, and nobody else notices.

A step brings a token to every stream at once, and to wake a task for each of them would cost more than to write them.
So a handler that has nothing to do but to pass text on leaves a function with the channel. These are called for all
channels together, in the turn of the loop behind the step, and a handler is woken only where its function says so.
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


class Turn:
    """The channels that have something for their handlers, for all calls of a server. Owner: the event-loop thread.

    What they have is read first, and written behind that, all of it together: whoever takes it, often one process for
    many streams, is then woken once, and neither half pushes the other out of the processor's caches.
    """

    def __init__(self) -> None:
        self._due: list[EventChannel] = []
        self._behind: list[Callable[[], None]] = []

    def add(self, channel: EventChannel) -> None:
        """Let it tell its handler in the next turn of the loop."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._run)
        self._due.append(channel)

    def behind(self, write: Callable[[], None]) -> None:
        """While channels are told: call this, which does not raise, when all have been."""
        self._behind.append(write)

    def _run(self) -> None:
        due, self._due = self._due, []
        for channel in due:
            channel.tell()
        behind, self._behind = self._behind, []
        for write in behind:
            write()


class EventChannel:
    """Events of all choices of one call, in the order the engine emitted them.

    Owner: the handler of the call, on the event-loop thread. on_overflow is called once, in a later turn of the loop,
    when more than max_bytes wait: the last event is then the failure of the call, and later ones are dropped.
    """

    def __init__(self, turn: Turn, *, max_bytes: int, on_overflow: Callable[[], object]) -> None:
        self._events: deque[Event] = deque()
        self._turn = turn
        self._due = False  # the next turn tells the handler
        self._sleeper: asyncio.Future[None] | None = None  # the handler, while it waits
        self._deal: Callable[[], bool] | None = None  # what the handler left for that time
        self._awake = False  # the handler need not wait
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
        if not self._due:
            self._due = True
            self._turn.add(self)

    def wake(self) -> None:
        """Let the handler look up, whether or not something came."""
        self._awake = True
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)

    def tell(self) -> None:
        """For Turn: something came."""
        self._due = False
        if self._awake or self._deal is None or not self._events:  # the handler is at work: it has it or will find it
            return
        try:
            dealt_with = self._deal()
        except Exception as error:
            if self._sleeper is not None and not self._sleeper.done():
                self._sleeper.set_exception(error)
            return
        if not dealt_with:
            self.wake()

    async def wait(self, deal: Callable[[], bool]) -> None:
        """Until the handler is needed: `wake` was called, or events came and `deal`, called in a turn of the loop, did
        not return True. What it raises is raised here. One handler at a time."""
        if self._awake or self._events:
            return
        self._sleeper, self._deal = asyncio.get_running_loop().create_future(), deal
        try:
            await self._sleeper
        finally:
            self._deal = None

    def take(self, at_most: int) -> list[Event]:
        """The next events, which may be none."""
        self._awake = False
        if len(self._events) <= at_most:
            events = list(self._events)
            self._events.clear()
            self._held_bytes = 0
        else:
            events = [self._events.popleft() for _ in range(at_most)]
            self._held_bytes -= sum(map(held_bytes, events))
        return events

    def only_text(self, at_most: int) -> bool:
        """Whether there are at most so many events, all of them texts, and far from what the channel may hold."""
        return (
            len(self._events) <= at_most
            and self._held_bytes <= self._max_bytes // 8
            and all(isinstance(event, TextDelta) for event in self._events)
        )

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
