"""How a step's prompt tokens are shared between short and long prompts, so that neither keeps the other waiting."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence


def lane_of(tokens: float, lanes: Sequence[int]) -> int:
    """lanes: ascending bounds. A prompt with fewer tokens to compute than the first is in lane 0, and so on; the last
    lane has no end."""
    return bisect.bisect_right(lanes, tokens)


def lane_names(lanes: Sequence[int]) -> tuple[str, ...]:
    """'0-64K', '64K-256K', ..., '1M-': for metrics and tables."""
    bounds = ["0", *map(_short, lanes), ""]
    return tuple(f"{low}-{high}" for low, high in itertools.pairwise(bounds))


def _short(tokens: int) -> str:
    for unit, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens % unit == 0:
            return f"{tokens // unit}{letter}"
    return str(tokens)


def share(budget: int, wanted: Sequence[int], turn: int = 0) -> list[int]:
    """Divide a budget so that nobody gets more than it wants, what one leaves goes to the others in equal parts, and
    all of it is given while anybody wants more (max-min fairness). Where parts cannot be equal some get one more, other
    ones with each turn."""
    given = [0] * len(wanted)
    hungry = sorted((lane for lane, tokens in enumerate(wanted) if tokens > 0), key=lambda lane: wanted[lane])
    while hungry and wanted[hungry[0]] <= budget // len(hungry):
        lane = hungry.pop(0)
        given[lane] = wanted[lane]
        budget -= wanted[lane]
    if hungry:
        part, rest = divmod(budget, len(hungry))
        hungry.sort()
        for rank, lane in enumerate(hungry):
            given[lane] = part + ((rank - turn) % len(hungry) < rest)
    return given
