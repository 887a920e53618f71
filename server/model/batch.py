"""One step's rows as the layers see them: what all layers share is computed once here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.interface import Kernels, PageGeometry, StepRows, WriteIndex
from server.model.kv_arena import KVArena
from server.rebuild import RebuildShape
from server.step import PageKind


class Batch:
    """Rows of (slot, start, count) and the page tables that they read. Good for one forward pass.

    full_table and window_table [slots, max_pages] int32 on the device map logical pages to page ids; the positions that
    the rows compute must already have their pages. window_table is unused in a model without window layers.

    cached: for each row, before which position the full K/V are there already; such positions are run again for their
    window K/V only. None: there are none in any row.
    """

    def __init__(
        self,
        rows: Sequence[tuple[int, int, int]],
        full_table: Tensor,
        window_table: Tensor,
        *,
        cached: Sequence[int] | None = None,
    ) -> None:
        slots, starts, counts = zip(*rows, strict=True) if rows else ((), (), ())
        self.rows = StepRows(slots=slots, starts=starts, counts=counts)
        self.tables = {PageKind.FULL: full_table, PageKind.WINDOW: window_table}
        device = full_table.device
        if max(counts, default=1) == 1:
            self._slots = torch.tensor(slots, dtype=torch.int64, device=device)
            self.positions = torch.tensor(starts, dtype=torch.int64, device=device)
        else:
            repeats = torch.tensor(counts, device=device)
            self._slots = torch.repeat_interleave(torch.tensor(slots, device=device), repeats)
            ends = torch.cumsum(repeats, 0)
            offset = torch.tensor(starts, device=device) - ends + repeats
            self.positions = torch.repeat_interleave(offset, repeats) + torch.arange(sum(counts), device=device)
        self.cached = tuple(cached or ())
        self._plans: dict[int | None, Any] = {}
        self._writes: dict[PageKind, WriteIndex] = {}

    @property
    def token_count(self) -> int:
        return self.positions.shape[0]

    @property
    def last_tokens(self) -> list[int]:
        """Index of each row's last token among the step's tokens."""
        ends, token = [], -1
        for count in self.rows.counts:
            token += count
            ends.append(token)
        return ends

    @property
    def rebuilds(self) -> bool:
        """Whether a row begins before what is cached of it."""
        return any(start < cached for start, cached in zip(self.rows.starts, self.cached, strict=False))

    def new_full(self) -> Tensor | None:
        """Indices of the tokens whose full K/V are to be written; None for all of them."""
        if not self.rebuilds:
            return None
        counts = torch.tensor(self.rows.counts, device=self.positions.device)
        limits = torch.repeat_interleave(torch.tensor(self.cached, device=self.positions.device), counts)
        return (self.positions >= limits).nonzero()[:, 0]

    def attention_plan(self, kernels: Kernels, arena: KVArena, window_keys: int | None) -> Any:
        if window_keys not in self._plans:
            kind = PageKind.FULL if window_keys is None else PageKind.WINDOW
            geometry = PageGeometry(page_tokens=arena.layout.page_tokens, pages_per_slab=arena.pages_per_slab(kind))
            self._plans[window_keys] = kernels.plan_attention(self.rows, self.tables[kind], geometry, window_keys)
        return self._plans[window_keys]

    def write_index(self, arena: KVArena, kind: PageKind) -> WriteIndex:
        """Where the K/V of a kind go: of all tokens, but in full pages of `new_full` only."""
        if kind not in self._writes:
            page_tokens = arena.layout.page_tokens
            slots, positions = self._slots, self.positions
            if kind is PageKind.FULL and (chosen := self.new_full()) is not None:
                slots, positions = slots[chosen], positions[chosen]
            page_number = positions // page_tokens
            ids = self.tables[kind][slots, page_number].long()
            slab = ids // arena.pages_per_slab(kind)
            self._writes[kind] = WriteIndex(
                slab=slab,
                page=ids - slab * arena.pages_per_slab(kind),
                offset=positions - page_number * page_tokens,
            )
        return self._writes[kind]

    def from_positions(self, firsts: Sequence[int]) -> tuple[Batch, Tensor]:
        """The rows from these positions on, without those of which nothing is left, and where their tokens are in this
        batch."""
        kept, cached, indices, before = [], [], [], 0
        for row, first in enumerate(firsts):
            slot, start, count = self.rows.slots[row], self.rows.starts[row], self.rows.counts[row]
            dropped = min(count, max(0, first - start))
            if dropped < count:
                kept.append((slot, start + dropped, count - dropped))
                cached.append(self.cached[row])
                indices.append(torch.arange(before + dropped, before + count, device=self.positions.device))
            before += count
        smaller = Batch(kept, self.tables[PageKind.FULL], self.tables[PageKind.WINDOW], cached=cached)
        empty = torch.empty(0, dtype=torch.int64, device=self.positions.device)
        return smaller, torch.cat(indices) if indices else empty


@dataclass(frozen=True, slots=True)
class LayerRows:
    """fed: the rows that a layer computes K and V for. out: those that it gives out, for the layer above or the head;
    going: where they are among the fed ones, None for all."""

    fed: Batch
    out: Batch
    going: Tensor | None


def rows_by_layer(batch: Batch, shape: RebuildShape) -> list[LayerRows]:
    """The trapezoid of a rebuild: from each layer on, only the last positions before what is cached go on."""
    if not batch.rebuilds:
        return [LayerRows(batch, batch, None)] * len(shape.fed_tokens)
    views, fed = [], batch
    for layer in range(len(shape.fed_tokens)):
        out_tokens = shape.out_tokens(layer)
        firsts = [max(0, cached - out_tokens) for cached in fed.cached]
        out, going = fed.from_positions(firsts)
        if out.token_count == fed.token_count:
            views.append(LayerRows(fed, fed, None))
        else:
            views.append(LayerRows(fed, out, going))
            fed = out
    return views
