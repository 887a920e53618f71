"""Many plans of random traffic, each looked at: what a step may hold, who goes before whom, and that it goes on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from server.config import KVLayout
from server.errors import Overloaded, RequestTimeout
from server.rebuild import shape_of
from server.request import RequestId, SampledToken
from server.scheduler.priority import POLICIES
from server.scheduler.queue_limits import LEAST_RETRY_S, MOST_RETRY_S
from server.scheduler.scheduler import FIRST_RATE, RATE_SHARE, Scheduler
from server.scheduler.step_cost import FixedCost
from server.step import RowResult, SequenceId, StepPlan, StepResult
from tests.house import House
from tests.scheduler.test_scheduler import layout

PLANS = 2_600
"""Of each of 20 lives: more than 50,000 in all."""


class Dice:
    """A device that computes nothing and samples anything."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def run(self, plan: StepPlan, begun: Callable[[], None] = lambda: None) -> StepResult:
        begun()
        token = SampledToken(token_id=self.rng.randrange(3))
        rows = tuple(RowResult(token=token if row.samples else None) for row in plan.rows)
        return StepResult(step_id=plan.step_id, rows=rows, device_s=0.01)

    def check(self) -> None:
        pass

    def interrupt(self) -> None:
        pass


def house_of(cut: KVLayout, rng: random.Random, **settings: Any) -> House:
    return House(cut, Dice(rng), **settings)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_random_plans_lose_nobody_run_nobody_twice_keep_to_their_budget_and_go_on(seed: int, policy: str) -> None:
    rng = random.Random(f"{seed} {policy}")
    cut = layout(
        slabs=rng.choice([12, 30, 80]),
        page_tokens=rng.choice([1, 4, 16]),
        window_tokens=rng.choice([1, 7, 33]),
        window=rng.choice([0, 5, 5]),
    )
    settings: dict[str, Any] = {
        "max_sequences": rng.choice([1, 4, 9]),
        "prefill_chunk_tokens": rng.choice([3, 16, 64]),
        "step_token_budget": rng.choice([5, 24, 100]),
        "max_queued_requests": 12,
        "lane_tokens": rng.choice([(), (20,), (10, 40, 90)]),
        "target_itl_ms": rng.choice([0.0, 15.0, 40.0]),
        "request_timeout_s": rng.choice([0.0, 3.0]),
        "policy": policy,
    }
    house = house_of(
        cut,
        rng,
        prefix_caching=rng.random() < 0.7,
        rebuild=shape_of((False, True, True), window_tokens=cut.window_tokens, mtp_layers=0),
        cost=FixedCost(step_s=0.005, row_s=0.001, token_s=0.0005, read_s=1e-6),
        **settings,
    )
    scheduler, capacity = house.scheduler, house.scheduler.context_tokens
    if capacity < 8:
        pytest.skip("nothing fits this arena")
    talks: list[tuple[int, ...]] = [()]
    seen: Counter[str] = Counter()
    submitted: set[RequestId] = set()
    retries_s: list[float] = []

    def arrive() -> None:
        talk = rng.choice(talks[-6:])
        prompt = talk[: rng.choice([len(talk), rng.randint(0, len(talk))])]
        prompt += tuple(rng.choices(range(3), k=rng.randint(1, max(1, capacity // rng.choice([3, 8, 20])))))
        prompt = prompt[: capacity - 1]
        try:
            submitted.add(
                house.submit(
                    *(f"r{len(submitted) + seen['refused']}", prompt),
                    outputs=rng.randint(1, max(1, min(25, capacity - len(prompt)))),
                    choices=rng.choice([1, 1, 1, 2]),
                    priority=rng.choice([0, 0, 0, -1, 2]),
                    client=rng.choice([None, "key", "other"]),
                )
            )
            talks.append(prompt)
        except Overloaded as refusal:
            seen["refused"] += 1
            retries_s.append(refusal.retry_after_s)

    def look(plan: StepPlan) -> None:
        rows = Counter(row.sequence for row in plan.rows)
        assert max(rows.values(), default=1) == 1, "a sequence has two rows in one step"
        assert sum(row.stop - row.start for row in plan.rows) <= settings["step_token_budget"]
        assert all(0 < row.stop - row.start <= settings["prefill_chunk_tokens"] for row in plan.rows)
        assert plan.rows or plan.moves or plan.opened
        house.assert_samples_are_due(plan)
        seen["plans"] += 1

    while seen["plans"] < PLANS:
        for _ in range(rng.choice([0, 0, 1, 2])):
            arrive()
        if submitted and rng.random() < 0.05:
            scheduler.cancel(rng.choice(sorted(submitted)), house.now)
        waiting = not scheduler.idle
        went_on = house.step(before=look)
        assert went_on or not waiting or scheduler.idle, f"nothing is planned: {scheduler!r}"
        house.now += rng.expovariate(100)
    house.run()
    assert set(house.ended) == submitted
    assert all(LEAST_RETRY_S <= each <= MOST_RETRY_S for each in retries_s)
    outcomes = Counter(facts.outcome for facts in house.ended.values())
    assert outcomes["length"]
    timed_out = [o for each in house.outputs.values() for o in each if isinstance(o.ending, RequestTimeout)]
    assert settings["request_timeout_s"] or not timed_out
    walked.update(
        refused=len(retries_s),
        preempted=house.preemptions,
        timed_out=len(timed_out),
        cancelled=outcomes["abort"],
        lives=1,
    )
    house.assert_empty()


walked: Counter[str] = Counter()
"""What happened in all random lives of this process."""


def test_the_random_lives_above_walked_every_path() -> None:
    if walked["lives"] < 20:
        pytest.skip("not all of them ran here")
    assert min(walked[each] for each in ("refused", "preempted", "timed_out", "cancelled")) > 50


class Watched(Scheduler):
    """Notes for each admission who waited then, and with how much to compute."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.overtaken: list[tuple[float, float]] = []
        """(how much later the other one came, how much later it may have come)"""

    def _open(self, sequence: Any, saved: float, building: Any) -> None:
        for other in self._sequences.values():
            if other.slot is None and other is not sequence and other.request.client == sequence.request.client:
                later_s = sequence.request.arrival_s - other.request.arrival_s
                effective = other.known_tokens - self._cache.waiting.saved(SequenceId(other.id))
                if later_s > 0:
                    self.overtaken.append((later_s, effective / self._rate))
        super()._open(sequence, saved, building)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_nobody_is_overtaken_by_who_comes_later_than_its_work_over_the_rate(seed: int, caching: bool) -> None:
    """Against somebody who sends short prompts as fast as they are taken, to keep the long ones waiting."""
    rng = random.Random(seed)
    house = house_of(
        layout(slabs=400, page_tokens=4, window_tokens=7),
        rng,
        prefix_caching=caching,
        scheduler=Watched,
        max_sequences=rng.choice([1, 3]),
        prefill_chunk_tokens=16,
        step_token_budget=rng.choice([16, 40]),
        forgiven_tokens_per_s=rng.choice([50.0, 400.0]),
        lane_tokens=rng.choice([(), (40, 150)]),
    )
    number = 0
    for _ in range(600):
        if rng.random() < 0.04 or number == 0:
            house.submit(f"{number}", tuple(rng.choices(range(3), k=rng.randint(100, 400))), outputs=2)
            number += 1
        while house.scheduler.waiting < 4:
            house.submit(f"{number}", tuple(rng.choices(range(3), k=rng.randint(1, 12))), outputs=rng.randint(1, 6))
            number += 1
            house.now += 0.001
        house.step()
    watched = house.scheduler
    assert isinstance(watched, Watched)
    house.run()
    assert len(watched.overtaken) > 50, "somebody was overtaken, as little work goes first"
    assert all(later_s <= may_be_s + 1e-9 for later_s, may_be_s in watched.overtaken)


@pytest.mark.parametrize("target_itl_ms", [0.0, 30.0])
def test_a_short_prompt_waits_for_one_step_at_most_whatever_long_ones_run(target_itl_ms: float) -> None:
    """Four prompts of a lane above fill each step; the short one joins the next one all the same, and they go on."""
    rng = random.Random(0)
    house = house_of(
        layout(slabs=4_000, page_tokens=4, window_tokens=7),
        rng,
        prefill_chunk_tokens=32,
        step_token_budget=64,
        lane_tokens=(100,),
        target_itl_ms=target_itl_ms,
        cost=FixedCost(step_s=0.005, row_s=0.001, token_s=0.0005, read_s=0.0),
    )
    for number in range(4):
        house.submit(f"long{number}", tuple(rng.choices(range(3), k=2_000)), outputs=2)
    for _ in range(3):
        house.step()
    for number in range(6):
        short = house.submit(f"short{number}", tuple(rng.choices(range(3), k=10)), outputs=8)
        before = sum(s.computed_tokens for s in house.scheduler._running.values() if s.lane == 1)
        house.step()
        assert house.outputs[short][0].tokens, "its first token comes with the step that follows"
        after = sum(s.computed_tokens for s in house.scheduler._running.values() if s.lane == 1)
        assert after > before, "the long ones go on"


def test_a_long_prompt_that_waits_for_its_lane_keeps_no_other_lane_waiting() -> None:
    """A runs and B is the first in line, since C came later than B's work over the rate; C's lane is empty."""
    rng = random.Random(0)
    house = house_of(
        layout(slabs=4_000),
        rng,
        step_token_budget=64,
        prefill_chunk_tokens=64,
        lane_tokens=(1_024,),
        forgiven_tokens_per_s=500.0,
    )
    house.submit("a", tuple(rng.choices(range(3), k=2_000)), outputs=2)
    house.step()
    house.submit("b", tuple(rng.choices(range(3), k=2_100)), outputs=2)
    house.now += 5
    short = house.submit("c", tuple(rng.choices(range(3), k=20)), outputs=2)
    house.step()
    assert house.outputs[short][0].tokens


def test_lanes_share_the_time_of_a_step_and_not_its_tokens() -> None:
    """A token 8,000 positions into a prompt takes as long as nine at the beginning of one."""
    rng = random.Random(0)
    house = house_of(
        layout(slabs=9_000),
        rng,
        step_token_budget=1_000,
        prefill_chunk_tokens=1_000,
        lane_tokens=(1_024,),
        target_itl_ms=100.0,
        cost=FixedCost(step_s=0.01, row_s=0.0, token_s=1e-4, read_s=1e-7),
    )
    house.submit("long", tuple(rng.choices(range(3), k=20_000)), outputs=2)
    for _ in range(8):
        house.step()
    house.submit("answers", (1, 2), outputs=500)
    house.step()
    short = house.submit("short", tuple(rng.choices(range(3), k=300)), outputs=2)
    house.step()
    assert house.outputs[short][0].tokens, "half of 90 ms is enough for 300 tokens"
    (long,) = [each for each in house.scheduler._running.values() if each.lane == 1]
    assert 32 <= long.piece_tokens <= 64


def test_short_prompts_of_one_lane_pass_long_ones_that_already_run() -> None:
    rng = random.Random(0)
    house = house_of(layout(slabs=4_000), rng, prefill_chunk_tokens=32, step_token_budget=64, lane_tokens=())
    for number in range(4):
        house.submit(f"long{number}", tuple(rng.choices(range(3), k=2_000)), outputs=2)
    house.step()
    short = house.submit("short", tuple(rng.choices(range(3), k=20)), outputs=2)
    house.step()
    assert house.outputs[short][0].tokens


def test_a_request_that_takes_too_long_ends_with_an_error_wherever_it_is() -> None:
    rng = random.Random(0)
    house = house_of(layout(slabs=400), rng, max_sequences=1, request_timeout_s=0.5)
    running = house.submit("running", (1, 2, 3), outputs=500)
    waiting = house.submit("waiting", (1, 2, 3), outputs=5)
    house.run()
    for request_id in (running, waiting):
        assert isinstance(house.outputs[request_id][0].ending, RequestTimeout)
        assert house.ended[request_id].outcome == "error"
        assert house.ended[request_id].total_s == pytest.approx(0.5, abs=0.02)
    assert house.outputs[running][0].tokens and not house.outputs[waiting][0].tokens
    house.assert_empty()


def test_who_fills_a_queue_while_a_step_runs_is_told_that_it_stands_still() -> None:
    house = house_of(layout(slabs=400), random.Random(0), max_sequences=1, max_queued_requests=3)
    house.submit("runs", (1, 2), outputs=5)
    assert house.scheduler.plan(0.0) is not None
    house.now = 0.01
    for number in range(3):
        house.submit(f"{number}", (1, 2), outputs=5)
    told = []
    for now in (1.0, 10.0, 29.0):
        with pytest.raises(Overloaded) as refusal:
            house.scheduler.check_room(now)
        told.append(refusal.value.retry_after_s)
    assert told[0] > 0.3 and told[1] > 3 and told[2] > 8


def test_prompts_that_wait_are_bounded_in_tokens_but_one_may_always_wait() -> None:
    rng = random.Random(0)
    house = house_of(layout(slabs=400), rng, max_sequences=1, max_queued_tokens=100)
    house.submit("runs", tuple([1] * 10), outputs=5)
    house.step()
    house.submit("long", tuple([1] * 300), outputs=1)
    with pytest.raises(Overloaded, match="300 wait, and yours are 1 more"):
        house.submit("more", (1,), outputs=1)
    house.run()
    assert set(house.ended) == {"runs", "long"}


def test_a_key_that_floods_the_queue_leaves_room_and_turns_to_another() -> None:
    rng = random.Random(0)
    house = house_of(layout(slabs=400), rng, max_sequences=1, max_queued_requests=10)
    for number in range(8):
        house.submit(f"flood{number}", tuple([1] * 20), outputs=3, client="flood")
    house.submit("guest0", tuple([2] * 20), outputs=3, client="guest")
    with pytest.raises(Overloaded, match="its share is 5 places, and 8 are taken"):
        house.submit("flood8", tuple([1] * 20), outputs=3, client="flood")
    house.submit("guest1", tuple([2] * 20), outputs=3, client="guest")
    house.run()
    order = list(house.ended)
    assert max(order.index(RequestId("guest0")), order.index(RequestId("guest1"))) <= 4


def test_who_finds_a_free_slot_needs_no_share_of_the_queue() -> None:
    house = house_of(layout(slabs=400), random.Random(0), max_sequences=64, max_queued_requests=10)
    house.submit("other", (1, 2), outputs=1, client="other")
    house.run()
    for number in range(64):
        house.submit(f"{number}", (1, 2), outputs=3, client="key")
    house.run()
    assert len(house.ended) == 65


def test_who_was_never_made_to_wait_says_nothing_of_how_fast_a_queue_drains() -> None:
    """A thousand requests found a free slot; then eight answers hold all of them for 100 s."""
    house = house_of(layout(slabs=4_000), random.Random(0), max_sequences=8, max_queued_requests=4)
    for number in range(1_000):
        house.submit(f"{number}", (1, 2), outputs=1)
        house.run()
    for number in range(8):
        house.submit(f"long{number}", (1, 2), outputs=300)
    house.step()
    for number in range(4):
        house.submit(f"waits{number}", (1, 2), outputs=1)
    house.step()
    house.now += 100.0
    with pytest.raises(Overloaded) as refusal:
        house.submit("refused", (1, 2), outputs=1)
    assert refusal.value.retry_after_s > 10
    house.run()


def test_a_long_prompt_that_is_nearly_done_keeps_no_short_one_waiting() -> None:
    """However long it has waited. It goes on with what they leave, and with an eighth as the oldest."""
    rng = random.Random(0)
    house = house_of(
        layout(slabs=4_000), rng, step_token_budget=64, prefill_chunk_tokens=64, lane_tokens=(), max_sequences=64
    )
    long = house.submit("long", tuple(rng.choices(range(3), k=3_000)), outputs=1)
    number = 0
    while not house.outputs[long][0].tokens:
        short = house.submit(f"short{number}", tuple(rng.choices(range(3), k=20)), outputs=1)
        house.step()
        assert house.outputs[short][0].tokens, f"it waits while {house.scheduler!r}"
        number += 1
        assert number < 3_000 / 8


def test_waiting_forgives_a_part_of_what_is_computed_meanwhile_if_no_rate_is_given() -> None:
    rng = random.Random(0)
    fast = FixedCost(step_s=0.0, row_s=0.0, token_s=1e-4, read_s=0.0)
    house = house_of(layout(slabs=4_000), rng, max_sequences=1, prefill_chunk_tokens=16, cost=fast)
    assert house.scheduler.forgiven_tokens_per_s == FIRST_RATE
    house.submit("runs", (1, 2), outputs=100)
    house.step()
    for number, tokens in enumerate((400, 300, 20, 100)):
        house.submit(f"{number}", tuple([1] * tokens), outputs=1)
        house.now += 1.0
    house.run()
    assert house.scheduler.forgiven_tokens_per_s == pytest.approx(10_000 * RATE_SHARE)
    assert list(house.ended) == ["runs", "0", "1", "2", "3"], "at 100 a second, the third would be the first"
    house.assert_empty()


def test_time_in_the_queue_after_a_preemption_begins_with_it() -> None:
    rng = random.Random(0)
    house = house_of(layout(slabs=9, window_tokens=16), rng, prefill_chunk_tokens=8, step_token_budget=32)
    waits: list[float] = []
    for number in range(8):
        house.submit(f"{number}", tuple(range(number, 4 * number + 6)), outputs=50 + 5 * number)
    while (facts := house.step_facts()) is not None:
        waits += [seconds for _, seconds in facts.waits_s]
    queued = [each.queued_s for each in house.ended.values()]
    assert house.preemptions > 0 and len(waits) == len(queued) + house.preemptions
    stories = [e for n in range(8) for events in house.scheduler.timelines.of(f"{n}").values() for e in events]
    matched = sum(each.at_s for each in stories if each.what == "matched")
    assert sum(waits) == pytest.approx(matched - sum(each.at_s for each in stories if each.what == "queued"))


def test_deadlines_of_those_who_left_are_forgotten() -> None:
    house = house_of(layout(slabs=400), random.Random(0), max_sequences=1, request_timeout_s=3_600.0)
    for number in range(3_000):
        house.submit(f"{number}", (1, 2, 3), outputs=5)
        house.scheduler.cancel(RequestId(f"{number}"), house.now)
    assert len(house.scheduler._deadlines) < 300


def test_a_short_prompt_runs_beside_a_long_one_however_small_a_step_is() -> None:
    house = house_of(layout(slabs=4_000), random.Random(0), step_token_budget=8, lane_tokens=(100,), max_sequences=16)
    for number in range(7):
        house.submit(f"answer{number}", (1, 2), outputs=5_000)
    for _ in range(20):
        house.step()
    house.submit("long", tuple([1] * 1_500), outputs=1)
    for _ in range(5):
        house.step()
    short = house.submit("short", (1, 2, 3), outputs=1)
    for _ in range(12):
        house.step()
    assert short in house.ended
    assert RequestId("long") not in house.ended
