from __future__ import annotations

import random
from pathlib import Path

import pytest

from server.simulator.bounds import Hits, Prices, clairvoyant, one_pool, unlimited
from server.simulator.trace import Trace, read_trace

HEADER = "# block_size=4 source=test\nt_s,session,kind,src,lcp,n,input,output,api_s,think_s\n"
PRICES = Prices(full_token_bytes=5, window_token_bytes=3, window_tokens=6)
BLOCK_BYTES = 4 * (5 + 3)
FULL_BLOCK_BYTES = 4 * 5
SNAPSHOT_BYTES = 6 * 3
PLENTY = 10**9


def make(folder: Path, *rows: tuple[float, int, int, int, float]) -> Trace:
    """A trace of (arrival_s, src, lcp, n, held_s); every prompt has one token beyond its blocks."""
    text = "".join(f"{at},s,main,{src},{lcp},{n},{4 * n + 1},5,{held},-1\n" for at, src, lcp, n, held in rows)
    (folder / "trace.csv").write_text(HEADER + text)
    return read_trace(folder / "trace.csv")


def make_random(folder: Path, rng: random.Random) -> Trace:
    rows: list[tuple[float, int, int, int, float]] = []
    now = 0.0
    for index in range(rng.randrange(1, 40)):
        now += rng.choice([0, 1, 1, 2])
        source = rng.randrange(-1, index) if rng.random() < 0.5 else index - 1
        shared = rng.randint(0, rows[source][3]) if source >= 0 else 0
        rows.append((now, source, shared, shared + rng.randrange(4), rng.choice([0, 1, 2, 5])))
    return make(folder, *rows)


def plain_one_pool(trace: Trace, budget_bytes: int, held: bool) -> tuple[int, int]:
    """(hit blocks, requests not entered), block by block with dictionaries."""
    parent: dict[int, int | None] = {}
    last_use: dict[int, int] = {}  # of the cached blocks
    leases: list[tuple[float, list[int]]] = []
    hit_blocks = not_entered = 0
    for request in trace.requests:
        path = request.blocks.tolist()
        parent.update(zip(path, [None, *path], strict=False))
        leases = [lease for lease in leases if lease[0] > request.arrival_s]
        hit_blocks += sum(block in last_use for block in path)
        own = (request.arrival_s + request.held_s, path)
        locked = {block for _, blocks in [*leases, own] for block in blocks}
        if len(locked) * BLOCK_BYTES > budget_bytes:
            not_entered += 1
            continue
        while len(last_use.keys() | set(path)) * BLOCK_BYTES > budget_bytes:
            leaves = last_use.keys() - {parent[block] for block in last_use} - locked
            del last_use[min(leaves, key=lambda block: last_use[block])]
        last_use.update(dict.fromkeys(path, request.index))
        if held:
            leases.append(own)
    return hit_blocks, not_entered


def plain_clairvoyant(trace: Trace, budget_bytes: int, held: bool) -> tuple[int, int]:
    """(hit blocks, requests not entered), every next use found by a look through the rest of the trace."""
    paths = [request.blocks.tolist() for request in trace.requests]
    points = [
        path[r.shared_blocks - 1] if r.shared_blocks else None for path, r in zip(paths, trace.requests, strict=True)
    ]
    snapshots: dict[int, list[int]] = {}  # point -> the path up to it
    leases: list[tuple[float, list[int]]] = []
    hit_blocks = not_entered = 0

    def size(held_paths: list[list[int]], kept_paths: list[list[int]]) -> int:
        blocks = {block for path in [*held_paths, *kept_paths] for block in path}
        return len(blocks) * FULL_BLOCK_BYTES + (len(held_paths) + len(kept_paths)) * SNAPSHOT_BYTES

    for request, path in zip(trace.requests, paths, strict=True):
        uses = {point: at for at, point in reversed(list(enumerate(points))) if at > request.index}
        leases = [lease for lease in leases if lease[0] > request.arrival_s]
        resumed = max((depth for depth, block in enumerate(path, start=1) if block in snapshots), default=0)
        hit_blocks += resumed
        snapshots = {point: way for point, way in snapshots.items() if point in uses}
        if held:
            own = (request.arrival_s + request.held_s, path)
            if size([blocks for _, blocks in [*leases, own]], []) > budget_bytes:
                not_entered += 1
                continue
            leases.append(own)
        for depth in range(resumed + 1, len(path) + 1):
            if path[depth - 1] in uses:
                snapshots[path[depth - 1]] = path[:depth]
        while size([blocks for _, blocks in leases], list(snapshots.values())) > budget_bytes:
            del snapshots[max(snapshots, key=lambda point: uses[point])]
    return hit_blocks, not_entered


def found(hits: Hits) -> tuple[int, int]:
    assert hits.hit_tokens % 4 == 0
    return hits.hit_tokens // 4, hits.not_entered


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_the_one_pool_cache_does_what_its_plain_definition_does(seed: int, held: bool, tmp_path: Path) -> None:
    rng = random.Random(seed)
    trace = make_random(tmp_path, rng)
    for _ in range(6):
        budget_bytes = rng.randrange(40 * BLOCK_BYTES)
        assert found(one_pool(trace, budget_bytes, PRICES, held)) == plain_one_pool(trace, budget_bytes, held)


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_the_clairvoyant_cache_does_what_its_plain_definition_does(seed: int, held: bool, tmp_path: Path) -> None:
    rng = random.Random(seed)
    trace = make_random(tmp_path, rng)
    for _ in range(6):
        budget_bytes = rng.randrange(30 * FULL_BLOCK_BYTES)
        assert found(clairvoyant(trace, budget_bytes, PRICES, held)) == plain_clairvoyant(trace, budget_bytes, held)


@pytest.mark.parametrize("seed", range(20))
def test_with_plenty_of_memory_every_cache_gives_what_an_unlimited_one_gives(seed: int, tmp_path: Path) -> None:
    trace = make_random(tmp_path, random.Random(seed))
    seen: set[int] = set()
    hit_blocks = 0
    for request in trace.requests:
        hit_blocks += len(seen.intersection(request.blocks.tolist()))
        seen.update(request.blocks.tolist())
    best = unlimited(trace)
    assert best.hit_tokens == 4 * hit_blocks
    assert best.prompt_tokens == sum(4 * request.path_blocks + 1 for request in trace.requests)
    for held in (True, False):
        assert one_pool(trace, PLENTY, PRICES, held) == best
        assert clairvoyant(trace, PLENTY, PRICES, held) == best


@pytest.mark.parametrize("held", [True, False])
def test_without_memory_nothing_is_hit(held: bool, tmp_path: Path) -> None:
    trace = make(tmp_path, (0, -1, 0, 3, 1), (5, 0, 3, 4, 1), (9, 1, 4, 4, 1))
    assert found(one_pool(trace, 0, PRICES, held)) == (0, 3)
    assert clairvoyant(trace, 0, PRICES, held).rate == 0.0


def test_an_empty_trace_has_a_rate_of_zero(tmp_path: Path) -> None:
    trace = make(tmp_path)
    assert unlimited(trace).rate == 0.0
    assert one_pool(trace, PLENTY, PRICES).rate == 0.0
    assert clairvoyant(trace, PLENTY, PRICES).rate == 0.0


def test_the_rate_is_hit_tokens_over_all_tokens_of_the_prompts(tmp_path: Path) -> None:
    trace = make(tmp_path, (0, -1, 0, 3, 1), (5, 0, 2, 3, 1))
    assert unlimited(trace).rate == 2 * 4 / (13 + 13)


def test_a_round_through_more_prompts_than_fit_defeats_lru_and_not_foresight(tmp_path: Path) -> None:
    """Three prompts in turn where two fit: each is evicted just before it comes back."""
    first = [(float(at), -1, 0, 2, 0.0) for at in range(3)]
    again = [(float(at), at - 3, 2, 2, 0.0) for at in range(3, 12)]
    trace = make(tmp_path, *first, *again)
    assert one_pool(trace, 4 * BLOCK_BYTES, PRICES, held=False).rate == 0.0
    room_for_two = 2 * (2 * FULL_BLOCK_BYTES + SNAPSHOT_BYTES)
    assert clairvoyant(trace, room_for_two, PRICES).hit_tokens >= unlimited(trace).hit_tokens / 2


def test_a_running_request_keeps_its_blocks_and_a_finished_one_gives_them_up(tmp_path: Path) -> None:
    """Two blocks of room. The prompt that comes between two equal ones enters only where the first is not held."""
    rows = [(0.0, -1, 0, 2, 5.0), (1.0, -1, 0, 1, 1.0), (2.0, 0, 2, 2, 1.0)]
    trace = make(tmp_path, *rows)
    assert found(one_pool(trace, 2 * BLOCK_BYTES, PRICES, held=True)) == (2, 1)
    assert found(one_pool(trace, 2 * BLOCK_BYTES, PRICES, held=False)) == (1, 0)


def test_a_lease_that_ends_at_an_arrival_is_over_by_then(tmp_path: Path) -> None:
    trace = make(tmp_path, (0.0, -1, 0, 2, 1.0), (1.0, -1, 0, 2, 1.0))
    assert one_pool(trace, 2 * BLOCK_BYTES, PRICES).not_entered == 0


def test_a_prompt_too_large_for_the_pool_hits_and_leaves_the_rest_alone(tmp_path: Path) -> None:
    trace = make(tmp_path, (0, -1, 0, 2, 0), (1, 0, 2, 9, 0), (2, 0, 2, 2, 0))
    assert found(one_pool(trace, 3 * BLOCK_BYTES, PRICES, held=False)) == (2 + 2, 1)


def test_a_hit_needs_memory_for_its_window_too(tmp_path: Path) -> None:
    trace = make(tmp_path, (0, -1, 0, 3, 0), (1, 0, 2, 3, 0))
    needed = 2 * FULL_BLOCK_BYTES + SNAPSHOT_BYTES
    assert found(clairvoyant(trace, needed, PRICES)) == (2, 0)
    assert found(clairvoyant(trace, needed - 1, PRICES)) == (0, 0)


def test_what_is_never_used_again_costs_nothing(tmp_path: Path) -> None:
    """The long tails of both prompts have no future, so the smallest memory that holds the shared head is enough."""
    trace = make(tmp_path, (0, -1, 0, 50, 0), (1, 0, 1, 50, 0), (2, 1, 1, 50, 0))
    assert found(clairvoyant(trace, FULL_BLOCK_BYTES + SNAPSHOT_BYTES, PRICES)) == (2, 0)


def test_a_window_above_the_point_of_resumption_is_lost_for_good(tmp_path: Path) -> None:
    """The last request wants the window behind the first block. It gave way to the one that is used sooner, and the
    request in between resumed below it, so nothing up there was computed again."""
    trace = make(tmp_path, (0, -1, 0, 3, 0), (1, 0, 3, 4, 0), (2, 0, 1, 2, 0))
    assert found(clairvoyant(trace, 3 * FULL_BLOCK_BYTES + SNAPSHOT_BYTES, PRICES)) == (3, 0)
    assert found(clairvoyant(trace, 3 * FULL_BLOCK_BYTES + 2 * SNAPSHOT_BYTES, PRICES)) == (3 + 1, 0)
