"""The loop: plan on the event loop, run on the device thread, commit on the event loop; the next step is planned while
one runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from server.errors import BadRequest, EngineFailed, TwinpaneError, Unavailable
from server.metrics import RequestFacts, StepFacts
from server.request import EngineHealth, EngineLimits, EngineState, GenerationRequest, RequestId, TimelineEvent
from server.scheduler.pace import Pace
from server.scheduler.scheduler import Scheduler
from server.step import RowPlan, RowResult, StepInterrupted, StepPlan, StepResult

log = logging.getLogger("twinpane.engine")
T = TypeVar("T")

STEPS_IN_FLIGHT = 2
"""One on the device, and the next one handed over before it ends."""

SWITCH_INTERVAL_S = 50e-6
"""After so long a thread leaves the interpreter's lock to one that waits for it. With Python's 5 ms the device thread,
on its way from one step to the next, would stand still until the loop has written the texts of all streams."""


class Runner(Protocol):
    """The device. `run` and `check` block and are called on one thread only, steps in the order of their plans."""

    def run(self, plan: StepPlan, begun: Callable[[], None]) -> StepResult:
        """Do a step. May be called again for a part of the same plan after it raised.

        begun is called when the device computes and this thread only waits for it: until then, whoever else runs
        Python keeps the device waiting."""
        ...

    def check(self) -> None:
        """Compute something that always works; raises if the device no longer does."""
        ...

    def interrupt(self) -> None:
        """From any thread, for good: `run` soon raises StepInterrupted, as does every later call."""
        ...


class MetricsSink(Protocol):
    def step(self, facts: StepFacts) -> None: ...

    def request_ended(self, facts: RequestFacts) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ran:
    """What came of a step, and when, on the clock of time.perf_counter. broken: nothing in it could be run."""

    result: StepResult
    broken: bool
    started_s: float
    ended_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    """A step of so many tokens that was handed to the device. delayed: it could have been handed over earlier. done is
    None for a step that was skipped or interrupted."""

    plan: StepPlan
    tokens: int
    done: asyncio.Future[_Ran | None]
    handed_s: float
    delayed: bool


class InferenceEngine:
    """Implements server.request.Engine. Owner of the loop task and of the device thread.

    The scheduler is touched on the event loop only; while steps are in flight, submits and cancels go on. With
    steps_in_flight 1 each step is planned when the one before it is committed, with 2 shortly before it ends.
    """

    def __init__(
        self,
        make_scheduler: Callable[[Callable[[RequestId, RequestFacts], None]], Scheduler],
        runner: Runner,
        *,
        vocab_size: int,
        metrics: MetricsSink,
        clock: Callable[[], float] = time.monotonic,
        steps_in_flight: int = STEPS_IN_FLIGHT,
    ) -> None:
        assert steps_in_flight in (1, 2), steps_in_flight
        self._scheduler = make_scheduler(self._on_end)
        self._runner = runner
        self._metrics = metrics
        self._clock = clock
        self._limits = EngineLimits(context_tokens=self._scheduler.context_tokens, vocab_size=vocab_size)
        self._state = EngineState.LOADING
        self._device = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
        self._steps_in_flight = steps_in_flight
        self._in_flight: deque[_InFlight] = deque()
        self._handed = 0  # steps that the device thread got
        self._taken = 0  # those of them that it began with
        self._unreported: Callable[[], None] | None = None  # a step that is over; on the device thread
        self._pace = Pace()
        self._device_free_s = 0.0  # when the last step that was taken back ended
        self._work = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._last_progress_s = clock()
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # --- what the HTTP layer sees ---------------------------------------------------------------------------------

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def now(self) -> float:
        return self._clock()

    def check_room(self, *, client: Hashable = None, ahead: int = 0) -> None:
        self._check_ready()
        self._scheduler.check_room(self._clock(), client=client, ahead=ahead)

    def submit(self, request: GenerationRequest) -> None:
        self._check_ready()
        if max(request.prompt_tokens) >= self._limits.vocab_size:
            raise BadRequest(
                f"Invalid prompt: token id {max(request.prompt_tokens)} is outside the model's vocabulary of "
                f"{self._limits.vocab_size}.",
                param="prompt",
            )
        if self._scheduler.idle:
            self._last_progress_s = self._clock()
        self._scheduler.submit(request)
        self._empty.clear()
        self._work.set()

    def cancel(self, request_id: RequestId) -> None:
        self._scheduler.cancel(request_id, self._clock())
        self._note_if_empty()

    def flush_cache(self) -> bool:
        return self._scheduler.flush_cache()

    def health(self) -> EngineHealth:
        idle_s = 0.0 if self._scheduler.idle else self._clock() - self._last_progress_s
        return EngineHealth(
            state=self._state, running=self._scheduler.running, waiting=self._scheduler.waiting, idle_s=idle_s
        )

    def timelines(self, name: str) -> Mapping[RequestId, Sequence[TimelineEvent]]:
        return self._scheduler.timelines.of(name)

    def begin_drain(self) -> None:
        if self._state in (EngineState.LOADING, EngineState.READY):
            self._state = EngineState.DRAINING

    async def drained(self) -> None:
        await self._empty.wait()

    def fail_all(self, error: TwinpaneError) -> None:
        self._scheduler.fail_all(error, self._clock())
        self._note_if_empty()

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to take requests. Call on the event loop that will call every other method. Sets the interpreter's
        switch interval."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._state = EngineState.READY
        self._task = asyncio.create_task(self._run(), name="engine")

    async def stop(self, limit_s: float = 10.0) -> bool:
        """Interrupt the step that is on the device and end the loop; what is still accepted fails.

        False if it does not end within limit_s: the thread hangs, and only ending the process can stop it.
        """
        if self._state is not EngineState.FAILED:
            self._state = EngineState.STOPPED
        self._work.set()
        self._runner.interrupt()
        gone = Unavailable("The server is shutting down.", code="server_draining")
        if not (await self._over_within(limit_s)):
            log.error("event=step_hangs limit_s=%g", limit_s)
            self._scheduler.abandon(gone, self._clock())
            return False
        self.fail_all(gone)
        self._device.shutdown()
        return True

    async def failed(self) -> None:
        """Return when the engine has failed for good: the server should end, so that it can be started anew."""
        await self._over.wait()

    async def _over_within(self, limit_s: float) -> bool:
        """Whether the loop and the device come to rest. The loop takes back what is in flight unless it has failed."""
        if self._task is None:
            return True
        deadline_s = time.monotonic() + limit_s
        if not (await asyncio.wait({self._task}, timeout=limit_s))[0]:
            return False
        left = {step.done for step in self._in_flight}
        return not left or not (await asyncio.wait(left, timeout=max(0.0, deadline_s - time.monotonic())))[1]

    async def _run(self) -> None:
        try:
            while self._goes_on:
                if not await self._step():
                    self._work.clear()
                    await self._work.wait()
            while self._in_flight:
                await self._take_back()
        except BaseException as error:
            log.exception("event=engine_failed")
            self._state = EngineState.FAILED
            self._scheduler.abandon(EngineFailed("the engine has stopped"), self._clock())
            self._empty.set()
            self._over.set()
            if not isinstance(error, Exception):
                raise

    @property
    def _goes_on(self) -> bool:
        return self._state in (EngineState.READY, EngineState.DRAINING)

    async def _step(self) -> bool:
        """Keep the device busy and take back one step; False when there was nothing to run."""
        if not self._in_flight and not self._hand_over():
            if not self._scheduler.idle:
                log.error("event=stuck scheduler=%r", self._scheduler)
                self.fail_all(EngineFailed("nothing that was accepted can run"))
            return False
        if len(self._in_flight) < self._steps_in_flight:
            delayed = await self._until_late()
            if self._goes_on:
                self._hand_over(delayed=delayed)
        await self._take_back()
        return True

    async def _until_late(self) -> bool:
        """Wait while whoever arrives can still join the next step and the device need not wait for it. False if that
        moment was already over."""
        step = self._in_flight[0]
        started_s = max(step.handed_s, self._device_free_s)
        left_s = started_s + self._pace.delay_s(step.tokens) - time.perf_counter()
        if left_s <= 0:
            return False
        await asyncio.wait({step.done}, timeout=left_s)
        return True

    def _hand_over(self, *, delayed: bool = False) -> bool:
        """Plan a step and hand it to the device thread; False if there is none to plan."""
        plan = self._scheduler.plan(self._clock())
        if plan is None:
            self._note_if_empty()  # it may have ended who took too long
            return False
        done: asyncio.Future[_Ran | None] = asyncio.get_running_loop().create_future()
        self._device.submit(self._run_on_device, plan, done)
        self._handed += 1
        handed_s = time.perf_counter()
        self._in_flight.append(
            _InFlight(plan=plan, tokens=plan.token_count, done=done, handed_s=handed_s, delayed=delayed)
        )
        return True

    async def _take_back(self) -> None:
        """Wait for the oldest step in flight and commit it."""
        step = self._in_flight[0]
        ran = await step.done
        self._in_flight.popleft()
        if ran is None:
            self._scheduler.skip(step.plan)
            return
        facts = self._scheduler.commit(step.plan, ran.result, self._clock())
        self._last_progress_s = self._clock()
        self._device_free_s = ran.ended_s
        self._pace.note_step(step.tokens, ran.ended_s - ran.started_s)
        if self._in_flight:
            behind = self._in_flight[0]
            self._pace.note_hand_over(slack_s=ran.ended_s - behind.handed_s, delayed=behind.delayed)
        self._metrics.step(facts)
        self._note_if_empty()
        if ran.broken:  # the requests or the device? one client's requests must not end the server
            await asyncio.get_running_loop().run_in_executor(self._device, self._runner.check)

    def _run_on_device(self, plan: StepPlan, done: asyncio.Future[_Ran | None]) -> None:
        """On the device thread. A step that is over is reported once the next one has begun, if that is here already:
        what the loop then does for it, the device need not wait for."""
        self._taken += 1
        try:
            settle = partial(_set_result, done, self._ran(plan))
        except BaseException as error:
            settle = partial(_set_exception, done, error)
        self._report()
        self._unreported = partial(_call_soon, done.get_loop(), settle)
        if self._taken >= self._handed:  # handed lags for a moment
            self._report()

    def _report(self) -> None:
        """On the device thread: let the loop take back the step before this one."""
        report, self._unreported = self._unreported, None
        if report is not None:
            report()

    def _ran(self, plan: StepPlan) -> _Ran | None:
        """A step that has not begun when the engine is stopped is skipped: it may be a long prompt, and nobody would
        get anything of it."""
        if self._state is EngineState.STOPPED:
            return None
        started_s = time.perf_counter()
        try:
            result, broken = run_isolated(self._runner, plan, self._report)
        except StepInterrupted:
            return None
        return _Ran(result=result, broken=broken, started_s=started_s, ended_s=time.perf_counter())

    def _on_end(self, request_id: RequestId, facts: RequestFacts) -> None:
        log.info(
            "event=request_ended request=%s outcome=%s prompt_tokens=%d output_tokens=%d total_s=%.3f",
            request_id,
            facts.outcome,
            facts.prompt_tokens,
            facts.output_tokens,
            facts.total_s,
        )
        self._metrics.request_ended(facts)

    def _check_ready(self) -> None:
        if self._state is EngineState.LOADING:
            raise Unavailable("The model is still loading.", code="model_loading", retry_after_s=5.0)
        if self._state is EngineState.DRAINING:
            raise Unavailable("The server is shutting down.", code="server_draining", retry_after_s=5.0)
        if self._state is not EngineState.READY:
            raise Unavailable("The engine has stopped; the server must be restarted.", code="engine_unavailable")

    def _note_if_empty(self) -> None:
        if self._scheduler.idle:
            self._empty.set()


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """From another thread; a loop that is closed waits for nothing."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def run_isolated(runner: Runner, plan: StepPlan, begun: Callable[[], None]) -> tuple[StepResult, bool]:
    """Run a plan; if it raises, run its rows one by one, so that only the row at fault fails. Also says whether nothing
    in it could be run. begun: see Runner.run; it may be called more than once.

    Rows write their own pages only and the same values each time, so running a row again is harmless. The moves were
    made by the first try.
    """
    started_s = time.perf_counter()
    try:
        return runner.run(plan, begun), False
    except StepInterrupted:
        raise
    except Exception as error:
        log.exception("event=step_failed step=%d rows=%d", plan.step_id, len(plan.rows))
        if len(plan.rows) == 1:
            tried = [(RowResult(failure=_cause(error)), True)]
        else:
            tried = [_run_row(runner, _alone(plan, row), begun) for row in plan.rows]
        rows = tuple(result for result, _ in tried)
        result = StepResult(step_id=plan.step_id, rows=rows, device_s=time.perf_counter() - started_s)
        return result, all(raised for _, raised in tried)


def _run_row(runner: Runner, plan: StepPlan, begun: Callable[[], None]) -> tuple[RowResult, bool]:
    try:
        return runner.run(plan, begun).rows[0], False
    except StepInterrupted:
        raise
    except Exception as error:
        log.exception("event=row_failed step=%d", plan.step_id)
        return RowResult(failure=_cause(error)), True


def _alone(plan: StepPlan, row: RowPlan) -> StepPlan:
    opened = tuple(opening for opening in plan.opened if opening.slot == row.slot)
    return replace(plan, moves=(), opened=opened, rows=(row,))


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
