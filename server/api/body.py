"""The bytes of a request body, counted while they arrive, and the JSON object in them.

orjson refuses what JSON does not have (NaN, Infinity, lone surrogates, invalid UTF-8, numbers beyond a double). Of two
equal keys the last one counts, as in every JSON library clients use. Nesting is capped here, because templates and
encoders further in would recurse.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import orjson

from server.api import limits
from server.api.errors import HttpRefusal
from server.api.fields import Json, kind_of
from server.errors import BadRequest, Overloaded, Unavailable

RETRY_AFTER_DRAIN_S = 5.0

Receive = Callable[[], Awaitable[Any]]


class ClientGone(Exception):
    """The client closed its connection; there is nobody left to answer."""


def check_media_type(headers: Mapping[bytes, bytes]) -> None:
    """`application/json` or `*/*+json`, with any parameters. A missing type is refused too: browsers can send such a
    body to another origin without asking first."""
    media = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if not (media == b"application/json" or (b"/" in media and media.endswith(b"+json"))):
        raise HttpRefusal(
            "Unsupported media type: send the body as 'Content-Type: application/json'.",
            status=415,
            code="unsupported_media_type",
        )
    if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"identity", b""):
        raise HttpRefusal(
            "Unsupported content encoding: send the body uncompressed.", status=415, code="unsupported_media_type"
        )


class Bodies:
    """All request bodies that are being read or are held for a call that was not yet tokenized.

    Owner: Api, on the event loop. Together they are bounded; and when the server drains, whoever is still sending is
    told so at once.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._reading: set[asyncio.Timeout] = set()
        self._draining = False

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    @contextmanager
    def lease(self) -> Generator[BodyLease, None, None]:
        """Room for one body; what it took is given back at the end of the block."""
        lease = BodyLease(self)
        try:
            yield lease
        finally:
            self._held_bytes -= lease.held_bytes

    def begin_drain(self) -> None:
        self._draining = True
        for waiting in self._reading:
            waiting.reschedule(0.0)

    def take(self, count: int) -> None:
        if self._held_bytes + count > self._max_bytes:
            raise Overloaded("The server is overloaded: too many request bodies at once.", retry_after_s=1.0)
        self._held_bytes += count

    async def next_message(self, receive: Receive, *, deadline_s: float) -> Any:
        """The next part of a body, or what is to be said to a client that is too late."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(min(deadline_s, loop.time() + limits.BODY_IDLE_S)) as waiting:
                self._reading.add(waiting)
                try:
                    if self._draining:
                        waiting.reschedule(0.0)
                    return await receive()
                finally:
                    self._reading.discard(waiting)
        except TimeoutError:
            if self._draining:
                raise Unavailable(
                    "The server is shutting down.", code="server_draining", retry_after_s=RETRY_AFTER_DRAIN_S
                ) from None
            raise HttpRefusal(
                "The request body did not arrive in time.",
                status=408,
                code="request_timeout",
                headers={"connection": "close"},
            ) from None


class BodyLease:
    """What one call took of the room for bodies. Owner: the call's handler."""

    def __init__(self, bodies: Bodies) -> None:
        self.bodies = bodies
        self.held_bytes = 0

    def take(self, count: int) -> None:
        self.bodies.take(count)
        self.held_bytes += count


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], *, max_bytes: int, lease: BodyLease) -> bytearray:
    """The whole body, or 413 as soon as more than max_bytes came or were announced, 408 if it arrives too slowly, 429
    if all bodies together are too large.

    A client that sends a little too much gets to read its answer: what it still sends is dropped for a short while
    before the connection closes, since closing on unread bytes would reset it.
    """
    announced = announced_bytes(headers)
    if announced > max_bytes:
        if b"expect" not in headers:
            await drop_body(receive, max_bytes=2 * max_bytes)
        raise _too_large(max_bytes)
    started_s = asyncio.get_running_loop().time()
    body = bytearray()
    while True:
        deadline_s = started_s + limits.BODY_GRACE_S + len(body) / limits.BODY_BYTES_PER_S
        message = await lease.bodies.next_message(receive, deadline_s=deadline_s)
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) + len(part) > max_bytes:
            body.clear()
            if more:
                await drop_body(receive, max_bytes=max_bytes)
            raise _too_large(max_bytes)
        lease.take(len(part))
        body += part
        if not more:
            return body


def announced_bytes(headers: Mapping[bytes, bytes]) -> int:
    declared = headers.get(b"content-length", b"")
    return int(declared) if declared.isdigit() and len(declared) < 20 else 0


async def drop_body(receive: Receive, *, max_bytes: int) -> None:
    """Read and forget up to max_bytes more, for at most LINGER_S."""
    dropped = 0
    try:
        async with asyncio.timeout(limits.LINGER_S):
            while dropped <= max_bytes:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                dropped += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _too_large(max_bytes: int) -> HttpRefusal:
    return HttpRefusal(
        f"The request body is too large: at most {max_bytes} bytes are accepted.",
        status=413,
        code="request_too_large",
        headers={"connection": "close"},
    )


def decode_object(body: bytes | bytearray) -> dict[str, Json]:
    """The JSON object in a body, at most MAX_DEPTH containers deep."""
    if len(body) > limits.LARGE_BODY_BYTES:
        _check_size(body)
    try:
        with _no_collection():
            value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"We could not parse the JSON body of your request: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise BadRequest(
            f"Invalid type for the request body: expected an object, but got {kind_of(value)} instead.",
            code="invalid_type",
        )
    if body.count(b"[") + body.count(b"{") > limits.MAX_DEPTH and _deeper_than(value, limits.MAX_DEPTH):
        raise BadRequest(
            f"We could not parse the JSON body of your request: it is nested more than {limits.MAX_DEPTH} levels deep.",
            code="invalid_json",
        )
    return value


@contextmanager
def _no_collection() -> Generator[None, None, None]:
    """Many new containers at once set off the cyclic collector again and again, over everything that is loaded; what
    JSON gives has no cycles. Nobody else runs meanwhile: orjson keeps the interpreter lock."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


SCANNED_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Tally:
    """How many values some JSON holds, or more: `values` leaves out the first one of each container."""

    containers: int
    members: int
    values: int

    @property
    def fits(self) -> bool:
        return (
            self.containers <= limits.MAX_CONTAINERS
            and self.members <= limits.MAX_MEMBERS
            and self.values <= limits.MAX_VALUES
        )


def _check_size(body: bytes | bytearray) -> None:
    """Refuse what would take long to decode. orjson decodes in one go and holds the interpreter lock while it does,
    so a worker thread alone would not help."""
    if not _count(body).fits and not tally(body).fits:
        raise BadRequest("The JSON body of your request holds too many values.", code="invalid_json")


def tally(body: bytes | bytearray) -> Tally:
    """Exact counts: what stands inside strings is not counted. In short steps, between which other threads run."""
    containers = members = values = 0
    inside = False
    start = 0
    while start < len(body):
        stop = min(start + SCANNED_BYTES, len(body))
        part = bytes(body[start:stop])
        if (len(part) - len(part.rstrip(b"\\"))) % 2 and stop < len(body):
            part += body[stop : stop + 1]  # an escape is not cut in two
            stop += 1
        pieces = part.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        counted = _count(b"".join(pieces[inside::2]))
        inside ^= len(pieces) % 2 == 0
        containers += counted.containers
        members += counted.members
        values += counted.values
        start = stop
    return Tally(containers, members, values)


def _count(text: bytes | bytearray) -> Tally:
    return Tally(text.count(b"[") + text.count(b"{"), text.count(b":"), text.count(b","))


def _deeper_than(value: Json, levels: int) -> bool:
    """Level by level and without recursion."""
    layer: list[Json] = [value]
    for _ in range(levels):
        layer = [
            child
            for node in layer
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
        if not layer:
            return False
    return True
