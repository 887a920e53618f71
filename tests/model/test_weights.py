"""Checkpoints on disk become weights; whatever does not fit is named before anything is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from server.errors import StartupError
from server.model import weights as weights_module
from server.model.checkpoint import GGUFCheckpoint, SafetensorsCheckpoint
from server.model.families import spec_from_config, spec_from_gguf
from server.model.gguf_file import GGUFFile
from server.model.weights import DenseWeights, MoEWeights, checkpoint_bytes, load_weights, weight_bytes
from tests.model.checkpoints import (
    PRO_CONFIG,
    distinct_tensors,
    load_folder,
    pro_tensors,
    write_checkpoint,
    write_gguf,
)

Tensors = dict[str, Tensor]


def write(folder: Path, change: Callable[[Tensors], Any] = lambda tensors: None) -> Tensors:
    tensors = pro_tensors(PRO_CONFIG)
    change(tensors)
    write_checkpoint(folder, PRO_CONFIG, tensors, shards=3)
    return tensors


@pytest.mark.parametrize("chunk_bytes", [64 * 2**20, 1000])
def test_every_tensor_arrives_where_it_belongs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(weights_module, "_CHUNK_BYTES", chunk_bytes)
    tensors = write(tmp_path)
    _, weights = load_folder(tmp_path)
    at = "model.layers.1"
    attention = weights.layers[1].attention
    qkv = torch.cat([tensors[f"{at}.self_attn.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(attention.qkv, qkv)
    assert attention.sinks is not None
    assert torch.equal(attention.sinks, tensors[f"{at}.self_attn.attention_sink_bias"])
    assert weights.layers[0].attention.sinks is None
    moe, dense = weights.layers[1].mlp, weights.layers[0].mlp
    assert isinstance(moe, MoEWeights)
    assert isinstance(dense, DenseWeights)
    assert torch.equal(dense.gate_up[128:], tensors["model.layers.0.mlp.up_proj.weight"])
    for expert in range(12):
        name = f"{at}.mlp.experts.{expert}"
        gate_up = torch.cat((tensors[f"{name}.gate_proj.weight"], tensors[f"{name}.up_proj.weight"]))
        assert torch.equal(moe.gate_up[expert], gate_up)
        assert torch.equal(moe.down[expert], tensors[f"{name}.down_proj.weight"])
    for index, mtp in enumerate(weights.mtp):
        name = f"model.mtp.layers.{index}"
        assert torch.equal(mtp.enorm, tensors[f"{name}.enorm.weight"])
        assert torch.equal(mtp.hnorm, tensors[f"{name}.hnorm.weight"])
        assert torch.equal(mtp.eh_proj, tensors[f"{name}.eh_proj.weight"])
        assert torch.equal(mtp.layer.attention_norm, tensors[f"{name}.input_layernorm.weight"])
        assert torch.equal(mtp.layer.mlp_norm, tensors[f"{name}.pre_mlp_layernorm.weight"])
        assert torch.equal(mtp.final_norm, tensors[f"{name}.final_layernorm.weight"])
        assert torch.equal(mtp.layer.attention.output, tensors[f"{name}.self_attn.o_proj.weight"])
    assert len({mtp.eh_proj.data_ptr() for mtp in weights.mtp}) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_bytes_are_what_loading_takes(tmp_path: Path, dtype: torch.dtype) -> None:
    write(tmp_path)
    spec, weights = load_folder(tmp_path, dtype=dtype)
    assert sum(tensor.nbytes for tensor in distinct_tensors(weights)) == weight_bytes(spec, dtype)
    moe = weights.layers[1].mlp
    assert isinstance(moe, MoEWeights)
    assert moe.router.dtype == moe.router_bias.dtype == torch.float32
    assert moe.gate_up.dtype == dtype


def test_progress_adds_up_to_the_checkpoint(tmp_path: Path) -> None:
    tensors = write(tmp_path)
    spec = spec_from_config(PRO_CONFIG, mtp_layers=3)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    read: list[int] = []
    load_weights(spec, checkpoint, torch.float32, progress=read.append)
    assert sum(read) == checkpoint_bytes(spec, checkpoint) == sum(tensor.nbytes for tensor in tensors.values())


SINKS = "model.layers.1.self_attn.attention_sink_bias"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(SINKS), f"the checkpoint lacks 1 tensor: {SINKS}"),
        (
            lambda t: [t.pop(name) for name in list(t) if "layers.4.mlp.experts" in name],
            r"lacks 36 tensors: .*layers\.4\.mlp\.experts\.0\.gate_proj\.weight.* and 32 more",
        ),
        (lambda t: t.update({"model.layers.0.surprise": torch.ones(2)}), "does not use: 1 tensor: model.layers.0.surp"),
        (lambda t: t.update({SINKS: torch.ones(5)}), rf"tensor {SINKS} has shape \[5\], expected \[16\]"),
        (lambda t: t.pop("lm_head.weight"), "lacks 1 tensor: lm_head.weight"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: Callable[[Tensors], Any], message: str) -> None:
    write(tmp_path, change)
    with pytest.raises(StartupError, match=message):
        load_folder(tmp_path)


def test_media_tensors_are_ignored(tmp_path: Path) -> None:
    write(tmp_path, lambda tensors: tensors.update({"visual.merger.ln_q.weight": torch.ones(3)}))
    load_folder(tmp_path)


def test_a_missing_shard_is_named_before_any_weight_is_read(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(StartupError, match=r"model-00002-of-00003\.safetensors cannot be read: No such file"):
        SafetensorsCheckpoint(tmp_path)


def test_a_tensor_that_two_shards_hold_is_refused(tmp_path: Path) -> None:
    """Which of the two would be served is a matter of luck."""
    write(tmp_path)
    again = tmp_path / "model-00003-of-00003.safetensors"
    tensors = load_file(again)
    save_file({**tensors, SINKS: torch.zeros(16)}, again)
    save_file({SINKS: torch.ones(16)}, tmp_path / "model-00001-of-00003.safetensors")
    with pytest.raises(StartupError, match=rf"00003\.safetensors: tensor {SINKS} is already in model-00001-of-00003"):
        SafetensorsCheckpoint(tmp_path)


def test_shards_load_without_their_index(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file({"tok_embeddings.weight": torch.ones(3)}, tmp_path / "consolidated.safetensors")
    load_folder(tmp_path)


def test_damaged_safetensors_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no \.safetensors file is there"):
        SafetensorsCheckpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100)}, file)
    data = file.read_bytes()
    for damaged, said in (
        (b"", "cut short"),
        (data[:6], "cut short"),
        (data[:20], "cut short"),
        (b"\xff" * 8 + data[8:], "cut short"),
        (data[:-10], "fetch it again"),
        (data + b"\0", "fetch it again"),
        (data[:8] + b"[" + data[9:], "no valid safetensors header"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(StartupError, match=said) as caught:
            SafetensorsCheckpoint(tmp_path)
        assert str(caught.value).startswith(str(file))
        assert "\n" not in str(caught.value)


def test_a_tied_head_stored_twice_is_ignored(tmp_path: Path) -> None:
    config = {**PRO_CONFIG, "tie_word_embeddings": True}
    write_checkpoint(tmp_path, config, pro_tensors(PRO_CONFIG))
    _, weights = load_folder(tmp_path)
    assert weights.head is weights.embedding


GEMMA_CONFIG = {
    "model_type": "gemma3_text",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 11,
    "sliding_window": 4,
}


def gemma_tensors(prefix: str) -> Tensors:
    shapes = {"input_layernorm": 16, "post_attention_layernorm": 16, "pre_feedforward_layernorm": 16}
    shapes |= {"post_feedforward_layernorm": 16, "self_attn.q_norm": 8, "self_attn.k_norm": 8}
    matrices = {"self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16)}
    matrices |= {"self_attn.o_proj": (16, 16), "mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16)}
    matrices |= {"mlp.down_proj": (16, 24)}
    tensors = {f"{prefix}embed_tokens.weight": torch.randn(11, 16), f"{prefix}norm.weight": torch.randn(16)}
    for layer in range(2):
        for name, shape in {**shapes, **matrices}.items():
            sizes = (shape,) if isinstance(shape, int) else shape
            tensors[f"{prefix}layers.{layer}.{name}.weight"] = torch.randn(sizes)
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_bytes_count_a_norm_per_head(tmp_path: Path, dtype: torch.dtype) -> None:
    write_checkpoint(tmp_path, GEMMA_CONFIG, gemma_tensors("model."))
    spec, weights = load_folder(tmp_path, dtype=dtype)
    qk_norm = weights.layers[0].attention.qk_norm
    assert qk_norm is not None
    assert qk_norm.shape == (3, 8)
    assert sum(tensor.nbytes for tensor in distinct_tensors(weights)) == weight_bytes(spec, dtype)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma3_with_vision_loads_its_text_part(tmp_path: Path, prefix: str) -> None:
    tensors = gemma_tensors(prefix)
    vision = "vision_tower." if prefix.startswith("language") else "model.vision_tower."
    tensors[f"{vision}vision_model.post_layernorm.weight"] = torch.ones(3)
    tensors["multi_modal_projector.mm_soft_emb_norm.weight"] = torch.ones(3)
    write_checkpoint(tmp_path, {"model_type": "gemma3", "text_config": GEMMA_CONFIG}, tensors)
    _, weights = load_folder(tmp_path, dtype=torch.bfloat16)
    norm = weights.layers[1].mlp_norm
    assert norm.dtype == torch.float32, "1 + w in bf16 would lose the low bits of w"
    stored = tensors[f"{prefix}layers.1.pre_feedforward_layernorm.weight"]
    assert torch.equal(norm, 1 + stored)


def test_norms_stay_in_fp32_whatever_the_weights_are(tmp_path: Path, gemma3_gguf: Path) -> None:
    """GGUF files hold Gemma's 1 + w in fp32; in bf16 its low bits would be lost, and other models' just the same."""
    write(tmp_path)
    _, weights = load_folder(tmp_path, dtype=torch.bfloat16)
    layer = weights.layers[0]
    norms = [weights.final_norm, layer.attention_norm, layer.mlp_norm, weights.mtp[0].enorm, weights.mtp[0].final_norm]
    assert {norm.dtype for norm in norms} == {torch.float32}
    assert layer.attention.qkv.dtype == torch.bfloat16
    file = GGUFFile(gemma3_gguf)
    weights = load_weights(spec_from_gguf(file), GGUFCheckpoint(file), torch.bfloat16)
    stored = file.tensors["output_norm.weight"].dequantize()
    assert np.array_equal(weights.final_norm.numpy(), stored)
    stored = file.tensors["blk.3.attn_k_norm.weight"].dequantize()
    qk_norm = weights.layers[3].attention.qk_norm
    assert qk_norm is not None
    assert np.array_equal(qk_norm[-1].numpy(), stored)


TINY_LLAMA = {
    "embedding_length": 16,
    "block_count": 1,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "feed_forward_length": 24,
    "context_length": 64,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def tiny_llama_tensors() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (11, 16), "output_norm.weight": (16,)}
    shapes |= {"output.weight": (11, 16), "rope_freqs.weight": (4,)}
    layer: dict[str, tuple[int, ...]] = {"attn_norm.weight": (16,), "ffn_norm.weight": (16,)}
    layer |= {"attn_q.weight": (16, 16), "attn_k.weight": (8, 16), "attn_v.weight": (8, 16)}
    layer |= {"attn_q.bias": (16,), "attn_k.bias": (8,), "attn_v.bias": (8,), "attn_output.weight": (16, 16)}
    layer |= {"ffn_gate.weight": (24, 16), "ffn_up.weight": (24, 16), "ffn_down.weight": (16, 24)}
    return {
        name: generator.standard_normal(shape).astype(np.float32)
        for name, shape in (shapes | {f"blk.0.{name}": shape for name, shape in layer.items()}).items()
    }


def test_gguf_llama_that_rotates_its_heads_in_part_is_refused(tmp_path: Path) -> None:
    """Its rows would be put in the order of heads that are rotated whole."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", {**TINY_LLAMA, "rope.dimension_count": 4}, tiny_llama_tensors())
    with pytest.raises(StartupError, match=r"tiny\.gguf: llama\.rope\.dimension_count is 4 where heads have 8 dimen"):
        spec_from_gguf(GGUFFile(path))


def test_gguf_llama_with_biases_and_rope_divisors(tmp_path: Path) -> None:
    """Rows of q and k, and their biases, lie in rotary pairs; rope_freqs.weight divides the frequencies."""
    path = tmp_path / "tiny.gguf"
    tensors = tiny_llama_tensors()
    write_gguf(path, "llama", {**TINY_LLAMA, "rope.dimension_count": 8}, tensors)
    file = GGUFFile(path)
    spec = spec_from_gguf(file)
    attention = spec.layers[0].attention
    assert attention.qkv_bias
    assert not attention.output_bias
    assert not spec.tied_embeddings
    assert attention.rope.divisors == tuple(tensors["rope_freqs.weight"].tolist())
    weights = load_weights(spec, GGUFCheckpoint(file), torch.float32)
    pairs = [0, 2, 4, 6, 1, 3, 5, 7]
    stored = tensors["blk.0.attn_q.weight"]
    expected = np.concatenate((stored[:8][pairs], stored[8:][pairs]))
    assert np.array_equal(weights.layers[0].attention.qkv[:16].numpy(), expected)
    bias = weights.layers[0].attention.qkv_bias
    assert bias is not None
    assert np.array_equal(bias[16:24].numpy(), tensors["blk.0.attn_k.bias"][pairs])
    assert np.array_equal(bias[24:].numpy(), tensors["blk.0.attn_v.bias"])


def test_a_checkpoint_index_may_hold_other_keys(tmp_path: Path) -> None:
    write(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "metadata": {"tp_size": 4}}))
    load_folder(tmp_path)
