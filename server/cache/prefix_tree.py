"""Which page-aligned token runs are cached, and behind which of them the window is still there.

A radix tree whose edges are runs of whole pages. A page's key is everything that decides its K/V besides what comes
before it; what decides the K/V of a whole prefix (adapter, tenant) is its namespace, one root each. Keys are compared
themselves, not hashed: a hit is a hit.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from server.cache.retention import Reuse
from server.step import PageId, PageKind

Keys = NDArray[np.int64]
"""[pages, width]: a page's key is a row. Its width is page_tokens in the server, and whatever a simulator likes."""

NODE_PAGES = 1024
"""A run that grows page by page is copied each time, so it grows no longer than this; a longer prefix is a chain."""

NO_PAGE = -1


class Node:
    """Pages [first, stop) of the prefixes that go through it. Full pages it has always, window pages where a snapshot
    keeps them: window[i] is NO_PAGE elsewhere, pins[i] counts the snapshots, and the first inexact[i] positions of that
    page were never computed in full, since no window went back that far.

    locks counts the sequences whose path goes through it. Of its end: uses counts who went on from there, returned_s is
    when somebody last did or ended there, and reuse is what is known of who comes back. Owner: PrefixTree, of all that
    concerns returns KVCache.
    """

    __slots__ = (
        "children",
        "first",
        "full",
        "inexact",
        "keys",
        "last_used_s",
        "locks",
        "namespace",
        "parent",
        "pins",
        "queued",
        "returned_s",
        "reuse",
        "snapshots",
        "uses",
        "window",
    )

    def __init__(self, parent: Node | None, first: int, keys: Keys, full: NDArray[np.int64]) -> None:
        self.parent = parent
        self.namespace: Hashable = None
        self.first = first
        self.keys = keys
        self.full = full
        self.window = np.full(len(full), NO_PAGE, dtype=np.int64)
        self.pins = np.zeros(len(full), dtype=np.int32)
        self.inexact = np.zeros(len(full), dtype=np.int32)
        self.children: dict[bytes, Node] = {}
        self.snapshots: dict[int, Snapshot] = {}
        self.locks = 0
        self.last_used_s = 0.0
        self.reuse = Reuse()
        self.uses = 0
        self.returned_s: float | None = None
        self.queued: object = None
        """What the eviction queue knows it by; see `server.cache.eviction`."""

    def __repr__(self) -> str:
        return f"<Node [{self.first}, {self.stop}) {len(self.children)} children, {self.locks} locks>"

    def keep(self, pages: slice) -> None:
        """Forget the others. Copies: a view would hold the memory of the whole run."""
        self.keys, self.full = self.keys[pages].copy(), self.full[pages].copy()
        self.window, self.pins, self.inexact = (
            self.window[pages].copy(),
            self.pins[pages].copy(),
            self.inexact[pages].copy(),
        )

    @property
    def stop(self) -> int:
        return self.first + len(self.full)

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def path(self) -> Iterator[Node]:
        """From here up to the root, without it."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class Snapshot:
    """The window of a resume point: after page `point` - 1 of `node`'s path. Its pages are pinned in the nodes they
    belong to. Who resumed here holds those pages too, and so keeps them when the snapshot goes."""

    __slots__ = ("last_used_s", "node", "point", "queued", "reuse")

    def __init__(self, node: Node, point: int, now_s: float, reuse: Reuse) -> None:
        self.node = node
        self.point = point
        self.last_used_s = now_s
        self.reuse = reuse
        self.queued: object = None

    def __repr__(self) -> str:
        return f"<Snapshot at page {self.point}>"


@dataclass(frozen=True, slots=True)
class Match:
    """How far the keys are known: `pages` pages, of which the last lie in `node` (the root, if none are)."""

    node: Node
    pages: int


@dataclass(frozen=True, slots=True)
class Freed:
    """Pages that the tree no longer has; who owned them through it owns them alone again."""

    full: list[PageId]
    window: list[PageId]
    snapshots: list[Snapshot]


@dataclass(slots=True)
class WindowPage:
    """A page offered for a snapshot, see Node.inexact. taken: the tree holds it now."""

    page: PageId
    inexact: int = 0
    taken: bool = False


class TreeWatch(Protocol):
    """Is told of every change, when it is done."""

    def extended(self, node: Node, point: int) -> None:
        """Pages were added after `point` pages of a node's path, which had ended there."""

    def cut(self, upper: Node, lower: Node) -> None:
        """A node was split: `upper` is new and has its first pages."""

    def merged(self, upper: Node, lower: Node) -> None:
        """A node became the first part of its only child."""

    def trimmed(self, node: Node) -> None:
        """The last pages of a node went; all of them and the node with them, if it is empty now."""

    def root_forgotten(self, node: Node) -> None:
        """A root had no children left; it may come again as another node."""

    def snapshot_changed(self, node: Node, point: int) -> None:
        """A snapshot came or went after `point` pages of a node's path, of which the last lies in it."""


class NobodyWatches:
    """Is told in vain."""

    def extended(self, node: Node, point: int) -> None:
        pass

    def cut(self, upper: Node, lower: Node) -> None:
        pass

    merged = cut

    def trimmed(self, node: Node) -> None:
        pass

    root_forgotten = trimmed
    snapshot_changed = extended


class PrefixTree:
    """Owner: KVCache, on the event-loop thread. Knows page ids, and neither bytes nor time.

    snapshot_pages: the window pages of a snapshot, ceil(W / page_tokens), or 0 if every point is safe.
    """

    def __init__(self, snapshot_pages: int) -> None:
        self.snapshot_pages = snapshot_pages
        self.watch: TreeWatch = NobodyWatches()
        self._roots: dict[Hashable, Node] = {}
        self.pages = {PageKind.FULL: 0, PageKind.WINDOW: 0}
        self.locked_pages = 0
        """Full pages of nodes that are locked."""
        self._owners = {kind: np.empty(0, dtype=object) for kind in PageKind}

    def __repr__(self) -> str:
        return f"<PrefixTree {self.pages[PageKind.FULL]} full + {self.pages[PageKind.WINDOW]} window pages>"

    # --- finding --------------------------------------------------------------------------------------------------

    def has(self, namespace: Hashable) -> bool:
        """Whether anything is known of it."""
        return namespace in self._roots

    def root(self, namespace: Hashable = None) -> Node:
        node = self._roots.get(namespace)
        if node is None:
            empty = np.empty(0, dtype=np.int64)
            node = self._roots[namespace] = Node(None, 0, empty.reshape(0, 1), empty)
            node.namespace = namespace
        return node

    def match(self, node: Node, keys: Keys, point: int | None = None) -> Match:
        """Follow the keys of the pages after `node` as far as they are known; or after its path's first `point` pages,
        of which the last lies in it."""
        point = node.stop if point is None else point
        at = point - node.first
        done = common(node.keys[at : at + len(keys)], keys[: len(node.keys) - at]) if point < node.stop else 0
        if point + done < node.stop:
            return Match(node, point + done)
        while done < len(keys) and (child := node.children.get(keys[done].tobytes())) is not None:
            ahead = min(len(child.full), len(keys) - done)
            same = common(child.keys[:ahead], keys[done : done + ahead])
            done += same
            node = child
            if same < len(child.full):
                break
        return Match(node, point + done)

    def full_pages(self, node: Node, first: int, stop: int) -> NDArray[np.int64]:
        """Page ids of pages [first, stop) of a node's path; stop may lie inside the node."""
        parts = []
        for each in node.path():
            if each.stop <= first:
                break
            parts.append(each.full[max(0, first - each.first) : max(0, stop - each.first)])
        return np.concatenate(parts[::-1]) if parts else np.empty(0, dtype=np.int64)

    def window_pages(self, snapshot: Snapshot) -> list[PageId]:
        """First to last."""
        return [PageId(int(node.window[index])) for node, index in self._window_places(snapshot)]

    def deepest_snapshot(self, node: Node, most_pages: int) -> Snapshot | None:
        """The last one on a node's path that lies after at most so many pages."""
        for each in node.path():
            points = [point for point in each.snapshots if point <= most_pages]
            if points:
                return each.snapshots[max(points)]
        return None

    def snapshot_at(self, node: Node, point: int) -> Snapshot | None:
        """The one after `point` pages of a node's path."""
        return self._holder(node, point).snapshots.get(point) if point else None

    # --- growing --------------------------------------------------------------------------------------------------

    def cut(self, node: Node, stop: int) -> Node:
        """The node of the path that ends after `stop` pages, made by splitting the one that goes on. A node that is
        split keeps its lower part, so that paths that end at its end still do."""
        node = self._holder(node, stop)
        if stop == node.stop:
            return node
        parent, at = node.parent, stop - node.first
        assert parent is not None and at > 0
        upper = Node(parent, node.first, node.keys, node.full)
        upper.window, upper.pins, upper.inexact = node.window, node.pins, node.inexact
        upper.keep(slice(0, at))
        self._own(PageKind.FULL, upper.full, upper)
        self._own(PageKind.WINDOW, upper.window[upper.window != NO_PAGE], upper)
        upper.locks, upper.last_used_s, upper.reuse = node.locks, node.last_used_s, node.reuse
        parent.children[upper.keys[0].tobytes()] = upper
        node.keep(slice(at, None))
        node.first, node.parent = stop, upper
        upper.children[node.keys[0].tobytes()] = node
        for point in [point for point in node.snapshots if point <= stop]:
            snapshot = upper.snapshots[point] = node.snapshots.pop(point)
            snapshot.node = upper
        self.watch.cut(upper, node)
        return upper

    def extend(self, node: Node, keys: Keys, full: list[PageId], *, may_grow: bool) -> tuple[Node, int]:
        """Add pages below a node that ends where they begin. Returns where they end, and how many of the first of them
        were there already: those page ids were not taken.

        may_grow: the node's path is the only one that ends at its end, so it may itself become longer.
        """
        known = self.match(node, keys)
        same = known.pages - node.stop
        if same:
            node = self.cut(known.node, known.pages)
        rest, pages = keys[same:], np.array(full[same:], dtype=np.int64)
        above, point = node, node.stop
        self.pages[PageKind.FULL] += len(pages)
        grows = may_grow and not same and not node.is_root and not node.children
        while len(pages):
            room = NODE_PAGES - (len(node.full) if grows else 0)
            if grows and room > 0:
                self._grow(node, rest[:room], pages[:room])
            elif not grows:
                child = Node(node, node.stop, rest[:room].copy(), pages[:room])
                child.last_used_s = node.last_used_s
                self._own(PageKind.FULL, child.full, child)
                node.children[rest[0].tobytes()] = child
                node = child
            rest, pages, grows = rest[max(0, room) :], pages[max(0, room) :], False
        if same < len(keys):
            self.watch.extended(above, point)
        return node, same

    def lock(self, node: Node, amount: int = 1) -> None:
        """Keep a node and all above it; a negative amount lets go."""
        self.lock_between(node, None, amount)
        *_, top = [node, *(each.parent for each in node.path())]
        assert top is not None
        self._forget_root(top)

    def lock_between(self, node: Node, above: Node | None, amount: int = 1) -> None:
        """The same below `above` only, which is locked already."""
        each: Node | None = node
        while each is not above:
            assert each is not None
            was_locked = each.locks > 0
            each.locks += amount
            assert each.locks >= 0
            self.locked_pages += ((each.locks > 0) - was_locked) * len(each.full)
            each = each.parent

    def take_snapshot(
        self, node: Node, point: int, window: list[WindowPage], now_s: float, reuse: Reuse
    ) -> list[PageId]:
        """Keep the window after `point` pages of the path: the last snapshot_pages of them, fewer at the start.

        Where the tree has a page that is as exact, it takes no other. Returns what its holders hold less, or more, by
        this: ids of pages that it gave up for more exact ones; those that it took it holds beside whoever brought them.
        """
        holder = self._holder(node, point)
        assert point not in holder.snapshots
        snapshot = holder.snapshots[point] = Snapshot(holder, point, now_s, reuse)
        given_up = []
        for (each, index), brought in zip(self._window_places(snapshot), window, strict=True):
            each.pins[index] += 1
            had = int(each.window[index])
            if had != NO_PAGE and each.inexact[index] <= brought.inexact:
                continue
            if had != NO_PAGE:
                given_up.append(PageId(had))
            self.pages[PageKind.WINDOW] += had == NO_PAGE
            each.window[index], each.inexact[index] = brought.page, brought.inexact
            self._own(PageKind.WINDOW, each.window[index : index + 1], each)
            brought.taken = True
        self.watch.snapshot_changed(holder, point)
        return given_up

    # --- shrinking ------------------------------------------------------------------------------------------------

    def drop_snapshot(self, snapshot: Snapshot) -> list[PageId]:
        """Returns the window pages that no other snapshot needs."""
        freed = []
        for node, index in self._window_places(snapshot):
            node.pins[index] -= 1
            if not node.pins[index]:
                freed.append(PageId(int(node.window[index])))
                node.window[index] = NO_PAGE
        self.pages[PageKind.WINDOW] -= len(freed)
        del snapshot.node.snapshots[snapshot.point]
        self.watch.snapshot_changed(snapshot.node, snapshot.point)
        return freed

    def trim(self, leaf: Node, pages: int) -> Freed:
        """Take the last pages from a leaf that nobody uses, and the leaf with its last one."""
        assert not leaf.children and not leaf.locks and not leaf.is_root
        keep = max(0, len(leaf.full) - pages)
        snapshots = [each for point, each in leaf.snapshots.items() if point > leaf.first + keep]
        window = [page for snapshot in snapshots for page in self.drop_snapshot(snapshot)]
        full = [PageId(page) for page in leaf.full[keep:].tolist()]
        self.pages[PageKind.FULL] -= len(full)
        first_key = leaf.keys[0].tobytes()
        leaf.keep(slice(0, keep))
        self.watch.trimmed(leaf)
        if not keep:
            assert leaf.parent is not None
            del leaf.parent.children[first_key]
            self._forget_root(leaf.parent)
        return Freed(full=full, window=window, snapshots=snapshots)

    def merge(self, node: Node) -> Node | None:
        """Make one node of this and its only child, where nobody's path ends between them and they are not too long.
        Returns the child, which has the pages of both then; None if they stay two."""
        if node.is_root or len(node.children) != 1:
            return None
        (child,) = node.children.values()
        if child.locks != node.locks or len(node.full) + len(child.full) > NODE_PAGES:
            return None
        assert node.parent is not None
        child.keys = np.concatenate((node.keys, child.keys))
        child.full = np.concatenate((node.full, child.full))
        child.window = np.concatenate((node.window, child.window))
        child.pins = np.concatenate((node.pins, child.pins))
        child.inexact = np.concatenate((node.inexact, child.inexact))
        child.first, child.parent = node.first, node.parent
        node.parent.children[child.keys[0].tobytes()] = child
        self._own(PageKind.FULL, node.full, child)
        self._own(PageKind.WINDOW, node.window[node.window != NO_PAGE], child)
        for point, snapshot in node.snapshots.items():
            snapshot.node = child
            child.snapshots[point] = snapshot
        self.watch.merged(node, child)
        return child

    def replace_page(self, kind: PageKind, source: PageId, target: PageId) -> int | None:
        """A page was moved, and may be one of ours: then returns which of its path it is."""
        node = self._owners[kind][source] if source < len(self._owners[kind]) else None
        if node is None:
            return None
        pages = node.full if kind is PageKind.FULL else node.window
        found = np.flatnonzero(pages == source)
        if not len(found):
            return None
        pages[found] = target
        self._own(kind, np.array([target]), node)
        return int(node.first + found[0])

    # --- asking ---------------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """All but the roots, parents first."""
        left = [child for root in self._roots.values() for child in root.children.values()]
        while left:
            node = left.pop()
            yield node
            left += node.children.values()

    def check(self) -> None:
        """Assert that runs, children, locks, snapshots and counts fit together."""
        counted = {PageKind.FULL: 0, PageKind.WINDOW: 0}
        assert self.locked_pages == sum(len(node.full) for node in self.nodes() if node.locks)
        pins: dict[tuple[int, int], int] = {}
        for node in self.nodes():
            assert node.parent is not None and node.parent.stop == node.first
            assert node.parent.children[node.keys[0].tobytes()] is node
            assert 0 < len(node.full) == len(node.keys) == len(node.window) == len(node.pins) <= NODE_PAGES
            assert node.locks >= sum(child.locks for child in node.children.values())
            counted[PageKind.FULL] += len(node.full)
            counted[PageKind.WINDOW] += int((node.window != NO_PAGE).sum())
            assert ((node.window != NO_PAGE) == (node.pins > 0)).all()
            assert all(self._owners[PageKind.FULL][page] is node for page in node.full)
            assert all(self._owners[PageKind.WINDOW][page] is node for page in node.window if page != NO_PAGE)
            for point, snapshot in node.snapshots.items():
                assert snapshot.node is node and snapshot.point == point and node.first < point <= node.stop
                for place, index in self._window_places(snapshot):
                    pins[id(place), index] = pins.get((id(place), index), 0) + 1
        for node in self.nodes():
            assert [pins.get((id(node), index), 0) for index in range(len(node.full))] == node.pins.tolist()
        assert counted == self.pages

    # --- inside ---------------------------------------------------------------------------------------------------

    def _forget_root(self, node: Node) -> None:
        """Namespaces may be as many as there are clients."""
        if node.is_root and not node.children and not node.locks:
            del self._roots[node.namespace]
            self.watch.root_forgotten(node)

    def _holder(self, node: Node, stop: int) -> Node:
        """The node of the path that has page `stop` - 1."""
        while node.parent is not None and node.first >= stop:
            node = node.parent
        return node

    def _window_places(self, snapshot: Snapshot) -> list[tuple[Node, int]]:
        """(node, index) of each page that a snapshot pins, first to last."""
        places: list[tuple[Node, int]] = []
        node, page = snapshot.node, snapshot.point - 1
        for page in range(snapshot.point - 1, max(0, snapshot.point - self.snapshot_pages) - 1, -1):
            node = self._holder(node, page + 1)
            places.append((node, page - node.first))
        return places[::-1]

    def _grow(self, node: Node, keys: Keys, full: NDArray[np.int64]) -> None:
        node.keys = np.concatenate((node.keys, keys))
        node.full = np.concatenate((node.full, full))
        node.window = np.concatenate((node.window, np.full(len(full), NO_PAGE, dtype=np.int64)))
        node.pins = np.concatenate((node.pins, np.zeros(len(full), dtype=np.int32)))
        node.inexact = np.concatenate((node.inexact, np.zeros(len(full), dtype=np.int32)))
        self._own(PageKind.FULL, full, node)
        self.locked_pages += len(full) * (node.locks > 0)

    def _own(self, kind: PageKind, pages: NDArray[np.int64], node: Node) -> None:
        """Note where pages are. What is not ours any more may still be noted: then its id is no page of that node."""
        owners = self._owners[kind]
        if len(pages) and (most := int(pages.max())) >= len(owners):
            grown = np.empty(max(64, 2 * most), dtype=object)
            grown[: len(owners)] = owners
            self._owners[kind] = owners = grown
        owners[pages] = node


def common(one: Keys, other: Keys) -> int:
    """How many rows are equal before the first that is not."""
    differs = one != other
    at = int(differs.argmax()) if differs.size else 0
    return at // one.shape[1] if differs.size and differs.flat[at] else len(one)
