"""A device whose memory holds, in place of K/V, what each value was computed from: an oracle of what may be read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from server.cache.kv_cache import Prefix, Reservation, Resume
from server.cache.prefix_tree import Keys
from server.config import KVLayout
from server.step import PageId, PageKind, SlotId

Content = tuple[object, tuple[int, ...]]
"""The namespace and the tokens up to and including a position: all that its K/V depends on."""

SCRATCH = ("scratch", ())
"""What a rebuild leaves outside the window: no query may count on it."""


def layout_of(page_tokens: int, window_tokens: int, slabs: int) -> KVLayout:
    return KVLayout(
        page_tokens=page_tokens,
        window_tokens=window_tokens,
        full_page_bytes=3,
        window_page_bytes=5 if window_tokens else 0,
        slab_bytes=15,
        slab_count=slabs,
    )


class Device:
    """Page tables and pages, of both kinds. A sequence that reads a wrong or missing value fails an assertion."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self.tables: dict[tuple[SlotId, PageKind], dict[int, PageId]] = defaultdict(dict)
        self.memory: dict[tuple[PageKind, PageId], list[Content]] = {}

    def open(self, slot: SlotId) -> None:
        for kind in PageKind:
            self.tables[slot, kind] = {}

    def prepare(self, reservation: Reservation) -> None:
        for move in reservation.moves:
            self.memory[move.kind, move.target] = list(self.memory.get((move.kind, move.source), self._nothing()))
        for write in reservation.writes:
            self.tables[write.slot, write.kind].update(enumerate(write.pages, start=write.first_page))

    def compute(
        self, slot: SlotId, namespace: object, tokens: Sequence[int], start: int, stop: int, resume: Resume
    ) -> None:
        """Positions [start, stop) of the tokens, all of which before `start` are there to be read. Those before the
        resume's cached_tokens are a rebuild: they write no full K/V and read no window."""
        window = self.layout.window_tokens
        for position in range(start):
            assert self._read(slot, PageKind.FULL, position) == (namespace, tuple(tokens[: position + 1]))
        safe_from = max(start, resume.cached_tokens) - window
        if self.layout.has_window and start >= resume.cached_tokens:
            for position in range(max(0, safe_from), start):
                assert self._read(slot, PageKind.WINDOW, position) == (namespace, tuple(tokens[: position + 1]))
        for position in range(start, stop):
            content = (namespace, tuple(tokens[: position + 1]))
            if position >= resume.cached_tokens:
                self._write(slot, PageKind.FULL, position, content)
            else:
                assert self._read(slot, PageKind.FULL, position) == content
            if self.layout.has_window:
                exact = position >= resume.cached_tokens - window
                self._write(slot, PageKind.WINDOW, position, content if exact else SCRATCH)

    def _nothing(self) -> list[Content]:
        return [SCRATCH] * self.layout.page_tokens

    def _read(self, slot: SlotId, kind: PageKind, position: int) -> Content:
        page, offset = divmod(position, self.layout.page_tokens)
        return self.memory[kind, self.tables[slot, kind][page]][offset]

    def _write(self, slot: SlotId, kind: PageKind, position: int, content: Content) -> None:
        page, offset = divmod(position, self.layout.page_tokens)
        self.memory.setdefault((kind, self.tables[slot, kind][page]), self._nothing())[offset] = content


def prefix_of(tokens: list[int], prompt: int, layout: KVLayout, namespace: object, marks: Sequence[int] = ()) -> Prefix:
    """Of a sequence whose list of tokens grows; its first `prompt` ones are the prompt."""
    page_tokens = layout.page_tokens

    def keys(first: int, stop: int) -> Keys:
        assert stop * page_tokens <= len(tokens), "keys of tokens that are not known"
        return np.array(tokens[first * page_tokens : stop * page_tokens], dtype=np.int64).reshape(-1, page_tokens)

    return Prefix(
        keys=keys,
        pages=prompt // page_tokens,
        resumable=(prompt - 1) // page_tokens,
        namespace=namespace,
        marks=tuple(marks),
    )
