"""How often who is expected back does come back here: the constants are right on the average of all traffic only."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable

from server.cache.retention import AGES_S, Reuse, return_rates, returns_of

PRIOR_RETURNS = 8.0
"""How many returns the constants are worth as evidence."""
MEMORY_RETURNS = 400.0
"""Older evidence is forgotten so that not much more than this remains: traffic changes."""
MOST_FACTOR = 16.0
LEAST_LEFT = 1e-3


class ReturnHistory:
    """For each class of reuse, a factor on its rate of return, from who returned and who was expected to.

    Whoever is evicted is seen no more, so shares cannot be counted. Returns per expected return can: each time at
    which somebody was waited for counts with the integral of the expected hazard over it, -log(1 - came back), and the
    quotient is the maximum-likelihood factor of a hazard that is the expected one times a constant (the piecewise
    exponential model: Aitkin and Clayton 1980). Owner: KVCache.
    """

    def __init__(self) -> None:
        self._kinds: dict[Reuse, _Kind] = {}

    def note(self, reuse: Reuse, age_s: float, *, returned: bool) -> None:
        """Somebody came back after age_s, or was waited for so long in vain."""
        self._kind(reuse).note(age_s, returned=returned)

    def factor(self, reuse: Reuse) -> float:
        return self._kind(reuse).factor

    def rate(self, reuse: Reuse) -> Callable[[float], float]:
        """The rate of a class by age, which goes on learning."""
        return self._kind(reuse).rate

    def _kind(self, reuse: Reuse) -> _Kind:
        kind = self._kinds.get(reuse)
        if kind is None:
            kind = self._kinds[reuse] = _Kind(reuse)
        return kind


class _Kind:
    """What was seen of one class. Owner: ReturnHistory."""

    __slots__ = ("_expected", "_rates", "_returned", "_returns", "factor")

    def __init__(self, reuse: Reuse) -> None:
        self._returns = returns_of(reuse)
        self._rates = return_rates(reuse)
        self._returned = 0.0
        self._expected = 0.0
        self.factor = 1.0

    def note(self, age_s: float, *, returned: bool) -> None:
        self._expected -= math.log(max(LEAST_LEFT, 1 - self._returns.came_back(age_s)))
        self._returned += returned
        if self._expected + self._returned > MEMORY_RETURNS:
            self._expected /= 2
            self._returned /= 2
        quotient = (PRIOR_RETURNS + self._returned) / (PRIOR_RETURNS + self._expected)
        self.factor = min(MOST_FACTOR, max(1 / MOST_FACTOR, quotient))

    def rate(self, age_s: float) -> float:
        return self._rates[bisect.bisect_right(AGES_S, age_s, 1) - 1] * self.factor
