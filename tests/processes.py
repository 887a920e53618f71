"""The server as its users run it: a process of its own, found by its port."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
START_LIMIT_S = 120


@dataclass
class Served:
    url: str
    process: subprocess.Popen[str]
    log: Path

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def stop(self, *, limit_s: float = 60) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(limit_s)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment() -> dict[str, str]:
    ours = {key: value for key, value in os.environ.items() if not key.startswith("TWINPANE_")}
    return {**ours, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


@contextlib.contextmanager
def serving(model: str | Path, log: Path, *flags: str, sabotage: str | None = None) -> Iterator[Served]:
    """A server that is ready; killed at the end if the test has not stopped it.

    sabotage: Python that runs in the process before the server does, to break a part of it.
    """
    port = free_port()
    program = ["-m", "server"]
    if sabotage is not None:
        program = ["-c", f"{sabotage}\nimport sys\nfrom server.__main__ import main\nsys.exit(main())"]
    command = [sys.executable, *program, "serve", str(model), "--port", str(port), *flags]
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, text=True, env=environment())
    served = Served(url=f"http://127.0.0.1:{port}", process=process, log=log)
    try:
        wait_until_ready(served)
        yield served
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def wait_until_ready(served: Served) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        assert served.process.poll() is None, served.output()
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{served.url}/ready", timeout=2):
            return
        time.sleep(0.1)
    raise AssertionError(f"not ready after {START_LIMIT_S} s:\n{served.output()}")


def run_serve(*arguments: str, limit_s: float = 60) -> subprocess.CompletedProcess[str]:
    """`serve` with something wrong: runs to its end."""
    return subprocess.run(
        [sys.executable, "-m", "server", "serve", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=limit_s,
        env=environment(),
        check=False,
    )
