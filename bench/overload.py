"""How long /health takes while far more requests come than the server takes, and what those who are refused are told.

    .venv/bin/python -m bench.overload                       tiny with 8 slots and a queue of 50, five bursts of 500
    .venv/bin/python -m bench.overload --requests 2000 --rounds 1

/health is asked every 5 ms by a process of its own, each time on a new connection. What counts are the answers that
came between the first request of a burst and the last ending. Exit code 1 if the slowest took longer than 100 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import orjson
from tqdm import tqdm

from bench.cache_hits import weights_of
from bench.http_overhead import main_thread_cpu_s
from bench.load import REQUEST_LIMIT_S
from bench.machine import LoadMeter
from bench.peers import PEERS, Running, end_servers_when_terminated, ours, running
from bench.results import BUSY_CORES

TARGET_S = 0.1
PROBE_EVERY_S = 0.005
WATCH_S = 0.5
"""How long /health is asked before a burst: the process that asks must have begun."""
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
RETRY_MS = re.compile(rb"^retry-after-ms: (\d+)\r$", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One look at /health. Times are of time.perf_counter, which all processes of a machine share."""

    sent_s: float
    ended_s: float


def look(address: str, until_s: float) -> list[Probe]:
    """Ask /health until then. Raises if it answers anything but 200."""
    found = []
    while (sent_s := time.perf_counter()) < until_s:
        connection = http.client.HTTPConnection(address, timeout=60)
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        connection.close()
        if response.status != 200:
            raise RuntimeError(f"/health answered {response.status}")
        found.append(Probe(sent_s=sent_s, ended_s=time.perf_counter()))
        time.sleep(PROBE_EVERY_S)
    return found


class Raw(asyncio.Protocol):
    """One request whose response is kept as bytes: what the client computes is taken from the server's cores."""

    def __init__(self, request: bytes) -> None:
        self.ended: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.pieces: list[bytes] = []
        self._request = request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(time.perf_counter())

    @property
    def status(self) -> int:
        """0 if the connection broke before there was one."""
        found = STATUS.match(b"".join(self.pieces))
        return int(found[1]) if found else 0

    @property
    def retry_s(self) -> float | None:
        found = RETRY_MS.search(b"".join(self.pieces))
        return int(found[1]) / 1000 if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """taken_s: of each look at /health. retries_s: what each that was refused was told. served_s: how long it took
    until all that were accepted had their answer. loop_s: CPU time of the event loop."""

    statuses: dict[int, int]
    taken_s: list[float]
    retries_s: list[float]
    served_s: float
    loop_s: float
    other_cores: float

    def line(self) -> str:
        p50, p99, most = (1e3 * float(np.quantile(self.taken_s, q)) for q in (0.5, 0.99, 1.0))
        disturbed = f" (other processes used {self.other_cores:.1f} cores)" if self.other_cores > BUSY_CORES else ""
        told = ""
        if self.retries_s:
            low, middle, high = (float(np.quantile(self.retries_s, q)) for q in (0.0, 0.5, 1.0))
            same = max(self.retries_s.count(each) for each in set(self.retries_s))
            told = f"; told to come again in {low:.1f} / {middle:.1f} / {high:.1f} s, {same} of them in the same"
        ends = ", ".join(f"{count} x {status}" for status, count in sorted(self.statuses.items()))
        return (
            f"/health P50 {p50:.1f} P99 {p99:.1f} max {most:.1f} ms of {len(self.taken_s)}{disturbed}; {ends} in "
            f"{self.served_s:.2f} s, {1e6 * self.loop_s / sum(self.statuses.values()):.0f} us of the loop each{told}"
        )


async def burst(server: Running, pool: ProcessPoolExecutor, requests: int, outputs: int, seconds: float) -> Burst:
    """All at once, each on a connection of its own; /health is asked for so many seconds."""
    address = urlsplit(server.url)
    assert address.hostname and address.port
    loop = asyncio.get_running_loop()
    sent = [Raw(request_bytes(address.netloc, server.model_name, outputs, number)) for number in range(requests)]
    looking = loop.run_in_executor(pool, look, address.netloc, time.perf_counter() + WATCH_S + seconds)
    await asyncio.sleep(WATCH_S)
    meter, loop_s, begun_s = LoadMeter(server.pid), main_thread_cpu_s(server.pid), time.perf_counter()
    async with asyncio.timeout(REQUEST_LIMIT_S):
        await asyncio.gather(
            *(loop.create_connection(partial(_itself, each), address.hostname, address.port) for each in sent)
        )
        ended_s = max([await each.ended for each in sent])
    loop_s, other_cores = main_thread_cpu_s(server.pid) - loop_s, meter.other_cores()
    probes = [each for each in await looking if each.ended_s > begun_s and each.sent_s < ended_s]
    statuses = [each.status for each in sent]
    return Burst(
        statuses={status: statuses.count(status) for status in set(statuses)},
        taken_s=[each.ended_s - each.sent_s for each in probes],
        retries_s=[each.retry_s for each in sent if each.retry_s is not None],
        served_s=ended_s - begun_s,
        loop_s=loop_s,
        other_cores=other_cores,
    )


def request_bytes(netloc: str, model: str, outputs: int, number: int) -> bytes:
    fields = {"model": model, "prompt": f"{number} says", "max_tokens": outputs, "ignore_eos": True}
    body = orjson.dumps({**fields, "stream": number % 2 == 0})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {netloc}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _itself(raw: Raw) -> Raw:
    return raw


async def bursts(server: Running, wanted: argparse.Namespace) -> list[Burst]:
    found = []
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        await asyncio.get_running_loop().run_in_executor(pool, os.getpid)  # it begins before anything is measured
        for number in tqdm(range(wanted.rounds), unit="burst"):
            found.append(await burst(server, pool, wanted.requests, wanted.outputs, wanted.watch_s))
            tqdm.write(f"burst {number + 1}: {found[-1].line()}")
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overload", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--requests", type=int, default=500, metavar="N", help="at once [%(default)s]")
    add("--outputs", type=int, default=64, metavar="N", help="tokens of each answer [%(default)s]")
    add("--slots", type=int, default=8, metavar="N", help="that run at once [%(default)s]")
    add("--queue", type=int, default=50, metavar="N", help="that may wait [%(default)s]")
    add("--rounds", type=int, default=5, metavar="N", help="bursts [%(default)s]")
    add("--watch-s", type=float, default=5.0, metavar="S", help="how long /health is asked in each [%(default)g]")
    add(
        "--cache",
        type=Path,
        default=Path("~/.cache/twinpane"),
        metavar="DIR",
        help="for the server's log [%(default)s]",
    )
    wanted = parser.parse_args(argv)
    flags = ("--max-model-len", "4096", "--max-num-seqs", str(wanted.slots), "--max-num-queued-reqs", str(wanted.queue))
    cache = wanted.cache.expanduser()
    with running(
        replace(PEERS["ours"], command=ours(*flags)),
        weights_of("tiny", cache),
        cache=cache,
        threads=os.cpu_count() or 1,
    ) as server:
        found = asyncio.run(bursts(server, wanted))
    taken_s = [each for of in found for each in of.taken_s]
    p50, p99, most = (1e3 * float(np.quantile(taken_s, q)) for q in (0.5, 0.99, 1.0))
    met = most <= 1e3 * TARGET_S
    print(
        f"/health while {wanted.requests} requests come at once: P50 {p50:.1f} ms, P99 {p99:.1f} ms, max {most:.1f} ms "
        f"(target at most {1e3 * TARGET_S:.0f} ms: {'met' if met else 'missed'})"
    )
    return 0 if met else 1


if __name__ == "__main__":
    end_servers_when_terminated()
    sys.exit(main(sys.argv[1:]))
