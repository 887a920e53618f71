"""MiMo-V2-Flash, V2.5 and V2.5-Pro, text only: names and constants.

Two spellings are read: Xiaomi's published keys (hybrid_layer_pattern, swa_*, moe_layer_freq) and those that
transformers 5.24 writes for mimo_v2_flash (layer_types, mlp_layer_types, rope_parameters).
"""

from __future__ import annotations

from server.errors import StartupError
from server.model.families.keys import Keys, read_dtype
from server.model.families.names import HF_TOP, TensorNames, hf_layer
from server.model.families.rope import read_rope
from server.model.spec import (
    Activation,
    AttentionSpec,
    DenseSpec,
    ExpertFiles,
    LayerSpec,
    ModelSpec,
    MoESpec,
    head_scale,
)

SILU = {"silu": Activation.SILU}

_LAYER = "{prefix}layers.{layer}."
_MTP = "{prefix}mtp.layers.{layer}."
_SINKS = ("self_attn.attention_sink_bias", "self_attn.sinks")


def _qkv(at: str) -> dict[str, tuple[str, ...]]:
    """Separate tensors in Flash, one in V2.5 and V2.5-Pro; see `server.model.fused_qkv`."""
    return {part: (f"{at}self_attn.{part}_proj.weight", f"{at}self_attn.qkv_proj.weight") for part in ("q", "k", "v")}


HF_NAMES = TensorNames(
    prefixes=("model.",),
    top=HF_TOP,
    layer={
        **hf_layer(_LAYER),
        **_qkv(_LAYER),
        "sinks": tuple(_LAYER + name for name in _SINKS),
        "router": (f"{_LAYER}mlp.gate.weight",),
        "router_bias": (f"{_LAYER}mlp.gate.e_score_correction_bias",),
        **{
            f"expert_{part}{kind}": (f"{_LAYER}mlp.experts.{{expert}}.{part}_proj.weight{ending}",)
            for part in ("gate", "up", "down")
            for kind, ending in (("", ""), ("_codes", ""), ("_scales", "_scale"))
        },
    },
    mtp={
        **hf_layer(_MTP),
        **_qkv(_MTP),
        "sinks": tuple(_MTP + name for name in _SINKS),
        "mlp_norm": (f"{_MTP}pre_mlp_layernorm.weight",),
        "enorm": (f"{_MTP}enorm.weight",),
        "hnorm": (f"{_MTP}hnorm.weight",),
        "eh_proj": (f"{_MTP}eh_proj.weight",),
        "final_norm": (f"{_MTP}final_layernorm.weight",),
    },
    ignored=(r"visual\..*", r"audio_encoder\..*", r"speech_embeddings\..*", r".*rotary_emb\..*inv_freq"),
)


def parse_config(keys: Keys, mtp_layers: int, window_keys: int | None) -> ModelSpec:
    _refuse_unsupported(keys)
    layers = keys.integer("num_hidden_layers")
    is_window = _layer_kinds(keys, layers)
    is_moe = keys.per_layer("moe_layer_freq", layers=layers, allowed={0: False, 1: True})
    if is_moe is None:
        is_moe = keys.per_layer("mlp_layer_types", layers=layers, allowed={"dense": False, "sparse": True})
    if is_moe is None:
        raise StartupError(f"{keys.where}: key moe_layer_freq or mlp_layer_types is missing")
    attention = {
        False: _attention(keys, window_keys=None),
        True: _attention(keys, window_keys=_window_keys(keys) if window_keys is None else window_keys),
    }
    dense = DenseSpec(width=keys.integer("intermediate_size"), activation=keys.choice("hidden_act", allowed=SILU))
    mlp = {False: dense, True: _moe(keys) if any(is_moe) else dense}
    return ModelSpec(
        family="mimo_v2",
        hidden=keys.integer("hidden_size"),
        vocab=keys.integer("vocab_size"),
        context_tokens=keys.integer("max_position_embeddings"),
        layers=tuple(
            LayerSpec(attention=attention[window], mlp=mlp[moe]) for window, moe in zip(is_window, is_moe, strict=True)
        ),
        mtp_layers=(LayerSpec(attention=attention[True], mlp=dense),) * mtp_layers,
        norm_eps=keys.number("layernorm_epsilon", "rms_norm_eps"),
        tied_embeddings=keys.boolean("tie_word_embeddings", default=False),
        dtype=read_dtype(keys),
    )


def _refuse_unsupported(keys: Keys) -> None:
    keys.forbid("attention_projection_layout", "split", "fused_qkv")  # which of them, the tensors' names say
    keys.forbid("n_group", 1)
    keys.forbid("topk_group", 1)
    keys.forbid("n_shared_experts", 0)
    keys.forbid("scoring_func", "sigmoid")
    keys.forbid("topk_method", "noaux_tc")


def _layer_kinds(keys: Keys, layers: int) -> list[bool]:
    """Which layers are window layers. The published lists have no period, so they are read, never computed."""
    kinds = keys.per_layer("hybrid_layer_pattern", layers=layers, allowed={0: False, 1: True})
    if kinds is None:
        kinds = keys.per_layer(
            "layer_types", layers=layers, allowed={"full_attention": False, "sliding_attention": True}
        )
    if kinds is None:
        raise StartupError(f"{keys.where}: key hybrid_layer_pattern or layer_types is missing")
    return kinds


def _window_keys(keys: Keys) -> int:
    """Xiaomi's 128 counts earlier positions (its serving base attends to 128 plus the query); transformers' 129 counts
    keys. sliding_window_size is only ever Xiaomi's."""
    if keys.has("sliding_window_size"):
        return keys.integer("sliding_window_size") + 1
    if keys.has("hybrid_layer_pattern"):
        return keys.integer("sliding_window") + 1
    return keys.integer("sliding_window")


def _attention(keys: Keys, *, window_keys: int | None) -> AttentionSpec:
    is_window = window_keys is not None
    published = keys.has("hybrid_layer_pattern")

    def integer(name: str) -> int:
        return keys.integer(f"swa_{name}", name) if is_window else keys.integer(name)

    if is_window and not published and not keys.has("swa_num_key_value_heads"):
        kv_heads = 2 * keys.integer("num_key_value_heads")
    elif is_window:
        kv_heads = keys.integer("swa_num_key_value_heads")
    else:
        kv_heads = keys.integer("num_key_value_heads")
    head_dim = integer("head_dim")
    parameters = keys.section("rope_parameters")
    scaling = parameters.section("sliding_attention" if is_window else "full_attention") if parameters else None
    if scaling is not None and scaling.has("rope_theta"):
        theta = scaling.number("rope_theta")
    else:
        theta = keys.number("swa_rope_theta" if is_window else "rope_theta")
    factor = (scaling if scaling and scaling.has("partial_rotary_factor") else keys).number(
        "partial_rotary_factor", default=1.0
    )
    if factor > 1.0:
        raise StartupError(f"{keys.where}: partial_rotary_factor is {factor:g}, expected at most 1")
    sinks = f"add_{'swa' if is_window else 'full'}_attention_sink_bias"
    return AttentionSpec(
        heads=integer("num_attention_heads"),
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=integer("v_head_dim"),
        rope=read_rope(
            scaling or keys.section("rope_scaling"),
            theta=theta,
            rotary_dim=int(head_dim * factor),
            context_tokens=keys.integer("max_position_embeddings"),
        ),
        scale=head_scale(head_dim),
        window_keys=window_keys,
        sinks=keys.boolean(sinks) if published else keys.boolean(sinks, default=is_window),
        value_scale=keys.number("attention_value_scale", default=1.0),
        qkv_bias=keys.boolean("attention_bias", default=False),
    )


def _moe(keys: Keys) -> MoESpec:
    experts = keys.integer("n_routed_experts", "num_local_experts")
    active = keys.integer("num_experts_per_tok")
    if active > experts:
        raise keys.wrong("num_experts_per_tok", f"at most {experts}, the number of experts")
    files = _expert_files(keys)
    width, hidden = keys.integer("moe_intermediate_size"), keys.integer("hidden_size")
    if files is ExpertFiles.SPLIT_MXFP4 and (width % 32 or hidden % 32):
        raise StartupError(
            f"{keys.where}: hidden_size {hidden} and moe_intermediate_size {width} must be multiples of 32 for mxfp4"
        )
    return MoESpec(
        files=files,
        experts=experts,
        active=active,
        width=width,
        activation=keys.choice("hidden_act", allowed=SILU),
        normalize=keys.boolean("norm_topk_prob", default=True),
        routed_scale=keys.number("routed_scaling_factor", default=1.0),
    )


def _expert_files(keys: Keys) -> ExpertFiles:
    """store_dtype, found in quantization_config, is for the routed experts; the rest is as without it."""
    found = [
        section for section in (keys.section("quantization_config"), keys) if section and section.has("store_dtype")
    ]
    for section in found:
        section.forbid("store_dtype", "mxfp4")
        section.forbid("mxfp4_block_size", 32)
    return ExpertFiles.SPLIT_MXFP4 if found else ExpertFiles.SPLIT
