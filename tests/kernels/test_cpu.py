from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.cpu import CpuKernels
from kernels.interface import Kernels
from kernels.reference import ReferenceKernels
from server.model.checkpoint import SafetensorsCheckpoint
from server.model.decoder import Decoder
from server.model.spec import ModelSpec
from server.model.weights import load_weights, weight_bytes
from tests.model.checkpoints import PRO_CONFIG, load_folder, pro_tensors, write_checkpoint
from tests.model.paged import PagedSequences

pytestmark = pytest.mark.skipif(not CpuKernels.available(), reason="this processor does not multiply packed bf16")


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 33, 300])
@pytest.mark.parametrize(("inner", "outer"), [(576, 1536), (64, 96), (33, 70)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_packed_product_is_the_plain_one_within_bf16(rows: int, inner: int, outer: int, with_bias: bool) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, inner).bfloat16()
    weight = (torch.randn(outer, inner) / inner**0.5).bfloat16()
    bias = torch.randn(outer).bfloat16() if with_bias else None
    kernels = CpuKernels()
    ours = kernels.linear(x, kernels.pack(weight), bias)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert ours.dtype is torch.bfloat16
    assert ((ours.double() - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-8).all()


def test_what_is_not_a_bf16_matrix_is_left_as_it_is() -> None:
    kernels = CpuKernels()
    for tensor in (torch.randn(4, 4), torch.randn(4).bfloat16(), torch.randn(2, 4, 4).bfloat16()):
        assert kernels.pack(tensor) is tensor


def logits(spec: ModelSpec, folder: Path, kernels: Kernels, text: list[int]) -> Tensor:
    weights = load_weights(spec, SafetensorsCheckpoint(folder), torch.bfloat16, pack=kernels.pack)
    sequences = PagedSequences(spec, weights, page_tokens=4, tokens=256, dtype=torch.bfloat16)
    sequences.decoder = Decoder(spec, weights, kernels)
    return torch.cat([sequences.step([(0, text[:60])])[0], *(sequences.step([(0, [t])])[0] for t in text[60:])])


def test_a_model_on_packed_weights_answers_as_on_plain_ones(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, PRO_CONFIG, pro_tensors(PRO_CONFIG))
    spec, _ = load_folder(tmp_path)
    text = torch.randint(0, spec.vocab, (80,), generator=torch.Generator().manual_seed(1)).tolist()
    plain = logits(spec, tmp_path, ReferenceKernels(), text)
    packed = logits(spec, tmp_path, CpuKernels(), text)
    assert (packed - plain).abs().median() < 0.02 * plain.abs().median()


def test_a_tied_head_that_is_packed_counts_as_memory(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, PRO_CONFIG, pro_tensors(PRO_CONFIG))
    spec, _ = load_folder(tmp_path)
    assert weight_bytes(spec, torch.bfloat16, packed=True) == weight_bytes(spec, torch.bfloat16)
    tied = replace(spec, tied_embeddings=True)
    extra = weight_bytes(tied, torch.bfloat16, packed=True) - weight_bytes(tied, torch.bfloat16)
    assert extra == spec.vocab * spec.hidden * 2
