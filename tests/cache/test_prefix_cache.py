"""The cache with its prefix tree, on a device that knows what every value was computed from."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from server.cache.kv_cache import CachePolicy, KVCache, Resume
from server.cache.retention import Ending
from server.rebuild import shape_of
from server.step import PageKind, SequenceId, SlotId, StepId
from tests.cache.memory import Device, layout_of, prefix_of

SLOTS = 5
ACTIONS = 1_700
"""Of each of 60 random lives: 102,000 in all."""


@dataclass
class Running:
    slot: SlotId
    namespace: object
    tokens: list[int]
    resume: Resume
    computed: int
    prompt: int


@dataclass
class Life:
    """Random sequences on one cache, computed on the device as they come."""

    cache: KVCache
    rng: random.Random
    device: Device = field(init=False)
    running: dict[SequenceId, Running] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    opened: int = 0
    now_s: float = 0.0
    talks: list[list[int]] = field(default_factory=lambda: [[]])

    def __post_init__(self) -> None:
        self.device = Device(self.cache.layout)

    def act(self) -> None:
        self.now_s += self.rng.expovariate(0.1)
        action = self.rng.random()
        if action < 0.25 and len(self.running) < SLOTS:
            self.open()
        elif action < 0.9 and self.running:
            self.step()
        elif action < 0.96 and self.running:
            self.close(self.rng.choice(list(self.running)), None)
        elif action < 0.98:
            self.lose_a_window()
        elif action > 0.995:
            self.cache.flush()

    def lose_a_window(self) -> None:
        """As when memory is short: whoever comes back there has to rebuild it."""
        snapshots = [each for node in self.cache._tree.nodes() for each in node.snapshots.values()]
        if snapshots:
            self.cache._evict_snapshot(self.rng.choice(snapshots))
            self.seen["windows lost"] += 1

    def open(self) -> None:
        rng, page_tokens = self.rng, self.cache.layout.page_tokens
        tokens = list(rng.choice(self.talks))  # a talk goes on, is sent again, or branches somewhere
        if rng.random() < 0.3:
            tokens = tokens[: rng.randint(0, len(tokens))]
        tokens += rng.choices(range(2), k=rng.randint(1, 4 * page_tokens))
        taken = {each.slot for each in self.running.values()}
        slot = SlotId(rng.choice([slot for slot in range(SLOTS) if slot not in taken]))
        namespace = rng.choice([None, None, None, "salt"])
        marks = rng.sample(range(1, 2 + len(tokens) // page_tokens), k=1)
        prefix = prefix_of(tokens, len(tokens), self.cache.layout, namespace, marks)
        sequence = SequenceId(self.opened)
        self.opened += 1
        self.device.open(slot)
        resume = self.cache.open(sequence, slot, prefix, self.now_s)
        assert 0 <= resume.start <= resume.cached_tokens < len(tokens)
        assert resume.cached_tokens % page_tokens == 0
        assert resume.saved_tokens <= resume.cached_tokens
        self.seen["hits"] += resume.cached_tokens > 0
        self.seen["rebuilds"] += resume.start < resume.cached_tokens
        self.running[sequence] = Running(slot, namespace, tokens, resume, resume.start, len(tokens))

    def step(self) -> None:
        """A chunk of one sequence; somebody may end while it is in flight."""
        rng = self.rng
        sequence = rng.choice(list(self.running))
        run = self.running[sequence]
        if run.computed == len(run.tokens):
            run.tokens.append(rng.randrange(2))
        most = len(run.tokens) - run.computed
        stop = run.computed + rng.randint(1, most)
        reservation = self.cache.reserve(sequence, stop, self.now_s)
        if not reservation.granted:
            self.seen["refused"] += 1
            self.close(rng.choice(list(self.running)), None)
            return
        self.seen["moves"] += len(reservation.moves)
        step = StepId(self.steps)
        self.steps += 1
        self.cache.begin_step(step)
        if rng.random() < 0.2:
            ended = rng.choice(list(self.running))
            self.close(ended, step if ended == sequence else None)
        self.device.prepare(reservation)
        self.device.compute(run.slot, run.namespace, run.tokens, run.computed, stop, run.resume)
        self.cache.end_step(step)
        if sequence in self.running:
            run.computed = stop
            self.cache.commit(sequence, stop, self.now_s)

    def close(self, sequence: SequenceId, last_step: StepId | None) -> None:
        run = self.running.pop(sequence)
        self.cache.close(sequence, last_step, self.now_s, self.rng.choice(list(Ending)))
        if run.namespace is None and len(run.tokens) < 40 * self.cache.layout.page_tokens:
            self.talks.append(run.tokens)
            del self.talks[: len(self.talks) - 8]


@pytest.mark.parametrize("rebuild", [True, False], ids=["rebuild", "resume"])
@pytest.mark.parametrize("page_tokens", [1, 4, 16])
@pytest.mark.parametrize("window_tokens", [0, 1, 7, 16, 33])
@pytest.mark.parametrize("seed", range(2))
def test_random_lives_read_only_what_their_own_tokens_made(
    page_tokens: int, window_tokens: int, rebuild: bool, seed: int
) -> None:
    rng = random.Random(f"{page_tokens} {window_tokens} {rebuild} {seed}")
    shape = shape_of([False, True, True, False, True], window_tokens=window_tokens, mtp_layers=seed)
    cache = KVCache(
        layout_of(page_tokens, window_tokens, rng.randint(20, 60)), rebuild=shape, policy=CachePolicy(rebuild=rebuild)
    )
    life = Life(cache, rng)
    for number in range(ACTIONS):
        life.act()
        if number % 5 == 0:
            cache.check()
    for sequence in list(life.running):
        life.close(sequence, None)
    cache.check()
    cache.flush()
    cache.check()
    assert cache.usage(PageKind.FULL) == cache.usage(PageKind.WINDOW) == 0
    assert life.seen["hits"] > 50
    assert sum(cache.evicted.values()) > 0
    assert life.seen["windows lost"] > 0 or not window_tokens
    assert bool(life.seen["rebuilds"]) <= (rebuild and window_tokens > 0)
