"""The real HTTP layer, engine, scheduler and cache over real sockets, on a device without tensors: nothing that
clients do leaves a trace or disturbs a neighbour."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from server.api.app import build_app
from server.api.context import ApiContext
from server.api.serve import bind_socket, serve
from server.cache.kv_cache import KVCache
from server.config import HttpConfig, KVLayout, SchedulerConfig
from server.engine import InferenceEngine
from server.metrics import Metrics
from server.scheduler.scheduler import Scheduler
from tests.fake_device import FakeDevice, text_alone
from tests.fakes import VOCAB_SIZE, FakeText
from tests.house import assert_nothing_left

LAYOUT = KVLayout(page_tokens=4, window_tokens=7, full_page_bytes=3, window_page_bytes=5, slab_bytes=15, slab_count=120)
STEADY = "the steady one"
OUTPUTS = 400


class House:
    def __init__(self) -> None:
        self.cache = KVCache(LAYOUT)
        self.device = FakeDevice(layout=LAYOUT, vocab=128)
        config = SchedulerConfig(max_sequences=8, step_token_budget=48, prefill_chunk_tokens=16)
        self.engine = InferenceEngine(
            lambda on_end: Scheduler(config, self.cache, context_tokens=1000, on_end=on_end),
            self.device,
            vocab_size=VOCAB_SIZE,
            metrics=Metrics("m"),
        )
        http = HttpConfig(shutdown_timeout_s=5)
        metrics = Metrics("m")
        context = ApiContext(engine=self.engine, text=FakeText(), http=http, metrics=metrics, model_names=("m",))
        self.http = http
        self.app = build_app(context)
        self.url = ""

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[House]:
        sock = bind_socket("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        await self.engine.start()
        started, stop = asyncio.Event(), asyncio.Event()
        serving = asyncio.create_task(serve(self.app, sock, self.http, self.engine, started=started.set, stop=stop))
        await asyncio.wait_for(started.wait(), 10)
        try:
            yield self
        finally:
            stop.set()
            await serving
            await self.engine.stop()

    def assert_empty(self) -> None:
        assert_nothing_left(self.engine._scheduler, self.cache)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with House().open() as opened:
        yield opened


def completion(prompt: str, **settings: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": prompt, "seed": 3, "ignore_eos": True, **settings}


async def read_stream(http: aiohttp.ClientSession, url: str, **settings: Any) -> str:
    """The text of a stream that must end well."""
    text, done = "", False
    async with http.post(f"{url}/v1/completions", json=completion(STEADY, stream=True, **settings)) as response:
        assert response.status == 200
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                done = True
            elif line.startswith(b"data: "):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["text"]
    assert done
    return text


def steady_text() -> str:
    prompt = list(STEADY.encode())
    return bytes(text_alone(prompt, OUTPUTS, layout=LAYOUT, seed=3, vocab=128)).decode()


async def leave_at_some_moment(http: aiohttp.ClientSession, url: str, rng: random.Random) -> None:
    """One request, streamed or not, cut off after a random time; now and then it may end by itself."""
    body = completion(
        "x" * rng.randint(1, 120),
        max_tokens=rng.randint(1, 200),
        n=rng.choice([1, 1, 1, 4]),
        stream=rng.random() < 0.5,
    )
    with contextlib.suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(rng.choice([0.0, 0.002, 0.01, 0.05, 0.2])):
            async with http.post(f"{url}/v1/completions", json=body) as response:
                async for _ in response.content:
                    pass


async def test_five_hundred_clients_leave_at_random_moments_and_nothing_is_left(house: House) -> None:
    rng = random.Random(0)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        steady = asyncio.create_task(read_stream(http, house.url, max_tokens=OUTPUTS))
        for _ in range(20):
            await asyncio.gather(*(leave_at_some_moment(http, house.url, rng) for _ in range(25)))
        assert await steady == steady_text(), "a neighbour's stream was disturbed"
    async with asyncio.timeout(10):
        while not house.engine._scheduler.idle or house.cache._rows:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
    house.assert_empty()


CASES = Path(__file__).with_name("hostile_bodies.json")


async def test_malformed_bodies_get_their_4xx_while_a_stream_runs_on(house: House) -> None:
    bodies = json.loads(CASES.read_text(encoding="utf-8"))
    async with aiohttp.ClientSession() as http:
        steady = asyncio.create_task(read_stream(http, house.url, max_tokens=OUTPUTS))
        for case in bodies:
            raw = case["raw"].encode() if "raw" in case else json.dumps(case["body"]).encode()
            async with http.post(
                house.url + case["path"], data=raw, headers={"content-type": "application/json"}
            ) as response:
                answer = await response.read()
                assert response.status in case["status"], (case, response.status, answer)
                if response.status >= 400:
                    error = json.loads(answer)["error"]
                    assert set(error) >= {"message", "type", "param", "code"}
                    if "param" in case:
                        assert error["param"] == case["param"], (case, error)
        assert await steady == steady_text()
    house.assert_empty()


async def test_an_overlong_prompt_is_400_in_both_modes(house: House) -> None:
    async with aiohttp.ClientSession() as http:
        for stream in (False, True):
            body = completion("x" * 1000, max_tokens=5, stream=stream)
            async with http.post(f"{house.url}/v1/completions", json=body) as response:
                assert response.status == 400
                error = (await response.json())["error"]
                assert error["code"] == "context_length_exceeded"
                assert error["n_prompt_tokens"] == 1000
                assert error["n_ctx"] == house.engine.limits.context_tokens


@pytest.mark.parametrize("over", [-1, 0])
async def test_the_last_token_of_the_context_can_be_used(house: House, over: int) -> None:
    context = house.engine.limits.context_tokens
    async with aiohttp.ClientSession() as http:
        body = completion("x" * (context - 1 + over), max_tokens=50)
        async with http.post(f"{house.url}/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            assert answer["usage"]["completion_tokens"] == 1 - over
            assert answer["choices"][0]["finish_reason"] == "length"
