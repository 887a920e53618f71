"""Far more requests than a server takes, over real sockets: each ends once, in an answer or in a refusal that says when
to come again; and nobody who left, or waited too long, keeps a place."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import psutil

from tests.processes import Served, serving

SLOTS, QUEUE, BURST = 8, 50, 500
CROWD = ("--max-num-seqs", str(SLOTS), "--max-num-queued-reqs", str(QUEUE))
ALONE = ("--max-num-seqs", "1", "--max-num-queued-reqs")
LONG = 3000
"""Outputs that take seconds."""
HEALTH_LIMIT_S = 2.0
"""Loose: a busy machine is slow to hear of anything."""
GROWTH_LIMIT_BYTES = 200 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """One response, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: str

    @property
    def error(self) -> dict[str, Any] | None:
        """Of the response, or in its stream."""
        if self.streamed:
            return next((event["error"] for event in self.events() if "error" in event), None)
        error: dict[str, Any] | None = json.loads(self.body).get("error")
        assert (error is None) == (self.status == 200)
        return error

    @property
    def streamed(self) -> bool:
        return self.headers["content-type"].startswith("text/event-stream")

    def events(self) -> list[dict[str, Any]]:
        lines = [line.removeprefix("data: ") for line in self.body.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    def text(self) -> str:
        """What was streamed before the end."""
        choices = [choice for event in self.events() for choice in event.get("choices", ())]
        return "".join(choice["text"] for choice in choices)

    def how(self) -> str:
        """ "answered", or the code of the error. Asserts that it ended in one way only."""
        error = self.error
        if not self.streamed:
            reasons = [choice["finish_reason"] for choice in json.loads(self.body).get("choices", ())]
        else:
            events = self.events()
            reasons = [each["finish_reason"] for event in events for each in event.get("choices", ())]
            reasons = [reason for reason in reasons if reason is not None]
            assert sum("error" in event for event in events) == (error is not None)
            assert self.body.count("[DONE]") == 1 and self.body.endswith("data: [DONE]\n\n")
        assert reasons == ([] if error else ["length"])
        return "answered" if error is None else str(error["code"])


@contextlib.asynccontextmanager
async def open_session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120)
    ) as session:
        yield session


async def ask(session: aiohttp.ClientSession, served: Served, prompt: str, outputs: int, *, stream: bool) -> Ended:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": outputs, "ignore_eos": True, "stream": stream}
    async with session.post(f"{served.url}/v1/completions", json=body) as response:
        headers = {name.lower(): value for name, value in response.headers.items()}
        return Ended(status=response.status, headers=headers, body=await response.text())


async def here(session: aiohttp.ClientSession, served: Served) -> tuple[int, int]:
    """Running and waiting requests."""
    async with session.get(f"{served.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    found = {
        name: float(line.split()[-1])
        for line in lines
        for name in ("running", "waiting")
        if line.startswith(f"twinpane:num_requests_{name}{{")
    }
    return int(found["running"]), int(found["waiting"])


async def until(
    session: aiohttp.ClientSession, served: Served, *, running: int, waiting: int, within_s: float = 20
) -> None:
    deadline_s = time.monotonic() + within_s
    while (now := await here(session, served)) != (running, waiting):
        assert time.monotonic() < deadline_s, f"{now} run and wait, not {(running, waiting)}"
        await asyncio.sleep(0.01)


@contextlib.contextmanager
def watching_health(served: Served) -> Iterator[list[float]]:
    """How long /health took to answer 200, again and again, each time on a connection of its own; from a thread, since
    the burst's loop is busy."""
    taken_s: list[float] = []
    statuses: set[int] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            started_s = time.perf_counter()
            connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=60)
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
            connection.close()
            statuses.add(response.status)
            taken_s.append(time.perf_counter() - started_s)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield taken_s
    finally:
        over.set()
        thread.join()
    assert statuses == {200}


def assert_clean_refusal(ended: Ended) -> None:
    assert ended.status == 429 and ended.error is not None
    assert ended.error["type"] == "rate_limit_error"
    wait_ms, wait_s = int(ended.headers["retry-after-ms"]), int(ended.headers["retry-after"])
    assert 1 <= wait_s <= 60 and wait_s == -(-wait_ms // 1000)
    assert ended.headers["x-should-retry"] == "true"


async def test_of_a_burst_each_is_answered_or_refused_and_health_answers_throughout(tmp_path: Path) -> None:
    with serving("tiny", tmp_path / "log", *CROWD) as served:
        process = psutil.Process(served.process.pid)
        async with open_session() as session:
            await ask(session, served, "the first one", 8, stream=False)
            before_bytes = process.memory_info().rss
            with watching_health(served) as health_s:
                for burst in range(3):
                    ended = await asyncio.gather(
                        *(
                            ask(session, served, f"{burst} {number} says", 32, stream=number % 2 == 0)
                            for number in range(BURST)
                        )
                    )
                    ways = Counter(each.how() for each in ended)
                    assert ways.keys() == {"answered", "server_overloaded"}
                    assert ways["answered"] >= QUEUE + 1
                    for each in ended:
                        if each.how() == "server_overloaded":
                            assert_clean_refusal(each)
            await until(session, served, running=0, waiting=0)
            grown_bytes = process.memory_info().rss - before_bytes
        ordered = sorted(health_s)
        print(
            f"/health of {len(ordered)}: P50 {1e3 * ordered[len(ordered) // 2]:.0f} ms, "
            f"P99 {1e3 * ordered[int(0.99 * len(ordered))]:.0f} ms, max {1e3 * ordered[-1]:.0f} ms; "
            f"memory grew by {grown_bytes / 2**20:.0f} MiB"
        )
        assert ordered[-1] < HEALTH_LIMIT_S
        assert grown_bytes < GROWTH_LIMIT_BYTES
        assert served.stop() == 0, served.output()
        assert "Traceback" not in served.output()


async def test_clients_of_the_sdk_that_are_refused_come_again_and_are_answered(tmp_path: Path) -> None:
    refused: list[float] = []

    async def note(response: Any) -> None:
        if response.status_code == 429:
            refused.append(float(response.headers["retry-after-ms"]) / 1000)

    with serving("tiny", tmp_path / "log", *ALONE, "1") as served:
        async with (
            openai.DefaultAsyncHttpxClient(event_hooks={"response": [note]}) as http_client,
            openai.AsyncOpenAI(
                base_url=f"{served.url}/v1", api_key="none", max_retries=10, http_client=http_client
            ) as client,
        ):
            answers = await asyncio.gather(
                *(
                    client.completions.create(
                        model="tiny", prompt=f"{number} says", max_tokens=50, extra_body={"ignore_eos": True}
                    )
                    for number in range(6)
                )
            )
        assert len(refused) >= 4
        assert [answer.choices[0].finish_reason for answer in answers] == ["length"] * 6


async def test_who_leaves_while_queued_frees_the_place_at_once(tmp_path: Path) -> None:
    with serving("tiny", tmp_path / "log", *ALONE, "1") as served:
        async with open_session() as session:
            at_work = asyncio.create_task(ask(session, served, "the one that runs", LONG, stream=True))
            await until(session, served, running=1, waiting=0)
            for stream in (True, False):
                queued = asyncio.create_task(ask(session, served, "the one that waits", 8, stream=stream))
                await until(session, served, running=1, waiting=1)
                assert_clean_refusal(await ask(session, served, "the one too many", 8, stream=stream))
                queued.cancel()
                await until(session, served, running=1, waiting=0, within_s=2)
            following = asyncio.create_task(ask(session, served, "the next one", 8, stream=False))
            await until(session, served, running=1, waiting=1)
            assert not at_work.done()
            assert [(await each).how() for each in (at_work, following)] == ["answered", "answered"]


async def test_sigterm_in_a_crowd_ends_everybody_in_one_way_in_time(tmp_path: Path) -> None:
    patience_s = 2
    with serving("tiny", tmp_path / "log", *CROWD, "--shutdown-timeout", str(patience_s)) as served:
        async with open_session() as session:
            asking = [
                asyncio.create_task(ask(session, served, f"{number} says", LONG, stream=number % 2 == 0))
                for number in range(2 * (SLOTS + QUEUE))
            ]
            await until(session, served, running=SLOTS, waiting=QUEUE)
            while sum(each.done() for each in asking) < SLOTS + QUEUE:
                await asyncio.sleep(0.01)
            served.process.send_signal(signal.SIGTERM)
            asked_s = time.monotonic()
            code = await asyncio.to_thread(served.process.wait, 60)
            took_s = time.monotonic() - asked_s
            ways = Counter(each.how() for each in await asyncio.gather(*asking))
        assert code == 0, served.output()
        assert took_s < patience_s + 10
        assert ways.pop("server_overloaded") == SLOTS + QUEUE
        assert sum(ways.values()) == SLOTS + QUEUE
        assert ways.keys() <= {"answered", "server_draining"}, ways
        assert "Traceback" not in served.output()


async def test_a_request_that_takes_too_long_ends_with_504_or_with_an_event_in_its_stream(tmp_path: Path) -> None:
    """The slot goes from one that runs out of time to a shorter prompt that came last, so that those between them wait
    to their end. A stream has its headers as soon as it is accepted. With the native kernels a fast machine would have
    answered before."""
    slow = ("--kernels", "torch")
    with serving("tiny", tmp_path / "log", *ALONE, "8", *slow, "--request-timeout", "2") as served:
        async with open_session() as session:
            first = asyncio.create_task(ask(session, served, "the one that runs", LONG, stream=True))
            await until(session, served, running=1, waiting=0)
            whole, streamed = (
                asyncio.create_task(ask(session, served, " word" * 2000, 100, stream=stream))
                for stream in (False, True)
            )
            await until(session, served, running=1, waiting=2)
            last = asyncio.create_task(ask(session, served, "the next", LONG, stream=True))
            refused = await whole
            assert (refused.status, refused.how()) == (504, "request_timeout")
            assert refused.headers["x-should-retry"] == "false"
            assert ((await streamed).how(), (await streamed).text()) == ("request_timeout", "")
            for begun in (await first, await last):
                assert (begun.status, begun.how()) == (200, "request_timeout")
                assert begun.text()
            await until(session, served, running=0, waiting=0)
        assert "Traceback" not in served.output()
