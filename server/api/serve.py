"""Bind early, listen late, drain before the end: the app inside an in-process uvicorn.

The address is taken before a model is loaded, so that a port in use is known in the first second; nothing listens
until the server can answer.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.api.app import AsgiApp
from server.api.errors import HttpRefusal, wire_error
from server.config import HttpConfig
from server.errors import StartupError, Unavailable
from server.request import Engine

logger = logging.getLogger("twinpane.api")
uvicorn_logger = logging.getLogger("uvicorn.error")

BACKLOG = 2048
FLUSH_TIMEOUT_S = 5
MAX_HEADER_BYTES = 1024 * 1024
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A uvloop loop where it is installed: for `asyncio.Runner(loop_factory=new_event_loop)`."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


# --- the address --------------------------------------------------------------------------------------------------


def bind_socket(host: str, port: int, uds: str | None = None) -> socket.socket:
    """Take the address without listening on it yet; StartupError says in one line why that is not possible.

    Taken without SO_REUSEADDR, so that two servers that are both still loading cannot share a port: Linux lets any
    number of non-listening sockets with that flag bind to one. Only where a former server's closed connections still
    hold the port is it taken with the flag.
    """
    if uds is not None:
        return _bind_unix(uds)
    if not 0 <= port <= 65535:
        raise StartupError(f"cannot bind to port {port}: it must be from 0 to 65535")
    family, address = _resolve(host, port)
    try:
        return _bind(family, address, reuse=False)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise _bind_error(host, port, error) from error
    try:
        return _bind(family, address, reuse=True)
    except OSError as error:
        raise _bind_error(host, port, error) from error


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise StartupError(f"cannot bind to host '{host}': the name cannot be resolved") from error
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, address


def _bind(family: socket.AddressFamily, address: Any, *, reuse: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if reuse:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if address[0] == "::" else 1)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


def _bind_error(host: str, port: int, error: OSError) -> StartupError:
    where = f"{host}:{port}"
    match error.errno:
        case errno.EADDRINUSE:
            return StartupError(
                f"cannot bind to {where}: the port is in use{_user_of(port)}; "
                "stop that process or choose another --port"
            )
        case errno.EACCES | errno.EPERM:
            return StartupError(
                f"cannot bind to {where}: permission denied; choose a --port of 1024 or above, or grant "
                "CAP_NET_BIND_SERVICE"
            )
        case errno.EADDRNOTAVAIL:
            return StartupError(f"cannot bind to {where}: this machine has no such address; choose another --host")
        case _:
            return StartupError(f"cannot bind to {where}: {error.strerror or error}")


def _user_of(port: int) -> str:
    """ " by pid N (name)" of the process that listens on a port, where the system tells us."""
    try:
        import psutil

        for connection in psutil.net_connections(kind="tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid is not None:
                return f" by pid {connection.pid} ({psutil.Process(connection.pid).name()})"
    except Exception:
        return ""
    return ""


def _bind_unix(path: str) -> socket.socket:
    """Bind to a path. A socket file that nobody listens on is what a killed server left, and is replaced."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.lexists(path):
            _remove_stale(path)
        sock.setblocking(False)
        sock.bind(path)
    except OSError as error:
        sock.close()
        missing = error.errno == errno.ENOENT
        reason = f"folder {Path(path).parent} does not exist" if missing else error.strerror or error
        raise StartupError(f"cannot bind to unix socket {path}: {reason}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def _remove_stale(path: str) -> None:
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise StartupError(f"cannot bind to unix socket {path}: a file that is not a socket is in the way")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise StartupError(f"cannot bind to unix socket {path}: another server listens on it")


def address_of(sock: socket.socket) -> str:
    """`http://host:port` or `unix:path`, as the start-up line shows it."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if sock.family == socket.AF_INET6 else name[0]
    return f"http://{host}:{name[1]}"


def _listen(sock: socket.socket) -> None:
    """From here on connections are accepted. The flag is set now for the sake of the next server: the connections
    that outlive this one inherit it and so do not keep the port."""
    try:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.listen(BACKLOG)
    except OSError as error:
        raise StartupError(f"cannot listen on {address_of(sock)}: {error.strerror or error}") from error


# --- the protocol -------------------------------------------------------------------------------------------------


class _Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with two repairs.

    When a client sends a second request before the first is answered and then goes away, uvicorn tells only the second
    one; here the running one learns it too, and one waiting request does not stop us from noticing the end of the
    connection. And bytes that are not HTTP get an error object, as everything else does.
    """

    _running: Any = None

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if len(self.pipeline) == 1:
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        refusal = HttpRefusal(msg, status=400, code="invalid_http")
        body = wire_error(refusal, request_id="").body()
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the drain is ours, and so is the exit code."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


# --- the run ------------------------------------------------------------------------------------------------------


async def serve(
    app: AsgiApp,
    sock: socket.socket,
    http: HttpConfig,
    engine: Engine,
    *,
    started: Callable[[], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Listen on the bound socket and answer until SIGTERM or SIGINT (or `stop`), then drain and return.

    Draining: new requests get 503 while the listener stays open, what was accepted runs to its end for at most
    shutdown_timeout_s, the rest ends with an error event. A second signal ends the process at once.
    """
    _listen(sock)
    server = _Server(_uvicorn_config(app, http))
    stopping = stop or asyncio.Event()
    uds = sock.getsockname() if sock.family == socket.AF_UNIX else None
    address = address_of(sock)
    try:
        with _signals(stopping):
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(server.serve(sockets=[sock]))
                announcer = tasks.create_task(_announce(server, address, started))
                drainer = tasks.create_task(_drain_when(stopping, server, http, engine))
                await running
                announcer.cancel()
                drainer.cancel()
    finally:
        if uds:
            Path(uds).unlink(missing_ok=True)


def _uvicorn_config(app: AsgiApp, http: HttpConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_Protocol,
        interface="asgi3",
        ws="none",
        loop="none",
        lifespan="on",
        log_level=http.log_level,
        access_log=False,
        server_header=False,
        timeout_keep_alive=round(http.keep_alive_s),
        timeout_graceful_shutdown=FLUSH_TIMEOUT_S,
        limit_concurrency=None,
        backlog=BACKLOG,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )


async def _announce(server: uvicorn.Server, address: str, started: Callable[[], None] | None) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    uvicorn_logger.info("Uvicorn running on %s (Press CTRL+C to quit)", address)
    if started is not None:
        started()


async def _drain_when(stopping: asyncio.Event, server: uvicorn.Server, http: HttpConfig, engine: Engine) -> None:
    await stopping.wait()
    engine.begin_drain()
    health = engine.health()
    if health.running or health.waiting:
        logger.info(
            "event=drain running=%d waiting=%d limit_s=%g hint=a_second_signal_ends_at_once",
            health.running,
            health.waiting,
            http.shutdown_timeout_s,
        )
    try:
        async with asyncio.timeout(http.shutdown_timeout_s):
            await engine.drained()
    except TimeoutError:
        logger.warning("event=drain_timeout left=%d", engine.health().running + engine.health().waiting)
        engine.fail_all(Unavailable("The server is shutting down.", code="server_draining"))
    server.should_exit = True


@contextmanager
def _signals(stopping: asyncio.Event) -> Generator[None, None, None]:
    """The first signal sets `stopping`, the second one ends the process at once. Does nothing outside the main thread,
    where signals do not arrive."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stopping.is_set():
            logger.warning("event=second_signal signal=%s", number.name)
            logging.shutdown()
            os._exit(128 + number)
        logger.info("event=signal signal=%s", number.name)
        stopping.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
