"""Packing a matrix of which only some rows are there at a time, so that it never exists twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.mxfp4 import Mxfp4
from kernels.quantized import BlockScaled, Matrix


class Packing(Protocol):
    """A matrix [N, K] or experts [E, N, K] on its way into the form that a backend's `linear` reads.

    The result is what `Kernels.pack` makes of the whole, bit for bit. Owner: the thread that fills it.
    """

    def put(self, start: int, rows: Matrix, expert: int | None = None) -> None:
        """Rows [start, start + n), of one expert where there are several. They are copied, so their memory may be used
        again. Every row is put once, in any order and number; a `BlockScaled` has all scales of its matrix."""
        ...

    def done(self) -> Matrix:
        """The matrix, when all its rows were put."""
        ...


class WholePacking:
    """For backends whose `pack` wants the whole matrix: it is held until then."""

    def __init__(self, shape: Sequence[int], pack: Callable[[Matrix], Matrix]) -> None:
        self.shape = tuple(shape)
        self.pack = pack
        self.whole: Matrix | None = None

    def put(self, start: int, rows: Matrix, expert: int | None = None) -> None:
        if self.whole is None:
            self.whole = self._empty(rows)
        at = slice(start, start + rows.shape[-2])
        lead = () if expert is None else (expert,)
        if isinstance(rows, BlockScaled):
            assert isinstance(self.whole, BlockScaled)
            self.whole.codes[(*lead, at)] = rows.codes
            self.whole.scales[lead] = rows.scales
            self.whole.row_scale[at] = rows.row_scale
        elif isinstance(rows, Mxfp4):
            assert isinstance(self.whole, Mxfp4)
            self.whole.codes[(*lead, at)] = rows.codes
            self.whole.scales[(*lead, at)] = rows.scales
        else:
            assert isinstance(self.whole, Tensor) and isinstance(rows, Tensor)
            self.whole[(*lead, at)] = rows

    def done(self) -> Matrix:
        assert self.whole is not None
        return self.pack(self.whole)

    def _empty(self, rows: Matrix) -> Matrix:
        leading, count = self.shape[:-2], self.shape[-2]
        if isinstance(rows, BlockScaled):
            return BlockScaled(
                codes=rows.codes.new_empty(self.shape),
                scales=rows.scales.new_empty(*leading, *rows.scales.shape[-2:]),
                row_scale=rows.row_scale.new_empty(count),
            )
        if isinstance(rows, Mxfp4):
            return Mxfp4(
                codes=rows.codes.new_empty(*leading, count, rows.codes.shape[-1]),
                scales=rows.scales.new_empty(*leading, count, rows.scales.shape[-1]),
            )
        assert isinstance(rows, Tensor)
        return torch.empty(self.shape, dtype=rows.dtype, device=rows.device)
