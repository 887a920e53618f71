"""The shape of twinpane-tiny: MiMo-V2.5's published keys with small numbers, and what `server` makes of them."""

from __future__ import annotations

from typing import Any

from server.model.families import spec_from_config
from server.model.spec import ModelSpec

MTP_LAYERS = 3
PARAMETER_LIMIT = 6_000_000
WINDOW = 32
"""Earlier keys that a window layer sees; its own comes on top."""


def tiny_config(vocab: int) -> dict[str, Any]:
    """config.json. Every trap of the family is kept: an uneven list of full layers, KV heads that differ by kind, v
    narrower than k, a rotary part that is not half of the head, two thetas, sinks in window layers only.

    Few heads and a narrow window are what makes training quick on a CPU; three full layers of six are what recall over
    2,000 tokens needs: the window layers between them gather a fact into one position, a full layer finds it.
    """
    return {
        "architectures": ["MiMoV2ForCausalLM"],
        "model_type": "mimo_v2",
        "num_hidden_layers": 6,
        "hybrid_layer_pattern": [0, 1, 1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1, 1, 1],
        "sliding_window": WINDOW,
        "sliding_window_size": WINDOW,
        "attention_chunk_size": WINDOW,
        "hidden_size": 192,
        "num_attention_heads": 4,
        "swa_num_attention_heads": 4,
        "num_key_value_heads": 2,
        "swa_num_key_value_heads": 4,
        "head_dim": 48,
        "swa_head_dim": 48,
        "v_head_dim": 32,
        "swa_v_head_dim": 32,
        "partial_rotary_factor": 0.334,
        "rope_theta": 10_000_000,
        "swa_rope_theta": 10_000,
        "max_position_embeddings": 4096,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "attention_value_scale": 0.707,
        "attention_projection_layout": "fused_qkv",
        "attention_bias": False,
        "intermediate_size": 256,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": None,
        "n_shared_experts": None,
        "layernorm_epsilon": 1e-5,
        "hidden_act": "silu",
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def tiny_spec(vocab: int) -> ModelSpec:
    return spec_from_config(tiny_config(vocab), mtp_layers=MTP_LAYERS)
