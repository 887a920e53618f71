"""Matrices that stay in memory as the checkpoint stores them: codes and scales, multiplied out only when they are used.

`Matrix` is what `pack`, `linear` and `experts` take: a plain tensor, or anything that can be read as a
`QuantizedMatrix`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

BLOCK_COLUMNS = 128
"""Columns that share a scale in a `BlockScaled` matrix."""

_CHUNK_ELEMENTS = 16 * 2**20
"""Elements of fp32 that dequantizing holds beside its result."""

Index = int | slice | tuple[int | slice, ...]


@runtime_checkable
class QuantizedMatrix(Protocol):
    """[..., N, K] with N output rows of K input columns, in codes. Index it as a tensor: by leading axes (experts), and
    by slices of rows."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def nbytes(self) -> int: ...

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[..., N, K]: each value computed in fp32 and rounded once, to dtype."""
        ...

    def __getitem__(self, index: Index) -> Self:
        """A view. Raises IndexError for columns, and for a single row, which would be no matrix."""
        ...


Matrix = Tensor | QuantizedMatrix


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockScaled:
    """codes float8_e4m3fn [..., N, K], scales fp32 [..., R, ceil(K / 128)], row_scale int32 [N].

    Element [n, k] is codes[n, k] * scales[row_scale[n], k // 128]. Every row says which row of scales is its own, so
    rows can be cut, joined and put in another order without changing a value: the 128 rows that share a scale in the
    file need not stay together.
    """

    codes: Tensor
    scales: Tensor
    row_scale: Tensor

    def __post_init__(self) -> None:
        *leading, rows, columns = self.codes.shape
        blocks = -(-columns // BLOCK_COLUMNS)
        wanted = (*leading, self.scales.shape[-2], blocks)
        assert self.codes.dtype is torch.float8_e4m3fn and self.scales.dtype is torch.float32
        assert self.row_scale.dtype is torch.int32 and self.row_scale.shape == (rows,), self.row_scale.shape
        assert self.scales.shape == wanted, (self.codes.shape, self.scales.shape)

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.row_scale.nbytes

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        values = torch.empty(self.codes.shape, dtype=dtype, device=self.codes.device)
        rows, columns = self.codes.shape[-2:]
        step = max(1, _CHUNK_ELEMENTS // max(1, self.codes[..., :1, :].numel()))
        for start in range(0, rows, step):
            span = slice(start, min(rows, start + step))
            scales = self.scales[..., self.row_scale[span].long(), :].repeat_interleave(BLOCK_COLUMNS, -1)
            values[..., span, :] = self.codes[..., span, :].float().mul_(scales[..., :columns])
        return values

    def __getitem__(self, index: Index) -> BlockScaled:
        leading, rows = split_index(index, self.codes.dim() - 2)
        return BlockScaled(
            codes=self.codes[(*leading, ..., rows, slice(None))],
            scales=self.scales[(*leading, ...)],
            row_scale=self.row_scale[rows],
        )


def dense(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """A plain tensor as it is, a quantized one as values of dtype."""
    return matrix if isinstance(matrix, Tensor) else matrix.dequantize(dtype)


def split_index(index: Index, leading_axes: int) -> tuple[tuple[int | slice, ...], slice]:
    """What `QuantizedMatrix.__getitem__` is asked for: leading axes, and a slice of rows."""
    parts = index if isinstance(index, tuple) else (index,)
    if len(parts) > leading_axes + 1:
        raise IndexError("columns of a quantized matrix cannot be chosen")
    rows = parts[leading_axes] if len(parts) > leading_axes else slice(None)
    if not isinstance(rows, slice):
        raise IndexError("rows of a quantized matrix are chosen by a slice")
    return parts[:leading_axes], rows
