"""Sequences over a real arena without scheduler and cache: pages are handed out in random order, window pages that no
future query sees are freed, poisoned and handed out again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels.reference import ReferenceKernels
from server.config import KVLayout
from server.model.batch import Batch
from server.model.decoder import Decoder
from server.model.kv_arena import KVArena
from server.model.kv_layout import choose_slab_bytes, page_byte_sizes
from server.model.spec import ModelSpec
from server.model.weights import Weights
from server.step import PageId, PageKind

POISON = 3e4
"""Finite, far outside of any activation, and still far from overflow when a mask multiplies it by 0."""


def slabs_per_kind(layout: KVLayout, pages: int) -> tuple[int, int]:
    """Slabs that hold `pages` pages of each kind."""
    window = -(-pages // layout.window_pages_per_slab) if layout.has_window else 0
    return -(-pages // layout.full_pages_per_slab), window


def make_arena(spec: ModelSpec, *, page_tokens: int, pages: int, dtype: torch.dtype = torch.float32) -> KVArena:
    """An arena with room for `pages` pages of each kind."""
    full, window = page_byte_sizes(spec, page_tokens, dtype)
    layout = KVLayout(
        page_tokens=page_tokens,
        window_tokens=spec.window_tokens,
        full_page_bytes=full,
        window_page_bytes=window,
        slab_bytes=choose_slab_bytes(full, window),
        slab_count=0,
    )
    return KVArena(spec, replace(layout, slab_count=sum(slabs_per_kind(layout, pages))), dtype)


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
        self.pages_of_a_kind = tokens // page_tokens + slots + 1
        self.arena = make_arena(spec, page_tokens=page_tokens, pages=self.pages_of_a_kind, dtype=dtype)
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
        free: dict[PageKind, list[int]] = {}
        for kind, count in zip(PageKind, slabs_per_kind(layout, self.pages_of_a_kind), strict=True):
            per_slab = self.arena.pages_per_slab(kind)
            free[kind] = [slab * per_slab + page for slab in slabs[:count] for page in range(per_slab)]
            self.random.shuffle(free[kind])
            del slabs[:count]
        return free

    def step(self, rows: Sequence[tuple[int, Sequence[int]]], *, last_only: bool = False) -> list[Tensor]:
        """rows of (slot, new tokens) -> logits [count, N] of each row, or [1, N] of its last token."""
        spans = []
        for slot, tokens in rows:
            start = self.known[slot]
            self._map(slot, start + len(tokens))
            spans.append((slot, start, len(tokens)))
            self.known[slot] += len(tokens)
        batch = Batch(spans, self.tables[PageKind.FULL], self.tables[PageKind.WINDOW])
        flat = torch.tensor([token for _, tokens in rows for token in tokens])
        hidden = self.decoder.forward(flat, batch, self.arena)
        for slot, _ in rows:
            self._release(slot)
        if last_only:
            return list(self.decoder.logits(hidden[batch.last_tokens]).split(1))
        logits = self.decoder.logits(hidden)
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


def random_texts(vocab: int, lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(vocab) for _ in range(length)] for length in lengths]


def run_interleaved(
    sequences: PagedSequences, texts: list[list[int]], chunks: tuple[int, ...], seed: int = 2
) -> list[Tensor]:
    """Feed all texts, a random subset of the sequences a step, each with a random chunk; results per sequence."""
    generator = random.Random(seed)
    parts: list[list[Tensor]] = [[] for _ in texts]
    while unfinished := [slot for slot, text in enumerate(texts) if sequences.known[slot] < len(text)]:
        chosen = generator.sample(unfinished, generator.randint(1, len(unfinished)))
        rows = []
        for slot in chosen:
            start = sequences.known[slot]
            rows.append((slot, texts[slot][start : start + generator.choice(chunks)]))
        for slot, result in zip(chosen, sequences.step(rows), strict=True):
            parts[slot].append(result)
    return [torch.cat(part) for part in parts]
