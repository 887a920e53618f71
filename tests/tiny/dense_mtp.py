"""What the MTP layers of MiMo-V2.5 compute, written down once more from the description of the format, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.model.dense_reference import _attention, _dense, _rms_norm


def mtp_logits(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], layer: int, hidden: Tensor, given: Tensor
) -> Tensor:
    """hidden [T, M] of the target after its final norm, given [T] tokens -> [T, N]"""
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    at, eps = f"model.mtp.layers.{layer}", config["layernorm_epsilon"]
    embedded = _rms_norm(weights["model.embed_tokens.weight"][given], weights[f"{at}.enorm.weight"], eps)
    normed = _rms_norm(hidden.double(), weights[f"{at}.hnorm.weight"], eps)
    x = torch.cat((embedded, normed), -1) @ weights[f"{at}.eh_proj.weight"].T
    window_keys = config["sliding_window_size"] + 1
    normed = _rms_norm(x, weights[f"{at}.input_layernorm.weight"], eps)
    x = x + _attention(config, weights, f"{at}.self_attn", normed, window_keys)
    x = x + _dense(config, weights, f"{at}.mlp", _rms_norm(x, weights[f"{at}.pre_mlp_layernorm.weight"], eps))
    return _rms_norm(x, weights[f"{at}.final_layernorm.weight"], eps) @ weights["lm_head.weight"].T
