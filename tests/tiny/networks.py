"""Small networks in the shape of twinpane-tiny whose every weight matters, and their tensors under released names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from server.model.families import spec_from_config
from server.model.fused_qkv import spans
from server.model.spec import AttentionSpec, RopeSpec
from tests.model.stored_forms import attentions
from tools.train_tiny.config import MTP_LAYERS, tiny_config
from tools.train_tiny.model import Network

VOCAB = 128


def small_config(**changes: Any) -> dict[str, Any]:
    """As wide as twinpane-tiny where a head or a window is, and narrow elsewhere."""
    return {**tiny_config(VOCAB), "hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 48, **changes}


def network_of(config: dict[str, Any], *, seed: int = 0) -> Network:
    return Network(spec_from_config(config, mtp_layers=MTP_LAYERS), seed=seed)


@torch.no_grad()
def unsettle(network: Network, *, seed: int = 1) -> Network:
    """Ones and zeros would hide a norm, a sink or a bias that is missing. All values are ones that bf16 has."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if tensor.dim() == 1:
            spread = 1.0 if name.endswith("sinks") else 0.2
            tensor += spread * torch.randn(tensor.shape, generator=generator)
        tensor.copy_(tensor.bfloat16())
    return network


def split_tensors(folder: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of an exported folder, with q, k and v apart, in fp32."""
    tensors = {**load_file(folder / "model.safetensors"), **load_file(folder / "model_mtp.safetensors")}
    for attention in attentions(config, mtp_layers=MTP_LAYERS):
        fused = tensors.pop(f"{attention.at}qkv_proj.weight")
        spec = AttentionSpec(
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            value_dim=attention.value_dim,
            rope=RopeSpec(theta=1.0, rotary_dim=2),
            scale=1.0,
        )
        for part, rows in spans(spec, config["num_key_value_heads"]).items():
            tensors[f"{attention.at}{part}_proj.weight"] = torch.cat([fused[first:last] for first, last in rows])
    return {name: tensor.float() for name, tensor in tensors.items()}
