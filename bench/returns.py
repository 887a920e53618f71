"""Who comes back to a cached prefix, and when: what the constants of `server/cache/retention.py` were measured with.

    python bench/returns.py agentic.lineage.csv.gz conversation.lineage.csv.gz

Two tables for each trace: the ends of prompts, by turn, ending and what the prompt added, and points that somebody went
on from, by how many did. A share is of those whose return could be seen, which leaves out the last ten minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Hashable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from server.cache.retention import Ending, crossing, tip
from server.simulator.replay import ENDINGS
from server.simulator.trace import Trace, read_trace

UNSEEN_S = 600.0
FEWEST = 30
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95)


def turns(trace: Trace) -> list[int]:
    """Which turn of its conversation each request is: one more than the request whose whole prompt it goes on from."""
    found: list[int] = []
    for request in trace.requests:
        found.append(found[request.source] + 1 if trace.goes_on(request) else 1)
    return found


def prompt_ends(trace: Trace) -> dict[Hashable, list[float | None]]:
    """Seconds from the end of each request to the first one that goes on from its prompt, by class."""
    first: dict[int, float] = {}
    for request in trace.requests:
        source = request.source
        if trace.goes_on(request):
            ended_s = trace.requests[source].arrival_s + trace.requests[source].held_s
            first.setdefault(source, max(0.0, request.arrival_s - ended_s))
    last_s = trace.requests[-1].arrival_s
    by_class: dict[Hashable, list[float | None]] = defaultdict(list)
    for request, turn in zip(trace.requests, turns(trace), strict=True):
        if request.arrival_s < last_s - UNSEEN_S:
            added = request.input_tokens - request.shared_blocks * trace.block_tokens
            ending = ENDINGS.get(request.stop or "", Ending.UNKNOWN)
            by_class[tip(turn, ending, added)].append(first.get(request.index))
    return by_class


def crossings(trace: Trace) -> dict[Hashable, list[float | None]]:
    """Seconds between two requests that go on from the same point, by how many have."""
    uses: dict[int, list[float]] = defaultdict(list)
    for request in trace.requests:
        if request.shared_blocks:
            uses[int(request.blocks[request.shared_blocks - 1])].append(request.arrival_s)
    by_class: dict[Hashable, list[float | None]] = defaultdict(list)
    for times in uses.values():
        for number, time_s in enumerate(times, start=1):
            later = times[number] - time_s if number < len(times) else None
            by_class[crossing(number)].append(later)
    return by_class


def table(found: dict[Hashable, list[float | None]]) -> str:
    lines = ["| class | seen | came back | " + " | ".join(f"q{round(100 * q)}, s" for q in QUANTILES) + " |"]
    lines.append("|" + "---|" * (3 + len(QUANTILES)))
    for reuse, values in sorted(found.items(), key=repr):
        if len(values) >= FEWEST:
            back = [value for value in values if value is not None]
            times: list[float] = np.quantile(back, QUANTILES).tolist() if back else []
            cells = [str(reuse), str(len(values)), f"{len(back) / len(values):.2f}", *(f"{t:.0f}" for t in times)]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(paths: Iterable[Path]) -> None:
    for path in paths:
        trace = read_trace(path)
        print(f"## {path.name}\n\n{table(prompt_ends(trace))}\n\n{table(crossings(trace))}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    main(parser.parse_args().traces)
