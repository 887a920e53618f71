"""When the queue is full, for whom, and when to come again."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

DRAIN_MEMORY_S = 30.0
"""Over about so long the rate is measured at which the queue drains."""
FIRST_REQUESTS_PER_S = 10.0
"""Requests a second, before any was seen to leave the queue."""
LEAST_RETRY_S = 0.05
MOST_RETRY_S = 60.0
"""The longest that OpenAI's clients wait when they are told to."""
GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, never crowd (Weyl's sequence)."""
FORGETTING_S = 1.0
RECENT_S = 60.0
"""A client counts when the queue is shared as long as it has asked for something within so long."""


class DrainRate:
    """How fast the queue drains, and so when there will be a place for one more.

    The rate is those that left it over the time in which somebody waited, both of about the last DRAIN_MEMORY_S of
    such time: older ones count by exp(-age / DRAIN_MEMORY_S). Everybody who is refused is told another moment, one
    place after the other, so that those who come again do not all come at once; who would have to wait longer than
    MOST_RETRY_S is told some moment in the second half of it. Owner: Scheduler.
    """

    def __init__(self) -> None:
        self._left = 0.0
        self._waited_s = 0.0
        self._seen_s = 0.0
        self._was_waited = False
        self._promised_s = 0.0
        self._turned_away = 0

    def note(self, now: float, *, left: int, waiting: int) -> None:
        """So many left the queue to run, and so many wait in it now. To be called whenever either changes."""
        self._advance(now)
        self._left += left
        self._was_waited = waiting > 0
        if not waiting:
            self._promised_s = now

    def rate(self, now: float) -> float:
        """Requests per second."""
        self._advance(now)
        # As if, before all that was seen, one had left at the first rate.
        return (self._left + 1) / (self._waited_s + 1 / FIRST_REQUESTS_PER_S)

    def retry_after_s(self, now: float, excess: int) -> float:
        """When to come again, if so many places too few are free."""
        self._promised_s = max(self._promised_s, now) + excess / self.rate(now)
        retry_s = self._promised_s - now
        if retry_s > MOST_RETRY_S:
            self._promised_s = now + MOST_RETRY_S
            self._turned_away += 1
            retry_s = MOST_RETRY_S * (1 + self._turned_away * GOLDEN % 1) / 2
        return max(LEAST_RETRY_S, retry_s)

    def _advance(self, now: float) -> None:
        if self._was_waited and now > self._seen_s:
            fade = math.exp((self._seen_s - now) / DRAIN_MEMORY_S)
            self._left *= fade
            self._waited_s = self._waited_s * fade + DRAIN_MEMORY_S * (1 - fade)
        self._seen_s = max(self._seen_s, now)


@dataclass(slots=True)
class _Client:
    """What one API key has. served: tokens computed for it, from the least of those present when it came."""

    name: Hashable
    waiting: int = 0
    running: int = 0
    served: float = 0.0
    asked_s: float = 0.0

    @property
    def is_present(self) -> bool:
        return self.waiting > 0 or self.running > 0


class _LeastServed:
    """Of the clients that count, the one for whom the least was computed; of equals, one.

    What is computed for a client only grows, so an entry of the heap may be old: it is corrected when it comes to the
    top. Owner: FairShares.
    """

    def __init__(self, counts: Callable[[_Client], bool]) -> None:
        self._counts = counts
        self._heap: list[tuple[float, int, _Client]] = []
        self._entered: set[int] = set()
        self._numbers = itertools.count()

    def add(self, of: _Client) -> None:
        """It counts now, if it did not before."""
        if id(of) not in self._entered:
            self._entered.add(id(of))  # of one that is in the heap, and so alive
            heapq.heappush(self._heap, (of.served, next(self._numbers), of))

    def forget(self) -> None:
        """Those who do not count, wherever they are."""
        self._heap = [each for each in self._heap if self._counts(each[2])]
        heapq.heapify(self._heap)
        self._entered = {id(of) for _, _, of in self._heap}

    def first(self) -> _Client | None:
        while self._heap:
            served, number, of = self._heap[0]
            if not self._counts(of):
                heapq.heappop(self._heap)
                self._entered.remove(id(of))
            elif of.served > served:
                heapq.heapreplace(self._heap, (of.served, number, of))
            else:
                return of
        return None


class FairShares:
    """Who is served next when clients with different API keys wait, and how much of the queue each may fill.

    The one for whom the fewest tokens were computed comes first; who comes, or comes back, starts at the least of those
    present, or where the last one left, unless it has had more: nobody saves up. After RECENT_S what it has had is
    forgotten. (Virtual token counters: Sheng et al.
    2024, "Fairness in serving large language models".) Within a key, and where there is only one, the policy's order
    holds. Owner: Scheduler.
    """

    def __init__(self) -> None:
        self._clients: dict[Hashable, _Client] = {}
        self._waiting = _LeastServed(lambda of: of.waiting > 0)
        self._present = _LeastServed(lambda of: of.is_present)
        self._level = 0.0
        self._forgot_s = 0.0

    def __len__(self) -> int:
        return len(self._clients)

    def arrived(self, client: Hashable, now: float) -> None:
        """One of its choices waits now."""
        of = self._of(client, now)
        if not of.is_present:
            least = self._present.first()
            of.served = max(of.served, self._level if least is None else least.served)
        of.waiting += 1
        self._waiting.add(of)
        self._present.add(of)

    def started(self, client: Hashable) -> None:
        of = self._clients[client]
        of.waiting -= 1
        of.running += 1

    def preempted(self, client: Hashable) -> None:
        of = self._clients[client]
        of.waiting += 1
        of.running -= 1
        self._waiting.add(of)

    def left(self, client: Hashable, *, waited: bool, now: float) -> None:
        """It ended, as it waited or as it ran."""
        of = self._clients[client]
        if waited:
            of.waiting -= 1
        else:
            of.running -= 1
        if not of.is_present and self._present.first() is None:
            self._level = max(self._level, of.served)
        self._forget(now)

    def served(self, client: Hashable, tokens: int) -> None:
        """So many were computed for it."""
        of = self._clients.get(client)
        if of is not None and of.is_present:
            of.served += tokens

    def next(self) -> Hashable:
        """Of those who wait, whose turn it is; None if nobody waits."""
        first = self._waiting.first()
        return None if first is None else first.name

    def waiting(self, client: Hashable) -> int:
        of = self._clients.get(client)
        return of.waiting if of is not None else 0

    def allowance(self, client: Hashable, limit: int, now: float) -> int:
        """How many places of a queue of `limit` it may have while others want some: an equal share."""
        self._of(client, now)
        self._forget(now)
        return max(1, -(-limit // len(self._clients)))

    def _of(self, client: Hashable, now: float) -> _Client:
        of = self._clients.get(client)
        if of is None:
            of = self._clients[client] = _Client(client)
        of.asked_s = now
        return of

    def _forget(self, now: float) -> None:
        """Those who are not here and have not been for a while. Looks at all of them, so not often."""
        if now - self._forgot_s < FORGETTING_S:
            return
        self._forgot_s = now
        self._waiting.forget()
        self._present.forget()
        self._clients = {
            name: of for name, of in self._clients.items() if of.is_present or now - of.asked_s <= RECENT_S
        }
