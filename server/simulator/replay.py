"""A trace played through the real cache: what is hit, rebuilt and evicted with so much memory."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from server.cache.kv_cache import CachePolicy, KVCache
from server.cache.retention import Ending
from server.config import KVLayout
from server.rebuild import RebuildShape
from server.simulator.prompts import Prompts
from server.simulator.trace import Request, Trace
from server.step import SequenceId, SlotId

ENDINGS = {"tool_use": Ending.CALLED, "end_turn": Ending.SAID}


@dataclass(slots=True, kw_only=True)
class Replayed:
    """Tokens of all prompts, and how many of them need not be computed, with the work of rebuilds taken off.

    equal_tokens: how many a match of tokens alone would have given at the same moments; resumed_tokens: before the
    rebuild's work is taken off. waited: requests that found no memory at first; refused: too large for all of it.
    """

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: float = 0.0
    resumed_tokens: int = 0
    equal_tokens: int = 0
    rebuilds: int = 0
    waited: int = 0
    refused: int = 0
    moved_pages: int = 0
    stranded_bytes: float = 0.0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class Replay:
    """One pass over a trace. A request's prompt is computed when it arrives and its pages are held for held_s; if there
    is no room, it waits for those that run."""

    def __init__(
        self, trace: Trace, layout: KVLayout, rebuild: RebuildShape, policy: CachePolicy, *, chunk_tokens: int
    ) -> None:
        self._trace = trace
        self._prompts = Prompts(trace, layout.page_tokens)
        self._cache = KVCache(layout, rebuild=rebuild, policy=policy)
        self._chunk_tokens = chunk_tokens
        self._running: list[tuple[float, int, str | None]] = []
        self._now_s = 0.0
        self.result = Replayed()

    @property
    def cache(self) -> KVCache:
        return self._cache

    def run(self, progress: Callable[[], object] = lambda: None) -> Replayed:
        for _ in self.steps():
            progress()
        return self.result

    def steps(self) -> Iterator[Replayed]:
        for request in self._trace.requests:
            self._now_s = max(self._now_s, request.arrival_s)
            while self._running and self._running[0][0] <= self._now_s:
                self._end_first()
            self._serve(request)
            yield self.result

    def _serve(self, request: Request) -> None:
        cache, result = self._cache, self.result
        sequence = SequenceId(request.index)
        prefix = self._prompts.prefix(request)
        result.requests += 1
        result.prompt_tokens += request.input_tokens
        result.equal_tokens += cache.known_pages(prefix) * cache.layout.page_tokens
        resume = cache.open(sequence, SlotId(0), prefix, self._now_s)
        total, done, has_waited = request.input_tokens + request.output_tokens, resume.start, False
        while done < total:
            stop = min(total, done + self._chunk_tokens)
            reservation = cache.reserve(sequence, stop, self._now_s)
            if not reservation.granted:
                if not self._running:
                    result.refused += 1
                    cache.close(sequence, None, self._now_s)
                    return
                has_waited = True
                self._now_s = max(self._now_s, self._running[0][0])
                self._end_first()
                continue
            result.moved_pages += len(reservation.moves)
            cache.commit(sequence, stop, self._now_s)
            done = stop
        result.hit_tokens += resume.saved_tokens
        result.resumed_tokens += resume.cached_tokens
        result.rebuilds += resume.start < resume.cached_tokens
        result.waited += has_waited
        result.stranded_bytes += cache.stranded_bytes()
        heapq.heappush(self._running, (self._now_s + request.held_s, request.index, request.stop))

    def _end_first(self) -> None:
        end_s, index, stop = heapq.heappop(self._running)
        self._cache.close(SequenceId(index), None, end_s, ENDINGS.get(stop or "", Ending.UNKNOWN))
