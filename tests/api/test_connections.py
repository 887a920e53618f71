"""Clients that go away, send slowly, send too much, or send nonsense, on real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from server.api import limits
from server.config import HttpConfig
from server.request import EngineState
from tests.fakes import MODEL, FakeEngine, FakeText, ServerThread, echo, fake_context, forever, say

STEP_S = 0.005
NOTICED_S = 0.5
"""Generous for a busy machine; an answer nobody stops would take 20 s."""


def http_request(body: object, *, path: str = "/v1/chat/completions", extra: str = "") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{extra}"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


def chat_body(**more: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more}


def until(condition: Callable[[], bool], *, within_s: float = 5.0) -> float:
    """Wait for a condition; how long it took."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() - started_s < within_s, "it did not happen in time"
        time.sleep(0.002)
    return time.monotonic() - started_s


@contextmanager
def serving(
    *, engine: FakeEngine | None = None, text: FakeText | None = None, http: HttpConfig | None = None
) -> Iterator[ServerThread]:
    http = http or HttpConfig(sse_keep_alive_s=0.0, shutdown_timeout_s=0.2)
    with ServerThread(fake_context(engine or FakeEngine(script=forever, step_s=STEP_S), text, http=http)) as server:
        yield server


def connect(server: ServerThread) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def read_all(sock: socket.socket) -> bytes:
    data = b""
    while part := sock.recv(65536):
        data += part
    return data


def engine_of(server: ServerThread) -> FakeEngine:
    engine = server.ctx.engine
    assert isinstance(engine, FakeEngine)
    return engine


class TestGoingAway:
    @pytest.mark.parametrize("n", [1, 4])
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("how", ["close", "reset", "half-close"])
    def test_it_ends_the_work_at_once(self, stream: bool, n: int, how: str) -> None:
        with serving() as server:
            engine = engine_of(server)
            sock = connect(server)
            sock.sendall(http_request(chat_body(stream=stream, n=n, ignore_eos=True)))
            until(lambda: engine.live == 1)
            time.sleep(0.05)
            if how == "half-close":
                sock.shutdown(socket.SHUT_WR)
            else:
                if how == "reset":
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
                sock.close()
            assert until(lambda: engine.live == 0) < NOTICED_S
            assert len(engine.cancelled) == 1
            assert all(output.ended for output in engine.accepted[0].outputs)  # type: ignore[attr-defined]
            sock.close()
            until(lambda: b'status="499"' in httpx.get(server.url + "/metrics").content or stream)

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
    def test_while_the_prompt_is_tokenized_nothing_is_submitted(self, path: str) -> None:
        text = FakeText(encode_delay_s=0.3)
        with serving(text=text) as server:
            sock = connect(server)
            sock.sendall(http_request(chat_body(prompt="hi"), path=path))
            time.sleep(0.05)
            sock.close()
            time.sleep(0.5)
            assert engine_of(server).accepted == []
            assert httpx.get(server.url + "/health").status_code == 200

    def test_with_several_prompts_all_end(self) -> None:
        with serving() as server:
            engine = engine_of(server)
            sock = connect(server)
            body = {"model": MODEL, "prompt": ["a", "b", "c"], "n": 2, "max_tokens": 4000, "ignore_eos": True}
            sock.sendall(http_request(body, path="/v1/completions"))
            until(lambda: engine.live == 3)
            sock.close()
            assert until(lambda: engine.live == 0) < NOTICED_S

    def test_in_the_middle_of_the_body_is_no_error(self) -> None:
        with serving() as server:
            sock = connect(server)
            sock.sendall(http_request(chat_body())[:-5])
            time.sleep(0.05)
            sock.close()
            time.sleep(0.05)
            text = httpx.get(server.url + "/metrics").text
            assert 'status="499"' in text
            assert 'status="500"' not in text

    def test_a_client_that_pipelined_and_left_is_noticed(self) -> None:
        with serving() as server:
            engine = engine_of(server)
            sock = connect(server)
            sock.sendall(http_request(chat_body(ignore_eos=True)) + http_request(chat_body()))
            until(lambda: engine.live == 1)
            time.sleep(0.05)
            sock.close()
            assert until(lambda: engine.live == 0) < NOTICED_S
            assert len(engine.accepted) == 1

    def test_one_that_never_reads_does_not_stop_the_engine_or_others(self) -> None:
        with serving(engine=FakeEngine(script=forever, step_s=0.0, context_tokens=200_000)) as server:
            engine = engine_of(server)
            sock = connect(server)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.sendall(http_request(chat_body(stream=True, ignore_eos=True, max_tokens=20_000)))
            until(lambda: engine.live == 1)
            answer = httpx.post(server.url + "/v1/chat/completions", json=chat_body(max_tokens=50)).json()
            assert answer["usage"]["completion_tokens"] == 50
            sock.close()
            until(lambda: engine.live == 0, within_s=10)

    def test_of_one_client_leaves_another_byte_for_byte(self) -> None:
        with serving(engine=FakeEngine(script=echo, step_s=STEP_S)) as server:
            body = chat_body(stream=True, messages=[{"role": "user", "content": "steady " * 20}])
            headers = {"x-request-id": "same"}
            url = server.url + "/v1/chat/completions"
            alone = httpx.post(url, json=body, headers=headers).content
            together: list[bytes] = []
            reader = threading.Thread(
                target=lambda: together.append(httpx.post(url, json=body, headers=headers, timeout=30).content)
            )
            reader.start()
            for i in range(20):
                sock = connect(server)
                sock.sendall(http_request(chat_body(stream=bool(i % 2), ignore_eos=True)))
                time.sleep(0.02)
                sock.close()
            reader.join()
            assert together == [alone]


class TestHostileNeighbours:
    def test_a_stream_runs_undisturbed_through_malformed_calls(self) -> None:
        bad: list[bytes] = [
            http_request(chat_body(top_logprobs=10**9, logprobs=True)),
            http_request({"model": MODEL, "prompt": [999999999, -1]}, path="/v1/completions"),
            http_request({"model": MODEL, "prompt": ""}, path="/v1/completions"),
            http_request(chat_body(messages=[])),
            http_request(chat_body(stop=[""])),
            http_request(chat_body(messages=[{"role": "user", "content": [{"type": "image_url"}]}])),
            http_request(chat_body(messages=[{"role": "user", "content": "x" * 10_000}])),
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 3\r\n\r\n{{{",
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\n{{{",
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\r\n",
            b"NONSENSE\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"GET /%00%ff HTTP/1.1\r\nhost: x\r\n\r\n",
        ]
        with serving(engine=FakeEngine(script=echo, step_s=STEP_S, context_tokens=2000)) as server:
            url = server.url + "/v1/chat/completions"
            body = chat_body(stream=True, messages=[{"role": "user", "content": "steady " * 40}])
            headers = {"x-request-id": "same"}
            alone = httpx.post(url, json=body, headers=headers, timeout=30).content
            together: list[bytes] = []
            reader = threading.Thread(
                target=lambda: together.append(httpx.post(url, json=body, headers=headers, timeout=30).content)
            )
            reader.start()
            for raw in bad:
                sock = connect(server)
                sock.sendall(raw)
                sock.settimeout(5)
                answer = sock.recv(65536)
                status = int(answer.split(b" ", 2)[1])
                assert 400 <= status < 500, (raw[:80], answer[:200])
                assert b'{"error":{"message":' in answer or answer.endswith(b"\r\n\r\n")
                sock.close()
            reader.join()
            assert together == [alone]
            assert engine_of(server).live == 0


class TestBodies:
    @pytest.mark.parametrize("how", ["announced", "chunked", "understated"])
    def test_a_body_over_the_cap_is_a_413_that_the_client_can_read(self, how: str) -> None:
        http = HttpConfig(max_body_bytes=100_000, sse_keep_alive_s=0.0)
        with serving(http=http) as server:
            sock = connect(server)
            content = b"x" * 150_000
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            if how == "announced":
                sock.sendall(head + b"content-length: 150000\r\n\r\n" + content)
            elif how == "chunked":
                chunks = b"".join(b"%x\r\n%b\r\n" % (1500, content[i : i + 1500]) for i in range(0, 150_000, 1500))
                sock.sendall(head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
            else:
                sock.sendall(head + b"content-length: 10\r\n\r\n" + content[:200])
            answer = read_all(sock)
            status = int(answer.split(b" ", 2)[1])
            assert status == (400 if how == "understated" else 413)
            if how != "understated":
                assert b"request_too_large" in answer
                assert b"connection: close" in answer

    def test_a_huge_announced_body_is_refused_without_being_read(self) -> None:
        with serving() as server:
            sock = connect(server)
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"expect: 100-continue\r\ncontent-length: 99999999999\r\n\r\n"
            )
            answer = read_all(sock)
            assert answer.startswith(b"HTTP/1.1 413 ")

    def test_endless_chunks_are_cut_off(self) -> None:
        with serving(http=HttpConfig(max_body_bytes=10_000, sse_keep_alive_s=0.0)) as server:
            sock = connect(server)
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            sent = 0
            try:
                while sent < 50_000_000:
                    sock.sendall(b"400\r\n" + b"x" * 1024 + b"\r\n")
                    sent += 1024
            except OSError:
                pass
            assert sent < 50_000_000
            assert httpx.get(server.url + "/health").status_code == 200

    def test_a_body_that_stops_arriving_is_a_408(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "BODY_IDLE_S", 0.1)
        with serving() as server:
            sock = connect(server)
            sock.sendall(http_request(chat_body())[:-5])
            answer = read_all(sock)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"request_timeout" in answer


class TestReuse:
    def test_one_connection_serves_many_calls(self) -> None:
        with serving(engine=FakeEngine(script=say("ok"))) as server, httpx.Client(base_url=server.url) as client:
            ports = set()
            for stream in (False, True, False):
                with client.stream("POST", "/v1/chat/completions", json=chat_body(stream=stream)) as response:
                    response.read()
                    network = response.extensions["network_stream"]
                    ports.add(network.get_extra_info("client_addr")[1])
            assert len(ports) == 1

    def test_pipelined_calls_are_answered_in_order(self) -> None:
        with serving(engine=FakeEngine(script=say("ok"), step_s=0.01)) as server:
            sock = connect(server)
            first = http_request(chat_body(), extra="x-request-id: first\r\n")
            second = http_request(chat_body(), extra="x-request-id: second\r\n")
            third = http_request(chat_body(), extra="x-request-id: third\r\nconnection: close\r\n")
            sock.sendall(first + second + third)
            answer = read_all(sock)
            assert answer.count(b"HTTP/1.1 200 OK") == 3
            assert answer.index(b"first") < answer.index(b"second") < answer.index(b"third")


class TestFirstBytes:
    def test_headers_come_before_the_first_token(self) -> None:
        with serving(engine=FakeEngine(script=say("x"), step_s=None)) as server:
            engine = engine_of(server)
            with httpx.stream("POST", server.url + "/v1/chat/completions", json=chat_body(stream=True)) as response:
                assert response.status_code == 200
                lines = response.iter_lines()
                server.call(engine.step)
                assert '"role":"assistant"' in next(lines)
                server.call(engine.step)
                assert list(lines)[-2] == "data: [DONE]"

    async def test_many_streams_at_once_are_each_complete(self) -> None:
        text = "the same words " * 10
        with serving(engine=FakeEngine(script=say(text))) as server:
            async with httpx.AsyncClient(limits=httpx.Limits(max_connections=50), timeout=60) as client:
                url = server.url + "/v1/chat/completions"
                answers = await asyncio.gather(*(client.post(url, json=chat_body(stream=True)) for _ in range(50)))
            for answer in answers:
                chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
                said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
                assert said == text


def post_head(*lines: str, version: str = "1.1", path: str = "/v1/chat/completions") -> bytes:
    fields = "".join(f"{line}\r\n" for line in ("content-type: application/json", *lines))
    return f"POST {path} HTTP/{version}\r\n{fields}\r\n".encode()


class TestHeads:
    @pytest.mark.parametrize(
        "head",
        [
            b"GET /health HTTP/1.1\r\nhost: x\r\nx-big: " + b"a" * 1_000_000,
            b"GET /" + b"a" * 1_000_000,
            b"GET /health HTTP/1.1\r\nhost: x\r\nx-big: " + b"a" * 66_000 + b"\r\n\r\n",
            b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x-%d: a\r\n" % i for i in range(300)) + b"\r\n",
        ],
        ids=["endless value", "endless url", "large", "many"],
    )
    @pytest.mark.parametrize("piece", [1_000, 10_000_000])
    def test_a_head_that_is_too_large_is_a_431(self, head: bytes, piece: int) -> None:
        with serving() as server:
            for before in (b"", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"):
                sock = connect(server)
                answer = b""
                try:
                    for start in range(0, len(before + head), piece):
                        sock.sendall((before + head)[start : start + piece])
                    answer = read_all(sock)
                except OSError:
                    pass  # closed on what we still sent
                assert answer.count(b"200 OK") <= (1 if before else 0)
                assert answer.count(b"HTTP/1.1") <= 2
                if answer and not before:
                    assert answer.startswith(b"HTTP/1.1 431 ")
                    assert b'"code":"headers_too_large"' in answer
            assert httpx.get(server.url + "/health", headers={"x": "a" * 60_000}).status_code == 200

    def test_a_head_that_does_not_end_is_a_408(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "HEAD_TIMEOUT_S", 0.3)
        with serving() as server:
            sock = connect(server)
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"200 OK" in sock.recv(65536)
            started_s = time.monotonic()
            for byte in b"GET /health HTTP/1.1\r\n":
                sock.sendall(bytes([byte]))
                time.sleep(0.02)
                if time.monotonic() - started_s > 0.25:
                    break
            assert read_all(sock).startswith(b"HTTP/1.1 408 ")
            assert time.monotonic() - started_s < 2

    @pytest.mark.parametrize("sent", [b"", b"\r\n\r\n"])
    def test_a_connection_that_never_asks_is_closed(self, sent: bytes) -> None:
        with serving(http=HttpConfig(keep_alive_s=1.0, sse_keep_alive_s=0.0)) as server:
            sock = connect(server)
            sock.sendall(sent)
            assert read_all(sock) == b""

    @pytest.mark.parametrize(
        ("head", "status"),
        [
            (b"GET /health HTTP/1.1\r\n\r\n", 400),
            (b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
            (b"GET /health HTTP/1.1\r\nhost:\r\nconnection: close\r\n\r\n", 200),
            (b"GET /health HTTP/1.0\r\n\r\n", 200),
        ],
    )
    def test_one_host_is_needed_from_1_1_on(self, head: bytes, status: int) -> None:
        with serving() as server:
            sock = connect(server)
            sock.sendall(head)
            assert read_all(sock).startswith(b"HTTP/1.1 %d " % status)


class TestProtocolVersions:
    @pytest.mark.parametrize("chunked", [False, True])
    @pytest.mark.parametrize("split", [False, True])
    @pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
    def test_an_upgrade_is_ignored_and_the_body_is_read(self, upgrade: str, chunked: bool, split: bool) -> None:
        body = json.dumps(chat_body()).encode()
        framing = "transfer-encoding: chunked" if chunked else f"content-length: {len(body)}"
        head = post_head("host: x", f"upgrade: {upgrade}", "connection: Upgrade, HTTP2-Settings", framing)
        sent = head + (b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body)
        asks_only = b"GET /health HTTP/1.1\r\nhost: x\r\nupgrade: h2c\r\nconnection: Upgrade\r\n\r\n"
        last = b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        with serving(engine=FakeEngine(script=say("ok"))) as server:
            sock = connect(server)
            for i in range(0, len(sent), 50 if split else len(sent)):
                sock.sendall(sent[i : i + (50 if split else len(sent))])
                time.sleep(0.001)
            sock.sendall(asks_only + sent + last)
            answer = read_all(sock)
            assert answer.count(b"HTTP/1.1 200 OK") == 4
            assert answer.count(b'"content":"ok"') == 2

    def test_http_1_0_gets_a_stream_without_chunks(self) -> None:
        with serving(engine=FakeEngine(script=say("ok"))) as server:
            body = json.dumps(chat_body(stream=True)).encode()
            sock = connect(server)
            sock.sendall(post_head(f"content-length: {len(body)}", "connection: keep-alive", version="1.0") + body)
            head, _, answer = read_all(sock).partition(b"\r\n\r\n")
            assert b"transfer-encoding" not in head
            assert b"connection: close" in head
            assert answer.startswith(b"data: {")
            assert answer.endswith(b"}\n\ndata: [DONE]\n\n")

    @pytest.mark.parametrize("stream", [False, True])
    def test_garbage_behind_a_call_does_not_get_into_its_answer(self, stream: bool) -> None:
        with serving(engine=FakeEngine(script=say("fine"), step_s=0.02)) as server:
            sock = connect(server)
            sock.sendall(http_request(chat_body(stream=stream)) + b"\0\0garbage\r\n\r\n")
            answer = read_all(sock)
            assert answer.count(b"HTTP/1.1") == 1
            assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}}")


class TestRoomForBodies:
    def test_a_body_that_trickles_is_a_408(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "BODY_GRACE_S", 0.3)
        with serving() as server:
            sock = connect(server)
            sock.sendall(post_head("host: x", "content-length: 1000"))
            for _ in range(12):
                sock.sendall(b" ")
                time.sleep(0.02)
            assert read_all(sock).startswith(b"HTTP/1.1 408 ")

    def test_all_bodies_together_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "BODIES_IN_MEMORY", 2)
        http = HttpConfig(max_body_bytes=100_000, sse_keep_alive_s=0.0, shutdown_timeout_s=0.2)
        with serving(http=http, engine=FakeEngine(script=say("ok"))) as server:
            held = [connect(server) for _ in range(2)]
            for sock in held:
                sock.sendall(post_head("host: x", "content-length: 100000") + b" " * 99_000)
            time.sleep(0.2)
            response = httpx.post(server.url + "/v1/chat/completions", json=chat_body(user="u" * 50_000))
            assert response.status_code == 429
            assert response.headers["retry-after"] == "1"
            for sock in held:
                sock.close()
            until(lambda: b'status="499"} 2.0' in httpx.get(server.url + "/metrics").content)
            for _ in range(5):
                response = httpx.post(server.url + "/v1/chat/completions", json=chat_body(user="u" * 50_000))
                assert response.status_code == 200

    def test_what_is_refused_anyway_is_refused_before_its_body(self) -> None:
        with serving() as server:
            engine_of(server).state = EngineState.LOADING
            sock = connect(server)
            sock.sendall(post_head("host: x", "content-length: 1000", "expect: 100-continue"))
            assert sock.recv(65536).startswith(b"HTTP/1.1 503 ")

    def test_a_half_sent_body_does_not_delay_the_end(self) -> None:
        with serving() as server:
            sock = connect(server)
            sock.sendall(post_head("host: x", "content-length: 1000") + b"{")
            time.sleep(0.1)
            started_s = time.monotonic()
            server.stop()
            assert time.monotonic() - started_s < 1.5
            answer = read_all(sock)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"server_draining" in answer


class TestSlowReaders:
    def test_a_stream_that_is_not_read_ends_with_one_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "MAX_BACKLOG_BYTES", 100_000)
        engine = FakeEngine(script=forever, step_s=0.0, context_tokens=200_000)
        with serving(engine=engine) as server:
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.connect(("127.0.0.1", server.port))
            body = chat_body(stream=True, ignore_eos=True, max_tokens=100_000, logprobs=True, top_logprobs=20)
            sock.sendall(http_request(body, extra="connection: close\r\n"))
            until(lambda: len(engine.accepted) == 1)
            until(lambda: engine.live == 0, within_s=30)
            assert len(engine.cancelled) == 1
            answer = read_all(sock)
            assert answer.count(b'"code":"client_too_slow"') == 1
            assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert httpx.post(server.url + "/v1/chat/completions", json=chat_body(max_tokens=5)).status_code == 200

    def test_one_that_takes_nothing_at_all_is_cut(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "STALLED_CLIENT_S", 0.3)
        engine = FakeEngine(script=forever, step_s=0.0, context_tokens=200_000)
        with serving(engine=engine) as server:
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(http_request(chat_body(stream=True, ignore_eos=True, max_tokens=100_000, n=8)))
            until(lambda: engine.live == 1)
            until(lambda: engine.live == 0, within_s=20)

    @pytest.mark.parametrize("body", [{"logprobs": True, "top_logprobs": 20}, {"n": 16}])
    def test_a_whole_answer_is_bounded(self, body: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "MAX_ANSWER_BYTES", 100_000)
        engine = FakeEngine(script=forever, step_s=0.0, context_tokens=200_000)
        with serving(engine=engine) as server:
            response = httpx.post(server.url + "/v1/chat/completions", json=chat_body(**body), timeout=30)
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "answer_too_large"
            until(lambda: engine.live == 0)
