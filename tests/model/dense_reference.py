"""MiMo-V2 as the published description has it, with no cache, no pages and no batch: slow, masked, float64.

Reads Xiaomi's key and tensor names directly, so that it shares nothing with the server's parsing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def mimo_logits(config: Mapping[str, Any], tensors: Mapping[str, Tensor], tokens: Tensor, window_keys: int) -> Tensor:
    """tokens [T] -> logits [T, N] float64"""
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    eps = config["layernorm_epsilon"]
    hidden = weights["model.embed_tokens.weight"][tokens]
    for layer, is_window in enumerate(config["hybrid_layer_pattern"]):
        at = f"model.layers.{layer}"
        normed = _rms_norm(hidden, weights[f"{at}.input_layernorm.weight"], eps)
        hidden = hidden + _attention(config, weights, f"{at}.self_attn", normed, window_keys if is_window else None)
        normed = _rms_norm(hidden, weights[f"{at}.post_attention_layernorm.weight"], eps)
        mlp = _moe if config["moe_layer_freq"][layer] else _dense
        hidden = hidden + mlp(config, weights, f"{at}.mlp", normed)
    return _rms_norm(hidden, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _rope(x: Tensor, theta: float, rotary_dim: int) -> Tensor:
    """x [heads, T, D]"""
    half = rotary_dim // 2
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * theta ** (
        -torch.arange(half, dtype=torch.float64) / half
    )
    first, second, rest = x[..., :half], x[..., half:rotary_dim], x[..., rotary_dim:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def _attention(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], at: str, x: Tensor, window_keys: int | None
) -> Tensor:
    is_window = window_keys is not None
    kind = "swa_" if is_window else ""
    heads, kv_heads = config[f"{kind}num_attention_heads"], config[f"{kind}num_key_value_heads"]
    head_dim, value_dim = config[f"{kind}head_dim"], config[f"{kind}v_head_dim"]
    rotary_dim = int(head_dim * config["partial_rotary_factor"])
    count = x.shape[0]
    q = (x @ weights[f"{at}.q_proj.weight"].T).view(count, heads, head_dim).transpose(0, 1)
    k = (x @ weights[f"{at}.k_proj.weight"].T).view(count, kv_heads, head_dim).transpose(0, 1)
    v = (x @ weights[f"{at}.v_proj.weight"].T).view(count, kv_heads, value_dim).transpose(0, 1)
    v = v * config["attention_value_scale"]
    theta = config[f"{kind}rope_theta"]
    q, k = _rope(q, theta, rotary_dim), _rope(k, theta, rotary_dim)
    k, v = k.repeat_interleave(heads // kv_heads, 0), v.repeat_interleave(heads // kv_heads, 0)
    scores = q @ k.transpose(1, 2) / head_dim**0.5
    distance = torch.arange(count)[:, None] - torch.arange(count)
    seen = distance >= 0
    if is_window:
        seen &= distance < window_keys
    weight = scores.exp() * seen
    denominator = weight.sum(-1, keepdim=True)
    if is_window:
        denominator = denominator + weights[f"{at}.attention_sink_bias"].exp()[:, None, None]
    attended = (weight / denominator @ v).transpose(0, 1).reshape(count, heads * value_dim)
    return attended @ weights[f"{at}.o_proj.weight"].T


def _dense(config: Mapping[str, Any], weights: Mapping[str, Tensor], at: str, x: Tensor) -> Tensor:
    gate, up = x @ weights[f"{at}.gate_proj.weight"].T, x @ weights[f"{at}.up_proj.weight"].T
    return gate * gate.sigmoid() * up @ weights[f"{at}.down_proj.weight"].T


def _moe(config: Mapping[str, Any], weights: Mapping[str, Tensor], at: str, x: Tensor) -> Tensor:
    scores = (x @ weights[f"{at}.gate.weight"].T).sigmoid()
    biased = scores + weights[f"{at}.gate.e_score_correction_bias"]
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        chosen = biased[token].topk(config["num_experts_per_tok"]).indices
        shares = scores[token, chosen]
        shares = shares / (shares.sum() + 1e-20)
        for expert, share in zip(chosen.tolist(), shares, strict=True):
            out[token] += share * _dense(config, weights, f"{at}.experts.{expert}", x[token : token + 1])[0]
    return out
