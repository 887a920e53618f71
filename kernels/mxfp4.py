"""MXFP4 matrices: 4-bit codes, 32 of them in a row to a scale.

Format: OCP Microscaling Formats (MX) v1.0, sections 5.3.3 (E2M1), 5.4.1 (E8M0) and 6. The order of the two codes of a
byte is that of gpt-oss's files: the low nibble is the even element (`_convert_moe_packed_tensors` in transformers
5.24, `integrations/mxfp4.py`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.quantized import Index, split_index

BLOCK_COLUMNS = 32
"""Columns that share a scale."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What each code means."""

_CHUNK_ELEMENTS = 2**20
"""Elements of fp32 that dequantizing holds beside its result: few enough to stay in the caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4:
    """codes uint8 [..., N, K / 2], the low nibble of byte b being column 2 * b; scales uint8 [..., N, K / 32].

    Element [n, k] is E2M1[code] * 2 ** (scales[n, k // 32] - 127); scale 255 means NaN. Implements
    `kernels.quantized.QuantizedMatrix`.
    """

    codes: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        *leading, bytes_per_row = self.codes.shape
        assert self.codes.dtype is torch.uint8 and self.scales.dtype is torch.uint8
        assert self.scales.shape == (*leading, bytes_per_row * 2 // BLOCK_COLUMNS), (
            self.codes.shape,
            self.scales.shape,
        )
        assert bytes_per_row * 2 % BLOCK_COLUMNS == 0, self.codes.shape

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] * 2))

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[..., N, K]: each value computed in fp32, which is exact but for overflow to infinity, and rounded once."""
        device = self.codes.device
        pairs, powers = _pairs().to(device), _powers().to(device)
        values = torch.empty(self.shape, dtype=dtype, device=device)
        rows, columns = self.shape[-2:]
        step = max(1, _CHUNK_ELEMENTS // max(1, math.prod(self.shape[:-2]) * columns))
        for start in range(0, rows, step):
            span = slice(start, min(rows, start + step))
            # As an embedding a byte's two elements are looked up several times faster than by indexing.
            elements = F.embedding(self.codes[..., span, :].int(), pairs)  # [..., rows, K / 2, 2]
            scales = powers[self.scales[..., span, :].int()]  # [..., rows, K / 32]
            blocks = elements.view(*scales.shape, BLOCK_COLUMNS).mul_(scales[..., None])
            values[..., span, :] = blocks.flatten(-2)
        return values

    def __getitem__(self, index: Index) -> Mxfp4:
        leading, rows = split_index(index, self.codes.dim() - 2)
        at = (*leading, ..., rows, slice(None))
        return Mxfp4(codes=self.codes[at], scales=self.scales[at])


@functools.cache
def _pairs() -> Tensor:
    """[256, 2] fp32: the even and the odd element of each byte."""
    return torch.tensor([(E2M1[byte & 15], E2M1[byte >> 4]) for byte in range(256)])


@functools.cache
def _powers() -> Tensor:
    """[256] fp32: what each scale means. 2 ** -127 is a subnormal fp32, and exact."""
    return torch.tensor([2.0 ** (scale - 127) for scale in range(255)] + [math.nan])
