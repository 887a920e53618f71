"""How fast the requests of a trace must come to load a device so much."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from server.cache.kv_cache import CachePolicy
from server.config import KVLayout, SchedulerConfig
from server.errors import StartupError
from server.rebuild import RebuildShape
from server.scheduler.step_cost import NO_ROWS, StepCost, StepShape, shape_of_row
from server.simulator.replay import Replay
from server.simulator.trace import Trace


def tokens_left(
    trace: Trace,
    layout: KVLayout,
    rebuild: RebuildShape,
    policy: CachePolicy,
    *,
    chunk_tokens: int,
    progress: Callable[[], object] = lambda: None,
) -> list[float]:
    """How many tokens each request has to compute, if all are served in the order and at the times of the trace."""
    replay = Replay(trace, layout, rebuild, policy, chunk_tokens=chunk_tokens)
    left, saved = [], 0.0
    for request, result in zip(trace.requests, replay.steps(), strict=True):
        left.append(request.input_tokens - (result.hit_tokens - saved))
        saved = result.hit_tokens
        progress()
    return left


def least_work_s(trace: Trace, left: Sequence[float], cost: StepCost, scheduler: SchedulerConfig) -> float:
    """What the device needs for all that is left, if every step were as full as any may be: of tokens, or of answers.
    About the least: where steps do not cost in proportion, unequal ones might take a little less."""
    all_of_it = NO_ROWS
    for request, tokens in zip(trace.requests, left, strict=True):
        computed = math.ceil(tokens)
        answers = shape_of_row(request.input_tokens, request.output_tokens)
        all_of_it += shape_of_row(request.input_tokens - computed, computed)
        all_of_it += StepShape(rows=answers.tokens, tokens=answers.tokens, context_reads=answers.context_reads)
    answer_tokens = sum(request.output_tokens for request in trace.requests)
    steps = max(
        1,
        math.ceil(all_of_it.tokens / scheduler.step_token_budget),
        math.ceil(answer_tokens / scheduler.max_sequences),
    )
    each = StepShape(
        rows=round(all_of_it.rows / steps),
        tokens=round(all_of_it.tokens / steps),
        context_reads=all_of_it.context_reads / steps,
    )
    return steps * cost.seconds(each)


def span_s(trace: Trace) -> float:
    """From the first request to the last."""
    return trace.requests[-1].arrival_s - trace.requests[0].arrival_s if trace.requests else 0.0


def time_factor(trace: Trace, work_s: float, load: float) -> float:
    """What the trace's times are multiplied with, so that its requests bring `load` seconds of work a second. Raises
    StartupError where all come at once."""
    if not span_s(trace):
        raise StartupError("--load: the trace has no requests, or all of them come at the same time")
    return work_s / (load * span_s(trace))
