"""What is counted. Frozen facts go in; Prometheus text comes out. A metric can never fail a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """One committed step, and the state after it. *_usage are shares of the arena's bytes held by pages of each kind;
    token_gaps_s are the times since the same choice's previous token, one for each token of this step that had one."""

    running: int
    waiting: int
    full_usage: float
    window_usage: float
    step_tokens: int
    generated_tokens: int
    prompt_tokens: int
    preemptions: int
    step_s: float
    token_gaps_s: tuple[float, ...] = ()


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
