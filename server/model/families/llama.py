"""Llama and its equals (SmolLM2, Llama 2 and 3): names and constants."""

from __future__ import annotations

from server.errors import StartupError
from server.model.families.keys import Keys, read_dtype
from server.model.families.names import GGUF_NAMES, GGUF_TOP, HF_TOP, TensorNames, hf_layer
from server.model.families.rope import read_rope
from server.model.gguf_file import GGUFFile
from server.model.spec import Activation, AttentionSpec, DenseSpec, LayerSpec, ModelSpec, RopeSpec, head_scale

HF_NAMES = TensorNames(
    prefixes=("model.",),
    top=HF_TOP,
    layer=hf_layer("{prefix}layers.{layer}."),
    ignored=(r".*rotary_emb\.inv_freq",),
)
GGUF_NAMES_LLAMA = TensorNames(
    prefixes=("",), top=GGUF_TOP, layer=GGUF_NAMES, ignored=(r"rope_freqs\.weight",), rope_interleaved=True
)


def parse_config(keys: Keys) -> ModelSpec:
    hidden = keys.integer("hidden_size")
    heads = keys.integer("num_attention_heads")
    head_dim = keys.integer("head_dim", default=hidden // heads)
    context_tokens = keys.integer("max_position_embeddings")
    keys.forbid("pretraining_tp", 1)
    parameters = keys.section("rope_parameters")
    theta = (parameters if parameters and parameters.has("rope_theta") else keys).number("rope_theta", default=1e4)
    bias = keys.boolean("attention_bias", default=False)
    attention = AttentionSpec(
        heads=heads,
        kv_heads=keys.integer("num_key_value_heads", default=heads),
        head_dim=head_dim,
        value_dim=head_dim,
        rope=read_rope(
            parameters or keys.section("rope_scaling"), theta=theta, rotary_dim=head_dim, context_tokens=context_tokens
        ),
        scale=head_scale(head_dim),
        qkv_bias=bias,
        output_bias=bias,
    )
    mlp = DenseSpec(
        width=keys.integer("intermediate_size"),
        activation=keys.choice("hidden_act", allowed={"silu": Activation.SILU}, default="silu"),
        bias=keys.boolean("mlp_bias", default=False),
    )
    return ModelSpec(
        family="llama",
        hidden=hidden,
        vocab=keys.integer("vocab_size"),
        context_tokens=context_tokens,
        layers=(LayerSpec(attention=attention, mlp=mlp),) * keys.integer("num_hidden_layers"),
        norm_eps=keys.number("rms_norm_eps", default=1e-6),
        tied_embeddings=keys.boolean("tie_word_embeddings", default=False),
        dtype=read_dtype(keys),
    )


def parse_gguf(keys: Keys, file: GGUFFile) -> ModelSpec:
    """Source of the keys: the GGUF specification, section "llama". rope_freqs.weight divides the rotary frequencies."""
    hidden = keys.integer("llama.embedding_length")
    heads = keys.integer("llama.attention.head_count")
    head_dim = keys.integer("llama.attention.key_length", default=hidden // heads)
    if keys.integer("llama.expert_count", default=0, minimum=0) > 0:
        raise StartupError(f"{keys.where}: llama.expert_count: mixture-of-experts llama files are not supported")
    attention = AttentionSpec(
        heads=heads,
        kv_heads=keys.integer("llama.attention.head_count_kv", default=heads),
        head_dim=head_dim,
        value_dim=keys.integer("llama.attention.value_length", default=head_dim),
        rope=_gguf_rope(keys, file, head_dim),
        scale=head_scale(head_dim),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
    )
    mlp = DenseSpec(
        width=keys.integer("llama.feed_forward_length"),
        activation=Activation.SILU,
        bias="blk.0.ffn_gate.bias" in file.tensors,
    )
    return ModelSpec(
        family="llama",
        hidden=hidden,
        vocab=file.vocabulary_rows(),
        context_tokens=keys.integer("llama.context_length"),
        layers=(LayerSpec(attention=attention, mlp=mlp),) * keys.integer("llama.block_count"),
        norm_eps=keys.number("llama.attention.layer_norm_rms_epsilon"),
        tied_embeddings="output.weight" not in file.tensors,
    )


def _gguf_rope(keys: Keys, file: GGUFFile, head_dim: int) -> RopeSpec:
    rotary_dim = keys.integer("llama.rope.dimension_count", default=head_dim)
    if rotary_dim != head_dim:
        raise StartupError(
            f"{keys.where}: llama.rope.dimension_count is {rotary_dim} where heads have {head_dim} dimensions; "
            "heads that are rotated in part are not supported for llama files"
        )
    theta = keys.number("llama.rope.freq_base", default=1e4)
    kind = keys.choice("llama.rope.scaling.type", allowed={"none": "none", "linear": "linear"}, default="none")
    linear = keys.number("llama.rope.scaling.factor") if kind == "linear" else 1.0
    divisors = None
    if "rope_freqs.weight" in file.tensors:
        divisors = tuple(file.tensors["rope_freqs.weight"].dequantize().tolist())
        if len(divisors) != rotary_dim // 2:
            raise StartupError(
                f"{keys.where}: rope_freqs.weight has {len(divisors)} entries, expected {rotary_dim // 2}"
            )
    return RopeSpec(theta=theta, rotary_dim=rotary_dim, linear_factor=linear, divisors=divisors)
