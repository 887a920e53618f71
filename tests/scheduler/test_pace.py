from __future__ import annotations

import random

import pytest

from server.scheduler.pace import FIRST_LEAD_S, LEAST_LEAD_S, Pace


def test_a_step_of_unknown_size_is_followed_at_once() -> None:
    pace = Pace()
    assert pace.delay_s(64) == 0
    pace.note_step(64, 0.1)
    assert pace.delay_s(64) > 0
    assert pace.delay_s(512) == 0


def test_the_next_step_is_planned_a_lead_before_the_end_of_the_shortest_like_it() -> None:
    pace = Pace()
    for duration_s in (0.3, 0.1, 0.2):
        pace.note_step(500, duration_s)
    assert pace.delay_s(300) == pytest.approx(0.1 - FIRST_LEAD_S)
    for _ in range(10):
        pace.note_step(500, 0.4)  # the context has grown
    assert pace.delay_s(300) == pytest.approx(0.4 - FIRST_LEAD_S)


def test_steps_shorter_than_the_lead_are_followed_at_once() -> None:
    pace = Pace()
    pace.note_step(1, FIRST_LEAD_S / 2)
    assert pace.delay_s(1) == 0


def test_the_lead_grows_only_where_an_earlier_plan_would_have_helped() -> None:
    pace = Pace()
    pace.note_step(1, 1.0)
    pace.note_hand_over(slack_s=-0.1, delayed=False)
    assert pace.delay_s(1) == pytest.approx(1.0 - FIRST_LEAD_S)
    pace.note_hand_over(slack_s=-0.1, delayed=True)
    assert pace.delay_s(1) == pytest.approx(1.0 - 2 * FIRST_LEAD_S)
    for _ in range(1000):
        pace.note_hand_over(slack_s=0.1, delayed=True)
    assert pace.delay_s(1) == pytest.approx(1.0 - LEAST_LEAD_S)


def test_a_loop_that_is_always_late_by_so_much_soon_is_late_in_few_steps() -> None:
    """The loop comes to the plan 7 to 9 ms after it wanted to: fewer than two hand-overs in a hundred are late."""
    rng, pace, late = random.Random(0), Pace(), 0
    for step in range(2000):
        pace.note_step(64, 0.030)
        slack_s = 0.030 - pace.delay_s(64) - rng.uniform(0.007, 0.009)
        late += slack_s < 0 and step >= 100
        pace.note_hand_over(slack_s=slack_s, delayed=True)
    assert late < 0.02 * 1900
    assert pace.delay_s(64) > 0.010, "and it is not early for nothing"
