from __future__ import annotations

import random
from collections import Counter

import pytest

from server.scheduler.queue_limits import LEAST_RETRY_S, MOST_RETRY_S, RECENT_S, DrainRate, FairShares


def draining(per_s: float, seconds: float, waiting: int = 50) -> DrainRate:
    """A queue that somebody has left at this rate for so long, and in which so many wait."""
    drain = DrainRate()
    drain.note(0.0, left=0, waiting=waiting)
    for number in range(1, int(per_s * seconds) + 1):
        drain.note(number / per_s, left=1, waiting=waiting)
    return drain


def test_a_refused_client_is_told_when_as_many_as_stand_before_it_will_have_left() -> None:
    drain = draining(10.0, 20.0)
    assert drain.rate(20.0) == pytest.approx(10.0, rel=0.05)
    told = [drain.retry_after_s(20.0, 1) for _ in range(300)]
    assert told == sorted(told)
    assert told[99] == pytest.approx(10.0, rel=0.1)
    assert drain.retry_after_s(60.0, 1) < 3, "promises that are over count no more"


def test_the_rate_follows_what_happens_now() -> None:
    drain = draining(2.0, 100.0)
    for number in range(600):
        drain.note(100.0 + number / 20, left=1, waiting=9)
    assert drain.rate(130.0) > 10


def test_a_queue_that_stands_still_says_so() -> None:
    drain = draining(10.0, 5.0)
    assert drain.rate(300.0) < 0.05
    assert MOST_RETRY_S / 2 <= drain.retry_after_s(300.0, 1) <= MOST_RETRY_S


def test_time_without_a_queue_does_not_count_as_slow() -> None:
    drain = DrainRate()
    drain.note(0.0, left=0, waiting=1)
    drain.note(0.1, left=1, waiting=0)
    assert drain.retry_after_s(500.0, 1) <= 1.0


@pytest.mark.parametrize("per_s", [0.5, 1.0, 100.0])
def test_nobody_is_told_the_same_moment_as_many_others(per_s: float) -> None:
    drain = draining(per_s, 20.0)
    told = Counter(round(drain.retry_after_s(20.0, 1), 3) for _ in range(400))
    assert max(told.values()) <= 10, told.most_common(1)
    assert all(LEAST_RETRY_S <= seconds <= MOST_RETRY_S for seconds in told)


def test_a_promise_ends_with_the_queue_that_it_was_made_for() -> None:
    drain = draining(50.0, 1.0)
    for _ in range(4_000):
        drain.retry_after_s(1.0, 1)
    drain.note(2.0, left=50, waiting=0)
    assert drain.retry_after_s(3.0, 1) <= 1.0


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


@pytest.mark.parametrize("seed", range(20))
def test_the_next_client_is_the_one_with_the_least_of_all_who_wait(seed: int) -> None:
    """Against a look at everybody."""
    rng = random.Random(seed)
    shares = FairShares()
    waiting, running = Counter[int](), Counter[int]()
    now = 0.0
    for _ in range(3_000):
        now += rng.expovariate(2.0)
        client = rng.randrange(40)
        act = rng.choice(["arrive", "start", "serve", "preempt", "leave"])
        if act == "arrive":
            shares.arrived(client, now)
            waiting[client] += 1
        elif act == "start" and waiting[client]:
            shares.started(client)
            waiting[client] -= 1
            running[client] += 1
        elif act == "serve":
            shares.served(client, rng.randrange(1_000))
        elif act == "preempt" and running[client]:
            shares.preempted(client)
            running[client] -= 1
            waiting[client] += 1
        elif act == "leave" and waiting[client] + running[client]:
            waited = bool(waiting[client]) and (not running[client] or rng.random() < 0.5)
            (waiting if waited else running)[client] -= 1
            shares.left(client, waited=waited, now=now)
        served = {name: shares._clients[name].served for name, count in waiting.items() if count}
        chosen = shares.next()
        assert chosen in served if served else chosen is None
        assert not served or served[int(str(chosen))] == min(served.values())
        assert all(shares.waiting(name) == waiting[name] for name in range(40))


def test_who_comes_after_a_pause_has_saved_nothing_up() -> None:
    shares = FairShares()
    shares.arrived("busy", 0.0)
    shares.served("busy", 10_000)
    shares.arrived("new", 1.0)
    assert shares.next() in ("busy", "new")
    shares.served("new", 1)
    assert shares.next() == "busy"


def test_who_comes_while_another_pauses_starts_where_that_one_left() -> None:
    """Else the other one would have to wait until the newcomer had as much as it had in all its life."""
    shares = FairShares()
    shares.arrived("old", 0.0)
    shares.started("old")
    shares.served("old", 1_000_000)
    shares.left("old", waited=False, now=1.0)
    shares.arrived("new", 1.1)
    shares.arrived("old", 1.2)
    shares.served("new", 1)
    assert shares.next() == "old"
    shares.served("old", 2)
    assert shares.next() == "new"


def test_a_client_may_fill_the_queue_alone_and_half_of_it_beside_another_who_asked_of_late() -> None:
    shares = FairShares()
    shares.arrived("one", 0.0)
    assert shares.allowance("one", 100, 0.0) == 100
    assert shares.allowance("two", 100, 1.0) == 50
    assert shares.allowance("one", 100, 2.0 + RECENT_S) == 100
    assert len(shares) == 1


def test_who_left_is_forgotten_though_somebody_with_less_waits_all_the_time() -> None:
    shares = FairShares()
    shares.arrived("stays", 0.0)
    for number in range(5_000):
        shares.arrived(number, number / 10)
        shares.left(number, waited=True, now=number / 10)
        assert shares.next() == "stays"
    assert len(shares) <= 10 * RECENT_S + 20
    assert max(len(shares._waiting._heap), len(shares._present._heap)) <= 20


def test_who_left_is_forgotten() -> None:
    shares = FairShares()
    for number in range(1_000):
        shares.arrived(number, float(number))
        shares.left(number, waited=True, now=float(number))
    assert len(shares) <= RECENT_S + 3
