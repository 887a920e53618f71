"""The servers that the clients talk to: fakes in a thread, and a real model in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from server.config import HttpConfig
from tests.fakes import FakeEngine, ServerThread, fake_context, forever


class Served:
    """A server by its URL, with the two looks inside that the tests need; both work on any server of ours."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.base_url = url + "/v1"
        self.model: str = httpx.get(url + "/v1/models").json()["data"][0]["id"]

    def running(self) -> float:
        """Requests in the engine, read from the metrics."""
        for line in httpx.get(self.url + "/metrics").text.splitlines():
            if line.startswith("twinpane:num_requests_running"):
                return float(line.rpartition(" ")[2])
        raise AssertionError("the server shows no running requests")


@pytest.fixture(scope="module", params=["fake", "smollm2"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    if request.param == "smollm2":
        yield Served(request.getfixturevalue("smollm2_server").url)
        return
    engine = FakeEngine(script=forever, step_s=0.002)
    http = HttpConfig(sse_keep_alive_s=0.0, shutdown_timeout_s=0.5)
    with ServerThread(fake_context(engine, http=http)) as server:
        yield FakeServed(server)


class FakeServed(Served):
    def __init__(self, server: ServerThread) -> None:
        super().__init__(server.url)
        self._server = server

    def running(self) -> float:
        engine = self._server.ctx.engine
        return float(self._server.call(lambda: engine.health().running))


@pytest.fixture
def server_url(served: Served) -> str:
    return served.url
