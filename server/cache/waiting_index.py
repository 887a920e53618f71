"""How much is cached of everybody who waits, kept current as the cache changes, and who of them comes first.

A second radix tree, of the prompts that wait. Whoever waits below a point up to which that tree and the cache are alike
saves the same there; so they are one group, ordered once. When pages come or go, groups grow, split and join at that
point. Nobody's prompt is compared again but where its group goes on, and then once for all who go on alike.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from server.cache.prefix_tree import Keys, Node, PrefixTree, common

T = TypeVar("T", bound=Hashable)

SPARE_ENTRIES = 64

Saved = Callable[[Node, int], float]
"""How many tokens need not be computed when a path is resumed after so many pages of a node's path."""


class _Waiter(Generic[T]):
    """base: its key, if nothing were cached. serial orders those with equal keys. place is None once it has left."""

    __slots__ = ("base", "item", "place", "serial")

    def __init__(self, item: T, base: float, serial: int) -> None:
        self.item = item
        self.base = base
        self.serial = serial
        self.place: _Place[T] | None = None


class _Place(Generic[T]):
    """Pages [first, stop) of the prompts that go through it. Those who wait with no more pages are its `own`.

    node, point: up to which page, and in which node, its path is cached, as soon as any of its own pages is; saved
    belongs to that point. Then, or if it is a root, it is a group: it stands for all below it but for other groups.

    heap: entries (base, serial, number, waiter or child) that are at most the least (base, serial) there, for each of
    its own and for each child that is no group. So the first one is looked at when it is asked for, and no other.
    """

    __slots__ = (
        "children",
        "first",
        "heap",
        "keys",
        "namespace",
        "node",
        "own",
        "parent",
        "point",
        "queue",
        "saved",
        "waiting",
    )

    def __init__(self, queue: _Queue[T], parent: _Place[T] | None, first: int, keys: Keys) -> None:
        self.queue = queue
        self.parent = parent
        self.first = first
        self.keys = keys
        self.children: dict[bytes, _Place[T]] = {}
        self.own: set[_Waiter[T]] = set()
        self.waiting = 0  # here and below
        self.heap: list[tuple[float, int, int, _Waiter[T] | _Place[T]]] = []
        self.node: Node | None = None
        self.point = 0
        self.saved = 0.0
        self.namespace: Hashable = None  # of a root

    def __repr__(self) -> str:
        return f"<Place [{self.first}, {self.stop}) {self.waiting} waiting, {self.point} cached>"

    @property
    def stop(self) -> int:
        return self.first + len(self.keys)

    @property
    def is_group(self) -> bool:
        return self.parent is None or self.node is not None


@dataclass(slots=True, eq=False)
class _Queue(Generic[T]):
    """One order of those who wait. top: entries (key, serial, number, group), at most what is true, for each group.
    Owner: WaitingIndex."""

    name: Hashable
    roots: dict[Hashable, _Place[T]] = field(default_factory=dict)
    groups: set[_Place[T]] = field(default_factory=set)
    top: list[tuple[float, int, int, _Place[T]]] = field(default_factory=list)
    waiting: int = 0


class WaitingIndex(Generic[T]):
    """Owner: KVCache, on the event-loop thread. The prefix tree tells it of every change.

    A key is the base that somebody brings less the tokens that are saved for it. Where keys can fall, by pages or
    snapshots that come, entries are made anew at once; where they rise, when they are met. Several queues may wait for
    one cache. matches counts comparisons of runs of pages.
    """

    def __init__(self, tree: PrefixTree, saved: Saved, reach_pages: int | None) -> None:
        """reach_pages: how far after a snapshot a resume point may lie and save more for it; None for any distance."""
        self._tree = tree
        self._saved = saved
        self._reach_pages = reach_pages
        self._queues: dict[Hashable, _Queue[T]] = {}
        self._waiters: dict[T, _Waiter[T]] = {}
        self._watched: dict[Node, set[_Place[T]]] = {}
        self._serials = itertools.count()
        self._numbers = itertools.count()
        self.matches = 0
        self.counts_saved = True
        """Whether keys do; if not, somebody's key is its base. Not to be changed while somebody waits."""
        tree.watch = self

    def __repr__(self) -> str:
        return f"<WaitingIndex {len(self._waiters)} in {len(self._queues)} queues>"

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, item: T) -> bool:
        return item in self._waiters

    # --- who waits ------------------------------------------------------------------------------------------------

    def add(self, item: T, base: float, keys: Keys, *, namespace: Hashable = None, queue: Hashable = None) -> None:
        """Somebody waits, and could resume after as many of these pages as are cached. Of equal keys, the one that was
        added first comes first."""
        assert item not in self._waiters, f"{item} waits already"
        of = self._queues.get(queue)
        if of is None:
            of = self._queues[queue] = _Queue(queue)
        root = of.roots.get(namespace)
        if root is None:
            root = of.roots[namespace] = _Place(of, None, 0, keys[:0])
            root.namespace = namespace
            of.groups.add(root)
            if self._tree.has(namespace):
                self._watch(root, self._tree.root(namespace), 0)
        place = self._find(root, keys)
        waiter = self._waiters[item] = _Waiter(item, base, next(self._serials))
        waiter.place = place
        place.own.add(waiter)
        of.waiting += 1
        for each in _upwards(place):
            each.waiting += 1
        heapq.heappush(place.heap, (base, waiter.serial, next(self._numbers), waiter))
        if self._least(place) == (base, waiter.serial):
            self._rise(place)

    def remove(self, item: T) -> None:
        """It waits no more. Who does not wait is ignored."""
        waiter = self._waiters.pop(item, None)
        if waiter is None:
            return
        place = waiter.place
        assert place is not None
        waiter.place = None
        place.own.remove(waiter)
        place.queue.waiting -= 1
        left = place
        for each in list(_upwards(place)):
            each.waiting -= 1
            if each.waiting:
                left = each if left.waiting == 0 else left
            else:
                self._remove_place(each)
        if left.waiting:
            self._compact(left)
            self._join_only_child(left)
        if not place.queue.waiting:
            del self._queues[place.queue.name]

    def first(self, queue: Hashable = None) -> tuple[T, float] | None:
        """Who has the least key in a queue, and how many tokens are saved for it; None if nobody waits there."""
        of = self._queues.get(queue)
        if of is None:
            return None
        while of.top:
            key, serial, _, group = of.top[0]
            least = self._least(group) if group in of.groups else None
            if least is not None and (self._key(group, least[0]), least[1]) == (key, serial):
                return self._waiter_of(group).item, group.saved
            heapq.heappop(of.top)
            self._enter_top(group, least)
        assert not of.waiting, "somebody waits and is in no group"
        return None

    def rekey(self, base_of: Callable[[T], float]) -> None:
        """Everybody's base is another one now."""
        for of in self._queues.values():
            places = list(of.roots.values())
            for place in places:
                places += place.children.values()
            for place in places:
                for waiter in place.own:
                    waiter.base = base_of(waiter.item)
                place.heap = [(waiter.base, waiter.serial, next(self._numbers), waiter) for waiter in place.own]
                heapq.heapify(place.heap)
            for place in reversed(places):  # children before their parents
                least = None if place.is_group else self._least(place)
                if least is not None and place.parent is not None:
                    heapq.heappush(place.parent.heap, (*least, next(self._numbers), place))
            of.top = self._entries(of)
            heapq.heapify(of.top)

    def saved(self, item: T) -> float:
        """How many tokens are saved for somebody who waits."""
        place = self._waiters[item].place
        assert place is not None
        return next(each.saved for each in _upwards(place) if each.is_group)

    # --- what happens in the tree: see TreeWatch ------------------------------------------------------------------

    def extended(self, node: Node, point: int) -> None:
        if not self._waiters:
            return
        if node.is_root:
            for of in self._queues.values():
                root = of.roots.get(node.namespace)
                if root is not None and root.node is not node:
                    self._watch(root, node, 0)
        for place in list(self._watched.get(node, ())):
            if place.point == point:
                self._follow(place, node, point)

    def cut(self, upper: Node, lower: Node) -> None:
        for place in list(self._watched.get(lower, ())):
            if place.point <= upper.stop:
                self._watch(place, upper, place.point)

    def merged(self, upper: Node, lower: Node) -> None:
        for place in list(self._watched.get(upper, ())):
            self._watch(place, lower, place.point)

    def trimmed(self, node: Node) -> None:
        end = node if len(node.full) else node.parent
        assert end is not None
        for place in list(self._watched.get(node, ())):
            if place.point <= end.stop and end is node:
                continue
            self._watch(place, end, min(place.point, end.stop))
            if place.parent is not None and place.point <= place.first:
                self._end_group(place)
                self._rise(place)
            else:
                self._revalue(place)

    def root_forgotten(self, node: Node) -> None:
        for place in list(self._watched.get(node, ())):
            self._watch(place, None, 0)

    def snapshot_changed(self, node: Node, point: int) -> None:
        if not self._watched:
            return
        end = None if self._reach_pages is None else point + self._reach_pages
        left = [node]
        while left:
            each = left.pop()
            for place in self._watched.get(each, ()):
                if place.point >= point:
                    self._revalue(place)
            left += (child for child in each.children.values() if end is None or child.first < end)

    # --- places ---------------------------------------------------------------------------------------------------

    def _find(self, root: _Place[T], keys: Keys) -> _Place[T]:
        """The place at which these pages end, made if need be."""
        place = root
        while place.stop < len(keys):
            child = place.children.get(keys[place.stop].tobytes())
            if child is None:
                child = _Place(root.queue, place, place.stop, keys[place.stop :])
                place.children[child.keys[0].tobytes()] = child
                if place.node is not None and place.point == place.stop:
                    self._follow(child, place.node, place.point)
                return child
            self.matches += 1
            same = common(child.keys[: len(keys) - child.first], keys[child.first : child.stop])
            place = child if same == len(child.keys) else self._split(child, child.first + same)
        return place

    def _split(self, lower: _Place[T], stop: int) -> _Place[T]:
        """A place of its pages before `stop`. The lower one keeps who waits there."""
        above, at, node, point = lower.parent, stop - lower.first, lower.node, lower.point
        assert above is not None and 0 < at < len(lower.keys)
        upper = _Place(lower.queue, above, lower.first, lower.keys[:at])
        upper.waiting = lower.waiting
        above.children[upper.keys[0].tobytes()] = upper
        lower.parent, lower.first, lower.keys = upper, stop, lower.keys[at:]
        upper.children[lower.keys[0].tobytes()] = lower
        if node is not None:
            while node.first >= stop:
                assert node.parent is not None
                node = node.parent
            upper.queue.groups.add(upper)
            self._watch(upper, node, min(point, stop))
            self._revalue(upper)
            if point > stop:
                return upper
            self._end_group(lower)
        self._rise(lower)
        return upper

    def _remove_place(self, place: _Place[T]) -> None:
        if place.is_group:
            self._end_group(place)
        if place.parent is not None:
            del place.parent.children[place.keys[0].tobytes()]
            return
        del place.queue.roots[place.namespace]

    def _join_only_child(self, upper: _Place[T]) -> None:
        """A place that nobody waits at and that has one child becomes one with it."""
        if upper.parent is None or upper.own or len(upper.children) != 1:
            return
        (lower,) = upper.children.values()
        node, point, saved, was_group = upper.node, upper.point, upper.saved, lower.is_group
        if upper.is_group:
            self._end_group(upper)
        lower.keys = np.concatenate((upper.keys, lower.keys))
        lower.first, lower.parent = upper.first, upper.parent
        upper.parent.children[lower.keys[0].tobytes()] = lower
        if was_group:
            return
        if node is not None:
            lower.queue.groups.add(lower)
            self._watch(lower, node, point)
            lower.saved = saved
        self._rise(lower)

    # --- where the tree of those who wait and the cache are alike ---------------------------------------------------

    def _follow(self, place: _Place[T], node: Node, point: int) -> None:
        """A place's path is cached up to `point`, in `node`: look how much further, there and below."""
        left = [(place, node, point)]
        while left:
            place, node, point = left.pop()
            if point < place.stop:
                self.matches += 1
                match = self._tree.match(node, place.keys[point - place.first :], point)
                node, point = match.node, match.pages
            if point <= place.first and place.parent is not None:
                continue
            place.queue.groups.add(place)
            self._watch(place, node, point)
            place.saved = self._saved(node, point)
            self._enter_top(place, self._least(place))
            if point == place.stop:
                left += ((child, node, point) for child in self._continued(place, node))

    def _continued(self, place: _Place[T], node: Node) -> list[_Place[T]]:
        """Children whose first page is cached, and that are no groups yet."""
        if place.point < node.stop:
            firsts: Iterable[bytes] = (node.keys[place.point - node.first].tobytes(),)
        else:
            few, many = place.children, node.children
            firsts = [first for first in few if first in many] if len(few) < len(many) else list(many)
        children = (place.children.get(first) for first in firsts)
        return [child for child in children if child is not None and child.node is None]

    def _watch(self, place: _Place[T], node: Node | None, point: int) -> None:
        if place.node is not None and place.node is not node:
            of_node = self._watched[place.node]
            of_node.discard(place)
            if not of_node:
                del self._watched[place.node]
        place.node, place.point = node, point
        if node is not None:
            self._watched.setdefault(node, set()).add(place)

    def _end_group(self, place: _Place[T]) -> None:
        place.queue.groups.remove(place)
        self._watch(place, None, 0)
        place.saved = 0.0

    def _revalue(self, place: _Place[T]) -> None:
        assert place.node is not None
        before, place.saved = place.saved, self._saved(place.node, place.point)
        if place.saved > before:
            self._enter_top(place, self._least(place))

    # --- orders ---------------------------------------------------------------------------------------------------

    def _least(self, place: _Place[T]) -> tuple[float, int] | None:
        """The least base, and whose, of those who wait below a place and not in another group below it. Then its first
        entry is right, and so are those of the places that it leads to."""
        path = [place]
        while True:
            heap = path[-1].heap
            if not heap:
                path.pop()
                if not path:
                    return None
                heapq.heappop(path[-1].heap)
                continue
            base, serial, _, what = heap[0]
            if isinstance(what, _Place):
                if what.parent is path[-1] and what.node is None:
                    path.append(what)
                else:
                    heapq.heappop(heap)
            elif what.place is not path[-1]:
                heapq.heappop(heap)
            elif self._is_right_above(path, (base, serial)):
                return base, serial

    def _is_right_above(self, path: list[_Place[T]], least: tuple[float, int]) -> bool:
        """Go up a path, in which the first entry of each place led to the next one and `least` is that of the last, and
        put first entries right, as long as they stay the first. Whether all did."""
        while len(path) > 1:
            below = path.pop()
            heap = path[-1].heap
            if heap[0][:2] != least:
                heapq.heapreplace(heap, (*least, next(self._numbers), below))
                if heap[0][:2] != least:
                    return False
        return True

    def _waiter_of(self, place: _Place[T]) -> _Waiter[T]:
        what: _Waiter[T] | _Place[T] = place
        while isinstance(what, _Place):
            what = what.heap[0][3]
        return what

    def _rise(self, place: _Place[T]) -> None:
        """Somebody came below a place, or it is no group any more: make sure that it is known above, up to its group
        and the queue, who may be the first there."""
        least = self._least(place)
        if least is None:
            return
        while not place.is_group:
            assert place.parent is not None
            heapq.heappush(place.parent.heap, (*least, next(self._numbers), place))
            place = place.parent
            if self._least(place) != least:
                return
        self._enter_top(place, least)

    def _enter_top(self, place: _Place[T], least: tuple[float, int] | None) -> None:
        if least is not None:
            of = place.queue
            heapq.heappush(of.top, (self._key(place, least[0]), least[1], next(self._numbers), place))
            if len(of.top) > 2 * len(of.groups) + SPARE_ENTRIES:
                of.top = self._entries(of)
                heapq.heapify(of.top)

    def _entries(self, of: _Queue[T]) -> list[tuple[float, int, int, _Place[T]]]:
        """One for each group."""
        found = ((group, self._least(group)) for group in of.groups)
        return [
            (self._key(group, least[0]), least[1], next(self._numbers), group)
            for group, least in found
            if least is not None
        ]

    def _key(self, group: _Place[T], base: float) -> float:
        return base - group.saved if self.counts_saved else base

    def _compact(self, place: _Place[T]) -> None:
        """Make its heap anew when most entries are of those who left."""
        for each in _upwards(place):
            if len(each.heap) > 2 * (len(each.own) + len(each.children)) + SPARE_ENTRIES:
                each.heap = [(waiter.base, waiter.serial, next(self._numbers), waiter) for waiter in each.own]
                for child in each.children.values():
                    least = None if child.is_group else self._least(child)
                    if least is not None:
                        each.heap.append((*least, next(self._numbers), child))
                heapq.heapify(each.heap)


def _upwards(place: _Place[T]) -> Iterator[_Place[T]]:
    each: _Place[T] | None = place
    while each is not None:
        yield each
        each = each.parent
