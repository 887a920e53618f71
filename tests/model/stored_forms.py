"""One model in every form in which checkpoints store it: plain or fp8, split or fused, with every grid of scales.

Values are whole numbers up to 15 times powers of two, so that each form holds exactly the same ones: what one form
means can be compared with another bit by bit. Scales differ from block to block, so a row that takes its neighbour's
shows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.model.checkpoints import PRO_CONFIG, pro_tensors

Tensors = dict[str, Tensor]
FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

V25_CONFIG: dict[str, Any] = {
    **PRO_CONFIG,
    "num_hidden_layers": 4,
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "moe_layer_freq": [0, 1, 0, 1],
    "hidden_size": 160,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "swa_head_dim": 192,
    "v_head_dim": 128,
    "swa_v_head_dim": 128,
    "intermediate_size": 200,
    "n_routed_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 136,
}
"""MiMo-V2.5 scaled down, with its head dims: four chunks, whose parts meet inside a block of 128 rows."""

PRO8_CONFIG = {**V25_CONFIG, "num_key_value_heads": 8}
"""V2.5-Pro: eight chunks in every layer."""

PROJECTION = re.compile(r".*\.(q|k|v|gate|up|down)_proj\.weight")


def exact_tensors(config: dict[str, Any], *, mtp_layers: int = 1) -> Tensors:
    """The tensors of a split checkpoint in fp32; projections hold exact values."""
    generator = torch.Generator().manual_seed(7)
    tensors = pro_tensors(config, mtp_layers=mtp_layers)
    for name, tensor in tensors.items():
        if PROJECTION.fullmatch(name):
            tensors[name] = exact_matrix(*tensor.shape, generator)
    return tensors


def exact_matrix(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """m * 2^e, |m| < 16, with one e for 50 rows and 128 columns."""
    mantissa = torch.randint(-15, 16, (rows, columns), generator=generator).float()
    exponents = torch.randint(-9, -4, (-(-rows // 50), -(-columns // 128)), generator=generator)
    exponent = exponents.repeat_interleave(50, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return torch.ldexp(mantissa, exponent)


def to_fp8(values: Tensor, period: int | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scales of 128 x 128 blocks, the grid starting anew every `period` rows; exactly the same values."""
    rows, columns = values.shape
    codes, scales = torch.empty_like(values), []
    padded = F.pad(values.abs(), (0, -columns % 128)).unflatten(1, (-1, 128))
    for start in range(0, rows, period or rows):
        stop = min(rows, start + (period or rows))
        for first in range(start, stop, 128):
            span = slice(first, min(stop, first + 128))
            scale = torch.exp2(torch.log2(padded[span].amax((0, 2)).clamp_min(2.0**-20)).floor() - 3)
            codes[span] = values[span] / scale.repeat_interleave(128)[:columns]
            scales.append(scale)
    coded = codes.to(torch.float8_e4m3fn)
    assert torch.equal(coded.float(), codes), "the values are not exact in fp8"
    return coded, torch.stack(scales)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """at is the tensors' prefix; heads and dims are those of its kind of layer."""

    at: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int


def attentions(config: dict[str, Any], *, mtp_layers: int = 1) -> Iterator[Attention]:
    kinds = [(f"model.layers.{i}", bool(window)) for i, window in enumerate(config["hybrid_layer_pattern"])]
    for at, is_window in kinds + [(f"model.mtp.layers.{i}", True) for i in range(mtp_layers)]:
        kind = "swa_" if is_window else ""
        yield Attention(
            at=f"{at}.self_attn.",
            heads=config[f"{kind}num_attention_heads"],
            kv_heads=config[f"{kind}num_key_value_heads"],
            head_dim=config[f"{kind}head_dim"],
            value_dim=config[f"{kind}v_head_dim"],
        )


def split_fp8(tensors: Tensors, config: dict[str, Any], *, restart_at_heads: str = "") -> Tensors:
    """Every projection but o_proj in fp8; the grids of the named parts ("k", "qkv") start anew at every head."""
    stored = dict(tensors)
    periods = {}
    for attention in attentions(config):
        dims = {"q": attention.head_dim, "k": attention.head_dim, "v": attention.value_dim}
        periods |= {f"{attention.at}{part}_proj.weight": dims[part] for part in restart_at_heads}
    for name, tensor in tensors.items():
        if PROJECTION.fullmatch(name):
            stored[name], stored[f"{name}_scale_inv"] = to_fp8(tensor, periods.get(name))
    return stored


def fuse(tensors: Tensors, config: dict[str, Any], chunks: int) -> tuple[Tensors, dict[str, int]]:
    """q, k and v of every layer in one tensor: chunk c is the c-th share of each. Also the rows of a chunk by name."""
    stored, chunk_rows = dict(tensors), {}
    for attention in attentions(config):
        parts = [stored.pop(f"{attention.at}{part}_proj.weight") for part in "qkv"]
        shares = [part.chunk(chunks) for part in parts]
        rows = [share[c] for c in range(chunks) for share in shares]
        name = f"{attention.at}qkv_proj.weight"
        stored[name] = torch.cat(rows)
        chunk_rows[name] = stored[name].shape[0] // chunks
    return stored, chunk_rows


def fused_fp8(tensors: Tensors, config: dict[str, Any], chunks: int) -> Tensors:
    """As Xiaomi stores V2.5 (4 chunks) and V2.5-Pro (8): scales tiled chunk by chunk. One chunk is plain [Q; K; V]."""
    fused, chunk_rows = fuse(tensors, config, chunks)
    stored = dict(fused)
    for name, tensor in fused.items():
        if PROJECTION.fullmatch(name) or name in chunk_rows:
            stored[name], stored[f"{name}_scale_inv"] = to_fp8(tensor, chunk_rows.get(name))
    return stored


def in_bf16(tensors: Tensors) -> Tensors:
    """Projections in bf16, which loses nothing of exact values; the rest as it is."""
    return {
        name: tensor.bfloat16() if PROJECTION.fullmatch(name) or "qkv_proj" in name else tensor
        for name, tensor in tensors.items()
    }


Form = Callable[[Tensors, dict[str, Any]], Tensors]
FORMS: dict[str, Form] = {
    "bf16 split": lambda tensors, config: in_bf16(tensors),
    "fp8 split": split_fp8,
    "fp8 split, k's grid per head": lambda tensors, config: split_fp8(tensors, config, restart_at_heads="k"),
    "fp8 split, all grids per head": lambda tensors, config: split_fp8(tensors, config, restart_at_heads="qkv"),
    "fp8 fused in chunks": lambda tensors, config: fused_fp8(tensors, config, config["num_key_value_heads"]),
    "fp8 fused, plain": lambda tensors, config: fused_fp8(tensors, config, 1),
    "bf16 fused in chunks": lambda tensors, config: in_bf16(fuse(tensors, config, config["num_key_value_heads"])[0]),
}
