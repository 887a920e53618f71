"""In which order requests run: little work first, and waiting forgives work, so that everything runs in the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TOKENS_PER_PRIORITY = 4096
"""How many tokens of work one step of `priority` outweighs; lower priority numbers run earlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What of a request counts besides how long it has waited: the tokens it has, and those that are cached of them.

    Lower keys run first. At any one moment everybody who waits ages alike, so a key does not hold the time, but the
    arrival: as long as what is cached stays the same, it never changes.
    """

    counts_tokens: bool
    counts_cached: bool

    def base(self, *, tokens: int, arrival_s: float, forgiven_tokens_per_s: float, priority: int = 0) -> float:
        """The key, if nothing were cached."""
        return tokens * self.counts_tokens + arrival_s * forgiven_tokens_per_s + priority * TOKENS_PER_PRIORITY

    def key(self, base: float, saved_tokens: float) -> float:
        return base - saved_tokens * self.counts_cached


POLICIES: Mapping[str, Policy] = {
    "uncached-first": Policy(counts_tokens=True, counts_cached=True),
    "fcfs": Policy(counts_tokens=False, counts_cached=False),
    "longest-prefix": Policy(counts_tokens=False, counts_cached=True),
    "shortest-first": Policy(counts_tokens=True, counts_cached=False),
}
"""uncached-first: who has the fewest tokens to compute, rebuilt windows among them. Nobody is overtaken by who arrives
later than its tokens to compute / forgiven_tokens_per_s after it. The others are there to compare: first come, first
served; the most cached tokens; the fewest tokens. All of them forgive by the time waited."""
