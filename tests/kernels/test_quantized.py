"""Quantized matrices: what they mean, and that cutting and joining them changes no value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cpu import CpuKernels
from kernels.quantized import BlockScaled, Index, QuantizedMatrix, dense
from kernels.reference import ReferenceKernels


def random_matrix(rows: int, columns: int, *leading: int, seed: int = 0) -> BlockScaled:
    """Scales are not powers of two, so a wrong order of rounding would show."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(*leading, rows, columns, generator=generator) * 100
    scale_rows = -(-rows // 128)
    return BlockScaled(
        codes=codes.clamp(-448, 448).to(torch.float8_e4m3fn),
        scales=torch.rand(*leading, scale_rows, -(-columns // 128), generator=generator) * 1e-2 + 1e-3,
        row_scale=torch.arange(rows, dtype=torch.int32) // 128,
    )


def written_out(matrix: BlockScaled) -> Tensor:
    """The definition, element by element, of a matrix without leading axes."""
    rows, columns = matrix.shape
    values = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            scale = matrix.scales[int(matrix.row_scale[row]), column // 128]
            values[row, column] = matrix.codes[row, column].float() * scale
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_value_is_its_code_times_its_blocks_scale_rounded_once(dtype: torch.dtype) -> None:
    matrix = random_matrix(150, 200)
    assert torch.equal(matrix.dequantize(dtype), written_out(matrix).to(dtype))


def test_every_code_means_what_the_format_says() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    matrix = BlockScaled(codes=codes, scales=torch.ones(1, 2), row_scale=torch.zeros(1, dtype=torch.int32))
    values = matrix.dequantize(torch.float32)[0]
    for code in range(256):
        exponent, fraction = code >> 3 & 15, code & 7
        if exponent == 15 and fraction == 7:
            assert values[code].isnan()
            continue
        magnitude = (8 + fraction) * 2.0 ** (exponent - 10) if exponent else fraction * 2.0**-9
        assert float(values[code]) == (-magnitude if code & 128 else magnitude)


def test_large_matrices_are_dequantized_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = random_matrix(300, 70, 3)
    whole = matrix.dequantize(torch.bfloat16)
    monkeypatch.setattr("kernels.quantized._CHUNK_ELEMENTS", 1000)
    assert torch.equal(matrix.dequantize(torch.bfloat16), whole)


@pytest.mark.parametrize(
    "index", [0, 2, slice(1, 3), (1, slice(3, 140)), (slice(None), slice(100, 200)), (slice(0, 1), slice(5, 6))]
)
def test_indexing_is_that_of_the_values(index: Index) -> None:
    matrix = random_matrix(200, 130, 3)
    taken = matrix[index]
    values = matrix.dequantize(torch.float32)[index]
    assert taken.shape == values.shape
    assert torch.equal(taken.dequantize(torch.float32), values)


@pytest.mark.parametrize("index", [(0, 1), (0, slice(None), slice(0, 3)), (slice(None), slice(None), 0)])
def test_single_rows_and_columns_cannot_be_chosen(index: Index) -> None:
    with pytest.raises(IndexError):
        random_matrix(4, 4, 2)[index]


def test_a_byte_is_a_code_and_little_more() -> None:
    matrix = random_matrix(1024, 1024)
    assert matrix.nbytes == 1024 * 1024 + 8 * 8 * 4 + 1024 * 4
    assert matrix.nbytes < 1.005 * matrix.codes.numel()
    assert isinstance(matrix, QuantizedMatrix)


@pytest.mark.parametrize("kernels", [ReferenceKernels(), CpuKernels()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_values(kernels: ReferenceKernels, dtype: torch.dtype) -> None:
    matrix, bias = random_matrix(130, 96), torch.randn(130).to(dtype)
    x = torch.randn(5, 96).to(dtype)
    plain = kernels.linear(x, matrix.dequantize(dtype), bias)
    assert torch.equal(kernels.linear(x, kernels.pack(matrix), bias), plain)


def test_experts_are_those_of_the_values() -> None:
    kernels = ReferenceKernels()
    gate_up, down = random_matrix(2 * 64, 32, 4, seed=1), random_matrix(32, 64, 4, seed=2)
    x, chosen = torch.randn(7, 32), torch.randint(4, (7, 2))
    weights = torch.rand(7, 2)
    quantized = kernels.experts(x, chosen, weights, gate_up, down, "silu")
    plain = kernels.experts(x, chosen, weights, dense(gate_up, x.dtype), dense(down, x.dtype), "silu")
    assert torch.equal(quantized, plain)
