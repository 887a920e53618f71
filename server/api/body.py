"""The bytes of a request body, counted while they arrive, and the JSON object in them.

orjson refuses what JSON does not have (NaN, Infinity, lone surrogates, invalid UTF-8, numbers beyond a double). Of two
equal keys the last one counts, as in every JSON library clients use. Nesting is capped here, because templates and
encoders further in would recurse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson

from server.api.errors import HttpRefusal
from server.api.fields import Json, kind_of
from server.errors import BadRequest

MAX_DEPTH = 64
BODY_IDLE_S = 60.0
LINGER_S = 2.0

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


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], *, max_bytes: int) -> bytes:
    """The whole body, or 413 as soon as more than max_bytes came or were announced, or 408 if it stops arriving.

    A client that sends a little too much gets to read its answer: what it still sends is dropped for a short while
    before the connection closes, since closing on unread bytes would reset it.
    """
    declared = headers.get(b"content-length", b"")
    announced = int(declared) if declared.isdigit() and len(declared) < 20 else 0
    if announced > max_bytes:
        if b"expect" not in headers:
            await _drop(receive, max_bytes=2 * max_bytes)
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    while True:
        try:
            async with asyncio.timeout(BODY_IDLE_S):
                message = await receive()
        except TimeoutError:
            raise HttpRefusal(
                "The request body did not arrive in time.",
                status=408,
                code="request_timeout",
                headers={"connection": "close"},
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            if message.get("more_body", False):
                parts.clear()
                await _drop(receive, max_bytes=max_bytes)
            raise _too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def _drop(receive: Receive, *, max_bytes: int) -> None:
    """Read and forget up to max_bytes more, for at most LINGER_S."""
    dropped = 0
    try:
        async with asyncio.timeout(LINGER_S):
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


def decode_object(body: bytes) -> dict[str, Json]:
    """The JSON object in a body, at most MAX_DEPTH containers deep."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"We could not parse the JSON body of your request: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise BadRequest(
            f"Invalid type for the request body: expected an object, but got {kind_of(value)} instead.",
            code="invalid_type",
        )
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _deeper_than(value, MAX_DEPTH):
        raise BadRequest(
            f"We could not parse the JSON body of your request: it is nested more than {MAX_DEPTH} levels deep.",
            code="invalid_json",
        )
    return value


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
