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
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, NoReturn, Protocol

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.api import limits
from server.api.app import AsgiApp
from server.api.call import WRITE_NOW
from server.api.errors import HttpRefusal, wire_error
from server.config import HttpConfig
from server.errors import StartupError, Unavailable
from server.request import Engine

logger = logging.getLogger("twinpane.api")
uvicorn_logger = logging.getLogger("uvicorn.error")

BACKLOG = 2048
FLUSH_TIMEOUT_S = 5
MAX_DROPPED_BYTES = 64 * 1024 * 1024
NOT_HTTP = "Invalid HTTP request received."
SIGNALS = (signal.SIGTERM, signal.SIGINT)
SIGNAL_ECHO_S = 0.2


class App(Protocol):
    """What is served."""

    async def __call__(
        self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None: ...

    def begin_drain(self) -> None:
        """Called once, when the server begins to drain."""
        ...


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
    """uvicorn's HTTP/1.1, with bounds where it has none and repairs where it is wrong.

    - Headers are bounded in bytes, number and time; a connection that sends nothing is closed like an idle one; one
      that takes nothing, though an answer waits for it, is cut.
    - `Upgrade` is ignored, as RFC 9110 section 7.8 allows: the body of such a request is read like any other.
    - An HTTP/1.0 client gets no chunks, and HTTP/1.1 without Host is refused (RFC 9112 sections 7.1 and 3.2).
    - When a client sends a second request before the first is answered and then goes away, uvicorn tells only the
      second one; here the running one learns it too, and one waiting request does not stop us from noticing the end of
      the connection.
    - Bytes that are not HTTP get an error object, as everything else does, but never in the middle of an answer.
    """

    _running: Any = None  # the cycle whose request is being answered
    _fault: HttpRefusal | None = None  # why the parser was left
    _deaf = False  # nothing of what comes is looked at any more
    _heads = 0  # complete ones
    _in_head = False
    _in_body = False
    _head_bytes = 0  # read of a head that is not complete
    _field_bytes = 0  # of its request line and headers that are
    _dropped_bytes = 0  # of a body that comes after its answer
    _resuming = False  # the parser reads a head of ours
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    # --- time ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()

    def _await_request(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(limits.HEAD_TIMEOUT_S, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._answering:
            self._await_head()
        else:
            self._refuse(HttpRefusal("The request headers did not arrive in time.", status=408, code="request_timeout"))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(limits.STALLED_CLIENT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._unset_keepalive_if_required()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    # --- bytes ---

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._unset_keepalive_if_required()
        size, heads, between = len(data), self._heads, not self._in_body
        while data:
            try:
                self.parser.feed_data(data)
                data = b""
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._ignore_upgrade()
            except httptools.HttpParserError:
                self._refuse(self._fault or HttpRefusal(NOT_HTTP, status=400, code="invalid_http"))
                return
        if self._in_head:
            # What came in one read with something before this head is not counted to it: at most one buffer.
            self._head_bytes += size if between and heads == self._heads else 0
            if self._head_bytes > limits.MAX_HEAD_BYTES:
                self._refuse(_head_too_large())
            else:
                self._await_head()
        elif self.cycle is None or self.cycle.response_complete:
            self._await_request()

    def _ignore_upgrade(self) -> None:
        """The parser stops where the new protocol would begin, which is in front of the body. A new one reads on, made
        to expect the body by a head of ours."""
        if not _has_body(self.headers):
            return
        framing = [pair for pair in self.headers if pair[0] in (b"transfer-encoding", b"content-length")]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._resuming = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(b"%b: %b\r\n" % pair for pair in framing))
        self._resuming = False

    def on_message_begin(self) -> None:
        if not self._resuming:
            self._in_head = True
            self._head_bytes = self._field_bytes = 0
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._resuming:
            self._count(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._resuming:
            self._count(len(name) + len(value) + len(b": \r\n"))
            super().on_header(name, value)
            if len(self.headers) > limits.MAX_HEADERS:
                self._leave_parser(_head_too_large())

    def _count(self, size: int) -> None:
        self._field_bytes += size
        if self._field_bytes > limits.MAX_HEAD_BYTES:
            self._leave_parser(_head_too_large())

    def _leave_parser(self, fault: HttpRefusal) -> NoReturn:
        """From one of its callbacks: feed_data raises."""
        self._fault = fault
        raise fault

    def on_headers_complete(self) -> None:
        if self._resuming:
            return
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            self._leave_parser(HttpRefusal("A request must have one Host header.", status=400, code="invalid_http"))
        self._heads += 1
        self._in_head = False
        self._in_body = True
        self._dropped_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()
        if len(self.pipeline) == 1:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        if self.cycle.response_complete:
            self._dropped_bytes += len(body)
            if self._dropped_bytes > MAX_DROPPED_BYTES:
                self.transport.abort()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The parser calls this too early for a request that asks for an upgrade: its body is still to come."""
        if self.parser.should_upgrade() and _has_body(self.headers):
            return
        self._in_body = False
        super().on_message_complete()

    # --- answers ---

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            app = _unchunked(app, cycle)
        else:
            cycle.scope["extensions"] = {WRITE_NOW: _ChunkWriter(cycle)}
        super()._start_asgi_task(cycle, app)

    @property
    def _answering(self) -> bool:
        """A response is being written, or will be without anything more from the client."""
        running = self._running
        if running is None or running.response_complete:
            return False
        return bool(running.response_started or not running.more_body)

    def _refuse(self, refusal: HttpRefusal) -> None:
        """Say what is wrong with these bytes and close; what was asked before them is answered first."""
        self._deaf = True
        if self._answering:
            self.cycle.keep_alive = False
            return
        status = HTTPStatus(refusal.status)
        body = wire_error(refusal, request_id="").body()
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
            % (status, status.phrase.encode(), len(body), body)
        )
        self.transport.close()


class _ChunkWriter:
    """server.api.call.WriteNow for a cycle of uvicorn: what its `send` does with a part of a chunked body."""

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle

    def takes_more(self) -> bool:
        cycle = self._cycle
        return bool(
            cycle.chunked_encoding
            and not cycle.flow.write_paused
            and not cycle.disconnected
            and not cycle.response_complete
        )

    def write(self, data: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def _has_body(headers: list[tuple[bytes, bytes]]) -> bool:
    fields = dict(headers)
    return b"transfer-encoding" in fields or fields.get(b"content-length", b"0") != b"0"


def _head_too_large() -> HttpRefusal:
    return HttpRefusal(
        f"The request headers are too large: at most {limits.MAX_HEADERS} headers and {limits.MAX_HEAD_BYTES} bytes "
        "are accepted.",
        status=431,
        code="headers_too_large",
    )


def _unchunked(app: AsgiApp, cycle: Any) -> AsgiApp:
    """An answer of unknown length as an HTTP/1.0 client can read it: raw, and ended by the end of the connection."""

    async def run(scope: Any, receive: Any, send: Any) -> None:
        endless = False

        async def send_raw(message: Any) -> None:
            nonlocal endless
            if message["type"] == "http.response.start":
                endless = not any(name.lower() == b"content-length" for name, _ in message["headers"])
                if endless:
                    cycle.chunked_encoding = False
            elif endless:
                cycle.expected_content_length = len(message["body"])
            await send(message)

        await app(scope, receive, send_raw)

    return run


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the drain is ours, and so is the exit code."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def _wait_tasks_to_complete(self) -> None:
        """Whoever does not take the end of an answer in time is cut, so that no task has to be cancelled."""
        cut = asyncio.get_running_loop().call_later(FLUSH_TIMEOUT_S, self._cut)
        try:
            await super()._wait_tasks_to_complete()
        finally:
            cut.cancel()

    def _cut(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


# --- the run ------------------------------------------------------------------------------------------------------


async def serve(
    app: App,
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
                drainer = tasks.create_task(_drain_when(stopping, server, app, http, engine))
                await running
                announcer.cancel()
                drainer.cancel()
    finally:
        if uds:
            Path(uds).unlink(missing_ok=True)


def _uvicorn_config(app: App, http: HttpConfig) -> uvicorn.Config:
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
        timeout_graceful_shutdown=2 * FLUSH_TIMEOUT_S,
        limit_concurrency=None,
        backlog=BACKLOG,
    )


async def _announce(server: uvicorn.Server, address: str, started: Callable[[], None] | None) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    uvicorn_logger.info("Uvicorn running on %s (Press CTRL+C to quit)", address)
    if started is not None:
        started()


async def _drain_when(
    stopping: asyncio.Event, server: uvicorn.Server, app: App, http: HttpConfig, engine: Engine
) -> None:
    await stopping.wait()
    engine.begin_drain()
    app.begin_drain()
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
    where signals do not arrive.

    Who signals a whole process group reaches us twice if a parent (make, a shell) passes the signal on: what comes
    right behind the first is the same request.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    echoes_until_s = 0.0

    def on_signal(number: signal.Signals) -> None:
        nonlocal echoes_until_s
        if loop.time() < echoes_until_s:
            return
        if stopping.is_set():
            logger.warning("event=second_signal signal=%s", number.name)
            logging.shutdown()
            os._exit(128 + number)
        logger.info("event=signal signal=%s", number.name)
        echoes_until_s = loop.time() + SIGNAL_ECHO_S
        stopping.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
