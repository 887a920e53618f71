"""Weight matrices in the layout that csrc/gemm.h multiplies: panels of 32 outputs, inputs in pairs."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.mxfp4 import Mxfp4
from kernels.native import library
from kernels.native.bf12 import Bf12Packing, Bf12Panels, unpack
from kernels.native.memory import WEIGHTS
from kernels.quantized import BLOCK_COLUMNS, BlockScaled, Index, Matrix

PANEL = 32
INT8_STEPS = 127


class Format(IntEnum):
    BF16 = 0
    INT8 = 1
    MXFP4 = 2
    FP8 = 3
    BF12 = 4
    """bf16 in 12 bits, without loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrix:
    """A matrix [..., N, K] in panels; a `kernels.quantized.QuantizedMatrix`.

    With P = ceil(N / 32) panels and C = ceil(K / 2) pairs: data [..., P, C, 32] holds a pair of bf16 values as int32,
    of int8 or fp8 codes as int16, of mxfp4 codes as uint8. scales: int8 fp32 [..., P, 32]; fp8 fp32
    [..., P, ceil(K / 128), 32]; mxfp4 e8m0 uint8 [..., P, K / 32, 32]; bf16 None. bf12: see `Bf12Panels`, whose tables
    are the scales.
    """

    shape: torch.Size
    format: Format
    data: Tensor
    scales: Tensor | None = None
    escapes: Tensor | None = None
    escape_starts: Tensor | None = None

    @property
    def nbytes(self) -> int:
        parts = (self.data, self.scales, self.escapes, self.escape_starts)
        return sum(part.nbytes for part in parts if part is not None)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        rows, columns = self.shape[-2:]
        if self.format is Format.BF12:
            return unpack(self._bf12())[..., :rows, :columns].to(dtype)
        # A copy, since a tensor with one pair a row counts as contiguous as it is, and cannot be viewed.
        pairs = self.data.transpose(-1, -2).flatten(-3, -2).clone(memory_format=torch.contiguous_format)
        if self.format is Format.BF16:
            values = pairs.view(torch.bfloat16)
            return values[..., :rows, :columns].to(dtype)
        assert self.scales is not None
        if self.format is Format.INT8:
            values = pairs.view(torch.int8).float() * self.scales.flatten(-2)[..., None]
        elif self.format is Format.FP8:
            scales = self.scales.transpose(-1, -2).flatten(-3, -2).repeat_interleave(BLOCK_COLUMNS, -1)
            codes = pairs.view(torch.float8_e4m3fn)
            values = codes.float() * scales[..., : codes.shape[-1]]
        else:
            scales = self.scales.transpose(-1, -2).flatten(-3, -2)  # [..., P * 32, K / 32]
            return Mxfp4(codes=pairs, scales=scales.contiguous()).dequantize(dtype)[..., :rows, :columns]
        return values[..., :rows, :columns].to(dtype)

    def __getitem__(self, index: Index) -> PackedMatrix:
        if not isinstance(index, int) or len(self.shape) != 3:
            raise IndexError("of a packed matrix only whole experts can be chosen")
        panels = self.data.shape[1]
        starts = self.escape_starts
        return PackedMatrix(
            shape=torch.Size(self.shape[1:]),
            format=self.format,
            data=self.data[index],
            scales=None if self.scales is None else self.scales[index],
            escapes=self.escapes,
            escape_starts=None if starts is None else starts[index * panels : (index + 1) * panels + 1],
        )

    def struct(self) -> library.Matrix:
        """What C reads; valid as long as this object lives."""
        rows, columns = self.shape
        return library.Matrix(
            data=self.data.data_ptr(),
            scales=_address(self.scales),
            escapes=_address(self.escapes),
            escape_starts=_address(self.escape_starts),
            n=rows,
            k=columns,
            format=int(self.format),
        )

    def _bf12(self) -> Bf12Panels:
        assert self.scales is not None and self.escapes is not None and self.escape_starts is not None
        starts = self.escape_starts
        first, last = int(starts[0]), int(starts[-1])
        return Bf12Panels(data=self.data, tables=self.scales, escapes=self.escapes[first:last], starts=starts - first)


class PanelPacking:
    """A matrix whose panels are written as its rows come. Implements `kernels.packing.Packing`.

    int8: plain values are rounded to int8. bf12: the C library that packs plain values, which are bf16, in 12 bits each
    where that is worth it.
    """

    def __init__(self, shape: Sequence[int], *, int8: bool = False, bf12: ctypes.CDLL | None = None) -> None:
        self.shape = torch.Size(shape)
        self.int8 = int8
        self.matrix: PackedMatrix | None = None
        self._bf12 = bf12
        self._short: Bf12Packing | None = None

    def put(self, start: int, rows: Matrix, expert: int | None = None) -> None:
        if self._bf12 is not None and self.matrix is None and isinstance(rows, Tensor) and not self.int8:
            self._short = self._short or Bf12Packing(self._bf12, self.shape)
            self._short.put(start, rows.to(torch.bfloat16), expert)
            if not self._short.is_worth_it:
                self._begin_again()
            return
        encoded = _encode(rows, int8=self.int8)
        if self.matrix is None:
            self.matrix = self._empty(encoded)
        matrix = self.matrix if expert is None else self.matrix[expert]
        _place(matrix.data, encoded.pairs, start)
        if encoded.scales is not None:
            assert matrix.scales is not None
            one_a_row = matrix.format is Format.INT8
            _place(matrix.scales.unsqueeze(-2) if one_a_row else matrix.scales, encoded.scales, start)

    def done(self) -> PackedMatrix:
        if self._short is not None:
            panels = self._short.done()
            return PackedMatrix(
                shape=self.shape,
                format=Format.BF12,
                data=panels.data,
                scales=panels.tables,
                escapes=panels.escapes,
                escape_starts=panels.starts,
            )
        assert self.matrix is not None
        return self.matrix

    def _begin_again(self) -> None:
        """In plain bf16."""
        assert self._short is not None
        self._bf12, so_far, self._short = None, self._short, None
        for start, rows, expert in so_far.put_so_far():
            self.put(start, rows, expert if len(self.shape) == 3 else None)

    def _empty(self, first: _Encoded) -> PackedMatrix:
        *leading, rows, _ = self.shape

        def panels(like: Tensor) -> Tensor:
            shape = (*leading, -(-rows // PANEL), like.shape[-1], PANEL)
            made = WEIGHTS.empty(math.prod(shape) * like.element_size()).view(like.dtype).view(shape)
            if rows % PANEL:
                made[..., -1, :, rows % PANEL :] = 0
            return made

        scales = None if first.scales is None else panels(first.scales)
        if scales is not None and first.format is Format.INT8:
            scales = scales.squeeze(-2)
        return PackedMatrix(shape=self.shape, format=first.format, data=panels(first.pairs), scales=scales)


def pack(matrix: Matrix, *, int8: bool = False, bf12: ctypes.CDLL | None = None) -> PackedMatrix:
    """[..., N, K] in panels. Plain values are rounded to bf16, or to int8 with one scale a row; codes stay the codes
    they are."""
    if isinstance(matrix, PackedMatrix):
        return matrix
    packing = PanelPacking(matrix.shape, int8=int8, bf12=bf12)
    packing.put(0, matrix)
    return packing.done()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encoded:
    """Rows before they go into panels: pairs [..., n, C] and scales [..., n, X]."""

    format: Format
    pairs: Tensor
    scales: Tensor | None = None


def _encode(rows: Matrix, *, int8: bool) -> _Encoded:
    if isinstance(rows, BlockScaled):
        pairs = _pairs(rows.codes.view(torch.uint8), torch.int16)
        return _Encoded(format=Format.FP8, pairs=pairs, scales=rows.scales[..., rows.row_scale.long(), :])
    if isinstance(rows, Mxfp4):
        return _Encoded(format=Format.MXFP4, pairs=rows.codes, scales=rows.scales)
    if not isinstance(rows, Tensor):
        raise TypeError(type(rows).__name__)
    if not int8:
        return _Encoded(format=Format.BF16, pairs=_pairs(rows.to(torch.bfloat16), torch.int32))
    wide = rows.to(torch.float32, copy=True)
    least, most = wide.aminmax(dim=-1, keepdim=True)
    largest = torch.maximum(-least, most).clamp(min=1e-35)
    codes = wide.mul_(INT8_STEPS / largest).round_().to(torch.int8)
    return _Encoded(format=Format.INT8, pairs=_pairs(codes, torch.int16), scales=largest / INT8_STEPS)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _pairs(values: Tensor, pair: torch.dtype) -> Tensor:
    """[..., n, K] -> [..., n, C] of pairs."""
    odd = values.shape[-1] % (pair.itemsize // values.element_size())
    return (F.pad(values, (0, odd)) if odd else values.contiguous()).view(pair)


def _place(panels: Tensor, rows: Tensor, start: int) -> None:
    """rows [..., n, X] become rows [start, start + n) of panels [..., P, X, 32]."""
    done, count = 0, rows.shape[-2]
    while done < count:
        panel, lane = divmod(start + done, PANEL)
        if lane or count - done < PANEL:
            taken = min(PANEL - lane, count - done)
            panels[..., panel, :, lane : lane + taken] = rows[..., done : done + taken, :].transpose(-1, -2)
        else:
            whole = (count - done) // PANEL
            taken = whole * PANEL
            full = rows[..., done : done + taken, :].reshape(*rows.shape[:-2], whole, PANEL, rows.shape[-1])
            panels[..., panel : panel + whole, :, :] = full.transpose(-1, -2)
        done += taken
