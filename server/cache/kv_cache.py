"""Which pages each running sequence holds, of both kinds, from admission to its end."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from server.cache.slabs import SlabAllocator
from server.config import KVLayout
from server.step import PageId, PageKind, PageMove, SequenceId, SlotId, StepId, TableWrite


@dataclass(slots=True)
class _Row:
    """Pages of one sequence. Logical page i has full[i]; its window page is window[i - window_first], or released.

    window_first <= len(full), and len(window) == len(full) - window_first when the model has window layers.
    """

    slot: SlotId
    full: list[PageId] = field(default_factory=list)
    window: list[PageId] = field(default_factory=list)
    window_first: int = 0

    def pages(self, kind: PageKind) -> list[PageId]:
        return self.full if kind is PageKind.FULL else self.window

    def first(self, kind: PageKind) -> int:
        """The logical page of the first entry of pages(kind)."""
        return 0 if kind is PageKind.FULL else self.window_first


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """The answer to a wish for pages, with the moves and table entries that granting it takes."""

    granted: bool
    moves: tuple[PageMove, ...] = ()
    writes: tuple[TableWrite, ...] = ()


PAGES_ARE_THERE = Reservation(granted=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageDemand:
    """So many pages of each kind."""

    full: int
    window: int

    def __add__(self, other: PageDemand) -> PageDemand:
        return PageDemand(full=self.full + other.full, window=self.window + other.window)


NO_PAGES = PageDemand(full=0, window=0)


class KVCache:
    """Owner of the arena's bookkeeping, on the event-loop thread. Knows ids, never bytes.

    A running sequence holds a full page for every `page_tokens` positions, and window pages only where a future query
    can still look: from position `committed - W` on. Pages that a step in flight may read or write wait for its commit
    (quarantine); others go back at once. So no byte that a step in flight touches ever gets another owner.
    """

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self._slabs = SlabAllocator(layout)
        self._rows: dict[SequenceId, _Row] = {}
        # Steps in flight, oldest first, each with the pages that wait for its commit.
        self._quarantine: OrderedDict[StepId, list[tuple[PageKind, PageId]]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<KVCache {len(self._rows)} sequences, {self._slabs!r}>"

    # --- questions ------------------------------------------------------------------------------------------------

    def pages_for(self, tokens: int) -> int:
        """Logical pages that hold so many tokens."""
        return -(-tokens // self.layout.page_tokens)

    def peak_demand(self, tokens: int, chunk_tokens: int) -> PageDemand:
        """The most pages a sequence of `tokens` positions ever holds when it is computed in chunks of this size.

        A chunk needs the window pages of W earlier positions and of itself; an interval of n positions touches at
        most ceil((n - 1) / page_tokens) + 1 pages.
        """
        full = self.pages_for(tokens)
        if not self.layout.has_window:
            return PageDemand(full=full, window=0)
        span = self.layout.window_tokens + min(chunk_tokens, tokens)
        return PageDemand(full=full, window=min(full, self.pages_for(span - 1) + 1))

    def missing_demand(self, sequence: SequenceId, computed_tokens: int, tokens: int, chunk_tokens: int) -> PageDemand:
        """What a running sequence will still ask for until `tokens` positions are computed."""
        row = self._rows[sequence]
        peak = self.peak_demand(tokens, min(chunk_tokens, tokens - computed_tokens))
        return PageDemand(full=max(0, peak.full - len(row.full)), window=max(0, peak.window - len(row.window)))

    def fits(self, demand: PageDemand) -> bool:
        """Whether so many more pages can be had, moving pages if need be."""
        return self._slabs.fits_packed(full=demand.full, window=demand.window)

    def usable_tokens(self, limit: int, chunk_tokens: int) -> int:
        """The longest sequence, at most `limit` tokens, that the arena holds when nothing else is in it."""
        fewest, most = 0, limit
        empty = SlabAllocator(self.layout)
        while fewest < most:
            middle = (fewest + most + 1) // 2
            peak = self.peak_demand(middle, chunk_tokens)
            if empty.fits_packed(full=peak.full, window=peak.window):
                fewest = middle
            else:
                most = middle - 1
        return fewest

    def usage(self, kind: PageKind) -> float:
        """Share of the arena's bytes that pages of this kind hold."""
        return self._slabs.used_bytes(kind) / (self.layout.slab_bytes * self.layout.slab_count)

    def stranded_bytes(self) -> int:
        return self._slabs.stranded_bytes()

    def held_pages(self, kind: PageKind) -> int:
        """Pages of this kind that sequences hold, quarantine not counted."""
        return sum(len(row.pages(kind)) for row in self._rows.values())

    def pages_of(self, sequence: SequenceId, kind: PageKind) -> dict[int, PageId]:
        """Logical page -> page id of what a sequence holds."""
        row = self._rows[sequence]
        return dict(enumerate(row.pages(kind), start=row.first(kind)))

    # --- the life of a sequence -----------------------------------------------------------------------------------

    def open(self, sequence: SequenceId, slot: SlotId) -> int:
        """Begin a sequence in a slot; returns how many of its tokens are already computed."""
        assert sequence not in self._rows, f"sequence {sequence} is already open"
        self._rows[sequence] = _Row(slot=slot)
        return 0

    def reserve(self, sequence: SequenceId, stop: int) -> Reservation:
        """Make sure that positions [0, stop) have full pages, and window pages where those are not yet released.

        Pages are moved only while no step is in flight: their old places would have to wait for it.
        """
        row = self._rows[sequence]
        first = len(row.full)
        more = self.pages_for(stop) - first
        if more <= 0:
            return PAGES_ARE_THERE
        window_more = more if self.layout.has_window else 0
        if not self._slabs.fits_packed(full=more, window=window_more):
            return Reservation(granted=False)
        moves: list[PageMove] = []
        writes: list[TableWrite] = []
        while not self._slabs.fits(full=more, window=window_more):
            if self._quarantine:
                return Reservation(granted=False)
            self._empty_a_slab(moves, writes)
        row.full += self._allocate(PageKind.FULL, more)
        writes.append(self._write(row, PageKind.FULL, first))
        if window_more:
            row.window += self._allocate(PageKind.WINDOW, more)
            writes.append(self._write(row, PageKind.WINDOW, first))
        return Reservation(granted=True, moves=tuple(moves), writes=tuple(writes))

    def commit(self, sequence: SequenceId, computed_tokens: int) -> None:
        """Release the window pages that no query at position computed_tokens or later can see. They go back at once:
        what is in flight of this sequence begins there."""
        row = self._rows[sequence]
        keep_from = max(0, computed_tokens - self.layout.window_tokens) // self.layout.page_tokens
        dead = min(keep_from - row.window_first, len(row.window))
        if dead > 0:
            self._release(PageKind.WINDOW, row.window[:dead])
            del row.window[:dead]
            row.window_first += dead

    def close(self, sequence: SequenceId, last_step: StepId | None) -> None:
        """End a sequence, however it ended: everything it holds goes back, after the last step that has a row of it."""
        row = self._rows.pop(sequence)
        waiting = None if last_step is None else self._quarantine.get(last_step)
        for kind in PageKind:
            if waiting is None:
                self._release(kind, row.pages(kind))
            else:
                waiting += ((kind, page) for page in row.pages(kind))

    # --- steps in flight ------------------------------------------------------------------------------------------

    @property
    def steps_in_flight(self) -> int:
        return len(self._quarantine)

    def begin_step(self, step: StepId) -> None:
        """The step is handed over: pages of its sequences wait for its end."""
        self._quarantine[step] = []

    def end_step(self, step: StepId) -> None:
        """The step is over; steps end in the order they began."""
        oldest, pages = self._quarantine.popitem(last=False)
        assert oldest == step, f"step {step} ended before step {oldest}"
        for kind, page in pages:
            self._release(kind, [page])

    def check(self) -> None:
        """Assert that slabs, rows and quarantine account for every page exactly once."""
        self._slabs.check()
        for kind in PageKind:
            pages = [
                page for row in self._rows.values() for page in (row.full if kind is PageKind.FULL else row.window)
            ]
            pages += [page for waiting in self._quarantine.values() for k, page in waiting if k is kind]
            assert len(set(pages)) == len(pages), f"a {kind.name} page has two owners"
            assert len(pages) == self._slabs.used_pages(kind), f"{kind.name} pages leaked"
        for row in self._rows.values():
            assert row.window_first <= len(row.full)
            if self.layout.has_window:
                assert len(row.window) == len(row.full) - row.window_first

    # --- inside ---------------------------------------------------------------------------------------------------

    def _allocate(self, kind: PageKind, count: int) -> list[PageId]:
        pages = []
        for _ in range(count):
            page = self._slabs.allocate(kind)
            assert page is not None, "fits() promised pages that allocate() does not have"
            pages.append(page)
        return pages

    def _release(self, kind: PageKind, pages: list[PageId]) -> None:
        for page in pages:
            self._slabs.release(kind, page)

    def _write(self, row: _Row, kind: PageKind, first: int) -> TableWrite:
        pages = row.pages(kind)[first - row.first(kind) :]
        return TableWrite(slot=row.slot, kind=kind, first_page=first, pages=tuple(pages))

    def _empty_a_slab(self, moves: list[PageMove], writes: list[TableWrite]) -> None:
        """Move the pages of one slab into others of its kind, so that it can change kind. The old pages are free at
        once: the copies run before the forward pass of the step that may write there."""
        for kind in PageKind:
            moved = self._slabs.evacuate(kind)
            if moved is None:
                continue
            owners = self._owners(kind)
            for source, target in moved:
                row, index = owners[source]
                moves.append(PageMove(kind=kind, source=source, target=target))
                row.pages(kind)[index - row.first(kind)] = target
                writes.append(TableWrite(slot=row.slot, kind=kind, first_page=index, pages=(target,)))
            return
        raise AssertionError("what fits when packed can be packed")

    def _owners(self, kind: PageKind) -> dict[PageId, tuple[_Row, int]]:
        return {
            page: (row, index)
            for row in self._rows.values()
            for index, page in enumerate(row.pages(kind), start=row.first(kind))
        }
