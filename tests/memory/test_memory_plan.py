from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from server.config import CacheConfig, SchedulerConfig
from server.errors import StartupError
from server.memory_plan import MAX_CPU_KV_BYTES, MemoryPlan, plan_memory
from server.model.families import spec_from_config
from server.model.spec import ModelSpec
from tests.model.checkpoints import PRO_CONFIG

PRO_AS_PUBLISHED: dict[str, Any] = {
    **PRO_CONFIG,
    "num_hidden_layers": 70,
    "hybrid_layer_pattern": [0 if i in (0, 7, 15, 23, 31, 39, 47, 55, 62, 69) else 1 for i in range(70)],
    "moe_layer_freq": [0] + [1] * 69,
    "hidden_size": 6144,
    "num_attention_heads": 128,
    "swa_num_attention_heads": 128,
    "head_dim": 192,
    "swa_head_dim": 192,
    "v_head_dim": 128,
    "swa_v_head_dim": 128,
    "intermediate_size": 16384,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "vocab_size": 152576,
    "max_position_embeddings": 1048576,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def pro() -> ModelSpec:
    return spec_from_config(PRO_AS_PUBLISHED, mtp_layers=3)


@pytest.fixture(scope="module")
def tiny() -> ModelSpec:
    return spec_from_config(PRO_CONFIG, mtp_layers=3)


def plan(spec: ModelSpec, available: int, *, device: str = "cpu", **options: Any) -> MemoryPlan:
    settings: dict[str, Any] = {
        "cache": CacheConfig(),
        "scheduler": SchedulerConfig(),
        "max_model_tokens": None,
        "dtype": torch.bfloat16,
        "device": torch.device(device),
        "available": available,
    }
    return plan_memory(spec, **{**settings, **options})


def test_the_published_sizes_of_mimo_v2_5_pro(pro: ModelSpec) -> None:
    """Full-layer KV of 51,200 bytes a token, window-layer KV of 307,200 and 15,360 for the three MTP layers."""
    layout = plan(pro, 4 * 2**40, device="cuda", cache=CacheConfig(page_tokens=64)).layout
    assert layout.full_page_bytes == 51_200 * 64
    assert layout.window_page_bytes == (307_200 + 15_360) * 64
    assert layout.window_tokens == 128
    wasted = layout.slab_bytes % layout.full_page_bytes + layout.slab_bytes % layout.window_page_bytes
    assert wasted / layout.slab_bytes <= 0.01


def test_what_is_planned_fits_what_is_there(tiny: ModelSpec) -> None:
    for available in (40 * 2**20, 200 * 2**20, 2**30):
        made = plan(tiny, available)
        assert made.weight_bytes + made.work_bytes + made.kv_bytes <= available * 0.9
        assert made.context_tokens <= tiny.context_tokens
        assert made.full_context_sequences >= 1
        assert made.short_sequences >= made.full_context_sequences


def test_a_processors_memory_is_not_taken_whole_but_one_request_always_fits(tiny: ModelSpec, pro: ModelSpec) -> None:
    assert plan(tiny, 500 * 2**30, scheduler=SchedulerConfig(max_sequences=4096)).kv_bytes <= MAX_CPU_KV_BYTES
    assert plan(pro, 4 * 2**40).context_tokens == pro.context_tokens


def test_no_more_is_taken_than_all_sequences_could_use(tiny: ModelSpec) -> None:
    made = plan(tiny, 2**30, device="cuda", scheduler=SchedulerConfig(max_sequences=2))
    assert made.full_context_sequences == 2
    assert made.kv_bytes < 2**30 / 8


@pytest.mark.parametrize(
    ("options", "available", "said"),
    [
        ({}, 2**20, "too little memory"),
        ({"cache": CacheConfig(kv_bytes=2**20 * 3)}, 8 * 2**20, "--kv-cache-memory-bytes asks for"),
        ({"cache": CacheConfig(kv_bytes=4096)}, 2**30, "needs"),
        ({"max_model_tokens": 5000}, 2**30, "more than the model's own limit of 4,096"),
    ],
)
def test_too_little_is_said_with_the_numbers(
    tiny: ModelSpec, options: dict[str, Any], available: int, said: str
) -> None:
    with pytest.raises(StartupError, match=said):
        plan(tiny, available, **options)


def test_a_context_that_somebody_asked_for_is_given_or_refused_never_cut(tiny: ModelSpec) -> None:
    enough = plan(tiny, 2**30, max_model_tokens=2048)
    assert enough.context_tokens == 2048
    short = CacheConfig(kv_bytes=enough.kv_bytes // enough.full_context_sequences // 2)
    with pytest.raises(StartupError, match="a request of 2,048 tokens needs"):
        plan(tiny, 2**30, max_model_tokens=2048, cache=short)
    assert 512 <= plan(tiny, 2**30, cache=short).context_tokens < 2048 * 2


def test_the_table_names_every_share(tiny: ModelSpec) -> None:
    table = plan(tiny, 2**30).table("some-model")
    for label in ("weights", "work space", "KV arena", "full layers", "window layers", "longest request"):
        assert label in table
    assert "window of 129 keys" in table
    without = replace(tiny, layers=tiny.layers[:1], mtp_layers=())
    assert "none: every layer is full attention" in plan(without, 2**30).table("m")
