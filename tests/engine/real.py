"""Houses with the real runner: tiny random checkpoints, or real weights, in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kernels.reference import ReferenceKernels
from server.cache.prefix_tree import NO_PAGE
from server.config import KVLayout
from server.model.checkpoint import GGUFCheckpoint
from server.model.decoder import Decoder
from server.model.families import spec_from_gguf
from server.model.gguf_file import GGUFFile
from server.model.kv_arena import KVArena, page_byte_sizes
from server.model.kv_layout import choose_slab_bytes
from server.model.runner import ModelRunner
from server.model.spec import ModelSpec
from server.model.weights import Weights, load_weights
from server.step import PageId, PageKind
from tests.house import House
from tests.model.checkpoints import PRO_CONFIG, load_folder, pro_tensors, write_checkpoint


def mimo_config(window: int) -> dict[str, Any]:
    """MiMo-V2.5-Pro's shape scaled down, with `window` earlier positions seen by its window layers."""
    return {**PRO_CONFIG, "sliding_window": window, "sliding_window_size": window, "max_position_embeddings": 8192}


def load_mimo(folder: Path, *, window: int) -> tuple[ModelSpec, Weights]:
    config = mimo_config(window)
    write_checkpoint(folder, config, pro_tensors(config))
    return load_folder(folder)


def load_gguf(path: Path, dtype: torch.dtype = torch.float32) -> tuple[ModelSpec, Weights]:
    file = GGUFFile(path)
    spec = spec_from_gguf(file)
    return spec, load_weights(spec, GGUFCheckpoint(file), dtype)


class RealHouse(House):
    """The house over the real runner. How long its steps take decides nothing: the same plans are made each time."""

    def __init__(self, spec: ModelSpec, weights: Weights, *, page_tokens: int = 4, slabs: int, **config: Any) -> None:
        full, window = page_byte_sizes(spec, page_tokens, weights.embedding.dtype)
        layout = KVLayout(
            page_tokens=page_tokens,
            window_tokens=spec.window_tokens,
            full_page_bytes=full,
            window_page_bytes=window,
            slab_bytes=choose_slab_bytes(full, window),
            slab_count=slabs,
        )
        self.arena = KVArena(spec, layout, weights.embedding.dtype)
        runner = ModelRunner(
            Decoder(spec, weights, ReferenceKernels()),
            self.arena,
            slots=config.get("max_sequences", 64),
            context_tokens=spec.context_tokens,
        )
        fixed = {"target_itl_ms": 0.0, "forgiven_tokens_per_s": 500.0}
        super().__init__(layout, runner, context_tokens=spec.context_tokens, rebuild=runner.rebuild, **(fixed | config))

    def poison(self, value: float) -> None:
        """Fill every byte of the arena that no sequence owns, that no step in flight may still read for one that has
        left, and that is no cache. (Such a row is dropped, but what it reads decides which experts it takes along.)"""
        owned = torch.zeros_like(self.arena.memory, dtype=torch.bool)
        whole = self.arena.memory
        pages = [
            (kind, page)
            for kind in PageKind
            for sequence in self.scheduler._running
            for page in self.cache.pages_of(sequence, kind).values()
        ]
        pages += [each for waiting in self.cache._quarantine.values() for each in waiting if isinstance(each, tuple)]
        for node in self.cache._tree.nodes():
            pages += [(PageKind.FULL, PageId(page)) for page in node.full.tolist()]
            pages += [(PageKind.WINDOW, PageId(page)) for page in node.window.tolist() if page != NO_PAGE]
        for kind, page in pages:
            view = self.arena.page_bytes(kind, page)
            start = view.storage_offset()
            owned[start : start + view.numel()] = True
        dtype = self.arena.dtype
        unowned = ~owned.view(-1, dtype.itemsize).any(dim=1)
        whole.view(dtype)[unowned] = value
