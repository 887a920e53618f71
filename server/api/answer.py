"""From a parsed request to its answer: submit, then stream or collect the same events.

Nothing is sent before the engine accepted every prompt of the call. From then on one of three things ends it: all
choices finish, one error, or the client goes away; the engine keeps nothing in any of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, Self

from server.api import limits
from server.api.body import ClientGone
from server.api.call import Call, Headers
from server.api.context import ApiContext
from server.api.errors import HttpRefusal, WireError, wire_error
from server.api.events import CountedOutput, Endings, EventChannel
from server.api.logprobs import Report
from server.api.parse_sampling import Generation
from server.api.usage import PromptTokens
from server.errors import BadRequest, TwinpaneError
from server.request import (
    ChoiceFinished,
    GenerationRequest,
    OutputStream,
    PrefixHints,
    RequestId,
    StopRules,
    TextDelta,
)

logger = logging.getLogger("twinpane.api")

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class Job:
    """The engine requests of one call, and the channel their events come through; a context manager that leaves
    nothing in the engine, however its block ends.

    Owner: the handler of the call. Choice c of prompt p is choice p * n + c of the call.
    """

    def __init__(self, ctx: ApiContext, call: Call, generation: Generation, *, prompts: int = 1) -> None:
        self.turn = ctx.turn
        self.channel = EventChannel(ctx.turn, max_bytes=limits.MAX_BACKLOG_BYTES, on_overflow=self.cancel)
        self.choices = prompts * generation.n
        self.endings = Endings(choices=self.choices, metrics=ctx.metrics, request_id=call.request_id)
        self.prompt = PromptTokens()
        self._ctx = ctx
        self._call = call
        self._generation = generation
        self._counted: list[CountedOutput] = []
        self._ids: list[RequestId] = []

    @property
    def tokens_so_far(self) -> int:
        """Sampled tokens of all choices; counted only where the request asked for running usage."""
        return sum(output.tokens for output in self._counted)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """End what is left in the engine. A plain function: an awaited clean-up could itself be cancelled."""
        for request_id in self._ids:
            self._ctx.engine.cancel(request_id)

    def leave(self) -> None:
        """The client is gone."""
        self.cancel()
        self.channel.wake()

    def submit(self, prompt: tuple[int, ...], hints: PrefixHints, *, param: str, default_tokens: int) -> None:
        """Hand one more prompt to the engine, or raise TooLong, Overloaded or Unavailable."""
        engine, generation = self._ctx.engine, self._generation
        if not prompt:
            raise BadRequest(f"Invalid '{param}': it holds no tokens at all.", param=param)
        stop = generation.stop_rules(
            prompt_tokens=len(prompt), limits=engine.limits, param=param, default_tokens=default_tokens
        )
        first_choice = len(self._ids) * generation.n
        seed = self._ctx.draw_seed() if generation.seed is None else generation.seed
        request = GenerationRequest(
            request_id=self._call.engine_id(),
            prompt_tokens=prompt,
            sampling=replace(generation.sampling, seed=seed),
            stop=stop,
            outputs=tuple(self._output(first_choice + i, stop) for i in range(generation.n)),
            arrival_s=engine.now(),
            priority=generation.priority,
            cache_salt=generation.cache_salt,
            hints=hints,
            client=self._call.client,
            on_admitted=self._admitted,
        )
        engine.submit(request)
        self._ids.append(request.request_id)
        self.prompt.total += len(prompt)
        logger.info(
            "event=accepted request_id=%s prompt_tokens=%d max_tokens=%d n=%d seed=%d",
            request.request_id,
            len(prompt),
            stop.max_tokens,
            generation.n,
            seed,
        )

    def _admitted(self, cached_tokens: int) -> None:
        self.prompt.cached += cached_tokens

    def _output(self, choice: int, stop: StopRules) -> OutputStream:
        wants_logprobs = self._generation.sampling.logprobs is not None
        output = self._ctx.text.output(
            choice=choice,
            stop=stop,
            emit=self.channel.emit,
            skip_special_tokens=self._generation.skip_special_tokens,
            logprobs=wants_logprobs,
        )
        if not self._generation.continuous_usage:
            return output
        counted = CountedOutput(output)
        self._counted.append(counted)
        return counted


# --- as a whole ---------------------------------------------------------------------------------------------------


PIECE_BYTES = 64
"""What a piece of text costs beside its characters."""


@dataclass(slots=True)
class Collected:
    """All that a choice said. Owner: `collect` until it returns."""

    report: Report
    texts: list[str] = field(default_factory=list)
    finish: ChoiceFinished | None = None

    def add(self, event: TextDelta) -> int:
        """Take more of the choice; how many bytes it was."""
        before = self.report.size_bytes
        self.texts.append(event.text)
        self.report.add(event.text, event.logprobs)
        return self.report.size_bytes - before + len(event.text) + PIECE_BYTES

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def output_tokens(self) -> int:
        return self.finish.output_tokens if self.finish else 0


async def collect(call: Call, job: Job, make_report: Callable[[], Report]) -> list[Collected]:
    """Every choice to its end; raises the error that ended the call, or ClientGone.

    How large an answer gets is not known before its end, so it is bounded while it grows.
    """
    choices = [Collected(make_report()) for _ in range(job.choices)]
    size_bytes = 0
    call.on_gone(job.leave)
    while not job.endings.finished:
        await job.channel.wait(partial(job.channel.only_text, limits.EVENTS_PER_WRITE))
        if call.gone:
            raise ClientGone
        shown, error = job.endings.admit(job.channel.take(limits.EVENTS_PER_WRITE))
        for event in shown:
            collected = choices[event.choice]
            if isinstance(event, TextDelta):
                size_bytes += collected.add(event)
            else:
                collected.finish = event
        if error is not None:
            raise error
        if size_bytes > limits.MAX_ANSWER_BYTES:
            raise BadRequest(
                f"The answer grew beyond {limits.MAX_ANSWER_BYTES} bytes. Ask for fewer choices, tokens or logprobs, "
                "or set 'stream': true.",
                code="answer_too_large",
            )
        if job.channel.more:
            await asyncio.sleep(0)
    return choices


# --- as a stream --------------------------------------------------------------------------------------------------


class StreamShape(Protocol):
    """One wire format's chunks. Each method returns whole server-sent events, or nothing."""

    def opening(self) -> bytes: ...

    def delta(self, event: TextDelta) -> bytes: ...

    def finish(self, event: ChoiceFinished) -> bytes: ...

    def closing(self) -> bytes:
        """What follows the last finish, before [DONE]."""
        ...


def error_event(error: WireError) -> bytes:
    return b"data: " + error.body() + b"\n\n"


class KeepAlive:
    """Wakes the writer of a stream when nothing was sent for `interval_s`; 0 never does.

    One timer for many tokens: it looks at the time of the last write when it fires, instead of being set at each.
    """

    def __init__(self, wake: Callable[[], None], *, interval_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake = wake
        self._interval_s = interval_s
        self._last_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self.due = False
        if interval_s > 0:
            self._timer = self._loop.call_later(interval_s, self._fire)

    def sent(self) -> None:
        self.due = False
        self._last_s = self._loop.time()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _fire(self) -> None:
        next_s = self._last_s + self._interval_s
        if self._loop.time() >= next_s:
            self.due = True
            self._wake()
            next_s = self._loop.time() + self._interval_s
        self._timer = self._loop.call_at(next_s, self._fire)


async def stream(call: Call, job: Job, shape: StreamShape, *, keep_alive_s: float, headers: Headers) -> None:
    """Send events as they come; the one place that ends a stream.

    The opening chunks leave with the first event, so that a client measures its first token and not our greeting.
    """
    call.on_gone(job.leave)
    alive = KeepAlive(job.channel.wake, interval_s=keep_alive_s)
    try:
        await call.start(200, {**STREAM_HEADERS, **headers})
        await _Writer(call, job, shape, alive).write_all()
    except Exception as error:
        if not call.gone and not call.ended:
            broken = wire_error(job.endings.broken(error), request_id=call.request_id)
            await call.write(error_event(broken) + DONE, more=False)
    finally:
        alive.stop()


class _Writer:
    """Writes the events of a call as they come. Owner: the handler of the call.

    Text goes out without waking the handler, as long as the connection takes it.
    """

    def __init__(self, call: Call, job: Job, shape: StreamShape, alive: KeepAlive) -> None:
        self._call = call
        self._job = job
        self._shape = shape
        self._alive = alive
        self._turn = job.turn
        self._opening = shape.opening()

    async def write_all(self) -> None:
        """Until the answer is over or the client gone."""
        call, job, alive = self._call, self._job, self._alive
        while not call.gone:
            await job.channel.wait(self._write_text)
            data, error = self._next()
            over = error is not None or job.endings.finished
            if error is not None:
                level = logging.INFO if isinstance(error, HttpRefusal) else logging.ERROR
                logger.log(level, "event=answer_failed request_id=%s error=%r", call.request_id, error)
                data += error_event(wire_error(error, request_id=call.request_id)) + DONE
            elif over:
                data += self._shape.closing() + DONE
            if data:
                await call.write(self._opened(data), more=not over)
                alive.sent()
            elif alive.due:
                await call.write(KEEP_ALIVE, more=True)
                alive.sent()
            if over:
                return
            if job.channel.more:
                await asyncio.sleep(0)  # a long backlog is written in several turns

    def _write_text(self) -> bool:
        """Pass on what came; False where the handler has to do it: at an end, and where one has to wait."""
        call = self._call
        if not call.takes_more or not self._job.channel.only_text(limits.EVENTS_PER_WRITE):
            return False
        data, _ = self._next()
        if data:
            self._turn.behind(partial(call.write_now, self._opened(data)))
            self._alive.sent()
        return True

    def _next(self) -> tuple[bytes, TwinpaneError | None]:
        """The chunks of the next events, and the error that ends them."""
        shape = self._shape
        shown, error = self._job.endings.admit(self._job.channel.take(limits.EVENTS_PER_WRITE))
        parts = [shape.delta(event) if isinstance(event, TextDelta) else shape.finish(event) for event in shown]
        return b"".join(parts), error

    def _opened(self, data: bytes) -> bytes:
        opening, self._opening = self._opening, b""
        return opening + data
