"""What a prefix cache can give on a trace, and the plain one-pool cache that ours is measured against."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from server.simulator.trace import Blocks, Request, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Bytes of one token's K/V in all full layers, and in all window layers (MTP layers among them)."""

    full_token_bytes: int
    window_token_bytes: int
    window_tokens: int

    @property
    def snapshot_bytes(self) -> int:
        return self.window_tokens * self.window_token_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """What a cache gave. not_entered: requests that were served, but found no room to be kept."""

    hit_tokens: int
    prompt_tokens: int
    not_entered: int = 0

    @property
    def rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def unlimited(trace: Trace) -> Hits:
    """A cache without end in which equal tokens are a hit."""
    return _hits(trace, sum(request.shared_blocks for request in trace.requests))


def one_pool(trace: Trace, budget_bytes: int, prices: Prices, held: bool = True) -> Hits:
    """One pool for all layers: every token costs full and window bytes, so any cached prefix can be resumed.

    The least recently used block goes first, leaves before their parents; a use is an arrival. With `held`, the blocks
    of a request stay from its arrival for its held_s. A prompt that does not fit beside what is held is served without
    being kept, and is no use of the blocks that it hits. Replies are not kept.
    """
    block_bytes = trace.block_tokens * (prices.full_token_bytes + prices.window_token_bytes)
    pool = _LruPool(trace, budget_bytes // block_bytes)
    hit_blocks = not_entered = 0
    for request in trace.requests:
        pool.end_leases(request.arrival_s)
        path = request.blocks
        hit_blocks += pool.cached_blocks(path)
        if not pool.enter(request, path, until_s=request.arrival_s + request.held_s if held else request.arrival_s):
            not_entered += 1
    pool.check()
    return _hits(trace, hit_blocks, not_entered)


def clairvoyant(trace: Trace, budget_bytes: int, prices: Prices, held: bool = False) -> Hits:
    """Two pools and a policy that knows the future: close to the most that any policy can reach, but no proof of it.

    A block costs full bytes and a snapshot a window's; a prefix can be resumed only at a snapshot. Snapshots are taken
    where a later request will leave the tree, and nowhere else; blocks are kept while a snapshot lies at or below them,
    for without one they are of no use. The snapshot that is used furthest in the future goes first, with the blocks
    that only it needs (Belady's rule on the leaves). With `held`, a running request also holds its prompt's blocks and
    one window; a request that does not fit beside the others is served and leaves nothing behind.

    Why no proof: Belady's rule is the best one for items of one size, and these differ in size and share blocks.
    """
    pool = _ForesightPool(trace, budget_bytes, prices)
    hit_blocks = not_entered = 0
    for request in trace.requests:
        pool.end_leases(request.arrival_s)
        path = request.blocks
        resumed = pool.resumable_blocks(path)
        hit_blocks += resumed
        pool.pass_demand(request, path)
        if held and not pool.hold(request, path):
            not_entered += 1
        else:
            pool.keep_snapshots(request, path, resumed)
    pool.check()
    return _hits(trace, hit_blocks, not_entered)


def _hits(trace: Trace, hit_blocks: int, not_entered: int = 0) -> Hits:
    return Hits(
        hit_tokens=hit_blocks * trace.block_tokens,
        prompt_tokens=sum(request.input_tokens for request in trace.requests),
        not_entered=not_entered,
    )


class _References:
    """How many users each block has, and how many blocks have any. A user refers to a path from the root."""

    __slots__ = ("blocks", "count")

    def __init__(self, block_count: int) -> None:
        self.count: NDArray[np.int32] = np.zeros(block_count, dtype=np.int32)
        self.blocks = 0

    def add(self, path: Blocks) -> None:
        before = self.count[path]
        self.count[path] = before + 1
        self.blocks += len(path) - int(np.count_nonzero(before))

    def remove(self, path: Blocks) -> None:
        after = self.count[path] - 1
        self.count[path] = after
        self.blocks -= len(path) - int(np.count_nonzero(after))


class _Leases:
    """The paths of running requests, which nothing may evict.

    Owner: the pool that it is part of, as of everything in this file.
    """

    __slots__ = ("_ends", "_requests", "references")

    def __init__(self, trace: Trace) -> None:
        self._requests = trace.requests
        self._ends: list[tuple[float, int]] = []
        self.references = _References(trace.block_count)

    def __len__(self) -> int:
        return len(self._ends)

    def take(self, request: Request, path: Blocks, *, until_s: float) -> None:
        self.references.add(path)
        heapq.heappush(self._ends, (until_s, request.index))

    def end_due(self, now_s: float) -> list[Blocks]:
        """End the leases that run to this moment or less far; gives their paths."""
        ended = []
        while self._ends and self._ends[0][0] <= now_s:
            path = self._requests[heapq.heappop(self._ends)[1]].blocks
            self.references.remove(path)
            ended.append(path)
        return ended


class _LruPool:
    """Blocks of one size in a tree, the least recently used leaf evicted first.

    A use of a block is one of its ancestors too, so on any path uses get older and leases fewer from the root down.
    What a request was the last to use is therefore one run of its path, [i, stop), cached up to stop, and it shrinks
    from both ends: later requests take its head, eviction its tail. The order of requests is the order of eviction.
    """

    __slots__ = ("_cached", "_cached_blocks", "_last_user", "_leases", "_requests", "_room_blocks", "_stops")

    def __init__(self, trace: Trace, room_blocks: int) -> None:
        self._requests = trace.requests
        self._room_blocks = room_blocks
        self._leases = _Leases(trace)
        self._cached: NDArray[np.bool_] = np.zeros(trace.block_count, dtype=np.bool_)
        self._cached_blocks = 0
        self._last_user: NDArray[np.int32] = np.full(trace.block_count, -1, dtype=np.int32)
        # Request -> stop of its run, the oldest first. A run that later requests took whole leaves when it is met.
        self._stops: dict[int, int] = {}

    def end_leases(self, now_s: float) -> None:
        self._leases.end_due(now_s)

    def cached_blocks(self, path: Blocks) -> int:
        return int(np.count_nonzero(self._cached[path]))

    def enter(self, request: Request, path: Blocks, *, until_s: float) -> bool:
        """Cache a request's path and hold it until then; False, and nothing is changed, if it has no room."""
        references = self._leases.references
        held_anyway = int(np.count_nonzero(references.count[path]))
        if references.blocks + len(path) - held_anyway > self._room_blocks:
            return False
        self._leases.take(request, path, until_s=until_s)
        new_blocks = len(path) - self.cached_blocks(path)
        self._evict(self._cached_blocks + new_blocks - self._room_blocks)
        self._cached_blocks += new_blocks
        self._cached[path] = True
        self._last_user[path] = request.index
        self._stops[request.index] = len(path)
        return True

    def check(self) -> None:
        assert np.count_nonzero(self._cached) == self._cached_blocks <= max(self._room_blocks, 0)
        assert self._cached[self._leases.references.count > 0].all(), "what is held is cached"
        own = sum(
            int(np.count_nonzero(self._last_user[self._requests[index].blocks[:stop]] == index))
            for index, stop in self._stops.items()
        )
        assert own == self._cached_blocks, "every cached block lies in the run of its last user"

    def _evict(self, blocks: int) -> None:
        """Drop so many blocks that nobody holds."""
        used_up = []
        for index, stop in self._stops.items():
            if blocks <= 0:
                break
            path = self._requests[index].blocks[:stop]
            own = self._last_user[path] == index
            free = int(np.count_nonzero(own & (self._leases.references.count[path] == 0)))
            dropped = min(free, blocks)
            self._cached[path[stop - dropped :]] = False
            self._cached_blocks -= dropped
            self._stops[index] = stop - dropped
            blocks -= dropped
            if dropped == np.count_nonzero(own):
                used_up.append(index)
        for index in used_up:
            del self._stops[index]
        assert blocks <= 0, "what is held has been seen to leave room"


class _ForesightPool:
    """Blocks and snapshots, the snapshot that is used furthest in the future evicted first.

    A point is the block that a snapshot lies behind. Its demand is the next request that shares the tree up to exactly
    this block. That request may fall back to a snapshot higher up, which eviction does not foresee.
    """

    __slots__ = (
        "_budget_bytes",
        "_demand",
        "_following",
        "_full_block_bytes",
        "_kept",
        "_leases",
        "_never",
        "_queue",
        "_requests",
        "_snapshot_bytes",
        "_snapshots",
        "_stored",
    )

    def __init__(self, trace: Trace, budget_bytes: int, prices: Prices) -> None:
        self._requests = trace.requests
        self._budget_bytes = budget_bytes
        self._full_block_bytes = trace.block_tokens * prices.full_token_bytes
        self._snapshot_bytes = prices.snapshot_bytes
        self._leases = _Leases(trace)
        self._stored = _References(trace.block_count)  # users: snapshots and leases
        # Point -> (a request whose path leads to it, the blocks up to it); and the same as a mask.
        self._snapshots: dict[int, tuple[int, int]] = {}
        self._kept: NDArray[np.bool_] = np.zeros(trace.block_count, dtype=np.bool_)
        # Heap of (-demand, point). An entry whose demand has passed lies below those of all snapshots, so none is
        # evicted by it; an entry whose snapshot is gone is skipped.
        self._queue: list[tuple[int, int]] = []
        self._never = len(trace.requests)
        self._demand: NDArray[np.int64] = np.full(trace.block_count, self._never, dtype=np.int64)
        # Request -> the next one after it that leaves the tree where it does.
        self._following = [self._never] * len(trace.requests)
        for request in reversed(trace.requests):
            if request.shared_blocks:
                point = request.blocks[request.shared_blocks - 1]
                self._following[request.index] = int(self._demand[point])
                self._demand[point] = request.index

    def end_leases(self, now_s: float) -> None:
        for path in self._leases.end_due(now_s):
            self._stored.remove(path)

    def resumable_blocks(self, path: Blocks) -> int:
        kept = np.flatnonzero(self._kept[path])
        return int(kept[-1]) + 1 if len(kept) else 0

    def pass_demand(self, request: Request, path: Blocks) -> None:
        """This request's demand is met or missed: its point's next demand counts from now on."""
        if not request.shared_blocks:
            return
        point = int(path[request.shared_blocks - 1])
        demand = self._following[request.index]
        self._demand[point] = demand
        if point not in self._snapshots:
            return
        if demand == self._never:
            self._drop(point)
        else:
            heapq.heappush(self._queue, (-demand, point))

    def hold(self, request: Request, path: Blocks) -> bool:
        """Hold a request's blocks and one window while it runs; False, and nothing is changed, if it has no room."""
        references = self._leases.references
        blocks = references.blocks + len(path) - int(np.count_nonzero(references.count[path]))
        if blocks * self._full_block_bytes + (len(self._leases) + 1) * self._snapshot_bytes > self._budget_bytes:
            return False
        self._leases.take(request, path, until_s=request.arrival_s + request.held_s)
        self._stored.add(path)
        return True

    def keep_snapshots(self, request: Request, path: Blocks, resumed_blocks: int) -> None:
        """Take the snapshots that have a demand among those that the request passes; then evict down to the budget.

        What lies above the point of its resumption it does not compute, so it has no window there.
        """
        computed = path[resumed_blocks:]
        for offset in np.flatnonzero((self._demand[computed] != self._never) & ~self._kept[computed]):
            point, depth = int(computed[offset]), resumed_blocks + int(offset) + 1
            self._snapshots[point] = request.index, depth
            self._kept[point] = True
            self._stored.add(path[:depth])
            heapq.heappush(self._queue, (-int(self._demand[point]), point))
        while self._stored_bytes() > self._budget_bytes:
            _, point = heapq.heappop(self._queue)
            if point in self._snapshots:
                self._drop(point)

    def check(self) -> None:
        users = self._leases.references.count.copy()
        for index, depth in self._snapshots.values():
            users[self._requests[index].blocks[:depth]] += 1
        assert (users == self._stored.count).all()
        assert np.count_nonzero(users) == self._stored.blocks
        assert np.flatnonzero(self._kept).tolist() == sorted(self._snapshots)
        assert all(self._demand[point] != self._never for point in self._snapshots), "a snapshot without a demand"
        assert self._stored_bytes() <= max(self._budget_bytes, 0)

    def _stored_bytes(self) -> int:
        windows = len(self._snapshots) + len(self._leases)
        return self._stored.blocks * self._full_block_bytes + windows * self._snapshot_bytes

    def _drop(self, point: int) -> None:
        index, depth = self._snapshots.pop(point)
        self._kept[point] = False
        self._stored.remove(self._requests[index].blocks[:depth])
