"""One frozen plan in, one frozen result out: everything that a step does on the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from server.model.batch import Batch
from server.model.decoder import Decoder
from server.model.kv_arena import KVArena
from server.model.native_decoder import NativeDecoder
from server.model.sampler import Sampler
from server.rebuild import RebuildShape
from server.step import FOLLOWS_NOTHING, PageKind, RowPlan, RowResult, SlotId, StepId, StepPlan, StepResult


class ModelRunner:
    """Owner of the device tensors: weights, arena, page tables and sampling state. Used on the device thread only.

    `slots` is the number of rows that the page tables have; a table row is long enough for `context_tokens`.
    """

    def __init__(self, decoder: Decoder | NativeDecoder, arena: KVArena, *, slots: int, context_tokens: int) -> None:
        self._decoder = decoder
        self._arena = arena
        device = arena.memory.device
        pages = -(-context_tokens // arena.layout.page_tokens)
        self._tables = {kind: torch.zeros(slots, pages, dtype=torch.int32, device=device) for kind in PageKind}
        native = decoder.kernels if isinstance(decoder, NativeDecoder) else None
        self._sampler = Sampler(decoder.spec.vocab, device, native)
        self._sampled: dict[SlotId, tuple[StepId, int]] = {}  # the last token sampled in each slot, and by which step
        self._device = device
        self._logit_rows = torch.empty(0, decoder.spec.vocab)

    @property
    def rebuild(self) -> RebuildShape:
        """What it takes to get a lost window back."""
        return self._decoder.rebuild

    @torch.inference_mode()
    def run(self, plan: StepPlan, begun: Callable[[], None] = lambda: None) -> StepResult:
        """Implements server.engine.Runner."""
        started = time.perf_counter()
        self._prepare(plan)
        rows = {index: filled for index, row in enumerate(plan.rows) if (filled := self._filled(row)) is not None}
        results = [FOLLOWS_NOTHING] * len(plan.rows)
        if rows:
            for index, result in zip(rows, self._compute(list(rows.values()), begun), strict=True):
                results[index] = result
                if result.token is not None:
                    self._sampled[rows[index].slot] = (plan.step_id, result.token.token_id)
        return StepResult(step_id=plan.step_id, rows=tuple(results), device_s=time.perf_counter() - started)

    def interrupt(self) -> None:
        self._decoder.interrupt()

    @torch.inference_mode()
    def check(self) -> None:
        """The head of the model on zeros: raises if the device no longer computes."""
        hidden = torch.zeros(1, self._decoder.spec.hidden, dtype=self._arena.dtype, device=self._device)
        self._decoder.logits(hidden).sum().item()

    def _prepare(self, plan: StepPlan) -> None:
        for move in plan.moves:
            self._arena.copy_page(move.kind, move.source, move.target)
        for write in plan.writes:
            entries = torch.tensor(write.pages, dtype=torch.int32, device=self._device)
            self._tables[write.kind][write.slot, write.first_page : write.first_page + len(write.pages)] = entries
        for opening in plan.opened:
            self._sampler.open(opening)

    def _filled(self, row: RowPlan) -> RowPlan | None:
        """The row with the token that an earlier step sampled for it; None if that step has none to give."""
        if row.follows is None:
            return row
        step, token = self._sampled.get(row.slot, (None, 0))
        return row.filled(token) if step == row.follows else None

    def _logits(self, hidden: Tensor) -> Tensor:
        """[R, N] fp32, good until the next step."""
        if not isinstance(self._decoder, NativeDecoder):
            return self._decoder.logits(hidden)
        rows = hidden.shape[0]
        if self._logit_rows.shape[0] < rows:
            self._logit_rows = torch.empty(rows, self._decoder.spec.vocab)
        return self._decoder.logits(hidden, into=self._logit_rows[:rows])

    def _compute(self, rows: Sequence[RowPlan], begun: Callable[[], None]) -> list[RowResult]:
        tokens = torch.tensor([token for row in rows for token in row.tokens], device=self._device)
        batch = Batch(
            [(row.slot, row.start, row.count) for row in rows],
            self._tables[PageKind.FULL],
            self._tables[PageKind.WINDOW],
            cached=[row.cached for row in rows],
        )
        begun()
        hidden = self._decoder.forward(tokens, batch, self._arena)
        sampling = [index for index, row in enumerate(rows) if row.samples]
        results = [RowResult()] * len(rows)
        if sampling:
            last = batch.last_tokens
            # Not hidden[...], which would wake torch's threads for it.
            chosen = torch.tensor([last[index] for index in sampling], device=self._device)
            logits = self._logits(hidden.index_select(0, chosen))
            for index, result in zip(
                sampling, self._sampler.sample(logits, [rows[index] for index in sampling]), strict=True
            ):
                results[index] = result
        return results
