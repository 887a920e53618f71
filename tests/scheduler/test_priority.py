from __future__ import annotations

import random

import pytest

from server.scheduler.priority import POLICIES, TOKENS_PER_PRIORITY

RATE = 500.0


def order(policy: str, requests: list[tuple[int, int, float, int]]) -> list[int]:
    """By key, of requests (tokens, cached, arrival, priority)."""
    of = POLICIES[policy]
    keys = [
        of.key(of.base(tokens=tokens, arrival_s=arrival_s, forgiven_tokens_per_s=RATE, priority=priority), cached)
        for tokens, cached, arrival_s, priority in requests
    ]
    return sorted(range(len(keys)), key=lambda index: keys[index])


@pytest.mark.parametrize(
    ("policy", "first"),
    [
        ("uncached-first", [2, 1, 3, 0]),
        ("fcfs", [0, 1, 2, 3]),
        ("longest-prefix", [2, 0, 1, 3]),
        ("shortest-first", [1, 3, 0, 2]),
    ],
)
def test_a_policy_orders_those_who_came_together_by_what_it_counts(policy: str, first: list[int]) -> None:
    requests = [(900, 300, 0.0, 0), (100, 0, 1e-5, 0), (1_000, 950, 2e-5, 0), (500, 0, 3e-5, 0)]
    assert order(policy, requests) == first


@pytest.mark.parametrize("policy", POLICIES)
def test_a_key_orders_at_any_moment_as_work_less_what_waiting_forgives(policy: str) -> None:
    rng = random.Random(policy)
    of = POLICIES[policy]
    requests = [
        (tokens := rng.randrange(1, 10_000), rng.randrange(tokens), rng.random() * 30, rng.randint(-2, 2))
        for _ in range(200)
    ]
    for now in (30.0, 55.5):

        def score(index: int, now: float = now) -> float:
            tokens, cached, arrival_s, priority = requests[index]
            work = tokens * of.counts_tokens - cached * of.counts_cached
            return work - (now - arrival_s) * RATE + priority * TOKENS_PER_PRIORITY

        assert order(policy, requests) == sorted(range(len(requests)), key=score)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_lower_priority_number_runs_earlier(policy: str) -> None:
    assert order(policy, [(100, 0, 0.0, 1), (100, 0, 0.0, 0), (100, 0, 0.0, -1)]) == [2, 1, 0]
