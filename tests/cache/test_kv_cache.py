from __future__ import annotations

import random

import pytest

from server.cache.kv_cache import NOTHING_CACHED, KVCache, PageDemand
from server.config import KVLayout
from server.step import PageKind, SequenceId, SlotId, StepId


def layout(*, page_tokens: int = 4, window_tokens: int = 7, slabs: int = 8, window: int = 5) -> KVLayout:
    return KVLayout(
        page_tokens=page_tokens,
        window_tokens=window_tokens,
        full_page_bytes=3,
        window_page_bytes=window,
        slab_bytes=15,
        slab_count=slabs,
    )


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
@pytest.mark.parametrize("window_tokens", [1, 7, 16, 33])
@pytest.mark.parametrize("seed", range(6))
def test_random_lives_hold_exactly_the_pages_that_a_future_query_can_see(
    page_tokens: int, window_tokens: int, seed: int
) -> None:
    rng = random.Random(seed)
    cache = KVCache(layout(page_tokens=page_tokens, window_tokens=window_tokens, slabs=40))
    computed: dict[SequenceId, int] = {}
    next_id = 0
    steps = 0
    for _ in range(150):
        action = rng.random()
        if action < 0.2 and len(computed) < 4:
            sequence = SequenceId(next_id)
            next_id += 1
            assert cache.open(sequence, SlotId(next_id % 5)) == NOTHING_CACHED
            computed[sequence] = 0
        elif action < 0.8 and computed:
            sequence = rng.choice(list(computed))
            stop = computed[sequence] + rng.randint(1, 40)
            if not cache.reserve(sequence, stop).granted:
                continue
            step = StepId(steps)
            steps += 1
            cache.begin_step(step)
            if rng.random() < 0.1:
                cache.close(sequence, step)
                del computed[sequence]
                cache.check()
                cache.end_step(step)
            else:
                cache.end_step(step)
                cache.commit(sequence, stop)
                computed[sequence] = stop
        elif computed:
            cache.close(computed.popitem()[0], None)
        cache.check()
        for sequence, done in computed.items():
            full = cache.pages_of(sequence, PageKind.FULL)
            window = cache.pages_of(sequence, PageKind.WINDOW)
            assert set(full) == set(range(-(-done // page_tokens)))
            # Plain definition: the next query is at `done` and sees positions done - W and later.
            seen = {position // page_tokens for position in range(max(0, done - window_tokens), done)}
            assert seen <= set(window)
            assert set(window) - seen <= {(done - window_tokens) // page_tokens if done >= window_tokens else 0}
    for sequence in list(computed):
        cache.close(sequence, None)
    cache.check()
    assert cache.usage(PageKind.FULL) == cache.usage(PageKind.WINDOW) == 0


def test_pages_wait_for_the_last_step_that_uses_them_and_for_no_later_one() -> None:
    """Three steps in flight; each sequence has a row in one or two of them."""
    cache = KVCache(layout(slabs=3, window=0, window_tokens=0))  # fifteen pages of four tokens
    assert cache.layout.full_pages_per_slab * 3 == 15
    first, both, last, waiting = (SequenceId(n) for n in range(4))
    for sequence in (first, both, last):
        cache.open(sequence, SlotId(sequence))
        assert cache.reserve(sequence, 20).granted
    for step in range(3):
        cache.begin_step(StepId(step))
    assert cache.steps_in_flight == 3
    cache.close(both, StepId(1))
    cache.close(first, StepId(0))
    cache.close(last, StepId(2))
    cache.open(waiting, SlotId(3))
    for step, pages in enumerate([5, 10, 15]):
        assert not cache.reserve(waiting, 4 * pages - 16).granted, "the step that uses them is in flight"
        cache.end_step(StepId(step))
        cache.check()
        assert cache.reserve(waiting, 4 * pages).granted
    assert cache.steps_in_flight == 0
    cache.close(waiting, StepId(2))
    cache.check()
    assert cache.usage(PageKind.FULL) == 0, "a step that is over keeps nothing back"


def test_window_pages_that_no_step_in_flight_sees_go_back_at_once() -> None:
    cache = KVCache(layout(slabs=8, page_tokens=4, window_tokens=4))
    sequence = SequenceId(0)
    cache.open(sequence, SlotId(0))
    for step, stop in enumerate([16, 32]):
        assert cache.reserve(sequence, stop).granted
        cache.begin_step(StepId(step))
    cache.end_step(StepId(0))
    cache.commit(sequence, 16)  # the step in flight begins at 16 and sees from 12 on
    assert list(cache.pages_of(sequence, PageKind.WINDOW)) == [3, 4, 5, 6, 7]
    cache.check()
    assert not cache._quarantine[StepId(1)]


def test_pages_are_moved_only_while_no_step_is_in_flight() -> None:
    cache = KVCache(layout(slabs=4, window_tokens=4))
    first, second = SequenceId(1), SequenceId(2)
    for sequence in (first, second):
        cache.open(sequence, SlotId(sequence))
        assert cache.reserve(sequence, 12).granted
    for sequence in (first, second):
        cache.commit(sequence, 12)
    for stop in (16, 20, 24, 28):
        assert cache.reserve(first, stop).granted
        cache.commit(first, stop)
    cache.begin_step(StepId(0))
    refused = cache.reserve(first, 32)
    assert (refused.granted, refused.moves, refused.writes) == (False, (), ())
    cache.end_step(StepId(0))
    granted = cache.reserve(first, 32)
    assert granted.granted and granted.moves
    cache.check()


def test_a_slab_is_emptied_by_moves_when_the_other_kind_needs_it() -> None:
    cache = KVCache(layout(slabs=4, window_tokens=4))
    first, second = SequenceId(1), SequenceId(2)
    for sequence in (first, second):
        cache.open(sequence, SlotId(sequence))
    assert cache.reserve(first, 12).granted  # window slab 1 is full with its three pages
    assert cache.reserve(second, 12).granted  # and so is window slab 3
    for sequence in (first, second):
        cache.commit(sequence, 12)  # one window page each remains, in two slabs
    assert cache.held_pages(PageKind.WINDOW) == 2
    for stop in (16, 20, 24, 28):  # ten full pages fill two slabs; the window pages stay in two slabs, nearly empty
        assert cache.reserve(first, stop).moves == ()
        cache.commit(first, stop)
    before = {s: cache.pages_of(s, PageKind.WINDOW) for s in (first, second)}
    reservation = cache.reserve(first, 32)
    assert reservation.granted
    assert [move.kind for move in reservation.moves] == [PageKind.WINDOW]
    moved = {move.source: move.target for move in reservation.moves}
    for sequence in (first, second):
        after = cache.pages_of(sequence, PageKind.WINDOW)
        assert {i: after[i] for i in before[sequence]} == {i: moved.get(p, p) for i, p in before[sequence].items()}
    assert [w.pages for w in reservation.writes[:1]] == [tuple(moved.values())], "the table follows the page"
    cache.check()


@pytest.mark.parametrize(("chunk", "tokens"), [(1, 100), (7, 100), (64, 500), (500, 500)])
@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_the_peak_demand_is_never_exceeded(chunk: int, tokens: int, page_tokens: int) -> None:
    cache = KVCache(layout(page_tokens=page_tokens, slabs=2000))
    sequence = SequenceId(0)
    cache.open(sequence, SlotId(0))
    peak = cache.peak_demand(tokens, chunk)
    most = 0
    for start in range(0, tokens, chunk):
        stop = min(tokens, start + chunk)
        assert cache.reserve(sequence, stop).granted
        most = max(most, cache.held_pages(PageKind.WINDOW))
        cache.commit(sequence, stop)
    assert cache.held_pages(PageKind.FULL) == peak.full
    assert peak.window - 1 <= most <= peak.window or most == peak.full


def test_the_longest_usable_sequence_fits_and_one_token_more_does_not() -> None:
    for slabs in range(2, 12):
        cache = KVCache(layout(slabs=slabs))
        usable = cache.usable_tokens(10_000, 8)
        assert cache.fits(cache.peak_demand(usable, 8))
        assert not cache.fits(cache.peak_demand(usable + 1, 8))
    assert KVCache(layout(slabs=1000)).usable_tokens(100, 8) == 100


def test_a_model_without_window_layers_uses_one_kind_only() -> None:
    cache = KVCache(layout(window=0, window_tokens=0))
    cache.open(SequenceId(0), SlotId(0))
    reservation = cache.reserve(SequenceId(0), 40)
    assert reservation.granted
    assert {write.kind for write in reservation.writes} == {PageKind.FULL}
    cache.commit(SequenceId(0), 40)
    assert cache.peak_demand(40, 8) == PageDemand(full=10, window=0)
    cache.check()
