from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from server.config import CacheConfig, SchedulerConfig
from server.errors import StartupError
from server.memory_plan import MAX_CPU_KV_BYTES, MemoryPlan, available_bytes, plan_memory
from server.model.families import spec_from_config
from server.model.native_work_space import PARTIAL_BYTES, native_step_bytes
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


GATHERED = (2 * 640 + 2 * 4 * 16) / (3 * 640)
"""Of the tiny model, in bf16: 3 full layers of 640 bytes of K/V a token, one of which is gathered and padded to twice
its length, and two fp32 scores for each of 16 heads."""


def test_work_space_grows_with_the_kv_that_a_step_gathers(tiny: ModelSpec) -> None:
    small, large = (plan(tiny, 2**30, cache=CacheConfig(kv_bytes=size * 2**20)) for size in (16, 128))
    assert large.work_bytes - small.work_bytes == pytest.approx(GATHERED * (large.kv_bytes - small.kv_bytes), abs=2)


def test_what_is_gathered_is_left_free_and_nothing_else(tiny: ModelSpec) -> None:
    available = 200 * 2**20
    made = plan(tiny, available, device="cuda", scheduler=SchedulerConfig(max_sequences=4096))
    taken = made.weight_bytes + made.work_bytes + made.kv_bytes
    assert available * 0.9 - 2 * made.layout.slab_bytes < taken <= available * 0.9


def test_the_page_tables_of_both_kinds_are_work_space(tiny: ModelSpec) -> None:
    """64 slots, a page of 16 tokens, 4 bytes an entry, two kinds: 2,048 tokens more are 64 KiB more."""
    cache = CacheConfig(kv_bytes=64 * 2**20)
    short, long = (plan(tiny, 2**30, cache=cache, max_model_tokens=tokens) for tokens in (2048, 4096))
    assert long.work_bytes - short.work_bytes == 64 * 2 * (2048 // 16) * 4


def test_the_work_space_of_the_native_kernels_is_that_of_their_threads(pro: ModelSpec, tiny: ModelSpec) -> None:
    """Every thread has panels and scratch of its own, and what many make of one long context waits to be joined."""
    scheduler = SchedulerConfig(max_sequences=8, step_token_budget=512)
    for spec, context in ((tiny, 4096), (pro, 2**20)):
        work = {}
        for threads in (1, 8, 256):
            made = plan(
                spec, 4 * 2**40, max_model_tokens=context, scheduler=scheduler, native_threads=threads, gathers=False
            )
            tables = 2 * 8 * (context // 16) * 4
            step = native_step_bytes(spec, tokens=512, rows=8, context_tokens=context, threads=threads)
            work[threads] = made.work_bytes
            assert made.work_bytes == step + tables + 8 * spec.vocab * 16
        assert work[1] < work[8] < work[256]
    assert work[256] > PARTIAL_BYTES + 256 * 4 * 32 * 128 * 128, "a thread spreads two panels of the output's inputs"


def test_memory_for_the_native_kernels_threads_is_left_free(tiny: ModelSpec) -> None:
    cache = CacheConfig(kv_bytes=16 * 2**20)
    few = plan(tiny, 2**30, cache=cache, native_threads=2, gathers=False)
    enough = few.weight_bytes + few.work_bytes + few.kv_bytes + 2**16
    plan(tiny, enough, cache=cache, native_threads=2, gathers=False)
    with pytest.raises(StartupError, match="too little memory"):
        plan(tiny, enough, cache=cache, native_threads=64, gathers=False)


def test_what_fits_at_once_is_one_prefill_and_others_that_decode(tiny: ModelSpec) -> None:
    """2,048 tokens are 128 full pages of 30,720 bytes; of window pages, of 81,920 bytes, a chunk of 512 tokens behind
    a window of 128 touches at most 41, a decoding sequence 9."""
    prefilling, decoding = 128 * 30_720 + 41 * 81_920, 128 * 30_720 + 9 * 81_920
    for others in (0, 1, 9, 30):
        cache = CacheConfig(kv_bytes=prefilling + others * decoding + decoding // 2)
        made = plan(tiny, 2**30, cache=cache, max_model_tokens=2048)
        assert (made.layout.full_page_bytes, made.layout.window_page_bytes) == (30_720, 81_920)
        assert made.full_context_sequences == 1 + others


G = 2**30


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 64 * G),
        ({"max": "max\n", "current": f"{13 * G}\n"}, 64 * G),
        ({"max": f"{100 * G}\n", "current": f"{13 * G}\n"}, 64 * G),
        ({"max": f"{16 * G}\n", "current": f"{13 * G}\n"}, 3 * G),
        ({"max": f"{16 * G}\n", "current": f"{17 * G}\n"}, 0),
        ({"max": f"{16 * G}\n", "current": f"{13 * G}\n", "stat": f"anon {G}\ninactive_file {12 * G}\n"}, 15 * G),
        ({"max": f"{16 * G}\n", "current": f"{13 * G}\n", "stat": f"active_file {12 * G}\n"}, 3 * G),
        ({"max": f"{16 * G}\n", "current": f"{13 * G}\n", "stat": "what is this"}, 3 * G),
    ],
)
def test_a_control_groups_limit_holds_but_files_that_were_read_do_not_count(
    files: dict[str, str], available: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=64 * G))
    for name, content in files.items():
        (tmp_path / f"memory.{name}").write_text(content)
    assert available_bytes(torch.device("cpu"), tmp_path) == available
