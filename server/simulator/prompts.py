"""How the cache knows the prompts of a trace: ids of pages stand for their tokens."""

from __future__ import annotations

import numpy as np

from server.cache.kv_cache import Prefix
from server.cache.prefix_tree import Keys
from server.simulator.trace import Request, Trace


class Prompts:
    """Prefixes of a trace's requests, in any order. Prompts are kept as cache, replies are not: the trace does not tell
    whether they come back as they were."""

    def __init__(self, trace: Trace, page_tokens: int) -> None:
        assert trace.block_tokens % page_tokens == 0
        self._block_tokens = trace.block_tokens
        self._page_tokens = page_tokens
        self._pages_per_block = trace.block_tokens // page_tokens
        self._turns: list[int] = []
        """Which turn each request is: a server counts the turns in the prompt; here it goes on from the prompt whose
        blocks it has all of."""
        for request in trace.requests:
            self._turns.append(self._turns[request.source] + 1 if trace.goes_on(request) else 1)

    def prefix(self, request: Request) -> Prefix:
        each = np.arange(self._pages_per_block, dtype=np.int64)
        pages = (request.blocks[:, None] * self._pages_per_block + each).reshape(-1, 1)

        def keys(first: int, stop: int) -> Keys:
            return pages[first:stop]

        return Prefix(
            keys=keys,
            pages=len(pages),
            resumable=max(0, min(len(pages), (request.input_tokens - 1) // self._page_tokens)),
            kept_pages=len(pages),
            turn=self._turns[request.index],
            added_tokens=request.input_tokens - request.shared_blocks * self._block_tokens,
        )
