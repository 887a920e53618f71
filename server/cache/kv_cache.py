"""Which pages each running sequence holds, of both kinds, from admission to its end, and which stay as cache."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from server.cache.eviction import EvictionQueue, Rate
from server.cache.prefix_tree import NO_PAGE, Keys, Node, PrefixTree, Snapshot, WindowPage
from server.cache.retention import Ending, Prices, Reuse, crossing, tip
from server.cache.return_history import ReturnHistory
from server.cache.slabs import SlabAllocator
from server.cache.waiting_index import WaitingIndex
from server.config import KVLayout
from server.rebuild import RebuildShape
from server.step import PageId, PageKind, PageMove, SequenceId, SlotId, StepId, TableWrite

LEAST_TRIM_PAGES = 16
"""A run gives up at least so many pages at a time: a page at a time would be as much bookkeeping for each."""


class KeySource(Protocol):
    """The keys of a sequence's pages, as far as its tokens are known."""

    def __call__(self, first: int, stop: int) -> Keys:
        """Of pages [first, stop)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """What a sequence brings to be looked up and kept by. pages: whole pages of the prompt; resumable: how many of them
    may be skipped, so that a token is left to compute. marks: points, in pages, where somebody is known to come back
    (the ends of turns and of the system text); `resumable` is always one. kept_pages: how many pages may stay as
    cache; all that are ever computed if None. turn: which of its conversation the prompt is, from 1; added_tokens: how
    many tokens it has beyond the turn before.
    """

    keys: KeySource
    pages: int
    resumable: int
    namespace: Hashable = None
    marks: tuple[int, ...] = ()
    kept_pages: int | None = None
    turn: int = 1
    added_tokens: int = 0


@dataclass(slots=True)
class _Row:
    """Pages of one sequence. Logical page i has full[i]; its window page is window[i - window_first], or released.

    window_first <= len(full), and len(window) == len(full) - window_first when the model has window layers, but while a
    window is rebuilt: then window pages are fewer. Full pages before `tip`'s end belong to the tree; others and all
    window pages are held by the row. marks: points where a snapshot is to be taken, ascending. exact_from: the first
    position whose window K/V is exact. rewrites: spans of pages whose table entries the device does not know yet.
    """

    slot: SlotId
    full: list[PageId] = field(default_factory=list)
    window: list[PageId] = field(default_factory=list)
    window_first: int = 0
    prefix: Prefix | None = None
    tip: Node | None = None
    marks: list[int] = field(default_factory=list)
    exact_from: int = 0
    rewrites: list[tuple[PageKind, int, int]] = field(default_factory=list)

    def pages(self, kind: PageKind) -> list[PageId]:
        return self.full if kind is PageKind.FULL else self.window

    def first(self, kind: PageKind) -> int:
        """The logical page of the first entry of pages(kind)."""
        return 0 if kind is PageKind.FULL else self.window_first

    def index(self, kind: PageKind, page: PageId, cached_at: int | None) -> int | None:
        """Where a page is in pages(kind), if it is. cached_at: the logical page that it is in the tree, if that has it;
        long prefixes are not searched."""
        pages = self.pages(kind)
        if cached_at is not None:
            index = cached_at - self.first(kind)
            return index if 0 <= index < len(pages) and pages[index] == page else None
        start = self.cached if kind is PageKind.FULL else 0
        try:
            return pages.index(page, start)
        except ValueError:
            return None

    @property
    def cached(self) -> int:
        """How many of its first pages are in the tree."""
        return self.tip.stop if self.tip is not None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where a sequence begins. Positions [start, cached_tokens) have their full K/V and are run again only to get their
    window back; saved_tokens is what need not be computed, with that work taken off."""

    start: int = 0
    cached_tokens: int = 0
    saved_tokens: float = 0.0


NOTHING_CACHED = Resume()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePolicy:
    """What is kept and how. rebuild: a prefix whose window is gone is resumed by rebuilding it. branches: a snapshot is
    taken where a path is seen to branch. spacing_tokens: and every so many tokens, never if 0; None follows from the
    model's prices. knows_reuse: turns and endings count; otherwise the longest unused goes first."""

    rebuild: bool = True
    branches: bool = True
    spacing_tokens: int | None = None
    knows_reuse: bool = True


class KVCache:
    """Owner of the arena's bookkeeping, on the event-loop thread. Knows ids, never bytes.

    A running sequence holds a full page for every `page_tokens` positions, and window pages only where a future query
    can still look: from position `committed - W` on. Pages that a step in flight may read or write wait for its commit
    (quarantine); others go back at once. So no byte that a step in flight touches ever gets another owner.

    Whole pages enter the prefix tree when they are committed, and stay there as cache until memory is needed. A window
    page may be held by several at once, rows and the tree: it goes back with the last of them.
    """

    def __init__(
        self, layout: KVLayout, *, rebuild: RebuildShape | None = None, policy: CachePolicy | None = None
    ) -> None:
        self.layout = layout
        self._policy = policy or CachePolicy()
        snapshot_pages = self.pages_for(layout.window_tokens) if layout.has_window else 0
        self._prices = Prices(
            page_tokens=layout.page_tokens,
            snapshot_pages=snapshot_pages,
            full_page_bytes=layout.full_page_bytes,
            window_page_bytes=layout.window_page_bytes,
            rebuild=rebuild if rebuild is not None and self._policy.rebuild else NO_REBUILD,
        )
        given = self._policy.spacing_tokens
        self._spacing_tokens = self._prices.spacing_tokens if given is None else given
        self._slabs = SlabAllocator(layout)
        self._tree = PrefixTree(snapshot_pages)
        span_tokens = self._prices.rebuild.span_tokens
        forever = layout.has_window and not span_tokens
        self.waiting: WaitingIndex[SequenceId] = WaitingIndex(
            self._tree, self._saved_tokens, None if forever else self.pages_for(span_tokens)
        )
        """Who waits to be opened, by what would be saved for each; see `expect`."""
        self._history = ReturnHistory()
        self._queue = EvictionQueue(self._history.rate if self._policy.knows_reuse else _recency)
        self._rows: dict[SequenceId, _Row] = {}
        # Steps in flight, oldest first, each with what waits for its commit: pages, and paths that are still read.
        self._quarantine: OrderedDict[StepId, list[tuple[PageKind, PageId] | Node]] = OrderedDict()
        self._claims: dict[PageId, int] = {}  # of window pages with several holders, those beyond the first
        self.evicted = {PageKind.FULL: 0, PageKind.WINDOW: 0}
        self.rebuilt_tokens = 0

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
        """Whether so many more pages can be had, evicting what nobody uses and moving pages if need be."""
        idle = self._idle_pages()
        return self._slabs.fits_packed(full=demand.full - idle.full, window=demand.window - idle.window)

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
        """Share of the arena's bytes in pages of this kind that sequences hold."""
        idle = self._idle_pages()
        full = kind is PageKind.FULL
        idle_bytes = idle.full * self.layout.full_page_bytes if full else idle.window * self.layout.window_page_bytes
        return (self._slabs.used_bytes(kind) - idle_bytes) / (self.layout.slab_bytes * self.layout.slab_count)

    def idle_usage(self) -> float:
        """Share of the arena's bytes that is cache and can be had at once."""
        idle = self._idle_pages()
        idle_bytes = idle.full * self.layout.full_page_bytes + idle.window * self.layout.window_page_bytes
        return idle_bytes / (self.layout.slab_bytes * self.layout.slab_count)

    def stranded_bytes(self) -> int:
        return self._slabs.stranded_bytes()

    def held_pages(self, kind: PageKind) -> int:
        """Pages of this kind that sequences hold, quarantine not counted."""
        return len({page for row in self._rows.values() for page in row.pages(kind)})

    def cached_pages(self, kind: PageKind) -> int:
        """Pages of this kind that the prefix tree has, used or not."""
        return self._tree.pages[kind]

    def known_pages(self, prefix: Prefix) -> int:
        """How many pages of a prefix are cached, whether they can be resumed or not."""
        return self._tree.match(self._tree.root(prefix.namespace), prefix.keys(0, prefix.pages)).pages

    def shared_pages(self, prefix: Prefix) -> int:
        """How many full pages of a prefix are cached and in the path of somebody who runs: to begin it takes none of
        these."""
        if not self._tree.has(prefix.namespace):
            return 0
        pages = min(prefix.pages, prefix.resumable)
        known = self._tree.match(self._tree.root(prefix.namespace), prefix.keys(0, pages))
        shared = next((node.stop for node in known.node.path() if node.locks), 0)
        return min(shared, known.pages)

    def pages_of(self, sequence: SequenceId, kind: PageKind) -> dict[int, PageId]:
        """Logical page -> page id of what a sequence holds."""
        row = self._rows[sequence]
        return dict(enumerate(row.pages(kind), start=row.first(kind)))

    # --- who waits ------------------------------------------------------------------------------------------------

    def expect(self, sequence: SequenceId, base: float, prefix: Prefix | None, queue: Hashable = None) -> None:
        """A sequence waits in a queue, to be opened with this prefix; its key is `base` less what is saved for it."""
        if prefix is None:
            self.waiting.add(sequence, base, _NO_KEYS, queue=queue)
        else:
            keys = prefix.keys(0, min(prefix.pages, prefix.resumable))
            self.waiting.add(sequence, base, keys, namespace=prefix.namespace, queue=queue)

    def _saved_tokens(self, node: Node, point: int) -> float:
        """What need not be computed if a path is resumed after so many pages; see Resume."""
        tokens = point * self.layout.page_tokens
        if not point or not self.layout.has_window:
            return tokens
        safe = self._tree.deepest_snapshot(node, point)
        safe_tokens = safe.point * self.layout.page_tokens if safe is not None else 0
        if self._prices.rebuild is NO_REBUILD:
            return safe_tokens
        return tokens - self._prices.rebuild.work_tokens(tokens - safe_tokens)

    # --- the life of a sequence -----------------------------------------------------------------------------------

    def open(self, sequence: SequenceId, slot: SlotId, prefix: Prefix | None = None, now_s: float = 0.0) -> Resume:
        """Begin a sequence in a slot, with what is cached of its prefix. Without one, nothing of it is kept either."""
        assert sequence not in self._rows, f"sequence {sequence} is already open"
        row = self._rows[sequence] = _Row(slot=slot, prefix=prefix)
        if prefix is None:
            return NOTHING_CACHED
        known = self._tree.match(self._tree.root(prefix.namespace), prefix.keys(0, prefix.pages))
        point = min(known.pages, prefix.resumable)
        safe = self._tree.deepest_snapshot(known.node, point) if self.layout.has_window else None
        safe_pages = safe.point if safe is not None else 0
        if self.layout.has_window and self._prices.rebuild is NO_REBUILD:
            point = safe_pages
        crossed = self._cut(known.node, min(known.pages, prefix.resumable))
        branches = crossed.stop if crossed.children else 0
        row.tip = self._cut(crossed, point)
        self._lock(row.tip, now_s)
        self._note_use(crossed, now_s)
        row.full = [PageId(page) for page in self._tree.full_pages(row.tip, 0, point).tolist()]
        if row.full:
            row.rewrites.append((PageKind.FULL, 0, point))
        resume = self._resume(row, point, safe, now_s)
        row.marks = self._marks(prefix, branches if self._policy.branches else 0, resume)
        return resume

    def _note_use(self, node: Node, now_s: float) -> None:
        """Somebody goes on from its end."""
        if node.returned_s is not None:
            self._history.note(node.reuse, now_s - node.returned_s, returned=True)
        node.uses += 1
        node.returned_s = now_s
        node.reuse = crossing(node.uses)
        snapshot = self._tree.snapshot_at(node, node.stop)
        if snapshot is not None:
            snapshot.reuse = node.reuse
            self._offer_snapshot(snapshot)

    def _cut(self, node: Node, pages: int) -> Node:
        """The node that ends after so many pages of the path; the root for none."""
        if not pages:
            while node.parent is not None:
                node = node.parent
            return node
        return self._tree.cut(node, pages)

    def _resume(self, row: _Row, point: int, safe: Snapshot | None, now_s: float) -> Resume:
        """Give the row the window before its resume point: that of a snapshot, or what it takes to rebuild it."""
        page_tokens = self.layout.page_tokens
        tokens = point * page_tokens
        safe_tokens = tokens - (safe.point * page_tokens if safe is not None else 0)
        if not self.layout.has_window or not tokens:
            return Resume(start=tokens, cached_tokens=tokens, saved_tokens=tokens)
        row.exact_from = max(0, tokens - self.layout.window_tokens)
        work = self._prices.rebuild.work_tokens(safe_tokens)
        start = tokens - min(safe_tokens, self._prices.rebuild.span_tokens)
        row.window_first = start // page_tokens
        self.rebuilt_tokens += tokens - start
        if safe is not None and start == safe.point * page_tokens:
            row.window = self._tree.window_pages(safe)
            row.window_first = safe.point - len(row.window)
            for page in row.window:
                self._claims[page] = self._claims.get(page, 0) + 1
            row.rewrites.append((PageKind.WINDOW, row.window_first, safe.point))
        if safe is not None and not safe_tokens:
            safe.last_used_s = now_s
            self._offer_snapshot(safe)
        return Resume(start=start, cached_tokens=tokens, saved_tokens=tokens - work)

    def _marks(self, prefix: Prefix, branch: int, resume: Resume) -> list[int]:
        """Where snapshots are to be taken."""
        if not self.layout.has_window:
            return []
        marks = {*prefix.marks, branch, prefix.resumable}
        if self._spacing_tokens:
            spacing = max(1, self._spacing_tokens // self.layout.page_tokens)
            marks.update(range(spacing, prefix.pages, spacing))
        first = resume.cached_tokens // self.layout.page_tokens
        return sorted(mark for mark in marks if mark and first <= mark <= prefix.resumable)

    def reserve(self, sequence: SequenceId, stop: int, now_s: float = 0.0) -> Reservation:
        """Make sure that positions [0, stop) have full pages, and window pages where those are not yet released.

        What is cached and used by nobody is evicted as needed. Pages are moved only while no step is in flight: their
        old places would have to wait for it.
        """
        row = self._rows[sequence]
        more = max(0, self.pages_for(stop) - len(row.full))
        window_stop = row.window_first + len(row.window)
        window_more = max(0, self.pages_for(stop) - window_stop) if self.layout.has_window else 0
        if not more and not window_more:
            return Reservation(granted=True, writes=self._rewrites(row)) if row.rewrites else PAGES_ARE_THERE
        if not self._make_room(full=more, window=window_more, now_s=now_s):
            return Reservation(granted=False)
        moves: list[PageMove] = []
        writes_made: list[TableWrite] = []
        while not self._slabs.fits(full=more, window=window_more):
            if self._quarantine:
                return Reservation(granted=False)
            self._empty_a_slab(moves, writes_made)
        first = len(row.full)
        row.full += self._allocate(PageKind.FULL, more)
        row.window += self._allocate(PageKind.WINDOW, window_more)
        row.rewrites += [
            (PageKind.FULL, first, first + more),
            (PageKind.WINDOW, window_stop, window_stop + window_more),
        ]
        writes_made += self._rewrites(row)
        return Reservation(granted=True, moves=tuple(moves), writes=tuple(writes_made))

    def commit(self, sequence: SequenceId, computed_tokens: int, now_s: float = 0.0) -> None:
        """Keep whole pages, take the snapshots that are due, and release the window pages that no query at position
        computed_tokens or later can see. They go back at once: what is in flight of this sequence begins there."""
        row = self._rows[sequence]
        if row.tip is not None:
            self._keep(row, computed_tokens // self.layout.page_tokens, now_s)
        keep_from = max(0, computed_tokens - self.layout.window_tokens) // self.layout.page_tokens
        dead = min(keep_from - row.window_first, len(row.window))
        if dead > 0:
            self._release(PageKind.WINDOW, row.window[:dead])
            del row.window[:dead]
            row.window_first += dead

    def close(
        self,
        sequence: SequenceId,
        last_step: StepId | None,
        now_s: float = 0.0,
        ending: Ending = Ending.UNKNOWN,
    ) -> None:
        """End a sequence, however it ended. What is in the tree stays there as cache; the rest goes back. Both after
        the last step that has a row of it."""
        row = self._rows.pop(sequence)
        waiting = None if last_step is None else self._quarantine.get(last_step)
        if row.tip is not None:
            self._note_ending(row, ending, now_s)
            if waiting is None:
                self._unlock(row.tip)
            else:
                waiting.append(row.tip)
        for kind in PageKind:
            pages = row.full[row.cached :] if kind is PageKind.FULL else row.window
            if waiting is None:
                self._release(kind, pages)
            else:
                waiting += ((kind, page) for page in pages)

    def flush(self) -> None:
        """Forget everything that nobody uses."""
        for snapshot in [snapshot for node in self._tree.nodes() for snapshot in node.snapshots.values()]:
            self._evict_snapshot(snapshot)
        for node in reversed(list(self._tree.nodes())):  # children before their parents
            if not node.children and not node.locks and node.full.size:
                self._evict_run(node, len(node.full), 0.0)
        self._queue.compact()

    # --- steps in flight ------------------------------------------------------------------------------------------

    @property
    def steps_in_flight(self) -> int:
        return len(self._quarantine)

    def begin_step(self, step: StepId) -> None:
        """The step is handed over: pages of its sequences wait for its end."""
        self._quarantine[step] = []

    def end_step(self, step: StepId) -> None:
        """The step is over; steps end in the order they began."""
        oldest, waiting = self._quarantine.popitem(last=False)
        assert oldest == step, f"step {step} ended before step {oldest}"
        for each in waiting:
            if isinstance(each, Node):
                self._unlock(each)
            else:
                self._release(each[0], [each[1]])

    def check(self) -> None:
        """Assert that slabs, rows, tree and quarantine account for every page."""
        self._slabs.check()
        self._tree.check()
        holders: dict[PageKind, Counter[PageId]] = {kind: Counter() for kind in PageKind}
        locks: Counter[int] = Counter()
        for row in self._rows.values():
            assert row.cached <= len(row.full)
            assert row.tip is None or self._tree.full_pages(row.tip, 0, row.cached).tolist() == row.full[: row.cached]
            holders[PageKind.FULL].update(row.full[row.cached :])
            holders[PageKind.WINDOW].update(row.window)
            if row.tip is not None:
                locks.update(id(node) for node in row.tip.path())
        for waiting in self._quarantine.values():
            for each in waiting:
                if isinstance(each, Node):
                    locks.update(id(node) for node in each.path())
                else:
                    holders[each[0]][each[1]] += 1
        for node in self._tree.nodes():
            assert node.locks == locks[id(node)], "a path is held that nobody reads, or read that nobody holds"
            holders[PageKind.FULL].update(node.full.tolist())
            holders[PageKind.WINDOW].update(node.window[node.window != NO_PAGE].tolist())
            assert (node.queued is not None) == (not node.locks and not node.children)
        for kind in PageKind:
            assert len(holders[kind]) == self._slabs.used_pages(kind), f"{kind.name} pages leaked"
        assert max(holders[PageKind.FULL].values(), default=1) == 1, "a full page has two owners"
        beyond = {page: count - 1 for page, count in holders[PageKind.WINDOW].items() if count > 1}
        assert beyond == self._claims

    # --- the tree -------------------------------------------------------------------------------------------------

    def _keep(self, row: _Row, done: int, now_s: float) -> None:
        """Whole pages [.., done) enter the tree, and snapshots are taken at the marks among them."""
        assert row.tip is not None and row.prefix is not None
        first = row.cached
        if row.prefix.kept_pages is not None:
            done = min(done, row.prefix.kept_pages)
        if done > first:
            tip, full = row.tip, row.full[first:done]
            keys = row.prefix.keys(first, done)
            self._queue.withdraw(tip)
            end, same = self._tree.extend(tip, keys, full, may_grow=tip.locks == 1 and not tip.is_root)
            row.tip = end
            self._lock_between(end, tip, now_s)
            if same:
                self._share(row, first, first + same)
        while row.marks and row.marks[0] <= done:
            point = row.marks.pop(0)
            if self._tree.snapshot_at(row.tip, point) is None:
                self._snapshot(row, point, now_s)

    def _share(self, row: _Row, first: int, stop: int) -> None:
        """Somebody else computed the same pages meanwhile: the row reads those, and its own go back."""
        assert row.tip is not None
        own = row.full[first:stop]
        row.full[first:stop] = [PageId(page) for page in self._tree.full_pages(row.tip, first, stop).tolist()]
        row.rewrites.append((PageKind.FULL, first, stop))
        if self._quarantine:  # the last step in flight may still read them
            self._quarantine[next(reversed(self._quarantine))] += ((PageKind.FULL, page) for page in own)
        else:
            self._release(PageKind.FULL, own)

    def _snapshot(self, row: _Row, point: int, now_s: float) -> None:
        assert row.tip is not None and row.prefix is not None
        first = max(0, point - self._tree.snapshot_pages)
        if first < row.window_first or point > row.window_first + len(row.window):
            return  # the point was passed before it was known
        page_tokens = self.layout.page_tokens
        offered = [
            WindowPage(
                row.window[page - row.window_first], min(page_tokens, max(0, row.exact_from - page * page_tokens))
            )
            for page in range(first, point)
        ]
        at_end = point == row.prefix.resumable
        holder = self._tree.cut(row.tip, point) if not at_end else row.tip
        reuse = (
            tip(row.prefix.turn, Ending.UNKNOWN, row.prefix.added_tokens) if at_end else crossing(max(1, holder.uses))
        )
        self._release(PageKind.WINDOW, self._tree.take_snapshot(row.tip, point, offered, now_s, reuse))
        for each in offered:
            if each.taken:
                self._claims[each.page] = self._claims.get(each.page, 0) + 1
        snapshot = self._tree.snapshot_at(row.tip, point)
        assert snapshot is not None
        self._offer_snapshot(snapshot)

    def _note_ending(self, row: _Row, ending: Ending, now_s: float) -> None:
        assert row.tip is not None and row.prefix is not None
        for node in row.tip.path():
            node.last_used_s = now_s
        row.tip.reuse, row.tip.returned_s = tip(row.prefix.turn, ending, row.prefix.added_tokens), now_s
        point = row.prefix.resumable
        end = self._tree.snapshot_at(row.tip, point) if row.cached >= point else None
        if end is not None and not end.node.children:
            end.last_used_s, end.reuse = now_s, row.tip.reuse
            self._offer_snapshot(end)

    def _lock(self, node: Node, now_s: float) -> None:
        self._tree.lock(node)
        for each in node.path():
            each.last_used_s = now_s
            self._queue.withdraw(each)

    def _lock_between(self, end: Node, above: Node, now_s: float) -> None:
        """The path of a row became longer."""
        self._tree.lock_between(end, above)
        node = end
        while node is not above:
            node.last_used_s = now_s
            self._queue.withdraw(node)
            assert node.parent is not None
            node = node.parent

    def _unlock(self, node: Node) -> None:
        self._tree.lock(node, -1)
        if not node.is_root and not node.locks and not node.children:
            self._offer_leaf(node)

    # --- making room ----------------------------------------------------------------------------------------------

    def _idle_pages(self) -> PageDemand:
        """What could be evicted: cached and in nobody's path."""
        full, window = self._tree.pages[PageKind.FULL], self._tree.pages[PageKind.WINDOW]
        return PageDemand(full=full - self._tree.locked_pages, window=max(0, window - len(self._claims)))

    def _make_room(self, *, full: int, window: int, now_s: float) -> bool:
        """Evict what is worth least until so many pages more can be had; False if even everything is not enough."""
        while not self._slabs.fits_packed(full=full, window=window):
            worst = self._queue.worst(now_s)
            if worst is None:
                return False
            if isinstance(worst, Snapshot):
                self._evict_snapshot(worst)
            else:
                assert isinstance(worst, Node)
                self._evict_run(worst, max(LEAST_TRIM_PAGES, full), now_s)
        return True

    def _evict_snapshot(self, snapshot: Snapshot) -> None:
        self._queue.withdraw(snapshot)
        pages = self._tree.drop_snapshot(snapshot)
        self.evicted[PageKind.WINDOW] += len(pages)
        self._release(PageKind.WINDOW, pages)
        if snapshot.node.queued is not None:  # a leaf is worth less without it
            self._offer_leaf(snapshot.node)

    def _evict_run(self, leaf: Node, pages: int, now_s: float) -> None:
        parent, keep = leaf.parent, len(leaf.full) - pages
        assert parent is not None
        if leaf.returned_s is not None:
            self._history.note(leaf.reuse, now_s - leaf.returned_s, returned=False)
            leaf.returned_s = None
        freed = self._tree.trim(leaf, pages)
        for snapshot in freed.snapshots:
            self._queue.withdraw(snapshot)
        self._release(PageKind.FULL, freed.full)
        self._release(PageKind.WINDOW, freed.window)
        self.evicted[PageKind.FULL] += len(freed.full)
        self.evicted[PageKind.WINDOW] += len(freed.window)
        if keep > 0:
            self._offer_leaf(leaf)
        else:
            self._queue.withdraw(leaf)
            merged = self._tree.merge(parent)
            if merged is not None and merged.queued is not None:
                self._offer_leaf(merged)
            elif not parent.is_root and not parent.children and not parent.locks:
                self._offer_leaf(parent)

    def _offer_leaf(self, node: Node) -> None:
        density = self._prices.leaf_density(
            len(node.full) * self.layout.page_tokens, is_safe=not self.layout.has_window or bool(node.snapshots)
        )
        if not self._policy.knows_reuse:
            density = 1.0
        self._queue.offer(node, last_used_s=node.last_used_s, density=density, reuse=node.reuse)

    def _offer_snapshot(self, snapshot: Snapshot) -> None:
        below = self._tree.deepest_snapshot(snapshot.node, snapshot.point - 1)
        safe_pages = snapshot.point - (below.point if below is not None else 0)
        density = self._prices.snapshot_density(safe_pages * self.layout.page_tokens)
        if not self._policy.knows_reuse:
            density = 1.0
        self._queue.offer(snapshot, last_used_s=snapshot.last_used_s, density=density, reuse=snapshot.reuse)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _allocate(self, kind: PageKind, count: int) -> list[PageId]:
        pages = self._slabs.allocate(kind, count)
        assert len(pages) == count, "fits() promised pages that allocate() does not have"
        return pages

    def _release(self, kind: PageKind, pages: Iterable[PageId]) -> None:
        if kind is PageKind.WINDOW and self._claims:
            pages = [page for page in pages if not self._disclaim(page)]
        self._slabs.release(kind, pages)

    def _disclaim(self, page: PageId) -> bool:
        """Whether a window page has another holder, who keeps it."""
        claims = self._claims.pop(page, 0)
        if claims > 1:
            self._claims[page] = claims - 1
        return claims > 0

    def _rewrites(self, row: _Row) -> tuple[TableWrite, ...]:
        """Entries that the device has to learn of, as they are now; window pages may have been released meanwhile."""
        writes = []
        for kind, first, stop in row.rewrites:
            first = max(first, row.first(kind))
            pages = tuple(row.pages(kind)[first - row.first(kind) : max(0, stop - row.first(kind))])
            if pages:
                writes.append(TableWrite(slot=row.slot, kind=kind, first_page=first, pages=pages))
        row.rewrites = []
        return tuple(writes)

    def _empty_a_slab(self, moves: list[PageMove], writes: list[TableWrite]) -> None:
        """Move the pages of one slab into others of its kind, so that it can change kind. The old pages are free at
        once: the copies run before the forward pass of the step that may write there."""
        for kind in PageKind:
            moved = self._slabs.evacuate(kind)
            if moved is None:
                continue
            for source, target in moved:
                moves.append(PageMove(kind=kind, source=source, target=target))
                cached_at = self._tree.replace_page(kind, source, target)
                if kind is PageKind.WINDOW and source in self._claims:
                    self._claims[target] = self._claims.pop(source)
                for row in self._rows.values():
                    index = row.index(kind, source, cached_at)
                    if index is not None:
                        row.pages(kind)[index] = target
                        writes.append(
                            TableWrite(slot=row.slot, kind=kind, first_page=row.first(kind) + index, pages=(target,))
                        )
            return
        raise AssertionError("what fits when packed can be packed")


_NO_KEYS: Keys = np.empty((0, 1), dtype=np.int64)
NO_REBUILD = RebuildShape(is_window=(), window_tokens=0, has_mtp=False)


def _recency(reuse: Reuse) -> Rate:
    """As if everybody came back alike: the longest unused is worth the least."""
    return lambda age_s: 1.0 / (1.0 + max(0.0, age_s))
