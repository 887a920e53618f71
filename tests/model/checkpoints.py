"""Tiny checkpoints on disk with weights that matter: no zero sinks, unit norms or zero biases."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from server.model.checkpoint import SafetensorsCheckpoint
from server.model.families import count_mtp_layers, spec_from_config
from server.model.spec import ModelSpec
from server.model.weights import Weights, load_weights

PRO_CONFIG: dict[str, Any] = {
    "architectures": ["MiMoV2ForCausalLM"],
    "model_type": "mimo_v2",
    "num_hidden_layers": 8,
    "hybrid_layer_pattern": [0, 1, 1, 0, 1, 1, 1, 0],
    "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1, 1],
    "sliding_window": 128,
    "sliding_window_size": 128,
    "attention_chunk_size": 128,
    "hidden_size": 96,
    "num_attention_heads": 16,
    "swa_num_attention_heads": 16,
    "num_key_value_heads": 8,
    "swa_num_key_value_heads": 8,
    "head_dim": 24,
    "swa_head_dim": 24,
    "v_head_dim": 16,
    "swa_v_head_dim": 16,
    "partial_rotary_factor": 0.334,
    "rope_theta": 10_000_000,
    "swa_rope_theta": 10_000,
    "max_position_embeddings": 4096,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "attention_value_scale": 0.612,
    "attention_bias": False,
    "intermediate_size": 128,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": None,
    "n_shared_experts": None,
    "layernorm_epsilon": 1e-5,
    "hidden_act": "silu",
    "vocab_size": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
"""MiMo-V2.5-Pro's keys and its uneven layer list, scaled down."""


def pro_tensors(config: dict[str, Any], *, mtp_layers: int = 3, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors in Xiaomi's names, with split projections."""
    generator = torch.Generator().manual_seed(seed)
    hidden, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    tensors: dict[str, Tensor] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        tensors[name] = torch.randn(rows, columns, generator=generator) / columns**0.5

    def vector(name: str, size: int, *, mean: float = 1.0, spread: float = 0.2) -> None:
        tensors[name] = mean + spread * torch.randn(size, generator=generator)

    def attention(at: str, is_window: bool) -> None:
        kind = "swa_" if is_window else ""
        heads, kv_heads = config[f"{kind}num_attention_heads"], config[f"{kind}num_key_value_heads"]
        head_dim, value_dim = config[f"{kind}head_dim"], config[f"{kind}v_head_dim"]
        matrix(f"{at}.q_proj.weight", heads * head_dim, hidden)
        matrix(f"{at}.k_proj.weight", kv_heads * head_dim, hidden)
        matrix(f"{at}.v_proj.weight", kv_heads * value_dim, hidden)
        matrix(f"{at}.o_proj.weight", hidden, heads * value_dim)
        if is_window:
            vector(f"{at}.attention_sink_bias", heads, mean=0.5, spread=1.0)

    def mlp(at: str, size: int) -> None:
        matrix(f"{at}.gate_proj.weight", size, hidden)
        matrix(f"{at}.up_proj.weight", size, hidden)
        matrix(f"{at}.down_proj.weight", hidden, size)

    matrix("model.embed_tokens.weight", vocab, hidden)
    matrix("lm_head.weight", vocab, hidden)
    vector("model.norm.weight", hidden)
    for layer, is_window in enumerate(config["hybrid_layer_pattern"]):
        at = f"model.layers.{layer}"
        vector(f"{at}.input_layernorm.weight", hidden)
        vector(f"{at}.post_attention_layernorm.weight", hidden)
        attention(f"{at}.self_attn", bool(is_window))
        if config["moe_layer_freq"][layer]:
            matrix(f"{at}.mlp.gate.weight", config["n_routed_experts"], hidden)
            vector(f"{at}.mlp.gate.e_score_correction_bias", config["n_routed_experts"], mean=0.0)
            for expert in range(config["n_routed_experts"]):
                mlp(f"{at}.mlp.experts.{expert}", config["moe_intermediate_size"])
        else:
            mlp(f"{at}.mlp", width)
    for layer in range(mtp_layers):
        at = f"model.mtp.layers.{layer}"
        for norm in ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm"):
            vector(f"{at}.{norm}.weight", hidden)
        matrix(f"{at}.eh_proj.weight", hidden, 2 * hidden)
        attention(f"{at}.self_attn", True)
        mlp(f"{at}.mlp", width)
    return tensors


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, shards: int = 2) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        chosen = {name: tensors[name].contiguous() for name in names[shard::shards]}
        save_file(chosen, folder / file)
        weight_map |= dict.fromkeys(chosen, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def load_folder(
    folder: Path, *, window_keys: int | None = None, dtype: torch.dtype = torch.float32
) -> tuple[ModelSpec, Weights]:
    checkpoint = SafetensorsCheckpoint(folder)
    config = json.loads((folder / "config.json").read_text())
    spec = spec_from_config(config, mtp_layers=count_mtp_layers(checkpoint.tensors), window_keys=window_keys)
    return spec, load_weights(spec, checkpoint, dtype)


def distinct_tensors(weights: Weights) -> list[Tensor]:
    """Every tensor of loaded weights once, though two places may share it."""
    found: dict[int, Tensor] = {}

    def visit(value: object) -> None:
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif isinstance(value, tuple):
            for entry in value:
                visit(entry)
        elif value is not None:
            for name in type(value).__dataclass_fields__:  # type: ignore[attr-defined]
                visit(getattr(value, name))

    visit(weights)
    return list(found.values())


def write_gguf(path: Path, architecture: str, metadata: Mapping[str, int | float], tensors: Mapping[str, Any]) -> None:
    """A GGUF file of fp32 tensors (numpy or torch); the metadata's keys stand below the architecture's name."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in metadata.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{architecture}.{name}", value)
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
