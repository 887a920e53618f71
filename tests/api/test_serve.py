"""Taking an address early, starting late, and stopping with everyone served."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.api.serve import address_of, bind_socket
from server.config import HttpConfig
from server.errors import StartupError
from tests.fakes import MODEL, FakeEngine, ServerThread, fake_context, forever, say

ROOT = Path(__file__).parents[2]
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


class TestBind:
    def test_a_bound_address_refuses_connections_until_it_listens(self) -> None:
        sock = bind_socket("127.0.0.1", 0)
        with sock, pytest.raises(ConnectionRefusedError):
            socket.create_connection(sock.getsockname(), timeout=1)
        assert address_of(bind_socket("127.0.0.1", 0)).startswith("http://127.0.0.1:")

    def test_a_port_in_use_is_one_clear_line_with_the_culprit(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            with pytest.raises(StartupError) as caught:
                bind_socket("127.0.0.1", port)
        message = str(caught.value)
        assert f"127.0.0.1:{port}" in message
        assert f"pid {os.getpid()}" in message
        assert "--port" in message
        assert "\n" not in message

    def test_two_servers_that_are_both_loading_cannot_share_a_port(self) -> None:
        with bind_socket("127.0.0.1", 0) as first, pytest.raises(StartupError, match="in use"):
            bind_socket("127.0.0.1", first.getsockname()[1])

    def test_a_port_is_free_again_right_after_a_server(self) -> None:
        ctx = fake_context(FakeEngine(script=say("x")))
        with ServerThread(ctx) as server, httpx.Client() as client:
            assert client.post(server.url + "/v1/chat/completions", json=CHAT).status_code == 200
            port = server.port
            server.stop()
        with bind_socket("127.0.0.1", port) as again:
            again.listen()

    @pytest.mark.parametrize(
        ("host", "port", "message"),
        [
            ("no.such.host.invalid", 0, "cannot be resolved"),
            ("a" * 300, 0, "cannot be resolved"),
            ("192.0.2.1", 0, "no such address"),
            ("127.0.0.1", 65536, "from 0 to 65535"),
            ("127.0.0.1", -1, "from 0 to 65535"),
        ],
    )
    def test_what_cannot_be_bound_says_why(self, host: str, port: int, message: str) -> None:
        with pytest.raises(StartupError, match=message):
            bind_socket(host, port)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may bind any port")
    def test_a_privileged_port_says_what_to_do(self) -> None:
        limit = int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
        if limit <= 1:
            pytest.skip("no port is privileged here")
        with pytest.raises(StartupError, match="1024 or above"):
            bind_socket("127.0.0.1", 1)

    def test_localhost_and_ipv6(self) -> None:
        assert bind_socket("localhost", 0).family == socket.AF_INET
        try:
            sock = bind_socket("::1", 0)
        except StartupError:
            pytest.skip("no IPv6 here")
        assert address_of(sock).startswith("http://[::1]:")

    def test_a_unix_socket_replaces_a_dead_one_but_nothing_else(self, tmp_path: Path) -> None:
        path = tmp_path / "s"
        dead = bind_socket("", 0, str(path))
        dead.close()
        live = bind_socket("", 0, str(path))
        live.listen()
        with pytest.raises(StartupError, match="another server listens"):
            bind_socket("", 0, str(path))
        live.close()
        (tmp_path / "file").write_text("precious")
        with pytest.raises(StartupError, match="not a socket"):
            bind_socket("", 0, str(tmp_path / "file"))
        assert (tmp_path / "file").read_text() == "precious"
        with pytest.raises(StartupError, match="cannot bind"):
            bind_socket("", 0, str(tmp_path / "no" / "s"))


def test_a_server_on_a_unix_socket_removes_it_at_the_end(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with ServerThread(fake_context(FakeEngine(script=say("ok"))), uds=path) as server:
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://x") as client:
            answer = client.post("/v1/chat/completions", json=CHAT | {"stream": True}).text
            assert answer.endswith("data: [DONE]\n\n")
        server.stop()
        assert not Path(path).exists()


def read_stream(url: str, out: list[str]) -> None:
    with httpx.stream("POST", url + "/v1/chat/completions", json=CHAT | {"stream": True}, timeout=30) as response:
        out.extend(line for line in response.iter_lines() if line)


class TestDrain:
    def test_running_streams_finish_while_new_calls_are_refused(self) -> None:
        engine = FakeEngine(script=say("a longer answer"), step_s=0.05)
        with ServerThread(fake_context(engine)) as server:
            lines: list[str] = []
            reader = threading.Thread(target=read_stream, args=(server.url, lines))
            reader.start()
            while engine.live == 0:
                time.sleep(0.01)
            server.begin_stop()
            time.sleep(0.1)
            refused = httpx.post(server.url + "/v1/chat/completions", json=CHAT)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "server_draining"
            assert refused.headers["connection"] == "close"
            assert httpx.get(server.url + "/ready").status_code == 503
            assert httpx.get(server.url + "/health").status_code == 200
            server.stop()
            reader.join()
        assert lines[-1] == "data: [DONE]"
        assert '"finish_reason":"stop"' in lines[-2]

    @pytest.mark.parametrize("stream", [True, False])
    def test_what_outlives_the_deadline_ends_with_an_error(self, stream: bool) -> None:
        engine = FakeEngine(script=forever, step_s=0.01, context_tokens=100_000)
        http = HttpConfig(shutdown_timeout_s=0.3, sse_keep_alive_s=0.0)
        answers: list[Any] = []

        def call() -> None:
            if stream:
                lines: list[str] = []
                read_stream(server.url, lines)
                answers.append(lines)
            else:
                answers.append(httpx.post(server.url + "/v1/chat/completions", json=CHAT, timeout=30))

        with ServerThread(fake_context(engine, http=http)) as server:
            reader = threading.Thread(target=call)
            reader.start()
            while engine.live == 0:
                time.sleep(0.01)
            started_s = time.monotonic()
            server.stop()
            assert 0.3 <= time.monotonic() - started_s < 3
            reader.join()
        if stream:
            assert answers[0][-1] == "data: [DONE]"
            assert '"code":"server_draining"' in answers[0][-2]
        else:
            assert answers[0].status_code == 503
            assert answers[0].json()["error"]["code"] == "server_draining"

    def test_an_idle_server_stops_at_once_with_open_connections(self) -> None:
        with ServerThread(fake_context()) as server, httpx.Client() as client:
            client.get(server.url + "/health")
            started_s = time.monotonic()
            server.stop()
            assert time.monotonic() - started_s < 2


PROGRAM = """
import asyncio, logging, sys
sys.path.insert(0, {root!r})
from server.api.app import build_app
from server.api.serve import bind_socket, new_event_loop, serve
from server.config import HttpConfig
from tests.fakes import FakeEngine, fake_context, forever
http = HttpConfig(shutdown_timeout_s={timeout}, sse_keep_alive_s=0.0)
ctx = fake_context(FakeEngine(script=forever, step_s=0.01, context_tokens=1_000_000), http=http)
sock = bind_socket("127.0.0.1", 0)
print(sock.getsockname()[1], flush=True)
with asyncio.Runner(loop_factory=new_event_loop) as runner:
    runner.run(serve(build_app(ctx), sock, http, ctx.engine))
print("returned", flush=True)
"""


class Process:
    """A server as a process of its own."""

    def __init__(self, *, timeout_s: float) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(root=str(ROOT), timeout=timeout_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self.popen.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.popen.stdout.readline())}"
        self.wait_ready()

    def wait_ready(self) -> None:
        for _ in range(500):
            try:
                if httpx.get(self.url + "/ready").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.02)
        raise AssertionError("the server did not start")


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.popen.kill()
        process.popen.wait()


class TestSignals:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_one_signal_drains_and_returns_with_code_0(self, processes: list[Process], number: int) -> None:
        process = Process(timeout_s=0.3)
        processes.append(process)
        lines: list[str] = []
        reader = threading.Thread(target=read_stream, args=(process.url, lines))
        reader.start()
        time.sleep(0.3)
        process.popen.send_signal(number)
        out, err = process.popen.communicate(timeout=15)
        reader.join()
        assert process.popen.returncode == 0, err
        assert "returned" in out
        assert lines[-1] == "data: [DONE]"
        assert "server_draining" in lines[-2]
        assert "Application startup complete." in err
        assert f"Uvicorn running on {process.url}" in err
        assert "Traceback" not in err
        assert "GET /ready" not in err

    def test_a_second_signal_ends_it_at_once(self, processes: list[Process]) -> None:
        process = Process(timeout_s=60)
        processes.append(process)

        def read_until_cut() -> None:
            with contextlib.suppress(httpx.HTTPError):
                read_stream(process.url, [])

        reader = threading.Thread(target=read_until_cut)
        reader.start()
        time.sleep(0.3)
        for _ in range(3):  # a signal to the process group, passed on by parents as well, is one
            process.popen.send_signal(signal.SIGTERM)
            time.sleep(0.01)
        time.sleep(0.3)
        assert process.popen.poll() is None
        started_s = time.monotonic()
        process.popen.send_signal(signal.SIGTERM)
        process.popen.wait(5)
        assert time.monotonic() - started_s < 2
        assert process.popen.returncode == 128 + signal.SIGTERM
        reader.join()


def test_the_http_layer_loads_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None\nimport server.api.app, server.api.serve, server.metrics\n"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
