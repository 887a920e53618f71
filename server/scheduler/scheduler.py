"""Who runs next: priority, admission over both kinds of page, chunks under a token budget, preemption."""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from server.cache.kv_cache import NO_PAGES, KVCache, PageDemand, Prefix
from server.cache.prefix_tree import Keys
from server.cache.retention import Ending, turn_marks
from server.config import SchedulerConfig
from server.errors import BadRequest, EngineFailed, Overloaded, RequestTimeout, TooLong, TwinpaneError
from server.metrics import RequestFacts, StepFacts
from server.request import FinishReason, GenerationRequest, RequestId, SampledToken
from server.scheduler.lanes import lane_of, share
from server.scheduler.priority import POLICIES
from server.scheduler.queue_limits import DrainRate, FairShares
from server.scheduler.sequence import Sequence
from server.scheduler.step_cost import ChunkSizer, FittedCost, StepCost, shape_of_row, shape_of_rows
from server.scheduler.timeline import Timelines
from server.step import (
    PageKind,
    PageMove,
    RowPlan,
    SequenceId,
    SlotId,
    SlotOpening,
    StepId,
    StepPlan,
    StepResult,
    TableWrite,
)

log = logging.getLogger("twinpane.scheduler")

OLDEST_PART = 8
"""The oldest prompt of a lane gets an eighth of the lane's tokens before the others, if it wants as many."""

FIRST_RATE = 100.0
"""Tokens that a second of waiting forgives, before any step was measured."""
RATE_SHARE = 1 / 16
"""Afterwards, this part of what is computed in a second. On traces of chats and of agents with half or a quarter of it,
more wait longer; with much less, who has much to compute waits for what may be forever."""
RATE_STEPS = 32
RATE_STEP = 1.5
"""So many steps apart it is looked at, and changed if it would change by this factor."""
SPARE_DEADLINES = 256
MOST_REKEYED = 10_000


@dataclass(slots=True, kw_only=True)
class _Accepted:
    """A request whose choices are not all over, with the times its ending will report."""

    request: GenerationRequest
    live: dict[SequenceId, Sequence]
    started_s: float | None = None
    first_token_s: float | None = None
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class _PlanBuilder:
    """A plan while it is made."""

    step_id: StepId
    now: float
    budget: int
    moves: list[PageMove] = field(default_factory=list)
    writes: list[TableWrite] = field(default_factory=list)
    opened: list[SlotOpening] = field(default_factory=list)
    rows: list[RowPlan] = field(default_factory=list)
    secured: dict[SequenceId, int] = field(default_factory=dict)
    """Up to which position each has its pages; none of them is preempted for this plan."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A prompt that wants its part of a step's prompt tokens. In each lane, lower ranks come first. weight: see
    ChunkSizer.weight."""

    lane: int
    rank: float
    arrival_s: float
    wanted: int
    weight: float = 1.0


class Scheduler:
    """Owner of every waiting and running sequence, on the event-loop thread. plan() and commit() are plain functions
    of this state and the clock; between them the step is in flight.

    A step may be planned while others are in flight. It takes it that a token which one of them samples ends nothing
    that it need not end; what ends all the same leaves a row behind that is dropped when it is committed. Where memory
    is short, nothing is preempted or moved as long as steps are in flight: plan() lets them end first, so those
    decisions are made on full knowledge and free their pages at once.

    on_end is called once for every request that was accepted, however it ended.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCache,
        *,
        context_tokens: int,
        on_end: Callable[[RequestId, RequestFacts], None] = lambda _id, _facts: None,
        cost: StepCost | None = None,
        prefix_of: Callable[[Sequence], Prefix | None] | None = None,
    ) -> None:
        """cost: how long steps take; by default learned as they are measured. prefix_of: how the cache knows what is
        known of a sequence; by default from its tokens and its request's hints."""
        self._config = config
        self._cache = cache
        self._on_end = on_end
        self._prefix_of = prefix_of if prefix_of is not None else self._prefix
        self._policy = POLICIES[config.policy]
        cache.waiting.counts_saved = self._policy.counts_cached
        self._chunk_tokens = min(config.prefill_chunk_tokens, config.step_token_budget)
        self.context_tokens = cache.usable_tokens(context_tokens, self._chunk_tokens)
        self._sizer = ChunkSizer(
            cost if cost is not None else FittedCost(),
            target_s=config.target_itl_ms / 1000,
            page_tokens=cache.layout.page_tokens,
            most_tokens=config.step_token_budget,
        )
        self._rate = FIRST_RATE if config.forgiven_tokens_per_s is None else config.forgiven_tokens_per_s
        self._requests: dict[RequestId, _Accepted] = {}
        self._sequences: dict[SequenceId, Sequence] = {}
        self._running: dict[SequenceId, Sequence] = {}
        self._deadlines: deque[tuple[float, RequestId]] = deque()
        self._queued_tokens = 0
        self._queued_in_lane = [0] * (len(config.lane_tokens) + 1)
        self._shares = FairShares()
        self.timelines = Timelines()
        self._drain = DrainRate()
        self._free_slots = list(range(config.max_sequences - 1, -1, -1))
        self._sequence_ids = itertools.count()
        self._next_step = StepId(0)
        self._plans = 0
        self._short = False  # a step in flight kept somebody from pages: the next plan waits until none is
        self._preemptions = 0
        self._evicted, self._rebuilt = dict(cache.evicted), cache.rebuilt_tokens  # as of the last step
        self._matches = cache.waiting.matches
        self._waits: list[tuple[int, float]] = []  # since the last step

    def __repr__(self) -> str:
        return f"<Scheduler {len(self._running)} running, {self.waiting} waiting, {self._cache!r}>"

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._sequences) - len(self._running)

    @property
    def forgiven_tokens_per_s(self) -> float:
        """By now; see SchedulerConfig."""
        return self._rate

    @property
    def idle(self) -> bool:
        return not self._sequences

    # --- in and out -----------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> None:
        """Accept a request, or raise TooLong, BadRequest or Overloaded and keep no trace of it."""
        prompt_tokens = len(request.prompt_tokens)
        if prompt_tokens >= self.context_tokens:
            raise TooLong(prompt_tokens=prompt_tokens, context_tokens=self.context_tokens)
        assert request.request_id not in self._requests, f"request {request.request_id} is already here"
        assert prompt_tokens + request.stop.max_tokens <= self.context_tokens, "max_tokens was not clamped"
        choices = len(request.outputs)
        if choices > self._config.max_queued_requests + self._config.max_sequences:
            raise BadRequest(
                f"Invalid 'n': {choices} choices are more than this server can run and queue "
                f"({self._config.max_sequences} + {self._config.max_queued_requests}).",
                param="n",
            )
        self.check_room(request.arrival_s, choices=choices, tokens=prompt_tokens * choices, client=request.client)
        accepted = _Accepted(request=request, live={})
        self._requests[request.request_id] = accepted
        self.timelines.begin(request.request_id)
        for choice, output in enumerate(request.outputs):
            sequence = Sequence(id=SequenceId(next(self._sequence_ids)), choice=choice, request=request, output=output)
            accepted.live[sequence.id] = sequence
            self._sequences[sequence.id] = sequence
            self._shares.arrived(request.client, request.arrival_s)
            self._enqueue(sequence, request.arrival_s)
        if self._config.request_timeout_s:
            self._deadlines.append((request.arrival_s + self._config.request_timeout_s, request.request_id))
            if len(self._deadlines) > 2 * len(self._requests) + SPARE_DEADLINES:
                self._deadlines = deque(each for each in self._deadlines if each[1] in self._requests)

    def check_room(
        self, now: float, *, choices: int = 1, tokens: int = 0, client: Hashable = None, ahead: int = 0
    ) -> None:
        """Raise Overloaded if the queue has no room for these, with when it will. ahead: requests that are on their way
        here. What finds a free slot does not wait; one prompt may wait alone, however long it is."""
        limit = self._config.max_queued_requests
        queued = self.waiting + ahead + choices - len(self._free_slots)  # and with these
        if queued > limit:
            raise Overloaded(
                f"The server's queue has no room: {max(0, queued - choices)} of {limit} places are taken. Please retry "
                "later.",
                retry_after_s=self._drain.retry_after_s(now, choices),
            )
        token_limit = self._config.max_queued_tokens
        if self.waiting > len(self._free_slots) and self._queued_tokens + tokens > token_limit:
            raise Overloaded(
                f"The server's queue has no room: it may hold {token_limit} prompt tokens, {self._queued_tokens} wait, "
                f"and yours are {tokens} more. Please retry later.",
                retry_after_s=self._drain.retry_after_s(now, choices),
            )
        if queued > 0 and 2 * queued > limit and self._shares.waiting(client):
            allowance = self._shares.allowance(client, limit, now)
            if allowance < limit and self._shares.waiting(client) + choices > allowance:
                raise Overloaded(
                    "The server's queue has no room for this API key, since others use it too: its share is "
                    f"{allowance} places, and {self._shares.waiting(client)} are taken. Please retry later.",
                    retry_after_s=self._drain.retry_after_s(now, choices),
                )

    def cancel(self, request_id: RequestId, now: float) -> None:
        """End every choice of a request in silence, in any phase. Unknown and ended ids are ignored."""
        accepted = self._requests.get(request_id)
        if accepted is None:
            return
        for sequence in list(accepted.live.values()):
            self._drop(sequence, now)
            _guarded(sequence.output.cancel)
        self._end(accepted, "abort", now)

    def fail(self, request_id: RequestId, error: TwinpaneError, now: float) -> None:
        """End every choice of a request with an error."""
        accepted = self._requests.get(request_id)
        if accepted is None:
            return
        for sequence in list(accepted.live.values()):
            self._drop(sequence, now)
            _guarded(partial(sequence.output.fail, error))
        self._end(accepted, "error", now)

    def fail_all(self, error: TwinpaneError, now: float) -> None:
        for request_id in list(self._requests):
            self.fail(request_id, error, now)

    def abandon(self, error: TwinpaneError, now: float) -> None:
        """Tell everybody that it is over and forget them, without a look at pages: for when an invariant is broken or
        a step never ends. Nothing can run afterwards."""
        accepted, self._requests = list(self._requests.values()), {}
        self._sequences, self._running = {}, {}
        for each in accepted:
            for sequence in each.live.values():
                _guarded(partial(sequence.output.fail, error))
            _guarded(partial(self._report_end, each, "error", now))

    def flush_cache(self) -> bool:
        """Forget all cached prefixes, if nobody is here."""
        if not self.idle:
            return False
        self._cache.flush()
        return True

    # --- one step -------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step: pages for the longest waiting and for who decodes, then who is taken from the queue, and then
        a row for each that runs, in order.

        None if nothing can run, or nothing until a step in flight is committed.
        """
        if self._short and self._cache.steps_in_flight:
            return None
        self._short = False
        self._expire(now)
        building = _PlanBuilder(step_id=self._next_step, now=now, budget=self._config.step_token_budget)
        order = self._running_order()
        for index, (sequence, pending) in enumerate(order):
            if (index == 0 or pending == 1) and sequence.id in self._running:
                self._secure(sequence, sequence.planned_tokens + min(pending, self._chunk_tokens), building)
        known = set(self._running)
        order = [each for each in order if each[0].id in known]  # who was preempted may come again, with more to do
        may_admit = len(self._free_slots) > 0 and len(self._cache.waiting) > 0 and not self._short
        budget = self._prompt_budget() if may_admit or any(pending > 1 for _, pending in order) else 0
        if may_admit:
            self._admit(building, budget)
        self._drain.note(now, left=0, waiting=len(self._cache.waiting))
        self._plans += 1
        if building.opened:
            order += [each for each in self._running_order() if each[0].id not in known]
        prompts = [(sequence, pending) for sequence, pending in order if pending > 1]
        given = self._divide(budget, [self._part(sequence.lane, sequence, pending) for sequence, pending in prompts])
        most = {sequence.id: tokens for (sequence, _), tokens in zip(prompts, given, strict=True)}
        for sequence, pending in order:
            tokens = most.get(sequence.id, 1)
            if tokens and building.budget > 0 and sequence.id in self._running:
                self._plan_row(sequence, pending, building, tokens)
        if not (building.rows or building.moves or building.writes or building.opened):
            return None
        self._next_step = StepId(self._next_step + 1)
        self._cache.begin_step(building.step_id)
        return StepPlan(
            step_id=building.step_id,
            moves=tuple(building.moves),
            writes=tuple(building.writes),
            opened=tuple(building.opened),
            rows=tuple(building.rows),
        )

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> StepFacts:
        """Take a step's results: advance, release window pages, push tokens, end what is over.

        Rows of sequences that are gone or were preempted since the plan was made are dropped.
        """
        self._cache.end_step(plan.step_id)
        computed = generated = prompt = 0
        gaps: list[float] = []
        chunks: list[int] = []
        step_s = round(result.device_s, 6)
        for row, outcome in zip(plan.rows, result.rows, strict=True):
            stop = row.stop
            computed += stop - row.start
            sequence = self._running.get(row.sequence)
            if sequence is None or sequence.epoch != row.epoch:
                continue
            if outcome.failure is not None:
                log.error("event=row_failed request=%s cause=%s", sequence.request.request_id, outcome.failure)
                self.fail(sequence.request.request_id, EngineFailed(outcome.failure), now)
                continue
            assert sequence.computed_tokens == row.start
            self._shares.served(sequence.request.client, stop - row.start)
            if row.start < sequence.admitted_tokens:  # what was known of it then is a prompt, whoever wrote it
                chunks.append(stop - row.start)
                self._note(sequence, now, "computed", start=row.start, tokens=stop - row.start, step_s=step_s)
            prompt += sequence.advance(stop)
            self._cache.commit(sequence.id, stop, now)
            if row.samples:
                assert outcome.token is not None, "a row that samples brings a token"
                generated += 1
                if sequence.last_token_s is not None:
                    gaps.append(now - sequence.last_token_s)
                self._deliver(sequence, outcome.token, now)
        self._sizer.cost.note(shape_of_rows((row.start, row.count) for row in plan.rows), result.device_s)
        if self._config.forgiven_tokens_per_s is None and plan.step_id % RATE_STEPS == 0:
            self._adapt_rate()
        preemptions, self._preemptions = self._preemptions, 0
        waits, self._waits = self._waits, []
        matches, self._matches = self._cache.waiting.matches - self._matches, self._cache.waiting.matches
        before, self._evicted = self._evicted, dict(self._cache.evicted)
        evicted = self._evicted
        rebuilt, self._rebuilt = self._cache.rebuilt_tokens - self._rebuilt, self._cache.rebuilt_tokens
        return StepFacts(
            running=self.running,
            waiting=self.waiting,
            full_usage=self._cache.usage(PageKind.FULL),
            window_usage=self._cache.usage(PageKind.WINDOW),
            cached_usage=self._cache.idle_usage(),
            evicted_full_pages=evicted[PageKind.FULL] - before[PageKind.FULL],
            evicted_window_pages=evicted[PageKind.WINDOW] - before[PageKind.WINDOW],
            rebuilt_tokens=rebuilt,
            step_tokens=computed,
            generated_tokens=generated,
            prompt_tokens=prompt,
            stranded_bytes=self._cache.stranded_bytes(),
            preemptions=preemptions,
            step_s=result.device_s,
            token_gaps_s=tuple(gaps),
            chunk_tokens=tuple(chunks),
            waiting_by_lane=tuple(self._queued_in_lane),
            waits_s=tuple(waits),
            prefix_matches=matches,
        )

    def skip(self, plan: StepPlan) -> None:
        """Take back a step that was not run, oldest first. Nothing can be planned afterwards: its openings and table
        entries never reached the device."""
        self._cache.end_step(plan.step_id)
        for row in plan.rows:
            sequence = self._running.get(row.sequence)
            if sequence is not None and sequence.epoch == row.epoch:
                sequence.planned_tokens = sequence.computed_tokens

    def check(self) -> None:
        """Assert that queue, running set, slots, requests and cache tell one story."""
        self._cache.check()
        waiting = {s.id for s in self._sequences.values() if s.slot is None}
        assert len(waiting) == len(self._cache.waiting) and all(each in self._cache.waiting for each in waiting)
        assert not waiting & self._running.keys()
        assert waiting | self._running.keys() == self._sequences.keys()
        assert self._queued_tokens == sum(self._sequences[each].known_tokens for each in waiting)
        assert sum(self._queued_in_lane) == len(waiting)
        for client in {s.request.client for s in self._sequences.values()}:
            of_client = [s for s in self._sequences.values() if s.request.client == client]
            assert self._shares.waiting(client) == sum(s.slot is None for s in of_client)
        live = [s for accepted in self._requests.values() for s in accepted.live]
        assert sorted(live) == sorted(self._sequences)
        slots = [s.slot for s in self._running.values() if s.slot is not None]
        assert sorted([*self._free_slots, *slots]) == list(range(self._config.max_sequences))
        assert all(accepted.live for accepted in self._requests.values())
        for sequence in self._running.values():
            assert sequence.computed_tokens <= sequence.planned_tokens
            assert self._cache.steps_in_flight or sequence.computed_tokens == sequence.planned_tokens

    # --- inside ---------------------------------------------------------------------------------------------------

    def _running_order(self) -> list[tuple[Sequence, int]]:
        """Who has tokens to plan, and how many. The longest waiting first, so that memory always comes to it; then who
        decodes, then prompts, each by key."""
        if not self._running:
            return []
        oldest = self._oldest()
        order = [
            (
                *(sequence is not oldest, pending > 1),
                *(sequence.key, sequence.id),
                *(sequence, pending),
            )
            for sequence in self._running.values()
            if (pending := sequence.pending_tokens) > 0
        ]
        order.sort()  # ids differ, so no comparison goes further
        return [(sequence, pending) for *_, sequence, pending in order]

    def _oldest(self) -> Sequence:
        """The longest waiting one that runs."""
        return min([(s.request.arrival_s, s.id, s) for s in self._running.values()])[-1]

    def _base(self, sequence: Sequence, tokens: int) -> float:
        request = sequence.request
        return self._policy.base(
            tokens=tokens,
            arrival_s=request.arrival_s,
            forgiven_tokens_per_s=self._rate,
            priority=request.priority,
        )

    def _part(self, lane: int, sequence: Sequence, pending: int) -> _Part:
        """Of a prompt with so many tokens left to compute. Its rank forgives nothing, or a long prompt that is nearly
        done would keep all short ones waiting: the oldest has a part in any case."""
        request = sequence.request
        rank = self._policy.base(
            tokens=pending,
            arrival_s=0.0 if self._policy.counts_tokens else request.arrival_s,
            forgiven_tokens_per_s=self._rate,
            priority=request.priority,
        )
        weight = self._sizer.weight(sequence.known_tokens - pending)
        return _Part(lane, rank, request.arrival_s, min(pending, self._chunk_tokens), weight)

    def _part_of_head(self, sequence: Sequence, saved: float) -> _Part:
        effective = max(1, math.ceil(sequence.known_tokens - saved))
        return self._part(lane_of(effective, self._config.lane_tokens), sequence, effective)

    def _prompt_budget(self) -> int:
        """How many prompt tokens this step may have, those far into a prompt counted by weight: what its rows that
        decode leave, and as many as those can wait for."""
        shape = shape_of_rows((s.planned_tokens, 1) for s in self._running.values() if s.pending_tokens == 1)
        return max(1, min(self._config.step_token_budget - shape.rows, self._sizer.begin(shape)))

    def _divide(self, budget: int, parts: list[_Part]) -> list[int]:
        """A step's prompt tokens: in equal parts over the lanes that want any; in each a part to the oldest, and the
        rest to the first by rank."""
        weighed = [math.ceil(part.wanted * part.weight) for part in parts]
        wanted = [0] * (len(self._config.lane_tokens) + 1)
        for part, tokens in zip(parts, weighed, strict=True):
            wanted[part.lane] += tokens
        left, given = share(budget, wanted, self._next_step), [0] * len(parts)

        def give(index: int, most: int) -> None:
            lane = parts[index].lane
            more = min(weighed[index] - given[index], most, left[lane])
            given[index] += more
            left[lane] -= more

        oldest: dict[int, int] = {}
        for index in sorted(range(len(parts)), key=lambda index: parts[index].arrival_s):
            oldest.setdefault(parts[index].lane, index)
        for lane, index in oldest.items():
            give(index, -(-left[lane] // OLDEST_PART))
        for index in sorted(range(len(parts)), key=lambda index: parts[index].rank):
            give(index, weighed[index])
        page = self._cache.layout.page_tokens
        return [
            min(part.wanted, max(page, int(spent / part.weight))) if spent else 0
            for part, spent in zip(parts, given, strict=True)
        ]

    def _admit(self, building: _PlanBuilder, budget: int) -> None:
        """Take from the queue, in its order, whoever gets some of this step's prompt tokens, while slots and both kinds
        of page last.

        The first in line may get none, since others of its lane go before it. It is taken all the same, for those
        behind it may be of other lanes; unless it is short itself, or half of the slots are taken.
        """
        parts = [
            self._part(sequence.lane, sequence, pending)
            for sequence in self._running.values()
            if (pending := sequence.pending_tokens) > 1
        ]
        outstanding = self._outstanding()
        while self._free_slots and (head := self._head()) is not None:
            sequence, saved = head
            part = self._part_of_head(sequence, saved)
            gets_some = self._divide(budget, [part, *parts])[0] > 0
            may_wait = part.lane > 0 and 2 * len(self._free_slots) > self._config.max_sequences
            if not (gets_some or may_wait) or not self._fits(sequence, outstanding):
                return
            self._open(sequence, saved, building)
            outstanding += self._missing(sequence)
            parts.append(self._part(sequence.lane, sequence, sequence.pending_tokens))

    def _plan_row(self, sequence: Sequence, pending: int, building: _PlanBuilder, most: int) -> None:
        """Give a running sequence its next pending tokens, at most so many. A part of a prompt ends where a page does,
        if it is as long as one."""
        assert sequence.slot is not None
        known = sequence.known_tokens
        start = sequence.planned_tokens
        stop = start + min(pending, building.budget, self._chunk_tokens, most)
        if stop < start + pending:
            stop = start + self._sizer.size(stop - start, sequence.piece_tokens)
            sequence.piece_tokens = stop - start
            whole = stop - stop % self._cache.layout.page_tokens
            stop = whole if whole > start else stop
        if not self._secure(sequence, stop, building):
            return
        samples = stop == start + pending
        building.rows.append(
            RowPlan(
                slot=sequence.slot,
                sequence=sequence.id,
                epoch=sequence.epoch,
                start=start,
                tokens=sequence.tokens(start, min(stop, known)) if start < known else (),
                samples=samples,
                suppress_stop=samples and stop - len(sequence.request.prompt_tokens) < sequence.request.stop.min_tokens,
                cached=sequence.resumed_at if start < sequence.resumed_at else 0,
                follows=sequence.last_step if stop > known else None,
            )
        )
        sequence.planned_tokens = stop
        sequence.last_step = building.step_id
        building.budget -= stop - start

    def _secure(self, sequence: Sequence, stop: int, building: _PlanBuilder) -> bool:
        """Pages for positions up to `stop`; preempts others, in the end itself, when memory is dry. Who has them is not
        preempted for this plan."""
        if building.secured.get(sequence.id, 0) >= stop:
            return True
        while True:
            reservation = self._cache.reserve(sequence.id, stop, building.now)
            building.moves += reservation.moves
            building.writes += reservation.writes
            if reservation.granted:
                building.secured[sequence.id] = stop
                return True
            if self._cache.steps_in_flight:
                self._short = True
                return False
            victim = self._least_worthy(building.secured)
            if victim is None:
                return False
            self._preempt(victim, building.now)
            if victim is sequence:
                return False

    def _open(self, sequence: Sequence, saved: float, building: _PlanBuilder) -> None:
        """Give the first in line a slot and what is cached of it."""
        now, request = building.now, sequence.request
        key = self._policy.key(self._base(sequence, sequence.known_tokens), saved)
        self._leave_queue(sequence)
        self._shares.started(request.client)
        self._note_left(sequence, now)
        sequence.slot = SlotId(self._free_slots.pop())
        sequence.epoch += 1
        resume = self._cache.open(sequence.id, sequence.slot, sequence.prefix, now)
        sequence.computed_tokens = sequence.planned_tokens = resume.start
        sequence.resumed_at = resume.cached_tokens
        sequence.admitted_tokens, sequence.saved_tokens, sequence.key = sequence.known_tokens, saved, key
        sequence.lane = lane_of(sequence.known_tokens - resume.saved_tokens, self._config.lane_tokens)
        self._running[sequence.id] = sequence
        accepted = self._requests[request.request_id]
        self._waits.append((sequence.lane, now - sequence.queued_s))
        if accepted.started_s is None:
            accepted.started_s, accepted.cached_tokens = now, int(resume.saved_tokens)
            _guarded(partial(request.on_admitted, accepted.cached_tokens))
        building.opened.append(sequence.opening())
        rebuilt = resume.cached_tokens - resume.start
        self._note(sequence, now, "matched", cached_tokens=resume.cached_tokens, rebuilt_tokens=rebuilt)

    def _fits(self, sequence: Sequence, outstanding: PageDemand) -> bool:
        """A sequence is admitted only if everything it knows fits beside what the running ones still need, each with
        one page of growth: starting what must be preempted at once would be work for nothing."""
        demand = outstanding + self._cache.peak_demand(self._with_growth(sequence), self._chunk_tokens)
        if self._cache.fits(demand):
            return True
        if sequence.prefix is None:
            return False
        shared = self._cache.shared_pages(sequence.prefix)  # looked up only now: it takes a while for a long prompt
        return shared > 0 and self._cache.fits(PageDemand(full=demand.full - shared, window=demand.window))

    def _prefix(self, sequence: Sequence) -> Prefix | None:
        """How the cache knows what is known of a sequence; after a preemption, its outputs are part of that."""
        if self._config.prefix_caching == "off":
            return None
        page_tokens, known = self._cache.layout.page_tokens, sequence.known_tokens

        hints = sequence.request.hints

        def keys(first: int, stop: int) -> Keys:
            start, stop = first * page_tokens, stop * page_tokens
            if hints is not None and stop <= len(hints.ids):
                return hints.ids[start:stop].reshape(-1, page_tokens)
            return np.array(sequence.tokens(start, stop), dtype=np.int64).reshape(-1, page_tokens)

        prefix = Prefix(
            keys=keys,
            pages=known // page_tokens,
            resumable=(known - 1) // page_tokens,
            namespace=sequence.request.cache_salt,
        )
        if hints is None:
            return prefix
        marks = turn_marks(hints.turn_ends, page_tokens)
        return replace(prefix, marks=marks, turn=hints.turn, added_tokens=hints.added_tokens)

    def _outstanding(self) -> PageDemand:
        """What the running sequences will still ask for to compute what they know, and one page more each."""
        demand = NO_PAGES
        for sequence in self._running.values():
            demand += self._missing(sequence)
        return demand

    def _missing(self, sequence: Sequence) -> PageDemand:
        return self._cache.missing_demand(
            sequence.id, sequence.computed_tokens, self._with_growth(sequence), self._chunk_tokens
        )

    def _with_growth(self, sequence: Sequence) -> int:
        return min(sequence.known_tokens + self._cache.layout.page_tokens, self.context_tokens)

    def _head(self) -> tuple[Sequence, float] | None:
        """The next of the queue, and how many tokens are saved for it."""
        if not len(self._cache.waiting):
            return None
        first = self._cache.waiting.first(self._shares.next())
        assert first is not None, "whose turn it is waits"
        return self._sequences[first[0]], first[1]

    def _enqueue(self, sequence: Sequence, now: float) -> None:
        sequence.prefix, sequence.queued_s = self._prefix_of(sequence), now
        self._expect(sequence)
        effective = sequence.known_tokens - self._cache.waiting.saved(sequence.id)
        sequence.lane = lane_of(effective, self._config.lane_tokens)
        if len(self._cache.waiting) > len(self._free_slots):
            self._drain.note(now, left=0, waiting=len(self._cache.waiting))
        sequence.plans_before = self._plans
        self._queued_tokens += sequence.known_tokens
        self._queued_in_lane[sequence.lane] += 1
        self._note(sequence, now, "queued", tokens=sequence.known_tokens, lane=sequence.lane)

    def _expect(self, sequence: Sequence) -> None:
        base = self._base(sequence, sequence.known_tokens)
        self._cache.expect(sequence.id, base, sequence.prefix, queue=sequence.request.client)

    def _leave_queue(self, sequence: Sequence) -> None:
        self._cache.waiting.remove(sequence.id)
        self._queued_tokens -= sequence.known_tokens
        self._queued_in_lane[sequence.lane] -= 1

    def _note_left(self, sequence: Sequence, now: float) -> None:
        """It left the queue. How fast that drains is told by those who were not taken the first time, and not by who
        came back to it by a preemption."""
        waited = self._plans > sequence.plans_before and not sequence.epoch
        self._drain.note(now, left=int(waited), waiting=len(self._cache.waiting))

    def _adapt_rate(self) -> None:
        """Waiting forgives a part of what is computed in that time. Keys with another rate cannot be compared, so
        all are made anew: only where that is soon done, and where it makes a difference."""
        piece_s = self._sizer.cost.seconds(shape_of_row(0, self._chunk_tokens))
        rate = RATE_SHARE * self._chunk_tokens / piece_s if piece_s > 0 else self._rate
        if 1 / RATE_STEP < rate / self._rate < RATE_STEP or len(self._cache.waiting) > MOST_REKEYED:
            return
        self._rate = rate
        for sequence in self._running.values():
            base = self._base(sequence, sequence.admitted_tokens)
            sequence.key = self._policy.key(base, sequence.saved_tokens)

        def base_of(waiting: SequenceId) -> float:
            sequence = self._sequences[waiting]
            return self._base(sequence, sequence.known_tokens)

        self._cache.waiting.rekey(base_of)

    def _expire(self, now: float) -> None:
        """End those that took longer than any may."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = self._deadlines.popleft()
            self.fail(request_id, RequestTimeout(self._config.request_timeout_s), now)

    def _least_worthy(self, secured: Collection[SequenceId]) -> Sequence | None:
        """Whom to preempt: the last in order that has no pages for this plan yet, never the longest waiting."""
        oldest = self._oldest()
        victims = [s for s in self._running.values() if s.id not in secured and s is not oldest]
        return max(victims, default=None)

    def _preempt(self, sequence: Sequence, now: float) -> None:
        """Back to the queue, with every page given up; its tokens are known, and what is not cached of them will be
        computed again."""
        log.info(
            "event=preempted request=%s choice=%d computed_tokens=%d",
            sequence.request.request_id,
            sequence.choice,
            sequence.computed_tokens,
        )
        assert not self._cache.steps_in_flight, "what a step in flight brings for it would be lost"
        self._stop_running(sequence, now, Ending.UNKNOWN)
        sequence.computed_tokens = sequence.planned_tokens = 0
        self._shares.preempted(sequence.request.client)
        self._note(sequence, now, "preempted")
        self._enqueue(sequence, now)
        self._preemptions += 1

    def _stop_running(self, sequence: Sequence, now: float, ending: Ending) -> None:
        assert sequence.slot is not None
        del self._running[sequence.id]
        self._cache.close(sequence.id, sequence.last_step, now, ending)
        self._free_slots.append(sequence.slot)
        sequence.slot = None

    def _deliver(self, sequence: Sequence, token: SampledToken, now: float) -> None:
        request_id = sequence.request.request_id
        accepted = self._requests[request_id]
        if not sequence.output_tokens:
            self._note(sequence, now, "first_token")
        if accepted.first_token_s is None:
            accepted.first_token_s = now
        accepted.output_tokens += 1
        sequence.output_tokens.append(token.token_id)
        sequence.last_token_s = now
        try:
            reason = sequence.output.push(token)
        except Exception:
            log.exception("event=output_failed request=%s", request_id)
            self.fail(request_id, EngineFailed("the output of this request could not be processed"), now)
            return
        if reason is not None:
            self._drop(sequence, now, _ending(sequence, reason))
            if not accepted.live:
                self._end(accepted, reason.value, now)

    def _drop(self, sequence: Sequence, now: float, ending: Ending = Ending.UNKNOWN) -> None:
        """Forget a sequence and give back all it holds, whatever it was doing."""
        waited = sequence.slot is None
        if waited:
            self._leave_queue(sequence)
            self._note_left(sequence, now)
        else:
            self._stop_running(sequence, now, ending)
        self._shares.left(sequence.request.client, waited=waited, now=now)
        del self._sequences[sequence.id]
        del self._requests[sequence.request.request_id].live[sequence.id]

    def _end(self, accepted: _Accepted, outcome: str, now: float) -> None:
        del self._requests[accepted.request.request_id]
        self._report_end(accepted, outcome, now)

    def _note(self, sequence: Sequence, now: float, what: str, **facts: float | str) -> None:
        self.timelines.note(sequence.request.request_id, now, what, choice=sequence.choice, **facts)

    def _report_end(self, accepted: _Accepted, outcome: str, now: float) -> None:
        request = accepted.request
        self.timelines.note(request.request_id, now, "ended", outcome=outcome, output_tokens=accepted.output_tokens)
        started, first = accepted.started_s, accepted.first_token_s
        self._on_end(
            request.request_id,
            RequestFacts(
                outcome=outcome,
                prompt_tokens=len(request.prompt_tokens),
                cached_tokens=accepted.cached_tokens,
                output_tokens=accepted.output_tokens,
                choices=len(request.outputs),
                max_tokens=request.stop.max_tokens,
                queued_s=None if started is None else started - request.arrival_s,
                prefill_s=None if started is None or first is None else first - started,
                decode_s=None if first is None else now - first,
                first_token_s=None if first is None else first - request.arrival_s,
                total_s=now - request.arrival_s,
            ),
        )


def _ending(sequence: Sequence, reason: FinishReason) -> Ending:
    """Whether an answer that came to its end called a tool: by its last tokens, since a line break and the end of the
    turn may follow."""
    if reason is not FinishReason.STOP:
        return Ending.UNKNOWN
    hints = sequence.request.hints
    calls = hints is not None and not hints.call_end_ids.isdisjoint(sequence.output_tokens[-3:])
    return Ending.CALLED if calls else Ending.SAID


def _guarded(end: Callable[[], None]) -> None:
    """An output that cannot even be ended must not keep the engine from going on."""
    try:
        end()
    except Exception:
        log.exception("event=output_failed")
