"""The loop: plan on the event loop, run on the device thread, commit on the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from server.errors import BadRequest, EngineFailed, TwinpaneError, Unavailable
from server.metrics import RequestFacts, StepFacts
from server.request import EngineHealth, EngineLimits, EngineState, GenerationRequest, RequestId
from server.scheduler.scheduler import Scheduler
from server.step import RowPlan, RowResult, StepPlan, StepResult

log = logging.getLogger("twinpane.engine")


class Runner(Protocol):
    """The device. Both methods block and are called on one thread only."""

    def run(self, plan: StepPlan) -> StepResult:
        """Do a step. May be called again for a part of the same plan after it raised."""
        ...

    def check(self) -> None:
        """Compute something that always works; raises if the device no longer does."""
        ...


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

    async def stop(self, limit_s: float = 10.0) -> bool:
        """End the loop after the step that is on the device; what is still accepted fails.

        False if that step does not end within limit_s: its thread hangs, and only ending the process can stop it.
        """
        if self._state is not EngineState.FAILED:
            self._state = EngineState.STOPPED
        self._work.set()
        gone = Unavailable("The server is shutting down.", code="server_draining")
        if self._task is not None and not (await asyncio.wait({self._task}, timeout=limit_s))[0]:
            log.error("event=step_hangs limit_s=%g", limit_s)
            self._scheduler.abandon(gone, self._clock())
            return False
        self.fail_all(gone)
        self._device.shutdown()
        return True

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
            self._scheduler.abandon(EngineFailed("the engine has stopped"), self._clock())
            self._empty.set()
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
        loop = asyncio.get_running_loop()
        result, broken = await loop.run_in_executor(self._device, self._run_on_device, plan)
        facts = self._scheduler.commit(plan, result, self._clock())
        self._last_progress_s = self._clock()
        self._metrics.step(facts)
        self._note_if_empty()
        if broken:  # the requests or the device? one client's requests must not end the server
            await loop.run_in_executor(self._device, self._runner.check)
        return True

    def _run_on_device(self, plan: StepPlan) -> tuple[StepResult, bool]:
        """Run a plan; if it raises, run its rows one by one, so that only the row at fault fails. Also says whether
        nothing in it could be run.

        Rows write their own pages only and the same values each time, so running a row again is harmless. The moves
        were made by the first try.
        """
        started = time.perf_counter()
        try:
            return self._runner.run(plan), False
        except Exception as error:
            log.exception("event=step_failed step=%d rows=%d", plan.step_id, len(plan.rows))
            if len(plan.rows) == 1:
                tried = [(RowResult(failure=_cause(error)), True)]
            else:
                tried = [self._run_row(_alone(plan, row)) for row in plan.rows]
            rows = tuple(result for result, _ in tried)
            result = StepResult(step_id=plan.step_id, rows=rows, device_s=time.perf_counter() - started)
            return result, all(raised for _, raised in tried)

    def _run_row(self, plan: StepPlan) -> tuple[RowResult, bool]:
        try:
            return self._runner.run(plan).rows[0], False
        except Exception as error:
            log.exception("event=row_failed step=%d", plan.step_id)
            return RowResult(failure=_cause(error)), True

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
