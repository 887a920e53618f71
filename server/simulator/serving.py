"""The server's own scheduler and cache over a trace, on a clock that a cost model moves."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from server.cache.kv_cache import CachePolicy, KVCache, Prefix
from server.cache.retention import Ending
from server.config import KVLayout, SchedulerConfig
from server.errors import TooLong, TwinpaneError
from server.metrics import RequestFacts
from server.rebuild import RebuildShape
from server.request import (
    FinishReason,
    GenerationRequest,
    PrefixHints,
    RequestId,
    SampledToken,
    SamplingParams,
    StopRules,
)
from server.scheduler.scheduler import Scheduler
from server.scheduler.sequence import Sequence
from server.scheduler.step_cost import StepCost, shape_of_rows
from server.simulator.arrivals import Arrivals
from server.simulator.prompts import Prompts
from server.simulator.replay import ENDINGS
from server.simulator.trace import Request, Trace
from server.step import RowResult, SequenceId, StepPlan, StepResult

TOKEN = SampledToken(token_id=0)
SAMPLED, NOT_SAMPLED = RowResult(token=TOKEN), RowResult()


@dataclass(slots=True)
class Clock:
    """Owner: Serving."""

    now_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class Answer:
    """What happened to one request; its output stream, too, which ends after as many tokens as in the trace.

    effective_tokens: how many it had to compute when it arrived, and cached_tokens, how many not when it began; order
    counts those that began. gaps_s: between its tokens. Times are None until they come, and outcome until its end.
    Owner: Serving.
    """

    request: Request
    arrival_s: float
    wanted_tokens: int
    clock: Clock = field(repr=False)
    sequence: SequenceId | None = None
    effective_tokens: float = 0.0
    cached_tokens: int = 0
    order: int | None = None
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    output_tokens: int = 0
    gaps_s: array[float] = field(default_factory=lambda: array("d"), repr=False)
    outcome: FinishReason | None = None

    @property
    def ttft_s(self) -> float:
        assert self.first_token_s is not None
        return self.first_token_s - self.arrival_s

    def push(self, token: SampledToken) -> FinishReason | None:
        now_s = self.clock.now_s
        if self.last_token_s is None:
            self.first_token_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_token_s)
        self.last_token_s = now_s
        self.output_tokens += 1
        if self.output_tokens < self.wanted_tokens:
            return None
        return FinishReason.STOP if self.request.stop in ENDINGS else FinishReason.LENGTH

    def fail(self, error: TwinpaneError) -> None:
        """Its end says so, too."""

    def cancel(self) -> None:
        """Its end says so, too."""


@dataclass(slots=True, kw_only=True)
class Served:
    """What came of a trace. answers: of those that were accepted, in the order of their ends; refused: too long for all
    the memory. busy_s: the time in which the device computed; prompt_s: in steps with prompt tokens among them."""

    answers: list[Answer] = field(default_factory=list)
    refused: int = 0
    began_s: float = 0.0
    ended_s: float = 0.0
    busy_s: float = 0.0
    prompt_s: float = 0.0
    steps: int = 0
    rows: int = 0
    preemptions: int = 0
    rebuilt_tokens: int = 0

    @property
    def span_s(self) -> float:
        return self.ended_s - self.began_s

    @property
    def hit_rate(self) -> float:
        prompt_tokens = sum(answer.request.input_tokens for answer in self.answers)
        return sum(answer.cached_tokens for answer in self.answers) / prompt_tokens if prompt_tokens else 0.0


class Serving:
    """One pass over a trace: plan, wait as long as the step takes, commit. The scheduler is told what steps cost, as
    one that has measured many. One step is in flight at a time. No request is turned away but for its length."""

    def __init__(
        self,
        trace: Trace,
        layout: KVLayout,
        rebuild: RebuildShape,
        cache_policy: CachePolicy,
        *,
        scheduler: SchedulerConfig,
        cost: StepCost,
        arrivals: Arrivals,
    ) -> None:
        self._trace = trace
        self._cost = cost
        self._arrivals = arrivals
        self._prompts = Prompts(trace, layout.page_tokens)
        self._clock = Clock()
        self._answers: dict[RequestId, Answer] = {}
        self._order = itertools.count()
        self.cache = KVCache(layout, rebuild=rebuild, policy=cache_policy)
        longest = max((each.input_tokens + each.output_tokens for each in trace.requests), default=0)
        self.scheduler = Scheduler(
            scheduler,
            self.cache,
            context_tokens=longest + 2,  # what is empty in the trace has one token here
            on_end=self._ended,
            cost=cost,
            prefix_of=self._prefix_of,
        )
        self.result = Served()

    def run(self, progress: Callable[[int], object] = lambda _ended: None) -> Served:
        """progress: told how many more requests are over."""
        over = 0
        for _ in self.steps():
            now_over = len(self.result.answers) + self.result.refused
            if now_over > over:
                progress(now_over - over)
                over = now_over
        return self.result

    def steps(self) -> Iterator[Served]:
        clock, scheduler, result = self._clock, self.scheduler, self.result
        clock.now_s = result.began_s = result.ended_s = self._arrivals.next_s or 0.0
        while True:
            for arrival_s, index in self._arrivals.take_due(clock.now_s):
                self._submit(self._trace.requests[index], arrival_s)
            plan = scheduler.plan(clock.now_s)
            if plan is not None:
                self._run(plan)
                yield result
            elif self._arrivals.next_s is not None:
                clock.now_s = max(clock.now_s, self._arrivals.next_s)
            else:
                break
        assert scheduler.idle, f"those that are left can never run: {scheduler!r}"

    def _submit(self, request: Request, arrival_s: float) -> None:
        prompt_tokens = max(1, request.input_tokens)
        room = self.scheduler.context_tokens - prompt_tokens
        answer = Answer(
            request=request,
            arrival_s=arrival_s,
            wanted_tokens=max(1, min(request.output_tokens, room)),
            clock=self._clock,
        )
        request_id = RequestId(str(request.index))
        self._answers[request_id] = answer

        def on_admitted(cached_tokens: int) -> None:
            answer.cached_tokens, answer.order, answer.started_s = cached_tokens, next(self._order), self._clock.now_s

        try:
            self.scheduler.submit(
                GenerationRequest(
                    request_id=request_id,
                    prompt_tokens=cast(tuple[int, ...], range(prompt_tokens)),  # only how many there are matters
                    sampling=SamplingParams(),
                    stop=StopRules(max_tokens=answer.wanted_tokens),
                    outputs=(answer,),
                    arrival_s=arrival_s,
                    hints=CALLS if ENDINGS.get(request.stop or "") is Ending.CALLED else None,
                    on_admitted=on_admitted,
                )
            )
        except TooLong:
            del self._answers[request_id]
            self.result.refused += 1
            self._arrivals.note_end(request.index, self._clock.now_s)
            return
        assert answer.sequence is not None
        answer.effective_tokens = prompt_tokens - self.cache.waiting.saved(answer.sequence)

    def _prefix_of(self, sequence: Sequence) -> Prefix:
        answer = self._answers[sequence.request.request_id]
        answer.sequence = sequence.id
        return self._prompts.prefix(answer.request)

    def _run(self, plan: StepPlan) -> None:
        result = self.result
        took_s = self._cost.seconds(shape_of_rows((row.start, row.count) for row in plan.rows))
        self._clock.now_s += took_s
        facts = self.scheduler.commit(
            plan,
            StepResult(
                step_id=plan.step_id,
                rows=tuple(SAMPLED if row.samples else NOT_SAMPLED for row in plan.rows),
                device_s=took_s,
            ),
            self._clock.now_s,
        )
        result.ended_s = self._clock.now_s
        result.busy_s += took_s
        result.prompt_s += took_s if any(row.count > 1 for row in plan.rows) else 0.0
        result.steps += 1
        result.rows += len(plan.rows)
        result.preemptions += facts.preemptions
        result.rebuilt_tokens += facts.rebuilt_tokens

    def _ended(self, request_id: RequestId, facts: RequestFacts) -> None:
        answer = self._answers.pop(request_id)
        assert facts.outcome in tuple(FinishReason), f"nobody leaves or fails here, but {facts!r}"
        answer.outcome = FinishReason(facts.outcome)
        self.result.answers.append(answer)
        self._arrivals.note_end(answer.request.index, self._clock.now_s)


CALLS = PrefixHints(
    ids=np.empty(0, dtype=np.int64),
    turn_ends=np.empty(0, dtype=np.int64),
    turn=1,
    added_tokens=0,
    call_end_ids=frozenset({TOKEN.token_id}),
)
"""Of an answer that calls a tool: the scheduler reads so at its end, and nothing else of it."""
