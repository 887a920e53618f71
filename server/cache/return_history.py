"""How often who is expected back does come back here: the constants are right on the average of all traffic only."""

from __future__ import annotations

import math
from collections import defaultdict

from server.cache.retention import Reuse, return_rate, returns_of

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
        self._returned: dict[Reuse, float] = defaultdict(float)
        self._expected: dict[Reuse, float] = defaultdict(float)

    def note(self, reuse: Reuse, age_s: float, *, returned: bool) -> None:
        """Somebody came back after age_s, or was waited for so long in vain."""
        left = max(LEAST_LEFT, 1 - returns_of(reuse).came_back(age_s))
        self._expected[reuse] -= math.log(left)
        self._returned[reuse] += returned
        if self._expected[reuse] + self._returned[reuse] > MEMORY_RETURNS:
            self._expected[reuse] /= 2
            self._returned[reuse] /= 2

    def factor(self, reuse: Reuse) -> float:
        quotient = (PRIOR_RETURNS + self._returned[reuse]) / (PRIOR_RETURNS + self._expected[reuse])
        return min(MOST_FACTOR, max(1 / MOST_FACTOR, quotient))

    def rate(self, age_s: float, reuse: Reuse) -> float:
        return return_rate(age_s, reuse) * self.factor(reuse)
