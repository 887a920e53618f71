"""What a trace is played with, whoever plays it."""

from __future__ import annotations

from dataclasses import dataclass

from server.cache.kv_cache import CachePolicy
from server.config import KVLayout
from server.simulator.models import CacheShape
from server.simulator.trace import Trace

BYTES_PER_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The same for every budget."""

    trace: Trace
    shape: CacheShape
    page_tokens: int
    chunk_tokens: int
    policy: CachePolicy

    def layout(self, budget_gb: float) -> KVLayout:
        """Raises StartupError if not even one slab fits."""
        return self.shape.layout(page_tokens=self.page_tokens, budget_bytes=budget_gb * BYTES_PER_GB)
