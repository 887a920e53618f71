"""A trained network in MiMo-V2.5's released layout, and back.

q, k and v are one tensor in chunks of [Q_c | K_c | V_c], as many as full layers have KV heads; router and its bias stay
fp32; the MTP layers are in a file of their own.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from server.model.families import count_mtp_layers, spec_from_config, tensor_names
from server.model.fused_qkv import spans
from server.model.spec import AttentionSpec, ModelSpec
from tools.train_tiny.model import Network

MODEL_FILE, MTP_FILE = "model.safetensors", "model_mtp.safetensors"
_EXPERT_PARTS = ("gate", "up", "down")


def export(
    network: Network,
    config: dict[str, Any],
    folder: Path,
    *,
    tokenizer: Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """config.json, the tensors with their index, and the files of the tokenizer's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    chunks = config["num_key_value_heads"]
    stored = {name: tensor.contiguous() for name, tensor in _stored(network, chunks, dtype)}
    files = {name: MTP_FILE if ".mtp." in name else MODEL_FILE for name in sorted(stored)}
    for file in (MODEL_FILE, MTP_FILE):
        save_file({name: stored[name] for name in files if files[name] == file}, folder / file, {"format": "pt"})
        (folder / file).chmod(0o644)  # an installed model is read by other users too
    size = sum(tensor.numel() * tensor.itemsize for tensor in stored.values())
    index = {"metadata": {"total_size": size, "tp_size": chunks}, "weight_map": files}
    _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "config.json", config)
    if tokenizer is not None:
        for path in sorted(tokenizer.iterdir()):
            shutil.copy(path, folder / path.name)


def load_network(folder: Path) -> Network:
    """The network that such a folder holds, in fp32."""
    config = json.loads((folder / "config.json").read_text())
    tensors: dict[str, Tensor] = {}
    for file in (MODEL_FILE, MTP_FILE):
        with safe_open(folder / file, framework="pt") as opened:  # type: ignore[no-untyped-call]
            tensors |= {name: opened.get_tensor(name).float() for name in opened.keys()}  # noqa: SIM118
    spec = spec_from_config(config, mtp_layers=count_mtp_layers(tensors))
    network = Network(spec, seed=0)
    tables = [name for name, _ in _stored(network, config["num_key_value_heads"], torch.float32)]
    assert sorted(tables) == sorted(tensors), "the folder holds other tensors than its config says"
    with torch.no_grad():
        for canonical, tensor in _parts(network):
            stored = tensors[_released_name(spec, canonical)]
            part = canonical.rsplit(".", 1)[-1]
            if part in ("q", "k", "v"):
                rows = spans(_attention(spec, canonical), config["num_key_value_heads"])[part]
                stored = torch.cat([stored[first:last] for first, last in rows])
            tensor.copy_(stored)
    return network


def _stored(network: Network, chunks: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    spec = network.spec
    fused: dict[str, Tensor] = {}
    for canonical, tensor in _parts(network):
        part = canonical.rsplit(".", 1)[-1]
        stored = tensor.detach()
        if part in ("q", "k", "v"):
            name = _released_name(spec, canonical)
            attention = _attention(spec, canonical)
            if name not in fused:
                rows = max(last for places in spans(attention, chunks).values() for _, last in places)
                fused[name] = stored.new_empty(rows, spec.hidden)
            places = spans(attention, chunks)[part]
            for (first, last), share in zip(places, stored.chunk(len(places)), strict=True):
                fused[name][first:last] = share
            continue
        keeps = part in ("router", "router_bias")
        yield _released_name(spec, canonical), stored.float() if keeps else stored.to(dtype)
    for name, tensor in fused.items():
        yield name, tensor.to(dtype)


def _parts(network: Network) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by its canonical name of `server.model.families.names`; a stack of experts is one each."""
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        canonical = re.sub(r"(attention|mlp|layer)\.(?=[a-z])", "", name)
        part = canonical.rsplit(".", 1)[-1]
        if part in _EXPERT_PARTS and tensor.dim() == 3:
            at = canonical.removesuffix(part)
            yield from ((f"{at}experts.{expert}.{part}", matrix) for expert, matrix in enumerate(tensor))
        else:
            yield canonical, tensor


def _released_name(spec: ModelSpec, canonical: str) -> str:
    """The last candidate of q, k and v is the fused tensor, the first of everything else the published name."""
    candidates = tensor_names(spec, gguf=False).candidates(canonical, "model.")
    return candidates[-1 if canonical.rsplit(".", 1)[-1] in ("q", "k", "v") else 0]


def _attention(spec: ModelSpec, canonical: str) -> AttentionSpec:
    kind, index, _ = canonical.split(".", 2)
    return (spec.layers if kind == "layers" else spec.mtp_layers)[int(index)].attention


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
