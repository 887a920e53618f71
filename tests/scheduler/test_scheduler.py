from __future__ import annotations

import random
from typing import Any

import pytest

from server.cache.retention import Ending
from server.config import KVLayout
from server.errors import BadRequest, EngineFailed, Overloaded, TooLong
from server.rebuild import shape_of
from server.request import FinishReason, GenerationRequest, RequestId, SamplingParams, StopRules
from server.scheduler.sequence import Sequence
from server.step import PageKind, RowPlan
from tests.fake_device import CollectedOutput, FakeDevice, text_alone
from tests.fakes import hints_of
from tests.house import House


def layout(*, slabs: int = 40, page_tokens: int = 4, window_tokens: int = 7, window: int = 5) -> KVLayout:
    return KVLayout(
        page_tokens=page_tokens,
        window_tokens=window_tokens if window else 0,
        full_page_bytes=3,
        window_page_bytes=window,
        slab_bytes=15,
        slab_count=slabs,
    )


class FakeHouse(House):
    """The house over the fake device, which knows what everyone must answer."""

    device: FakeDevice

    def __init__(self, cut: KVLayout, *, depth: int = 1, eager: bool = False, **settings: Any) -> None:
        super().__init__(cut, FakeDevice(layout=cut), depth=depth, eager=eager, **settings)

    def submit(self, name: str, prompt: tuple[int, ...], *, seed: int = 0, **settings: Any) -> RequestId:  # type: ignore[override]
        return super().submit(name, prompt, sampling=SamplingParams(seed=seed), **settings)

    def assert_answers(self, request_id: RequestId, *, seed: int = 0) -> None:
        for choice, output in enumerate(self.outputs[request_id]):
            assert output.ending is FinishReason.LENGTH
            prompt = self.prompts[request_id]
            assert output.tokens == text_alone(prompt, len(output.tokens), layout=self.layout, choice=choice, seed=seed)


@pytest.mark.parametrize("chunk", [1, 3, 8, 1000])
@pytest.mark.parametrize("budget", [1, 10, 64])
@pytest.mark.parametrize("depth", [1, 2])
def test_any_chunk_and_budget_give_the_text_of_the_plain_definition(chunk: int, budget: int, depth: int) -> None:
    house = FakeHouse(layout(), depth=depth, prefill_chunk_tokens=chunk, step_token_budget=budget)
    a = house.submit("a", tuple(range(30)), outputs=12, seed=5)
    b = house.submit("b", tuple(range(7)), outputs=20, choices=3, seed=6)
    house.run()
    house.assert_answers(a, seed=5)
    house.assert_answers(b, seed=6)
    assert len({tuple(o.tokens) for o in house.outputs[b]}) == 3
    house.assert_empty()


PIPELINES = {"one step": (1, False), "two, run late": (2, False), "two, run early": (2, True)}


@pytest.fixture(params=PIPELINES.values(), ids=PIPELINES)
def pipeline(request: pytest.FixtureRequest) -> dict[str, Any]:
    """How many steps are in flight, and whether the device is ahead of the loop or behind it."""
    depth, eager = request.param
    return {"depth": depth, "eager": eager}


@pytest.mark.parametrize("seed", range(30))
def test_random_traffic_in_little_memory_loses_nothing_and_mixes_nothing(seed: int, pipeline: dict[str, Any]) -> None:
    """Arrivals, cancels in every phase, stops, rows that fail, preemption and page moves: everyone gets the text it
    gets alone, whether the next step is planned while one runs or not."""
    rng = random.Random(seed)
    cut = layout(
        slabs=rng.choice([6, 9, 14]),
        page_tokens=rng.choice([1, 4, 16]),
        window_tokens=rng.choice([1, 7, 16, 33]),
        window=rng.choice([0, 5, 7]),
    )
    house = FakeHouse(
        cut,
        **pipeline,
        max_sequences=rng.choice([1, 3, 8]),
        prefill_chunk_tokens=rng.choice([1, 5, 16]),
        step_token_budget=rng.choice([4, 16, 40]),
    )
    capacity = house.scheduler.context_tokens
    if capacity < 4:
        pytest.skip("nothing fits this arena")
    cancelled = set()
    ids: list[RequestId] = []
    stops: dict[RequestId, frozenset[int]] = {}
    first_sequence: dict[RequestId, int] = {}
    choked: dict[int, int] = {}  # sequence -> the position at which the device chokes
    sequences = 0

    def fails(row: RowPlan) -> None:
        if row.start <= choked.get(row.sequence, -1) < row.stop:
            raise RuntimeError("the device choked")

    house.device.fails = fails

    def cancel_one() -> None:
        if ids and rng.random() < 0.04:
            victim = rng.choice(ids)
            if victim not in house.ended:
                cancelled.add(victim)
            house.scheduler.cancel(victim, house.now)
            house.scheduler.check()

    for number in range(40):
        prompt = tuple(rng.randrange(97) for _ in range(rng.randint(1, max(1, capacity // rng.choice([2, 4, 8])))))
        outputs = rng.randint(1, max(1, min(30, capacity - len(prompt))))
        if len(prompt) + outputs <= capacity:
            choices, stop = rng.choice([1, 1, 2]), frozenset(rng.sample(range(97), rng.choice([0, 0, 12])))
            if rng.random() < 0.15:
                choked[sequences] = rng.randrange(len(prompt) + outputs)
            ids.append(
                house.submit(
                    f"r{number}",
                    prompt,
                    outputs=outputs,
                    choices=choices,
                    stop_token_ids=stop,
                    seed=number,
                    min_tokens=rng.choice([0, min(3, outputs)]),
                )
            )
            stops[ids[-1]], first_sequence[ids[-1]] = stop, sequences
            sequences += choices
        for _ in range(rng.randint(0, 6)):
            cancel_one()
            house.step(between=cancel_one)
    house.run()
    assert set(house.ended) == set(ids)
    for request_id in ids:
        prompt, outputs = house.prompts[request_id], house.outputs[request_id]
        wanted = []
        for choice, output in enumerate(outputs):
            alone = text_alone(prompt, output.stop.max_tokens, layout=cut, choice=choice, seed=int(request_id[1:]))
            wanted.append(until_stop(alone, output.stop))
        at = choked.get(first_sequence[request_id])
        failing = at is not None and at < len(prompt) + len(wanted[0]) - 1
        if request_id in cancelled or failing:
            assert house.ended[request_id].outcome in ("abort", "error")
            assert request_id in cancelled or house.ended[request_id].outcome == "error"
            assert failing or house.ended[request_id].outcome == "abort"
            assert all(o.tokens == text[: len(o.tokens)] for o, text in zip(outputs, wanted, strict=True))
            if request_id not in cancelled and at is not None:
                assert len(outputs[0].tokens) == max(0, at - len(prompt) + 1)
        else:
            assert house.ended[request_id].outcome in ("length", "stop")
            assert house.texts(request_id) == wanted
            for output, text in zip(outputs, wanted, strict=True):
                stopped = text[-1] in output.stop.stop_token_ids and len(text) > output.stop.min_tokens
                assert output.ending is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert house.scheduler.most_in_flight <= house.depth
    house.assert_empty()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("rebuilds", [False, True])
def test_random_conversations_over_a_cache_are_answered_as_without_one(
    seed: int, rebuilds: bool, pipeline: dict[str, Any]
) -> None:
    """Prompts that go on from earlier ones with their answers, branch off, or come twice, in little memory."""
    rng = random.Random(seed)
    cut = layout(
        slabs=rng.choice([9, 14, 30]),
        page_tokens=rng.choice([1, 4, 16]),
        window_tokens=rng.choice([1, 7, 16, 33]),
        window=rng.choice([0, 5, 7]),
    )
    house = FakeHouse(
        cut,
        **pipeline,
        prefix_caching=True,
        rebuild=shape_of([False, True, True], window_tokens=cut.window_tokens, mtp_layers=0) if rebuilds else None,
        max_sequences=rng.choice([1, 3, 8]),
        prefill_chunk_tokens=rng.choice([1, 5, 16]),
        step_token_budget=rng.choice([4, 16, 40]),
    )
    capacity = house.scheduler.context_tokens
    if capacity < 8:
        pytest.skip("nothing fits this arena")
    texts: list[tuple[int, ...]] = [()]
    ids: list[RequestId] = []

    def cancel_one() -> None:
        if ids and rng.random() < 0.03:
            house.scheduler.cancel(rng.choice(ids), house.now)
            house.scheduler.check()

    for number in range(40):
        known = rng.choice(texts[-6:])[: capacity // 2]
        prompt = known[: rng.choice([len(known), rng.randint(0, len(known))])]
        prompt += tuple(rng.randrange(3) for _ in range(rng.randint(1, 1 + capacity // 8)))
        outputs = rng.randint(1, max(1, min(20, capacity - len(prompt))))
        hints = hints_of(
            prompt,
            turn_ends=sorted(rng.sample(range(1, len(prompt) + 1), min(len(prompt), rng.randint(0, 5)))),
            turn=rng.randint(1, 20),
            call_end_ids=[7],
        )
        ids.append(
            house.submit(
                *(f"r{number}", prompt),
                outputs=outputs,
                choices=rng.choice([1, 1, 2]),
                seed=number,
                hints=rng.choice([None, hints]),
            )
        )
        for _ in range(rng.randint(0, 9)):
            cancel_one()
            house.step(between=cancel_one)
        texts += [house.prompts[done] + tuple(house.texts(done)[0]) for done in ids[-3:] if done in house.ended]
    house.run()
    assert set(house.ended) == set(ids)
    for request_id in ids:
        if house.ended[request_id].outcome != "abort":
            house.assert_answers(request_id, seed=int(request_id[1:]))
    house.assert_empty()


def test_a_prompt_that_goes_on_is_computed_from_where_it_differs(pipeline: dict[str, Any]) -> None:
    house = FakeHouse(layout(slabs=30, page_tokens=4, window_tokens=7), **pipeline, prefix_caching=True)
    first = tuple(range(40, 70))
    a = house.submit("a", first, outputs=6)
    house.run()
    b = house.submit("b", first + tuple(house.texts(a)[0]) + (1, 2, 3), outputs=2)
    again = house.submit("again", first, outputs=3)
    other = house.submit("other", (9, *first), outputs=2)
    house.run()
    for request_id in (a, b, again, other):
        house.assert_answers(request_id)
    cached = {name: facts.cached_tokens for name, facts in house.ended.items()}
    assert cached == {a: 0, b: 28, again: 28, other: 0}  # seven pages of four are whole at the end of the first prompt
    house.assert_empty()


def test_a_prompt_of_whole_pages_that_comes_again_needs_no_rebuild() -> None:
    """One token is left to compute, so it is resumed a page before its end: that is where its window is kept."""
    cut = layout(slabs=30, page_tokens=4, window_tokens=7)
    shape = shape_of([False, True], window_tokens=7, mtp_layers=0)
    house = FakeHouse(cut, prefix_caching=True, rebuild=shape)
    for name in ("first", "again"):
        house.submit(name, tuple(range(28)), outputs=2)
        house.run()
    assert [facts.cached_tokens for facts in house.ended.values()] == [0, 24]
    assert house.cache.rebuilt_tokens == 0
    house.assert_empty()


def test_the_windows_of_turns_are_kept_where_conversations_part(pipeline: dict[str, Any]) -> None:
    """The system text ends at 21 and the last question begins at 40: whoever shares either resumes there."""
    house = FakeHouse(layout(slabs=60, page_tokens=4, window_tokens=7), **pipeline, prefix_caching=True)
    first = tuple(range(50))
    prompts = {
        "first": first,
        "another answer": (*first[:40], 60, 61, 62),
        "another talk": (*first[:22], 70, 71, 72, 73, 74),
        "in between": (*first[:31], 80, 81, 82),
    }
    for name, prompt in prompts.items():
        house.submit(name, prompt, outputs=2, hints=hints_of(prompt, turn_ends=[21, 30, 35, 40]))
        house.run()
    cached = {str(name): facts.cached_tokens for name, facts in house.ended.items()}
    assert cached == {"first": 0, "another answer": 40, "another talk": 20, "in between": 20}
    house.assert_empty()


@pytest.mark.parametrize(
    ("called", "stopped", "ending"),
    [(True, True, Ending.CALLED), (False, True, Ending.SAID), (True, False, Ending.UNKNOWN)],
)
def test_the_cache_learns_whether_an_answer_called_a_tool(
    called: bool, stopped: bool, ending: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = FakeHouse(layout(), prefix_caching=True)
    prompt = tuple(range(12))
    text = text_alone(prompt, 6, layout=house.layout, choice=0, seed=0)
    seen: list[Ending] = []
    close = house.cache.close
    monkeypatch.setattr(
        house.cache,
        "close",
        lambda *args: seen.append(args[3]) or close(*args),  # type: ignore[func-returns-value]
    )
    house.submit(
        *("a", prompt),
        outputs=6,
        stop_token_ids=frozenset(text[-1:]) if stopped else frozenset(),
        min_tokens=5,
        hints=hints_of(prompt, call_end_ids=text[-2:-1] if called else [1000]),
    )
    house.run()
    assert seen == [ending]


def test_who_shares_a_prefix_is_admitted_beside_its_first_reader() -> None:
    """Two of them fit only if what they share counts once."""
    cut = layout(slabs=9, page_tokens=4, window_tokens=7)
    shared = tuple(n % 97 for n in range(80))
    for caching in (False, True):
        house = FakeHouse(cut, prefix_caching=caching, prefill_chunk_tokens=16)
        first = house.submit("first", (*shared, 1), outputs=30)
        while not house.outputs[first][0].tokens:
            house.step()
        second = house.submit("second", (*shared, 2), outputs=2)
        house.step()
        assert house.scheduler.running == 1 + caching
        house.run()
        house.assert_answers(first)
        house.assert_answers(second)
        house.assert_empty()


def until_stop(text: list[int], rules: StopRules) -> list[int]:
    """The plain definition of where a text ends."""
    ends = [at + 1 for at, token in enumerate(text) if token in rules.stop_token_ids and at + 1 > rules.min_tokens]
    return text[: min(ends, default=len(text))]


def test_who_is_preempted_and_taken_again_in_the_same_plan_answers_as_alone() -> None:
    """What it has to do is more then than when the plan began. It happens in few lives, and in these five."""
    taken_again = 0
    for seed in (0, 33, 74, 161, 194):
        rng = random.Random(seed)
        cut = layout(slabs=rng.randint(20, 34), page_tokens=rng.choice([1, 2]), window=0)
        most_sequences, longest, ids = rng.choice([4, 8, 64]), rng.choice([10, 30]), dict[RequestId, int]()
        house = FakeHouse(cut, depth=2, prefix_caching=True, prefill_chunk_tokens=16, max_sequences=most_sequences)
        for number in range(30):
            prompt = tuple(rng.randrange(97) for _ in range(rng.randint(1, longest)))
            outputs = rng.randint(1, min(100, house.scheduler.context_tokens - len(prompt) - 1))
            ids[house.submit(f"{number}", prompt, outputs=outputs, seed=number)] = number
            if rng.random() < 0.5:
                house.step(before=house.assert_samples_are_due)
        house.run(before=house.assert_samples_are_due)
        for request_id, number in ids.items():
            house.assert_answers(request_id, seed=number)
            (events,) = house.scheduler.timelines.of(f"{number}").values()
            told = [(each.what, each.at_s) for each in events]
            taken_again += sum(("matched", at_s) in told for what, at_s in told if what == "preempted")
        house.assert_empty()
    assert taken_again > 0


def test_little_memory_does_preempt_and_move_pages(pipeline: dict[str, Any]) -> None:
    """The random test above is only worth something if these paths are walked."""
    moves = 0
    for slabs in (9, 10, 11, 12):
        house = FakeHouse(layout(slabs=slabs, window_tokens=16), **pipeline, prefill_chunk_tokens=8)
        ids = [house.submit(f"{n}", tuple(range(n, 4 * n + 6)), outputs=50 + 5 * n, seed=n) for n in range(8)]
        house.run()
        for n, request_id in enumerate(ids):
            house.assert_answers(request_id, seed=n)
        assert house.scheduler.most_in_flight == house.depth
        assert house.preemptions > 0
        moves += house.device.moves
    assert moves > 0


def test_a_window_model_never_holds_more_window_pages_than_window_plus_chunks_in_flight(
    pipeline: dict[str, Any],
) -> None:
    cut = layout(slabs=3000, page_tokens=16, window_tokens=31)
    house = FakeHouse(cut, **pipeline, prefill_chunk_tokens=64, step_token_budget=64)
    house.submit("long", tuple(n % 97 for n in range(2000)), outputs=300)
    most_prefill = most_decode = 0
    while house.step():
        held = house.cache.held_pages(PageKind.WINDOW)
        running = next(iter(house.scheduler._running.values()), None)
        if running is not None and running.output_tokens:
            most_decode = max(most_decode, held)
        else:
            most_prefill = max(most_prefill, held)
    # After a commit only W positions can be seen again: they touch at most ceil((W - 1) / page) + 1 pages. With two
    # steps in flight the other one's chunk, of four pages, or its token is held as well.
    assert most_prefill <= 3 + 4 * (house.depth - 1)
    assert most_decode <= 3 + (house.depth - 1)
    house.assert_empty()


def test_few_uncached_tokens_run_first() -> None:
    house = FakeHouse(layout(slabs=4000), max_sequences=1, step_token_budget=16, prefill_chunk_tokens=16)
    order: list[str] = []
    house.submit("first", tuple(range(20)), outputs=2)
    house.step()
    for name, length in (("long", 300), ("short", 5), ("middle", 90)):
        house.submit(name, tuple(range(length)), outputs=2)
    while house.step():
        order += [r for r in house.ended if r not in order]
    assert order == ["first", "short", "middle", "long"]


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers() -> None:
    house = FakeHouse(layout(slabs=6))
    usable = house.scheduler.context_tokens
    with pytest.raises(TooLong) as refusal:
        house.submit("big", tuple([1] * usable), outputs=1)
    assert (refusal.value.prompt_tokens, refusal.value.context_tokens) == (usable, usable)
    house.assert_empty()
    fits = house.submit("fits", tuple([1] * (usable - 3)), outputs=3)
    house.run()
    house.assert_answers(fits)


def test_a_full_queue_refuses_and_counts_every_choice() -> None:
    house = FakeHouse(layout(), max_queued_requests=2, max_sequences=2)
    house.submit("a", (1, 2), outputs=2, choices=3)  # two find a slot, one waits
    with pytest.raises(Overloaded):
        house.submit("b", (1, 2), outputs=2, choices=2)
    house.submit("c", (1, 2), outputs=2)
    with pytest.raises(BadRequest, match="5 choices are more than this server can run and queue"):
        house.submit("d", (1, 2), outputs=2, choices=5)
    house.run()
    assert set(house.ended) == {"a", "c"}
    house.submit("e", (1, 2), outputs=2, choices=4)
    house.run()
    assert "e" in house.ended


def test_a_queue_of_nothing_still_runs_what_finds_a_slot() -> None:
    house = FakeHouse(layout(), max_queued_requests=0, max_sequences=2)
    house.submit("a", (1, 2), outputs=5)
    house.submit("b", (1, 2), outputs=5)
    house.step()
    with pytest.raises(Overloaded):
        house.submit("c", (1, 2), outputs=5)
    house.run()
    assert set(house.ended) == {"a", "b"}


def test_a_failing_row_ends_its_request_only() -> None:
    house = FakeHouse(layout())
    good = house.submit("good", (1, 2, 3), outputs=9)
    bad = house.submit("bad", (4, 5, 6), outputs=9, choices=2)
    plan = house.scheduler.plan(0.0)
    assert plan is not None
    result = house.device.run(plan)
    broken = next(i for i, row in enumerate(plan.rows) if row.sequence == 1)
    rows = list(result.rows)
    rows[broken] = type(rows[broken])(failure="boom")
    house.scheduler.commit(plan, type(result)(step_id=plan.step_id, rows=tuple(rows), device_s=0.0), 0.1)
    house.scheduler.check()
    house.run()
    house.assert_answers(good)
    assert all(isinstance(o.ending, EngineFailed) for o in house.outputs[bad])
    assert house.ended[bad].outcome == "error"
    house.assert_empty()


def test_an_output_that_raises_ends_its_request_only(pipeline: dict[str, Any]) -> None:
    house = FakeHouse(layout(), **pipeline)
    good = house.submit("good", (1, 2, 3), outputs=9)
    bad = house.submit("bad", (4, 5, 6), outputs=9)

    def explode(_token: object) -> None:
        raise ValueError("a bug in a parser")

    house.outputs[bad][0].push = explode  # type: ignore[method-assign,assignment]
    house.run()
    house.assert_answers(good)
    assert isinstance(house.outputs[bad][0].ending, EngineFailed)
    house.assert_empty()


def test_no_step_exceeds_its_token_budget() -> None:
    house = FakeHouse(layout(slabs=400), step_token_budget=10, prefill_chunk_tokens=8)
    seen: list[tuple[RowPlan, ...]] = []
    house.device.before_step = lambda plan: seen.append(plan.rows)
    for number in range(5):
        house.submit(f"{number}", tuple(range(30)), outputs=10)
    house.run()
    for rows in seen:
        assert sum(len(row.tokens) for row in rows) <= 10
        assert all(len(row.tokens) <= 8 for row in rows)


def test_after_the_longest_waiting_one_decodes_go_before_prompts() -> None:
    """With a budget of two tokens a prompt of many chunks must not take the turn of a running answer."""
    house = FakeHouse(layout(slabs=400), step_token_budget=9, prefill_chunk_tokens=8)
    old = house.submit("old", tuple(range(3)), outputs=40)
    house.step()
    house.now += 1
    short = house.submit("short", (1, 2), outputs=30)
    house.step()
    house.now += 1
    house.submit("long", tuple(range(80)), outputs=1)
    for _ in range(5):
        before = [len(house.outputs[name][0].tokens) for name in (old, short)]
        house.step()
        after = [len(house.outputs[name][0].tokens) for name in (old, short)]
        assert after == [count + 1 for count in before]


def test_memory_always_comes_to_the_longest_waiting_and_shortage_falls_on_the_last_in_order() -> None:
    """The longest waiting one has the largest prompt, so by its key alone it would be the first to go."""
    house = FakeHouse(layout(slabs=14, window_tokens=16), prefill_chunk_tokens=8, step_token_budget=64)
    scheduler = house.scheduler
    secure, preempt = scheduler._secure, scheduler._preempt
    choices: list[int] = []
    planned: set[int] = set()

    def noting(sequence: Sequence, stop: int, plan: Any) -> bool:
        planned.clear()
        planned.update(plan.secured)
        return secure(sequence, stop, plan)

    def watched(victim: Sequence, now: float) -> None:
        running = list(scheduler._running.values())
        oldest = min(running, key=lambda s: (s.request.arrival_s, s.id))
        assert victim is not oldest
        others = [s for s in running if s is not oldest and s.id not in planned]
        assert victim is max(others, key=lambda s: (s.key, s.id))
        choices.append(len(others))
        preempt(victim, now)

    scheduler._secure, scheduler._preempt = noting, watched  # type: ignore[method-assign]

    def submit(*sizes: int) -> None:
        for size in sizes:
            house.submit(f"{size}", tuple(range(size)), outputs=90 - size, seed=size)
            house.now += 0.0005

    submit(40)
    house.step()
    submit(6, 20, 9, 30, 12, 25, 7)
    first: list[int] = []
    going = True
    while going:
        before = list(scheduler._running.values())  # whoever joins in this plan comes behind them
        first.clear()
        going = house.step(before=lambda plan: first.append(plan.rows[0].sequence))
        if before:
            assert first == [min(before, key=lambda s: (s.request.arrival_s, s.id)).id]
    assert len(choices) > 3
    assert max(choices) > 2, "there was a choice"
    for request_id in house.ended:
        house.assert_answers(request_id, seed=int(request_id))


def test_admission_leaves_room_for_what_the_running_ones_still_need(pipeline: dict[str, Any]) -> None:
    """The second prompt would fit the pages that are free now, not those that the first one's prompt leaves."""
    house = FakeHouse(layout(slabs=4, window=0), **pipeline, prefill_chunk_tokens=8, step_token_budget=16)  # 20 pages
    first = house.submit("first", tuple([1] * 60), outputs=4)  # fifteen pages, two of them in the first step
    house.step()
    second = house.submit("second", tuple([2] * 40), outputs=4)  # ten pages
    while first not in house.ended:
        house.step()
        started = any(s.request.request_id == second for s in house.scheduler._running.values())
        assert first in house.ended or not started
    house.run()
    assert house.preemptions == 0
    house.assert_answers(second)


def test_an_answer_that_needs_one_more_page_keeps_a_newcomer_waiting() -> None:
    house = FakeHouse(layout(slabs=4, page_tokens=4, window=0), prefill_chunk_tokens=64, step_token_budget=64)
    assert house.cache.layout.full_pages_per_slab * 4 == 20
    house.submit("answer", tuple([1] * 33), outputs=20)  # nine pages with room for three tokens, and then it needs more
    house.step()
    house.submit("newcomer", tuple([2] * 42), outputs=2)  # eleven pages, just what is free
    house.step()
    assert (house.scheduler.running, house.scheduler.waiting) == (1, 1)
    house.run()
    assert house.preemptions == 0


def test_decoding_sequences_do_not_hold_room_for_a_chunk_of_prompt() -> None:
    """A chunk of many windows is reserved while a prompt is computed, and not for every answer that runs."""
    cut = layout(slabs=60, page_tokens=4, window_tokens=7)
    house = FakeHouse(cut, prefill_chunk_tokens=64, step_token_budget=64, max_sequences=40)
    for number in range(30):
        house.submit(f"{number}", tuple(range(60)), outputs=30, seed=number)
    most = 0
    while house.step():
        most = max(most, house.scheduler.running)
    per_sequence = house.cache.peak_demand(90, 1)
    slabs = per_sequence.full / cut.full_pages_per_slab + per_sequence.window / cut.window_pages_per_slab
    assert most >= 0.7 * 60 / slabs


def test_a_requests_priority_decides_who_goes_first() -> None:
    house = FakeHouse(layout(slabs=4000), max_sequences=1)
    house.submit("running", (1, 2), outputs=3)
    house.step()
    house.submit("short", tuple(range(5)), outputs=2)
    house.submit("urgent", tuple(range(300)), outputs=2, priority=-1)
    house.run()
    assert list(house.ended) == ["running", "urgent", "short"]


def test_a_plan_carries_only_the_page_table_entries_that_changed() -> None:
    house = FakeHouse(layout(slabs=400), prefill_chunk_tokens=8)
    house.submit("a", tuple(range(50)), outputs=30)
    written: list[tuple[PageKind, int]] = []
    house.device.before_step = lambda plan: written.extend(
        (write.kind, write.first_page + i) for write in plan.writes for i in range(len(write.pages))
    )
    house.run()
    # The last token is sampled and never computed: 79 positions, 20 pages of each kind, each told once.
    assert sorted(written) == [(kind, page) for kind in PageKind for page in range(20)]


def test_prompt_tokens_are_counted_once_even_if_a_preemption_computes_them_again(pipeline: dict[str, Any]) -> None:
    house = FakeHouse(layout(slabs=9, window_tokens=16), **pipeline, prefill_chunk_tokens=8, step_token_budget=32)
    prompts = 0
    for number in range(8):
        house.submit(f"{number}", tuple(range(number, 4 * number + 6)), outputs=50 + 5 * number, seed=number)
        prompts += 3 * number + 6
    counted = 0
    while (facts := house.step_facts()) is not None:
        counted += facts.prompt_tokens
    assert house.preemptions > 0
    assert counted == prompts


def test_the_facts_of_a_request_tell_when_it_waited_computed_and_answered() -> None:
    house = FakeHouse(layout(), max_sequences=1, prefill_chunk_tokens=4, step_token_budget=4)
    house.submit("first", (1, 2), outputs=5)  # steps end at 0.01 ... 0.05
    house.submit("second", tuple(range(12)), outputs=3)  # three chunks, then two more tokens
    house.run()
    facts = house.ended[RequestId("second")]
    assert facts.queued_s == pytest.approx(0.05)
    assert facts.prefill_s == pytest.approx(0.03)
    assert facts.first_token_s == pytest.approx(0.08)
    assert facts.decode_s == pytest.approx(0.02)
    assert facts.total_s == pytest.approx(0.10)
    assert (facts.outcome, facts.prompt_tokens, facts.output_tokens) == ("length", 12, 3)


def test_min_tokens_keeps_stop_ids_away_until_there_are_enough(pipeline: dict[str, Any]) -> None:
    house = FakeHouse(layout(), **pipeline)
    stop = StopRules(max_tokens=6, min_tokens=3)
    output = CollectedOutput(stop)
    house.scheduler.submit(
        GenerationRequest(
            request_id=RequestId("m"),
            prompt_tokens=(1, 2, 3),
            sampling=SamplingParams(),
            stop=stop,
            outputs=(output,),
            arrival_s=0.0,
        )
    )
    flags: list[bool] = []
    house.device.before_step = lambda plan: flags.extend(row.suppress_stop for row in plan.rows)
    house.run()
    assert flags == [True, True, True, False, False, False]
