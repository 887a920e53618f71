"""What is counted, under which names, and that no fact can break the counting."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.metrics import Metrics, RequestFacts, StepFacts, token_count_buckets

STEP = StepFacts(
    running=3,
    waiting=2,
    full_usage=0.5,
    window_usage=0.25,
    cached_usage=0.125,
    evicted_full_pages=5,
    evicted_window_pages=7,
    rebuilt_tokens=11,
    stranded_bytes=4096,
    step_tokens=40,
    generated_tokens=3,
    prompt_tokens=37,
    preemptions=1,
    step_s=0.02,
    token_gaps_s=(0.02, 0.03),
    chunk_tokens=(30, 7),
    waiting_by_lane=(1, 1),
    waits_s=((0, 0.5), (1, 4.0), (0, 0.25)),
    prefix_matches=13,
)
REQUEST = RequestFacts(
    outcome="stop",
    prompt_tokens=100,
    cached_tokens=60,
    output_tokens=11,
    choices=1,
    max_tokens=50,
    queued_s=0.1,
    prefill_s=0.2,
    decode_s=1.0,
    first_token_s=0.3,
    total_s=1.3,
)


def samples(metrics: Metrics) -> dict[str, float]:
    """Sample name (with the labels that are not those of every metric) to value."""
    out: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            out[sample.name + (str(sorted(labels.items())) if labels else "")] = sample.value
    return out


VLLM_HAS_NOT = (
    *("full_token_usage", "swa_token_usage", "kv_stranded_bytes", "prefix_cache_usage_perc", "window_rebuilt_tokens"),
    *("prefix_cache_evicted_pages", "queue_depth", "queue_wait_seconds", "prefill_chunk_tokens", "step_time_seconds"),
    *("queue_prefix_matches", "metric_faults", "stream_ending_violations"),
)
"""Our own: vLLM counts none of these."""


def test_facts_come_out_under_our_prefix_and_what_vllm_counts_under_its_own_too() -> None:
    metrics = Metrics("m", lanes=("0-64K", "64K-"))
    metrics.step(STEP)
    metrics.request_ended(REQUEST)
    metrics.request_ended(replace(REQUEST, outcome="abort", first_token_s=None, decode_s=None, output_tokens=0))
    seen = samples(metrics)
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.75,
        "full_token_usage": 0.5,
        "swa_token_usage": 0.25,
        "kv_stranded_bytes": 4096,
        "prefix_cache_usage_perc": 0.125,
        "prefix_cache_evicted_pages_total[('kind', 'full')]": 5,
        "prefix_cache_evicted_pages_total[('kind', 'window')]": 7,
        "window_rebuilt_tokens_total": 11,
        "prompt_tokens_total": 37,
        "generation_tokens_total": 3,
        "num_preemptions_total": 1,
        "prompt_tokens_cached_total": 120,
        "prefix_cache_queries_total": 200,
        "prefix_cache_hits_total": 120,
        "request_success_total[('finished_reason', 'stop')]": 1,
        "request_success_total[('finished_reason', 'length')]": 0,
        "request_success_total[('finished_reason', 'abort')]": 1,
        "iteration_tokens_total_sum": 40,
        "inter_token_latency_seconds_count": 2,
        "time_to_first_token_seconds_count": 1,
        "request_time_per_output_token_seconds_sum": 0.1,
        "e2e_request_latency_seconds_count": 2,
        "request_queue_time_seconds_count": 2,
        "request_prefill_time_seconds_count": 2,
        "request_decode_time_seconds_count": 1,
        "request_inference_time_seconds_sum": 1.2,
        "request_prompt_tokens_sum": 200,
        "request_generation_tokens_sum": 11,
        "request_params_max_tokens_sum": 100,
        "request_params_n_sum": 2,
        "request_prefill_kv_computed_tokens_sum": 80,
        "queue_depth[('lane', '0-64K')]": 1,
        "queue_depth[('lane', '64K-')]": 1,
        "queue_wait_seconds_count[('lane', '0-64K')]": 2,
        "queue_wait_seconds_sum[('lane', '64K-')]": 4.0,
        "prefill_chunk_tokens_sum": 37,
        "prefill_chunk_tokens_count": 2,
        "queue_prefix_matches_total": 13,
        "metric_faults_total": 0,
    }
    for name, value in expected.items():
        assert seen[f"twinpane:{name}"] == pytest.approx(value), name
        if name.startswith(VLLM_HAS_NOT):
            assert f"vllm:{name}" not in seen
        else:
            assert seen[f"vllm:{name}"] == pytest.approx(value), name
    assert 'vllm:num_requests_running{engine="0",model_name="m"} 3.0' in metrics.render().decode()
    assert "_created" not in metrics.render().decode().replace("http_request", "")


BAD = [-1, -(10**30), math.nan, math.inf, -math.inf, None, "x", [], 10**400]


@pytest.mark.parametrize("value", BAD, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize("field", ["running", "full_usage", "step_tokens", "generated_tokens", "preemptions", "step_s"])
def test_a_senseless_step_is_counted_and_never_raised(field: str, value: Any) -> None:
    metrics = Metrics("m")
    metrics.step(replace(STEP, **{field: value}))
    metrics.step(STEP)
    seen = samples(metrics)
    assert seen["twinpane:metric_faults_total"] >= 1
    assert all(math.isfinite(v) and v >= 0 for v in seen.values())
    assert seen["vllm:num_requests_running"] == 3


@pytest.mark.parametrize("value", BAD, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize("field", ["outcome", "prompt_tokens", "cached_tokens", "choices", "decode_s", "total_s"])
def test_a_senseless_request_is_counted_and_never_raised(field: str, value: Any) -> None:
    metrics = Metrics("m")
    metrics.request_ended(replace(REQUEST, **{field: value}))
    metrics.request_ended(REQUEST)
    assert all(math.isfinite(v) and v >= 0 for v in samples(metrics).values())


def test_facts_of_the_wrong_kind_do_not_raise() -> None:
    metrics = Metrics("m")
    for broken in (None, object(), "facts"):
        metrics.step(broken)  # type: ignore[arg-type]
        metrics.request_ended(broken)  # type: ignore[arg-type]
        metrics.rejected(broken)  # type: ignore[arg-type]
        metrics.http(broken, broken, broken, broken)  # type: ignore[arg-type]
    assert samples(metrics)["twinpane:metric_faults_total"] >= 6


def test_a_share_above_one_is_clipped() -> None:
    metrics = Metrics("m")
    metrics.step(replace(STEP, full_usage=7.0, window_usage=0.5))
    seen = samples(metrics)
    assert seen["twinpane:full_token_usage"] == seen["twinpane:kv_cache_usage_perc"] == 1.0


def test_two_servers_in_one_process_do_not_share_counts() -> None:
    first, second = Metrics("a"), Metrics("b")
    first.step(STEP)
    assert samples(second)["vllm:prompt_tokens_total"] == 0


@pytest.mark.parametrize(("largest", "last"), [(1, 1), (2, 2), (3, 5), (4096, 5000), (1_048_576, 2_000_000)])
def test_token_buckets_are_1_2_5_up_to_the_context(largest: int, last: int) -> None:
    buckets = token_count_buckets(largest)
    assert buckets[-1] == last
    assert list(buckets) == sorted(set(buckets))


def test_model_names_with_quotes_are_escaped() -> None:
    metrics = Metrics('we"ird\n\\name')
    metrics.step(STEP)
    assert samples(metrics)["vllm:num_requests_running"] == 3
