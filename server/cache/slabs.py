"""One arena for both kinds of page: slabs that hold one kind at a time and change kind when they are empty."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np

from server.config import KVLayout
from server.step import PageId, PageKind

NOT_OF_THIS_KIND = np.iinfo(np.int64).max


class _Slab:
    """One slab. kind None: empty, belongs to nobody. `free` is a stack of free offsets, `taken` marks the others."""

    __slots__ = ("free", "kind", "taken")

    def __init__(self) -> None:
        self.kind: PageKind | None = None
        self.free: list[int] = []
        self.taken = bytearray()

    @property
    def used(self) -> int:
        return len(self.taken) - len(self.free)

    def become(self, kind: PageKind | None, pages: int) -> None:
        self.kind = kind
        self.free = list(range(pages - 1, -1, -1))
        self.taken = bytearray(pages)

    def take(self, count: int) -> list[int]:
        """So many free offsets, or all there are."""
        taken = self.free[-count:][::-1]
        del self.free[-count:]
        for offset in taken:
            self.taken[offset] = 1
        return taken

    def give_back(self, offset: int) -> None:
        self.taken[offset] = 0
        self.free.append(offset)


class SlabAllocator:
    """Hands out page ids. Page p of a kind is page p % n of slab p // n, n pages of that kind to a slab.

    Pages come from the lowest-numbered partly filled slab of their kind, then from the lowest empty slab: so a
    sequence that runs alone never opens a new slab while one of its kind has room, and the high slabs run empty first.

    Owner: KVCache, on the event-loop thread. Allocation and release cost O(log slabs).
    """

    def __init__(self, layout: KVLayout) -> None:
        self._pages_per_slab = {
            PageKind.FULL: layout.full_pages_per_slab,
            PageKind.WINDOW: layout.window_pages_per_slab,
        }
        self._page_bytes = {PageKind.FULL: layout.full_page_bytes, PageKind.WINDOW: layout.window_page_bytes}
        self._slab_bytes = layout.slab_bytes
        self._slabs = [_Slab() for _ in range(layout.slab_count)]
        self._empty = list(range(layout.slab_count))
        # Heaps of slabs that had a free page when they were queued; an entry that has gone stale is dropped when met.
        self._partial: dict[PageKind, list[int]] = {PageKind.FULL: [], PageKind.WINDOW: []}
        self._queued: dict[PageKind, set[int]] = {PageKind.FULL: set(), PageKind.WINDOW: set()}
        self._used = {PageKind.FULL: 0, PageKind.WINDOW: 0}
        # Pages in use of each slab of a kind; NOT_OF_THIS_KIND in the others.
        self._used_in = {kind: np.full(layout.slab_count, NOT_OF_THIS_KIND, dtype=np.int64) for kind in PageKind}
        self._slabs_of = {PageKind.FULL: 0, PageKind.WINDOW: 0}

    def __repr__(self) -> str:
        full, window = self._slabs_of[PageKind.FULL], self._slabs_of[PageKind.WINDOW]
        return f"<SlabAllocator {full} full + {window} window + {len(self._empty)} empty slabs>"

    def pages_per_slab(self, kind: PageKind) -> int:
        return self._pages_per_slab[kind]

    def used_pages(self, kind: PageKind) -> int:
        return self._used[kind]

    def used_bytes(self, kind: PageKind) -> int:
        return self._used[kind] * self._page_bytes[kind]

    def stranded_bytes(self) -> int:
        """Bytes of slabs in use that no page uses: what partly filled slabs and uneven page sizes lose."""
        in_use = len(self._slabs) - len(self._empty)
        return in_use * self._slab_bytes - sum(self.used_bytes(kind) for kind in PageKind)

    def fits_packed(self, *, full: int, window: int) -> bool:
        """Whether so many more pages of both kinds can be had together once used pages are moved close together."""
        slabs = 0
        for kind, more in ((PageKind.FULL, full), (PageKind.WINDOW, window)):
            pages = self._used[kind] + more
            if pages:
                if not self._pages_per_slab[kind]:
                    return False
                slabs += -(-pages // self._pages_per_slab[kind])
        return slabs <= len(self._slabs)

    def fits(self, *, full: int, window: int) -> bool:
        """Whether so many more pages of both kinds can be had together as things lie now."""
        return self._slabs_needed(PageKind.FULL, full) + self._slabs_needed(PageKind.WINDOW, window) <= len(self._empty)

    def allocate(self, kind: PageKind, count: int) -> list[PageId]:
        """So many free pages; fewer when neither slabs of this kind nor empty slabs have more."""
        pages: list[PageId] = []
        per_slab = self._pages_per_slab[kind]
        while len(pages) < count:
            index = self._lowest_partial(kind)
            if index is None:
                if not self._empty or not per_slab:
                    break
                index = heapq.heappop(self._empty)
                self._slabs[index].become(kind, per_slab)
                self._slabs_of[kind] += 1
                self._used_in[kind][index] = 0
                self._queue(kind, index)
            first = index * per_slab
            taken = self._slabs[index].take(count - len(pages))
            self._used_in[kind][index] += len(taken)
            pages += [PageId(first + offset) for offset in taken]
        self._used[kind] += len(pages)
        return pages

    def release(self, kind: PageKind, pages: Iterable[PageId]) -> None:
        """Give pages back; a slab whose last page comes back belongs to nobody again."""
        per_slab, queued = self._pages_per_slab[kind], self._queued[kind]
        returned: dict[int, int] = {}
        for page in pages:
            index, offset = divmod(page, per_slab)
            slab = self._slabs[index]
            assert slab.kind is kind and slab.taken[offset], f"{kind.name} page {page} is not in use"
            slab.give_back(offset)
            returned[index] = returned.get(index, 0) + 1
        for index, count in returned.items():
            self._used[kind] -= count
            slab = self._slabs[index]
            if slab.used:
                self._used_in[kind][index] -= count
                if index not in queued:
                    self._queue(kind, index)
            else:
                self._give_up(index)

    def evacuate(self, kind: PageKind) -> list[tuple[PageId, PageId]] | None:
        """Empty the slab of a kind that is cheapest to empty into the others: (page, its new page) for each of its
        pages, all of them moved in the books. None if the others have no room for it.

        Looks at every slab, O(slabs): only for when memory is short.
        """
        per_slab = self._pages_per_slab[kind]
        if not per_slab or self._slabs_of[kind] * per_slab - self._used[kind] < per_slab:
            return None
        leaving = int(self._used_in[kind].argmin())
        slab = self._slabs[leaving]
        sources = [PageId(leaving * per_slab + offset) for offset in range(per_slab) if slab.taken[offset]]
        slab.free.clear()  # full in the eyes of allocate, so that no page moves to where it comes from
        targets = self.allocate(kind, len(sources))
        assert len(targets) == len(sources), "the other slabs have room"
        self._used[kind] -= len(sources)
        self._give_up(leaving)
        return list(zip(sources, targets, strict=True))

    def check(self) -> None:
        """Assert that every count equals what the slabs say."""
        used = {PageKind.FULL: 0, PageKind.WINDOW: 0}
        slabs_of = {PageKind.FULL: 0, PageKind.WINDOW: 0}
        empty = set()
        for index, slab in enumerate(self._slabs):
            if slab.kind is None:
                assert not slab.free and not slab.taken
                empty.add(index)
                continue
            assert len(slab.taken) == self._pages_per_slab[slab.kind]
            assert sorted(slab.free) == [i for i, taken in enumerate(slab.taken) if not taken]
            assert slab.used > 0, "an empty slab must belong to nobody"
            assert not slab.free or index in self._queued[slab.kind], "a slab with room must be found by allocate"
            assert self._used_in[slab.kind][index] == slab.used
            used[slab.kind] += slab.used
            slabs_of[slab.kind] += 1
        for kind in PageKind:
            of_kind = self._used_in[kind] < NOT_OF_THIS_KIND
            assert [slab.kind is kind for slab in self._slabs] == of_kind.tolist()
        assert used == self._used and slabs_of == self._slabs_of
        assert empty == set(self._empty) and len(self._empty) == len(empty)
        for kind in PageKind:
            assert sorted(self._partial[kind]) == sorted(self._queued[kind])

    def _give_up(self, index: int) -> None:
        """A slab is empty: it belongs to nobody."""
        slab = self._slabs[index]
        assert slab.kind is not None
        self._used_in[slab.kind][index] = NOT_OF_THIS_KIND
        self._slabs_of[slab.kind] -= 1
        slab.become(None, 0)
        heapq.heappush(self._empty, index)

    def _queue(self, kind: PageKind, index: int) -> None:
        if index not in self._queued[kind]:
            self._queued[kind].add(index)
            heapq.heappush(self._partial[kind], index)

    def _lowest_partial(self, kind: PageKind) -> int | None:
        partial = self._partial[kind]
        while partial:
            slab = self._slabs[partial[0]]
            if slab.kind is kind and slab.free:
                return partial[0]
            self._queued[kind].discard(heapq.heappop(partial))
        return None

    def _slabs_needed(self, kind: PageKind, pages: int) -> int:
        per_slab = self._pages_per_slab[kind]
        beyond = pages - (self._slabs_of[kind] * per_slab - self._used[kind])
        if beyond <= 0:
            return 0
        return -(-beyond // per_slab) if per_slab else len(self._slabs) + 1
