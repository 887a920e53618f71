"""Stand-ins for the parts a test does not exercise: a clock, text as bytes, and an engine that plays a script.

Nothing here needs torch or a model. A token is one byte of UTF-8 text, plus an end-of-sequence id.
"""

from __future__ import annotations

import asyncio
import codecs
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from server.api.app import build_app
from server.api.context import ApiContext
from server.api.serve import bind_socket, new_event_loop, serve
from server.config import HttpConfig
from server.errors import BadRequest, EngineFailed, Overloaded, TooLong, TwinpaneError, Unavailable
from server.metrics import Metrics
from server.request import (
    ChoiceFailed,
    ChoiceFinished,
    Conversation,
    EngineHealth,
    EngineLimits,
    EngineState,
    Event,
    FinishReason,
    GenerationRequest,
    LogprobEntry,
    PrefixHints,
    RequestId,
    SampledToken,
    SamplingDefaults,
    StopRules,
    TextDelta,
    TimelineEvent,
)

T = TypeVar("T")

EOS_ID = 256
CONTROL_ID = 257
VOCAB_SIZE = 258


class FakeClock:
    """A monotonic clock that moves only when told to."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self.now_s += seconds


# --- text ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FakeTokenizer:
    vocab_size: int = VOCAB_SIZE
    stop_token_ids: frozenset[int] = frozenset({EOS_ID})


def render(conversation: Conversation) -> str:
    """The fake chat template: one `role: text` line a message."""
    lines = [f"{message.role}: {''.join(message.texts)}" for message in conversation.messages]
    if conversation.add_generation_prompt:
        lines.append("assistant:")
    return "\n".join(lines)


class FakeOutput:
    """An OutputStream over bytes-as-tokens: whole characters only, stop strings held back, length and stop ids."""

    def __init__(
        self,
        *,
        choice: int,
        stop: StopRules,
        emit: Callable[[Event], None],
        logprobs: bool,
        skip_special_tokens: bool = True,
    ) -> None:
        self._skip_special_tokens = skip_special_tokens
        self._choice = choice
        self._stop = stop
        self._emit = emit
        self._logprobs = logprobs
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._entries: list[LogprobEntry] = []
        self.tokens = 0
        self.ended = False

    def push(self, token: SampledToken) -> FinishReason | None:
        assert not self.ended, "push after the end"
        self.tokens += 1
        control = token.token_id >= EOS_ID
        if self._logprobs:
            piece = b"" if control else bytes([token.token_id])
            top = tuple((bytes([t]) if t < EOS_ID else b"", p) for t, p in token.top)
            self._entries.append(LogprobEntry(token=piece, logprob=token.logprob or 0.0, top=top))
        if token.token_id in self._stop.stop_token_ids and self.tokens > self._stop.min_tokens:
            matched = None if token.token_id == EOS_ID else token.token_id
            if matched is not None and self._stop.include_stop and not control:
                self._held += self._decoder.decode(bytes([token.token_id]))
            return self._finish(FinishReason.STOP, matched)
        if not control:
            self._held += self._decoder.decode(bytes([token.token_id]))
        elif not self._skip_special_tokens:
            self._held += f"<{token.token_id}>"
        for stop in self._stop.stop:
            at = self._held.find(stop)
            if at >= 0 and self.tokens > self._stop.min_tokens:
                self._held = self._held[: at + len(stop) if self._stop.include_stop else at]
                return self._finish(FinishReason.STOP, stop)
        if self.tokens >= self._stop.max_tokens:
            return self._finish(FinishReason.LENGTH, None)
        hold = max((_overlap(self._held, stop) for stop in self._stop.stop), default=0)
        self._send(len(self._held) - hold)
        return None

    def fail(self, error: TwinpaneError) -> None:
        assert not self.ended, "fail after the end"
        self.ended = True
        self._emit(ChoiceFailed(choice=self._choice, error=error))

    def cancel(self) -> None:
        assert not self.ended, "cancel after the end"
        self.ended = True

    def _send(self, characters: int) -> None:
        text, self._held = self._held[:characters], self._held[characters:]
        if text:
            entries, self._entries = tuple(self._entries), []
            self._emit(TextDelta(choice=self._choice, text=text, logprobs=entries))

    def _finish(self, reason: FinishReason, matched: str | int | None) -> FinishReason:
        self._held += self._decoder.decode(b"", final=True)
        self._send(len(self._held))
        if self._entries:
            entries, self._entries = tuple(self._entries), []
            self._emit(TextDelta(choice=self._choice, text="", logprobs=entries))
        self.ended = True
        self._emit(ChoiceFinished(choice=self._choice, reason=reason, matched=matched, output_tokens=self.tokens))
        return reason


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def hints_of(
    tokens: Iterable[int], *, turn_ends: Iterable[int] = (), turn: int = 1, call_end_ids: Iterable[int] = ()
) -> PrefixHints:
    """Of a prompt that adds all of its tokens."""
    ids = np.array(list(tokens), dtype=np.int64)
    return PrefixHints(
        ids=ids,
        turn_ends=np.array(list(turn_ends), dtype=np.int64),
        turn=turn,
        added_tokens=len(ids),
        call_end_ids=frozenset(call_end_ids),
    )


class FakeText:
    """The text service over bytes. `encode_delay_s` makes encoding slow; `last_conversation` is what was rendered."""

    def __init__(self, *, encode_delay_s: float = 0.0) -> None:
        self.tokenizer = FakeTokenizer()
        self.encode_delay_s = encode_delay_s
        self.last_conversation: Conversation | None = None
        self.encode_error: BaseException | None = None

    async def encode_chat(self, conversation: Conversation) -> tuple[int, ...]:
        self.last_conversation = conversation
        return await self._encode(render(conversation))

    async def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        del add_special_tokens
        return await self._encode(text)

    async def hints(self, tokens: tuple[int, ...]) -> PrefixHints:
        return hints_of(tokens)

    def output(
        self,
        *,
        choice: int,
        stop: StopRules,
        emit: Callable[[Event], None],
        skip_special_tokens: bool = True,
        logprobs: bool = False,
    ) -> FakeOutput:
        return FakeOutput(
            choice=choice, stop=stop, emit=emit, logprobs=logprobs, skip_special_tokens=skip_special_tokens
        )

    async def _encode(self, text: str) -> tuple[int, ...]:
        if self.encode_delay_s:
            await asyncio.sleep(self.encode_delay_s)
        if self.encode_error is not None:
            raise self.encode_error
        try:
            return tuple(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise BadRequest("The text holds lone surrogates.") from error


# --- engine -------------------------------------------------------------------------------------------------------

Script = Callable[[GenerationRequest, int], Iterable[int]]


def echo(request: GenerationRequest, choice: int) -> Iterator[int]:
    """Say the prompt back, then end."""
    del choice
    yield from (t for t in request.prompt_tokens if t < EOS_ID)
    yield EOS_ID


def say(*texts: str) -> Script:
    """Choice i says texts[i % len(texts)] and ends."""

    def script(request: GenerationRequest, choice: int) -> Iterator[int]:
        del request
        yield from texts[choice % len(texts)].encode()
        yield EOS_ID

    return script


def forever(request: GenerationRequest, choice: int) -> Iterator[int]:
    """Never end by itself."""
    del request, choice
    while True:
        yield from b"la "


@dataclass(slots=True)
class _Live:
    request: GenerationRequest
    streams: dict[int, Iterator[int]] = field(default_factory=dict)


class FakeEngine:
    """Plays a script for every choice, one token a step, with at most one token of each choice in a step.

    Owner: the event loop. With `step_s` None nothing moves until `step()` is called; otherwise a task steps every
    `step_s` seconds while there is work. `fail_after` fails every request at that many tokens.
    """

    def __init__(
        self,
        *,
        script: Script = echo,
        context_tokens: int = 4096,
        vocab_size: int = VOCAB_SIZE,
        step_s: float | None = 0.0,
        max_requests: int = 1024,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.script = script
        self.step_s = step_s
        self.max_requests = max_requests
        self.state = EngineState.READY
        self.idle_s = 0.0
        self.waiting = 0
        self.max_waiting: int | None = None
        self.fail_after: int | None = None
        self.fail_with: TwinpaneError = EngineFailed("cause that must not leak: /secret/path.py line 3")
        self.submit_error: BaseException | None = None
        self.accepted: list[GenerationRequest] = []
        self.cancelled: list[RequestId] = []
        self.steps = 0
        self.flushes = 0
        self.events: list[TimelineEvent] = []
        self.cached_tokens = 0
        self._limits = EngineLimits(context_tokens=context_tokens, vocab_size=vocab_size)
        self._clock = clock
        self._live: dict[RequestId, _Live] = {}
        self._task: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def live(self) -> int:
        """How many requests are running."""
        return len(self._live)

    def now(self) -> float:
        return self._clock() if self._clock is not None else asyncio.get_running_loop().time()

    def check_ready(self) -> None:
        if self.state is EngineState.LOADING:
            raise Unavailable("The model is loading.", code="model_loading", retry_after_s=5.0)
        if self.state is EngineState.DRAINING:
            raise Unavailable("The server is shutting down.", code="server_draining", retry_after_s=5.0)
        if self.state is not EngineState.READY:
            raise Unavailable("The engine has stopped.", code="engine_unavailable")

    def check_room(self, *, client: Hashable = None, ahead: int = 0) -> None:
        self.check_ready()
        if self.max_waiting is not None and self.waiting and self.waiting + ahead >= self.max_waiting:
            raise Overloaded("The queue is full.", retry_after_s=1.5)

    def submit(self, request: GenerationRequest) -> None:
        if self.submit_error is not None:
            raise self.submit_error
        self.check_ready()
        if len(request.prompt_tokens) >= self._limits.context_tokens:
            raise TooLong(prompt_tokens=len(request.prompt_tokens), context_tokens=self._limits.context_tokens)
        if len(self._live) >= self.max_requests:
            raise Overloaded("The queue is full.", retry_after_s=1.5)
        assert request.request_id not in self._live, "two live requests share an id"
        assert request.prompt_tokens
        assert all(0 <= t < self._limits.vocab_size for t in request.prompt_tokens)
        self.accepted.append(request)
        request.on_admitted(self.cached_tokens)
        streams = {i: iter(self.script(request, i)) for i in range(len(request.outputs))}
        self._live[request.request_id] = _Live(request, streams)
        self._idle.clear()
        if self.step_s is not None and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def flush_cache(self) -> bool:
        self.flushes += not self._live
        return not self._live

    def cancel(self, request_id: RequestId) -> None:
        live = self._live.pop(request_id, None)
        if live is None:
            return
        self.cancelled.append(request_id)
        for choice in live.streams:
            live.request.outputs[choice].cancel()
        self._note_idle()

    def health(self) -> EngineHealth:
        return EngineHealth(state=self.state, running=len(self._live), waiting=self.waiting, idle_s=self.idle_s)

    def timelines(self, name: str) -> dict[RequestId, list[TimelineEvent]]:
        return {RequestId(f"{name}#0"): self.events} if self.events and name == "known" else {}

    def begin_drain(self) -> None:
        if self.state is EngineState.READY:
            self.state = EngineState.DRAINING

    async def drained(self) -> None:
        await self._idle.wait()

    def fail_all(self, error: TwinpaneError) -> None:
        for request_id in list(self._live):
            self._fail(request_id, error)

    def step(self) -> None:
        """Give every running choice its next token."""
        self.steps += 1
        for request_id, live in list(self._live.items()):
            if request_id not in self._live:
                continue
            for choice, tokens in list(live.streams.items()):
                token_id = next(tokens, EOS_ID)
                top = live.request.sampling.logprobs
                token = SampledToken(
                    token_id=token_id,
                    logprob=None if top is None else -0.5,
                    top=() if top is None else tuple(((token_id + i) % EOS_ID, -0.5 - i) for i in range(top)),
                )
                output = live.request.outputs[choice]
                if output.push(token) is not None:
                    del live.streams[choice]
            if not live.streams:
                self._live.pop(request_id, None)
            elif self.fail_after is not None and self.steps >= self.fail_after:
                self._fail(request_id, self.fail_with)
        self._note_idle()

    def _fail(self, request_id: RequestId, error: TwinpaneError) -> None:
        live = self._live.pop(request_id)
        first, *others = live.streams
        live.request.outputs[first].fail(error)
        for choice in others:
            live.request.outputs[choice].cancel()
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._live:
            self._idle.set()

    async def _run(self) -> None:
        try:
            while self._live:
                await asyncio.sleep(self.step_s or 0.0)
                self.step()
        finally:
            self._task = None


# --- HTTP ---------------------------------------------------------------------------------------------------------

MODEL = "fake-model"


def fake_context(
    engine: FakeEngine | None = None,
    text: FakeText | None = None,
    *,
    http: HttpConfig | None = None,
    defaults: SamplingDefaults | None = None,
) -> ApiContext:
    """The HTTP layer's world, made of fakes, with a constant clock and constant seeds."""
    return ApiContext(
        engine=engine or FakeEngine(),
        text=text or FakeText(),
        http=http or HttpConfig(sse_keep_alive_s=0.0),
        metrics=Metrics(MODEL),
        model_names=(MODEL, "second-name"),
        root="fake/root",
        defaults=defaults or SamplingDefaults(),
        created_s=1_700_000_000,
        unix_time=lambda: 1_800_000_000.0,
        draw_seed=lambda: 7,
    )


class ServerThread:
    """A real server on a free port of this machine, in its own thread with its own loop.

    `call` runs something on that loop, where the engine lives.
    """

    def __init__(self, ctx: ApiContext, *, uds: str | None = None) -> None:
        self.ctx = ctx
        self.sock = bind_socket("127.0.0.1", 0, uds)
        self.port: int = 0 if uds else self.sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._started = threading.Event()
        self._loop = new_event_loop()
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ServerThread:
        self._thread.start()
        assert self._started.wait(10), "the server did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Begin to drain, and wait for the end."""
        self.begin_stop()
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server did not stop"

    def begin_stop(self) -> None:
        stop = self._stop
        if stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(stop.set)

    def call(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        await serve(
            build_app(self.ctx),
            self.sock,
            self.ctx.http,
            self.ctx.engine,
            started=self._started.set,
            stop=self._stop,
        )
