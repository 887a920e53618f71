"""bf16 in twelve bits: nothing is lost, whatever the weights are and however they come."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.native.packed import Format, PackedMatrix, PanelPacking, pack
from tests.kernels.test_packing import put_in_pieces, same_bits
from tests.native.conftest import MakeKernels
from tests.native.test_products import packed_as


def weights_of_few_exponents(shape: tuple[int, ...], seed: int) -> Tensor:
    """Both zeros among them, and nearly as many codes of any kind as twelve bits are worth it for."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.rand(shape, generator=generator) + 0.01) * 2.0 ** (seed * 30 - 60)
    weight *= torch.randint(-1, 2, shape, generator=generator)
    codes = weight.bfloat16().view(torch.int16)
    odd = torch.randperm(codes.numel(), generator=generator)[: codes.numel() // 600]
    codes.view(-1)[odd] = torch.randint(-(2**15), 2**15, odd.shape, generator=generator).to(torch.int16)
    return codes.view(torch.bfloat16)


@pytest.mark.parametrize("shape", [(32, 64), (1, 1), (33, 7), (3, 70, 129), (500, 257)], ids=str)
def test_bf16_in_twelve_bits_comes_back_bit_for_bit(make_kernels: MakeKernels, shape: tuple[int, ...]) -> None:
    lib = make_kernels().context.lib
    for seed in range(5):
        weight = weights_of_few_exponents(shape, seed)
        packed = pack(weight, bf12=lib)
        assert packed.format is Format.BF12 and packed.shape == shape
        back = packed.dequantize(torch.bfloat16)
        assert torch.equal(back.contiguous().view(torch.int16), weight.view(torch.int16))
        if len(shape) == 3:
            one = packed[1].dequantize(torch.bfloat16).contiguous()
            assert torch.equal(one.view(torch.int16), weight[1].view(torch.int16))


def test_every_bf16_code_comes_back_from_twelve_bits(make_kernels: MakeKernels) -> None:
    """All of them are in one panel, with more escapes than there is room for at first."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(32, 2048)
    codes = torch.cat((every, torch.ones(16_000, 2048, dtype=torch.bfloat16).view(torch.int16)))
    packed = pack(codes.view(torch.bfloat16), bf12=make_kernels().context.lib)
    assert packed.format is Format.BF12
    assert packed.escapes is not None and 60_000 < len(packed.escapes) < 2**16
    assert torch.equal(packed.dequantize(torch.bfloat16).contiguous().view(torch.int16), codes)


@pytest.mark.parametrize("shape", [(257, 160), (64, 640), (3, 70, 64)], ids=str)
def test_a_matrix_of_many_exponents_stays_in_plain_bf16_however_its_rows_come(
    make_kernels: MakeKernels, shape: tuple[int, ...]
) -> None:
    """Whether they lie at its beginning or its end."""
    lib = make_kernels().context.lib
    for first in (True, False):
        codes = weights_of_few_exponents(shape, 1).view(torch.int16)
        rows = slice(0, 20) if first else slice(-20, None)
        codes[..., rows, :] = torch.randint(-(2**15), 2**15, codes[..., rows, :].shape).to(torch.int16)
        weight = codes.view(torch.bfloat16)
        for seed in range(6):
            found = put_in_pieces(PanelPacking(shape, bf12=lib), weight, seed)
            assert isinstance(found, PackedMatrix) and found.format is Format.BF16
            assert same_bits(found.data, pack(weight).data)


def test_twelve_bits_without_escapes_multiply_to_the_bits_of_plain_bf16(make_kernels: MakeKernels) -> None:
    kernels = make_kernels(2)
    for n, k in ((64, 640), (40, 333), (70, 2)):
        weight = (torch.rand(n, k) + 0.01).bfloat16() * torch.randint(-1, 2, (n, k))
        short = packed_as("bf12", weight, kernels)
        assert short.escapes is not None and not len(short.escapes)
        x = torch.randn(200, k).bfloat16()
        for rows in (1, 3, 8, 17, 128, 129, 200):
            expected = kernels.context.multiply(x[:rows], pack(weight))
            assert torch.equal(kernels.context.multiply(x[:rows], short), expected)


def test_twelve_bits_a_weight_take_three_quarters_of_bf16_but_for_tables_and_escapes(make_kernels: MakeKernels) -> None:
    weight = torch.randn(640, 2048).mul_(0.02).bfloat16()
    packed = packed_as("bf12", weight, make_kernels())
    assert 0.75 * weight.nbytes < packed.nbytes < 0.755 * weight.nbytes


@pytest.mark.parametrize(
    "shape", [(1, 32), (32, 64), (70, 96), (257, 160), (3, 70, 64), (2, 31, 129), (64, 1)], ids=str
)
def test_panels_filled_in_pieces_are_those_of_the_whole(make_kernels: MakeKernels, shape: tuple[int, ...]) -> None:
    lib = make_kernels().context.lib
    weight = weights_of_few_exponents(shape, 1)
    whole = pack(weight, bf12=lib)
    assert whole.format is Format.BF12
    for seed in range(6):
        found = put_in_pieces(PanelPacking(shape, bf12=lib), weight, seed)
        assert isinstance(found, PackedMatrix) and found.format is Format.BF12
        for ours, theirs in (
            (found.data, whole.data),
            (found.scales, whole.scales),
            (found.escapes, whole.escapes),
            (found.escape_starts, whole.escape_starts),
        ):
            assert ours is not None and theirs is not None and same_bits(ours, theirs)
