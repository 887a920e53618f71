"""What came of a trace in figures: waits of kinds of requests, and whether the scheduler kept its word."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.config import SchedulerConfig
from server.scheduler.lanes import lane_names, lane_of
from server.simulator.serving import Answer, Served

SHORT_TOKENS = 4 * 1024
COLD_TOKENS = 16 * 1024
LANE_TOKENS = SchedulerConfig().lane_tokens
LONG_TOKENS = LANE_TOKENS[0]
EVERYBODY, SHORT, COLD, LONG = "all", "short", "cold-long", "64K and more"
KINDS: Mapping[str, str] = {
    EVERYBODY: "all requests",
    SHORT: f"fewer than {SHORT_TOKENS // 1024}K tokens to compute",
    COLD: f"more than {COLD_TOKENS // 1024}K tokens to compute",
    LONG: f"prompts of {LONG_TOKENS // 1024}K tokens and more",
    **{name: f"prompts of {name} tokens" for name in lane_names(LANE_TOKENS)},
}
"""Kinds of requests, by what is left to compute of them when the trace is served in its own order, and by how long
their prompts are. So each is of the same kinds whatever the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """In seconds, or None of nothing."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float] | NDArray[np.float64]) -> Quantiles | None:
        if not len(seconds):
            return None
        p50, p90, p99 = np.percentile(seconds, (50, 90, 99)).tolist()
        return cls(p50=p50, p90=p90, p99=p99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Of one kind of requests: time to first token, and between tokens. ttft_percentiles_s: the 0th to the 100th."""

    requests: int
    ttft_s: Quantiles | None
    itl_s: Quantiles | None
    ttft_percentiles_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a policy made of a trace. Shares are from 0 to 1. prompt_share: of the time, in steps with prompt tokens.

    overtaken_late: requests that were overtaken by one that came more than (their prompt's tokens /
    forgiven_tokens_per_s) after them; overtaken_late_at_arrival: the same with the tokens that they had to compute when
    they came, which can grow while they wait.
    """

    policy: str
    forgiven_tokens_per_s: float
    requests: int
    refused: int
    span_s: float
    busy_share: float
    prompt_share: float
    steps: int
    rows_per_step: float
    hit_rate: float
    preemptions: int
    rebuilt_tokens: int
    overtaken_late: int
    overtaken_late_at_arrival: int
    kinds: Mapping[str, Waits]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Figures:
        def quantiles(each: Mapping[str, float] | None) -> Quantiles | None:
            return None if each is None else Quantiles(**each)

        kinds = {
            kind: Waits(
                requests=waits["requests"],
                ttft_s=quantiles(waits["ttft_s"]),
                itl_s=quantiles(waits["itl_s"]),
                ttft_percentiles_s=tuple(waits["ttft_percentiles_s"]),
            )
            for kind, waits in found["kinds"].items()
        }
        return cls(**{**found, "kinds": kinds})


def figures_of(served: Served, policy: str, left: Sequence[float], forgiven_tokens_per_s: float) -> Figures:
    """left: of each request of the trace, what there is to compute; see `load.tokens_left`."""
    span_s = served.span_s or 1.0

    def late(effective: Callable[[Answer], float]) -> int:
        return overtaken_late(served.answers, forgiven_tokens_per_s, effective)

    return Figures(
        policy=policy,
        forgiven_tokens_per_s=forgiven_tokens_per_s,
        requests=len(served.answers),
        refused=served.refused,
        span_s=served.span_s,
        busy_share=served.busy_s / span_s,
        prompt_share=served.prompt_s / span_s,
        steps=served.steps,
        rows_per_step=served.rows / max(1, served.steps),
        hit_rate=served.hit_rate,
        preemptions=served.preemptions,
        rebuilt_tokens=served.rebuilt_tokens,
        overtaken_late=late(lambda answer: answer.request.input_tokens),
        overtaken_late_at_arrival=late(lambda answer: answer.effective_tokens),
        kinds={kind: _waits([each for each in served.answers if kind in kinds_of(each, left)]) for kind in KINDS},
    )


def kinds_of(answer: Answer, left: Sequence[float]) -> set[str]:
    request = answer.request
    kinds = {EVERYBODY, lane_names(LANE_TOKENS)[lane_of(request.input_tokens, LANE_TOKENS)]}
    if left[request.index] < SHORT_TOKENS:
        kinds.add(SHORT)
    if left[request.index] > COLD_TOKENS:
        kinds.add(COLD)
    if request.input_tokens >= LONG_TOKENS:
        kinds.add(LONG)
    return kinds


def _waits(answers: Sequence[Answer]) -> Waits:
    ttft_s = [answer.ttft_s for answer in answers]
    gaps_s = np.concatenate([np.frombuffer(answer.gaps_s) for answer in answers if answer.gaps_s] or [np.empty(0)])
    return Waits(
        requests=len(answers),
        ttft_s=Quantiles.of(ttft_s),
        itl_s=Quantiles.of(gaps_s),
        ttft_percentiles_s=tuple(np.percentile(ttft_s, np.arange(101)).tolist()) if ttft_s else (),
    )


def overtaken_late(answers: Sequence[Answer], tokens_per_s: float, effective: Callable[[Answer], float]) -> int:
    """How many began after one that came later than their effective tokens / tokens_per_s after them."""
    late, latest_s = 0, float("-inf")
    for answer in sorted(answers, key=_order):
        late += latest_s > answer.arrival_s + effective(answer) / tokens_per_s
        latest_s = max(latest_s, answer.arrival_s)
    return late


def _order(answer: Answer) -> int:
    assert answer.order is not None, "who has an answer has begun"
    return answer.order


def spread(found: Quantiles | None, scale: float) -> str:
    """As it is printed: half, 90 % and 99 %, times scale."""
    return "-" if found is None else " / ".join(_number(scale * each) for each in (found.p50, found.p90, found.p99))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def draw(figures: Sequence[Figures], title: str, axes: Any, kind: str) -> None:
    """Shares of requests whose first token came within so long, a line a policy."""
    for each in figures:
        waits = each.kinds[kind]
        axes.plot(waits.ttft_percentiles_s, range(len(waits.ttft_percentiles_s)), label=each.policy)
    axes.set(xscale="log", xlabel="TTFT, s", ylim=(0, 100), title=title)
    axes.grid(alpha=0.3)
