"""Experts that stay in mxfp4: the same model, to the bit, as with the values written out beforehand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kernels.mxfp4 import Mxfp4
from server.errors import StartupError
from server.model.checkpoint import SafetensorsCheckpoint
from server.model.families import spec_from_config
from server.model.spec import ModelSpec
from server.model.weights import MoEWeights, Weights, checkpoint_bytes, load_weights, weight_bytes
from tests.model.checkpoints import PRO_CONFIG, distinct_tensors, load_folder, pro_tensors, write_checkpoint
from tests.model.folders import gpt_oss_mxfp4_tensors, load_gpt_oss_mxfp4, tiny_gpt_oss, write_gpt_oss_mxfp4
from tests.model.paged import PagedSequences

CONFIG = tiny_gpt_oss()
TEXT = torch.randint(0, 97, (150,), generator=torch.Generator().manual_seed(1)).tolist()

Tensors = dict[str, Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_gpt_oss_mxfp4(tmp_path, CONFIG, gpt_oss_mxfp4_tensors(CONFIG))
    return tmp_path


def rewrite(folder: Path, change: Callable[[Tensors], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def write_out(tensors: Tensors, dtype: torch.dtype = torch.float32, only: str = "") -> None:
    """Blocks and scales become the plain tensors that transformers makes of them."""
    for name in [name for name in tensors if name.endswith("_blocks") and only in name]:
        plain = name.removesuffix("_blocks")
        values = convert_moe_packed_tensors(tensors.pop(name), tensors.pop(f"{plain}_scales"), dtype=dtype)
        tensors[plain] = values.contiguous()


def logits(spec: ModelSpec, weights: Weights, dtype: torch.dtype = torch.float32) -> Tensor:
    sequences = PagedSequences(spec, weights, page_tokens=4, tokens=256, dtype=dtype)
    prefill = [sequences.step([(0, TEXT[start : start + 50])])[0] for start in (0, 50)]
    return torch.cat([*prefill, *(sequences.step([(0, [token])])[0] for token in TEXT[100:])])


def moe(weights: Weights, layer: int) -> MoEWeights:
    found = weights.layers[layer].mlp
    assert isinstance(found, MoEWeights)
    return found


def test_gpt_oss_answers_as_transformers_does_with_the_same_files(folder: Path) -> None:
    """It reads them by itself: names, order of nibbles, orientation and all."""
    with torch.no_grad():
        expected = load_gpt_oss_mxfp4(folder)(torch.tensor([TEXT])).logits[0]
    spec, weights = load_folder(folder)
    assert isinstance(moe(weights, 0).gate_up, Mxfp4)
    assert isinstance(moe(weights, 0).down, Mxfp4)
    assert expected.std() > 0.3
    assert (logits(spec, weights) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpt_oss_in_mxfp4_is_bit_equal_to_its_values(folder: Path, dtype: torch.dtype) -> None:
    spec, weights = load_folder(folder, dtype=dtype)
    quantized = logits(spec, weights, dtype)
    rewrite(folder, lambda tensors: write_out(tensors, dtype))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    spec, plain = load_folder(folder, dtype=dtype)
    for layer in range(4):
        assert isinstance(moe(plain, layer).gate_up, Tensor)
        assert torch.equal(moe(weights, layer).gate_up.dequantize(dtype), moe(plain, layer).gate_up)
        assert torch.equal(moe(weights, layer).down.dequantize(dtype), moe(plain, layer).down)
    assert torch.equal(quantized, logits(spec, plain, dtype))


def test_gates_rows_come_first_and_no_byte_changes(folder: Path) -> None:
    _, weights = load_folder(folder)
    tensors = load_file(folder / "model.safetensors")
    at = "model.layers.2.mlp.experts"
    blocks, scales = tensors[f"{at}.gate_up_proj_blocks"].flatten(2), tensors[f"{at}.gate_up_proj_scales"]
    gate_up = moe(weights, 2).gate_up
    assert torch.equal(gate_up.codes, torch.cat((blocks[:, ::2], blocks[:, 1::2]), 1))
    assert torch.equal(gate_up.scales, torch.cat((scales[:, ::2], scales[:, 1::2]), 1))
    bias = tensors[f"{at}.gate_up_proj_bias"]
    assert torch.equal(moe(weights, 2).gate_up_bias, torch.cat((bias[:, ::2], bias[:, 1::2]), 1))


def test_a_layer_that_the_config_leaves_out_is_plain(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"].append("model.layers.1.mlp.experts")
    (folder / "config.json").write_text(json.dumps(config))
    rewrite(folder, lambda tensors: write_out(tensors, only="layers.1."))
    spec, weights = load_folder(folder)
    assert [isinstance(moe(weights, layer).down, Mxfp4) for layer in range(4)] == [True, False, True, True]
    assert sum(tensor.nbytes for tensor in distinct_tensors(weights)) == weight_bytes(spec, torch.float32)


QUANTIZATION: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "store_dtype": "mxfp4",
    "mxfp4_block_size": 32,
    "weight_block_size": [128, 128],
}
"""As published; tensors that are not fp8 may be there too."""


def pro_mxfp4_tensors() -> tuple[Tensors, Tensors]:
    """MiMo in Xiaomi's names with routed experts in mxfp4, and the same with their values written out."""
    generator = torch.Generator().manual_seed(3)
    tensors = pro_tensors(PRO_CONFIG)
    plain = dict(tensors)
    for name in [name for name in tensors if ".mlp.experts." in name]:
        rows, columns = tensors[name].shape
        codes = torch.randint(256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, (rows, columns // 32), generator=generator, dtype=torch.uint8)
        tensors |= {name: codes, f"{name}_scale": scales}
        blocks = codes.view(1, rows, columns // 32, 16)
        plain[name] = convert_moe_packed_tensors(blocks, scales[None], dtype=torch.float32)[0].T.contiguous()
    return tensors, plain


@pytest.mark.parametrize("said", [{"quantization_config": QUANTIZATION}, {"store_dtype": "mxfp4"}], ids=str)
def test_mimo_in_mxfp4_is_bit_equal_to_its_values(tmp_path: Path, said: dict[str, Any]) -> None:
    tensors, plain = pro_mxfp4_tensors()
    runs = []
    for name, settings, stored in (("mxfp4", {**PRO_CONFIG, **said}, tensors), ("plain", PRO_CONFIG, plain)):
        (tmp_path / name).mkdir()
        write_checkpoint(tmp_path / name, settings, stored)
        spec, weights = load_folder(tmp_path / name)
        assert isinstance(moe(weights, 1).gate_up, Mxfp4) == (name == "mxfp4")
        assert sum(tensor.nbytes for tensor in distinct_tensors(weights)) == weight_bytes(spec, torch.float32)
        runs.append(logits(spec, weights))
    assert runs[0].std() > 0.3
    assert torch.equal(*runs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_bytes_and_progress_are_what_loading_takes(folder: Path, dtype: torch.dtype) -> None:
    spec, weights = load_folder(folder, dtype=dtype)
    assert sum(tensor.nbytes for tensor in distinct_tensors(weights)) == weight_bytes(spec, dtype)
    checkpoint = SafetensorsCheckpoint(folder)
    read: list[int] = []
    load_weights(spec, checkpoint, dtype, progress=read.append)
    stored = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert sum(read) == checkpoint_bytes(spec, checkpoint) == stored


def test_gpt_oss_20b_takes_13_gb() -> None:
    """The published files are 13.76 GB; a plain bf16 copy would be 41.8 GB."""
    published = {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32}
    quantized = spec_from_config({**published, "quantization_config": {"quant_method": "mxfp4"}})
    assert weight_bytes(quantized, torch.bfloat16) / 1e9 == pytest.approx(13.76, abs=0.01)
    assert weight_bytes(spec_from_config(published), torch.bfloat16) / 1e9 == pytest.approx(41.83, abs=0.01)


DOWN = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{DOWN}_scales"), rf"lacks 1 tensor: {DOWN}_scales"),
        (lambda t: t.pop(f"{DOWN}_bias"), rf"lacks 1 tensor: {DOWN}_bias"),
        (lambda t: t.update({DOWN: torch.ones(2)}), rf"does not use: 1 tensor: {DOWN}"),
        (write_out, r"lacks 16 tensors: model\.layers\.0\.mlp\.experts\.gate_up_proj_blocks"),
        (
            lambda t: t.update({f"{DOWN}_blocks": t[f"{DOWN}_blocks"][:, :, :2].contiguous()}),
            rf"{DOWN}_blocks has shape \[6, 64, 2, 16\], expected \[6, 64, 3, 16\]",
        ),
        (
            lambda t: t.update({f"{DOWN}_scales": t[f"{DOWN}_scales"].float()}),
            rf"{DOWN}_scales has 4608 bytes, expected a byte per entry",
        ),
    ],
)
def test_what_does_not_fit_is_named(folder: Path, change: Callable[[Tensors], Any], message: str) -> None:
    rewrite(folder, change)
    with pytest.raises(StartupError, match=message):
        load_folder(folder)
