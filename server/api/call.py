"""One HTTP call: what the client sent, what was answered, and whether the client is still there."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import re
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

from server.api.body import ClientGone
from server.api.errors import CLIENT_GONE_STATUS, WireError
from server.api.limits import MAX_SHOWN_NAMES
from server.request import RequestId

logger = logging.getLogger("twinpane.api")
T = TypeVar("T")
Headers = Mapping[str, str]

MAX_REQUEST_ID_CHARACTERS = 128

WRITE_NOW = "twinpane.write_now"
"""An ASGI extension of our own protocol: `takes_more()` says whether the connection takes bytes at once, and
`write(data)` then sends some more of a response that has begun, which `send` could do only in a coroutine."""


class WriteNow(Protocol):
    """What the extension brings."""

    def takes_more(self) -> bool: ...

    def write(self, data: bytes) -> None:
        """Not empty."""
        ...


_NOT_IN_ID = re.compile(r"[^A-Za-z0-9._:\-]")
_NOT_IN_NAME = re.compile(r"[^A-Za-z0-9._\-]")
_engine_ids = itertools.count(1)
_new_ids = random.Random(secrets.randbits(256))  # os.urandom gives the interpreter lock away each time


def request_id_of(given: bytes) -> str:
    """The client's own id, reduced to harmless characters, or a new one."""
    kept = _NOT_IN_ID.sub("", given.decode("latin-1"))[:MAX_REQUEST_ID_CHARACTERS]
    return kept or f"{_new_ids.getrandbits(128):032x}"


def ignored_header(names: tuple[str, ...]) -> str:
    """Names of fields without effect, fit for a header whatever the client called them."""
    shown = [_NOT_IN_NAME.sub("?", name[:64]) for name in names[:MAX_SHOWN_NAMES]]
    if len(names) > MAX_SHOWN_NAMES:
        shown.append("...")
    return ", ".join(shown)


def client_of(headers: Mapping[bytes, bytes]) -> str | None:
    """Who calls, by a digest of the API key it sent; None without one. Keys themselves are not kept."""
    keys = api_keys(headers)
    return blake2b(keys[0], digest_size=16).hexdigest() if keys else None


def api_keys(headers: Mapping[bytes, bytes]) -> list[bytes]:
    """The keys that a call brings: a bearer token, `x-api-key`, or both."""
    scheme, _, token = headers.get(b"authorization", b"").strip().partition(b" ")
    bearer = token.strip() if scheme.lower() == b"bearer" else b""
    return [key for key in (bearer, headers.get(b"x-api-key", b"").strip()) if key]


class Call:
    """Owner: the task that handles the call.

    A client that closes its connection, or only its sending half, is gone: `watch` notices, and every wait that goes
    through `unless_gone` or `on_gone` ends at once.
    """

    def __init__(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.receive = receive
        self.client = client_of(self.headers)
        self.request_id = request_id_of(self.headers.get(b"x-request-id", b""))
        self.status: int | None = None
        self.ended = False
        self._send = send
        self._write_now: WriteNow | None = scope.get("extensions", {}).get(WRITE_NOW)
        self._gone = asyncio.Event()
        self._on_gone: Callable[[], object] | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def gone(self) -> bool:
        return self._gone.is_set()

    def engine_id(self) -> RequestId:
        """An id for the engine: readable in logs, and unique though clients may repeat theirs."""
        return RequestId(f"{self.request_id}#{next(_engine_ids)}")

    # --- the client's end of the line ---

    def watch(self) -> None:
        """Start looking for the end of the connection; the body must have been read."""
        assert self._watcher is None
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    def unwatch(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()

    def on_gone(self, callback: Callable[[], object]) -> None:
        """Call back when the client goes away, or now if it already went."""
        self._on_gone = callback
        if self.gone:
            callback()

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of some work, or ClientGone as soon as nobody waits for it any more."""
        task = asyncio.get_running_loop().create_task(work)
        self.on_gone(task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            if self.gone:
                raise ClientGone from None
            raise
        finally:
            task.cancel()
            self._on_gone = None

    def lost(self) -> None:
        """Note that the client is gone."""
        if not self.gone:
            self._gone.set()
            if self._on_gone is not None:
                self._on_gone()

    async def _watch(self) -> None:
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                self.lost()
                return

    # --- what is answered ---

    async def start(self, status: int, headers: Headers) -> None:
        assert self.status is None, "a response starts once"
        self.status = status
        lines = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
        lines.append((b"x-request-id", self.request_id.encode()))
        try:
            await self._send({"type": "http.response.start", "status": status, "headers": lines})
        except OSError:
            self.lost()

    async def write(self, data: bytes, *, more: bool) -> None:
        self.ended = not more
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except OSError:
            self.lost()

    @property
    def takes_more(self) -> bool:
        """Whether `write_now` may be called: the response has begun, the client is there and keeps up."""
        return self._write_now is not None and not self.gone and not self.ended and self._write_now.takes_more()

    def write_now(self, data: bytes) -> None:
        """More of a streamed body, from a plain function. Never raises: other calls are written behind this one."""
        assert self._write_now is not None
        try:
            self._write_now.write(data)
        except OSError:
            self.lost()
        except Exception:
            logger.exception("event=write_failed request_id=%s", self.request_id)
            self.lost()

    async def respond(self, status: int, body: bytes, headers: Headers | None = None) -> None:
        """A whole response; of a HEAD only the headers are sent."""
        fixed = {"content-type": "application/json", "content-length": str(len(body))}
        await self.start(status, fixed | dict(headers or {}))
        await self.write(b"" if self.method == "HEAD" else body, more=False)

    async def refuse(self, error: WireError) -> None:
        await self.respond(error.status, error.body(), error.headers)

    @property
    def counted_status(self) -> int:
        return CLIENT_GONE_STATUS if self.gone and not self.ended else self.status or 500
