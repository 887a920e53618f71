"""config.json and GGUF metadata become specs; what is wrong or unsupported is one clear line."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from server.errors import StartupError
from server.model.families import count_mtp_layers, spec_from_config, spec_from_gguf, tensor_names
from server.model.spec import Activation, DenseSpec, ExpertFiles, MoESpec, RopeSpec, Router, YarnSpec
from tests.model.checkpoints import PRO_CONFIG

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
GEMMA: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152},
}
"""The published config of Gemma 3 4B leaves everything out that is a default."""

GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131_072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199_999,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150_000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201_088,
}
"""The published config of gpt-oss-20b, but for its quantization_config."""

MXFP4: dict[str, Any] = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
"""gpt-oss's published quantization_config."""

FLASH_PATTERN = [0, 1, 1, 1, 1, *([0, 1, 1, 1, 1, 1] * 7), 0]
FLASH: dict[str, Any] = {
    **PRO_CONFIG,
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 48,
    "hybrid_layer_pattern": FLASH_PATTERN,
    "moe_layer_freq": [0] + [1] * 47,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "swa_num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "swa_head_dim": 192,
    "v_head_dim": 128,
    "swa_v_head_dim": 128,
    "rope_theta": 5_000_000,
    "max_position_embeddings": 262_144,
    "attention_value_scale": 0.707,
    "intermediate_size": 16384,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "vocab_size": 152_576,
    "torch_dtype": "bfloat16",
}


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def test_llama() -> None:
    spec = spec_from_config(LLAMA)
    attention = spec.layers[0].attention
    assert (len(spec.layers), spec.hidden, spec.vocab, spec.context_tokens) == (30, 576, 49152, 8192)
    assert (attention.heads, attention.kv_heads, attention.head_dim, attention.scale) == (9, 3, 64, 0.125)
    assert attention.rope == RopeSpec(theta=1e5, rotary_dim=64)
    assert spec.layers[0].mlp == DenseSpec(width=1536, activation=Activation.SILU)
    assert spec.tied_embeddings
    assert spec.window_tokens == 0


@pytest.mark.parametrize(
    "config",
    [
        {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {**without(LLAMA, "rope_theta"), "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5}},
    ],
    ids=["old keys", "new keys"],
)
def test_llama_linear_rope(config: dict[str, Any]) -> None:
    expected = RopeSpec(theta=1e5, rotary_dim=64, linear_factor=2.0)
    assert spec_from_config(config).layers[0].attention.rope == expected


def test_gemma3_from_a_config_that_relies_on_defaults() -> None:
    spec = spec_from_config(GEMMA)
    assert [index for index, layer in enumerate(spec.layers) if not layer.is_window] == [5, 11, 17, 23, 29]
    full, window = spec.layers[5].attention, spec.layers[0].attention
    assert (full.heads, full.kv_heads, full.head_dim, full.scale, full.qk_norm) == (8, 4, 256, 1 / 16, True)
    assert full.rope == RopeSpec(theta=1e6, rotary_dim=256, linear_factor=8.0)
    assert window.rope == RopeSpec(theta=1e4, rotary_dim=256)
    assert (window.window_keys, spec.window_tokens) == (1024, 1023)
    assert (spec.vocab, spec.norm_offset, spec.tied_embeddings, spec.layers[0].post_norms) == (262_208, 1.0, True, True)
    assert spec.embedding_scale == 2560**0.5


def test_gemma3_spellings_agree() -> None:
    text = {**GEMMA["text_config"], "torch_dtype": "bfloat16"}
    old = spec_from_config({**text, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6})
    new = spec_from_config(
        {
            **without(text, "rope_scaling"),
            "layer_types": ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(34)],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        }
    )
    assert old == new == spec_from_config(GEMMA)


def test_mimo_flash_in_both_spellings() -> None:
    published = spec_from_config(FLASH, mtp_layers=3)
    assert [index for index, layer in enumerate(published.layers) if not layer.is_window] == [
        0, 5, 11, 17, 23, 29, 35, 41, 47,
    ]  # fmt: skip
    full, window = published.layers[0].attention, published.layers[1].attention
    assert (full.kv_heads, window.kv_heads, window.window_keys) == (4, 8, 129)
    assert (full.rope, window.rope) == (RopeSpec(theta=5e6, rotary_dim=64), RopeSpec(theta=1e4, rotary_dim=64))
    assert (full.sinks, window.sinks, window.value_scale) == (False, True, 0.707)
    assert isinstance(published.layers[0].mlp, DenseSpec)
    assert isinstance(published.layers[1].mlp, MoESpec)
    assert published.mtp_layers[0].attention == window
    assert published.mtp_layers[0].mlp == published.layers[0].mlp
    converted = {
        **{name: value for name, value in FLASH.items() if not name.startswith(("swa_", "add_", "sliding", "hybrid"))},
        "layer_types": [("full" if kind == 0 else "sliding") + "_attention" for kind in FLASH_PATTERN],
        "mlp_layer_types": ["dense"] + ["sparse"] * 47,
        "sliding_window": 129,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            f"{kind}_attention": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.334}
            for kind, theta in (("full", 5e6), ("sliding", 1e4))
        },
    }
    for name in ("moe_layer_freq", "layernorm_epsilon", "rope_theta", "partial_rotary_factor"):
        del converted[name]
    assert spec_from_config(converted, mtp_layers=3) == published


def test_gpt_oss_20b() -> None:
    spec = spec_from_config(GPT_OSS)
    full, window = spec.layers[1].attention, spec.layers[0].attention
    assert [layer.is_window for layer in spec.layers] == [True, False] * 12
    assert (window.window_keys, spec.window_tokens, full.window_keys) == (128, 127, None)
    assert (full.heads, full.kv_heads, full.head_dim, full.scale) == (64, 8, 64, 0.125)
    assert full.sinks
    assert window.sinks
    assert full.qkv_bias
    assert full.output_bias
    yarn = YarnSpec(factor=32.0, beta_fast=32.0, beta_slow=1.0, original_context=4096, truncate=False)
    assert full.rope == window.rope
    assert replace(full.rope, attention_factor=1.0) == RopeSpec(theta=1.5e5, rotary_dim=64, yarn=yarn)
    assert full.rope.attention_factor == pytest.approx(1.3465735902799727)
    assert spec.layers[0].mlp == MoESpec(
        experts=32,
        active=4,
        width=2880,
        activation=Activation.CLAMPED_SWIGLU,
        router=Router.SOFTMAX,
        bias=True,
        files=ExpertFiles.INTERLEAVED,
    )
    assert (spec.hidden, spec.vocab, spec.context_tokens, spec.norm_eps) == (2880, 201_088, 131_072, 1e-5)
    assert not spec.tied_embeddings


def test_gpt_oss_120b_from_a_config_that_relies_on_defaults() -> None:
    spec = spec_from_config({"model_type": "gpt_oss"})
    twenty = spec_from_config(GPT_OSS)
    assert [layer.is_window for layer in spec.layers] == [True, False] * 18
    assert spec.layers[0].attention == twenty.layers[0].attention
    assert spec.layers[1].attention == twenty.layers[1].attention
    moe = spec.layers[0].mlp
    assert isinstance(moe, MoESpec)
    assert moe.experts == 128
    assert replace(moe, experts=32) == twenty.layers[0].mlp


@pytest.mark.parametrize(
    ("kept", "plain"),
    [
        ([], []),
        (MXFP4["modules_to_not_convert"], []),
        (["model.layers.1.mlp.experts"], [1]),
        (["model.layers.1"], [1]),
        (["model.layers.*.mlp"], list(range(24))),
        (["layers.2*.mlp.experts"], [2, 20, 21, 22, 23]),
        (["model.layers.3.mlp.experts.gate_up_proj", "model.layers.3.mlp.exp"], []),
    ],
)
def test_mxfp4_is_for_the_experts_that_the_config_does_not_leave_out(kept: list[str], plain: list[int]) -> None:
    quantization = {**MXFP4, "modules_to_not_convert": kept}
    spec = spec_from_config({**GPT_OSS, "quantization_config": quantization})
    files = [layer.mlp.files for layer in spec.layers if isinstance(layer.mlp, MoESpec)]
    assert [layer for layer, stored in enumerate(files) if stored is ExpertFiles.INTERLEAVED] == plain
    assert set(files) <= {ExpertFiles.INTERLEAVED, ExpertFiles.INTERLEAVED_MXFP4}


def test_gpt_oss_rope_spellings_agree() -> None:
    parameters = {**GPT_OSS["rope_scaling"], "rope_theta": 150_000}
    new = {**without(GPT_OSS, "rope_scaling", "rope_theta"), "rope_parameters": parameters}
    assert spec_from_config(new) == spec_from_config(GPT_OSS)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"factor": 4.0}, 0.1 * math.log(4.0) + 1.0),
        ({"factor": 4.0, "attention_factor": 0.8}, 0.8),
        ({"factor": 4.0, "mscale": 2.0, "mscale_all_dim": 0.5}, (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
        ({"factor": 0.5}, 1.0),
        ({"original_max_position_embeddings": 1024}, 0.1 * math.log(8.0) + 1.0),
    ],
)
def test_yarns_attention_factor_is_given_or_follows_from_the_factor(scaling: dict[str, Any], expected: float) -> None:
    rope = spec_from_config({**LLAMA, "rope_scaling": {"rope_type": "yarn", **scaling}}).layers[0].attention.rope
    assert rope.attention_factor == pytest.approx(expected)


@pytest.mark.parametrize("absent", ["sliding_window", "sliding_window_size"])
def test_xiaomis_window_counts_earlier_positions_under_either_name(absent: str) -> None:
    assert spec_from_config(without(FLASH, absent)).layers[1].attention.window_keys == 129


def test_kv_sizes_of_the_published_models() -> None:
    """MiMo-V2-Flash: 23,040 bytes of full K/V a token, 199,680 of window K/V, 15,360 of MTP K/V, in bf16."""
    spec = spec_from_config(FLASH, mtp_layers=3)
    assert 2 * spec.kv_elements_per_token(window=False) == 23_040
    assert 2 * spec.kv_elements_per_token(window=True) == 199_680 + 15_360


def test_mimo_pro_reads_its_uneven_layer_list() -> None:
    spec = spec_from_config(PRO_CONFIG, mtp_layers=3)
    assert [layer.is_window for layer in spec.layers] == [bool(kind) for kind in PRO_CONFIG["hybrid_layer_pattern"]]
    assert spec.layers[0].attention.kv_heads == spec.layers[1].attention.kv_heads == 8
    assert spec.layers[1].attention.value_scale == 0.612
    assert spec_from_config(PRO_CONFIG, window_keys=128).window_tokens == 127


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "gpt2"},
            "model_type 'gpt2' is not supported; supported are gemma3, gemma3_text, gpt_oss, llama",
        ),
        ({}, "model_type 'missing'"),
        (without(LLAMA, "hidden_size"), "hidden_size is missing"),
        ({**LLAMA, "hidden_size": "big"}, "hidden_size is 'big', expected a whole number"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers is '0'"),
        ({**LLAMA, "num_key_value_heads": 2}, "9 attention heads are not a multiple of 2 KV heads"),
        ({**LLAMA, "hidden_act": "relu"}, "hidden_act is 'relu', supported are silu"),
        ({**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope_type is 'dynamic'"),
        ({**LLAMA, "rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 2}}, "yarn needs a rope_theta"),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({**LLAMA, "rope_scaling": 3}, "rope_scaling is '3', expected an object"),
        ({**LLAMA, "head_dim": 63}, "rotary dimension 63"),
        ({**LLAMA, "tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected true or false"),
        (
            {**LLAMA, "quantization_config": {"quant_method": "fp8"}},
            r"weight_block_size is None, only \[128, 128\] is supported",
        ),
        ({**GEMMA["text_config"], "final_logit_softcapping": 30.0}, "final_logit_softcapping = '30.0'"),
        ({**GEMMA["text_config"], "layer_types": ["full_attention"]}, "layer_types is .* expected a list of 34"),
        ({**GPT_OSS, "swiglu_limit": 5.0}, "swiglu_limit = '5.0' is not supported"),
        ({**GPT_OSS, "swiglu_alpha": 1.0}, "swiglu_alpha = '1.0' is not supported"),
        ({**GPT_OSS, "hidden_act": "gelu"}, "hidden_act is 'gelu', supported are silu"),
        ({**GPT_OSS, "num_experts_per_tok": 33}, "num_experts_per_tok is '33', expected at most 32"),
        ({**PRO_CONFIG, "attention_projection_layout": "rows"}, "attention_projection_layout = 'rows'"),
        ({**PRO_CONFIG, "store_dtype": "nf4"}, "store_dtype = 'nf4' is not supported"),
        ({**PRO_CONFIG, "store_dtype": "mxfp4", "mxfp4_block_size": 16}, "mxfp4_block_size = '16' is not supported"),
        ({**PRO_CONFIG, "store_dtype": "mxfp4", "hidden_size": 80}, "hidden_size 80 .* must be multiples of 32"),
        ({**LLAMA, "store_dtype": "mxfp4"}, "store_dtype = 'mxfp4' is not supported"),
        ({**LLAMA, "quantization_config": {"quant_method": "mxfp4"}}, "quant_method 'mxfp4' is not supported yet"),
        ({**GPT_OSS, "quantization_config": {"quant_method": "awq"}}, "quant_method is 'awq', supported are mxfp4"),
        ({**GPT_OSS, "quantization_config": {}}, "quant_method is 'missing', supported are mxfp4"),
        ({**GPT_OSS, "intermediate_size": 2890, "quantization_config": MXFP4}, "2890 must be multiples of 32"),
        (
            {**GPT_OSS, "quantization_config": {**MXFP4, "modules_to_not_convert": "lm_head"}},
            "modules_to_not_convert is 'lm_head', expected a list of names",
        ),
        ({**PRO_CONFIG, "hybrid_layer_pattern": [0, 1, 2, 0, 1, 1, 1, 0]}, r"hybrid_layer_pattern\[2\] is 2"),
        (without(PRO_CONFIG, "hybrid_layer_pattern"), "hybrid_layer_pattern or layer_types is missing"),
        (without(PRO_CONFIG, "moe_layer_freq"), "moe_layer_freq or mlp_layer_types is missing"),
        (without(PRO_CONFIG, "swa_num_key_value_heads"), "swa_num_key_value_heads is missing"),
        ({**PRO_CONFIG, "n_group": 4}, "n_group = '4' is not supported"),
        ({**PRO_CONFIG, "n_shared_experts": 1}, "n_shared_experts = '1'"),
        ({**PRO_CONFIG, "num_experts_per_tok": 13}, "num_experts_per_tok is '13'"),
    ],
)
def test_what_cannot_be_served_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message) as caught:
        spec_from_config(config)
    assert "\n" not in str(caught.value)


def test_window_keys_must_make_sense() -> None:
    with pytest.raises(StartupError, match="window_keys is -3"):
        spec_from_config(GEMMA, window_keys=-3)
    with pytest.raises(StartupError, match="this model has no window layers"):
        spec_from_config(LLAMA, window_keys=128)


@pytest.mark.parametrize(
    "config",
    [LLAMA, GEMMA, {**GPT_OSS, "quantization_config": MXFP4}, PRO_CONFIG, FLASH],
    ids=["llama", "gemma3", "gpt_oss", "pro", "flash"],
)
def test_any_wrong_value_is_a_startup_error(config: dict[str, Any]) -> None:
    for name in config:
        for value in (None, "x", -1, 0.5, [], [1], {}, {"a": 1}, True, inf, -inf, nan, 1e300, 10**400):
            try:
                spec_from_config({**config, name: value})
            except StartupError as error:
                assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN", "1e999", "1" + "0" * 400])
@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA, "hidden_size"),
        (LLAMA, "rope_theta"),
        (LLAMA, "max_position_embeddings"),
        (GEMMA["text_config"], "sliding_window"),
        (GPT_OSS, "sliding_window"),
        (GPT_OSS, "rms_norm_eps"),
        (GEMMA["text_config"], "query_pre_attn_scalar"),
        (PRO_CONFIG, "partial_rotary_factor"),
        (PRO_CONFIG, "attention_value_scale"),
        (PRO_CONFIG, "routed_scaling_factor"),
    ],
)
def test_a_number_that_is_none_is_named(config: dict[str, Any], name: str, value: str) -> None:
    """JSON as Python reads it knows NaN and Infinity, and 1e999 is infinite too."""
    with pytest.raises(StartupError, match=rf"config\.json: {name} is '.*', expected a ") as caught:
        spec_from_config({**config, name: json.loads(value)})
    assert "\n" not in str(caught.value)
    section = {"rope_type": "linear", "factor": json.loads(value)}
    with pytest.raises(StartupError, match=r"config\.json: rope_scaling: factor is"):
        spec_from_config({**LLAMA, "rope_scaling": section})


def test_more_than_the_whole_head_cannot_be_rotated() -> None:
    with pytest.raises(StartupError, match=r"partial_rotary_factor is 1\.5, expected at most 1"):
        spec_from_config({**PRO_CONFIG, "partial_rotary_factor": 1.5})


def gguf(architecture: str, **metadata: Any) -> Any:
    """As much of a GGUFFile as a parser reads."""
    values = {"general.architecture": architecture}
    values |= {f"{architecture}.{name.replace('__', '.')}": value for name, value in metadata.items()}
    return SimpleNamespace(metadata=values, tensors={}, path=Path("model.gguf"), vocabulary_rows=lambda: 1000)


GEMMA_27B = {
    "embedding_length": 5376,
    "block_count": 62,
    "feed_forward_length": 21504,
    "context_length": 131_072,
    "attention__head_count": 32,
    "attention__head_count_kv": 16,
    "attention__key_length": 128,
    "attention__sliding_window": 1024,
    "attention__layer_norm_rms_epsilon": 1e-6,
    "rope__freq_base": 1e6,
    "rope__scaling__type": "linear",
    "rope__scaling__factor": 8.0,
}


def test_gguf_gemma3_27b_scales_by_hidden_over_heads() -> None:
    spec = spec_from_gguf(gguf("gemma3", **GEMMA_27B))
    full, window = spec.layers[5].attention, spec.layers[0].attention
    assert full.scale == 168**-0.5
    assert full.rope.linear_factor == 8.0
    assert window.rope == RopeSpec(theta=1e4, rotary_dim=128)
    assert spec.norm_offset == 0.0


def test_gguf_layer_pattern_as_a_list() -> None:
    pattern = [layer % 3 != 0 for layer in range(62)]
    spec = spec_from_gguf(gguf("gemma3", **GEMMA_27B, attention__sliding_window_pattern=pattern))
    assert [layer.is_window for layer in spec.layers] == pattern


def test_gguf_architectures_and_keys_are_named() -> None:
    with pytest.raises(
        StartupError, match="architecture 'qwen2' is not supported; supported are gemma3, gpt-oss, llama"
    ):
        spec_from_gguf(gguf("qwen2"))
    with pytest.raises(StartupError, match=r"model\.gguf: key llama\.embedding_length is missing"):
        spec_from_gguf(gguf("llama"))


def test_mtp_layers_are_counted_from_names() -> None:
    names = ["model.norm.weight", *(f"model.mtp.layers.{layer}.enorm.weight" for layer in range(3))]
    assert count_mtp_layers(names) == 3
    assert count_mtp_layers(names[:1]) == 0
    with pytest.raises(StartupError, match="not numbered from 0"):
        count_mtp_layers(names[:1] + names[2:])


def test_media_tensors_of_mimo_are_ignored_by_list() -> None:
    names = tensor_names(spec_from_config(PRO_CONFIG), gguf=False)
    for name in ("visual.blocks.0.norm1.weight", "audio_encoder.projection.mlp.0.weight", "speech_embeddings.3.weight"):
        assert names.is_ignored(name)
    assert not names.is_ignored("model.layers.0.mlp.gate_proj.bias")


def test_specs_load_without_torch() -> None:
    program = "import sys, server.model.families, server.model.kv_layout; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
