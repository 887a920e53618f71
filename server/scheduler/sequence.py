"""One choice of one request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.cache.kv_cache import Prefix
from server.request import GenerationRequest, OutputStream
from server.step import SequenceId, SlotId, SlotOpening, StepId


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """computed_tokens catches up with known_tokens: prompt chunk and decode are the same thing with other counts.

    computed_tokens counts what committed steps computed, planned_tokens also what steps in flight compute; last_step is
    the last step that has a row of this sequence. slot is None while it waits. epoch counts admissions.
    resumed_at: positions before it were cached when it was admitted the last time.
    prompt_tokens_done never falls, not even by a preemption. prefix is what the cache knows it by. key is what it was
    admitted with (see priority.Policy), admitted_tokens what was known of it then, saved_tokens what of it was cached,
    and lane that of what it had to compute. plans_before: how many were made before it came into the queue.
    Owner: Scheduler, on the event-loop thread.
    """

    id: SequenceId
    choice: int
    request: GenerationRequest
    output: OutputStream
    key: float = 0.0
    admitted_tokens: int = 0
    saved_tokens: float = 0.0
    piece_tokens: int = 0
    queued_s: float = 0.0
    plans_before: int = 0
    lane: int = 0
    prefix: Prefix | None = None
    output_tokens: list[int] = field(default_factory=list)
    resumed_at: int = 0
    computed_tokens: int = 0
    planned_tokens: int = 0
    last_step: StepId | None = None
    prompt_tokens_done: int = 0
    slot: SlotId | None = None
    epoch: int = 0
    last_token_s: float | None = None

    @property
    def known_tokens(self) -> int:
        return len(self.request.prompt_tokens) + len(self.output_tokens)

    @property
    def pending_tokens(self) -> int:
        """How many tokens can be planned. Once every known one is, it is the one that a step in flight samples: each
        row adds one, and none follows on one that is certainly the last."""
        prompt_tokens, planned = len(self.request.prompt_tokens), self.planned_tokens
        known = prompt_tokens + len(self.output_tokens)
        if planned < known:
            return known - planned
        return 1 if planned + 1 < prompt_tokens + self.request.stop.max_tokens else 0

    def __lt__(self, other: Sequence) -> bool:
        """By key, and then in the order of arrival."""
        return (self.key, self.id) < (other.key, other.id)

    def advance(self, computed_tokens: int) -> int:
        """Note progress; returns how many prompt tokens were computed that never were before."""
        self.computed_tokens = computed_tokens
        done = min(computed_tokens, len(self.request.prompt_tokens))
        fresh = max(0, done - self.prompt_tokens_done)
        self.prompt_tokens_done += fresh
        return fresh

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Token ids at positions [start, stop)."""
        prompt = self.request.prompt_tokens
        if stop <= len(prompt):
            return prompt[start:stop]
        return (*prompt[start:], *self.output_tokens[max(0, start - len(prompt)) : stop - len(prompt)])

    def opening(self) -> SlotOpening:
        """How the sampler learns of this sequence when it enters its slot."""
        assert self.slot is not None
        counts = self.request.sampling.counts_tokens
        return SlotOpening(
            slot=self.slot,
            sequence=self.id,
            choice=self.choice,
            sampling=self.request.sampling,
            stop_token_ids=self.request.stop.stop_token_ids,
            prompt_tokens=self.request.prompt_tokens if counts else (),
            output_tokens=tuple(self.output_tokens) if counts else (),
        )
