from __future__ import annotations

import random

import pytest

from server.cache.slabs import SlabAllocator
from server.config import KVLayout
from server.step import PageId, PageKind


def layout(*, full: int, window: int, slab: int, slabs: int) -> KVLayout:
    return KVLayout(
        page_tokens=4,
        window_tokens=7,
        full_page_bytes=full,
        window_page_bytes=window,
        slab_bytes=slab,
        slab_count=slabs,
    )


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("full", "window", "slab"), [(3, 5, 15), (2, 7, 15), (7, 2, 14), (4, 4, 4), (4, 0, 4)])
def test_random_pages_never_overlap_and_slabs_change_kind_only_when_empty(
    full: int, window: int, slab: int, seed: int
) -> None:
    rng = random.Random(seed)
    cut = layout(full=full, window=window, slab=slab, slabs=6)
    slabs = SlabAllocator(cut)
    held: list[tuple[PageKind, PageId]] = []
    size = {PageKind.FULL: full, PageKind.WINDOW: window}
    per_slab = {PageKind.FULL: cut.full_pages_per_slab, PageKind.WINDOW: cut.window_pages_per_slab}

    def byte_range(kind: PageKind, page: PageId) -> range:
        begin = page // per_slab[kind] * slab + page % per_slab[kind] * size[kind]
        return range(begin, begin + size[kind])

    for _ in range(400):
        kind = rng.choice(list(PageKind)) if window else PageKind.FULL
        if held and rng.random() < 0.45:
            some = [held.pop(rng.randrange(len(held))) for _ in range(min(len(held), rng.randint(1, 3)))]
            for each in PageKind:
                slabs.release(each, [page for of_kind, page in some if of_kind is each])
        else:
            count = rng.randint(1, 4)
            pages = slabs.allocate(kind, count)
            # The plain definition: slabs of this kind have room for pages, and so have nobody's.
            of_slab: dict[int, list[PageKind]] = {}
            for k, p in held:
                of_slab.setdefault(p // per_slab[k], []).append(k)
            room = sum(
                per_slab[kind] - len(kinds)
                for kinds in (of_slab.get(i, []) for i in range(6))
                if not kinds or kinds[0] is kind
            )
            assert len(pages) == min(count, room)
            held += ((kind, page) for page in pages)
        slabs.check()
        used = [b for k, p in held for b in byte_range(k, p)]
        assert len(used) == len(set(used))
        assert max(used, default=0) < slab * 6
        for k in PageKind:
            assert slabs.used_pages(k) == sum(1 for other, _ in held if other is k)


def test_a_lone_user_of_a_kind_reuses_its_slab_before_it_opens_another() -> None:
    slabs = SlabAllocator(layout(full=3, window=5, slab=15, slabs=8))
    live = slabs.allocate(PageKind.WINDOW, 3)
    for _ in range(100):
        slabs.release(PageKind.WINDOW, [live.pop(0)])
        live += slabs.allocate(PageKind.WINDOW, 1)
        assert {page // 3 for page in live} == {0} and len(live) == 3


def test_a_page_released_twice_is_our_own_bug_and_is_caught() -> None:
    slabs = SlabAllocator(layout(full=3, window=5, slab=15, slabs=2))
    page, _other = slabs.allocate(PageKind.FULL, 2)
    slabs.release(PageKind.FULL, [page])
    with pytest.raises(AssertionError, match="not in use"):
        slabs.release(PageKind.FULL, [page])


def test_bytes_lost_to_partly_filled_slabs_are_counted() -> None:
    slabs = SlabAllocator(layout(full=4, window=5, slab=15, slabs=3))
    assert slabs.stranded_bytes() == 0
    slabs.allocate(PageKind.FULL, 1)
    assert slabs.stranded_bytes() == 15 - 4
    slabs.allocate(PageKind.WINDOW, 1)
    assert slabs.stranded_bytes() == (15 - 4) + (15 - 5)
