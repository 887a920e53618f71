"""Who waits, in the order of what would have to be computed for each: against looking everybody up again."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from server.cache.kv_cache import CachePolicy, KVCache, Prefix
from server.rebuild import shape_of
from server.step import SequenceId, SlotId, StepId
from tests.cache.memory import layout_of, prefix_of

QUEUES = ("one", "other")


@dataclass
class Waiting:
    base: float
    prefix: Prefix
    queue: str
    tokens: list[int]


@dataclass
class Room:
    """Sequences that wait, are opened, computed and closed at random on one small cache."""

    cache: KVCache
    rng: random.Random
    waiting: dict[SequenceId, Waiting] = field(default_factory=dict)
    running: dict[SequenceId, tuple[int, int]] = field(default_factory=dict)
    """By sequence: computed tokens, and how many there are."""
    talks: list[list[int]] = field(default_factory=lambda: [[]])
    count: int = 0
    now_s: float = 0.0
    admitted: int = 0
    admitted_with_hits: int = 0

    def act(self) -> None:
        self.now_s += self.rng.expovariate(0.1)
        action = self.rng.random()
        if action < 0.35 and len(self.waiting) < 40:
            self.arrive()
        elif action < 0.45 and self.waiting:
            self.cache.waiting.remove(gone := self.rng.choice(list(self.waiting)))
            del self.waiting[gone]
        elif action < 0.65 and self.waiting and len(self.running) < 5:
            self.admit(self.rng.choice(QUEUES))
        elif action < 0.92 and self.running:
            self.compute(self.rng.choice(list(self.running)))
        elif action < 0.97 and self.running:
            self.close(self.rng.choice(list(self.running)))
        elif action < 0.975:
            self.cache.waiting.rekey(self.other_base)
        elif action < 0.99:
            snapshots = [each for node in self.cache._tree.nodes() for each in node.snapshots.values()]
            if snapshots:
                self.cache._evict_snapshot(self.rng.choice(snapshots))
        elif action > 0.998:
            self.cache.flush()

    def other_base(self, sequence: SequenceId) -> float:
        waiting = self.waiting[sequence]
        waiting.base = len(waiting.tokens) + self.rng.choice([0.0, 11.0, 50.0])
        return waiting.base

    def arrive(self) -> None:
        rng, layout = self.rng, self.cache.layout
        tokens = list(rng.choice(self.talks))
        if rng.random() < 0.4:
            tokens = tokens[: rng.randint(0, len(tokens))]
        tokens += rng.choices(range(2), k=rng.randint(1, 5 * layout.page_tokens))
        self.talks = [*self.talks[-7:], tokens] if len(tokens) < 40 * layout.page_tokens else self.talks
        marks = rng.sample(range(1, 2 + len(tokens) // layout.page_tokens), k=1)
        namespace = rng.choice([None, None, "salt"])
        prefix = prefix_of(tokens, len(tokens), layout, namespace, marks)
        base, queue = len(tokens) + rng.choice([0.0, 7.0, 30.0]), rng.choice(QUEUES)
        sequence = SequenceId(self.count)
        self.count += 1
        self.waiting[sequence] = Waiting(base, prefix, queue, tokens)
        self.cache.expect(sequence, base, prefix, queue)

    def admit(self, queue: str) -> None:
        first = self.cache.waiting.first(queue)
        if first is None:
            return
        sequence, saved = first
        waiting = self.waiting.pop(sequence)
        self.cache.waiting.remove(sequence)
        resume = self.cache.open(sequence, SlotId(0), waiting.prefix, self.now_s)
        assert resume.saved_tokens == saved, "what was promised is what is found"
        self.running[sequence] = (resume.start, len(waiting.tokens))
        self.admitted += 1
        self.admitted_with_hits += saved > 0

    def compute(self, sequence: SequenceId) -> None:
        done, total = self.running[sequence]
        stop = min(total, done + self.rng.randint(1, 4 * self.cache.layout.page_tokens))
        if stop == done or not self.cache.reserve(sequence, stop, self.now_s).granted:
            self.close(self.rng.choice(list(self.running)))
            return
        self.cache.begin_step(StepId(0))
        self.cache.end_step(StepId(0))
        self.cache.commit(sequence, stop, self.now_s)
        self.running[sequence] = (stop, total)

    def close(self, sequence: SequenceId) -> None:
        del self.running[sequence]
        self.cache.close(sequence, None, self.now_s)

    def saved(self, prefix: Prefix) -> float:
        """By the definition: the match, the last snapshot in it, and what it takes to go on from there."""
        tree, page_tokens = self.cache._tree, self.cache.layout.page_tokens
        if not tree.has(prefix.namespace):
            return 0.0
        known = tree.match(tree.root(prefix.namespace), prefix.keys(0, prefix.pages))
        point = min(known.pages, prefix.resumable)
        if not self.cache.layout.has_window or not point:
            return point * page_tokens
        snapshot = tree.deepest_snapshot(known.node, point)
        safe = snapshot.point if snapshot is not None else 0
        if not self.cache._prices.rebuild.is_window:
            return safe * page_tokens
        return point * page_tokens - self.cache._prices.rebuild.work_tokens((point - safe) * page_tokens)

    def check(self) -> None:
        index = self.cache.waiting
        assert len(index) == len(self.waiting)
        for queue in QUEUES:
            keys = {
                sequence: (each.base - self.saved(each.prefix), sequence)
                for sequence, each in self.waiting.items()
                if each.queue == queue
            }
            first = index.first(queue)
            if not keys:
                assert first is None
                continue
            assert first is not None
            least = min(keys, key=lambda sequence: keys[sequence])
            assert (first[0], first[1]) == (least, self.saved(self.waiting[least].prefix))
        for sequence in self.rng.sample(sorted(self.waiting), k=min(3, len(self.waiting))):
            assert index.saved(sequence) == self.saved(self.waiting[sequence].prefix)


@pytest.mark.parametrize("rebuild", [True, False], ids=["rebuild", "resume"])
@pytest.mark.parametrize("window_tokens", [0, 1, 7, 16, 33])
@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_the_first_in_line_is_whoever_looking_everybody_up_again_would_find(
    page_tokens: int, window_tokens: int, rebuild: bool
) -> None:
    rng = random.Random(f"{page_tokens} {window_tokens} {rebuild}")
    shape = shape_of((False, True, True, False, True), window_tokens=window_tokens, mtp_layers=0)
    room = Room(
        KVCache(
            layout_of(page_tokens, window_tokens, slabs=rng.choice([20, 60])),
            rebuild=shape,
            policy=CachePolicy(rebuild=rebuild),
        ),
        rng,
    )
    for _ in range(1_500):
        room.act()
        room.check()
    room.cache.check()
    assert room.admitted_with_hits > 20
    assert room.admitted > room.admitted_with_hits


def full_of(waiting: int, *, shared_pages: int, slabs: int = 4_000) -> KVCache:
    """So many wait whose prompts begin alike, then differ, with nothing cached."""
    cache = KVCache(layout_of(16, 7, slabs), rebuild=shape_of((False, True), window_tokens=7, mtp_layers=0))
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 100, size=(shared_pages, 16))
    for number in range(waiting):
        ids = np.concatenate((shared, rng.integers(0, 100, size=(4, 16)), [[number] * 16]))
        prefix = Prefix(keys=lambda first, stop, ids=ids: ids[first:stop], pages=len(ids), resumable=len(ids))  # type: ignore[misc]
        cache.expect(SequenceId(number), float(len(ids) * 16 + number % 977), prefix)
    return cache


def compare(cache: KVCache, pages: int) -> int:
    """Compute the first one's prompt; how many comparisons that took."""
    before = cache.waiting.matches
    sequence = cache.waiting.first()
    assert sequence is not None
    place = cache.waiting._waiters[sequence[0]].place
    assert place is not None
    keys, each = [], place
    while each is not None:
        keys.append(each.keys)
        each = each.parent  # type: ignore[assignment]
    ids = np.concatenate([part for part in reversed(keys) if len(part)])
    prefix = Prefix(keys=lambda first, stop: ids[first:stop], pages=len(ids), resumable=len(ids) - 1)
    cache.waiting.remove(sequence[0])
    cache.open(sequence[0], SlotId(0), prefix)
    for page in range(1, pages + 1):
        assert cache.reserve(sequence[0], page * 16).granted
        cache.commit(sequence[0], page * 16)
        assert cache.waiting.first() is not None
    return cache.waiting.matches - before


def test_pages_that_ten_thousand_wait_for_are_compared_once_and_not_for_each() -> None:
    """Forty steps, each of which brings a page that all who wait begin with."""
    cache = full_of(10_000, shared_pages=40)
    assert compare(cache, 40) < 100
    first = cache.waiting.first()
    assert first is not None and first[1] == 40 * 16 - 7, "seven positions are run again for the window"


def test_who_leaves_leaves_nothing_behind() -> None:
    cache = full_of(500, shared_pages=3)
    compare(cache, 3)
    for number in range(500):
        cache.waiting.remove(SequenceId(number))
    assert len(cache.waiting) == 0 and cache.waiting.first() is None
    assert not cache.waiting._queues and not cache.waiting._watched


def test_entries_do_not_pile_up_while_many_come_and_go() -> None:
    cache = full_of(10, shared_pages=2)
    prefix = Prefix(keys=lambda first, stop: np.zeros((stop - first, 16), dtype=np.int64), pages=5, resumable=5)
    for number in range(1_000, 6_000):
        cache.expect(SequenceId(number), 0.0, prefix)
        assert cache.waiting.first() == (number, 0.0)
        cache.waiting.remove(SequenceId(number))
    (queue,) = cache.waiting._queues.values()
    assert len(queue.top) < 300
    assert len(queue.roots[None].heap) < 300


def test_they_do_not_pile_up_either_while_nobody_asks_who_is_first() -> None:
    cache = full_of(1, shared_pages=2)
    for number in range(1_000, 6_000):
        prefix = Prefix(
            keys=lambda first, stop, number=number: np.full((stop - first, 16), number),  # type: ignore[misc]
            pages=5,
            resumable=5,
            namespace=number % 7,
        )
        cache.expect(SequenceId(number), 0.0, prefix)
        cache.waiting.remove(SequenceId(number))
    (queue,) = cache.waiting._queues.values()
    assert len(queue.top) < 300 and len(queue.groups) == 1


def test_prompts_that_hold_one_another_take_no_longer_than_their_depth() -> None:
    """Each one a page longer than the last, and the longest first: every one that leaves changes all above it."""
    cache = full_of(0, shared_pages=0)
    depth = 300
    ids = np.arange(depth * 16).reshape(-1, 16)
    prefix = [
        Prefix(keys=lambda first, stop: ids[first:stop], pages=pages, resumable=pages) for pages in range(1, depth + 1)
    ]
    for number, each in enumerate(prefix):
        cache.expect(SequenceId(number), float(-number), each)
    before = next(cache.waiting._numbers)
    for number in reversed(range(depth)):
        first = cache.waiting.first()
        assert first is not None and first[0] == number
        cache.waiting.remove(first[0])
    assert next(cache.waiting._numbers) - before < 3 * depth * depth / 2, "entries that were made anew"
