"""A client for an app made of fakes, and how to read what it answers."""

from __future__ import annotations

import json
from typing import Any

import httpx

from server.api.app import build_app
from server.api.context import ApiContext
from tests.fakes import MODEL, FakeEngine, FakeText


class Client:
    """Calls the app without a socket."""

    def __init__(self, ctx: ApiContext) -> None:
        self.ctx = ctx
        self.app = build_app(ctx)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.app, raise_app_exceptions=True), base_url="http://test"
        )

    @property
    def engine(self) -> FakeEngine:
        engine = self.ctx.engine
        assert isinstance(engine, FakeEngine)
        return engine

    @property
    def text(self) -> FakeText:
        text = self.ctx.text
        assert isinstance(text, FakeText)
        return text

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json={"model": MODEL} | body)

    async def chat(self, **body: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", **({"messages": [{"role": "user", "content": "hi"}]} | body))

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.post("/v1/completions", **({"prompt": "hi"} | body))

    async def raw(self, path: str, content: Any, **headers: str) -> httpx.Response:
        sent = {"content-type": "application/json"} | {name.replace("_", "-"): v for name, v in headers.items()}
        return await self.http.post(path, content=content, headers=sent)


def events(response: httpx.Response) -> list[Any]:
    """The JSON objects of a stream; "[DONE]" and comments as strings."""
    out: list[Any] = []
    assert response.text.endswith("\n\n")
    for event in response.text.split("\n\n")[:-1]:
        if event.startswith(":"):
            out.append(event)
            continue
        assert event.startswith("data: "), event
        data = event.removeprefix("data: ")
        out.append(data if data == "[DONE]" else json.loads(data))
    return out


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object of a response, with what every error has checked."""
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert int(response.headers["content-length"]) == len(response.content)
    error: dict[str, Any] = response.json()["error"]
    assert list(error)[:4] == ["message", "type", "param", "code"]
    assert isinstance(error["message"], str)
    assert error["message"]
    return error
