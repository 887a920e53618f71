"""gpt-oss: names and constants. Source of the defaults: `GptOssConfig` of transformers 5.24, the published configs."""

from __future__ import annotations

import re
from dataclasses import replace

from server.errors import StartupError
from server.model.families.keys import Keys, read_dtype
from server.model.families.names import GGUF_NAMES, GGUF_TOP, HF_TOP, TensorNames, hf_layer
from server.model.families.rope import magnitude, read_rope
from server.model.gguf_file import GGUFFile
from server.model.spec import (
    Activation,
    AttentionSpec,
    ExpertFiles,
    LayerSpec,
    ModelSpec,
    MoESpec,
    RopeSpec,
    Router,
    YarnSpec,
    head_scale,
)

THETA = 150_000.0
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
PROJECTIONS = ("gate", "up", "down")
KINDS = {"full_attention": False, "sliding_attention": True}
SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0
MXFP4_COLUMNS = 32
"""Columns that share a scale."""

_LAYER = "{prefix}layers.{layer}."
_EXPERTS = f"{_LAYER}mlp.experts."
HF_NAMES = TensorNames(
    prefixes=("model.",),
    top=HF_TOP,
    layer={
        **hf_layer(_LAYER),
        "sinks": (f"{_LAYER}self_attn.sinks",),
        "router": (f"{_LAYER}mlp.router.weight",),
        "router_bias": (f"{_LAYER}mlp.router.bias",),
        "experts_gate_up": (f"{_EXPERTS}gate_up_proj",),
        "experts_gate_up_codes": (f"{_EXPERTS}gate_up_proj_blocks",),
        "experts_gate_up_scales": (f"{_EXPERTS}gate_up_proj_scales",),
        "experts_gate_up_bias": (f"{_EXPERTS}gate_up_proj_bias",),
        "experts_down": (f"{_EXPERTS}down_proj",),
        "experts_down_codes": (f"{_EXPERTS}down_proj_blocks",),
        "experts_down_scales": (f"{_EXPERTS}down_proj_scales",),
        "experts_down_bias": (f"{_EXPERTS}down_proj_bias",),
    },
    ignored=(r".*rotary_emb\..*inv_freq",),
)


GGUF_NAMES_GPT_OSS = TensorNames(
    prefixes=("",),
    top=GGUF_TOP,
    layer={
        **GGUF_NAMES,
        "sinks": ("blk.{layer}.attn_sinks.weight",),
        "mlp_norm": ("blk.{layer}.post_attention_norm.weight",),
        "router": ("blk.{layer}.ffn_gate_inp.weight",),
        "router_bias": ("blk.{layer}.ffn_gate_inp.bias",),
        **{
            f"experts_{part}{kind}": (f"blk.{{layer}}.ffn_{part}_exps.{ending}",)
            for part in PROJECTIONS
            for kind, ending in (
                ("", "weight"),
                ("_codes", "weight.codes"),
                ("_scales", "weight.scales"),
                ("_bias", "bias"),
            )
        },
    },
)


def parse_config(keys: Keys, window_keys: int | None) -> ModelSpec:
    layers = keys.integer("num_hidden_layers", default=36)
    is_window = keys.per_layer("layer_types", layers=layers, allowed=KINDS)
    heads = keys.integer("num_attention_heads", default=64)
    head_dim = keys.integer("head_dim", default=64)
    context_tokens = keys.integer("max_position_embeddings", default=131_072)
    bias = keys.boolean("attention_bias", default=True)
    full = AttentionSpec(
        heads=heads,
        kv_heads=keys.integer("num_key_value_heads", default=8),
        head_dim=head_dim,
        value_dim=head_dim,
        rope=_rope(keys, head_dim, context_tokens),
        scale=head_scale(head_dim),
        sinks=True,
        qkv_bias=bias,
        output_bias=bias,
    )
    window = replace(
        full, window_keys=window_keys if window_keys is not None else keys.integer("sliding_window", default=128)
    )
    hidden = keys.integer("hidden_size", default=2880)
    moe = _moe(keys)
    files = _expert_files(keys, layers, (hidden, moe.width))
    return ModelSpec(
        family="gpt_oss",
        hidden=hidden,
        vocab=keys.integer("vocab_size", default=201_088),
        context_tokens=context_tokens,
        layers=tuple(
            LayerSpec(attention=window if kind else full, mlp=replace(moe, files=stored))
            for kind, stored in zip(is_window or _alternating(layers), files, strict=True)
        ),
        norm_eps=keys.number("rms_norm_eps", default=1e-5),
        tied_embeddings=keys.boolean("tie_word_embeddings", default=False),
        dtype=read_dtype(keys),
    )


def parse_gguf(keys: Keys, file: GGUFFile, window_keys: int | None) -> ModelSpec:
    """Source of the keys: the GGUF specification and published files, which leave the layer pattern out.

    Heads are rotated in halves, so rows of q and k are in our order. llama.cpp rounds the ends of YaRN's ramp; the
    model was made without, and so do we.
    """
    layers = keys.integer("gpt-oss.block_count")
    hidden = keys.integer("gpt-oss.embedding_length")
    heads = keys.integer("gpt-oss.attention.head_count")
    head_dim = keys.integer("gpt-oss.attention.key_length", default=64)
    context_tokens = keys.integer("gpt-oss.context_length")
    experts, active = keys.integer("gpt-oss.expert_count"), keys.integer("gpt-oss.expert_used_count")
    if active > experts:
        raise keys.wrong("gpt-oss.expert_used_count", f"at most {experts}, the number of experts")
    full = AttentionSpec(
        heads=heads,
        kv_heads=keys.integer("gpt-oss.attention.head_count_kv", default=heads),
        head_dim=head_dim,
        value_dim=keys.integer("gpt-oss.attention.value_length", default=head_dim),
        rope=_gguf_rope(keys, head_dim),
        scale=head_scale(head_dim),
        sinks=True,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
    )
    window = replace(
        full, window_keys=window_keys if window_keys is not None else keys.integer("gpt-oss.attention.sliding_window")
    )
    keys.forbid("gpt-oss.attention.sliding_window_pattern", 2)
    moe = MoESpec(
        experts=experts,
        active=active,
        width=keys.integer("gpt-oss.expert_feed_forward_length", "gpt-oss.feed_forward_length"),
        activation=Activation.CLAMPED_SWIGLU,
        router=Router.SOFTMAX,
        bias=True,
    )
    return ModelSpec(
        family="gpt_oss",
        hidden=hidden,
        vocab=file.vocabulary_rows(),
        context_tokens=context_tokens,
        layers=tuple(
            LayerSpec(attention=window if kind else full, mlp=replace(moe, files=_gguf_files(file, layer)))
            for layer, kind in enumerate(_alternating(layers))
        ),
        norm_eps=keys.number("gpt-oss.attention.layer_norm_rms_epsilon"),
        tied_embeddings="output.weight" not in file.tensors,
    )


def _gguf_files(file: GGUFFile, layer: int) -> ExpertFiles:
    """mxfp4 stays if all three matrices of a layer are in it."""
    found = [file.tensors.get(f"blk.{layer}.ffn_{part}_exps.weight") for part in PROJECTIONS]
    kinds = {tensor.kind.name for tensor in found if tensor is not None}
    if "MXFP4" in kinds and len(kinds) > 1:
        raise StartupError(
            f"{file.path}: the experts of layer {layer} are partly MXFP4 ({', '.join(sorted(kinds))}), which is not "
            "supported"
        )
    return ExpertFiles.STACKED_MXFP4 if kinds == {"MXFP4"} else ExpertFiles.STACKED


def _gguf_rope(keys: Keys, head_dim: int) -> RopeSpec:
    theta = keys.number("gpt-oss.rope.freq_base", default=THETA)
    scaling = "gpt-oss.rope.scaling"
    kind = keys.choice(f"{scaling}.type", allowed={"none": "none", "yarn": "yarn"}, default="yarn")
    if kind == "none":
        return RopeSpec(theta=theta, rotary_dim=head_dim)
    factor = keys.number(f"{scaling}.factor", default=32.0)
    yarn = YarnSpec(
        factor=factor,
        beta_fast=keys.number(f"{scaling}.yarn_beta_fast", default=32.0),
        beta_slow=keys.number(f"{scaling}.yarn_beta_slow", default=1.0),
        original_context=keys.integer(f"{scaling}.original_context_length", default=4096),
        truncate=False,
    )
    return RopeSpec(theta=theta, rotary_dim=head_dim, yarn=yarn, attention_factor=magnitude(factor))


def _alternating(layers: int) -> list[bool]:
    return [layer % 2 == 0 for layer in range(layers)]


def _expert_files(keys: Keys, layers: int, columns: tuple[int, int]) -> list[ExpertFiles]:
    """quant_method mxfp4 says that the experts are in that format, and nothing else is, but for the modules that
    modules_to_not_convert names: by their beginning up to a dot, by their end, * for anything (transformers 5.24,
    `should_convert_module`)."""
    quantization = keys.section("quantization_config")
    if quantization is None:
        return [ExpertFiles.INTERLEAVED] * layers
    quantization.choice("quant_method", allowed={"mxfp4": "mxfp4"}, default="missing")
    if any(count % MXFP4_COLUMNS for count in columns):
        raise StartupError(
            f"{keys.where}: hidden_size {columns[0]} and intermediate_size {columns[1]} must be multiples of "
            f"{MXFP4_COLUMNS} for mxfp4"
        )
    kept = quantization.values.get("modules_to_not_convert") or []
    if not isinstance(kept, list) or not all(isinstance(pattern, str) for pattern in kept):
        raise quantization.wrong("modules_to_not_convert", "a list of names")
    plain = re.compile("|".join(_whole(pattern) for pattern in kept) or "(?!)")
    return [
        ExpertFiles.INTERLEAVED
        if plain.fullmatch(f"model.layers.{layer}.mlp.experts")
        else ExpertFiles.INTERLEAVED_MXFP4
        for layer in range(layers)
    ]


def _whole(pattern: str) -> str:
    """A regular expression for the whole names that a pattern means."""
    inner = re.escape(pattern).replace(r"\*", ".*")
    return rf"{inner}(\..*)?|.*{inner}"


def _rope(keys: Keys, head_dim: int, context_tokens: int) -> RopeSpec:
    """One RoPE for all layers; a config that says nothing means YaRN with the published numbers."""
    parameters = keys.section("rope_parameters") or keys.section("rope_scaling") or Keys(YARN, keys.where)
    theta = (parameters if parameters.has("rope_theta") else keys).number("rope_theta", default=THETA)
    return read_rope(parameters, theta=theta, rotary_dim=head_dim, context_tokens=context_tokens)


def _moe(keys: Keys) -> MoESpec:
    keys.choice("hidden_act", allowed={"silu": Activation.SILU}, default="silu")
    keys.forbid("swiglu_alpha", SWIGLU_ALPHA)
    keys.forbid("swiglu_limit", SWIGLU_LIMIT)
    experts = keys.integer("num_local_experts", "num_experts", default=128)
    active = keys.integer("num_experts_per_tok", "experts_per_token", default=4)
    if active > experts:
        raise keys.wrong("num_experts_per_tok", f"at most {experts}, the number of experts")
    return MoESpec(
        experts=experts,
        active=active,
        width=keys.integer("intermediate_size", default=2880),
        activation=Activation.CLAMPED_SWIGLU,
        router=Router.SOFTMAX,
        bias=True,
    )
