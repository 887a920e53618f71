"""The words between scheduler and runner: one frozen plan goes down to the device, one frozen result comes back.

Page tables live in the runner, one row per slot; plans carry only the entries that changed, because the table of a
million-token sequence is not to be resent every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NewType

from server.request import SampledToken, SamplingParams

StepId = NewType("StepId", int)
SequenceId = NewType("SequenceId", int)
SlotId = NewType("SlotId", int)
PageId = NewType("PageId", int)


class PageKind(IntEnum):
    """FULL pages hold the K/V of full-attention layers, WINDOW pages that of window layers and of MTP layers."""

    FULL = 0
    WINDOW = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PageMove:
    """Copy one page inside the arena before the step's forward pass, so that its old slab can empty."""

    kind: PageKind
    source: PageId
    target: PageId


@dataclass(frozen=True, slots=True, kw_only=True)
class TableWrite:
    """Entries [first_page, first_page + len(pages)) of a slot's page table of one kind.

    Logical page i of a sequence holds positions [i * page_tokens, (i + 1) * page_tokens).
    """

    slot: SlotId
    kind: PageKind
    first_page: int
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotOpening:
    """A sequence enters a slot; whatever the slot held before is void.

    prompt_tokens and output_tokens are given only when sampling.counts_tokens, so that penalties survive a preemption.
    """

    slot: SlotId
    sequence: SequenceId
    choice: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    prompt_tokens: tuple[int, ...] = ()
    output_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """Compute positions [start, stop) of one sequence; prompt chunk and decode differ only in counts.

    tokens: the ids at these positions. follows: the last of them is missing there, because a step that was not yet over
    when this one was planned samples it; the runner puts in what that step sampled in this slot, and a row that follows
    nothing (its row there failed) fails.
    samples: the row reaches the end of what is known, so its last position yields a token.
    suppress_stop: the token must not be one of the slot's stop ids (fewer than min_tokens so far).
    cached: positions before this one have their full K/V; they are run again for their window K/V only, and as far as
    that takes.
    epoch counts the sequence's admissions: a result of an earlier one is dropped.
    """

    slot: SlotId
    sequence: SequenceId
    epoch: int
    start: int
    tokens: tuple[int, ...]
    samples: bool
    suppress_stop: bool = False
    cached: int = 0
    follows: StepId | None = None

    @property
    def count(self) -> int:
        return len(self.tokens) + (self.follows is not None)

    @property
    def stop(self) -> int:
        return self.start + self.count

    def filled(self, token: int) -> RowPlan:
        """The row with the token that it waited for."""
        return RowPlan(  # dataclasses.replace would take twice as long, once a row and step
            slot=self.slot,
            sequence=self.sequence,
            epoch=self.epoch,
            start=self.start,
            tokens=(*self.tokens, token),
            samples=self.samples,
            suppress_stop=self.suppress_stop,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Everything one device step does, in this order: moves, table writes, slot openings, rows."""

    step_id: StepId
    moves: tuple[PageMove, ...]
    writes: tuple[TableWrite, ...]
    opened: tuple[SlotOpening, ...]
    rows: tuple[RowPlan, ...]

    @property
    def token_count(self) -> int:
        return sum(row.count for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """What a row produced: a token if it samples, or why this row alone failed."""

    token: SampledToken | None = None
    failure: str | None = None


FOLLOWS_NOTHING = RowResult(failure="the step before brought no token to go on from")
"""The result of a row whose token was to come from a row that failed."""


class StepInterrupted(Exception):
    """The device was told to end: the step was not finished, and none will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Results in the order of the plan's rows; device_s is the time the step took on the device thread."""

    step_id: StepId
    rows: tuple[RowResult, ...]
    device_s: float
