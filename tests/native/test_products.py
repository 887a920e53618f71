"""Matrix products: what a packed matrix holds, how far a product is from the exact one, and what a row depends on."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.mxfp4 import E2M1, Mxfp4
from kernels.native.kernels import NativeKernels
from kernels.native.packed import INT8_STEPS, Format, PackedMatrix, pack
from kernels.quantized import BlockScaled, Matrix
from tests.native.conftest import MakeKernels

FORMATS = ("bf16", "bf12", "int8", "fp8", "mxfp4")
UNIT = 2.0**-24  # half a unit in the last place of fp32
INT16_STEPS = 8191


def random_matrix(kind: str, n: int, k: int, seed: int) -> Matrix:
    generator = torch.Generator().manual_seed(seed)
    if kind in ("bf16", "int8"):
        return torch.randn(n, k, generator=generator).bfloat16()
    if kind == "bf12":
        weight = torch.rand(n, k, generator=generator) + 0.01
        weight *= torch.randint(-1, 2, (n, k), generator=generator)
        outliers = torch.randperm(n * k, generator=generator)[: n * k // 600]  # as many as are worth it, nearly
        weight.view(-1)[outliers] = torch.exp2(torch.randint(-60, 20, outliers.shape, generator=generator).float())
        return weight.bfloat16()
    if kind == "fp8":
        codes = torch.randn(n, k, generator=generator).mul_(30).to(torch.float8_e4m3fn)
        rows = max(1, n // 5)
        scales = torch.exp2(torch.randn(rows, -(-k // 128), generator=generator) * 3)
        row_scale = torch.randint(rows, (n,), generator=generator, dtype=torch.int32)
        return BlockScaled(codes=codes, scales=scales, row_scale=row_scale)
    codes = torch.randint(256, (n, k // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(115, 140, (n, k // 32), generator=generator, dtype=torch.uint8)
    return Mxfp4(codes=codes, scales=scales)


def packed_as(kind: str, matrix: Matrix, kernels: NativeKernels) -> PackedMatrix:
    packed = pack(matrix, int8=kind == "int8", bf12=kernels.context.lib if kind == "bf12" else None)
    assert kind not in ("bf16", "bf12") or packed.format is {"bf16": Format.BF16, "bf12": Format.BF12}[kind]
    return packed


def exact(matrix: Matrix, packed: PackedMatrix) -> Tensor:
    """The matrix's values in fp64, without a rounding."""
    if isinstance(matrix, BlockScaled):
        scales = matrix.scales[..., matrix.row_scale.long(), :].double().repeat_interleave(128, -1)
        return matrix.codes.double() * scales[..., : matrix.shape[-1]]
    if isinstance(matrix, Mxfp4):
        nibbles = torch.stack((matrix.codes & 15, matrix.codes >> 4), -1).flatten(-2)
        scales = torch.exp2(matrix.scales.double() - 127).repeat_interleave(32, -1)
        return torch.tensor(E2M1, dtype=torch.float64)[nibbles.int()] * scales
    assert isinstance(matrix, Tensor)
    if packed.format is not Format.INT8:
        return matrix.double()
    assert packed.scales is not None
    rows = packed.data.transpose(-1, -2).flatten(-3, -2).clone(memory_format=torch.contiguous_format)
    codes = rows.view(torch.int8).double()
    return (codes * packed.scales.flatten(-2).double()[:, None])[: matrix.shape[0], : matrix.shape[1]]


def bound(x: Tensor, values: Tensor, bias: Tensor | None, *, int8: bool) -> Tensor:
    """How far fp32 sums in any order may be off. Beside int8 weights a row of x is rounded to 8191 steps, too."""
    sizes = x.double().abs() @ values.abs().T
    roundings = values.shape[1] + values.shape[1] // 32 + 8
    result = roundings * UNIT * sizes
    if int8:
        step = x.double().abs().amax(-1, keepdim=True) / INT16_STEPS
        result = result + 0.5001 * step * values.abs().sum(-1)
    return result + (0 if bias is None else 2 * UNIT * (bias.abs().double() + sizes))


SHAPES = [(32, 64), (1, 1), (33, 7), (70, 129), (31, 200), (96, 2500), (45, 2049), (130, 33)]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("n", "k"), SHAPES, ids=str)
def test_a_product_is_the_exact_one_within_the_error_of_fp32_sums(
    make_kernels: MakeKernels, kind: str, n: int, k: int
) -> None:
    if kind == "mxfp4":
        k = -(-k // 32) * 32
    matrix = random_matrix(kind, n, k, seed=n * k)
    packed = packed_as(kind, matrix, make_kernels())
    values = exact(matrix, packed)
    torch.manual_seed(k)
    context = make_kernels().context
    for rows in (1, 2, 3, 11, 12, 13, 25, 40):
        x = (torch.randn(rows, k) * torch.exp2(torch.randn(rows, 1) * 8)).bfloat16()
        for bias in (None, torch.randn(n)):
            ours = context.multiply(x, packed, bias)
            expected = x.double() @ values.T + (0 if bias is None else bias.double())
            assert ours.dtype is torch.float32
            error = (ours.double() - expected).abs()
            assert (error <= bound(x, values, bias, int8=kind == "int8")).all(), f"{rows} rows: {error.max()}"


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_has_the_same_bits_beside_any_others_and_with_any_threads(make_kernels: MakeKernels, kind: str) -> None:
    for n, k in ((70, 160), (224, 2272)):
        packed = packed_as(kind, random_matrix(kind, n, k, seed=5), make_kernels())
        torch.manual_seed(0)
        x = torch.randn(40, k).bfloat16()
        alone = torch.cat([make_kernels().context.multiply(row[None], packed) for row in x])
        for threads in (1, 2, 3):
            context = make_kernels(threads).context
            assert torch.equal(context.multiply(x, packed), alone)
            for rows in (2, 3, 5, 12, 13, 14, 29):
                some = torch.randperm(40)[:rows]
                assert torch.equal(context.multiply(x[some], packed), alone[some]), f"{rows} rows, {threads} threads"


def test_the_numbers_of_any_row_do_not_reach_another(make_kernels: MakeKernels) -> None:
    for kind in FORMATS:
        packed = packed_as(kind, random_matrix(kind, 40, 96, seed=1), make_kernels())
        x = torch.randn(14, 96).bfloat16()
        context = make_kernels(2).context
        clean = context.multiply(x, packed)
        for poison in (math.nan, math.inf, -math.inf):
            x[5, 17] = poison
            ours = context.multiply(x, packed)
            others = torch.arange(14) != 5
            assert torch.equal(ours[others], clean[others])
            assert not torch.isfinite(ours[5]).all()
            assert kind != "int8" or ours[5].isnan().all()


def test_tiny_and_zero_rows_beside_int8_weights_give_tiny_and_zero_results(make_kernels: MakeKernels) -> None:
    packed = pack(random_matrix("int8", 64, 64, seed=2), int8=True)
    x = torch.ones(4, 64)
    x[0] = 0.0
    x[1] = 1e-37
    x[2] = 2e-38
    ours = make_kernels().context.multiply(x.bfloat16(), packed)
    assert (ours[0] == 0).all()
    assert (ours[1:3].abs() < 1e-34).all()
    assert (ours[3].abs() > 0.01).any()


def test_a_nan_or_infinity_of_the_weights_spoils_its_own_output_only(make_kernels: MakeKernels) -> None:
    weight = torch.exp2(torch.randint(-13, 1, (40, 64)).float()).bfloat16()  # as many exponents as a table has
    weight[7, 3], weight[33, 60] = math.nan, math.inf
    codes = torch.randn(40, 64).to(torch.float8_e4m3fn)
    codes.view(torch.uint8)[7, 3], codes.view(torch.uint8)[33, 60] = 0x7F, 0xFF
    blocks = BlockScaled(codes=codes, scales=torch.ones(1, 1), row_scale=torch.zeros(40, dtype=torch.int32))
    fp4 = random_matrix("mxfp4", 40, 64, seed=3)
    assert isinstance(fp4, Mxfp4)
    fp4.scales[7, 0] = fp4.scales[33, 1] = 255
    kernels = make_kernels()
    short = packed_as("bf12", weight, kernels)
    assert short.escapes is not None and len(short.escapes) == 2
    for matrix in (pack(weight), short, pack(blocks), pack(fp4)):
        ours = kernels.context.multiply(torch.randn(3, 64).bfloat16(), matrix)
        broken = ~torch.isfinite(ours)
        assert broken[:, [7, 33]].all()
        assert broken.sum() == 6


def test_a_product_with_no_rows_is_empty(make_kernels: MakeKernels) -> None:
    for threads in (1, 2):
        for kind in FORMATS:
            packed = packed_as(kind, random_matrix(kind, 40, 64, seed=3), make_kernels())
            ours = make_kernels(threads).context.multiply(torch.empty(0, 64, dtype=torch.bfloat16), packed)
            assert ours.shape == (0, 40)


def test_views_are_multiplied_by_their_values(make_kernels: MakeKernels) -> None:
    """A transposed x or a strided bias is not read as if it lay in one piece."""
    packed = pack(torch.eye(32).bfloat16())
    x = torch.randn(32, 5).bfloat16().T
    bias = torch.randn(32, 2)[:, 0]
    ours = make_kernels().context.multiply(x, packed, bias)
    assert torch.equal(ours, x.float() + bias)


def test_what_c_cannot_read_is_refused(make_kernels: MakeKernels) -> None:
    context = make_kernels().context
    packed = pack(torch.randn(32, 64).bfloat16())
    for x in (torch.randn(2, 64), torch.randn(2, 63).bfloat16(), torch.randn(64).bfloat16()):
        with pytest.raises(AssertionError):
            context.multiply(x, packed)
    with pytest.raises(AssertionError):
        context.multiply(torch.randn(2, 64).bfloat16(), packed, torch.randn(31))
    with pytest.raises(AssertionError):
        context.multiply(torch.randn(2, 64).bfloat16(), packed, torch.randn(32).bfloat16())


# --- packing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(32, 64), (1, 1), (33, 7), (3, 70, 129)], ids=str)
def test_packed_bf16_comes_back_bit_for_bit(shape: tuple[int, ...]) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    codes = every[torch.randint(2**16, shape, generator=torch.Generator().manual_seed(0))]
    packed = pack(codes.view(torch.bfloat16))
    assert packed.shape == shape
    assert torch.equal(packed.dequantize(torch.bfloat16).contiguous().view(torch.int16), codes)


def test_packed_bf16_of_wider_numbers_is_rounded_to_nearest() -> None:
    wide = torch.randn(37, 41)
    assert torch.equal(pack(wide).dequantize(torch.float32), wide.bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(32, 128), (33, 129), (7, 255), (100, 300)], ids=str)
def test_packed_fp8_has_the_values_of_the_plain_codes(n: int, k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(n)
    codes = torch.randint(256, (2, n, k), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.exp2(torch.randint(-126, 120, (2, 5, -(-k // 128)), generator=generator).float())
    scales[:, 0], scales[:, 1] = math.nan, 0.0
    row_scale = torch.randint(5, (n,), generator=generator, dtype=torch.int32)
    matrix = BlockScaled(codes=codes, scales=scales, row_scale=row_scale)
    packed = pack(matrix)
    assert same(packed.dequantize(dtype), matrix.dequantize(dtype))
    for expert in range(2):
        assert same(packed[expert].dequantize(dtype), matrix[expert].dequantize(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_mxfp4_has_the_values_of_the_plain_codes(dtype: torch.dtype) -> None:
    """Every byte under every scale, 0, 254 and NaN's 255 included."""
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16).contiguous()
    codes = torch.arange(256, dtype=torch.uint8).expand(256, 256).contiguous()
    matrix = Mxfp4(codes=codes, scales=scales)
    packed = pack(matrix)
    assert same(packed.dequantize(dtype), matrix.dequantize(dtype))
    uneven = Mxfp4(codes=codes[None, :37].repeat(3, 1, 1), scales=scales[None, :37].repeat(3, 1, 1))
    assert same(pack(uneven).dequantize(dtype), uneven.dequantize(dtype))


def same(ours: Tensor, expected: Tensor) -> bool:
    return ours.shape == expected.shape and bool(((ours == expected) | (ours.isnan() & expected.isnan())).all())


def test_every_fp8_code_is_multiplied_as_what_it_means(make_kernels: MakeKernels) -> None:
    codes = torch.arange(256, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn)
    matrix = BlockScaled(codes=codes, scales=torch.ones(1, 1), row_scale=torch.zeros(256, dtype=torch.int32))
    ours = make_kernels().context.multiply(torch.ones(1, 1).bfloat16(), pack(matrix))
    assert same(ours[0], codes[:, 0].float())


def test_packed_int8_is_within_half_a_step_of_every_value() -> None:
    weight = (torch.randn(70, 33) * torch.exp2(torch.randn(70, 1) * 10)).bfloat16()
    weight[3] = 0.0
    weight[4] = 1e-33
    largest = weight.float().abs().amax(-1, keepdim=True)
    ours = pack(weight, int8=True).dequantize(torch.float32)
    assert ((ours - weight.float()).abs() <= largest / INT8_STEPS * 0.5001).all()
    assert (ours[3] == 0).all()


def test_packing_takes_the_bytes_of_the_codes_and_no_more() -> None:
    for kind, per_value in (("bf16", 2.0), ("int8", 1 + 4 / 256), ("fp8", 1 + 4 / 128), ("mxfp4", 0.5 + 1 / 32)):
        packed = pack(random_matrix(kind, 64, 256, seed=0), int8=kind == "int8")
        assert packed.nbytes == 64 * 256 * per_value
        assert pack(packed) is packed
