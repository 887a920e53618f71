"""An OpenAI-compatible server that says what a script tells it, at the times the script tells it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

BOS_TOKENS = 1


@dataclass
class FakeServer:
    """chunks: (seconds to wait, text) of every answer, so that a token may bring no text. usage: whether the answer
    counts its tokens. fails: a status that every request gets, or "stream" for an error inside the stream."""

    chunks: Sequence[tuple[float, str]] = ((0.0, " a"),)
    usage: bool = True
    output_tokens: int = 1
    fails: int | str | None = None
    words_per_token: int = 1
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    in_flight: int = 0
    most_in_flight: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if isinstance(self.fails, int):
            return web.json_response({"error": {"message": "no such luck"}}, status=self.fails)
        prompt_tokens = len(body["prompt"].split()) // self.words_per_token + BOS_TOKENS
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": self.output_tokens}
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": " a"}], "usage": usage})
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.fails == "stream":
            await self._send(response, {"error": {"message": "out of luck"}})
            return response
        await response.write(b": a comment\n\n")
        for wait_s, text in self.chunks:
            await asyncio.sleep(wait_s)
            await self._send(response, {"choices": [{"index": 0, "text": text}], "usage": None})
        if self.usage:
            await self._send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        self.in_flight -= 1
        return response

    @staticmethod
    async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())


@asynccontextmanager
async def serving(server: FakeServer) -> AsyncIterator[FakeServer]:
    app = web.Application()
    app.router.add_post("/v1/completions", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert runner.addresses
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()
