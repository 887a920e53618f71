"""What is worth keeping: rates of return as the plain definition has them, and the order that follows."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from server.cache.eviction import SPARE_ENTRIES, EvictionQueue
from server.cache.retention import (
    AGES_S,
    USE_STEPS,
    Ending,
    Prices,
    Returns,
    Reuse,
    crossing,
    returns_of,
    tip,
    turn_marks,
)
from server.cache.return_history import ReturnHistory
from server.rebuild import shape_of

CLASSES = [
    *(crossing(uses) for uses in USE_STEPS),
    *(tip(turn, Ending.UNKNOWN, added) for turn in (1, 2, 5, 30) for added in (0, 600, 3_000, 10**6)),
    tip(1, Ending.SAID, 0),
    tip(1, Ending.CALLED, 0),
]


def return_rate(age_s: float, reuse: Reuse) -> float:
    """Of a class that nothing was learned of."""
    return ReturnHistory().rate(reuse)(age_s)


@pytest.mark.parametrize("reuse", CLASSES)
def test_those_who_came_back_grow_to_their_share(reuse: Reuse) -> None:
    returns = returns_of(reuse)
    back = [returns.came_back(age) for age in AGES_S]
    assert back == sorted(back) and back[0] == 0
    assert 0 < returns.share < 1 and returns.share - back[-1] < 0.02
    assert sum(weight for weight, _, _ in returns.times) == pytest.approx(1)


def test_half_of_those_who_return_do_by_the_median() -> None:
    assert Returns(share=0.6, times=((1.0, 42.0, 1.3),)).came_back(42.0) == pytest.approx(0.3)


@pytest.mark.parametrize("reuse", CLASSES)
@pytest.mark.parametrize("age_s", [0.0, 3.0, 100.0, 5_000.0])
def test_the_rate_is_the_best_that_any_time_of_holding_gives(reuse: Reuse, age_s: float) -> None:
    """By a fine sum over the time held, for many times of giving up."""
    returns = returns_of(reuse)
    at = max(age for age in AGES_S if age <= age_s)
    best = 0.0
    for until in (age for age in AGES_S if age > at):
        steps = 200
        edges = [at + (until - at) * (n / steps) ** 3 for n in range(steps + 1)]
        held = sum((b - a) * (1 - returns.came_back((a + b) / 2)) for a, b in pairwise(edges))
        best = max(best, (returns.came_back(until) - returns.came_back(at)) / held)
    assert return_rate(age_s, reuse) == pytest.approx(best, rel=0.1, abs=1e-9)


def test_what_the_traces_taught() -> None:
    def at(age_s: float, reuse: Reuse) -> float:
        return return_rate(age_s, reuse)

    called, said = tip(3, Ending.CALLED, 500), tip(3, Ending.SAID, 500)
    assert at(5.0, called) > 5 * at(5.0, said), "a tool's result comes in seconds"
    assert at(60.0, tip(10, Ending.UNKNOWN, 600)) > 2 * at(60.0, tip(1, Ending.UNKNOWN, 600))
    assert at(60.0, tip(2, Ending.UNKNOWN, 600)) > 2 * at(60.0, tip(2, Ending.UNKNOWN, 9_000))
    assert at(60.0, crossing(20)) > at(60.0, crossing(2)) > at(60.0, crossing(1))
    human = tip(1, Ending.UNKNOWN, 600)
    assert at(30.0, human) > 0.9 * at(0.0, human), "who has just left is not back at once, and is worth the wait"


def test_classes_are_few() -> None:
    made = {tip(turn, ending, added) for turn in range(1, 300) for ending in Ending for added in range(0, 300_000, 777)}
    made |= {crossing(uses) for uses in range(1, 1_000)}
    assert len(made) <= 64


# --- prices -------------------------------------------------------------------------------------------------------


def prices() -> Prices:
    return Prices(
        page_tokens=64,
        snapshot_pages=2,
        full_page_bytes=64 * 51_200,
        window_page_bytes=64 * 322_560,
        rebuild=shape_of([n % 7 > 0 for n in range(70)], window_tokens=128, mtp_layers=3),
    )


def test_a_snapshot_costs_as_much_as_hundreds_of_tokens_of_full_kv() -> None:
    assert prices().snapshot_tokens == pytest.approx(128 * 322_560 / 51_200)


def test_a_run_without_a_window_is_worth_what_a_rebuild_leaves() -> None:
    each = prices()
    span = each.rebuild.span_tokens
    assert each.leaf_density(1_000_000, is_safe=True) == pytest.approx(1, abs=0.001)
    assert each.leaf_density(100 * span, is_safe=False) == pytest.approx(1, abs=0.02)
    assert each.leaf_density(64, is_safe=False) < 0.1, "getting its window back is as much work as computing it"
    assert each.snapshot_density(0) == 0 < each.snapshot_density(500) < each.snapshot_density(10**6)


def test_where_windows_are_rebuilt_no_snapshots_are_taken_on_the_way() -> None:
    """Where they cannot be, one stands for some times its price: 16 K tokens for this model, a quarter for a quarter of
    the window."""
    each = prices()
    assert each.spacing_tokens == 0
    never = replace(each, rebuild=shape_of([], window_tokens=0, mtp_layers=0))
    assert never.spacing_tokens == round(20 * 128 * 322_560 / 51_200)
    quarter = replace(never, window_page_bytes=never.window_page_bytes // 4)
    assert quarter.spacing_tokens == pytest.approx(never.spacing_tokens / 4, abs=1)


@pytest.mark.parametrize(
    ("ends", "marks"),
    [([], ()), ([3], ()), ([5], (1,)), ([9, 17], (2, 4)), ([9, 17, 40, 41, 83], (2, 10, 20)), ([40, 41, 43], (10,))],
)
def test_snapshots_stand_where_the_first_and_the_last_two_turns_end(ends: list[int], marks: tuple[int, ...]) -> None:
    assert turn_marks(np.array(ends, dtype=np.int64), 4) == marks


# --- the queue ----------------------------------------------------------------------------------------------------


class Thing:
    def __init__(self, name: int, reuse: Reuse) -> None:
        self.name, self.reuse = name, reuse
        self.queued: object = None


@pytest.mark.parametrize("seed", range(20))
def test_the_queue_gives_what_a_look_at_everything_would(seed: int) -> None:
    """With a rate that falls with age, and densities that are steps of the queue."""
    rng = random.Random(seed)

    def rate(age_s: float, reuse: Reuse) -> float:
        return (1 + reuse.turn) / (1.0 + age_s)

    queue = EvictionQueue(lambda reuse: lambda age_s: rate(age_s, reuse))
    things = [Thing(n, Reuse(turn=rng.choice([1, 2, 4]))) for n in range(30)]
    queued: dict[int, tuple[float, float]] = {}
    now = 0.0
    for _ in range(300):
        now += rng.random()
        thing = rng.choice(things)
        if rng.random() < 0.6:
            used, density = now - rng.random(), 2.0 ** (rng.randint(-6, 6) / 2)
            queue.offer(thing, last_used_s=used, density=density, reuse=thing.reuse)
            queued[thing.name] = (used, density)
        else:
            queue.withdraw(thing)
            queued.pop(thing.name, None)
        worst = queue.worst(now)
        if not queued:
            assert worst is None
            continue
        worth = {name: rate(now - used, things[name].reuse) * density for name, (used, density) in queued.items()}
        assert isinstance(worst, Thing)
        assert worth[worst.name] == pytest.approx(min(worth.values()))


def test_the_queue_holds_no_more_than_what_is_queued_and_some() -> None:
    """However often the same few are offered, and when they are gone for good, too."""
    queue = EvictionQueue(ReturnHistory().rate)
    things = [Thing(n, crossing(1 + n % 3)) for n in range(50)]
    for number in range(20_000):
        thing = things[number % 50]
        queue.offer(thing, last_used_s=float(number), density=1.0 + number % 7, reuse=thing.reuse)
        assert len(queue) <= 2 * 50 + SPARE_ENTRIES + 1
    for thing in things:
        queue.withdraw(thing)
    queue.compact()
    assert len(queue) == 0 and queue.worst(1e6) is None


# --- learning -----------------------------------------------------------------------------------------------------


def test_where_more_come_back_than_expected_the_rate_rises_and_where_nobody_does_it_falls() -> None:
    history, busy, quiet = ReturnHistory(), crossing(1), crossing(2)
    for _ in range(200):
        history.note(busy, 20.0, returned=True)
        history.note(quiet, 400.0, returned=False)
    assert history.factor(busy) > 3
    assert history.factor(quiet) < 1 / 3
    assert history.factor(crossing(8)) == 1
    assert history.rate(busy)(9.0) == pytest.approx(history.factor(busy) * return_rate(9.0, busy))


def test_those_who_are_evicted_early_do_not_count_as_lost() -> None:
    """Whoever leaves by the clock of the cache, and not by their own, tells as much as they were watched."""
    rng = random.Random(5)
    reuse = tip(1, Ending.UNKNOWN, 600)
    returns, history = returns_of(reuse), ReturnHistory()
    (weight, median_s, sigma), *_ = returns.times
    assert weight == 1
    for _ in range(5_000):
        back_s = median_s * math.exp(rng.gauss(0, sigma)) if rng.random() < returns.share else math.inf
        evicted_s = rng.expovariate(1 / 60)
        history.note(reuse, min(back_s, evicted_s), returned=back_s < evicted_s)
    assert history.factor(reuse) == pytest.approx(1, abs=0.2)


def test_old_evidence_is_forgotten() -> None:
    history, reuse = ReturnHistory(), crossing(1)
    for _ in range(3_000):
        history.note(reuse, 20.0, returned=True)
    for _ in range(3_000):
        history.note(reuse, 3_000.0, returned=False)
    assert history.factor(reuse) < 0.5
