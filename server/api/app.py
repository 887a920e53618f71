"""The routes, and the one place where a call begins and ends."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import orjson
from starlette.exceptions import HTTPException
from starlette.routing import Route, Router

from server.api import limits
from server.api.answer import Job, collect, stream
from server.api.body import (
    Bodies,
    BodyLease,
    ClientGone,
    announced_bytes,
    check_media_type,
    decode_object,
    drop_body,
    read_body,
)
from server.api.call import Call, api_keys, ignored_header
from server.api.chat import ChatStream, Head, StreamUsage, chat_completion
from server.api.completions import CompletionStream, text_completion
from server.api.context import ApiContext
from server.api.errors import SERVER_ERROR, HttpRefusal, NotServed, wire_error
from server.api.fields import Json
from server.api.logprobs import ChatReport, LegacyReport, NoReport
from server.api.parse_chat import parse_chat
from server.api.parse_completion import CompletionRequest, parse_completion
from server.api.parse_sampling import Border, Generation, model_name
from server.api.turn_limit import TurnLimit
from server.errors import Overloaded, RequestTimeout, TooLong, TwinpaneError, Unavailable
from server.request import Conversation, EngineState, PrefixHints, TimelineEvent

logger = logging.getLogger("twinpane.api")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Encoded = tuple[tuple[int, ...], PrefixHints]

AsgiApp = Callable[[Any, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]
Handler = Callable[[Call], Awaitable[None]]


class Parse(Protocol[T_co]):
    def __call__(self, body: Mapping[str, Json], *, border: Border) -> T_co: ...


KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
COMPLETION_DEFAULT_TOKENS = 16
RETRY_AFTER_LOADING_S = 5.0
STARTS_PER_TURN = 16
"""Of calls that generate, a millisecond or less each: what keeps the loop from everybody else at once."""
CHAT_ID, COMPLETION_ID = "chatcmpl-", "cmpl-"
MAX_REMEMBERED_NAMES = 1024
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


def build_app(ctx: ApiContext) -> Api:
    """The ASGI application of one server."""
    return Api(ctx)


class Api:
    """Owner of what the routes share: the bodies in memory, how many prompts are being tokenized, and which ignored
    fields were logged."""

    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx
        self._encoding = 0
        self._starts = TurnLimit(STARTS_PER_TURN)
        self._logged_names: set[str] = set()
        self._bodies = Bodies(max_bytes=limits.BODIES_IN_MEMORY * ctx.http.max_body_bytes)
        # One thread: decoding holds the interpreter lock, so a second one would only make everybody wait longer.
        self._parser = ThreadPoolExecutor(1, thread_name_prefix="parse")
        # Starlette matches paths and methods; what it would answer by itself (plain text) is raised instead.
        self._router = Router(
            [
                self._route("/v1/chat/completions", "POST", self._chat),
                self._route("/v1/completions", "POST", self._completions),
                self._route("/v1/models", "GET", self._models),
                self._route("/v1/models/{id:path}", "GET", self._model),
                self._route("/health", "GET", self._health),
                self._route("/ping", "GET", self._health),
                self._route("/ready", "GET", self._ready),
                self._route("/health/ready", "GET", self._ready),
                self._route("/metrics", "GET", self._metrics),
                self._route("/flush_cache", "POST", self._flush_cache),
                self._route("/flush_cache", "GET", self._flush_cache),
                self._route("/reset_prefix_cache", "POST", self._flush_cache),
                self._route("/debug/requests/{id:path}", "GET", self._timeline),
                self._route("/", "GET", self._root),
            ],
            default=_no_route,
            redirect_slashes=False,
        )

    async def __call__(
        self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        if scope["type"] == "lifespan":
            await self._router(scope, receive, send)
            return
        assert scope["type"] == "http", "only HTTP is served"
        call = Call(scope, receive, send)
        scope |= {"app": self, "call": call, "handler": "unmatched"}
        started_s = time.monotonic()
        try:
            await self._router(scope, receive, send)
        except ClientGone:
            call.lost()
        except Exception as error:
            await self._refuse(call, error)
        finally:
            call.unwatch()
            method = call.method if call.method in KNOWN_METHODS else "OTHER"
            self._ctx.metrics.http(method, scope["handler"], call.counted_status, time.monotonic() - started_s)
            if call.gone and not call.ended:
                logger.info("event=client_gone request_id=%s route=%s", call.request_id, scope["handler"])

    def begin_drain(self) -> None:
        """Whoever is still sending a body is refused now; the engine refuses the rest."""
        self._bodies.begin_drain()

    def _route(self, path: str, method: str, handler: Handler) -> Route:
        """A route whose handler gets the Call; HEAD is answered as GET without the body."""
        return Route(path, _Endpoint(path.replace(":path", ""), handler), methods=[method])

    async def _refuse(self, call: Call, error: Exception) -> None:
        if isinstance(error, HTTPException):
            error = _routing_refusal(call, error)
        wire = wire_error(error, request_id=call.request_id)
        if isinstance(error, Overloaded):
            status = self._ctx.http.overload_status
            wire = replace(wire, status=status, type=wire.type if status == 429 else SERVER_ERROR)
        elif wire.status >= 500 and not isinstance(error, (Unavailable, RequestTimeout)):
            logger.error("event=internal_error request_id=%s", call.request_id, exc_info=error)
        if isinstance(error, (Overloaded, Unavailable, TooLong)) and wire.code is not None:
            self._ctx.metrics.rejected(wire.code)
        if call.status is None:
            await call.refuse(wire)

    # --- generation ---

    async def _chat(self, call: Call) -> None:
        await self._starts.enter()
        with self._bodies.lease() as lease:
            request = await self._parse(call, lease, parse_chat)
            tokens, hints = await self._encode(call, self._encode_chat(request.conversation))
        generation = request.generation
        logprobs = generation.sampling.logprobs is not None
        with Job(self._ctx, call, generation) as job:
            job.submit(tokens, hints, param="messages", default_tokens=self._ctx.engine.limits.context_tokens)
            head = self._head(f"{CHAT_ID}{call.request_id}")
            headers = self._ignored(generation)
            if generation.stream:
                shape = ChatStream(head, choices=job.choices, stream_usage=_stream_usage(generation, job))
                await stream(call, job, shape, keep_alive_s=self._ctx.http.sse_keep_alive_s, headers=headers)
                return
            choices = await collect(call, job, ChatReport if logprobs else NoReport)
            answer = chat_completion(head, choices, prompt=job.prompt)
            await call.respond(200, answer, headers)

    async def _completions(self, call: Call) -> None:
        await self._starts.enter()
        with self._bodies.lease() as lease:
            request = await self._parse(call, lease, parse_completion)
            prompts = await self._encode(call, self._encode_prompts(request))
        generation = request.generation
        logprobs = generation.sampling.logprobs is not None
        echoes = [
            prompt if request.echo and isinstance(prompt, str) else ""
            for prompt in request.prompts
            for _ in range(generation.n)
        ]
        with Job(self._ctx, call, generation, prompts=len(prompts)) as job:
            for tokens, hints in prompts:
                job.submit(tokens, hints, param="prompt", default_tokens=COMPLETION_DEFAULT_TOKENS)
            head = self._head(f"{COMPLETION_ID}{call.request_id}")
            headers = self._ignored(generation)
            if generation.stream:
                shape = CompletionStream(
                    head, echoes=echoes, logprobs=logprobs, stream_usage=_stream_usage(generation, job)
                )
                await stream(call, job, shape, keep_alive_s=self._ctx.http.sse_keep_alive_s, headers=headers)
                return
            choices = await collect(call, job, LegacyReport if logprobs else NoReport)
            answer = text_completion(head, choices, echoes=echoes, prompt=job.prompt)
            await call.respond(200, answer, headers)

    async def _parse(self, call: Call, lease: BodyLease, parse: Parse[T]) -> T:
        """The typed request for a model that is served here, from a client that is being watched."""
        check_media_type(call.headers)
        max_bytes = self._ctx.http.max_body_bytes
        try:
            self._check_open(call)
        except Unavailable:
            if b"expect" not in call.headers and announced_bytes(call.headers) <= max_bytes:
                await drop_body(call.receive, max_bytes=max_bytes)
            raise
        raw = await read_body(call.receive, call.headers, max_bytes=max_bytes, lease=lease)
        call.watch()
        self._check_open(call)
        border = self._border()

        def typed() -> T:
            body = decode_object(raw)
            model = model_name(body)
            if model not in self._ctx.model_names:
                raise NotServed(model[:256], served=self._ctx.model_names)
            return parse(body, border=border)

        if len(raw) <= limits.LARGE_BODY_BYTES:
            return typed()
        return await call.unless_gone(_in_thread(self._parser, typed))

    def _check_open(self, call: Call) -> None:
        """Refuse what the engine would refuse, before any work is done for it."""
        self._ctx.engine.check_room(client=call.client, ahead=self._encoding)

    async def _encode(self, call: Call, work: Coroutine[Any, Any, T]) -> T:
        """Tokens of a call, for as long as its client waits for them."""
        self._encoding += 1
        try:
            return await call.unless_gone(work)
        finally:
            self._encoding -= 1

    async def _encode_chat(self, conversation: Conversation) -> Encoded:
        tokens = await self._ctx.text.encode_chat(conversation)
        return tokens, await self._ctx.text.hints(tokens)

    async def _encode_prompts(self, request: CompletionRequest) -> list[Encoded]:
        encoded: list[Encoded] = []
        for prompt in request.prompts:
            tokens = prompt
            if isinstance(tokens, str):
                tokens = await self._ctx.text.encode_prompt(tokens, add_special_tokens=request.add_special_tokens)
            encoded.append((tokens, await self._ctx.text.hints(tokens)))
            await asyncio.sleep(0)  # a short prompt is encoded without a pause, but there may be many
        return encoded

    def _border(self) -> Border:
        ctx = self._ctx
        return Border(
            limits=ctx.engine.limits,
            defaults=ctx.defaults,
            end_token_ids=ctx.text.tokenizer.stop_token_ids,
            max_choices=ctx.http.max_choices,
            max_logprobs=ctx.http.max_logprobs,
        )

    def _head(self, answer_id: str) -> Head:
        ctx = self._ctx
        return Head(
            id=answer_id,
            created=int(ctx.unix_time()),
            model=ctx.model_names[0],
            system_fingerprint=ctx.system_fingerprint,
        )

    def _ignored(self, generation: Generation) -> dict[str, str]:
        if not generation.ignored:
            return {}
        header = ignored_header(generation.ignored)
        room = MAX_REMEMBERED_NAMES - len(self._logged_names)
        fresh = [name[:64] for name in generation.ignored if name[:64] not in self._logged_names][:room]
        if fresh:
            self._logged_names.update(fresh)
            logger.warning("event=ignored_params names=%s", header)
        return {"x-ignored-params": header}

    # --- what is served, and how it is ---

    async def _models(self, call: Call) -> None:
        cards = [self._card(name) for name in self._ctx.model_names]
        await call.respond(200, orjson.dumps({"object": "list", "data": cards}))

    async def _model(self, call: Call) -> None:
        name = call.path.removeprefix("/v1/models/")
        if not name:
            raise HTTPException(404)
        if name not in self._ctx.model_names:
            raise NotServed(name[:256], served=self._ctx.model_names)
        await call.respond(200, orjson.dumps(self._card(name)))

    def _card(self, name: str) -> dict[str, Any]:
        context_tokens = self._ctx.engine.limits.context_tokens
        return {
            "id": name,
            "object": "model",
            "created": self._ctx.created_s,
            "owned_by": "twinpane",
            "root": self._ctx.root or self._ctx.model_names[0],
            "parent": None,
            "max_model_len": context_tokens,
            "context_length": context_tokens,
            "max_input_tokens": context_tokens - 1,
            "max_output_tokens": context_tokens - 1,
            "capabilities": {"vision": False, "audio": False, "video": False, "tools": False, "reasoning": False},
            "meta": {"n_ctx": context_tokens},
        }

    async def _health(self, call: Call) -> None:
        """Alive: the engine works, or has nothing to do. A server that drains is alive."""
        health = self._ctx.engine.health()
        if health.state not in (EngineState.READY, EngineState.DRAINING):
            raise _unavailable(health.state)
        if health.idle_s >= self._ctx.http.health_timeout_s:
            raise Unavailable("The engine makes no progress.", code="engine_unavailable")
        await call.respond(200, b'{"status":"ok"}')

    async def _ready(self, call: Call) -> None:
        """Wants new requests."""
        state = self._ctx.engine.health().state
        if state is not EngineState.READY:
            raise _unavailable(state)
        await call.respond(200, b'{"status":"ready"}')

    async def _metrics(self, call: Call) -> None:
        await call.respond(200, self._ctx.metrics.render(), {"content-type": PROMETHEUS_TEXT})

    async def _flush_cache(self, call: Call) -> None:
        """Between two runs of a benchmark, say. What runs now would bring it back at once, so it must be over."""
        if self._ctx.http.admin_api_key is not None:
            self._check_admin(call)
        if not self._ctx.engine.flush_cache():
            health = self._ctx.engine.health()
            raise HttpRefusal(
                f"The cache is in use by {health.running} running and {health.waiting} waiting requests; flush it when "
                "they are over.",
                status=409,
                code="engine_busy",
            )
        await call.respond(200, b'{"flushed":true}')

    async def _timeline(self, call: Call) -> None:
        """What happened to a request, by its x-request-id or the id of its answer, in seconds from its arrival."""
        self._check_admin(call)
        name = call.path.removeprefix("/debug/requests/")
        prefix = next((each for each in (CHAT_ID, COMPLETION_ID) if name.startswith(each)), "")
        found = self._ctx.engine.timelines(name) or self._ctx.engine.timelines(name.removeprefix(prefix))
        if not found:
            raise HttpRefusal(
                f"No request {name[:256]!r} is remembered here: ids are those of answers, or of their x-request-id "
                "header, and the oldest are forgotten.",
                status=404,
                code="request_not_found",
            )
        await call.respond(200, orjson.dumps({"id": name, "requests": [_shown(events) for events in found.values()]}))

    def _check_admin(self, call: Call) -> None:
        """Raise unless the call brings the admin key."""
        wanted = self._ctx.http.admin_api_key
        if wanted is None:
            raise HttpRefusal(
                "This route is for the server's administrator: start the server with --admin-api-key to use it.",
                status=403,
                code="admin_key_not_set",
            )
        key = wanted.encode("utf-8", "surrogateescape")
        if not any(secrets.compare_digest(sent, key) for sent in api_keys(call.headers)):
            raise HttpRefusal("This route needs the server's admin key.", status=401, code="invalid_api_key")

    async def _root(self, call: Call) -> None:
        await call.respond(200, b'{"server":"twinpane"}')


def _shown(events: Sequence[TimelineEvent]) -> list[dict[str, float | str]]:
    start_s = events[0].at_s if events else 0.0
    return [{"at_s": round(each.at_s - start_s, 6), "event": each.what, **each.facts} for each in events]


async def _in_thread(executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(executor, work)


def _stream_usage(generation: Generation, job: Job) -> StreamUsage:
    return StreamUsage(
        at_end=generation.include_usage,
        on_chunks=generation.include_usage and generation.continuous_usage,
        prompt=job.prompt,
        tokens_so_far=lambda: job.tokens_so_far,
    )


def _unavailable(state: EngineState) -> TwinpaneError:
    match state:
        case EngineState.LOADING:
            return Unavailable("The model is loading.", code="model_loading", retry_after_s=RETRY_AFTER_LOADING_S)
        case EngineState.DRAINING:
            return Unavailable(
                "The server is shutting down.", code="server_draining", retry_after_s=RETRY_AFTER_LOADING_S
            )
        case _:
            return Unavailable("The engine has stopped.", code="engine_unavailable")


class _Endpoint:
    """A handler as the ASGI application that a Starlette route wants. `name` is the route's template, for metrics."""

    def __init__(self, name: str, handler: Handler) -> None:
        self._name = name
        self._handler = handler

    async def __call__(
        self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        scope["handler"] = self._name
        await self._handler(scope["call"])


async def _no_route(scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
    raise HTTPException(404)


def _routing_refusal(call: Call, error: HTTPException) -> HttpRefusal:
    if error.status_code == 405:
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        return HttpRefusal(
            f"Not allowed to {call.method} on {call.path} (HINT: use {allowed}).",
            status=405,
            code="method_not_allowed",
            headers={"allow": allowed},
        )
    return HttpRefusal(f"Invalid URL ({call.method} {call.path})", status=404, code="unknown_url")
