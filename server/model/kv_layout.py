"""How big KV pages and slabs are. Loads without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.model.spec import ModelSpec

if TYPE_CHECKING:
    import torch

_SMALLEST_PAGE_BYTES = 64
_MAX_PAGES_PER_SLAB = 256
_ACCEPTED_WASTE = 0.01


def page_byte_sizes(spec: ModelSpec, page_tokens: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of a full page and of a window page; the latter is 0 without window and MTP layers.

    The full index is the authority for every sequence, so a full page has an id and some bytes even in a model
    without full layers.
    """
    full = spec.kv_elements_per_token(window=False) * page_tokens * dtype.itemsize
    window = spec.kv_elements_per_token(window=True) * page_tokens * dtype.itemsize
    return max(full, _SMALLEST_PAGE_BYTES), window


def choose_slab_bytes(full_page_bytes: int, window_page_bytes: int) -> int:
    """The smallest whole number of pages of the larger kind in which pages of the other kind waste at most 1 %.

    Small slabs change kind easily; a slab that both sizes nearly divide loses nothing when it does. If no slab of up
    to 256 larger pages is that good, the least wasteful of them.
    """
    if not window_page_bytes:
        return full_page_bytes
    larger, smaller = max(full_page_bytes, window_page_bytes), min(full_page_bytes, window_page_bytes)
    best, best_waste = larger, 1.0
    for pages in range(1, _MAX_PAGES_PER_SLAB + 1):
        slab = pages * larger
        waste = slab % smaller / slab
        if waste <= _ACCEPTED_WASTE:
            return slab
        if waste < best_waste:
            best, best_waste = slab, waste
    return best
