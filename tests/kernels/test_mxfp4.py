"""MXFP4 matrices: every code and scale means what the format says, and cutting them changes no value."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kernels.cpu import CpuKernels
from kernels.mxfp4 import Mxfp4
from kernels.quantized import Index, QuantizedMatrix, dense
from kernels.reference import ReferenceKernels


def random_mxfp4(rows: int, columns: int, *leading: int, scales: tuple[int, int] = (118, 126), seed: int = 0) -> Mxfp4:
    generator = torch.Generator().manual_seed(seed)
    return Mxfp4(
        codes=torch.randint(256, (*leading, rows, columns // 2), generator=generator, dtype=torch.uint8),
        scales=torch.randint(*scales, (*leading, rows, columns // 32), generator=generator, dtype=torch.uint8),
    )


def every_byte_and_scale() -> Mxfp4:
    """[256, 512]: row r has scale r and all 256 bytes."""
    return Mxfp4(
        codes=torch.arange(256, dtype=torch.uint8).expand(256, 256),
        scales=torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16),
    )


def element(code: int, scale: int) -> float:
    """E2M1 and E8M0 by their bits: a sign, two bits of exponent with bias 1 and one of fraction; a power of two."""
    exponent, fraction = code >> 1 & 3, code & 1
    magnitude = (1 + fraction / 2) * 2.0 ** (exponent - 1) if exponent else fraction / 2
    power = math.nan if scale == 255 else 2.0 ** (scale - 127)
    return (-magnitude if code & 8 else magnitude) * power


def written_out(matrix: Mxfp4) -> Tensor:
    """The definition, element by element and in double, of a matrix without leading axes."""
    rows, columns = matrix.shape
    codes, scales = matrix.codes.tolist(), matrix.scales.tolist()
    return torch.tensor(
        [
            [
                element(codes[n][k // 2] >> 4 if k % 2 else codes[n][k // 2] & 15, scales[n][k // 32])
                for k in range(columns)
            ]
            for n in range(rows)
        ],
        dtype=torch.float64,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_code_under_every_scale_means_what_the_format_says(dtype: torch.dtype) -> None:
    matrix = every_byte_and_scale()
    values, expected = matrix.dequantize(dtype), written_out(matrix)
    assert torch.equal(values[:255], expected[:255].float().to(dtype))
    assert values[255].isnan().all()
    assert torch.equal(values[:255].signbit(), expected[:255].signbit()), "a zero keeps its sign"
    if dtype is not torch.float16:
        finite = expected[:253]  # 6 * 2 ** 125 is the last that fp32 and bf16 hold for every code
        assert torch.equal(values[:253].double(), finite), "nothing is rounded"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_transformers(dtype: torch.dtype) -> None:
    """Its blocks are [E, N, K / 32, 16], and it turns the matrix around. It knows no scale that is NaN, and from 254 on
    it makes 0 times infinity of a zero."""
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(256, (3, 40, 6, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 254, (3, 40, 6), generator=generator, dtype=torch.uint8)
    matrix = Mxfp4(codes=blocks.flatten(-2), scales=scales)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert torch.equal(matrix.dequantize(dtype), expected.transpose(1, 2))


def test_large_matrices_are_dequantized_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = random_mxfp4(300, 64, 3)
    whole = matrix.dequantize(torch.bfloat16)
    monkeypatch.setattr("kernels.mxfp4._CHUNK_ELEMENTS", 1000)
    assert torch.equal(matrix.dequantize(torch.bfloat16), whole)


@pytest.mark.parametrize(
    "index", [0, 2, slice(1, 3), (1, slice(3, 14)), (slice(None), slice(10, 20)), (slice(0, 1), slice(5, 6)), ...]
)
def test_indexing_is_that_of_the_values(index: Index) -> None:
    matrix = random_mxfp4(20, 96, 3)
    taken, values = matrix[index], matrix.dequantize(torch.float32)[index]
    assert taken.shape == values.shape
    assert torch.equal(taken.dequantize(torch.float32), values)
    assert taken.codes.untyped_storage().data_ptr() == matrix.codes.untyped_storage().data_ptr()


@pytest.mark.parametrize("index", [(0, 1), (0, slice(None), slice(0, 3)), (slice(None), slice(None), 0)])
def test_single_rows_and_columns_cannot_be_chosen(index: Index) -> None:
    with pytest.raises(IndexError):
        random_mxfp4(4, 32, 2)[index]


def test_thirty_two_values_take_seventeen_bytes() -> None:
    matrix = random_mxfp4(64, 256, 5)
    assert matrix.nbytes * 32 == matrix.shape.numel() * 17
    assert isinstance(matrix, QuantizedMatrix)


@pytest.mark.parametrize("kernels", [ReferenceKernels(), CpuKernels()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_values(kernels: ReferenceKernels, dtype: torch.dtype) -> None:
    matrix, bias = random_mxfp4(130, 96), torch.randn(130).to(dtype)
    x = torch.randn(5, 96).to(dtype)
    plain = kernels.linear(x, matrix.dequantize(dtype), bias)
    assert torch.equal(kernels.linear(x, kernels.pack(matrix), bias), plain)


def test_experts_are_those_of_the_values() -> None:
    kernels = ReferenceKernels()
    gate_up, down = random_mxfp4(2 * 64, 32, 4, seed=1), random_mxfp4(32, 64, 4, seed=2)
    x, chosen, weights = torch.randn(7, 32), torch.randint(4, (7, 2)), torch.rand(7, 2)
    biases = {"gate_up_bias": torch.randn(4, 128), "down_bias": torch.randn(4, 32)}
    quantized = kernels.experts(x, chosen, weights, gate_up, down, "clamped_swiglu", **biases)
    plain = kernels.experts(
        x, chosen, weights, dense(gate_up, x.dtype), dense(down, x.dtype), "clamped_swiglu", **biases
    )
    assert torch.equal(quantized, plain)
