"""What only the server's administrator may do, and how a full queue is answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from server.api.call import client_of
from server.config import HttpConfig
from server.errors import StartupError
from server.request import TimelineEvent
from tests.api.wire import Client, error_of
from tests.fakes import MODEL, FakeEngine, forever

Make = Callable[..., Client]

KEY = "s3cret"
HEADERS = [
    {"authorization": f"Bearer {KEY}"},
    {"authorization": f"bearer {KEY}"},
    {"x-api-key": KEY},
    {"x-api-key": "another", "authorization": f"Bearer {KEY}"},
]
EVENTS = [TimelineEvent(5.0, "queued", {"choice": 0, "tokens": 9}), TimelineEvent(5.25, "ended", {"outcome": "stop"})]


def guarded(make_client: Make, **http: Any) -> Any:
    client = make_client(http=HttpConfig(sse_keep_alive_s=0.0, admin_api_key=KEY, **http))
    client.engine.events = EVENTS
    return client


@pytest.mark.parametrize("headers", HEADERS)
async def test_the_story_of_a_request_is_told_to_the_administrator(make_client: Make, headers: dict[str, str]) -> None:
    client = guarded(make_client)
    answer = await client.http.get("/debug/requests/known", headers=headers)
    assert answer.status_code == 200
    assert answer.json() == {
        "id": "known",
        "requests": [
            [
                {"at_s": 0.0, "event": "queued", "choice": 0, "tokens": 9},
                {"at_s": 0.25, "event": "ended", "outcome": "stop"},
            ]
        ],
    }
    for prefix in ("chatcmpl-", "cmpl-"):
        by_answer = await client.http.get(f"/debug/requests/{prefix}known", headers=headers)
        assert by_answer.json()["requests"] == answer.json()["requests"], "the id of an answer is as good"
    twice = await client.http.get("/debug/requests/chatcmpl-cmpl-known", headers=headers)
    assert twice.status_code == 404, "that is nobody's id"
    unknown = await client.http.get("/debug/requests/unknown", headers=headers)
    assert (unknown.status_code, error_of(unknown)["code"]) == (404, "request_not_found")


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer s3cre"}, {"x-api-key": ""}, {"authorization": KEY}])
@pytest.mark.parametrize(("method", "path"), [("GET", "/debug/requests/known"), ("POST", "/flush_cache")])
async def test_nobody_else_is_told_or_flushes_the_cache(
    make_client: Make, headers: dict[str, str], method: str, path: str
) -> None:
    client = guarded(make_client)
    answer = await client.http.request(method, path, headers=headers)
    assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")
    assert client.engine.flushes == 0


async def test_without_an_admin_key_the_cache_may_be_flushed_and_no_story_is_told(make_client: Make) -> None:
    client = make_client()
    client.engine.events = EVENTS
    answer = await client.http.get("/debug/requests/known", headers={"x-api-key": "anything"})
    assert (answer.status_code, error_of(answer)["code"]) == (403, "admin_key_not_set")
    assert (await client.http.post("/flush_cache")).status_code == 200


async def test_the_admin_key_flushes_the_cache(make_client: Make) -> None:
    client = guarded(make_client)
    assert (await client.http.post("/reset_prefix_cache", headers=HEADERS[0])).status_code == 200
    assert client.engine.flushes == 1


def test_the_admin_key_is_not_shown_where_a_config_is() -> None:
    assert KEY not in repr(HttpConfig(admin_api_key=KEY))


async def test_a_full_queue_may_be_answered_with_503_for_routers(make_client: Make) -> None:
    client = make_client(
        engine=FakeEngine(script=forever, step_s=None, max_requests=0),
        http=HttpConfig(sse_keep_alive_s=0.0, overload_status=503),
    )
    answer = await client.chat()
    assert (answer.status_code, error_of(answer)["code"]) == (503, "server_overloaded")
    assert error_of(answer)["type"] == "server_error"
    assert answer.headers["retry-after"] == "2"


@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({}, 0),
        ({"priority": 3}, 3),
        ({"service_tier": "flex"}, 1),
        ({"service_tier": "priority", "priority": 3}, 2),
        ({"service_tier": "auto"}, 0),
        ({"service_tier": None}, 0),
    ],
)
async def test_a_service_tier_is_a_step_of_priority(make_client: Make, fields: dict[str, Any], priority: int) -> None:
    client = make_client()
    assert (await client.chat(**fields)).status_code == 200
    assert client.engine.accepted[0].priority == priority


async def test_a_service_tier_that_nobody_knows_is_refused(make_client: Make) -> None:
    answer = await make_client().chat(service_tier="priorty")
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "service_tier" and "priority" in error_of(answer)["message"]


async def test_requests_with_one_api_key_are_one_clients_and_the_key_is_not_kept(make_client: Make) -> None:
    client = make_client()
    for key in ("one", "other", "one"):
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        await client.http.post("/v1/chat/completions", headers={"authorization": f"Bearer {key}"}, json=body)
    await client.chat()
    one, other, again, nobody = (each.client for each in client.engine.accepted)
    assert one == again != other and nobody is None
    assert "one" not in str(one)
    assert client_of({b"x-api-key": b"k"}) == client_of({b"x-api-key": b"k"}) != client_of({b"x-api-key": b"l"})


def test_a_key_is_the_same_clients_however_it_is_sent() -> None:
    sent = [{b"authorization": b"Bearer k"}, {b"authorization": b"bearer  k"}, {b"x-api-key": b"k"}]
    assert len({client_of(headers) for headers in sent}) == 1
    assert client_of({b"authorization": b"Basic dTpw"}) is None


@pytest.mark.parametrize("key", [" a", "a\n", "a\udcff", ""])
def test_a_key_that_no_header_can_carry_is_refused_at_start(key: str) -> None:
    with pytest.raises(StartupError, match="--admin-api-key"):
        HttpConfig(admin_api_key=key)
