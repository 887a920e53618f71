from __future__ import annotations

import random

import pytest

from server.config import BY_NAME, SchedulerConfig
from server.scheduler.lanes import lane_names, lane_of, share
from server.scheduler.priority import POLICIES

LANE_TOKENS = SchedulerConfig().lane_tokens


@pytest.mark.parametrize("seed", range(200))
def test_a_budget_is_given_away_as_long_as_anybody_wants_some_and_nobody_could_get_more_but_from_one_with_less(
    seed: int,
) -> None:
    rng = random.Random(seed)
    wanted = [rng.choice([0, rng.randrange(20), rng.randrange(3_000)]) for _ in range(rng.randint(1, 5))]
    budget = rng.randrange(4_000)
    given = share(budget, wanted, turn=rng.randrange(9))
    assert all(0 <= some <= most for some, most in zip(given, wanted, strict=True))
    assert sum(given) == min(budget, sum(wanted))
    hungry = [some for some, most in zip(given, wanted, strict=True) if some < most]
    assert not hungry or max(hungry) - min(hungry) <= 1
    assert not hungry or max(given) <= max(hungry)


@pytest.mark.parametrize("wanted", [[3, 1_500], [1_500, 3], [700, 3, 900]])
def test_a_budget_that_is_too_small_for_all_comes_to_each_in_turn(wanted: list[int]) -> None:
    got = [0] * len(wanted)
    for turn in range(30):
        got = [had + more for had, more in zip(got, share(1, wanted, turn), strict=True)]
    assert got == [30 // len(wanted)] * len(wanted)


def test_a_lane_begins_at_its_bound_and_has_a_name() -> None:
    assert [lane_of(tokens, LANE_TOKENS) for tokens in (1, 65_535, 65_536, 262_144, 1 << 20, 1 << 24)] == [
        *(0, 0, 1, 2, 3, 3)
    ]
    assert lane_names(LANE_TOKENS) == ("0-64K", "64K-256K", "256K-1M", "1M-")
    assert lane_names((1_000,)) == ("0-1000", "1000-")
    assert lane_names(()) == ("0-",)


def test_every_policy_can_be_asked_for_and_no_other() -> None:
    kind = BY_NAME["--scheduling-policy"].kind
    for name in POLICIES:
        kind.check(kind.parse(name))
    with pytest.raises(ValueError, match=", ".join(POLICIES)):
        kind.check(kind.parse("lifo"))
