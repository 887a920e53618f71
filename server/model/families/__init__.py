"""Which families are served, and how a checkpoint's own description becomes a `ModelSpec`. Loads without torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from server.errors import StartupError
from server.model.families import gemma3, gpt_oss, llama, mimo_v2
from server.model.families.keys import Keys
from server.model.families.names import TensorNames
from server.model.gguf_file import GGUFFile
from server.model.spec import ModelSpec

MODEL_TYPES = {
    "llama": "llama",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt_oss",
    "mimo_v2_flash": "mimo_v2",
    "mimo_v2": "mimo_v2",
}
HF_NAMES = {
    "llama": llama.HF_NAMES,
    "gemma3": gemma3.HF_NAMES,
    "gpt_oss": gpt_oss.HF_NAMES,
    "mimo_v2": mimo_v2.HF_NAMES,
}
GGUF_NAMES = {
    "llama": llama.GGUF_NAMES_LLAMA,
    "gemma3": gemma3.GGUF_NAMES_GEMMA3,
    "gpt_oss": gpt_oss.GGUF_NAMES_GPT_OSS,
}
GGUF_ARCHITECTURES = ("gemma3", "gpt-oss", "llama")
_MTP_LAYER = re.compile(r"model\.mtp\.layers\.(\d+)\.")


def spec_from_config(config: Mapping[str, Any], *, mtp_layers: int = 0, window_keys: int | None = None) -> ModelSpec:
    """ModelSpec from a Hugging Face config.json; mtp_layers comes from `count_mtp_layers`, as configs often lack it."""
    keys = Keys(config)
    model_type = keys.text("model_type", default="missing")
    if model_type not in MODEL_TYPES:
        raise _unsupported(f"config.json: model_type {model_type!r}", MODEL_TYPES)
    family = MODEL_TYPES[model_type]
    if family != "gpt_oss":  # which reads its own
        _refuse_quantization(keys, family)
    if family == "llama":
        spec = llama.parse_config(keys)
    elif family == "gemma3":
        spec = gemma3.parse_config(keys, window_keys)
    elif family == "gpt_oss":
        spec = gpt_oss.parse_config(keys, window_keys)
    else:
        spec = mimo_v2.parse_config(keys, mtp_layers, window_keys)
    return _checked(spec, keys.where, window_keys)


def spec_from_gguf(file: GGUFFile, *, window_keys: int | None = None) -> ModelSpec:
    keys = Keys(file.metadata, file.path.name)
    architecture = keys.text("general.architecture", default="missing")
    if architecture == "llama":
        return _checked(llama.parse_gguf(keys, file), keys.where, window_keys)
    if architecture == "gemma3":
        return _checked(gemma3.parse_gguf(keys, file, window_keys), keys.where, window_keys)
    if architecture == "gpt-oss":
        return _checked(gpt_oss.parse_gguf(keys, file, window_keys), keys.where, window_keys)
    raise _unsupported(f"{keys.where}: architecture {architecture!r}", GGUF_ARCHITECTURES)


def tensor_names(spec: ModelSpec, *, gguf: bool) -> TensorNames:
    return (GGUF_NAMES if gguf else HF_NAMES)[spec.family]


def count_mtp_layers(names: Iterable[str]) -> int:
    """MTP layers of a checkpoint: they are known only from their tensors (model.mtp.layers.N...)."""
    found = {int(match[1]) for name in names if (match := _MTP_LAYER.match(name))}
    if found != set(range(len(found))):
        raise StartupError(f"MTP layers are not numbered from 0 without a gap: {sorted(found)}")
    return len(found)


def _unsupported(what: str, supported: Iterable[str]) -> StartupError:
    return StartupError(f"{what} is not supported; supported are {', '.join(sorted(supported))}")


def _check_block_fp8(quantization: Keys) -> None:
    """fp8 with a scale for 128 x 128 values. Which tensors have it, they say themselves: ignored_layers is not needed.

    activation_scheme dynamic: activations may be quantized as they come, which we do not do.
    """
    quantization.forbid("fmt", "e4m3")
    quantization.forbid("activation_scheme", "dynamic")
    size = quantization.values.get("weight_block_size")
    if size != [128, 128]:
        raise StartupError(
            f"{quantization.where}: weight_block_size is {str(size)[:80]}, only [128, 128] is supported; "
            "fp8 with one scale for a tensor or a channel is not"
        )


def _refuse_quantization(keys: Keys, family: str) -> None:
    quantization = keys.section("quantization_config")
    if quantization is not None and quantization.text("quant_method", default="unknown") == "fp8":
        _check_block_fp8(quantization)
    elif quantization is not None:
        method = quantization.text("quant_method", "store_dtype", default="unknown")
        raise StartupError(
            f"{keys.where}: quantization_config with quant_method {method!r} is not supported yet; "
            "use an fp8 checkpoint in blocks of 128 x 128, a bf16, fp16 or fp32 one, or a GGUF file"
        )
    if family != "mimo_v2":
        for section in (keys, quantization or keys):
            section.forbid("store_dtype")


def _checked(spec: ModelSpec, where: str, window_keys: int | None) -> ModelSpec:
    if window_keys is not None and window_keys < 1:
        raise StartupError(f"window_keys is {window_keys}, expected at least 1 (the query's own key counts)")
    if window_keys is not None and not any(layer.is_window for layer in spec.layers):
        raise StartupError(f"{where}: window_keys is set, but this model has no window layers")
    for layer in (*spec.layers, *spec.mtp_layers):
        attention = layer.attention
        if attention.heads % attention.kv_heads:
            raise StartupError(
                f"{where}: {attention.heads} attention heads are not a multiple of {attention.kv_heads} KV heads"
            )
        if attention.rope.rotary_dim > attention.head_dim:
            raise StartupError(f"{where}: rotary dimension {attention.rope.rotary_dim} exceeds the head dimension")
    return spec
