"""A scheduler, a cache and a device, stepped by hand: no event loop, no clock but ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from server.cache.kv_cache import KVCache
from server.config import KVLayout, SchedulerConfig
from server.engine import Runner
from server.metrics import RequestFacts, StepFacts
from server.request import GenerationRequest, RequestId, SamplingParams, StopRules
from server.scheduler.scheduler import Scheduler
from server.step import PageKind, StepPlan
from tests.fake_device import CollectedOutput


class House:
    """Every request's prompt, outputs and ending are kept; the scheduler is checked after every step."""

    def __init__(self, layout: KVLayout, device: Runner, *, context_tokens: int = 100_000, **config: int) -> None:
        self.layout = layout
        self.device = device
        self.cache = KVCache(layout)
        self.ended: dict[RequestId, RequestFacts] = {}
        self.scheduler = Scheduler(
            SchedulerConfig(**config), self.cache, context_tokens=context_tokens, on_end=self._ended
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
        priority: int = 0,
    ) -> RequestId:
        request_id = RequestId(name)
        stop = StopRules(max_tokens=outputs, stop_token_ids=stop_token_ids)
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
            )
        )
        self.prompts[request_id] = tuple(prompt)
        self.outputs[request_id] = collected
        return request_id

    def step(
        self, between: Callable[[], None] = lambda: None, before: Callable[[StepPlan], None] = lambda _plan: None
    ) -> bool:
        """One step; `before` sees the plan, `between` runs while the step is on the device."""
        return self.step_facts(between, before) is not None

    def step_facts(
        self, between: Callable[[], None] = lambda: None, before: Callable[[StepPlan], None] = lambda _plan: None
    ) -> StepFacts | None:
        plan = self.scheduler.plan(self.now)
        if plan is None:
            return None
        before(plan)
        result = self.device.run(plan)
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

    def texts(self, request_id: RequestId) -> list[list[int]]:
        """The tokens of each choice."""
        return [output.tokens for output in self.outputs[request_id]]

    def assert_empty(self) -> None:
        assert_nothing_left(self.scheduler, self.cache)

    def _ended(self, request_id: RequestId, facts: RequestFacts) -> None:
        assert request_id not in self.ended, "a request ended twice"
        self.ended[request_id] = facts


def assert_nothing_left(scheduler: Scheduler, cache: KVCache) -> None:
    """Every map is empty and every page is back."""
    scheduler.check()
    assert scheduler.idle
    assert not scheduler._requests
    assert not scheduler._sequences
    assert not scheduler._running
    assert not scheduler._waiting
    assert not cache._rows
    assert not cache._quarantine
    assert all(cache.usage(kind) == 0 for kind in PageKind)
