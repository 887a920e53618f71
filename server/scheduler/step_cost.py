"""How long a step will take, and so how many prompt tokens may join one in which somebody waits for the next token."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

MOST_GROWTH = 0.9
"""The next larger size is taken only if it needs less than this of the target: sizes do not swing from step to step."""
SIZES_PER_DOUBLING = 8
LEAST_SHARE = 0.5
"""Prompts may take this part of a step in any case: where answers alone take longer than the target, they go on too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What decides how long a step takes. context_reads: the sum over rows of tokens times the positions each looks at
    on average."""

    rows: int
    tokens: int
    context_reads: float

    def __add__(self, other: StepShape) -> StepShape:
        return StepShape(
            rows=self.rows + other.rows,
            tokens=self.tokens + other.tokens,
            context_reads=self.context_reads + other.context_reads,
        )


def shape_of_row(start: int, tokens: int) -> StepShape:
    """A row of positions [start, start + tokens)."""
    return StepShape(rows=1, tokens=tokens, context_reads=tokens * (start + tokens / 2))


NO_ROWS = StepShape(rows=0, tokens=0, context_reads=0.0)


def shape_of_rows(rows: Iterable[tuple[int, int]]) -> StepShape:
    """Of rows of (start, tokens): the sum of what `shape_of_row` says of each."""
    count = all_tokens = 0
    reads = 0.0
    for start, tokens in rows:
        count += 1
        all_tokens += tokens
        reads += tokens * (start + tokens / 2)
    return StepShape(rows=count, tokens=all_tokens, context_reads=reads)


class StepCost(Protocol):
    def seconds(self, shape: StepShape) -> float:
        """What such a step is expected to take; 0 where nothing is known yet."""
        ...

    def note(self, shape: StepShape, seconds: float) -> None:
        """A step took so long."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedCost:
    """A known line: seconds for a step, for each row, token and position read. It learns nothing."""

    step_s: float
    row_s: float
    token_s: float
    read_s: float

    def seconds(self, shape: StepShape) -> float:
        return self.step_s + self.row_s * shape.rows + self.token_s * shape.tokens + self.read_s * shape.context_reads

    def note(self, shape: StepShape, seconds: float) -> None:
        pass


class FittedCost:
    """The same line, fitted to the steps as they are measured.

    Recursive least squares with forgetting (Haykin, Adaptive Filter Theory, chapter on RLS) of relative errors: each
    step counts with 1 / its seconds, so that short ones are predicted as well as long ones. Coefficients below zero
    make no sense and count as zero. Owner: Scheduler.
    """

    FORGET = 0.995
    FIRST_VARIANCE = 1e4
    LEAST_STEPS = 8
    SCALES = np.array([1e-2, 1e-3, 1e-3, 1e-6])
    """About the size of the coefficients, in s: so that one prior does for all."""

    def __init__(self) -> None:
        self._weights = np.zeros(4)
        self._covariance = np.eye(4) * self.FIRST_VARIANCE
        self._steps = 0
        self._line: FixedCost | None = None  # until the next step is noted

    def __repr__(self) -> str:
        step_s, row_s, token_s, read_s = self._weights * self.SCALES
        return f"<FittedCost {step_s:.2g} + {row_s:.2g} rows + {token_s:.2g} tokens + {read_s:.2g} reads>"

    @property
    def line(self) -> FixedCost:
        if self._line is None:
            step_s, row_s, token_s, read_s = np.maximum(self._weights * self.SCALES, 0.0).tolist()
            self._line = FixedCost(step_s=step_s, row_s=row_s, token_s=token_s, read_s=read_s)
        return self._line

    def seconds(self, shape: StepShape) -> float:
        return self.line.seconds(shape) if self._steps >= self.LEAST_STEPS else 0.0

    def note(self, shape: StepShape, seconds: float) -> None:
        if not 0 < seconds < math.inf:
            return
        inputs = np.array([1.0, shape.rows, shape.tokens, shape.context_reads]) * self.SCALES / seconds
        moved = self._covariance @ inputs
        scale = self.FORGET + inputs @ moved
        self._line = None
        self._weights = self._weights + moved * ((1.0 - inputs @ self._weights) / scale)
        covariance = (self._covariance - np.outer(moved, moved) / scale) / self.FORGET
        # What is not excited must not be forgotten without end.
        self._covariance = covariance if covariance.trace() < 1e8 else np.eye(4)
        self._steps += 1


def chunk_sizes(page_tokens: int, most_tokens: int) -> list[int]:
    """1, 2, 3, ..., 16, 18, 20, ..., 32, 36, ... pages, as far as they are fewer than most_tokens, and that."""
    sizes, pages = [], 1
    while pages * page_tokens < most_tokens:
        sizes.append(pages * page_tokens)
        pages += max(1, (1 << pages.bit_length() - 1) // SIZES_PER_DOUBLING)
    return [*sizes, most_tokens]


class ChunkSizer:
    """How many prompt tokens may join a step in which others decode: as many as keep it within a target, in few sizes,
    so that few different shapes are run, and with hysteresis.

    Owner: Scheduler.
    """

    def __init__(self, cost: StepCost, *, target_s: float, page_tokens: int, most_tokens: int) -> None:
        """target_s: 0 for no bound."""
        self._cost = cost
        self._target_s = target_s
        self._sizes = chunk_sizes(page_tokens, most_tokens)
        self._decoding = NO_ROWS
        self._fits: dict[int, int] = {}
        self._limit_s = 0.0

    @property
    def cost(self) -> StepCost:
        return self._cost

    def begin(self, decoding: StepShape) -> int:
        """Of a step with these rows that decode: how many tokens at the beginning of a prompt may join it."""
        self._decoding, self._fits = decoding, {}
        alone_s = self._cost.seconds(decoding) if self._is_bound else 0.0
        if not alone_s:  # no bound, or nothing was measured yet
            self._decoding = NO_ROWS
            return self._sizes[-1]
        self._limit_s = max(self._target_s, alone_s / (1 - LEAST_SHARE))
        return self._fitting(0)

    def weight(self, start: int) -> float:
        """As how many such tokens one counts that follows on `start` others of its prompt, by how many of each would
        fit alone. Looked up at the next of eight points per doubling of `start`."""
        return self._fitting(0) / self._fitting(start) if self._is_bound else 1.0

    def _fitting(self, start: int) -> int:
        """How many tokens after `start` may join the step, if nothing else does; at least one."""
        unit = 1 << max(0, start.bit_length() - 4)
        start = -(-start // unit) * unit
        if start not in self._fits:
            fewest, most = 1, self._sizes[-1]
            while fewest < most:
                middle = (fewest + most + 1) // 2
                if self._cost.seconds(self._decoding + shape_of_row(start, middle)) <= self._limit_s:
                    fewest = middle
                else:
                    most = middle - 1
            self._fits[start] = fewest
        return self._fits[start]

    def size(self, tokens: int, last: int) -> int:
        """The size for a piece that may have so many tokens, when the one before had `last`."""
        at = bisect.bisect_right(self._sizes, tokens) - 1
        if at < 0:
            return tokens
        below = self._sizes[max(0, at - 1)]
        if self._is_bound and self._sizes[at] > last >= below and self._sizes[at] > MOST_GROWTH * tokens:
            return last
        return self._sizes[at]

    @property
    def _is_bound(self) -> bool:
        return self._target_s > 0 and self._decoding.rows > 0
