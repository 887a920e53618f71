"""A lost window is rebuilt exactly: by what depends on what, and not by a tolerance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from server.model.batch import Batch, rows_by_layer
from server.model.spec import ModelSpec
from server.model.weights import Weights
from server.rebuild import RebuildShape, shape_of
from server.step import PageId, PageKind
from tests.model.checkpoints import load_folder
from tests.model.paged import POISON, PagedSequences, random_texts
from tests.model.test_parity import MODELS, TOLERANCE, randomize

HUGE = 2.0 * POISON
TAIL = 9
"""Tokens of the prompt after the resume point."""


class Resumed:
    """One sequence whose full K/V of the first `cached` positions are there, and whose window K/V are all `poison`."""

    def __init__(self, spec: ModelSpec, weights: Weights, cached: int, *, poison: float = HUGE) -> None:
        self.sequences = PagedSequences(spec, weights, tokens=1024, slots=2, seed=3)
        window_pages = list(self.sequences.free[PageKind.WINDOW])
        self.cached = cached
        (self.text,) = random_texts(spec.vocab, [cached + TAIL])
        self.sequences.step([(0, self.text[:cached])])
        arena = self.sequences.arena
        for page in window_pages:
            arena.page_bytes(PageKind.WINDOW, PageId(page)).view(arena.dtype).fill_(poison)

    def full_kv(self) -> list[Tensor]:
        """Copies of K and V of every full layer in the pages that are cached."""
        arena, count = self.sequences.arena, self.cached // self.sequences.page_tokens
        ids = self.sequences.tables[PageKind.FULL][0, :count].long()
        places = ids // arena.pages_per_slab(PageKind.FULL), ids % arena.pages_per_slab(PageKind.FULL)
        layers = zip(self.sequences.spec.layers, arena.layers, strict=True)
        return [tensor[places] for layer, kv in layers if not layer.is_window for tensor in (kv.k, kv.v)]

    def rebuild(self, start: int, chunk: int) -> None:
        """Positions [start, cached), in window pages of their own."""
        sequences = self.sequences
        sequences._map(0, len(self.text))
        for logical in range(start // sequences.page_tokens, -(-self.cached // sequences.page_tokens)):
            sequences.tables[PageKind.WINDOW][0, logical] = sequences.free[PageKind.WINDOW].pop()
        for at in range(start, self.cached, chunk):
            self.run(at, min(self.cached, at + chunk))

    def run(self, start: int, stop: int) -> Tensor:
        """Positions [start, stop) -> logits"""
        tables, decoder = self.sequences.tables, self.sequences.decoder
        rows = [(0, start, stop - start)]
        batch = Batch(rows, tables[PageKind.FULL], tables[PageKind.WINDOW], cached=[self.cached])
        hidden = decoder.forward(torch.tensor(self.text[start:stop]), batch, self.sequences.arena)
        return decoder.logits(hidden)

    def tail(self) -> Tensor:
        return self.run(self.cached, len(self.text))


NOTHING_EARLIER = "gpt_oss-uneven-layers-short-yarn"  # whose window layers see the query's own key only
HYBRIDS = {name: make for name, make in MODELS.items() if not name.startswith("llama") and name != NOTHING_EARLIER}
CACHED = 240


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelSpec, Weights, RebuildShape, Tensor]:
    """With the logits of the tail as they are when nothing was lost."""
    torch.manual_seed(0)
    oracle = HYBRIDS[request.param]().eval().float()
    randomize(oracle)
    folder = tmp_path_factory.mktemp("checkpoint")
    oracle.save_pretrained(folder)
    spec, weights = load_folder(folder)
    shape = shape_of([layer.is_window for layer in spec.layers], window_tokens=spec.window_tokens, mtp_layers=0)
    assert 0 < shape.span_tokens < CACHED
    (text,) = random_texts(spec.vocab, [CACHED + TAIL])
    (logits,) = PagedSequences(spec, weights, tokens=1024, seed=3).step([(0, text)])
    return spec, weights, shape, logits[CACHED:]


Hybrid = tuple[ModelSpec, Weights, RebuildShape, Tensor]


@pytest.mark.parametrize("chunk", [1_000, 64, 7])
def test_what_follows_a_rebuild_is_what_follows_the_prompt(hybrid: Hybrid, chunk: int) -> None:
    spec, weights, shape, wanted = hybrid
    resumed = Resumed(spec, weights, CACHED)
    before = resumed.full_kv()
    resumed.rebuild(CACHED - shape.span_tokens, chunk)
    assert all(map(torch.equal, before, resumed.full_kv())), "a rebuild writes no full K/V"
    assert (resumed.tail() - wanted).abs().max() < TOLERANCE


def test_it_depends_on_nothing_outside_its_rows_and_on_the_first_of_them(hybrid: Hybrid) -> None:
    spec, weights, shape, _ = hybrid
    start = CACHED - shape.span_tokens
    tails = []
    for poison, first in ((HUGE, start), (-HUGE / 3, start), (HUGE, start + 1)):
        resumed = Resumed(spec, weights, CACHED, poison=poison)
        resumed.rebuild(first, 64)
        tails.append(resumed.tail())
    assert torch.equal(tails[0], tails[1])
    assert not torch.equal(tails[0], tails[2])


def test_a_rebuild_shares_its_step_with_others(hybrid: Hybrid) -> None:
    """Rows of a prompt, of a decode and of a rebuild side by side: nobody notices."""
    spec, weights, shape, wanted = hybrid
    resumed = Resumed(spec, weights, CACHED)
    start = CACHED - shape.span_tokens
    resumed.rebuild(start, 10_000)
    sequences = resumed.sequences
    (other,) = random_texts(spec.vocab, [50], seed=9)
    (alone,) = PagedSequences(spec, weights, tokens=1024, seed=3).step([(1, other)])
    sequences._map(1, len(other))
    tables = sequences.tables
    batch = Batch(
        [(1, 0, 50), (0, start, CACHED + TAIL - start)],
        tables[PageKind.FULL],
        tables[PageKind.WINDOW],
        cached=[0, CACHED],
    )
    tokens = torch.tensor(other + resumed.text[start:])
    logits = sequences.decoder.logits(sequences.decoder.forward(tokens, batch, sequences.arena))
    assert (logits[:50] - alone).abs().max() < TOLERANCE
    assert (logits[-TAIL:] - wanted).abs().max() < TOLERANCE


@pytest.mark.parametrize("mtp_layers", [0, 3])
@pytest.mark.parametrize("window", [128, 129])
@pytest.mark.parametrize("chunk", [100_000, 512, 100])
def test_each_layer_runs_the_rows_of_the_trapezoid(window: int, mtp_layers: int, chunk: int) -> None:
    is_window = [layer not in (0, 3, 7) for layer in range(8)]
    shape = shape_of(is_window, window_tokens=window, mtp_layers=mtp_layers)
    cached, windows = 5_000, sum(is_window)
    top = window if mtp_layers else 0
    assert shape.span_tokens == windows * window + top
    tables = torch.zeros(1, 400, dtype=torch.int32)
    fed: list[list[int]] = [[] for _ in is_window]
    out: list[list[int]] = [[] for _ in is_window]
    start = cached - shape.span_tokens
    for at in range(start, cached + 40, chunk):
        stop = min(cached + 40, at + chunk)
        batch = Batch([(0, at, stop - at)], tables, tables, cached=[cached])
        for layer, rows in enumerate(rows_by_layer(batch, shape)):
            fed[layer] += rows.fed.positions.tolist()
            out[layer] += rows.out.positions.tolist()
    for layer in range(8):
        above = sum(is_window[layer + 1 :]) * window + top
        assert out[layer] == list(range(cached - above, cached + 40))
        assert fed[layer] == list(range(cached - above - window * is_window[layer], cached + 40))
