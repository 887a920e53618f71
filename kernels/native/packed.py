"""Weight matrices in the layout that csrc/gemm.h multiplies: panels of 32 outputs, inputs in pairs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.mxfp4 import Mxfp4
from kernels.native import library
from kernels.quantized import BLOCK_COLUMNS, BlockScaled, Index, Matrix

PANEL = 32
INT8_STEPS = 127


class Format(IntEnum):
    BF16 = 0
    INT8 = 1
    MXFP4 = 2
    FP8 = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrix:
    """A matrix [..., N, K] in panels; a `kernels.quantized.QuantizedMatrix`.

    With P = ceil(N / 32) panels and C = ceil(K / 2) pairs: data [..., P, C, 32] holds a pair of bf16 values as int32,
    of int8 or fp8 codes as int16, of mxfp4 codes as uint8. scales: int8 fp32 [..., P, 32]; fp8 fp32
    [..., P, ceil(K / 128), 32]; mxfp4 e8m0 uint8 [..., P, K / 32, 32]; bf16 None.
    """

    shape: torch.Size
    format: Format
    data: Tensor
    scales: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        rows, columns = self.shape[-2:]
        pairs = self.data.transpose(-1, -2).flatten(-3, -2)  # [..., P * 32, C]
        if self.format is Format.BF16:
            values = pairs.contiguous().view(torch.bfloat16)
            return values[..., :rows, :columns].to(dtype)
        assert self.scales is not None
        if self.format is Format.INT8:
            values = pairs.contiguous().view(torch.int8).float() * self.scales.flatten(-2)[..., None]
        elif self.format is Format.FP8:
            scales = self.scales.transpose(-1, -2).flatten(-3, -2).repeat_interleave(BLOCK_COLUMNS, -1)
            codes = pairs.contiguous().view(torch.float8_e4m3fn)
            values = codes.float() * scales[..., : codes.shape[-1]]
        else:
            scales = self.scales.transpose(-1, -2).flatten(-3, -2)  # [..., P * 32, K / 32]
            return Mxfp4(codes=pairs.contiguous(), scales=scales.contiguous()).dequantize(dtype)[..., :rows, :columns]
        return values[..., :rows, :columns].to(dtype)

    def __getitem__(self, index: Index) -> PackedMatrix:
        if not isinstance(index, int) or len(self.shape) != 3:
            raise IndexError("of a packed matrix only whole experts can be chosen")
        return PackedMatrix(
            shape=torch.Size(self.shape[1:]),
            format=self.format,
            data=self.data[index],
            scales=None if self.scales is None else self.scales[index],
        )

    def struct(self) -> library.Matrix:
        """What C reads; valid as long as this object lives."""
        rows, columns = self.shape
        return library.Matrix(
            data=self.data.data_ptr(),
            scales=None if self.scales is None else self.scales.data_ptr(),
            n=rows,
            k=columns,
            format=int(self.format),
        )


def pack(matrix: Matrix, *, int8: bool = False) -> PackedMatrix:
    """[..., N, K] in panels. Plain values are rounded to bf16, or to int8 with one scale a row; codes stay the codes
    they are."""
    if isinstance(matrix, PackedMatrix):
        return matrix
    if isinstance(matrix, BlockScaled):
        scales = matrix.scales[..., matrix.row_scale.long(), :]
        return PackedMatrix(
            shape=matrix.shape,
            format=Format.FP8,
            data=_pairs(matrix.codes.view(torch.uint8), torch.int16),
            scales=_panels(scales).transpose(-1, -2).contiguous(),
        )
    if isinstance(matrix, Mxfp4):
        return PackedMatrix(
            shape=matrix.shape,
            format=Format.MXFP4,
            data=_pairs(matrix.codes, torch.uint8),
            scales=_panels(matrix.scales).transpose(-1, -2).contiguous(),
        )
    if not isinstance(matrix, Tensor):
        raise TypeError(type(matrix).__name__)
    if int8:
        wide = matrix.float()
        largest = wide.abs().amax(-1).clamp(min=1e-35)
        codes = torch.round(wide * (INT8_STEPS / largest)[..., None]).to(torch.int8)
        return PackedMatrix(
            shape=matrix.shape,
            format=Format.INT8,
            data=_pairs(codes, torch.int16),
            scales=_panels((largest / INT8_STEPS)[..., None]).squeeze(-1).contiguous(),
        )
    return PackedMatrix(shape=matrix.shape, format=Format.BF16, data=_pairs(matrix.to(torch.bfloat16), torch.int32))


def _panels(rows: Tensor) -> Tensor:
    """[..., N, X] -> [..., P, 32, X], padded with zeros."""
    padded = F.pad(rows, (0, 0, 0, -rows.shape[-2] % PANEL))
    return padded.reshape(*padded.shape[:-2], -1, PANEL, padded.shape[-1])


def _pairs(values: Tensor, pair: torch.dtype) -> Tensor:
    """[..., N, K] -> [..., P, C, 32] of pairs."""
    odd = values.shape[-1] % (pair.itemsize // values.element_size())
    if odd or values.shape[-2] % PANEL:
        values = F.pad(values, (0, odd, 0, -values.shape[-2] % PANEL))
    joined = values.contiguous().view(pair)  # [..., P * 32, C]
    return joined.reshape(*joined.shape[:-2], -1, PANEL, joined.shape[-1]).transpose(-1, -2).contiguous()
