"""What is worth keeping: the price of what is cached, in bytes, against the work that it is likely to save.

Pure functions of what is known at the time: no clock, no state, one set of constants for all models and all traffic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from server.rebuild import RebuildShape


class Ending(IntEnum):
    """How the last answer on a path ended: it called a tool, whose result will come back, or it said all it had to."""

    UNKNOWN = 0
    SAID = 1
    CALLED = 2


@dataclass(frozen=True, slots=True)
class Reuse:
    """What is known about who comes back to a point, in few classes: see `tip` and `crossing`. doublings: how often
    1,024 tokens have to be doubled to what the last prompt added."""

    uses: int = 0
    turn: int = 0
    ending: Ending = Ending.UNKNOWN
    doublings: int = 0


def tip(turn: int, ending: Ending, added_tokens: int) -> Reuse:
    """The end of a path that nobody went on from. turn: of the conversation, from 1, which added so many tokens."""
    if ending is not Ending.UNKNOWN:
        return Reuse(ending=ending)
    doublings = min(max((added_tokens // 1024).bit_length() - 1, -1), MOST_DOUBLINGS) if added_tokens >= 512 else -1
    return Reuse(turn=max(step for step in TURN_STEPS if step <= turn), doublings=doublings)


def crossing(uses: int) -> Reuse:
    """A point that so many, from 1, went on from."""
    return Reuse(uses=max(step for step in USE_STEPS if step <= uses))


SPACING_PRICES = 20
"""Found on the same traces without rebuilds: close to the price itself is ruinous when memory is short."""


def turn_marks(turn_ends: NDArray[np.int64], page_tokens: int) -> tuple[int, ...]:
    """Pages at which snapshots are taken since turns end there: the first, which ends the system text and the tools
    that many conversations share, and the last two, from which an answer or the last message is asked for anew.

    Not those between: they are passed in order, and by then the last ones were taken when they were the last.
    """
    ends = {int(end) // page_tokens for end in (*turn_ends[:1], *turn_ends[-2:])}
    return tuple(sorted(ends - {0}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a page costs in bytes and what it costs to compute again."""

    page_tokens: int
    snapshot_pages: int
    full_page_bytes: int
    window_page_bytes: int
    rebuild: RebuildShape

    @property
    def snapshot_bytes(self) -> int:
        return self.snapshot_pages * self.window_page_bytes

    @property
    def snapshot_tokens(self) -> float:
        """A snapshot's price, in tokens of full KV."""
        return self.snapshot_bytes * self.page_tokens / self.full_page_bytes

    @property
    def spacing_tokens(self) -> int:
        """How far apart snapshots are taken on the way, where nobody is known to come back; 0 for never.

        Where a lost window can be rebuilt, a snapshot saves so little that it is not worth its place: on the traces of
        chats and of documents, one every 16 K tokens takes 0.3 to 1.3 points of the hit rate. Where it cannot, all up
        to the next snapshot is lost, and SPACING_PRICES times its price is a good distance.
        """
        return 0 if self.rebuild.fed_tokens else round(SPACING_PRICES * self.snapshot_tokens)

    def leaf_density(self, tokens: int, *, is_safe: bool) -> float:
        """Work saved per price, where a token of full KV has price 1, of the last run of a path if somebody returns to
        its end. Without a snapshot there, a part is spent on getting the window back."""
        if is_safe:
            return tokens / (tokens + self.snapshot_tokens)
        return (tokens - self.rebuild.work_tokens(tokens)) / tokens

    def snapshot_density(self, safe_tokens: int) -> float:
        """The same of a snapshot, when the last safe point before it lies so many tokens below."""
        return self.rebuild.work_tokens(safe_tokens) / self.snapshot_tokens


# --- who comes back, and when -------------------------------------------------------------------------------------
#
# Measured on three public traces (shares and quantiles of times by class, bench/returns.py). Times are from the end of
# the last use.

TURN_STEPS = (1, 2, 3, 4, 6, 8, 11)
MOST_DOUBLINGS = 5
USE_STEPS = (1, 2, 3, 4, 8, 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Returns:
    """Which share comes back, and the times of those as a mixture of lognormals: (weight, median in s, sigma)."""

    share: float
    times: tuple[tuple[float, float, float], ...]

    def came_back(self, age_s: float) -> float:
        """Which share has, after so long."""
        if age_s <= 0:
            return 0.0
        below = (
            weight * 0.5 * (1 + math.erf(math.log(age_s / median_s) / (sigma * math.sqrt(2))))
            for weight, median_s, sigma in self.times
        )
        return self.share * sum(below)


AFTER_A_CALL = Returns(share=0.98, times=((0.85, 8.5, 0.75), (0.15, 80.0, 1.3)))
AFTER_A_WORD = Returns(share=0.75, times=((1.0, 180.0, 1.9),))
LOGIT_OF_TURNS = (-0.2, -0.19, -0.81, -0.42, 0.78)
"""Where the ending is not known: of a first turn, and for each doubling of what it added beyond 1,024 tokens; both
once more for later turns; for each doubling of the turn. A logistic fit: who adds a long text comes back less often,
who has come back often comes back again."""
TIME_OF_TURNS = (110.0, 0.2, 1.14)
"""Median where a prompt added 1,024 tokens, by how many doublings it grows with each doubling of them, and sigma: who
adds a long text comes back later, too."""
SHARE_OF_USES = {1: 0.15, 2: 0.4, 3: 0.5, 4: 0.65, 8: 0.8, 20: 0.98}
TIME_OF_USES = (110.0, 0.6, 1.2)
"""Median after one use, the exponent by which it falls with more of them, and sigma."""


def returns_of(reuse: Reuse) -> Returns:
    if reuse.uses:
        median_s, exponent, sigma = TIME_OF_USES
        return Returns(share=SHARE_OF_USES[reuse.uses], times=((1.0, median_s / reuse.uses**exponent, sigma),))
    if reuse.ending is Ending.CALLED:
        return AFTER_A_CALL
    if reuse.ending is Ending.SAID:
        return AFTER_A_WORD
    first, first_added, later, later_added, turns = LOGIT_OF_TURNS
    added = reuse.doublings + 0.5  # the middle of the class
    logit = first + first_added * added + turns * math.log2(max(1, reuse.turn))
    if reuse.turn > 1:
        logit += later + later_added * added
    median_s, growth, sigma = TIME_OF_TURNS
    return Returns(share=1 / (1 + math.exp(-logit)), times=((1.0, median_s * 2 ** (growth * reuse.doublings), sigma),))


AGE_STEP = 1.25
AGES_S = (0.0, *(AGE_STEP**n for n in range(-4, 63)))
"""0, and 0.4 s to 11 days"""


@cache
def return_rates(reuse: Reuse) -> tuple[float, ...]:
    """From each of AGES_S on, what a place held for one who has been away for so long is worth: returns per second of
    holding it, when it is held as long as is best. (Who was here a moment ago may not be back for a minute, and is
    worth the wait.)

    Source: the index of Gittins (1979) for stopping: max over t of P(back within t) / E[time held until back or t].
    """
    returns = returns_of(reuse)
    back = [returns.came_back(age_s) for age_s in AGES_S]
    held = [0.0]
    for (one_s, other_s), (one, other) in zip(pairwise(AGES_S), pairwise(back), strict=True):
        held.append(held[-1] + (other_s - one_s) * (1 - (one + other) / 2))
    last = len(AGES_S) - 1
    rates = [
        max((back[later] - back[now]) / (held[later] - held[now]) for later in range(now + 1, last + 1))
        for now in range(last)
    ]
    return (*rates, rates[-1])
