"""What is counted. Frozen facts go in; Prometheus text comes out. A metric can never fail a request."""

from __future__ import annotations

import contextlib
import logging
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

logger = logging.getLogger("twinpane.metrics")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """One committed step, and the state after it. *_usage are shares of the arena's bytes: held by sequences in pages
    of each kind, and kept as cache beside them. stranded_bytes is what partly filled slabs lose. prompt_tokens were
    computed for the first time. evicted_* and rebuilt_tokens (positions run again to get their window back) are those
    since the step before. token_gaps_s are the times since the same choice's previous token, one for each token of this
    step that had one. chunk_tokens are the parts of prompts in it. waiting_by_lane: how many wait in each lane of
    lengths; waits_s: (lane, seconds) of those that left the queue, and prefix_matches how often runs of pages were
    compared to know what is cached of those who wait, both since the step before."""

    running: int
    waiting: int
    full_usage: float
    window_usage: float
    cached_usage: float
    evicted_full_pages: int
    evicted_window_pages: int
    rebuilt_tokens: int
    stranded_bytes: int
    step_tokens: int
    generated_tokens: int
    prompt_tokens: int
    preemptions: int
    step_s: float
    token_gaps_s: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] = ()
    waiting_by_lane: tuple[int, ...] = ()
    waits_s: tuple[tuple[int, float], ...] = ()
    prefix_matches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """One ended request. outcome: "stop", "length", "abort" or "error". Times are None where it never got that far."""

    outcome: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    choices: int
    max_tokens: int
    queued_s: float | None
    prefill_s: float | None
    decode_s: float | None
    first_token_s: float | None
    total_s: float


TIME_TO_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_TIME_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_TIME_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICE_BUCKETS = (1, 2, 5, 10, 20, 50, 100)
HTTP_TIME_BUCKETS = (0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)

OUR_PREFIX = "twinpane:"
BOTH_PREFIXES = ("vllm:", OUR_PREFIX)
"""What vLLM counts as well is shown under both: the first is what dashboards and autoscalers read."""

OUTCOMES = ("stop", "length", "abort", "error")


def token_count_buckets(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to the first one that reaches `largest`."""
    buckets: list[int] = []
    decade = 1
    while True:
        for digit in (1, 2, 5):
            buckets.append(digit * decade)
            if digit * decade >= largest:
                return tuple(buckets)
        decade *= 10


class _Prefixed(Collector):
    """The metrics of one registry, re-emitted under each prefix; kept once, doubled only when scraped."""

    def __init__(self, source: CollectorRegistry, prefixes: Sequence[str]) -> None:
        self._source = source
        self._prefixes = prefixes

    def collect(self) -> Iterator[Metric]:
        families = list(self._source.collect())
        for prefix in self._prefixes:
            for family in families:
                shown = Metric(prefix + family.name, family.documentation, family.type)
                shown.samples = [
                    sample._replace(name=prefix + sample.name)
                    for sample in family.samples
                    if not sample.name.endswith("_created")
                ]
                yield shown


class _StepHistogram(Collector):
    """A histogram that takes all values of a step at once: prometheus_client's own costs a lock and two method calls
    for each, which for the gaps between tokens is every token of every stream."""

    def __init__(self, name: str, text: str, buckets: Sequence[float], labels: Mapping[str, str]) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._bounds = list(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def add(self, values: Iterable[float]) -> None:
        """Finite values."""
        bounds, counts = self._bounds, self._counts
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            self._sum += value

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=tuple(self._labels))
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric(tuple(self._labels.values()), buckets, self._sum)
        yield family


class Metrics:
    """Counters, gauges and histograms of one served model.

    Nothing raised in here reaches a caller, and a value that makes no sense (negative, not finite) counts as zero;
    either is counted in `metric_faults_total`.

    Owner: the event-loop thread.
    """

    def __init__(self, model_name: str, *, context_tokens: int = 1_048_576, lanes: Sequence[str] = ("0-",)) -> None:
        """lanes: the names of the scheduler's lanes, in order."""
        self._engine = CollectorRegistry(auto_describe=False)
        self._shown = CollectorRegistry(auto_describe=False)
        self._ours = CollectorRegistry(auto_describe=False)
        self._shown.register(_Prefixed(self._engine, BOTH_PREFIXES))
        self._shown.register(_Prefixed(self._ours, [OUR_PREFIX]))
        self._labels = {"model_name": model_name, "engine": "0"}
        self._fault_logged = False
        tokens = token_count_buckets(context_tokens)

        self._running = self._gauge("num_requests_running", "Requests that hold memory and take part in steps.")
        self._waiting = self._gauge("num_requests_waiting", "Requests in the queue.")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of KV memory held by pages, 0 to 1.")
        self._full_usage = self._gauge("full_token_usage", "Share of KV memory held by full pages, 0 to 1.", ours=True)
        self._window_usage = self._gauge(
            "swa_token_usage", "Share of KV memory held by window pages, 0 to 1.", ours=True
        )
        self._cached_usage = self._gauge(
            "prefix_cache_usage_perc",
            "Share of KV memory held by cached prefixes that nobody uses now, 0 to 1.",
            ours=True,
        )
        evicted = self._counter("prefix_cache_evicted_pages", "Cached pages given up for memory.", ("kind",), ours=True)
        self._evicted = {kind: evicted.labels(**self._labels, kind=kind) for kind in ("full", "window")}
        self._rebuilt = self._counter(
            "window_rebuilt_tokens", "Positions run again to get their window K/V back.", ours=True
        )
        self._stranded = self._gauge("kv_stranded_bytes", "Bytes of KV slabs in use that hold no page.", ours=True)

        waiting = Gauge(
            "queue_depth",
            "Sequences in the queue by lane of tokens to compute.",
            (*self._labels, "lane"),
            registry=self._ours,
        )
        waits = Histogram(
            "queue_wait_seconds",
            "Time in the queue by lane.",
            (*self._labels, "lane"),
            buckets=REQUEST_TIME_BUCKETS,
            registry=self._ours,
        )
        self._lane_waiting = [waiting.labels(**self._labels, lane=lane) for lane in lanes]
        self._lane_waits = [waits.labels(**self._labels, lane=lane) for lane in lanes]
        self._chunks = self._histogram(
            "prefill_chunk_tokens", "Prompt tokens of a row of a step.", STEP_TOKEN_BUCKETS, ours=True
        )
        self._matches = self._counter(
            "queue_prefix_matches", "Comparisons that keep known what is cached of those who wait.", ours=True
        )

        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self._generated = self._counter("generation_tokens", "Tokens generated.")
        self._preemptions = self._counter("num_preemptions", "Sequences that lost their memory to another one.")
        self._cached = self._counter("prompt_tokens_cached", "Prompt tokens whose KV was reused.")
        self._prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix tree.")
        self._prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix tree.")
        self._faults = self._counter("metric_faults", "Facts that could not be counted as they were given.", ours=True)
        self._violations = self._counter(
            "stream_ending_violations", "Answers that did not end in exactly one way.", ours=True
        )
        self._outcomes = self._counter("request_success", "Ended requests by how they ended.", ("finished_reason",))
        self._rejections = self._counter(
            "admission_rejections", "Requests refused before admission.", ("reason",), ours=True
        )
        for outcome in OUTCOMES:
            self._outcomes.labels(**self._labels, finished_reason=outcome)

        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens computed in a step.", STEP_TOKEN_BUCKETS)
        self._step_time = self._histogram("step_time_seconds", "Duration of a step.", TOKEN_TIME_BUCKETS, ours=True)
        self._token_gap = _StepHistogram(
            "inter_token_latency_seconds", "Time between two tokens of a choice.", TOKEN_TIME_BUCKETS, self._labels
        )
        self._engine.register(self._token_gap)
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", TIME_TO_FIRST_TOKEN_BUCKETS
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first.", TOKEN_TIME_BUCKETS
        )
        self._total = self._histogram("e2e_request_latency_seconds", "Arrival to end.", REQUEST_TIME_BUCKETS)
        self._queued = self._histogram("request_queue_time_seconds", "Time in the queue.", REQUEST_TIME_BUCKETS)
        self._prefill = self._histogram("request_prefill_time_seconds", "Time in prefill.", REQUEST_TIME_BUCKETS)
        self._decode = self._histogram("request_decode_time_seconds", "Time in decode.", REQUEST_TIME_BUCKETS)
        self._inference = self._histogram(
            "request_inference_time_seconds", "Time in prefill and decode.", REQUEST_TIME_BUCKETS
        )
        self._request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self._request_output = self._histogram("request_generation_tokens", "Output tokens of a request.", tokens)
        self._request_max = self._histogram("request_params_max_tokens", "max_tokens of a request.", tokens)
        self._request_computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that were computed.", tokens
        )
        self._request_n = self._histogram("request_params_n", "Choices of a request.", CHOICE_BUCKETS)

        self._http_total = Counter(
            "http_requests", "HTTP calls by their answer.", ("method", "status", "handler"), registry=self._shown
        )
        self._http_children: dict[tuple[str, int, str], tuple[Counter, Histogram]] = {}
        self._http_time = Histogram(
            "http_request_duration_seconds",
            "Duration of HTTP calls.",
            ("method", "handler"),
            buckets=HTTP_TIME_BUCKETS,
            registry=self._shown,
        )

    def step(self, facts: StepFacts) -> None:
        """Count a committed step."""
        with self._guarded():
            self._running.set(self._sane(facts.running))
            self._waiting.set(self._sane(facts.waiting))
            full, window = self._share(facts.full_usage), self._share(facts.window_usage)
            self._full_usage.set(full)
            self._window_usage.set(window)
            self._cached_usage.set(self._share(facts.cached_usage))
            for kind, pages in (("full", facts.evicted_full_pages), ("window", facts.evicted_window_pages)):
                self._evicted[kind].inc(self._sane(pages))
            self._rebuilt.inc(self._sane(facts.rebuilt_tokens))
            self._stranded.set(max(0, facts.stranded_bytes))
            self._kv_usage.set(min(full + window, 1.0))
            self._prompt_tokens.inc(self._sane(facts.prompt_tokens))
            self._generated.inc(self._sane(facts.generated_tokens))
            self._preemptions.inc(self._sane(facts.preemptions))
            self._step_tokens.observe(self._sane(facts.step_tokens))
            self._step_time.observe(self._sane(facts.step_s))
            self._token_gap.add(map(self._sane, facts.token_gaps_s))
            for lane, waiting in zip(self._lane_waiting, facts.waiting_by_lane, strict=False):
                lane.set(self._sane(waiting))
            for number, wait_s in facts.waits_s:
                self._lane_waits[number].observe(self._sane(wait_s))
            for tokens in facts.chunk_tokens:
                self._chunks.observe(self._sane(tokens))
            self._matches.inc(self._sane(facts.prefix_matches))

    def request_ended(self, facts: RequestFacts) -> None:
        """Count an ended request."""
        with self._guarded():
            outcome = facts.outcome if facts.outcome in OUTCOMES else "error"
            self._outcomes.labels(**self._labels, finished_reason=outcome).inc()
            prompt, cached = self._sane(facts.prompt_tokens), self._sane(facts.cached_tokens)
            output = self._sane(facts.output_tokens)
            self._cached.inc(cached)
            self._prefix_queries.inc(prompt)
            self._prefix_hits.inc(cached)
            self._request_prompt.observe(prompt)
            self._request_output.observe(output)
            self._request_computed.observe(max(prompt - cached, 0.0))
            self._request_n.observe(self._sane(facts.choices))
            self._request_max.observe(self._sane(facts.max_tokens))
            for histogram, seconds in (
                (self._queued, facts.queued_s),
                (self._prefill, facts.prefill_s),
                (self._decode, facts.decode_s),
                (self._first_token, facts.first_token_s),
                (self._total, facts.total_s),
            ):
                if seconds is not None:
                    histogram.observe(self._sane(seconds))
            if facts.prefill_s is not None and facts.decode_s is not None:
                self._inference.observe(self._sane(facts.prefill_s + facts.decode_s))
            later_tokens = output - max(self._sane(facts.choices), 1.0)
            if facts.decode_s is not None and later_tokens > 0:
                tokens_per_choice = later_tokens / max(self._sane(facts.choices), 1.0)
                self._per_token.observe(self._sane(facts.decode_s) / tokens_per_choice)

    def rejected(self, reason: str) -> None:
        """Count a request that was refused before admission; `reason` is the error's code."""
        with self._guarded():
            self._rejections.labels(**self._labels, reason=reason).inc()

    def stream_violation(self) -> None:
        """Count an answer that ended in no way or in more than one."""
        with self._guarded():
            self._violations.inc()

    def http(self, method: str, handler: str, status: int, seconds: float) -> None:
        """Count an HTTP call. `handler` is the route's template, never a client's path."""
        with self._guarded():
            key = method, status, handler
            found = self._http_children.get(key)
            if found is None:  # looked up once: labels() takes longer than all the rest
                found = self._http_children[key] = (
                    self._http_total.labels(method=method, status=str(status), handler=handler),
                    self._http_time.labels(method=method, handler=handler),
                )
            total, time = found
            total.inc()
            time.observe(self._sane(seconds))

    def render(self) -> bytes:
        """Everything as Prometheus text."""
        with self._guarded():
            return generate_latest(self._shown)
        return b""

    def _gauge(self, name: str, text: str, *, ours: bool = False) -> Gauge:
        return Gauge(name, text, tuple(self._labels), registry=self._registry(ours)).labels(**self._labels)

    def _counter(self, name: str, text: str, more_labels: tuple[str, ...] = (), *, ours: bool = False) -> Counter:
        counter = Counter(name, text, (*self._labels, *more_labels), registry=self._registry(ours))
        return counter if more_labels else counter.labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *, ours: bool = False) -> Histogram:
        histogram = Histogram(name, text, tuple(self._labels), buckets=buckets, registry=self._registry(ours))
        return histogram.labels(**self._labels)

    def _registry(self, ours: bool) -> CollectorRegistry:
        """ours: vLLM has no metric of this name."""
        return self._ours if ours else self._engine

    def _sane(self, value: float) -> float:
        """The value, or 0 if it is negative or not finite."""
        if math.isfinite(value) and value >= 0:
            return float(value)
        self._faults.inc()
        return 0.0

    def _share(self, value: float) -> float:
        share = self._sane(value)
        if share > 1.0:
            self._faults.inc()
            return 1.0
        return share

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            if not self._fault_logged:
                self._fault_logged = True
                logger.exception("event=metric_fault note=later ones are only counted")
            with contextlib.suppress(Exception):
                self._faults.inc()
