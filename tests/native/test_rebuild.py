"""A window that is rebuilt in C is bit for bit the one that was lost, and depends on nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from server.model.batch import Batch
from server.model.spec import ModelSpec
from server.model.weights import Weights
from server.step import PageId, PageKind
from tests.model.paged import PagedSequences, random_texts
from tests.native.conftest import MakeKernels
from tests.native.models import SPECS, VOCAB, native_sequences, random_weights

TAIL = 9
HYBRIDS = [name for name, make in SPECS.items() if make().window_tokens]


@pytest.fixture(scope="module", params=HYBRIDS)
def model(request: pytest.FixtureRequest) -> tuple[ModelSpec, Weights]:
    spec = SPECS[request.param]()
    return spec, random_weights(spec)


def forward(sequences: PagedSequences, rows: Sequence[tuple[int, list[int], int, int, int]]) -> Tensor:
    """rows of (slot, text, start, stop, cached) -> hidden [T, M]"""
    batch = Batch(
        [(slot, start, stop - start) for slot, _, start, stop, _ in rows],
        sequences.tables[PageKind.FULL],
        sequences.tables[PageKind.WINDOW],
        cached=[cached for *_, cached in rows],
    )
    tokens = torch.tensor([token for _, text, start, stop, _ in rows for token in text[start:stop]])
    return sequences.decoder.forward(tokens, batch, sequences.arena)


def lose_window(sequences: PagedSequences, window_pages: Sequence[int], poison: float) -> None:
    for page in window_pages:
        memory = sequences.arena.page_bytes(PageKind.WINDOW, PageId(page))
        memory.view(sequences.arena.dtype).fill_(poison)


def new_window_pages(sequences: PagedSequences, slot: int, start: int, stop: int) -> None:
    for logical in range(start // sequences.page_tokens, -(-stop // sequences.page_tokens)):
        sequences.tables[PageKind.WINDOW][slot, logical] = sequences.free[PageKind.WINDOW].pop()


@pytest.mark.parametrize(("threads", "chunk", "poison"), [(1, 10_000, math.nan), (2, 64, -7e28), (3, 7, math.nan)])
def test_no_bit_differs_from_what_was_lost(
    model: tuple[ModelSpec, Weights], make_kernels: MakeKernels, threads: int, chunk: int, poison: float
) -> None:
    spec, weights = model
    sequences = native_sequences(spec, weights, make_kernels(threads=threads), page_tokens=4, tokens=2048)
    span = sequences.decoder.rebuild.span_tokens
    cached = -(-(span + 40) // 4) * 4
    text, other = random_texts(VOCAB, [cached + TAIL, 50], seed=5)
    window_pages = list(sequences.free[PageKind.WINDOW])
    (whole,) = sequences.step([(0, text)])
    (alone,) = native_sequences(spec, weights, make_kernels(threads=1), tokens=2048).step([(1, other)])
    lose_window(sequences, window_pages, poison)
    new_window_pages(sequences, 0, cached - span, cached + TAIL)
    sequences._map(1, len(other))
    for start in range(cached - span, cached, chunk):
        out = forward(sequences, [(0, text, start, min(cached, start + chunk), cached)])
        assert not out.any(), "nothing above is fed"
    tail = forward(sequences, [(1, other, 0, 50, 0), (0, text, cached, cached + TAIL, cached)])
    assert torch.equal(tail[50:], whole[cached:])
    assert torch.equal(tail[:50], alone)


def test_the_last_chunk_of_a_rebuild_goes_on_with_the_prompt(
    model: tuple[ModelSpec, Weights], make_kernels: MakeKernels
) -> None:
    spec, weights = model
    sequences = native_sequences(spec, weights, make_kernels(threads=2), page_tokens=4, tokens=2048)
    span = sequences.decoder.rebuild.span_tokens
    cached = -(-(span + 40) // 4) * 4
    (text,) = random_texts(VOCAB, [cached + TAIL], seed=6)
    window_pages = list(sequences.free[PageKind.WINDOW])
    (whole,) = sequences.step([(0, text)])
    full = [sequences.arena.page_bytes(PageKind.FULL, PageId(int(page))).clone() for page in _full(sequences, cached)]
    lose_window(sequences, window_pages, math.nan)
    new_window_pages(sequences, 0, cached - span, cached + TAIL)
    hidden = forward(sequences, [(0, text, cached - span, cached + TAIL, cached)])
    assert torch.equal(hidden[span:], whole[cached:])
    now = [sequences.arena.page_bytes(PageKind.FULL, PageId(int(page))) for page in _full(sequences, cached)]
    assert all(map(torch.equal, full, now)), "a rebuild writes no full K/V"


def test_it_depends_on_the_first_of_its_rows(model: tuple[ModelSpec, Weights], make_kernels: MakeKernels) -> None:
    spec, weights = model
    sequences = native_sequences(spec, weights, make_kernels(threads=1), page_tokens=1, tokens=2048)
    span = sequences.decoder.rebuild.span_tokens
    cached = span + 40
    (text,) = random_texts(VOCAB, [cached + TAIL], seed=7)
    window_pages = list(sequences.free[PageKind.WINDOW])
    (whole,) = sequences.step([(0, text)])
    for first in (cached - span + 1, cached - span):
        lose_window(sequences, window_pages, 7e4)
        new_window_pages(sequences, 0, first - 1, cached + TAIL)
        forward(sequences, [(0, text, first, cached, cached)])
        tail = forward(sequences, [(0, text, cached, cached + TAIL, cached)])
        assert torch.equal(tail, whole[cached:]) == (first == cached - span)


def _full(sequences: PagedSequences, cached: int) -> Tensor:
    return sequences.tables[PageKind.FULL][0, : cached // sequences.page_tokens]
