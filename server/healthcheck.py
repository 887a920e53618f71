"""Is the server in this container healthy? Exit code 0 if /health answers 200, else 1: a HEALTHCHECK without curl.

It finds the address as the server did: in the environment, and in the command line of process 1, which is the server
in a container. Flags given to the check itself come last (`python -m server.healthcheck --port 9000`).
"""

from __future__ import annotations

import http.client
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from server.config import HttpConfig, read_config
from server.errors import StartupError

TIMEOUT_S = 4.0
EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, *, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def server_arguments(command_line: bytes) -> list[str]:
    """What follows `serve` in a command line of NUL-ended words; nothing if it is another program's."""
    words = command_line.decode(errors="replace").rstrip("\0").split("\0")
    return words[words.index("serve") + 1 :] if "serve" in words else []


def connection(http_config: HttpConfig) -> http.client.HTTPConnection:
    if http_config.uds is not None:
        return UnixConnection(http_config.uds, timeout=TIMEOUT_S)
    host = EVERY_INTERFACE.get(http_config.host, http_config.host)
    return http.client.HTTPConnection(host, http_config.port, timeout=TIMEOUT_S)


def probe(http_config: HttpConfig) -> tuple[bool, str]:
    """(healthy, one line that says why)."""
    link = connection(http_config)
    try:
        link.request("GET", "/health")
        answer = link.getresponse()
        body = answer.read(1000).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return False, f"no answer: {error}"
    finally:
        link.close()
    return answer.status == 200, f"{answer.status} {body}".strip()


def main(argv: Sequence[str], env: Mapping[str, str], first_process: Path = Path("/proc/1/cmdline")) -> int:
    try:
        served = server_arguments(first_process.read_bytes())
    except OSError:
        served = []
    try:
        config = read_config([*served, *argv], env)
    except StartupError as error:
        print(f"unhealthy: {error}")
        return 1
    healthy, reason = probe(config.http)
    print(f"{'healthy' if healthy else 'unhealthy'}: {reason}")
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
