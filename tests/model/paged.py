"""Sequences over a real arena without scheduler and cache: pages are handed out in random order, window pages that no
future query sees are freed, poisoned and handed out again."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.reference import ReferenceKernels
from server.config import KVLayout
from server.model.batch import Batch
from server.model.decoder import Decoder
from server.model.kv_arena import KVArena, page_byte_sizes
from server.model.kv_layout import choose_slab_bytes
from server.model.spec import ModelSpec
from server.model.weights import Weights
from server.step import PageId, PageKind

POISON = 3e4
"""Finite, far outside of any activation, and still far from overflow when a mask multiplies it by 0."""


def make_arena(
    spec: ModelSpec, *, page_tokens: int, tokens: int, dtype: torch.dtype = torch.float32, sequences: int = 8
) -> KVArena:
    full, window = page_byte_sizes(spec, page_tokens, dtype)
    slab = choose_slab_bytes(full, window)
    pages = tokens // page_tokens + sequences + 1
    # Room for all pages of both kinds, each in slabs of its own.
    slabs = -(-pages // (slab // full)) + (-(-pages // (slab // window)) if window else 0)
    layout = KVLayout(
        page_tokens=page_tokens,
        window_tokens=spec.window_tokens,
        full_page_bytes=full,
        window_page_bytes=window,
        slab_bytes=slab,
        slab_count=slabs,
    )
    return KVArena(spec, layout, dtype)


class PagedSequences:
    """Runs sequences chunk by chunk as a scheduler would. Slabs are split between the kinds once, at random."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        *,
        page_tokens: int = 4,
        tokens: int = 4096,
        slots: int = 8,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        poison: float | None = POISON,
    ) -> None:
        self.random = random.Random(seed)
        self.arena = make_arena(spec, page_tokens=page_tokens, tokens=tokens, dtype=dtype, sequences=slots)
        self.spec = spec
        self.poison = poison
        self.decoder = Decoder(spec, weights, ReferenceKernels())
        self.page_tokens = page_tokens
        self.free = self._split_slabs()
        if poison is not None:
            self.arena.memory.view(dtype).fill_(poison)
        max_pages = -(-tokens // page_tokens) + 1
        self.tables = {kind: torch.full((slots, max_pages), -1, dtype=torch.int32) for kind in PageKind}
        self.known = [0] * slots
        self.oldest_window_page = [0] * slots
        self.mapped = [0] * slots

    def _split_slabs(self) -> dict[PageKind, list[int]]:
        layout = self.arena.layout
        slabs = list(range(layout.slab_count))
        self.random.shuffle(slabs)
        full_pages = max(1, self.tables_pages_needed() // 1)
        full_slabs = min(len(slabs) - bool(layout.has_window), -(-full_pages // layout.full_pages_per_slab))
        free: dict[PageKind, list[int]] = {PageKind.FULL: [], PageKind.WINDOW: []}
        for position, slab in enumerate(slabs):
            kind = PageKind.FULL if position < full_slabs or not layout.has_window else PageKind.WINDOW
            per_slab = self.arena.pages_per_slab(kind)
            free[kind] += range(slab * per_slab, (slab + 1) * per_slab)
        for pages in free.values():
            self.random.shuffle(pages)
        return free

    def tables_pages_needed(self) -> int:
        layout = self.arena.layout
        per_slab = layout.full_pages_per_slab
        if not layout.has_window:
            return layout.slab_count * per_slab
        # The share that make_arena counted for full pages.
        window_slabs_per_full = per_slab / layout.window_pages_per_slab
        return int(layout.slab_count / (1 + window_slabs_per_full)) * per_slab

    def step(self, rows: Sequence[tuple[int, Sequence[int]]]) -> list[Tensor]:
        """rows of (slot, new tokens) -> logits [count, N] of each row."""
        spans = []
        for slot, tokens in rows:
            start = self.known[slot]
            self._map(slot, start + len(tokens))
            spans.append((slot, start, len(tokens)))
            self.known[slot] += len(tokens)
        batch = Batch(spans, self.tables[PageKind.FULL], self.tables[PageKind.WINDOW])
        flat = torch.tensor([token for _, tokens in rows for token in tokens])
        logits = self.decoder.logits(self.decoder.forward(flat, batch, self.arena))
        for slot, _ in rows:
            self._release(slot)
        return list(logits.split([len(tokens) for _, tokens in rows]))

    def _map(self, slot: int, tokens: int) -> None:
        while self.mapped[slot] * self.page_tokens < tokens:
            for kind in PageKind:
                if kind == PageKind.FULL or self.arena.layout.has_window:
                    self.tables[kind][slot, self.mapped[slot]] = self.free[kind].pop()
            self.mapped[slot] += 1

    def _release(self, slot: int) -> None:
        """The table keeps its entry: a stale page id is what a scheduler leaves behind, and it must not be followed."""
        if not self.arena.layout.has_window:
            return
        first_seen = max(0, self.known[slot] - self.spec.window_tokens) // self.page_tokens
        for logical in range(self.oldest_window_page[slot], first_seen):
            page = PageId(int(self.tables[PageKind.WINDOW][slot, logical]))
            if self.poison is not None:
                self.arena.page_bytes(PageKind.WINDOW, page).view(self.arena.dtype).fill_(self.poison)
            self.free[PageKind.WINDOW].insert(self.random.randrange(len(self.free[PageKind.WINDOW]) + 1), page)
        self.oldest_window_page[slot] = max(self.oldest_window_page[slot], first_seen)
