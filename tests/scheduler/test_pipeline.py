"""The next step is planned while one runs: what it may assume, what it costs, and what a wrong guess leaves behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from server.cache.kv_cache import Reservation
from server.config import KVLayout
from server.errors import EngineFailed
from server.request import FinishReason, RequestId
from server.step import FOLLOWS_NOTHING, PageKind, RowPlan, RowResult, SequenceId, StepPlan, StepResult
from tests.fake_device import FakeDevice, text_alone
from tests.house import House

LAYOUT = KVLayout(page_tokens=4, window_tokens=7, full_page_bytes=3, window_page_bytes=5, slab_bytes=15, slab_count=60)


class TwoStepHouse(House):
    device: FakeDevice

    def __init__(self, cut: KVLayout = LAYOUT, **settings: int) -> None:
        super().__init__(cut, FakeDevice(layout=cut), depth=2, **settings)

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan(self.now)
        assert plan is not None
        return plan

    def run_and_commit(self, plan: StepPlan) -> None:
        self.scheduler.commit(plan, self.device.run(plan), self.now)
        self.scheduler.check()


def alone(prompt: tuple[int, ...], outputs: int) -> list[int]:
    return text_alone(prompt, outputs, layout=LAYOUT)


def test_a_row_may_follow_a_token_that_is_not_known_yet() -> None:
    house = TwoStepHouse()
    a = house.submit("a", (1, 2, 3), outputs=9)
    first, second = house.plan(), house.plan()
    (row,) = second.rows
    assert (row.tokens, row.follows, row.start, row.stop) == ((), first.step_id, 3, 4)
    assert row.samples
    assert second.token_count == 1
    for plan in (first, second):
        house.run_and_commit(plan)
    assert house.texts(a) == [alone((1, 2, 3), 2)]
    house.run()
    assert house.texts(a) == [alone((1, 2, 3), 9)]
    house.assert_empty()


def test_a_prompt_goes_on_by_chunks_without_waiting_for_the_last_one() -> None:
    house = TwoStepHouse(prefill_chunk_tokens=8)
    house.submit("a", tuple(range(20)), outputs=2)
    plans = [house.plan(), house.plan()]
    assert [(p.rows[0].start, p.rows[0].stop, p.rows[0].samples) for p in plans] == [(0, 8, False), (8, 16, False)]
    house.run_and_commit(plans[0])
    third = house.plan()
    assert (third.rows[0].tokens, third.rows[0].samples) == (tuple(range(16, 20)), True)
    for plan in (plans[1], third):
        house.run_and_commit(plan)
    house.run()
    house.assert_empty()


def rows_planned(depth: int, stop_ids: frozenset[int]) -> tuple[int, int]:
    """How many rows ten answers took, and how many of them ended by a stop id."""
    house = House(LAYOUT, FakeDevice(layout=LAYOUT), depth=depth)
    ids = [house.submit(f"{n}", (n, 2, 3), outputs=5 + n, stop_token_ids=stop_ids) for n in range(10)]
    house.run()
    house.assert_empty()
    return house.scheduler.rows, sum(house.outputs[i][0].ending is FinishReason.STOP for i in ids)


def test_an_answer_that_ends_by_its_length_costs_no_row_more() -> None:
    assert rows_planned(2, frozenset()) == rows_planned(1, frozenset())


def test_an_answer_that_stops_costs_one_row_more_at_most() -> None:
    stop_ids = frozenset(range(0, 97, 9))
    rows, stopped = rows_planned(1, stop_ids)
    assert stopped >= 5
    more_rows, same = rows_planned(2, stop_ids)
    assert same == stopped
    assert 0 < more_rows - rows <= stopped


def test_nothing_is_planned_behind_a_token_that_is_certainly_the_last() -> None:
    house = TwoStepHouse()
    house.submit("a", (1, 2, 3), outputs=2)
    first, second = house.plan(), house.plan()
    assert house.scheduler.plan(0.0) is None
    house.run_and_commit(first)
    assert house.scheduler.plan(0.0) is None
    house.run_and_commit(second)
    house.assert_empty()


def test_the_last_position_of_the_context_is_counted_with_the_token_in_flight() -> None:
    house = TwoStepHouse(KVLayout(**{**vars_of(LAYOUT), "slab_count": 6}))
    context = house.scheduler.context_tokens
    a = house.submit("a", tuple([1] * (context - 3)), outputs=3)
    house.run()
    assert house.outputs[a][0].ending is FinishReason.LENGTH
    assert len(house.texts(a)[0]) == 3
    house.assert_empty()


def vars_of(layout: KVLayout) -> dict[str, int]:
    return {name: getattr(layout, name) for name in KVLayout.__dataclass_fields__}


def test_a_stop_leaves_a_row_behind_that_delivers_nothing() -> None:
    house = TwoStepHouse()
    text = alone((1, 2, 3), 3)
    a = house.submit("a", (1, 2, 3), outputs=9, stop_token_ids=frozenset(text[:1]))
    first, second = house.plan(), house.plan()
    house.run_and_commit(first)
    assert house.ended[a].outcome == "stop"
    assert house.scheduler.idle
    assert house.cache.usage(PageKind.FULL) > 0, "the second step writes to its pages"
    facts = house.scheduler.commit(second, house.device.run(second), 0.0)
    assert (facts.generated_tokens, facts.prompt_tokens) == (0, 0)
    assert house.texts(a) == [text[:1]]
    house.assert_empty()


@pytest.mark.parametrize("moment", range(5))
def test_a_cancel_at_every_moment_drops_both_rows(moment: int) -> None:
    house = TwoStepHouse()
    keeps = house.submit("keeps", (4, 5), outputs=6)
    a = house.submit("a", (1, 2, 3), outputs=9)
    calls = [lambda: None] * 5
    calls[moment] = lambda: house.scheduler.cancel(a, 0.0)
    calls[0]()
    first = house.plan()
    calls[1]()
    second = house.plan()
    calls[2]()
    house.run_and_commit(first)
    calls[3]()
    third = house.plan()
    calls[4]()
    for plan in (second, third):
        house.run_and_commit(plan)
    house.run()
    assert house.outputs[a][0].ending == "cancelled"
    assert house.texts(a)[0] == alone((1, 2, 3), 9)[: len(house.texts(a)[0])]
    assert house.texts(keeps) == [alone((4, 5), 6)]
    house.assert_empty()


def test_a_slot_may_change_hands_while_steps_that_use_it_are_in_flight() -> None:
    house = TwoStepHouse(max_sequences=1)
    a, b = house.submit("a", (1, 2, 3), outputs=9), house.submit("b", (7, 8, 9, 10), outputs=5)
    first = house.plan()
    house.scheduler.cancel(a, 0.0)
    second = house.plan()
    assert first.rows[0].slot == second.rows[0].slot
    assert first.rows[0].sequence != second.rows[0].sequence
    for plan in (first, second):
        house.run_and_commit(plan)
    house.run()
    assert house.texts(b) == [alone((7, 8, 9, 10), 5)]
    house.assert_empty()


@pytest.mark.parametrize("eager", [False, True])
def test_a_row_that_fails_takes_its_next_row_along_and_no_other(eager: bool) -> None:
    house = House(LAYOUT, FakeDevice(layout=LAYOUT), depth=2, eager=eager)
    good = [house.submit(f"{n}", (n, 2, 3), outputs=9) for n in (1, 2)]
    bad = house.submit("bad", (42, 2, 3), outputs=9, choices=2)
    results: list[RowResult] = []
    run = house.device.run

    def noted(plan: StepPlan, begun: Callable[[], None]) -> StepResult:
        result = run(plan, begun)
        results.extend(result.rows)
        return result

    def fails(row: RowPlan) -> None:
        if row.sequence == 2 and row.start <= 4 < row.stop:  # the second output token of one of its choices
            raise RuntimeError("the device choked")

    house.device.run = noted  # type: ignore[method-assign]
    house.device.fails = fails
    house.run()
    assert results.count(FOLLOWS_NOTHING) == 1
    for request_id, prompt in zip(good, [(1, 2, 3), (2, 2, 3)], strict=True):
        assert house.texts(request_id) == [alone(prompt, 9)]
    assert all(isinstance(output.ending, EngineFailed) for output in house.outputs[bad])
    assert [len(text) for text in house.texts(bad)] == [2, 2]
    assert house.ended[bad].outcome == "error"
    house.assert_empty()


def test_a_token_of_another_step_or_of_a_former_tenant_is_never_taken() -> None:
    """The slot holds a token of an earlier step while the row follows a step that brought none."""
    device = FakeDevice(layout=LAYOUT)
    house = House(LAYOUT, device, depth=1)
    house.submit("a", (1, 2, 3), outputs=9)
    house.step()
    plan = house.scheduler.plan(0.0)
    assert plan is not None
    (row,) = plan.rows
    stray = RowPlan(
        slot=row.slot,
        sequence=row.sequence,
        epoch=row.epoch,
        start=row.start,
        tokens=(),
        samples=True,
        follows=plan.step_id,
    )
    (result,) = device.run(StepPlan(step_id=plan.step_id, moves=(), writes=plan.writes, opened=(), rows=(stray,))).rows
    assert result == FOLLOWS_NOTHING


def busy(cut: KVLayout, depth: int) -> House:
    house = House(cut, FakeDevice(layout=cut), depth=depth, prefill_chunk_tokens=8, step_token_budget=32)
    for n in range(8):
        house.submit(f"{n}", tuple(range(n, 4 * n + 6)), outputs=50 + 5 * n, stop_token_ids=frozenset({n, n + 40}))
    return house


LITTLE = KVLayout(page_tokens=4, window_tokens=16, full_page_bytes=3, window_page_bytes=5, slab_bytes=15, slab_count=9)


def test_shortage_lets_the_steps_in_flight_end_before_it_takes_from_anybody() -> None:
    house = busy(LITTLE, 2)
    preempted_with = []
    preempt = house.scheduler._preempt
    house.scheduler._preempt = lambda victim, _now: (  # type: ignore[method-assign,func-returns-value]
        preempted_with.append(house.cache.steps_in_flight),
        preempt(victim, _now),
    )
    house.run()
    assert preempted_with and set(preempted_with) == {0}
    plain = busy(LITTLE, 1)
    plain.run()
    for request_id in plain.outputs:
        assert house.texts(request_id) == plain.texts(request_id)
    house.assert_empty()


def test_without_quarantine_the_watch_would_bark() -> None:
    """Pages that go back at once are soon somebody else's, while a step that writes to them is in flight."""
    house = busy(LITTLE, 2)
    close = house.cache.close
    house.cache.close = lambda sequence, _last_step, *more: close(sequence, None, *more)  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match=r"was given away|changed kind"):
        house.run()


def test_one_request_of_many_tokens_never_waits_for_itself() -> None:
    house = TwoStepHouse()
    a = house.submit("a", (1, 2, 3), outputs=50)
    steps = 0
    while house.step():
        steps += 1
    assert steps == 50
    assert house.texts(RequestId(a)) == [alone((1, 2, 3), 50)]


def refuse(house: House, name: RequestId) -> None:
    """Pages are short for this request as long as a step is in flight."""
    reserve = house.cache.reserve

    def short(sequence: SequenceId, stop: int, now_s: float = 0.0) -> Reservation:
        running = house.scheduler._running[sequence]
        if running.request.request_id == name and house.cache.steps_in_flight:
            return Reservation(granted=False)
        return reserve(sequence, stop, now_s)

    house.cache.reserve = short  # type: ignore[method-assign]


def test_whoever_was_short_of_pages_is_the_first_to_be_looked_after() -> None:
    """Others may use the step in which one is left out, but not another one, and nobody is admitted meanwhile."""
    house = TwoStepHouse()
    a = house.submit("a", (1, 2, 3), outputs=9)
    b = house.submit("b", (4, 5, 6), outputs=9)
    refuse(house, a)
    first = house.plan()
    house.submit("newcomer", (7,), outputs=3)
    second = house.plan()
    assert [row.sequence for row in first.rows] == [0, 1]
    assert [row.sequence for row in second.rows] == [1]
    assert not second.opened
    house.run_and_commit(first)
    assert house.scheduler.plan(0.0) is None
    house.run_and_commit(second)
    third = house.plan()
    assert [row.sequence for row in third.rows] == [0, 1, 2]
    house.run_and_commit(third)
    house.run()
    assert house.texts(a) == [alone((1, 2, 3), 9)]
    assert house.texts(b) == [alone((4, 5, 6), 9)]
    house.assert_empty()


def test_a_newcomer_whose_pages_must_wait_is_known_to_the_device_all_the_same() -> None:
    house = TwoStepHouse()
    house.submit("a", (1, 2, 3), outputs=1)
    first = house.plan()
    b = house.submit("b", (4, 5, 6), outputs=4)
    refuse(house, b)
    second = house.plan()
    assert (len(second.opened), second.rows) == (1, ())
    for plan in (first, second):
        house.run_and_commit(plan)
    house.run()
    assert house.texts(b) == [alone((4, 5, 6), 4)]
    house.assert_empty()
