"""A scheduler, a cache and a device, stepped by hand: no event loop, no clock but ours."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from server.cache.kv_cache import KVCache
from server.config import KVLayout, SchedulerConfig
from server.engine import Runner, run_isolated
from server.metrics import RequestFacts, StepFacts
from server.rebuild import RebuildShape
from server.request import GenerationRequest, PrefixHints, RequestId, SamplingParams, StopRules
from server.scheduler.scheduler import Scheduler
from server.scheduler.step_cost import StepCost
from server.step import PageKind, SequenceId, StepPlan, StepResult
from tests.fake_device import CollectedOutput, PagesInFlight


class WatchedScheduler(Scheduler):
    """A scheduler that never gives away what a step in flight may touch; counts the rows that came back for nobody."""

    def __init__(self, config: SchedulerConfig, cache: KVCache, **settings: Any) -> None:
        super().__init__(config, cache, **settings)
        self.watch = PagesInFlight(cache.layout)
        self.rows = 0
        self.most_in_flight = 0

    def plan(self, now: float) -> StepPlan | None:
        plan = super().plan(now)
        if plan is not None:
            self.watch.hand_over(plan)
            self.rows += len(plan.rows)
            self.most_in_flight = max(self.most_in_flight, self._cache.steps_in_flight)
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> StepFacts:
        self.watch.take_back(plan.step_id)
        return super().commit(plan, result, now)

    def skip(self, plan: StepPlan) -> None:
        self.watch.take_back(plan.step_id)
        super().skip(plan)


class House:
    """Every request's prompt, outputs and ending are kept; the scheduler is checked after every step.

    With depth 2 the next step is planned before the last one is committed, as the engine does: the device runs it at
    the earliest moment, before that commit, if eager, and else at the latest.
    """

    def __init__(
        self,
        layout: KVLayout,
        device: Runner,
        *,
        context_tokens: int = 100_000,
        depth: int = 1,
        eager: bool = False,
        prefix_caching: bool = False,
        rebuild: RebuildShape | None = None,
        cost: StepCost | None = None,
        scheduler: type[Scheduler] | None = None,
        **config: Any,
    ) -> None:
        self.layout = layout
        self.device = device
        self.depth = depth
        self.eager = eager
        self.failed: set[SequenceId] = set()
        self.in_flight: deque[tuple[StepPlan, StepResult | None]] = deque()
        self.cache = KVCache(layout, rebuild=rebuild)
        self.ended: dict[RequestId, RequestFacts] = {}
        self.scheduler = (scheduler or WatchedScheduler)(
            SchedulerConfig(prefix_caching="on" if prefix_caching else "off", **config),
            self.cache,
            context_tokens=context_tokens,
            on_end=self._ended,
            cost=cost,
        )
        self.now = 0.0
        self.preemptions = 0
        self.prompts: dict[RequestId, tuple[int, ...]] = {}
        self.outputs: dict[RequestId, list[CollectedOutput]] = {}

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        outputs: int,
        choices: int = 1,
        sampling: SamplingParams | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        priority: int = 0,
        hints: PrefixHints | None = None,
        client: str | None = None,
    ) -> RequestId:
        request_id = RequestId(name)
        stop = StopRules(max_tokens=outputs, min_tokens=min_tokens, stop_token_ids=stop_token_ids)
        collected = [CollectedOutput(stop) for _ in range(choices)]
        self.scheduler.submit(
            GenerationRequest(
                request_id=request_id,
                prompt_tokens=tuple(prompt),
                sampling=sampling or SamplingParams(),
                stop=stop,
                outputs=tuple(collected),
                arrival_s=self.now,
                priority=priority,
                hints=hints,
                client=client,
            )
        )
        self.prompts[request_id] = tuple(prompt)
        self.outputs[request_id] = collected
        return request_id

    def step(
        self, between: Callable[[], None] = lambda: None, before: Callable[[StepPlan], None] = lambda _plan: None
    ) -> bool:
        """Commit one step; `before` sees each plan as it is handed over, `between` runs while steps are in flight."""
        return self.step_facts(between, before) is not None

    def step_facts(
        self, between: Callable[[], None] = lambda: None, before: Callable[[StepPlan], None] = lambda _plan: None
    ) -> StepFacts | None:
        while len(self.in_flight) < self.depth:
            plan = self.scheduler.plan(self.now)
            if plan is None:
                break
            before(plan)
            self.in_flight.append((plan, self._run(plan) if self.eager else None))
            if len(self.in_flight) < self.depth:
                between()
        if not self.in_flight:
            return None
        plan, result = self.in_flight.popleft()
        if result is None:
            result = self._run(plan)
        between()
        self.now += 0.01
        facts = self.scheduler.commit(plan, result, self.now)
        self.preemptions += facts.preemptions
        self.scheduler.check()
        return facts

    def run(self, limit: int = 20_000, before: Callable[[StepPlan], None] = lambda _plan: None) -> None:
        for _ in range(limit):
            if not self.step(before=before):
                return
        raise AssertionError(f"no end after {limit} steps: {self.scheduler!r}")

    def assert_samples_are_due(self, plan: StepPlan) -> None:
        """A row brings a token if it ends where all that is known of its sequence ends, and only then."""
        for row in plan.rows:
            known = self.scheduler._sequences[row.sequence].known_tokens
            assert row.samples == (row.stop >= known), f"{row!r} of {known} known tokens"

    def texts(self, request_id: RequestId) -> list[list[int]]:
        """The tokens of each choice."""
        return [output.tokens for output in self.outputs[request_id]]

    def assert_empty(self) -> None:
        assert_nothing_left(self.scheduler, self.cache)

    def _run(self, plan: StepPlan) -> StepResult:
        """Whoever reads a cell that is not there must have failed in an earlier step, and goes on in vain."""
        result, _ = run_isolated(self.device, plan, lambda: None)
        for row, outcome in zip(plan.rows, result.rows, strict=True):
            if outcome.failure is not None:
                assert row.sequence in self.failed or not outcome.failure.startswith("AssertionError"), outcome.failure
                self.failed.add(row.sequence)
        return result

    def _ended(self, request_id: RequestId, facts: RequestFacts) -> None:
        assert request_id not in self.ended, "a request ended twice"
        self.ended[request_id] = facts


def assert_nothing_left(scheduler: Scheduler, cache: KVCache) -> None:
    """Every map is empty and every page is back, or kept as cache for nobody in particular."""
    scheduler.check()
    cache.flush()
    cache.check()
    assert scheduler.idle
    assert not scheduler._requests
    assert not scheduler._sequences
    assert not scheduler._running
    assert not len(cache.waiting)
    assert not scheduler._queued_tokens
    assert not cache._rows
    assert not cache._quarantine
    assert all(cache.usage(kind) == 0 for kind in PageKind)
