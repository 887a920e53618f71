"""Which cached thing goes first: the one whose place is worth the least now."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Protocol

from server.cache.retention import Reuse

STEPS_PER_DOUBLING = 2
LEAST_DENSITY = 2.0**-10
SPARE_ENTRIES = 256


class Candidate(Protocol):
    """What can be queued: a snapshot, or the last run of a path. `queued` belongs to the queue."""

    queued: object
    reuse: Reuse


Rate = Callable[[float], float]
"""Returns per second by the age in seconds; what is not over yet has a negative age."""


class EvictionQueue:
    """Candidates in classes within which the longest unused is worth the least; between classes, the moment decides.

    A class is (step of density, reuse): what a candidate is worth is its density times the rate at which its kind
    returns at its age, and that rate only falls. So only the first of each class is looked at. Densities are rounded to
    steps of a factor of the root of 2. Entries that were withdrawn are dropped when they are met, or when they are more
    than the others.

    Owner: KVCache, on the event-loop thread.
    """

    def __init__(self, rate: Callable[[Reuse], Rate]) -> None:
        self._rate = rate
        self._classes: dict[tuple[int, Reuse], _Class] = {}
        self._serials = itertools.count()
        self._entries = 0
        self._queued = 0  # candidates: entries that were not withdrawn

    def __len__(self) -> int:
        """Entries, those that were withdrawn and are still there included."""
        return self._entries

    def offer(self, candidate: Candidate, *, last_used_s: float, density: float, reuse: Reuse) -> None:
        """Queue it, or queue it anew."""
        step = round(STEPS_PER_DOUBLING * math.log2(max(density, LEAST_DENSITY)))
        serial = next(self._serials)
        self._queued += candidate.queued is None
        candidate.queued = serial
        of_class = self._classes.get((step, reuse))
        if of_class is None:
            of_class = self._classes[step, reuse] = _Class(self._rate(reuse), 2.0 ** (step / STEPS_PER_DOUBLING))
        heapq.heappush(of_class.heap, (last_used_s, serial, candidate))
        self._entries += 1
        if self._entries > 2 * self._queued + SPARE_ENTRIES:
            self.compact()

    def withdraw(self, candidate: Candidate) -> None:
        self._queued -= candidate.queued is not None
        candidate.queued = None

    def compact(self) -> None:
        """Drop every entry that was withdrawn."""
        for key, of_class in list(self._classes.items()):
            of_class.heap = [entry for entry in of_class.heap if entry[2].queued == entry[1]]
            heapq.heapify(of_class.heap)
            if not of_class.heap:
                del self._classes[key]
        self._entries = self._queued

    def worst(self, now_s: float) -> Candidate | None:
        """The one to evict next; it stays queued. None if nothing is."""
        worst, least = None, math.inf
        emptied = []
        for key, of_class in self._classes.items():
            heap = of_class.heap
            while heap and heap[0][2].queued != heap[0][1]:
                heapq.heappop(heap)
                self._entries -= 1
            if not heap:
                emptied.append(key)
                continue
            worth = of_class.rate(now_s - heap[0][0]) * of_class.density
            if worth < least:
                worst, least = heap[0][2], worth
        for key in emptied:
            del self._classes[key]
        return worst


class _Class:
    """Candidates alike: when each was last used, its serial number, and itself. Owner: EvictionQueue."""

    __slots__ = ("density", "heap", "rate")

    def __init__(self, rate: Rate, density: float) -> None:
        self.rate = rate
        self.density = density
        self.heap: list[tuple[float, int, Candidate]] = []
