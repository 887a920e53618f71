"""Whole model folders as the hub has them: weights, a tokenizer that was trained here, a template, recommendations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import GptOssConfig, GptOssForCausalLM, MiMoV2FlashConfig, MiMoV2FlashForCausalLM, PreTrainedModel

from tests.model.checkpoints import PRO_CONFIG, pro_tensors, write_checkpoint

VOCAB = 320
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
HARMONY_CONTROL = ("<|endoftext|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>")
HARMONY = (
    "{%- for message in messages %}"
    "{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
"""The frame of gpt-oss's format, without channels and tools."""

XIAOMI_CONFIG: dict[str, Any] = {**PRO_CONFIG, "vocab_size": VOCAB, "sliding_window": 16, "sliding_window_size": 16}


def write_tokenizer(folder: Path, control: tuple[str, ...] = CONTROL) -> tokenizers.Tokenizer:
    """A byte-level BPE over the licence with control tokens, the first ids. Ids 0 to VOCAB - 1."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(control),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(Path(__file__).parents[2] / "LICENSE")], trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def write_companions(folder: Path, *, jinja: bool = True, **generation: Any) -> None:
    """The template, as a file of its own or in the list form of old configs, and the recommendations."""
    config: dict[str, Any] = {"eos_token": "<|im_end|>"}
    if jinja:
        (folder / "chat_template.jinja").write_text(CHATML)
    else:
        tool_use = {"name": "tool_use", "template": "{{ raise_exception('not this one') }}"}
        config["chat_template"] = [tool_use, {"name": "default", "template": CHATML}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))


def write_mimo_flash(folder: Path) -> PreTrainedModel:
    """A random hybrid model in the names of transformers, which is the oracle too; a window of 17 keys."""
    torch.manual_seed(0)
    config = MiMoV2FlashConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=24,
        v_head_dim=16,
        sliding_window=17,
        moe_intermediate_size=24,
        n_routed_experts=10,
        num_experts_per_tok=3,
        max_position_embeddings=2048,
    )
    model = MiMoV2FlashForCausalLM(config).eval().float()
    for name, tensor in model.named_parameters():
        if tensor.dim() > 1:  # as transformers starts them all tokens are nearly equal
            torch.nn.init.normal_(tensor, std=tensor.shape[-1] ** -0.5)
        elif "sinks" in name:
            torch.nn.init.normal_(tensor)
    model.save_pretrained(folder)
    return model


def write_xiaomi(folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """A random model in Xiaomi's published names, with MTP layers; 16 earlier positions seen by window layers."""
    tensors = pro_tensors(XIAOMI_CONFIG)
    write_checkpoint(folder, {**XIAOMI_CONFIG, **changes}, tensors)
    return tensors


def tiny_gpt_oss(**changes: Any) -> GptOssConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 13,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "max_position_embeddings": 2048,
    }
    return GptOssConfig(**(sizes | changes))


def gpt_oss_mxfp4_tensors(config: GptOssConfig, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """A random gpt-oss in the published names: experts in blocks and scales, everything else plain."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in GptOssForCausalLM(config).state_dict().items():
        if name.endswith((".gate_up_proj", ".down_proj")):
            experts, columns, rows = tensor.shape
            codes = torch.randint(256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(121, 125, codes.shape[:-1], generator=generator, dtype=torch.uint8)
            tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
            continue
        spread = 0.3 if tensor.dim() == 1 or "bias" in name else tensor.shape[-1] ** -0.5
        tensors[name] = float("norm" in name) + spread * torch.randn(tensor.shape, generator=generator)
    return tensors


def write_gpt_oss_mxfp4(
    folder: Path, config: GptOssConfig, tensors: dict[str, torch.Tensor], *, dtype: str = "float32"
) -> None:
    quantization = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    settings = {**config.to_dict(), "architectures": ["GptOssForCausalLM"], "quantization_config": quantization}
    settings["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_gpt_oss_mxfp4(folder: Path) -> GptOssForCausalLM:
    """transformers' own model of the folder in fp32: it writes the values out while it loads."""
    with mock.patch("transformers.quantizers.quantizer_mxfp4.is_accelerate_available", return_value=True):
        model = GptOssForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()
