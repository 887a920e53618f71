"""Gemma 3, text only: names and constants. Source of the defaults: arXiv 2503.19786 and the published configs."""

from __future__ import annotations

import math
from dataclasses import replace

from server.model.families.keys import Keys, read_dtype
from server.model.families.names import GGUF_NAMES, GGUF_TOP, HF_TOP, TensorNames, hf_layer
from server.model.families.rope import read_rope
from server.model.gguf_file import GGUFFile
from server.model.spec import Activation, AttentionSpec, DenseSpec, LayerSpec, ModelSpec, RopeSpec, head_scale

LOCAL_THETA = 1e4
GLOBAL_THETA = 1e6
LAYERS_PER_FULL = 6
LAYERS_OF_27B = 62
KINDS = {"full_attention": False, "sliding_attention": True}

_LAYER = "{prefix}layers.{layer}."
HF_NAMES = TensorNames(
    prefixes=("model.", "language_model.model.", "model.language_model."),
    top={**HF_TOP, "head": ("lm_head.weight", "language_model.lm_head.weight")},
    layer={
        **hf_layer(_LAYER),
        "q_norm": (f"{_LAYER}self_attn.q_norm.weight",),
        "k_norm": (f"{_LAYER}self_attn.k_norm.weight",),
        "attention_post_norm": (f"{_LAYER}post_attention_layernorm.weight",),
        "mlp_norm": (f"{_LAYER}pre_feedforward_layernorm.weight",),
        "mlp_post_norm": (f"{_LAYER}post_feedforward_layernorm.weight",),
    },
    ignored=(r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*", r".*rotary_emb\..*inv_freq"),
)
GGUF_NAMES_GEMMA3 = TensorNames(
    prefixes=("",),
    top=GGUF_TOP,
    layer={
        **GGUF_NAMES,
        "q_norm": ("blk.{layer}.attn_q_norm.weight",),
        "k_norm": ("blk.{layer}.attn_k_norm.weight",),
        "attention_post_norm": ("blk.{layer}.post_attention_norm.weight",),
        "mlp_post_norm": ("blk.{layer}.post_ffw_norm.weight",),
    },
)


def parse_config(keys: Keys, window_keys: int | None) -> ModelSpec:
    """Gemma3ForCausalLM, or the text part of Gemma3ForConditionalGeneration, whose configs leave many keys out."""
    text = keys.section("text_config")
    if text is not None:
        tied = keys.boolean("tie_word_embeddings", default=True)
        dtype = read_dtype(text if text.has("dtype", "torch_dtype") else keys)
        return replace(_parse_text(text, window_keys), tied_embeddings=tied, dtype=dtype)
    return _parse_text(keys, window_keys)


def _parse_text(keys: Keys, window_keys: int | None) -> ModelSpec:
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        keys.forbid(name, False)
    hidden = keys.integer("hidden_size", default=2304)
    layers = keys.integer("num_hidden_layers", default=26)
    head_dim = keys.integer("head_dim", default=256)
    context_tokens = keys.integer("max_position_embeddings", default=131_072)
    period = keys.integer("sliding_window_pattern", "_sliding_window_pattern", default=LAYERS_PER_FULL)
    is_window = keys.per_layer("layer_types", layers=layers, allowed=KINDS)
    bias = keys.boolean("attention_bias", default=False)
    full_rope, local_rope = _ropes(keys, head_dim, context_tokens)
    full = AttentionSpec(
        heads=keys.integer("num_attention_heads", default=8),
        kv_heads=keys.integer("num_key_value_heads", default=4),
        head_dim=head_dim,
        value_dim=head_dim,
        rope=full_rope,
        scale=keys.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
    )
    window = window_keys if window_keys is not None else keys.integer("sliding_window", default=4096)
    mlp = DenseSpec(
        width=keys.integer("intermediate_size", default=9216),
        activation=keys.choice(
            "hidden_activation",
            "hidden_act",
            allowed={"gelu_pytorch_tanh": Activation.GELU_TANH},
            default="gelu_pytorch_tanh",
        ),
    )
    return ModelSpec(
        family="gemma3",
        hidden=hidden,
        vocab=keys.integer("vocab_size", default=262_208),
        context_tokens=context_tokens,
        layers=_layers(is_window or _pattern(layers, period), full, local_rope, window, mlp),
        norm_eps=keys.number("rms_norm_eps", default=1e-6),
        norm_offset=1.0,
        embedding_scale=math.sqrt(hidden),
        tied_embeddings=keys.boolean("tie_word_embeddings", default=True),
        dtype=read_dtype(keys),
    )


def parse_gguf(keys: Keys, file: GGUFFile, window_keys: int | None) -> ModelSpec:
    """GGUF stores Gemma's norm weights with the 1 already added, so norm_offset is 0 here.

    The files leave out the local theta, the layer pattern and the query scale; the 27B model (62 layers) alone scales
    by hidden / heads instead of the head dim.
    """
    hidden = keys.integer("gemma3.embedding_length")
    layers = keys.integer("gemma3.block_count")
    heads = keys.integer("gemma3.attention.head_count")
    head_dim = keys.integer("gemma3.attention.key_length", default=256)
    kind = keys.choice("gemma3.rope.scaling.type", allowed={"none": "none", "linear": "linear"}, default="none")
    full = AttentionSpec(
        heads=heads,
        kv_heads=keys.integer("gemma3.attention.head_count_kv", default=heads),
        head_dim=head_dim,
        value_dim=keys.integer("gemma3.attention.value_length", default=head_dim),
        rope=RopeSpec(
            theta=keys.number("gemma3.rope.freq_base", default=GLOBAL_THETA),
            rotary_dim=head_dim,
            linear_factor=keys.number("gemma3.rope.scaling.factor") if kind == "linear" else 1.0,
        ),
        scale=head_scale(hidden // heads if layers == LAYERS_OF_27B else head_dim),
        qk_norm=True,
    )
    local = RopeSpec(theta=keys.number("gemma3.rope.freq_base_swa", default=LOCAL_THETA), rotary_dim=head_dim)
    name = "gemma3.attention.sliding_window_pattern"
    if isinstance(keys.values.get(name), list):
        is_window = keys.per_layer(name, layers=layers, allowed={True: True, False: False}) or []
    else:
        is_window = _pattern(layers, keys.integer(name, default=LAYERS_PER_FULL))
    mlp = DenseSpec(width=keys.integer("gemma3.feed_forward_length"), activation=Activation.GELU_TANH)
    window = window_keys if window_keys is not None else keys.integer("gemma3.attention.sliding_window")
    return ModelSpec(
        family="gemma3",
        hidden=hidden,
        vocab=file.vocabulary_rows(),
        context_tokens=keys.integer("gemma3.context_length"),
        layers=_layers(is_window, full, local, window, mlp),
        norm_eps=keys.number("gemma3.attention.layer_norm_rms_epsilon"),
        embedding_scale=math.sqrt(hidden),
        tied_embeddings="output.weight" not in file.tensors,
    )


def _pattern(layers: int, period: int) -> list[bool]:
    return [(layer + 1) % period != 0 for layer in range(layers)]


def _layers(
    is_window: list[bool], full: AttentionSpec, local: RopeSpec, window_keys: int, mlp: DenseSpec
) -> tuple[LayerSpec, ...]:
    window = replace(full, rope=local, window_keys=window_keys)
    kinds = {kind: LayerSpec(attention=window if kind else full, mlp=mlp, post_norms=True) for kind in (False, True)}
    return tuple(kinds[kind] for kind in is_window)


def _ropes(keys: Keys, head_dim: int, context_tokens: int) -> tuple[RopeSpec, RopeSpec]:
    """Full and local RoPE. Old configs scale only the full layers (rope_scaling); new ones say it per layer type."""
    parameters = keys.section("rope_parameters")
    full = parameters.section("full_attention") if parameters else None
    local = parameters.section("sliding_attention") if parameters else None
    if parameters and not full and not local:
        full = parameters
    full_theta = (full if full and full.has("rope_theta") else keys).number("rope_theta", default=GLOBAL_THETA)
    if local and local.has("rope_theta"):
        local_theta = local.number("rope_theta")
    else:
        local_theta = keys.number("rope_local_base_freq", default=LOCAL_THETA)
    return (
        read_rope(
            full or keys.section("rope_scaling"), theta=full_theta, rotary_dim=head_dim, context_tokens=context_tokens
        ),
        read_rope(local, theta=local_theta, rotary_dim=head_dim, context_tokens=context_tokens),
    )
