"""A matrix that is packed a few rows at a time is the one that is packed whole, bit by bit."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from kernels.mxfp4 import Mxfp4
from kernels.native.packed import PackedMatrix, PanelPacking, pack
from kernels.packing import Packing, WholePacking
from kernels.quantized import BlockScaled, Matrix

SHAPES = [(1, 32), (32, 64), (70, 96), (257, 160), (3, 70, 64), (2, 96, 32)]
ODD_SHAPES = [(33, 7), (2, 31, 129), (64, 1)]


def plain(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape).bfloat16()


def fp8(shape: tuple[int, ...]) -> BlockScaled:
    *leading, rows, columns = shape
    return BlockScaled(
        codes=torch.randn(shape).to(torch.float8_e4m3fn),
        scales=torch.rand(*leading, 5, -(-columns // 128)),
        row_scale=torch.randint(0, 5, (rows,), dtype=torch.int32),
    )


def mxfp4(shape: tuple[int, ...]) -> Mxfp4:
    *leading, columns = shape
    return Mxfp4(
        codes=torch.randint(0, 256, (*leading, columns // 2), dtype=torch.uint8),
        scales=torch.randint(100, 150, (*leading, columns // 32), dtype=torch.uint8),
    )


CASES = [(make, shape, int8) for make in (plain, fp8) for shape in SHAPES + ODD_SHAPES for int8 in (False, True)]
CASES += [(mxfp4, shape, False) for shape in SHAPES]


def put_in_pieces(packing: Packing, matrix: Matrix, seed: int) -> Matrix:
    """Pieces of random numbers of rows, in random order, from memory that is overwritten afterwards."""
    chance = random.Random(seed)
    *leading, rows, _ = matrix.shape
    most = chance.choice([1, 5, 32, 64, 1000])
    pieces: list[tuple[int | None, int, int]] = []
    for expert in range(leading[0]) if leading else (None,):
        start = 0
        while start < rows:
            stop = min(rows, start + chance.randint(1, most))
            pieces.append((expert, start, stop))
            start = stop
    chance.shuffle(pieces)
    for expert, start, stop in pieces:
        piece = matrix[start:stop] if expert is None else matrix[expert][start:stop]
        copy = piece.clone() if isinstance(piece, Tensor) else piece
        packing.put(start, copy, expert)
        if isinstance(copy, Tensor):
            copy.zero_()
    return packing.done()


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    return ours.dtype is theirs.dtype and torch.equal(
        ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize(("make", "shape", "int8"), CASES)
def test_panels_filled_in_pieces_are_those_of_the_whole(make, shape: tuple[int, ...], int8: bool) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    matrix = make(shape)
    whole = pack(matrix, int8=int8)
    for seed in range(6):
        found = put_in_pieces(PanelPacking(shape, int8=int8), matrix, seed)
        assert isinstance(found, PackedMatrix)
        assert (found.shape, found.format) == (whole.shape, whole.format)
        assert same_bits(found.data, whole.data)
        assert (found.scales is None) == (whole.scales is None)
        assert found.scales is None or (whole.scales is not None and same_bits(found.scales, whole.scales))


@pytest.mark.parametrize(("make", "shape"), [(make, shape) for make, shape, int8 in CASES if not int8])
def test_panels_hold_the_values_of_their_matrix(make, shape: tuple[int, ...]) -> None:  # type: ignore[no-untyped-def]
    matrix = make(shape)
    values = matrix.float() if isinstance(matrix, Tensor) else matrix.dequantize(torch.float32)
    assert torch.equal(pack(matrix).dequantize(torch.float32), values)


@pytest.mark.parametrize("make", [plain, fp8, mxfp4])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_backend_that_packs_whole_matrices_gets_all_rows(make, shape: tuple[int, ...]) -> None:  # type: ignore[no-untyped-def]
    matrix = make(shape)
    found = put_in_pieces(WholePacking(shape, lambda whole: whole), matrix, 1)
    assert type(found) is type(matrix)
    if isinstance(found, Tensor):
        assert torch.equal(found, matrix)
    else:
        assert torch.equal(found.dequantize(torch.float32), matrix.dequantize(torch.float32))
