"""When the requests of a trace come: at its own times, or each after the answer that it waited for."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from server.simulator.trace import Request, Trace


class Arrivals:
    """Requests that are still to come. Owner: the simulation that takes them."""

    def __init__(self, first: Sequence[tuple[float, int]], following: dict[int, list[tuple[float, int]]]) -> None:
        """first: (arrival in seconds, index) of requests that wait for nobody; following: by the request whose end they
        wait for, (how long they come after it, index)."""
        self._due = list(first)
        heapq.heapify(self._due)
        self._following = following

    def __repr__(self) -> str:
        return f"<Arrivals {len(self._due)} known, {sum(map(len, self._following.values()))} to follow>"

    @property
    def next_s(self) -> float | None:
        """When the next one comes, as far as that is known by now."""
        return self._due[0][0] if self._due else None

    def take_due(self, now_s: float) -> list[tuple[float, int]]:
        """(arrival, index) of all that have come by now, in order."""
        due = []
        while self._due and self._due[0][0] <= now_s:
            due.append(heapq.heappop(self._due))
        return due

    def note_end(self, index: int, now_s: float) -> None:
        """The answer to a request is complete."""
        for delay_s, follower in self._following.pop(index, ()):
            heapq.heappush(self._due, (now_s + delay_s, follower))


def open_loop(trace: Trace, time_factor: float = 1.0) -> Arrivals:
    """Each request at its t_s times the factor, whether others are answered or not."""
    return Arrivals([(time_factor * request.arrival_s, request.index) for request in trace.requests], {})


def closed_loop(trace: Trace, time_factor: float = 1.0) -> Arrivals:
    """Each request so long after the end of the one before it in its session as somebody thought, think_s or what lay
    between them in the trace, times the factor.

    A session has one request at a time. A sub-agent is a session of its own, named after its parent ("0270/agent_001"
    of "0270"): it begins after the request of the parent that came before it, and both go on at the same time. The
    parent does not wait for it, for what it waited is part of the time that it thought.
    """
    first: list[tuple[float, int]] = []
    following: dict[int, list[tuple[float, int]]] = {}
    last_of: dict[str, Request] = {}
    for request in trace.requests:
        before = last_of.get(request.session)
        parent = request.session.partition("/")[0]
        if before is not None:
            delay_s = _gap_s(before, request) if request.think_s is None else request.think_s
            following.setdefault(before.index, []).append((time_factor * delay_s, request.index))
        elif parent in last_of:
            delay_s = _gap_s(last_of[parent], request)
            following.setdefault(last_of[parent].index, []).append((time_factor * delay_s, request.index))
        else:
            first.append((time_factor * request.arrival_s, request.index))
        last_of[request.session] = request
    return Arrivals(first, following)


def _gap_s(before: Request, request: Request) -> float:
    return max(0.0, request.arrival_s - before.arrival_s - before.held_s)
