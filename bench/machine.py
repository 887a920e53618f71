"""What /proc tells: who used the processors while something was measured, and how much memory a server took."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def process_tree(root: int) -> list[int]:
    """The process and all its descendants that live now."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat_fields(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    tree = [root]
    for pid in tree:
        tree += children.get(pid, [])
    return tree


def tree_cpu_s(root: int) -> float:
    """CPU seconds of the tree, children that have ended included."""
    return (
        sum(sum(map(int, fields[11:15])) for pid in process_tree(root) if (fields := _stat_fields(pid))) / TICKS_PER_S
    )


def tree_peak_rss_bytes(root: int) -> int:
    """Sum of every process's own peak (VmHWM). Pages that they share count several times."""
    total = 0
    for pid in process_tree(root):
        try:
            found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        except OSError:
            continue
        total += int(found[1]) * 1024 if found else 0
    return total


def busy_s() -> float:
    """CPU seconds that anybody used since boot, all cores together; time stolen by the host included."""
    user, nice, system, idle, iowait, irq, softirq, steal, *_ = map(int, _cpu_line().split()[1:])
    del idle, iowait
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def cpu_model() -> str:
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return found[1].strip() if found else "unknown processor"


def _cpu_line() -> str:
    with open("/proc/stat") as file:
        return file.readline()


def _stat_fields(pid: int) -> list[str]:
    """/proc/PID/stat from the state on: the name before it may hold blanks and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


@dataclass(frozen=True, slots=True)
class _Reading:
    at_s: float
    busy_s: float
    server_s: float
    client_s: float


class LoadMeter:
    """Cores kept busy by neither the server's tree nor this process, from the making of the meter to `other_cores`."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._start = self._read()

    def other_cores(self) -> float:
        now, start = self._read(), self._start
        other_s = (now.busy_s - start.busy_s) - (now.server_s - start.server_s) - (now.client_s - start.client_s)
        return max(0.0, other_s / max(now.at_s - start.at_s, 1e-6))

    def _read(self) -> _Reading:
        times = os.times()
        return _Reading(time.monotonic(), busy_s(), tree_cpu_s(self._server), times.user + times.system)
