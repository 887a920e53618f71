"""The container's health check finds the server where it listens and tells the truth about it."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from server.healthcheck import main, server_arguments


class UnixServer(socketserver.UnixStreamServer):
    def get_request(self) -> tuple[object, tuple[str, int]]:
        request, _ = super().get_request()
        return request, ("unix", 0)


@contextmanager
def health_server(address: str | tuple[str, int], status: int) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()
            self.wfile.write(b"word")

        def log_message(self, *_: object) -> None:
            pass

    kind = UnixServer if isinstance(address, str) else socketserver.TCPServer
    with kind(address, Handler) as server:  # type: ignore[arg-type]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield 0 if isinstance(address, str) else server.server_address[1]  # type: ignore[misc]
        finally:
            server.shutdown()
            thread.join()


NO_PROCESS = Path("/nonexistent")


@pytest.mark.parametrize(("status", "code", "said"), [(200, 0, "healthy: 200 word"), (503, 1, "unhealthy: 503 word")])
def test_the_exit_code_follows_the_health_of_the_port_in_the_environment(
    status: int, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with health_server(("127.0.0.1", 0), status) as port:
        env = {"TWINPANE_PORT": str(port), "TWINPANE_HOST": "0.0.0.0"}
        assert main([], env, NO_PROCESS) == code
        assert capsys.readouterr().out == f"{said}\n"
        assert main(["--port", str(port)], {}, NO_PROCESS) == code


def test_a_port_given_on_the_servers_command_line_is_found(tmp_path: Path) -> None:
    command_line = tmp_path / "cmdline"
    with health_server(("127.0.0.1", 0), 200) as port:
        command_line.write_bytes(f"python\0twinpane\0serve\0m\0--port\0{port}\0".encode())
        assert main([], {"TWINPANE_PORT": "1"}, command_line) == 0


def test_a_unix_socket_is_asked_too(tmp_path: Path) -> None:
    with health_server(str(tmp_path / "t.sock"), 200):
        assert main([], {"TWINPANE_UDS": str(tmp_path / "t.sock")}, NO_PROCESS) == 0


def test_nobody_there_is_unhealthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], {"TWINPANE_UDS": str(tmp_path / "none.sock")}, NO_PROCESS) == 1
    assert capsys.readouterr().out.startswith("unhealthy: no answer")


def test_a_wrong_setting_is_unhealthy_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], {"TWINPANE_PORT": "x"}, NO_PROCESS) == 1
    assert "TWINPANE_PORT" in capsys.readouterr().out


def test_another_programs_command_line_is_left_alone() -> None:
    assert server_arguments(b"/sbin/init\0splash\0") == []
    assert server_arguments(b"/sbin/tini\0--\0twinpane\0serve\0--port\x009\0") == ["--port", "9"]
