from __future__ import annotations

import random

import pytest

from server.scheduler.queue_limits import LEAST_RETRY_S, MOST_RETRY_S, RECENT_S, DrainRate, FairShares


def test_a_refused_client_is_told_when_as_many_as_stand_before_it_will_have_left() -> None:
    drain = DrainRate()
    for number in range(200):
        drain.note_left(number * 0.1)
    assert drain.rate(20.0) == pytest.approx(10.0, rel=0.05)
    told = [drain.retry_after_s(20.0, 1) for _ in range(300)]
    assert told == sorted(told)
    assert told[99] == pytest.approx(10.0, rel=0.1)
    assert drain.retry_after_s(60.0, 1) < 3, "promises that are over count no more"


def test_a_queue_that_stands_still_or_was_never_seen_to_drain_says_a_second_or_a_minute() -> None:
    drain = DrainRate()
    assert drain.retry_after_s(5.0, 1) == LEAST_RETRY_S
    drain.note_left(5.0)
    assert drain.retry_after_s(300.0, 1) == MOST_RETRY_S


@pytest.mark.parametrize("seed", range(20))
def test_clients_that_always_want_something_get_equal_parts_whatever_their_requests_are(seed: int) -> None:
    rng = random.Random(seed)
    shares = FairShares()
    sizes = {name: rng.randint(10, 2_000) for name in "abcd"}
    for name in sizes:
        shares.arrived(name, 0.0)
    served = dict.fromkeys(sizes, 0)
    for _ in range(2_000):
        name = shares.next()
        assert isinstance(name, str)
        shares.started(name)
        tokens = rng.randint(1, 2 * sizes[name])
        shares.served(name, tokens)
        served[name] += tokens
        shares.arrived(name, 0.0)
        shares.left(name, waited=False, now=0.0)
    assert max(served.values()) - min(served.values()) <= 4 * max(sizes.values())


def test_who_comes_after_a_pause_has_saved_nothing_up() -> None:
    shares = FairShares()
    shares.arrived("busy", 0.0)
    shares.served("busy", 10_000)
    shares.arrived("new", 1.0)
    assert shares.next() in ("busy", "new")
    shares.served("new", 1)
    assert shares.next() == "busy"


def test_a_client_may_fill_the_queue_alone_and_half_of_it_beside_another_who_asked_of_late() -> None:
    shares = FairShares()
    shares.arrived("one", 0.0)
    assert shares.allowance("one", 100, 0.0) == 100
    assert shares.allowance("two", 100, 1.0) == 50
    assert shares.allowance("one", 100, 2.0 + RECENT_S) == 100
    assert len(shares) == 1


def test_who_left_is_forgotten() -> None:
    shares = FairShares()
    for number in range(1_000):
        shares.arrived(number, float(number))
        shares.left(number, waited=True, now=float(number))
    assert len(shares) <= RECENT_S + 2
