"""In which order requests run: little work first, and waiting forgives work, so that everything runs in the end."""

from __future__ import annotations

TOKENS_PER_PRIORITY = 4096
"""How many tokens of work one step of `priority` outweighs; lower priority numbers run earlier."""


def priority_tokens(*, uncached_tokens: int, waited_s: float, forgiven_tokens_per_s: float, priority: int = 0) -> float:
    """Lower runs first. A request is never overtaken by one that arrives uncached_tokens / rate seconds after it."""
    return uncached_tokens - waited_s * forgiven_tokens_per_s + priority * TOKENS_PER_PRIORITY


def standing_key(*, uncached_tokens: int, arrival_s: float, forgiven_tokens_per_s: float, priority: int = 0) -> float:
    """The same order as priority_tokens at any one moment, without the clock: every waiting request ages alike, so
    the key of a request never changes and one heap holds the queue."""
    return priority_tokens(
        uncached_tokens=uncached_tokens,
        waited_s=-arrival_s,
        forgiven_tokens_per_s=forgiven_tokens_per_s,
        priority=priority,
    )
