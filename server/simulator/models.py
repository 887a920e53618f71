"""What of a model the cache has to know: which layers see everything, and the bytes of their K/V."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from server.config import KVLayout
from server.errors import StartupError
from server.model.families import spec_from_config
from server.model.json_file import read_json_object
from server.model.kv_layout import choose_slab_bytes
from server.rebuild import RebuildShape, shape_of

ITEM_BYTES = 2
"""K/V in 16 bits."""
MOST_MTP_LAYERS = 64
MIMO_MTP_LAYERS = 3
"""Of the released checkpoints, whose configs do not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """is_window, layer by layer. Bytes of one position in all full layers, and in all window and MTP layers."""

    name: str
    is_window: tuple[bool, ...]
    mtp_layers: int
    window_tokens: int
    full_token_bytes: int
    window_token_bytes: int

    @property
    def rebuild(self) -> RebuildShape:
        return shape_of(self.is_window, window_tokens=self.window_tokens, mtp_layers=self.mtp_layers)

    def layout(self, *, page_tokens: int, budget_bytes: float) -> KVLayout:
        """Raises StartupError if not even one slab fits."""
        full, window = self.full_token_bytes * page_tokens, self.window_token_bytes * page_tokens
        slab_bytes = choose_slab_bytes(full, window)
        if budget_bytes < slab_bytes:
            raise StartupError(
                f"--budget-gb: {self.name} needs at least {slab_bytes / 1e9:.3g} GB for one slab of pages"
            )
        return KVLayout(
            page_tokens=page_tokens,
            window_tokens=self.window_tokens,
            full_page_bytes=full,
            window_page_bytes=window,
            slab_bytes=slab_bytes,
            slab_count=int(budget_bytes // slab_bytes),
        )


def _mimo(name: str, layers: int, full_at: tuple[int, ...], full_kv_heads: int) -> CacheShape:
    """Head dims of 192 and 128, 8 KV heads in window layers, three MTP layers, 129 keys seen: the released configs."""
    per_head = (192 + 128) * ITEM_BYTES
    windows = layers - len(full_at) + MIMO_MTP_LAYERS
    return CacheShape(
        name=name,
        is_window=tuple(layer not in full_at for layer in range(layers)),
        mtp_layers=MIMO_MTP_LAYERS,
        window_tokens=128,
        full_token_bytes=len(full_at) * full_kv_heads * per_head,
        window_token_bytes=windows * 8 * per_head,
    )


PRESETS = {
    shape.name: shape
    for shape in (
        _mimo("mimo-v2.5-pro", 70, (0, 7, 15, 23, 31, 39, 47, 55, 62, 69), 8),
        _mimo("mimo-v2.5", 48, (0, 5, 11, 17, 23, 29, 35, 41, 47), 4),
        _mimo("mimo-v2-flash", 48, (0, 5, 11, 17, 23, 29, 35, 41, 47), 4),
    )
}


def shape_named(wanted: str) -> CacheShape:
    """A preset, or what a config.json says. Raises StartupError."""
    if wanted in PRESETS:
        return PRESETS[wanted]
    path = Path(os.path.expanduser(wanted))  # which leaves the home of nobody as it is
    if os.path.isdir(path):
        path /= "config.json"
    if not os.path.isfile(path):  # False for what cannot be a name, too
        close = difflib.get_close_matches(wanted, PRESETS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise StartupError(f"--model-config: {wanted[:200]!r} is no file and no preset ({', '.join(PRESETS)}){hint}")
    config = read_json_object(path)
    released = MIMO_MTP_LAYERS if str(config.get("model_type", "")).startswith("mimo_v2") else 0
    mtp_layers = config.get("num_nextn_predict_layers") or released
    if type(mtp_layers) is not int or not 0 <= mtp_layers <= MOST_MTP_LAYERS:
        raise StartupError(
            f"--model-config: {path}: num_nextn_predict_layers is no number of layers from 0 to {MOST_MTP_LAYERS}"
        )
    spec = spec_from_config(config, mtp_layers=mtp_layers)
    return CacheShape(
        name=path.parent.name or path.name,
        is_window=tuple(layer.is_window for layer in spec.layers),
        mtp_layers=len(spec.mtp_layers),
        window_tokens=spec.window_tokens,
        full_token_bytes=spec.kv_elements_per_token(window=False) * ITEM_BYTES,
        window_token_bytes=spec.kv_elements_per_token(window=True) * ITEM_BYTES,
    )
