"""What happened to single requests, and when: for whoever asks why one was slow."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from server.request import RequestId, TimelineEvent

MOST_REQUESTS = 1024
MOST_EVENTS = 128
"""Of one request at its beginning, and as many again at its end: a prompt of a million tokens in pieces of 8,192 is as
many pieces."""


@dataclass(slots=True)
class _Story:
    """What is between the first events and the last is only counted. Owner: Timelines."""

    first: list[TimelineEvent] = field(default_factory=list)
    last: deque[TimelineEvent] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    left_out: int = 0

    def add(self, event: TimelineEvent) -> None:
        if len(self.first) < MOST_EVENTS:
            self.first.append(event)
            return
        self.left_out += len(self.last) == MOST_EVENTS
        self.last.append(event)

    def events(self) -> list[TimelineEvent]:
        gap = []
        if self.left_out:
            gap = [TimelineEvent(self.last[0].at_s, "left_out", {"events": self.left_out})]
        return [*self.first, *gap, *self.last]


class Timelines:
    """The last MOST_REQUESTS requests that were accepted, whether they are over or not. Owner: Scheduler."""

    def __init__(self) -> None:
        self._stories: OrderedDict[RequestId, _Story] = OrderedDict()

    def begin(self, request_id: RequestId) -> None:
        self._stories[request_id] = _Story()
        if len(self._stories) > MOST_REQUESTS:
            self._stories.popitem(last=False)

    def note(self, request_id: RequestId, at_s: float, what: str, **facts: float | str) -> None:
        """at_s: on the engine's clock."""
        story = self._stories.get(request_id)
        if story is not None:
            story.add(TimelineEvent(at_s, what, facts))

    def of(self, name: str) -> dict[RequestId, list[TimelineEvent]]:
        """By the id that the client knows: an engine's id is that, `#` and a number."""
        return {each: story.events() for each, story in self._stories.items() if _name(each) == name}


def _name(request_id: RequestId) -> str:
    name, mark, _ = request_id.rpartition("#")
    return name if mark else request_id
