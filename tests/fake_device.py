"""A device without tensors: it keeps page tables and a memory of cells, and reads them as attention would.

Every cell remembers what came before it. A step that reads a cell of another text raises, whoever wrote it, and the
token it "samples" is a checksum of all that the last query saw, so a wrong page gives another text.
"""

from __future__ import annotations

import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from server.config import KVLayout
from server.errors import TwinpaneError
from server.request import FinishReason, SampledToken, StopRules
from server.step import (
    FOLLOWS_NOTHING,
    PageId,
    PageKind,
    RowPlan,
    RowResult,
    SequenceId,
    SlotId,
    SlotOpening,
    StepId,
    StepPlan,
    StepResult,
)

Cell = tuple[int, int, int]  # checksum of all tokens up to this one, position, token


def checksum(tokens: Sequence[int], window: Sequence[int], *, choice: int, seed: int, vocab: int) -> int:
    """The fake model: any token seen by the full or the window layers changes the next one."""
    return zlib.crc32(repr((list(tokens), list(window), choice, seed)).encode()) % vocab


def text_alone(
    prompt: Sequence[int], outputs: int, *, layout: KVLayout, choice: int = 0, seed: int = 0, vocab: int = 97
) -> list[int]:
    """What the fake device answers, from the plain definition."""
    known = list(prompt)
    for _ in range(outputs):
        window = known[max(0, len(known) - 1 - layout.window_tokens) :] if layout.has_window else []
        known.append(checksum(known, window, choice=choice, seed=seed, vocab=vocab))
    return known[len(prompt) :]


@dataclass
class FakeDevice:
    """Implements server.engine.Runner. fails: called with each row; raising makes the step fail as a device would."""

    layout: KVLayout
    vocab: int = 97
    fails: Callable[[RowPlan], None] = lambda _row: None
    before_step: Callable[[StepPlan], None] = lambda _plan: None
    sampled: dict[SlotId, tuple[StepId, int]] = field(default_factory=dict)
    tables: dict[tuple[SlotId, PageKind], dict[int, PageId]] = field(default_factory=lambda: defaultdict(dict))
    openings: dict[SlotId, SlotOpening] = field(default_factory=dict)
    memory: dict[tuple[PageKind, PageId], list[Cell | None]] = field(default_factory=dict)
    steps: int = 0
    checks: int = 0
    dead: bool = False
    moves: int = 0
    interrupted: threading.Event = field(default_factory=threading.Event)

    def run(self, plan: StepPlan, begun: Callable[[], None] = lambda: None) -> StepResult:
        begun()
        self.before_step(plan)
        self.steps += 1
        for move in plan.moves:
            self.moves += 1
            self._store(move.kind, move.target, list(self._page(move.kind, move.source)))
        for write in plan.writes:
            table = self.tables[write.slot, write.kind]
            table.update(enumerate(write.pages, start=write.first_page))
        for opening in plan.opened:
            self.openings[opening.slot] = opening
        for row in plan.rows:
            self.fails(row)
        results = tuple(self._row(row) for row in plan.rows)
        for row, result in zip(plan.rows, results, strict=True):
            if result.token is not None:
                self.sampled[row.slot] = (plan.step_id, result.token.token_id)
        return StepResult(step_id=plan.step_id, rows=results, device_s=0.001)

    def interrupt(self) -> None:
        self.interrupted.set()

    def check(self) -> None:
        self.checks += 1
        if self.dead:
            raise RuntimeError("no device")

    def _row(self, row: RowPlan) -> RowResult:
        assert self.openings[row.slot].sequence == row.sequence, "the slot was not opened for this sequence"
        if row.follows is not None:
            step, last = self.sampled.get(row.slot, (None, 0))
            if step != row.follows:
                return FOLLOWS_NOTHING
            row = row.filled(last)
        kinds = [PageKind.FULL, PageKind.WINDOW] if self.layout.has_window else [PageKind.FULL]
        before = self._cell(row.slot, PageKind.FULL, row.start - 1) if row.start else (0, -1, 0)
        assert before is not None, f"position {row.start - 1} of {row.sequence} was never computed"
        text = before[0]
        for position, token in enumerate(row.tokens, start=row.start):
            text = _longer(text, token)
            for kind in kinds:
                page, offset = self._place(row.slot, kind, position)
                cell: Cell | None = (text, position, token)
                if position < row.cached:  # run again for the window, which is whole only where the rows go back enough
                    if kind is PageKind.FULL:
                        assert self._page(kind, page)[offset] == cell, f"position {position} is not what was cached"
                    elif position < row.cached - self.layout.window_tokens:
                        cell = None
                self._page(kind, page)[offset] = cell
        full: list[int] = []
        window: list[int] = []
        for query in {row.start, row.stop - 1}:
            full = self._read(row, PageKind.FULL, 0, query)
            if self.layout.has_window and query >= row.cached:
                window = self._read(row, PageKind.WINDOW, max(0, query - self.layout.window_tokens), query)
        if not row.samples:
            return RowResult()
        full = self._read(row, PageKind.FULL, 0, row.stop - 1)
        window = (
            self._read(row, PageKind.WINDOW, max(0, row.stop - 1 - self.layout.window_tokens), row.stop - 1)
            if self.layout.has_window
            else []
        )
        opening = self.openings[row.slot]
        token = checksum(full, window, choice=opening.choice, seed=opening.sampling.seed, vocab=self.vocab)
        return RowResult(token=SampledToken(token_id=token))

    def _read(self, row: RowPlan, kind: PageKind, first: int, last: int) -> list[int]:
        """Window cells are those of the same text as the full ones, which are one text from the first on."""
        tokens, text = [], 0
        for position in range(first, last + 1):
            cell = self._cell(row.slot, kind, position)
            wanted = self._cell(row.slot, PageKind.FULL, position) if kind is PageKind.WINDOW else None
            if kind is PageKind.FULL and cell is not None:
                text = _longer(text, cell[2])
                wanted = (text, position, cell[2])
            assert cell is not None and cell == wanted, (
                f"{kind.name} page holds {cell} where position {position} of {row.sequence} is read"
            )
            tokens.append(cell[2])
        return tokens

    def _cell(self, slot: SlotId, kind: PageKind, position: int) -> Cell | None:
        page, offset = self._place(slot, kind, position)
        return self._page(kind, page)[offset]

    def _place(self, slot: SlotId, kind: PageKind, position: int) -> tuple[PageId, int]:
        logical, offset = divmod(position, self.layout.page_tokens)
        return self.tables[slot, kind][logical], offset

    def _page(self, kind: PageKind, page: PageId) -> list[Cell | None]:
        if (kind, page) not in self.memory:
            self._store(kind, page, [None] * self.layout.page_tokens)
        return self.memory[kind, page]

    def _store(self, kind: PageKind, page: PageId, cells: list[Cell | None]) -> None:
        """Writing a page destroys what pages of the other kind held in the same bytes of the arena."""
        begin, end = self._bytes(kind, page)
        other = PageKind(1 - kind)
        for held in [p for k, p in self.memory if k is other]:
            other_begin, other_end = self._bytes(other, held)
            if begin < other_end and other_begin < end:
                del self.memory[other, held]
        self.memory[kind, page] = cells

    def _bytes(self, kind: PageKind, page: PageId) -> tuple[int, int]:
        per_slab = self.layout.full_pages_per_slab if kind is PageKind.FULL else self.layout.window_pages_per_slab
        size = self.layout.full_page_bytes if kind is PageKind.FULL else self.layout.window_page_bytes
        begin = page // per_slab * self.layout.slab_bytes + page % per_slab * size
        assert begin + size <= self.layout.slab_bytes * self.layout.slab_count
        return begin, begin + size


def _longer(text: int, token: int) -> int:
    return zlib.crc32(repr((text, token)).encode())


class PagesInFlight:
    """Watches over the bytes that handed over and uncommitted steps read and write, from the plans alone: raises when a
    plan gives any of them to another sequence, or moves pages at all meanwhile. Two may read the same.

    A device that does one step after the other would forgive that, and one that copies pages on the side would not.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._tables: dict[tuple[SlotId, PageKind], dict[int, PageId]] = defaultdict(dict)
        self._steps: dict[StepId, dict[tuple[PageKind, PageId], tuple[SequenceId, bool]]] = {}

    def hand_over(self, plan: StepPlan) -> None:
        assert not self._steps or not plan.moves, "pages move while a step is in flight"
        for opening in plan.opened:  # what the slot's table held is void
            for kind in PageKind:
                self._tables[opening.slot, kind] = {}
        for write in plan.writes:
            self._tables[write.slot, write.kind].update(enumerate(write.pages, start=write.first_page))
        mine: dict[tuple[PageKind, PageId], tuple[SequenceId, bool]] = {}
        for row in plan.rows:
            for page, writes in self._touched(row):
                mine[page] = (row.sequence, writes or mine.get(page, (0, False))[1])
        kinds = {self._slab(*page): page[0] for page in mine}
        for step, theirs in self._steps.items():
            for page, (sequence, writes) in theirs.items():
                other, writes_too = mine.get(page, (sequence, False))
                only_read = not writes and not writes_too
                assert other == sequence or only_read, f"{page} of {sequence} in step {step} was given away"
                assert kinds.get(self._slab(*page), page[0]) is page[0], f"the slab of {page} changed kind in {step}"
        self._steps[plan.step_id] = mine

    def take_back(self, step_id: StepId) -> None:
        assert next(iter(self._steps)) == step_id, "steps are committed in the order of their plans"
        del self._steps[step_id]

    def _touched(self, row: RowPlan) -> Iterator[tuple[tuple[PageKind, PageId], bool]]:
        """Pages, and whether they are written. A rebuild writes no full pages, and reads no window before its rows
        but that of the snapshot where it begins."""
        for kind in PageKind:
            written = row.start
            if kind is PageKind.FULL:
                first, written = 0, max(row.start, row.cached)
            elif self._layout.has_window:
                first = max(0, row.start - self._layout.window_tokens)
            else:
                continue
            for logical in range(first // self._layout.page_tokens, (row.stop - 1) // self._layout.page_tokens + 1):
                page = self._tables[row.slot, kind].get(logical)
                assert page is not None or row.start < row.cached
                if page is not None:
                    yield (kind, page), logical >= written // self._layout.page_tokens

    def _slab(self, kind: PageKind, page: PageId) -> int:
        full = kind is PageKind.FULL
        return page // (self._layout.full_pages_per_slab if full else self._layout.window_pages_per_slab)


class CollectedOutput:
    """An OutputStream that keeps ids: ends at max_tokens or a stop id, and proves that it ended once."""

    def __init__(self, stop: StopRules) -> None:
        self.stop = stop
        self.sampled: list[SampledToken] = []
        self.tokens: list[int] = []
        self.ending: FinishReason | TwinpaneError | str | None = None

    def push(self, token: SampledToken) -> FinishReason | None:
        assert self.ending is None, "push after the end"
        self.sampled.append(token)
        self.tokens.append(token.token_id)
        if token.token_id in self.stop.stop_token_ids and len(self.tokens) > self.stop.min_tokens:
            self.ending = FinishReason.STOP
        elif len(self.tokens) >= self.stop.max_tokens:
            self.ending = FinishReason.LENGTH
        return self.ending if isinstance(self.ending, FinishReason) else None

    def fail(self, error: TwinpaneError) -> None:
        assert self.ending is None, "fail after the end"
        self.ending = error

    def cancel(self) -> None:
        assert self.ending is None, "cancel after the end"
        self.ending = "cancelled"
