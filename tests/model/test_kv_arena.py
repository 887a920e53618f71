"""Pages of both kinds tile the arena exactly, and slabs waste little."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from server.config import KVLayout
from server.model.families import spec_from_config
from server.model.kv_arena import KVArena
from server.model.kv_layout import choose_slab_bytes, page_byte_sizes
from server.model.spec import ModelSpec
from server.step import PageId, PageKind
from tests.model.checkpoints import PRO_CONFIG

PRO = spec_from_config(PRO_CONFIG, mtp_layers=3)
ALL_WINDOW = replace(PRO, layers=tuple(layer for layer in PRO.layers if layer.is_window), mtp_layers=())
ALL_FULL = replace(PRO, layers=tuple(layer for layer in PRO.layers if not layer.is_window), mtp_layers=())


def arena_of(spec: ModelSpec, dtype: torch.dtype = torch.float32, page_tokens: int = 4) -> KVArena:
    full, window = page_byte_sizes(spec, page_tokens, dtype)
    layout = KVLayout(
        page_tokens=page_tokens,
        window_tokens=spec.window_tokens,
        full_page_bytes=full,
        window_page_bytes=window,
        slab_bytes=choose_slab_bytes(full, window) + 24,
        slab_count=4,
    )
    return KVArena(spec, layout, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_page_bytes(dtype: torch.dtype) -> None:
    per_layer = 8 * (24 + 16) * 16 * dtype.itemsize
    assert page_byte_sizes(PRO, 16, dtype) == (3 * per_layer, (5 + 3) * per_layer)
    assert page_byte_sizes(ALL_WINDOW, 16, dtype) == (64, 5 * per_layer)
    assert page_byte_sizes(ALL_FULL, 16, dtype) == (3 * per_layer, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [PRO, ALL_WINDOW, ALL_FULL], ids=["hybrid", "window", "full"])
def test_layers_tile_each_page_without_overlap(spec: ModelSpec, dtype: torch.dtype) -> None:
    arena = arena_of(spec, dtype)
    layers = list(zip((*spec.layers, *spec.mtp_layers), (*arena.layers, *arena.mtp), strict=True))
    for kind in PageKind:
        views = [view for layer, kv in layers if layer.is_window == (kind == PageKind.WINDOW) for view in (kv.k, kv.v)]
        for page in range(4 * arena.pages_per_slab(kind)):
            slab, index = divmod(page, arena.pages_per_slab(kind))
            arena.memory.zero_()
            for number, view in enumerate(views):
                view[slab, index] += number + 1
            values = arena.page_bytes(kind, PageId(page)).view(dtype)
            expected = torch.cat(
                [torch.full((view[0, 0].numel(),), number + 1.0, dtype=dtype) for number, view in enumerate(views)]
                or [torch.zeros(len(values), dtype=dtype)]
            )
            assert torch.equal(values, expected), "layer after layer, K then V, no gap"
            assert int((arena.memory.view(dtype) != 0).sum()) == int((expected != 0).sum())


def test_copy_page() -> None:
    arena = arena_of(PRO)
    arena.memory.copy_(torch.randint(0, 255, arena.memory.shape, dtype=torch.uint8))
    before = arena.memory.clone()
    for kind in PageKind:
        last = PageId(4 * arena.pages_per_slab(kind) - 1)
        arena.copy_page(kind, PageId(0), last)
        assert torch.equal(arena.page_bytes(kind, last), arena.page_bytes(kind, PageId(0)))
        changed = (arena.memory != before).sum()
        assert 0 < int(changed) <= arena.page_bytes(kind, last).numel()
        arena.memory.copy_(before)


def test_a_layout_of_another_model_is_our_bug() -> None:
    layout = arena_of(PRO).layout
    with pytest.raises(AssertionError):
        KVArena(ALL_WINDOW, layout, torch.float32)


@given(st.integers(1, 3000), st.integers(0, 3000))
def test_slabs(full_units: int, window_units: int) -> None:
    full, window = 64 * full_units, 64 * window_units
    slab = choose_slab_bytes(full, window)
    assert slab % max(full, window) == 0
    if not window:
        assert slab == full
        return
    larger, smaller = max(full, window), min(full, window)
    waste = slab % smaller / slab
    candidates = {pages * larger: pages * larger % smaller / (pages * larger) for pages in range(1, 257)}
    if waste <= 0.01:
        assert all(other > 0.01 for size, other in candidates.items() if size < slab)
    else:
        assert waste == min(candidates.values())


def test_slabs_of_the_published_model_are_small() -> None:
    """MiMo-V2-Flash, 64-token pages in bf16."""
    full, window = 23_040 * 64, (199_680 + 15_360) * 64
    slab = choose_slab_bytes(full, window)
    assert slab <= 3 * window
    assert slab % full / slab <= 0.01
