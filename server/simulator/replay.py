"""A trace played through the real cache: what is hit, rebuilt and evicted with so much memory."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from server.cache.kv_cache import CachePolicy, KVCache, Prefix
from server.cache.prefix_tree import Keys
from server.cache.retention import Ending
from server.config import KVLayout
from server.rebuild import RebuildShape
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
    is no room, it waits for those that run. Prompts are kept as cache, replies are not: the trace does not tell whether
    they come back as they were."""

    def __init__(
        self, trace: Trace, layout: KVLayout, rebuild: RebuildShape, policy: CachePolicy, *, chunk_tokens: int
    ) -> None:
        assert trace.block_tokens % layout.page_tokens == 0
        self._trace = trace
        self._cache = KVCache(layout, rebuild=rebuild, policy=policy)
        self._pages_per_block = trace.block_tokens // layout.page_tokens
        self._chunk_tokens = chunk_tokens
        self._running: list[tuple[float, int, str | None]] = []
        self._now_s = 0.0
        self._turns: list[int] = []
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
        prefix = self._prefix(request)
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

    def _turn(self, request: Request) -> tuple[int, int]:
        """Which turn it is, and how many tokens it adds: a server counts the turns in the prompt; here it goes on from
        the prompt whose blocks it has all of."""
        self._turns.append(self._turns[request.source] + 1 if self._trace.goes_on(request) else 1)
        return self._turns[-1], request.input_tokens - request.shared_blocks * self._trace.block_tokens

    def _prefix(self, request: Request) -> Prefix:
        blocks = request.blocks
        each = np.arange(self._pages_per_block, dtype=np.int64)
        pages = (blocks[:, None] * self._pages_per_block + each).reshape(-1, 1)

        def keys(first: int, stop: int) -> Keys:
            return pages[first:stop]

        turn, added_tokens = self._turn(request)
        resumable = max(0, min(len(pages), (request.input_tokens - 1) // self._cache.layout.page_tokens))
        return Prefix(
            keys=keys,
            pages=len(pages),
            resumable=resumable,
            kept_pages=len(pages),
            turn=turn,
            added_tokens=added_tokens,
        )
