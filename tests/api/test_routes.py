"""Routes that do not generate, what is said of wrong ones, ids, states and overload."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest
from openai.types import Model

from server.api.call import request_id_of
from server.api.errors import wire_error
from server.errors import Overloaded, Unavailable
from server.request import EngineState
from tests.api.wire import Client, error_of
from tests.fakes import MODEL, FakeEngine, FakeText, forever

Make = Callable[..., Client]


class TestRoutes:
    @pytest.mark.parametrize(
        ("path", "method"),
        [
            ("/v1/models/", "GET"),
            *itertools.product(
                ["/v1/foo", "/v1", "/v1/chat/completions/", "//", "/chat/completions"], ["GET", "POST", "DELETE"]
            ),
        ],
    )
    async def test_an_unknown_url_is_a_404(self, client: Client, path: str, method: str) -> None:
        response = await client.http.request(method, "http://test" + path)
        assert response.status_code == 404
        error = error_of(response)
        assert error["code"] == "unknown_url"
        assert error["message"] == f"Invalid URL ({method} {path})"

    @pytest.mark.parametrize(
        ("method", "path", "allow"),
        [
            ("GET", "/v1/chat/completions", "POST"),
            ("OPTIONS", "/v1/chat/completions", "POST"),
            ("PUT", "/v1/completions", "POST"),
            ("POST", "/v1/models", "GET, HEAD"),
            ("DELETE", f"/v1/models/{MODEL}", "GET, HEAD"),
            ("POST", "/health", "GET, HEAD"),
            ("BREW", "/metrics", "GET, HEAD"),
        ],
    )
    async def test_a_wrong_method_is_a_405_that_says_which_are_right(
        self, client: Client, method: str, path: str, allow: str
    ) -> None:
        response = await client.http.request(method, path)
        assert response.status_code == 405
        assert response.headers["allow"] == allow
        assert error_of(response)["code"] == "method_not_allowed"

    @pytest.mark.parametrize("path", ["/", "/health", "/ping", "/ready", "/health/ready", "/metrics", "/v1/models"])
    async def test_head_is_get_without_the_body(self, client: Client, path: str) -> None:
        head, get = await client.http.head(path), await client.http.get(path)
        assert head.status_code == get.status_code == 200
        assert head.content == b""
        assert head.headers["content-type"] == get.headers["content-type"]
        if path != "/metrics":
            assert head.headers["content-length"] == str(len(get.content))

    @pytest.mark.parametrize(
        ("method", "path"), [("POST", "/flush_cache"), ("GET", "/flush_cache"), ("POST", "/reset_prefix_cache")]
    )
    async def test_the_cache_is_flushed_when_nobody_uses_it(self, make_client: Make, method: str, path: str) -> None:
        client = make_client(engine=FakeEngine(step_s=None, script=forever))
        response = await client.http.request(method, path)
        assert (response.status_code, response.json()) == (200, {"flushed": True})
        assert client.engine.flushes == 1
        asking = asyncio.create_task(client.chat(max_tokens=1))
        while not client.engine.live:
            await asyncio.sleep(0)
        refused = await client.http.request(method, path)
        assert refused.status_code == 409
        assert error_of(refused)["code"] == "engine_busy"
        client.engine.step()
        assert (await asking).status_code == 200
        assert client.engine.flushes == 1

    async def test_head_of_a_wrong_url_has_no_body(self, client: Client) -> None:
        response = await client.http.head("/nope")
        assert (response.status_code, response.content) == (404, b"")

    async def test_models(self, client: Client) -> None:
        listed = (await client.http.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [card["id"] for card in listed["data"]] == [MODEL, "second-name"]
        for card in listed["data"]:
            Model.model_validate(card)
            assert (await client.http.get(f"/v1/models/{card['id']}")).json() == card
        assert listed["data"][0] == {
            "id": MODEL,
            "object": "model",
            "created": 1_700_000_000,
            "owned_by": "twinpane",
            "root": "fake/root",
            "parent": None,
            "max_model_len": 4096,
            "context_length": 4096,
            "max_input_tokens": 4095,
            "max_output_tokens": 4095,
            "capabilities": {"vision": False, "audio": False, "video": False, "tools": False, "reasoning": False},
            "meta": {"n_ctx": 4096},
        }
        response = await client.http.get("/v1/models/org/name")
        assert response.status_code == 404
        assert error_of(response)["code"] == "model_not_found"


class TestStates:
    @pytest.mark.parametrize(
        ("state", "health", "ready", "code"),
        [
            (EngineState.LOADING, 503, 503, "model_loading"),
            (EngineState.READY, 200, 200, None),
            (EngineState.DRAINING, 200, 503, "server_draining"),
            (EngineState.STOPPED, 503, 503, "engine_unavailable"),
            (EngineState.FAILED, 503, 503, "engine_unavailable"),
        ],
    )
    async def test_health_ready_and_generation_follow_the_engine(
        self, client: Client, state: EngineState, health: int, ready: int, code: str | None
    ) -> None:
        client.engine.state = state
        assert [(await client.http.get(path)).status_code for path in ("/health", "/ping")] == [health] * 2
        assert [(await client.http.get(path)).status_code for path in ("/ready", "/health/ready")] == [ready] * 2
        response = await client.chat()
        if code is None:
            assert response.status_code == 200
            return
        assert response.status_code == 503
        assert error_of(response)["code"] == code
        assert response.json()["error"]["type"] == "server_error"
        assert (response.headers.get("connection") == "close") == (state is EngineState.DRAINING)
        retry = "false" if code == "engine_unavailable" else "true"
        assert response.headers["x-should-retry"] == retry
        assert ("retry-after" in response.headers) == (code != "engine_unavailable")
        assert f'reason="{code}"'.encode() in client.ctx.metrics.render()

    async def test_health_is_bad_when_work_waits_and_nothing_moves(self, client: Client) -> None:
        client.engine.idle_s = 59.9
        assert (await client.http.get("/health")).status_code == 200
        client.engine.idle_s = 60.0
        assert (await client.http.get("/health")).status_code == 503
        assert (await client.http.head("/health")).status_code == 503


class TestOverload:
    async def test_a_full_engine_is_a_429_that_says_when_to_retry(self, make_client: Make) -> None:
        client = make_client(engine=FakeEngine(script=forever, step_s=None, max_requests=0))
        response = await client.chat(stream=True)
        assert response.status_code == 429
        error = error_of(response)
        assert (error["type"], error["code"]) == ("rate_limit_error", "server_overloaded")
        assert response.headers["retry-after"] == "2"
        assert response.headers["retry-after-ms"] == "1500"
        assert response.headers["x-should-retry"] == "true"
        assert b'admission_rejections_total{engine="0",model_name="fake-model",reason="server_overloaded"} 1.0' in (
            client.ctx.metrics.render()
        )

    async def test_beyond_the_queue_nothing_is_tokenized(self, make_client: Make) -> None:
        client = make_client(text=FakeText(encode_delay_s=0.05))
        client.engine.waiting, client.engine.max_waiting = 1, 3
        answers = await asyncio.gather(*(client.chat() for _ in range(10)))
        assert sorted(answer.status_code for answer in answers) == [200] * 2 + [429] * 8
        assert (await client.chat()).status_code == 200

    async def test_where_nobody_waits_everybody_is_tokenized(self, make_client: Make) -> None:
        client = make_client(text=FakeText(encode_delay_s=0.05))
        client.engine.max_waiting = 0
        answers = await asyncio.gather(*(client.chat() for _ in range(10)))
        assert {answer.status_code for answer in answers} == {200}

    @pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.1, "2"), (90.0, "90")])
    def test_retry_after_is_whole_seconds_rounded_up(self, seconds: float, header: str) -> None:
        wire = wire_error(Overloaded("full", retry_after_s=seconds), request_id="r")
        assert wire.headers["retry-after"] == header

    def test_a_retry_time_that_is_no_number_is_left_out(self) -> None:
        wire = wire_error(Unavailable("x", code="model_loading", retry_after_s=float("inf")), request_id="r")
        assert "retry-after" not in wire.headers


class TestRequestIds:
    @pytest.mark.parametrize(
        ("given", "kept"),
        [
            (b"abc-123_x.y:z", "abc-123_x.y:z"),
            (b"a b\tc\"d'e<f>", "abcdef"),
            (b"x" * 500, "x" * 128),
            (b"\xff\xfeid", "id"),
        ],
    )
    def test_a_given_id_keeps_its_harmless_characters(self, given: bytes, kept: str) -> None:
        assert request_id_of(given) == kept

    @pytest.mark.parametrize("given", [b"", b"   ", b"\xe6\x97\xa5", b'"{}"'])
    def test_without_a_usable_id_one_is_made(self, given: bytes) -> None:
        assert len(request_id_of(given)) == 32
        assert request_id_of(given) != request_id_of(given)

    async def test_the_id_is_in_the_header_the_answer_and_the_engine(self, client: Client) -> None:
        response = await client.raw("/v1/completions", f'{{"model":"{MODEL}","prompt":"a"}}', x_request_id="mine")
        assert response.headers["x-request-id"] == "mine"
        assert response.json()["id"] == "cmpl-mine"
        assert client.engine.accepted[-1].request_id.startswith("mine#")
        assert (await client.raw("/nope", b"", x_request_id="mine")).headers["x-request-id"] == "mine"

    async def test_two_live_requests_may_carry_one_id(self, client: Client) -> None:
        body = f'{{"model":"{MODEL}","prompt":["a","b"],"max_tokens":30,"ignore_eos":true}}'
        calls = [client.raw("/v1/completions", body, x_request_id="same") for _ in range(3)]
        assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * 3
        assert len({request.request_id for request in client.engine.accepted}) == 6


class TestHttpMetrics:
    async def test_calls_are_counted_by_route_and_never_by_a_clients_path(self, client: Client) -> None:
        await client.chat()
        await client.http.get("/v1/models/some/name")
        await client.http.get("/secret-path")
        await client.http.request("BREW", "/health")
        text = (await client.http.get("/metrics")).text
        assert 'http_requests_total{handler="/v1/chat/completions",method="POST",status="200"} 1.0' in text
        assert 'http_requests_total{handler="/v1/models/{id}",method="GET",status="404"} 1.0' in text
        assert 'http_requests_total{handler="unmatched",method="GET",status="404"} 1.0' in text
        assert 'method="OTHER"' in text
        assert "secret-path" not in text
        assert "BREW" not in text
