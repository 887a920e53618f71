"""The device memory for KV: one flat array of slabs, and each layer's K and V as strided views of it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.interface import PagedKV
from server.config import KVLayout
from server.model.kv_layout import page_byte_sizes
from server.model.spec import LayerSpec, ModelSpec
from server.step import PageId, PageKind


def _zeros(size: int, device: torch.device) -> Tensor:
    """Zeros and not empty: stray NaN bits would survive a multiplication by a masked weight of 0.

    numpy asks the system for zeroed pages, which cost memory only once they are written to; torch writes them all.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(size, dtype=np.uint8))
    return torch.zeros(size, dtype=torch.uint8, device=device)


class KVArena:
    """Owner: the runner, on the device thread. Which pages are in use is the cache's business, not known here.

    Page p of a kind lies in slab p // pages_per_slab at index p % pages_per_slab, from the slab's first byte on with no
    gap between pages. Inside a page: layer after layer, K then V, each [KV heads, page_tokens, dim]. Full layers lie in
    FULL pages, window layers and after them MTP layers in WINDOW pages.
    """

    def __init__(
        self, spec: ModelSpec, layout: KVLayout, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        expected = page_byte_sizes(spec, layout.page_tokens, dtype)
        assert (layout.full_page_bytes, layout.window_page_bytes) == expected, (layout, expected)
        assert layout.slab_bytes % dtype.itemsize == 0, layout.slab_bytes
        self.layout = layout
        self.dtype = dtype
        self.memory = _zeros(layout.slab_count * layout.slab_bytes, torch.device(device))
        self._page_bytes = {PageKind.FULL: layout.full_page_bytes, PageKind.WINDOW: layout.window_page_bytes}
        self._pages_per_slab = {
            PageKind.FULL: layout.full_pages_per_slab,
            PageKind.WINDOW: layout.window_pages_per_slab,
        }
        used = dict.fromkeys(PageKind, 0)
        self.layers = tuple(self._layer(layer, used) for layer in spec.layers)
        self.mtp = tuple(self._layer(layer, used) for layer in spec.mtp_layers)

    def page_bytes(self, kind: PageKind, page: PageId) -> Tensor:
        """The bytes of one page, as a view."""
        slab, index = divmod(page, self._pages_per_slab[kind])
        start = slab * self.layout.slab_bytes + index * self._page_bytes[kind]
        return self.memory[start : start + self._page_bytes[kind]]

    def copy_page(self, kind: PageKind, source: PageId, target: PageId) -> None:
        self.page_bytes(kind, target).copy_(self.page_bytes(kind, source))

    def pages_per_slab(self, kind: PageKind) -> int:
        return self._pages_per_slab[kind]

    def _layer(self, layer: LayerSpec, used: dict[PageKind, int]) -> PagedKV:
        """Views of one layer; `used` counts the elements that earlier layers take in a page of each kind."""
        kind = PageKind.WINDOW if layer.is_window else PageKind.FULL
        attention, page_tokens = layer.attention, self.layout.page_tokens
        views = []
        for dim in (attention.head_dim, attention.value_dim):
            views.append(self._view(kind, attention.kv_heads, dim, offset=used[kind]))
            used[kind] += attention.kv_heads * page_tokens * dim
        return PagedKV(k=views[0], v=views[1])

    def _view(self, kind: PageKind, kv_heads: int, dim: int, *, offset: int) -> Tensor:
        """[slabs, pages_per_slab, KV heads, page_tokens, dim]"""
        layout, itemsize = self.layout, self.dtype.itemsize
        return self.memory.view(self.dtype).as_strided(
            (layout.slab_count, self._pages_per_slab[kind], kv_heads, layout.page_tokens, dim),
            (layout.slab_bytes // itemsize, self._page_bytes[kind] // itemsize, layout.page_tokens * dim, dim, 1),
            offset,
        )
