"""What is exported is read by the server's own loader and computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file

from tests.model.checkpoints import load_folder
from tests.model.paged import PagedSequences, random_texts, run_interleaved
from tests.tiny.networks import VOCAB, network_of, small_config, unsettle
from tools.train_tiny.config import WINDOW, tiny_config
from tools.train_tiny.export import export, load_network
from tools.train_tiny.model import Network

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def network() -> Network:
    return unsettle(network_of(small_config()))


@pytest.fixture(scope="module")
def folder(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    export(network, small_config(), folder)
    return folder


def test_the_server_computes_the_trainers_logits(network: Network, folder: Path) -> None:
    spec, weights = load_folder(folder)
    assert spec == network.spec
    texts = random_texts(VOCAB, (7 * WINDOW, 40, 1))
    sequences = PagedSequences(spec, weights, page_tokens=4, tokens=1024)
    for text, logits in zip(texts, run_interleaved(sequences, texts, (1, 7, 64)), strict=True):
        padded = torch.tensor([text + [0] * (-len(text) % WINDOW)])
        with torch.no_grad():
            expected = network.logits(network(padded))[0, : len(text)]
        assert (logits - expected).abs().max() < TOLERANCE


def test_the_servers_mtp_weights_are_the_trainers(network: Network, folder: Path) -> None:
    _, weights = load_folder(folder)
    assert len(weights.mtp) == 3
    for loaded, trained in zip(weights.mtp, network.mtp, strict=True):
        assert torch.equal(loaded.enorm, trained.enorm)
        assert torch.equal(loaded.hnorm, trained.hnorm)
        assert torch.equal(loaded.final_norm, trained.final_norm)
        assert torch.equal(loaded.eh_proj, trained.eh_proj)
        attention = trained.layer.attention
        assert torch.equal(loaded.layer.attention.qkv, torch.cat((attention.q, attention.k, attention.v)))
        assert torch.equal(loaded.layer.attention.sinks, attention.sinks)


def test_a_folder_read_back_is_the_same_network(network: Network, folder: Path) -> None:
    read, kept = load_network(folder).state_dict(), network.state_dict()
    assert read.keys() == kept.keys()
    assert all(torch.equal(read[name], kept[name]) for name in kept)


def test_the_layout_is_the_released_one(folder: Path) -> None:
    tensors = {**load_file(folder / "model.safetensors"), **load_file(folder / "model_mtp.safetensors")}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["weight_map"]["model.mtp.layers.2.eh_proj.weight"] == "model_mtp.safetensors"
    for name, tensor in tensors.items():
        steers = name.endswith(("mlp.gate.weight", "e_score_correction_bias"))
        assert tensor.dtype == (torch.float32 if steers else torch.bfloat16)
    full, window = (tensors[f"model.layers.{n}.self_attn.qkv_proj.weight"].shape[0] for n in (0, 1))
    assert (full, window) == (4 * 48 + 2 * (48 + 32), 4 * 48 + 4 * (48 + 32))
    assert not any(".q_proj." in name for name in tensors)


def test_chunks_lie_as_when_they_were_sharded_for_training(network: Network, folder: Path) -> None:
    fused = load_file(folder / "model.safetensors")["model.layers.0.self_attn.qkv_proj.weight"].float()
    attention = network.layers[0].attention
    second = torch.cat((attention.q[96:], attention.k[48:], attention.v[32:]))
    assert torch.equal(fused[fused.shape[0] // 2 :], second)


def test_the_config_leaves_no_key_to_a_default() -> None:
    """Random order and a round through JSON change nothing, and the keys that the family reads are all there."""
    config = tiny_config(1280)
    items = list(config.items())
    Random(0).shuffle(items)
    assert json.loads(json.dumps(dict(items))) == config
    assert config["torch_dtype"] == "bfloat16" and config["vocab_size"] == 1280
