"""One step's rows as the layers see them: what all layers share is computed once here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.interface import Kernels, PageGeometry, StepRows, WriteIndex
from server.model.kv_arena import KVArena
from server.step import PageKind


class Batch:
    """Rows of (slot, start, count) and the page tables that they read. Good for one forward pass.

    full_table and window_table [slots, max_pages] int32 on the device map logical pages to page ids; the positions that
    the rows compute must already have their pages. window_table is unused in a model without window layers.
    """

    def __init__(self, rows: Sequence[tuple[int, int, int]], full_table: Tensor, window_table: Tensor) -> None:
        slots, starts, counts = zip(*rows, strict=True)
        self.rows = StepRows(slots=slots, starts=starts, counts=counts)
        self.tables = {PageKind.FULL: full_table, PageKind.WINDOW: window_table}
        device = full_table.device
        if max(counts) == 1:
            self._slots = torch.tensor(slots, device=device)
            self.positions = torch.tensor(starts, device=device)
        else:
            repeats = torch.tensor(counts, device=device)
            self._slots = torch.repeat_interleave(torch.tensor(slots, device=device), repeats)
            ends = torch.cumsum(repeats, 0)
            offset = torch.tensor(starts, device=device) - ends + repeats
            self.positions = torch.repeat_interleave(offset, repeats) + torch.arange(sum(counts), device=device)
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

    def attention_plan(self, kernels: Kernels, arena: KVArena, window_keys: int | None) -> Any:
        if window_keys not in self._plans:
            kind = PageKind.FULL if window_keys is None else PageKind.WINDOW
            geometry = PageGeometry(page_tokens=arena.layout.page_tokens, pages_per_slab=arena.pages_per_slab(kind))
            self._plans[window_keys] = kernels.plan_attention(self.rows, self.tables[kind], geometry, window_keys)
        return self._plans[window_keys]

    def write_index(self, arena: KVArena, kind: PageKind) -> WriteIndex:
        if kind not in self._writes:
            page_tokens = arena.layout.page_tokens
            page_number = self.positions // page_tokens
            ids = self.tables[kind][self._slots, page_number].long()
            slab = ids // arena.pages_per_slab(kind)
            self._writes[kind] = WriteIndex(
                slab=slab,
                page=ids - slab * arena.pages_per_slab(kind),
                offset=self.positions - page_number * page_tokens,
            )
        return self._writes[kind]
