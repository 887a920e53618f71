from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from server.cache.kv_cache import KVCache
from server.config import KVLayout, SchedulerConfig
from server.engine import InferenceEngine, run_isolated
from server.errors import BadRequest, EngineFailed, RequestTimeout, Unavailable
from server.metrics import RequestFacts, StepFacts
from server.request import (
    EngineState,
    FinishReason,
    GenerationRequest,
    RequestId,
    SampledToken,
    SamplingParams,
    StopRules,
)
from server.step import PageId, PageKind, PageMove, RowPlan, RowResult, StepInterrupted, StepPlan, StepResult
from tests.fake_device import CollectedOutput, FakeDevice, text_alone
from tests.house import WatchedScheduler, assert_nothing_left

LAYOUT = KVLayout(page_tokens=4, window_tokens=7, full_page_bytes=3, window_page_bytes=5, slab_bytes=15, slab_count=60)


class RecordedMetrics:
    def __init__(self) -> None:
        self.steps: list[StepFacts] = []
        self.ended: list[RequestFacts] = []

    def step(self, facts: StepFacts) -> None:
        self.steps.append(facts)

    def request_ended(self, facts: RequestFacts) -> None:
        self.ended.append(facts)


class House:
    """A started engine over the fake device; `async with`."""

    def __init__(self, *, depth: int = 2, **config: Any) -> None:
        self.cache = KVCache(LAYOUT)
        self.device = FakeDevice(layout=LAYOUT)
        self.metrics = RecordedMetrics()
        self.engine = InferenceEngine(
            lambda on_end: WatchedScheduler(
                SchedulerConfig(**config), self.cache, context_tokens=10_000, on_end=on_end
            ),
            self.device,
            vocab_size=97,
            metrics=self.metrics,
            steps_in_flight=depth,
        )

    async def __aenter__(self) -> House:
        await self.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.stop()

    def submit(
        self,
        name: str,
        prompt: tuple[int, ...],
        *,
        outputs: int,
        choices: int = 1,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> list[CollectedOutput]:
        stop = StopRules(max_tokens=outputs, stop_token_ids=stop_token_ids)
        collected = [CollectedOutput(stop) for _ in range(choices)]
        self.engine.submit(
            GenerationRequest(
                request_id=RequestId(name),
                prompt_tokens=prompt,
                sampling=SamplingParams(),
                stop=stop,
                outputs=tuple(collected),
                arrival_s=self.engine.now(),
            )
        )
        return collected

    @property
    def scheduler(self) -> WatchedScheduler:
        assert isinstance(self.engine._scheduler, WatchedScheduler)
        return self.engine._scheduler

    def assert_empty(self) -> None:
        assert_nothing_left(self.engine._scheduler, self.cache)


Nothing = Callable[[], None]


def void(*_values: object) -> None:
    return None


def fail_for(token: int):
    def fails(row: RowPlan) -> None:
        if row.start == 0 and row.tokens[0] == token:
            raise RuntimeError("the device choked")

    return fails


DEPTHS = pytest.mark.parametrize("depth", [1, 2])


@DEPTHS
async def test_every_accepted_request_gets_the_text_it_gets_alone(depth: int) -> None:
    async with House(depth=depth) as house:
        outputs = {n: house.submit(f"{n}", (n, 2, 3), outputs=10 + n) for n in range(20)}
        await asyncio.wait_for(house.engine.drained(), 10)
        for n, (output,) in outputs.items():
            assert output.ending is FinishReason.LENGTH
            assert output.tokens == text_alone((n, 2, 3), 10 + n, layout=LAYOUT)
        house.assert_empty()
        assert [facts.outcome for facts in house.metrics.ended] == ["length"] * 20
        assert sum(facts.generated_tokens for facts in house.metrics.steps) == sum(10 + n for n in range(20))
        assert house.scheduler.most_in_flight == depth


@DEPTHS
async def test_five_hundred_random_cancels_leave_nothing_behind_and_disturb_nobody(depth: int) -> None:
    rng = random.Random(0)
    async with House(depth=depth, max_sequences=8, step_token_budget=32, prefill_chunk_tokens=8) as house:
        (steady,) = house.submit("steady", (1, 2, 3), outputs=150)
        cancelled: list[CollectedOutput] = []
        for number in range(500):
            prompt = tuple(rng.randrange(97) for _ in range(rng.randint(1, 40)))
            cancelled += house.submit(f"{number}", prompt, outputs=rng.randint(1, 40), choices=rng.choice([1, 1, 3]))
            for _ in range(rng.randint(0, 3)):
                await asyncio.sleep(0)
            house.engine.cancel(RequestId(f"{number - rng.randint(0, 5)}"))
        for number in range(500):
            house.engine.cancel(RequestId(f"{number}"))
        await asyncio.wait_for(house.engine.drained(), 20)
        assert steady.tokens == text_alone((1, 2, 3), 150, layout=LAYOUT)
        assert all(output.ending in ("cancelled", FinishReason.LENGTH) for output in cancelled)
        assert len(house.metrics.ended) == 501
        house.assert_empty()


async def test_a_cancel_during_a_step_ends_the_request_before_the_step_is_over() -> None:
    async with House() as house:
        release, inside = threading.Event(), threading.Event()

        def wait(_plan: StepPlan) -> None:
            inside.set()
            assert release.wait(5)

        house.device.before_step = wait
        (output,) = house.submit("a", (1, 2), outputs=50)
        await asyncio.to_thread(inside.wait, 5)
        house.engine.cancel(RequestId("a"))
        assert output.ending == "cancelled"
        assert output.tokens == []
        assert house.cache.usage(PageKind.FULL) > 0, "its pages wait for the step that uses them"
        release.set()
        await asyncio.wait_for(house.engine.drained(), 5)
        while house.cache.usage(PageKind.FULL):
            await asyncio.sleep(0.001)
        assert output.tokens == []
        house.assert_empty()


async def test_the_event_loop_lives_while_the_device_works() -> None:
    async with House() as house:
        house.device.before_step = lambda _plan: time.sleep(0.3)
        house.submit("a", (1, 2), outputs=1)
        ticks = 0
        started = time.monotonic()
        while time.monotonic() - started < 0.25:
            await asyncio.sleep(0.005)
            ticks += 1
        assert ticks >= 3
        await asyncio.wait_for(house.engine.drained(), 5)


@DEPTHS
async def test_a_request_that_breaks_the_step_fails_alone(depth: int) -> None:
    async with House(depth=depth) as house:
        house.device.fails = fail_for(42)
        outputs = {n: house.submit(f"{n}", (n, 2, 3), outputs=20)[0] for n in (1, 42, 7)}
        await asyncio.wait_for(house.engine.drained(), 5)
        assert isinstance(outputs[42].ending, EngineFailed)
        for n in (1, 7):
            assert outputs[n].tokens == text_alone((n, 2, 3), 20, layout=LAYOUT)
        house.assert_empty()
        assert sorted(facts.outcome for facts in house.metrics.ended) == ["error", "length", "length"]


async def test_requests_that_break_step_after_step_do_not_end_a_sound_engine() -> None:
    async with House() as house:
        house.device.fails = fail_for(42)
        for number in range(30):
            (output,) = house.submit(f"{number}", (42, 2), outputs=5)
            await asyncio.wait_for(house.engine.drained(), 5)
            assert isinstance(output.ending, EngineFailed)
        (good,) = house.submit("good", (1, 2), outputs=5)
        await asyncio.wait_for(house.engine.drained(), 5)
        assert good.tokens == text_alone((1, 2), 5, layout=LAYOUT)
        assert house.device.checks == 30, "each time the device was asked whether it still computes"


async def test_a_row_that_fails_without_an_exception_asks_nothing_of_the_device() -> None:
    async with House() as house:
        run = house.device.run
        house.device.run = lambda plan, begun: replace(  # type: ignore[method-assign]
            run(plan, begun), rows=tuple(RowResult(failure="not finite") for _ in plan.rows)
        )
        (output,) = house.submit("a", (1, 2), outputs=5)
        await asyncio.wait_for(house.engine.drained(), 5)
        assert isinstance(output.ending, EngineFailed)
        assert house.device.checks == 0
        assert house.engine.health().state is EngineState.READY


async def test_a_dead_device_fails_everything_and_says_so() -> None:
    async with House(max_sequences=1) as house:

        def dead(_row: RowPlan) -> None:
            raise RuntimeError("no device")

        house.device.fails = dead
        house.device.dead = True
        outputs = [house.submit(f"{number}", (1, 2), outputs=5)[0] for number in range(3)]
        await asyncio.wait_for(house.engine.failed(), 5)
        assert all(isinstance(output.ending, EngineFailed) for output in outputs)
        assert house.engine.health().state is EngineState.FAILED
        house.engine.begin_drain()
        assert house.engine.health().state is EngineState.FAILED
        with pytest.raises(Unavailable) as refusal:
            house.submit("late", (1, 2), outputs=5)
        assert refusal.value.code == "engine_unavailable"
        await asyncio.wait_for(house.engine.drained(), 5)
        assert [facts.outcome for facts in house.metrics.ended] == ["error"] * 3


@DEPTHS
async def test_a_drain_is_over_when_the_last_request_takes_too_long(depth: int) -> None:
    """It is the plan that ends it, and no step follows."""
    async with House(depth=depth, request_timeout_s=1e-9) as house:
        (output,) = house.submit("late", (1, 2), outputs=5)
        house.engine.begin_drain()
        await asyncio.wait_for(house.engine.drained(), 5)
        assert isinstance(output.ending, RequestTimeout)
        house.assert_empty()


async def test_a_broken_invariant_ends_everybody_and_the_engine_and_hangs_nobody() -> None:
    """The books are wrong, so giving pages back raises as well: all the same each client is told."""
    async with House() as house:
        outputs = [house.submit(f"{number}", (1, 2), outputs=100)[0] for number in range(3)]

        def broken(*_: object) -> None:
            raise AssertionError("a page has two owners")

        house.cache.commit = house.cache.close = broken  # type: ignore[method-assign,assignment]
        await asyncio.wait_for(house.engine.failed(), 5)
        await asyncio.wait_for(house.engine.drained(), 5)
        assert all(isinstance(output.ending, EngineFailed) for output in outputs)
        assert house.engine.health() == replace(house.engine.health(), state=EngineState.FAILED, running=0, waiting=0)


async def test_work_that_can_never_run_is_failed_and_the_engine_goes_on() -> None:
    async with House() as house:
        house.cache.fits = lambda _demand: False  # type: ignore[method-assign]
        (output,) = house.submit("a", (1, 2), outputs=5)
        await asyncio.wait_for(house.engine.drained(), 5)
        assert isinstance(output.ending, EngineFailed)
        del house.cache.fits
        (good,) = house.submit("good", (1, 2), outputs=5)
        await asyncio.wait_for(house.engine.drained(), 5)
        assert good.ending is FinishReason.LENGTH


async def test_a_row_that_is_run_again_alone_gets_its_opening_and_no_page_moves() -> None:
    """The first try already moved pages and opened slots; a second move would copy what is no longer there."""
    async with House() as house:
        plans: list[StepPlan] = []
        house.device.before_step = plans.append
        house.device.fails = fail_for(42)
        for number in (1, 42, 7):
            house.submit(f"{number}", (number, 2, 3), outputs=3)
        await asyncio.wait_for(house.engine.drained(), 5)
        first, *again = plans[:4]
        assert [len(plan.rows) for plan in plans[:4]] == [3, 1, 1, 1]
        assert {plan.step_id for plan in plans[:4]} == {first.step_id}
        for row, plan in zip(first.rows, again, strict=True):
            assert plan.rows == (row,)
            assert [opening.slot for opening in plan.opened] == [row.slot]
            assert plan.moves == ()
            assert plan.writes == first.writes


async def test_page_moves_are_made_once_however_often_rows_are_run() -> None:
    house = House()
    house.engine._state = EngineState.READY
    for number in (1, 42, 7):
        house.submit(f"{number}", (number, 2, 3), outputs=3)
    plan = house.engine._scheduler.plan(0.0)
    assert plan is not None
    unused = PageId(200)
    move = PageMove(kind=PageKind.FULL, source=unused, target=PageId(201))
    house.device.fails = fail_for(42)
    result, broken = run_isolated(house.device, replace(plan, moves=(move,)), lambda: None)
    assert not broken
    assert [row.failure is None for row in result.rows] == [True, False, True]
    assert house.device.steps == 4
    assert house.device.moves == 1
    house.engine._scheduler.commit(plan, result, 0.1)
    await house.engine.stop()


async def test_a_step_is_taken_back_once_the_next_one_has_begun() -> None:
    """What the loop does for a step must not keep the device from the next one, which is in Python until it begins."""
    async with House(depth=2) as house:
        run, (output,) = house.device.run, house.submit("a", (1, 2), outputs=40)
        taken_back: list[int] = []  # tokens that were there when a step entered Python, and when it began

        def watched(plan: StepPlan, begun: Nothing) -> StepResult:
            time.sleep(0.005)  # the loop is free, and takes back whatever it was told of
            before = len(output.tokens)
            begun()
            time.sleep(0.005)
            taken_back.append(len(output.tokens) - before)
            return run(plan, void)

        house.device.run = watched  # type: ignore[method-assign]
        await asyncio.wait_for(house.engine.drained(), 20)
        assert output.tokens == text_alone((1, 2), 40, layout=LAYOUT)
        assert sum(taken_back) >= 30, taken_back


async def test_a_device_that_never_says_that_it_began_holds_nothing_back() -> None:
    async with House(depth=2) as house:
        run = house.device.run
        house.device.run = lambda plan, _begun: run(plan, void)  # type: ignore[method-assign]
        (output,) = house.submit("a", (1, 2), outputs=20)
        await asyncio.wait_for(house.engine.drained(), 20)
        assert output.tokens == text_alone((1, 2), 20, layout=LAYOUT)


async def test_the_device_goes_from_step_to_step_while_the_loop_is_busy() -> None:
    """Each token costs the loop half a step, and only with one step in flight the device waits for that."""
    idle_shares = {}
    for depth in (1, 2):
        async with House(depth=depth) as house:
            busy: list[tuple[float, float]] = []
            run = house.device.run

            def timed(plan: StepPlan, begun: Nothing, run=run, busy=busy) -> StepResult:  # type: ignore[no-untyped-def]
                started = time.perf_counter()
                result = run(plan, begun)
                time.sleep(0.01)
                busy.append((started, time.perf_counter()))
                return result

            house.device.run = timed  # type: ignore[method-assign]
            (output,) = house.submit("a", (1, 2), outputs=60)
            push = output.push

            def slow(token: SampledToken, push=push) -> FinishReason | None:  # type: ignore[no-untyped-def]
                time.sleep(0.005)
                return push(token)

            output.push = slow  # type: ignore[method-assign]
            await asyncio.wait_for(house.engine.drained(), 20)
            worked = sum(ended - started for started, ended in busy)
            idle_shares[depth] = 1 - worked / (busy[-1][1] - busy[0][0])
    assert idle_shares[1] > 0.25
    assert idle_shares[2] < idle_shares[1] / 2


async def test_whoever_arrives_while_a_step_runs_joins_the_next_one() -> None:
    """The next step is planned late, so that nobody waits for one that was planned before it came."""
    async with House() as house:
        plans: list[StepPlan] = []

        def step(plan: StepPlan) -> None:
            plans.append(plan)
            time.sleep(0.05)

        house.device.before_step = step
        house.submit("steady", (1, 2), outputs=40)
        joined_next = 0
        while len(plans) < 6:
            await asyncio.sleep(0.005)
        for number in range(10):
            seen = len(plans)
            while len(plans) == seen:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            house.submit(f"{number}", (number, 7), outputs=1)
            while len(plans) == seen + 1:
                await asyncio.sleep(0.001)
            joined_next += len(plans[seen + 1].opened) == 1
        assert joined_next >= 8
        await asyncio.wait_for(house.engine.drained(), 20)
        house.assert_empty()
        assert house.scheduler.most_in_flight == 2


async def test_a_step_that_stops_everything_is_followed_by_one_that_delivers_nothing() -> None:
    async with House() as house:
        text = text_alone((1, 2), 10, layout=LAYOUT)
        (output,) = house.submit("a", (1, 2), outputs=50, stop_token_ids=frozenset(text[4:5]))
        await asyncio.wait_for(house.engine.drained(), 5)
        assert output.ending is FinishReason.STOP
        assert output.tokens == text[: text.index(text[4]) + 1]
        await house.engine.stop()
        house.assert_empty()
        assert sum(facts.generated_tokens for facts in house.metrics.steps) == len(output.tokens)


async def test_stopping_takes_back_every_step_in_flight() -> None:
    house = House()
    await house.engine.start()
    release = threading.Event()
    house.device.before_step = lambda _plan: void(release.wait(5))
    (output,) = house.submit("a", (1, 2), outputs=50)
    while len(house.engine._in_flight) < 2:
        await asyncio.sleep(0.001)
    stopping = asyncio.create_task(house.engine.stop())
    await asyncio.sleep(0.02)
    release.set()
    assert await stopping is True
    assert isinstance(output.ending, Unavailable)
    assert len(output.tokens) == 1, "of the step on the device; the one behind it is taken back without a token"
    house.assert_empty()


async def test_stopping_waits_for_the_step_on_the_device_only() -> None:
    """Each step takes most of the limit, so the one behind it must not be begun."""
    house = House()
    await house.engine.start()
    inside = threading.Event()
    house.device.before_step = lambda _plan: void((inside.set(), time.sleep(0.3)))
    outputs = [house.submit(f"{number}", (number, 2), outputs=50)[0] for number in range(3)]
    while len(house.engine._in_flight) < 2 or not inside.is_set():
        await asyncio.sleep(0.001)
    assert await house.engine.stop(limit_s=0.5) is True
    assert house.device.steps == 1
    assert all(isinstance(output.ending, Unavailable) for output in outputs)
    assert [facts.outcome for facts in house.metrics.ended] == ["error"] * 3
    assert len(house.metrics.steps) == 1
    house.assert_empty()


async def test_stopping_interrupts_the_step_on_the_device() -> None:
    """However long it would take. What it was computing for ends as everything else does."""
    house = House()
    await house.engine.start()
    inside = threading.Event()

    def endless(_plan: StepPlan) -> None:
        inside.set()
        assert house.device.interrupted.wait(30)
        raise StepInterrupted

    house.device.before_step = endless
    outputs = [house.submit(f"{number}", (number, 2), outputs=50)[0] for number in range(3)]
    while not inside.is_set():
        await asyncio.sleep(0.001)
    assert await house.engine.stop(limit_s=5) is True
    assert all(isinstance(output.ending, Unavailable) for output in outputs)
    assert [facts.outcome for facts in house.metrics.ended] == ["error"] * 3
    assert house.device.checks == 0, "nobody doubts a device that was told to end"
    house.assert_empty()


async def test_an_engine_that_failed_waits_for_the_step_it_left_on_the_device() -> None:
    house = House()
    await house.engine.start()
    release = threading.Event()
    house.device.before_step = lambda plan: void(plan.step_id and release.wait(5))
    (output,) = house.submit("a", (1, 2), outputs=50)
    while len(house.engine._in_flight) < 2:
        await asyncio.sleep(0)

    def broken(*_: object) -> None:
        raise AssertionError("the books are wrong")

    house.cache.commit = broken  # type: ignore[method-assign,assignment]
    await asyncio.wait_for(house.engine.failed(), 5)
    assert isinstance(output.ending, EngineFailed)
    assert await house.engine.stop(limit_s=0.05) is False, "its thread hangs"
    release.set()
    assert await house.engine.stop() is True


async def test_a_token_outside_the_vocabulary_is_refused_before_it_meets_others() -> None:
    async with House() as house:
        with pytest.raises(BadRequest, match="token id 97 is outside the model's vocabulary of 97"):
            house.submit("a", (1, 97), outputs=5)
        house.assert_empty()


async def test_a_step_that_never_ends_does_not_keep_the_server_from_stopping() -> None:
    house = House()
    await house.engine.start()
    hang = threading.Event()
    house.device.before_step = lambda _plan: void(hang.wait(20))
    (output,) = house.submit("a", (1, 2), outputs=5)
    await asyncio.sleep(0.05)
    assert await house.engine.stop(limit_s=0.2) is False
    assert isinstance(output.ending, Unavailable)
    hang.set()


async def test_draining_refuses_new_requests_and_finishes_the_old() -> None:
    async with House() as house:
        (output,) = house.submit("a", (1, 2), outputs=30)
        house.engine.begin_drain()
        with pytest.raises(Unavailable) as refusal:
            house.submit("b", (1, 2), outputs=30)
        assert refusal.value.code == "server_draining"
        await asyncio.wait_for(house.engine.drained(), 5)
        assert output.ending is FinishReason.LENGTH


async def test_before_start_a_request_is_told_that_the_model_loads() -> None:
    house = House()
    with pytest.raises(Unavailable) as refusal:
        house.submit("a", (1, 2), outputs=3)
    assert refusal.value.code == "model_loading"
    await house.engine.stop()


async def test_health_grows_old_only_while_work_waits_and_nothing_moves() -> None:
    async with House() as house:
        assert house.engine.health().idle_s == 0
        release = threading.Event()
        house.device.before_step = lambda _plan: void(release.wait(5))
        house.submit("a", (1, 2), outputs=1)
        await asyncio.sleep(0.1)
        health = house.engine.health()
        assert (health.running, health.state) == (1, EngineState.READY)
        assert health.idle_s >= 0.09
        release.set()
        await asyncio.wait_for(house.engine.drained(), 5)
        assert house.engine.health().idle_s == 0


@DEPTHS
async def test_stopping_fails_what_is_left(depth: int) -> None:
    house = House(depth=depth)
    await house.engine.start()
    (output,) = house.submit("a", (1, 2), outputs=house.engine.limits.context_tokens - 2)
    await asyncio.sleep(0.01)
    await house.engine.stop()
    assert isinstance(output.ending, Unavailable)
    house.assert_empty()
