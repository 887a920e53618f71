"""gpt-oss as a GGUF file. The gguf package quantizes and reads values back; transformers' model is built from these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor
from transformers import GptOssForCausalLM

from kernels.mxfp4 import Mxfp4
from server.errors import StartupError
from server.model.checkpoint import GGUFCheckpoint
from server.model.families import spec_from_gguf
from server.model.gguf_file import GGUFFile
from server.model.weights import MoEWeights, checkpoint_bytes, load_weights, weight_bytes
from tests.model.checkpoints import distinct_tensors
from tests.model.folders import tiny_gpt_oss
from tests.model.paged import PagedSequences

CONFIG = tiny_gpt_oss(num_local_experts=5, num_experts_per_tok=2)
METADATA: dict[str, int | float | str] = {
    "block_count": 4,
    "context_length": 2048,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "expert_feed_forward_length": 96,
    "attention.head_count": 8,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.sliding_window": 13,
    "expert_count": 5,
    "expert_used_count": 2,
    "rope.freq_base": 150_000.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 32.0,
    "rope.scaling.original_context_length": 4096,
}
"""The keys of published files, but for those of the tokenizer."""
LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.router.bias": "ffn_gate_inp.bias",
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
    **{f"self_attn.{part}_proj.{kind}": f"attn_{part}.{kind}" for part in "qkv" for kind in ("weight", "bias")},
    **{f"self_attn.o_proj.{kind}": f"attn_output.{kind}" for kind in ("weight", "bias")},
}
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
TOP |= {"lm_head.weight": "output.weight"}
MXFP4, F16, F32 = GGMLQuantizationType.MXFP4, GGMLQuantizationType.F16, GGMLQuantizationType.F32


def random_model() -> GptOssForCausalLM:
    torch.manual_seed(0)
    model = GptOssForCausalLM._from_config(CONFIG, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            spread = 0.3 if tensor.dim() == 1 or "bias" in name else tensor.shape[-1] ** -0.5
            tensor.copy_(float("norm" in name) + spread * torch.randn_like(tensor))
    return model


def write(path: Path, model: GptOssForCausalLM, kinds: dict[str, GGMLQuantizationType], **changes: Any) -> None:
    """The model as a file, and in place of its experts the values that the file can hold."""
    writer = gguf.GGUFWriter(path, "gpt-oss")
    for name, value in {**METADATA, **changes}.items():
        adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        adders[type(value)](f"gpt-oss.{name}", value)

    def add(name: str, values: Tensor, kind: GGMLQuantizationType = F32) -> Tensor:
        array = np.ascontiguousarray(values.detach().numpy(), dtype=np.float32)
        if kind is not F32:
            stored = gguf.quants.quantize(array, kind)
            writer.add_tensor(name, stored, raw_dtype=kind)
            array = gguf.quants.dequantize(stored, kind).reshape(array.shape)
        else:
            writer.add_tensor(name, array)
        return torch.from_numpy(array)

    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name in TOP:
                add(TOP[name], tensor)
                continue
            _, _, layer, part = name.split(".", 3)
            at = f"blk.{layer}."
            if part == "mlp.experts.gate_up_proj":
                halves = [
                    add(f"{at}ffn_{half}_exps.weight", tensor[:, :, first::2].transpose(1, 2), kinds[half])
                    for first, half in enumerate(("gate", "up"))
                ]
                tensor.copy_(torch.stack(halves, 2).flatten(1, 2).transpose(1, 2))
            elif part == "mlp.experts.gate_up_proj_bias":
                add(f"{at}ffn_gate_exps.bias", tensor[:, ::2])
                add(f"{at}ffn_up_exps.bias", tensor[:, 1::2])
            elif part == "mlp.experts.down_proj":
                tensor.copy_(add(f"{at}ffn_down_exps.weight", tensor.transpose(1, 2), kinds["down"]).transpose(1, 2))
            else:
                add(at + LAYER[part], tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", [MXFP4, F16, F32], ids=lambda kind: kind.name)
def test_a_gguf_answers_as_transformers_does_with_the_same_values(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    model, path = random_model(), tmp_path / "model.gguf"
    write(path, model, dict.fromkeys(("gate", "up", "down"), kind))
    file = GGUFFile(path)
    spec, checkpoint = spec_from_gguf(file), GGUFCheckpoint(file)
    read: list[int] = []
    weights = load_weights(spec, checkpoint, torch.float32, progress=read.append)
    moe = weights.layers[1].mlp
    assert isinstance(moe, MoEWeights)
    assert isinstance(moe.gate_up, Mxfp4) == isinstance(moe.down, Mxfp4) == (kind is MXFP4)
    assert sum(tensor.nbytes for tensor in distinct_tensors(weights)) == weight_bytes(spec, torch.float32)
    assert sum(read) == checkpoint_bytes(spec, checkpoint) == sum(t.raw.nbytes for t in file.tensors.values())
    text = torch.randint(0, 97, (150,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(text[None]).logits[0]
    sequences = PagedSequences(spec, weights, page_tokens=4, tokens=256)
    parts = [sequences.step([(0, text[start : start + 50].tolist())])[0] for start in (0, 50, 100)]
    assert expected.std() > 0.3
    assert (torch.cat(parts) - expected).abs().max() <= 1e-4


def test_only_nibbles_change_places(tmp_path: Path) -> None:
    model, path = random_model(), tmp_path / "model.gguf"
    write(path, model, dict.fromkeys(("gate", "up", "down"), MXFP4))
    tensor = GGUFFile(path).tensors["blk.2.ffn_up_exps.weight"]
    codes, scales = torch.from_numpy(tensor.mxfp4_codes(1, 4)), torch.from_numpy(tensor.mxfp4_scales(1, 4))
    values = gguf.quants.dequantize(tensor.raw, MXFP4).reshape(5, 96, 64)
    assert np.array_equal(Mxfp4(codes=codes, scales=scales).dequantize(torch.float32).numpy(), values[1:4])


def test_experts_of_several_formats_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, random_model(), {"gate": MXFP4, "up": MXFP4, "down": F16})
    with pytest.raises(StartupError, match=r"experts of layer 0 are partly MXFP4 \(F16, MXFP4\)"):
        spec_from_gguf(GGUFFile(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope.scaling.type": "linear"}, "rope.scaling.type is 'linear', supported are none, yarn"),
        ({"expert_used_count": 6}, "expert_used_count is '6', expected at most 5"),
        ({"attention.sliding_window_pattern": 3}, "sliding_window_pattern = '3' is not supported"),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "model.gguf"
    write(path, random_model(), dict.fromkeys(("gate", "up", "down"), F32), **changes)
    with pytest.raises(StartupError, match=message):
        spec_from_gguf(GGUFFile(path))
