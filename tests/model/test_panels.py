"""What is loaded for the C kernels: packed while it is read, it is what is packed whole, and takes what was planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GptOssForCausalLM

from kernels.native.kernels import NativeKernels
from kernels.native.packed import PackedMatrix
from server.model import weights as weights_module
from server.model.checkpoint import Checkpoint, GGUFCheckpoint, SafetensorsCheckpoint
from server.model.families import count_mtp_layers, spec_from_config, spec_from_gguf
from server.model.gguf_file import GGUFFile
from server.model.json_file import read_json_object
from server.model.spec import ModelSpec
from server.model.weights import Weights, load_weights, weight_bytes
from tests.model.checkpoints import write_checkpoint
from tests.model.folders import gpt_oss_mxfp4_tensors, tiny_gpt_oss, write_gpt_oss_mxfp4
from tests.model.stored_forms import FORMS, FP8_CONFIG, V25_CONFIG, exact_tensors

GPT_OSS = tiny_gpt_oss(vocab_size=96, num_hidden_layers=2, num_local_experts=3, num_experts_per_tok=2)
"""Every matrix has whole panels of 32 rows."""


EVEN_MIMO = {**V25_CONFIG, "intermediate_size": 192, "moe_intermediate_size": 128}
"""The same of MiMo."""


def mimo(form: str, config: dict[str, Any] = V25_CONFIG) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        tensors = FORMS[form](exact_tensors(config), config)
        layout = {"attention_projection_layout": "fused_qkv"} if "fused" in form else {}
        write_checkpoint(folder, {**config, **layout, "quantization_config": FP8_CONFIG}, tensors)

    return write


def gpt_oss_in_mxfp4(folder: Path) -> None:
    write_gpt_oss_mxfp4(folder, GPT_OSS, gpt_oss_mxfp4_tensors(GPT_OSS))


def gpt_oss_in_bf16(folder: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in GptOssForCausalLM(GPT_OSS).state_dict().items()}
    write_checkpoint(folder, GPT_OSS.to_dict(), tensors)


FOLDERS = {form: mimo(form) for form in FORMS} | {"mxfp4": gpt_oss_in_mxfp4, "experts in bf16": gpt_oss_in_bf16}


def of_folder(folder: Path) -> tuple[ModelSpec, Checkpoint]:
    checkpoint = SafetensorsCheckpoint(folder)
    mtp_layers = count_mtp_layers(checkpoint.tensors)
    return spec_from_config(read_json_object(folder / "config.json"), mtp_layers=mtp_layers), checkpoint


def kept(value: Any) -> Iterator[Tensor | PackedMatrix]:
    """Every tensor and packed matrix, in one order."""
    if isinstance(value, (Tensor, PackedMatrix)):
        yield value
    elif isinstance(value, tuple):
        for entry in value:
            yield from kept(entry)
    elif value is not None:
        for each in fields(value):
            yield from kept(getattr(value, each.name))


def same(ours: Tensor | PackedMatrix | None, theirs: Tensor | PackedMatrix | None) -> bool:
    if isinstance(ours, PackedMatrix) and isinstance(theirs, PackedMatrix):
        described = (ours.shape, ours.format) == (theirs.shape, theirs.format)
        parts = ("data", "scales", "escapes", "escape_starts")
        return described and all(same(getattr(ours, part), getattr(theirs, part)) for part in parts)
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return ours.dtype is theirs.dtype and torch.equal(ours, theirs)
    return ours is theirs is None


def assert_packed_alike(spec: ModelSpec, checkpoint: Checkpoint, kernels: NativeKernels) -> Weights:
    whole, rows = (
        load_weights(spec, checkpoint, torch.bfloat16, embeds_from_head=True, **how)
        for how in ({"pack": kernels.pack}, {"packing": kernels.packing})
    )
    pairs = list(zip(kept(rows), kept(whole), strict=True))
    assert sum(isinstance(ours, PackedMatrix) for ours, _ in pairs) >= 4 * len(spec.layers)
    for ours, theirs in pairs:
        assert same(ours, theirs)
    return rows


@pytest.fixture(params=["plain", "int8", "bf12"])
def kernels(request: pytest.FixtureRequest, kernels_cache: Path) -> NativeKernels:
    return NativeKernels(kernels_cache, 1, int8=request.param == "int8", bf12=request.param == "bf12")


@pytest.mark.parametrize("form", FOLDERS)
def test_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, kernels: NativeKernels) -> None:
    monkeypatch.setattr(weights_module, "_PACKED_BYTES", 3000)
    FOLDERS[form](tmp_path)
    assert_packed_alike(*of_folder(tmp_path), kernels)


@pytest.mark.parametrize("model", ["smollm2_gguf", "gemma3_gguf"])
def test_a_gguf_file(model: str, kernels_cache: Path, request: pytest.FixtureRequest) -> None:
    """SmolLM2's rows of q and k are put in another order, head by head, while they are packed."""
    file = GGUFFile(request.getfixturevalue(model))
    assert_packed_alike(spec_from_gguf(file), GGUFCheckpoint(file), NativeKernels(kernels_cache, 1))


@pytest.mark.parametrize("write", [gpt_oss_in_mxfp4, gpt_oss_in_bf16, mimo("fp8 split", EVEN_MIMO)])
def test_memory_is_what_was_planned(tmp_path: Path, write: Callable[[Path], None], kernels: NativeKernels) -> None:
    write(tmp_path)
    spec, checkpoint = of_folder(tmp_path)
    weights = load_weights(spec, checkpoint, torch.bfloat16, packing=kernels.packing)
    taken = sum(each.nbytes for each in kept(weights))
    planned = weight_bytes(
        spec, torch.bfloat16, panels=True, int8=kernels.int8, bf12=kernels.bf12, checkpoint=checkpoint
    )
    assert taken == pytest.approx(planned, rel=0.02)
