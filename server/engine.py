"""The loop: plan on the event loop, run on the device thread, commit on the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from server.errors import EngineFailed, TwinpaneError, Unavailable
from server.metrics import RequestFacts, StepFacts
from server.request import EngineHealth, EngineLimits, EngineState, GenerationRequest, RequestId
from server.scheduler.scheduler import Scheduler
from server.step import RowPlan, RowResult, StepPlan, StepResult

log = logging.getLogger("twinpane.engine")

MAX_FAILED_STEPS = 8
"""So many steps in a row in which every row failed mean that the device, not a request, is at fault."""


class Runner(Protocol):
    """The device. run() blocks, is called on one thread only, and may be called again for a part of the same plan."""

    def run(self, plan: StepPlan) -> StepResult: ...


class MetricsSink(Protocol):
    def step(self, facts: StepFacts) -> None: ...

    def request_ended(self, facts: RequestFacts) -> None: ...


class InferenceEngine:
    """Implements server.request.Engine. Owner of the loop task and of the device thread.

    The scheduler is touched on the event loop only; while a step is on the device, submits and cancels go on.
    """

    def __init__(
        self,
        make_scheduler: Callable[[Callable[[RequestId, RequestFacts], None]], Scheduler],
        runner: Runner,
        *,
        vocab_size: int,
        metrics: MetricsSink,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = make_scheduler(self._on_end)
        self._runner = runner
        self._metrics = metrics
        self._clock = clock
        self._limits = EngineLimits(context_tokens=self._scheduler.context_tokens, vocab_size=vocab_size)
        self._state = EngineState.LOADING
        self._device = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
        self._work = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._last_progress_s = clock()
        self._failed_steps = 0
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # --- what the HTTP layer sees ---------------------------------------------------------------------------------

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def now(self) -> float:
        return self._clock()

    def submit(self, request: GenerationRequest) -> None:
        if self._state is EngineState.LOADING:
            raise Unavailable("The model is still loading.", code="model_loading", retry_after_s=1.0)
        if self._state is EngineState.DRAINING:
            raise Unavailable("The server is shutting down.", code="server_draining", retry_after_s=1.0)
        if self._state is not EngineState.READY:
            raise Unavailable("The engine has stopped; the server must be restarted.", code="engine_unavailable")
        if self._scheduler.idle:
            self._last_progress_s = self._clock()
        self._scheduler.submit(request)
        self._empty.clear()
        self._work.set()

    def cancel(self, request_id: RequestId) -> None:
        self._scheduler.cancel(request_id, self._clock())
        self._note_if_empty()

    def health(self) -> EngineHealth:
        idle_s = 0.0 if self._scheduler.idle else self._clock() - self._last_progress_s
        return EngineHealth(
            state=self._state, running=self._scheduler.running, waiting=self._scheduler.waiting, idle_s=idle_s
        )

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
        """Begin to take requests. Call on the event loop that will call every other method."""
        self._state = EngineState.READY
        self._task = asyncio.create_task(self._run(), name="engine")

    async def stop(self) -> None:
        """End the loop after the step that is on the device; what is still accepted fails."""
        if self._state is not EngineState.FAILED:
            self._state = EngineState.STOPPED
        self._work.set()
        if self._task is not None:
            await self._task
        self.fail_all(Unavailable("The server is shutting down.", code="server_draining"))
        self._device.shutdown()

    async def failed(self) -> None:
        """Return when the engine has failed for good: the server should end, so that it can be started anew."""
        await self._over.wait()

    async def _run(self) -> None:
        try:
            while self._state in (EngineState.READY, EngineState.DRAINING):
                if not await self._step():
                    self._work.clear()
                    await self._work.wait()
        except BaseException as error:
            log.exception("event=engine_failed")
            self._state = EngineState.FAILED
            self.fail_all(EngineFailed("the engine has stopped"))
            self._over.set()
            if not isinstance(error, Exception):
                raise

    async def _step(self) -> bool:
        """One step; False when there was nothing to run."""
        plan = self._scheduler.plan(self._clock())
        if plan is None:
            if not self._scheduler.idle:
                log.error("event=stuck scheduler=%r", self._scheduler)
                self.fail_all(EngineFailed("nothing that was accepted can run"))
            return False
        result = await asyncio.get_running_loop().run_in_executor(self._device, self._run_on_device, plan)
        facts = self._scheduler.commit(plan, result, self._clock())
        self._last_progress_s = self._clock()
        self._metrics.step(facts)
        self._note_if_empty()
        self._count_failures(result)
        return True

    def _run_on_device(self, plan: StepPlan) -> StepResult:
        """Run a plan; if it raises, run its rows one by one, so that only the row at fault fails.

        Rows write their own pages only and the same values each time, so running a row again is harmless. The moves
        were made by the first try.
        """
        started = time.perf_counter()
        try:
            return self._runner.run(plan)
        except Exception as error:
            log.exception("event=step_failed step=%d rows=%d", plan.step_id, len(plan.rows))
            if len(plan.rows) == 1:
                rows: list[RowResult] = [RowResult(failure=_cause(error))]
            else:
                rows = [self._run_row(_alone(plan, row)) for row in plan.rows]
            return StepResult(step_id=plan.step_id, rows=tuple(rows), device_s=time.perf_counter() - started)

    def _run_row(self, plan: StepPlan) -> RowResult:
        try:
            return self._runner.run(plan).rows[0]
        except Exception as error:
            log.exception("event=row_failed step=%d", plan.step_id)
            return RowResult(failure=_cause(error))

    def _count_failures(self, result: StepResult) -> None:
        if result.rows and all(row.failure is not None for row in result.rows):
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise RuntimeError(f"{self._failed_steps} steps in a row failed: {result.rows[0].failure}")
        else:
            self._failed_steps = 0

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

    def _note_if_empty(self) -> None:
        if self._scheduler.idle:
            self._empty.set()


def _alone(plan: StepPlan, row: RowPlan) -> StepPlan:
    opened = tuple(opening for opening in plan.opened if opening.slot == row.slot)
    return replace(plan, moves=(), opened=opened, rows=(row,))


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
