"""The tree against the plain definition: a dictionary from page-aligned prefixes to pages, and sets of safe points."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from server.cache.prefix_tree import NO_PAGE, NODE_PAGES, Keys, Node, PrefixTree, Snapshot, WindowPage, common
from server.cache.retention import Reuse
from server.step import PageId, PageKind

Prefix = tuple[tuple[int, ...], ...]


@dataclass
class Path:
    """A sequence as the tree knows it: its keys and where they end."""

    prefix: Prefix
    node: Node


@dataclass
class Model:
    """full: the page that each known prefix ends with. windows: likewise. safe: prefixes with a snapshot."""

    snapshot_pages: int
    full: dict[tuple[object, Prefix], PageId] = field(default_factory=dict)
    windows: dict[tuple[object, Prefix], PageId] = field(default_factory=dict)
    inexact: dict[tuple[object, Prefix], int] = field(default_factory=dict)
    safe: set[tuple[object, Prefix]] = field(default_factory=set)

    def forget_windows(self) -> list[PageId]:
        """Those that no snapshot pins any more."""
        gone = self.windows.keys() - self.pinned()
        for span in gone:
            del self.inexact[span]
        return sorted(self.windows.pop(span) for span in gone)

    def known(self, namespace: object, prefix: Prefix) -> int:
        return next((n for n in range(len(prefix)) if (namespace, prefix[: n + 1]) not in self.full), len(prefix))

    def pinned(self) -> set[tuple[object, Prefix]]:
        return {
            (namespace, prefix[:n])
            for namespace, prefix in self.safe
            for n in range(max(1, len(prefix) - self.snapshot_pages + 1), len(prefix) + 1)
        }


def keys_of(prefix: Prefix, width: int) -> Keys:
    return np.array(prefix, dtype=np.int64).reshape(-1, width)


def prefix_of(tree: PrefixTree, node: Node) -> Prefix:
    return tuple(tuple(row) for each in reversed(list(node.path())) for row in each.keys.tolist())


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("snapshot_pages", [0, 1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_random_lives_equal_the_plain_definition(width: int, snapshot_pages: int, seed: int) -> None:
    rng = random.Random(seed)
    tree, model = PrefixTree(snapshot_pages), Model(snapshot_pages)
    fresh = (PageId(number) for number in itertools.count())
    held: list[tuple[object, Path]] = []
    merges = 0
    for _ in range(400):
        namespace = rng.choice([None, "salt"])
        action = rng.random()
        if action < 0.45:
            prefix = tuple(tuple(rng.choices(range(2), k=width)) for _ in range(rng.randint(1, 9)))
            known = tree.match(tree.root(namespace), keys_of(prefix, width))
            assert known.pages == model.known(namespace, prefix)
            node = tree.cut(known.node, known.pages)
            assert prefix_of(tree, node) == prefix[: known.pages]
            found = tree.full_pages(node, 0, known.pages).tolist()
            assert found == [model.full[namespace, prefix[: n + 1]] for n in range(known.pages)]
            tree.lock(node)
            new = [next(fresh) for _ in prefix[known.pages :]]
            end, same = tree.extend(node, keys_of(prefix[known.pages :], width), new, may_grow=node.locks == 1)
            assert same == 0
            tree.lock(node, -1)
            tree.lock(end)
            for number, page in enumerate(new, start=known.pages):
                model.full[namespace, prefix[: number + 1]] = page
            held.append((namespace, Path(prefix, end)))
        elif action < 0.6 and held:
            tree.lock(held.pop(rng.randrange(len(held)))[1].node, -1)
        elif action < 0.75 and held and snapshot_pages:
            namespace, path = rng.choice(held)
            point = rng.randint(1, len(path.prefix))
            if (namespace, path.prefix[:point]) in model.safe:
                assert tree.snapshot_at(path.node, point) is not None
                continue
            spans = [path.prefix[:n] for n in range(max(1, point - snapshot_pages + 1), point + 1)]
            offered = [WindowPage(next(fresh), rng.randint(0, 2)) for _ in spans]
            given_up = tree.take_snapshot(path.node, point, offered, 0.0, Reuse())
            better = [
                (span, each)
                for span, each in zip(spans, offered, strict=True)
                if each.inexact < model.inexact.get((namespace, span), 3)
            ]
            assert [each for each in offered if each.taken] == [each for _, each in better]
            lost = [model.windows[namespace, span] for span, _ in better if (namespace, span) in model.windows]
            assert given_up == lost
            model.safe.add((namespace, path.prefix[:point]))
            for span, each in better:
                model.windows[namespace, span], model.inexact[namespace, span] = each.page, each.inexact
        elif action < 0.85 and model.safe:
            namespace, prefix = rng.choice(sorted(model.safe, key=repr))
            end = tree.match(tree.root(namespace), keys_of(prefix, width))
            snapshot = tree.deepest_snapshot(end.node, len(prefix))
            assert snapshot is not None and snapshot.point == len(prefix)
            pages = [model.windows[namespace, prefix[:n]] for n in _span(prefix, snapshot_pages)]
            assert tree.window_pages(snapshot) == pages
            model.safe.remove((namespace, prefix))
            assert sorted(tree.drop_snapshot(snapshot)) == model.forget_windows()
        else:
            leaves = [node for node in tree.nodes() if not node.children and not node.locks]
            if not leaves:
                continue
            leaf = rng.choice(leaves)
            prefix, namespace = prefix_of(tree, leaf), _namespace(leaf)
            count = rng.randint(1, len(leaf.full))
            freed = tree.trim(leaf, count)
            lost = {(namespace, prefix[: len(prefix) - n]) for n in range(count)}
            assert sorted(freed.full) == sorted(model.full.pop(span) for span in lost)
            assert len(freed.snapshots) == len(model.safe & lost)
            model.safe -= lost
            assert sorted(freed.window) == model.forget_windows()
            merges += leaf.parent is not None and tree.merge(leaf.parent) is not None
        tree.check()
        assert tree.pages == {PageKind.FULL: len(model.full), PageKind.WINDOW: len(model.windows)}
    for _, path in held:
        tree.lock(path.node, -1)
    while leaves := [node for node in tree.nodes() if not node.children]:
        tree.trim(leaves[0], NODE_PAGES)
    assert not tree._roots and not any(tree.pages.values())
    assert merges > 0


def test_what_is_left_of_a_branch_becomes_one_run_again() -> None:
    """But not where a path ends between, or beyond the length of a node."""
    tree = PrefixTree(1)
    root = tree.root()
    stem = tree.extend(root, column(0, 10), pages(0, 10), may_grow=False)[0]
    one = tree.extend(tree.cut(stem, 6), column(100, 4), pages(100, 4), may_grow=False)[0]
    other = stem
    upper = other.parent
    assert upper is not None and upper.stop == 6
    tree.take_snapshot(upper, 6, [WindowPage(PageId(7))], 0.0, Reuse())
    tree.trim(one, 4)
    tree.lock(upper)
    assert tree.merge(upper) is None
    tree.lock(upper, -1)
    assert tree.merge(upper) is other and (other.first, other.stop) == (0, 10)
    assert tree.full_pages(other, 0, 10).tolist() == list(range(10))
    assert tree.snapshot_at(other, 6) is not None
    tree.check()
    long = tree.extend(other, column(200, NODE_PAGES), pages(200, NODE_PAGES), may_grow=False)[0]
    assert long.parent is other and tree.merge(other) is None
    tree.check()


def column(first: int, count: int) -> Keys:
    return np.arange(first, first + count, dtype=np.int64).reshape(-1, 1)


def pages(first: int, count: int) -> list[PageId]:
    return [PageId(page) for page in range(first, first + count)]


def _span(prefix: Prefix, snapshot_pages: int) -> range:
    return range(max(1, len(prefix) - snapshot_pages + 1), len(prefix) + 1)


def _namespace(node: Node) -> object:
    *_, top = node.path()
    assert top.parent is not None
    return top.parent.namespace


def test_the_safe_point_to_resume_from_is_the_deepest_below() -> None:
    tree = PrefixTree(1)
    node = _path(tree, 10)
    for point in (2, 7):
        tree.take_snapshot(node, point, [WindowPage(PageId(90 + point))], 0.0, Reuse())
    found = [tree.deepest_snapshot(node, most) for most in range(11)]
    assert [each and each.point for each in found] == [None, None, 2, 2, 2, 2, 2, 7, 7, 7, 7]
    assert tree.snapshot_at(node, 7) is found[-1] and tree.snapshot_at(node, 6) is None


def _path(tree: PrefixTree, pages: int, *, first_key: int = 0) -> Node:
    keys = np.arange(first_key, first_key + pages, dtype=np.int64).reshape(-1, 1)
    node, _ = tree.extend(tree.root(), keys, [PageId(page) for page in range(pages)], may_grow=False)
    tree.lock(node)
    return node


def test_a_split_leaves_paths_that_end_below_it_where_they_were() -> None:
    tree = PrefixTree(2)
    node = _path(tree, 10)
    tree.take_snapshot(node, 6, [WindowPage(PageId(95)), WindowPage(PageId(96))], 0.0, Reuse())
    snapshot = tree.snapshot_at(node, 6)
    assert isinstance(snapshot, Snapshot)
    upper = tree.cut(node, 5)
    assert (upper.first, upper.stop, node.first, node.stop) == (0, 5, 5, 10)
    assert upper.locks == node.locks == 1
    assert tree.snapshot_at(node, 6) is snapshot and tree.window_pages(snapshot) == [95, 96]
    assert upper.window.tolist() == [NO_PAGE] * 4 + [95]
    tree.check()


def test_what_two_compute_at_once_is_kept_once() -> None:
    tree = PrefixTree(0)
    keys = np.arange(8, dtype=np.int64).reshape(-1, 1)
    tree.extend(tree.root(), keys[:6], [PageId(page) for page in range(6)], may_grow=False)
    other = [PageId(page) for page in range(100, 108)]
    node, same = tree.extend(tree.root(), keys, other, may_grow=False)
    assert same == 6
    assert tree.full_pages(node, 0, 8).tolist() == [0, 1, 2, 3, 4, 5, 106, 107]
    tree.check()


def test_a_path_that_grows_page_by_page_is_a_chain_of_few_nodes() -> None:
    tree = PrefixTree(0)
    node, pages = tree.root(), 3 * NODE_PAGES + 7
    for page in range(pages):
        keys = np.array([[page]], dtype=np.int64)
        node, _ = tree.extend(node, keys, [PageId(page)], may_grow=not node.is_root)
    assert len(list(node.path())) == 4
    assert tree.full_pages(node, 0, pages).tolist() == list(range(pages))
    tree.check()


@pytest.mark.parametrize("width", [1, 2, 16])
def test_common_counts_the_equal_rows_before_the_first_other(width: int) -> None:
    rng = random.Random(width)
    for _ in range(200):
        one = np.array([rng.choices(range(2), k=width) for _ in range(5)], dtype=np.int64)
        other = one.copy()
        if rng.random() < 0.8:
            other[rng.randrange(5), rng.randrange(width)] += 1
        plain = next((n for n in range(5) if (one[n] != other[n]).any()), 5)
        assert common(one, other) == plain


def test_no_namespace_stays_when_its_last_page_is_gone() -> None:
    tree = PrefixTree(0)
    for salt in range(50):
        root = tree.root(salt)
        node, _ = tree.extend(
            root, np.zeros((3, 1), dtype=np.int64), [PageId(salt * 3 + n) for n in range(3)], may_grow=False
        )
        tree.trim(node, 3)
    assert not tree._roots
