"""The published shapes of MiMo-V2-Flash, V2.5 and V2.5-Pro: how their scales map to rows. Headers only, no data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from server.model.families import spec_from_config, tensor_names
from server.model.safetensors_files import TensorInfo
from server.model.spec import ModelSpec
from server.model.stored_rows import StoredRows, locate
from server.model.weights import tensor_shapes, weight_bytes
from tests.model.checkpoints import PRO_CONFIG

FLASH: dict[str, Any] = {
    **PRO_CONFIG,
    "num_hidden_layers": 2,
    "hybrid_layer_pattern": [0, 1],
    "moe_layer_freq": [0, 1],
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "swa_num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "swa_head_dim": 192,
    "v_head_dim": 128,
    "swa_v_head_dim": 128,
    "intermediate_size": 16384,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "vocab_size": 152_576,
}
PRO = {
    **FLASH,
    "hidden_size": 6144,
    "num_attention_heads": 128,
    "swa_num_attention_heads": 128,
    "num_key_value_heads": 8,
    "n_routed_experts": 384,
}


@dataclass
class Headers:
    """A checkpoint of which only the headers are there."""

    tensors: dict[str, TensorInfo]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    is_gguf: bool = False

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        raise AssertionError("nothing is read")

    def read_into(self, target: Tensor, name: str, start: int = 0) -> None:
        raise AssertionError("nothing is read")


def headers(spec: ModelSpec, scale_rows: Mapping[str, int], *, fused: bool) -> Headers:
    """As published; scale_rows by the end of a tensor's name, where it is not one for 128 rows."""
    shapes, names = tensor_shapes(spec), tensor_names(spec, gguf=False)
    found: dict[str, tuple[int, ...]] = {}
    for canonical, shape in shapes.items():
        part = canonical.rpartition(".")[2]
        if fused and part in ("q", "k", "v"):
            name = names.candidates(canonical, "model.")[1]
            found[name] = (found.get(name, (0,))[0] + shape[0], shape[1])
        else:
            found[names.candidates(canonical, "model.")[0]] = shape
    tensors = {}
    for name, shape in found.items():
        is_fp8 = name.endswith("_proj.weight") and "o_proj" not in name
        kind = "F8_E4M3" if is_fp8 else "BF16"
        tensors[name] = TensorInfo(shape=shape, dtype=kind, stored_bytes=1, offset=0)
        if is_fp8:
            rows = next((count for end, count in scale_rows.items() if name.endswith(end)), -(-shape[0] // 128))
            grid = (rows, -(-shape[1] // 128))
            tensors[f"{name}_scale_inv"] = TensorInfo(shape=grid, dtype="F32", stored_bytes=1, offset=0)
    return Headers(tensors)


def located(config: dict[str, Any], scale_rows: Mapping[str, int], *, fused: bool) -> dict[str, StoredRows]:
    spec = spec_from_config(config, mtp_layers=1)
    return locate(spec, tensor_shapes(spec), headers(spec, scale_rows, fused=fused), tensor_names(spec, gguf=False))


def scale_rows_of(rows: StoredRows) -> list[int]:
    assert rows.scales is not None
    return rows.scales.row(torch.cat([torch.arange(start, stop) for start, stop in rows.spans])).tolist()


def test_flash_k_starts_its_grid_anew_at_every_head() -> None:
    found = located(FLASH, {"model.layers.0.self_attn.k_proj.weight": 8}, fused=False)
    k = found["layers.0.k"]
    assert k.rows == 768
    assert scale_rows_of(k) == [2 * (row // 192) + row % 192 // 128 for row in range(768)]
    assert scale_rows_of(found["layers.1.k"]) == [row // 128 for row in range(1536)]
    assert scale_rows_of(found["layers.0.v"]) == [row // 128 for row in range(512)]
    assert scale_rows_of(found["layers.0.q"])[-1] == 95


@pytest.mark.parametrize(
    ("config", "layer", "chunks", "chunk_scales", "total"),
    [(FLASH, 0, 4, 27, 108), (FLASH, 1, 4, 29, 116), (PRO, 0, 8, 27, 216), (PRO, 1, 8, 27, 216)],
)
def test_fused_tensors_have_the_published_rows_of_scales(
    config: dict[str, Any], layer: int, chunks: int, chunk_scales: int, total: int
) -> None:
    attention = spec_from_config(config).layers[layer].attention
    rows = (108, 116, 116) if config is FLASH else (216, 216, 216)
    places = ("model.layers.0", "model.layers.1", "model.mtp.layers.0")
    published = {f"{at}.self_attn.qkv_proj.weight": count for at, count in zip(places, rows, strict=True)}
    found = located(config, published, fused=True)
    q, k, v = (found[f"layers.{layer}.{part}"] for part in "qkv")
    assert q.scales is not None
    assert q.scales.rows == total == chunks * chunk_scales
    assert (q.rows, k.rows, v.rows) == (
        attention.heads * 192,
        attention.kv_heads * 192,
        attention.kv_heads * 128,
    )
    chunk_rows = (q.rows + k.rows + v.rows) // chunks
    for part, offset in ((q, 0), (k, q.rows // chunks), (v, (q.rows + k.rows) // chunks)):
        expected = [
            c * chunk_scales + (offset + row) // 128 for c in range(chunks) for row in range(part.rows // chunks)
        ]
        assert scale_rows_of(part) == expected
        assert part.spans == tuple(
            (c * chunk_rows + offset, c * chunk_rows + offset + part.rows // chunks) for c in range(chunks)
        )


def test_a_plain_fused_tensor_of_v25_is_told_by_its_106_rows() -> None:
    found = located(FLASH, {}, fused=True)
    assert found["layers.0.q"].spans == ((0, 12288),)
    assert found["layers.0.k"].spans == ((12288, 13056),)
    assert scale_rows_of(found["layers.0.v"]) == [102 + row // 128 for row in range(512)]
    assert found["layers.1.k"].spans == ((12288, 13824),)


def test_flash_takes_little_more_than_a_byte_per_weight() -> None:
    spec = spec_from_config(FLASH)
    fp8 = weight_bytes(
        spec, torch.bfloat16, checkpoint=headers(spec, {"model.layers.0.self_attn.k_proj.weight": 8}, fused=False)
    )
    moe = 256 * 3 * 2048 * 4096
    assert fp8 < weight_bytes(spec, torch.bfloat16) - 0.999 * moe
