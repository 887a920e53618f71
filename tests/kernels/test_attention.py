"""Attention over pages equals the plain definition, for any mix of rows, windows, page sizes and garbage in memory."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels import reference_attention
from kernels.interface import PagedKV, PageGeometry, StepRows
from kernels.reference import ReferenceKernels

HUGE = 1e30


@dataclass(slots=True, kw_only=True)
class Case:
    """Random contexts written into random pages; every other element of memory holds `garbage`."""

    q: Tensor
    kv: PagedKV
    rows: StepRows
    table: Tensor
    geometry: PageGeometry
    contexts: list[tuple[Tensor, Tensor]]
    sinks: Tensor | None
    window_keys: int | None


def make_case(
    spans: list[tuple[int, int]],
    *,
    window_keys: int | None,
    page_tokens: int,
    value_dim: int = 8,
    sinks: bool = False,
    kv_heads: int = 2,
    group: int = 3,
    garbage: float = 0.0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    torch.manual_seed(seed)
    generator = random.Random(seed)
    head_dim, pages_per_slab = 8, 3
    pages_of = [-(-(start + count) // page_tokens) for start, count in spans]
    slabs = -(-(sum(pages_of) + 2) // pages_per_slab)
    # Each slab ends in bytes that belong to no page, and each page in another layer's part.
    page_elements = kv_heads * page_tokens * (head_dim + value_dim) + 24
    memory = torch.full((slabs, pages_per_slab * page_elements + 40), garbage, dtype=dtype)

    def view(dim: int, offset: int) -> Tensor:
        return memory.as_strided(
            (slabs, pages_per_slab, kv_heads, page_tokens, dim),
            (memory.shape[1], page_elements, page_tokens * dim, dim, 1),
            offset,
        )

    kv = PagedKV(k=view(head_dim, 8), v=view(value_dim, 8 + kv_heads * page_tokens * head_dim))
    free = list(range(slabs * pages_per_slab))
    generator.shuffle(free)
    slots = generator.sample(range(len(spans) + 2), len(spans))
    # Entries that must not be followed point far outside.
    table = torch.full((len(spans) + 2, max(pages_of) + 2), 1_000_000, dtype=torch.int32)
    contexts = []
    for slot, (start, count) in zip(slots, spans, strict=True):
        k = torch.randn(kv_heads, start + count, head_dim).to(dtype)
        v = torch.randn(kv_heads, start + count, value_dim).to(dtype)
        contexts.append((k, v))
        first = 0 if window_keys is None else max(0, start - window_keys + 1)
        for position in range(first, start + count):
            logical, offset = divmod(position, page_tokens)
            if int(table[slot, logical]) == 1_000_000:
                table[slot, logical] = free.pop()
            slab, page = divmod(int(table[slot, logical]), pages_per_slab)
            kv.k[slab, page, :, offset] = k[:, position]
            kv.v[slab, page, :, offset] = v[:, position]
    tokens = sum(count for _, count in spans)
    return Case(
        q=torch.randn(tokens, kv_heads * group, head_dim).to(dtype),
        kv=kv,
        rows=StepRows(slots=tuple(slots), starts=tuple(s for s, _ in spans), counts=tuple(c for _, c in spans)),
        table=table,
        geometry=PageGeometry(page_tokens=page_tokens, pages_per_slab=pages_per_slab),
        contexts=contexts,
        sinks=torch.randn(kv_heads * group) if sinks else None,
        window_keys=window_keys,
    )


def attend(case: Case) -> Tensor:
    kernels = ReferenceKernels()
    plan = kernels.plan_attention(case.rows, case.table, case.geometry, case.window_keys)
    return kernels.attention(case.q, case.kv, plan, scale=0.4, sinks=case.sinks)


def definition(case: Case) -> Tensor:
    """One query and one head at a time, in float64."""
    outputs = []
    token = 0
    for (k, v), start, count in zip(case.contexts, case.rows.starts, case.rows.counts, strict=True):
        for position in range(start, start + count):
            first = 0 if case.window_keys is None else max(0, position - case.window_keys + 1)
            heads = []
            for head in range(case.q.shape[1]):
                kv_head = head // (case.q.shape[1] // k.shape[0])
                keys = k[kv_head, first : position + 1].double()
                weights = (keys @ case.q[token, head].double() * 0.4).exp()
                total = weights.sum()
                if case.sinks is not None:
                    total = total + case.sinks[head].double().exp()
                heads.append(weights @ v[kv_head, first : position + 1].double() / total)
            outputs.append(torch.stack(heads))
            token += 1
    return torch.stack(outputs)


SPANS = {
    "decode": [(0, 1), (40, 1), (5, 1), (90, 1), (33, 1)],
    "prefill": [(0, 50), (0, 70)],
    "chunks": [(37, 30), (3, 18), (64, 40)],
    "verify": [(50, 4), (7, 2), (0, 3), (20, 16)],
    "mixed": [(20, 1), (0, 45), (60, 4), (31, 20), (0, 1), (80, 1)],
}


@pytest.fixture(params=["default blocks", "small blocks"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks make short contexts cross every block boundary."""
    if request.param == "small blocks":
        monkeypatch.setattr(reference_attention, "WINDOW_BLOCK", 8)
        monkeypatch.setattr(reference_attention, "KEY_BLOCK", 16)
        monkeypatch.setattr(reference_attention, "FOLDED_TOKENS", 3)
        monkeypatch.setattr(reference_attention, "SHORT_PAGES", 1)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("value_dim", [8, 4])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("page_tokens", [1, 4, 16])
@pytest.mark.parametrize("window_keys", [None, 1, 7, 33])
@pytest.mark.parametrize("spans", SPANS)
def test_attention_is_its_definition(
    spans: str, window_keys: int | None, page_tokens: int, sinks: bool, value_dim: int
) -> None:
    case = make_case(
        SPANS[spans], window_keys=window_keys, page_tokens=page_tokens, sinks=sinks, value_dim=value_dim, garbage=HUGE
    )
    torch.testing.assert_close(attend(case), definition(case).float(), atol=2e-6, rtol=1e-5)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_batches(dtype: torch.dtype) -> None:
    generator = random.Random(7)
    for seed in range(40):
        spans = [
            (generator.randrange(60), generator.choice((1, 1, 2, 5, 17, 40))) for _ in range(generator.randint(1, 7))
        ]
        case = make_case(
            spans,
            window_keys=generator.choice((None, 1, 2, 9, 33, 500)),
            page_tokens=generator.choice((1, 2, 4, 16)),
            value_dim=generator.choice((4, 8)),
            sinks=generator.random() < 0.5,
            kv_heads=generator.choice((1, 2)),
            group=generator.choice((1, 3)),
            garbage=generator.choice((HUGE, -HUGE, 5.0)),
            dtype=dtype,
            seed=seed,
        )
        tolerance = 2e-6 if dtype == torch.float32 else 4e-2
        torch.testing.assert_close(attend(case).double(), definition(case), atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("value_dim", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window_keys", [None, 7])
def test_memory_that_no_query_sees_changes_no_bit(window_keys: int | None, dtype: torch.dtype, value_dim: int) -> None:
    results = [
        attend(
            make_case(
                SPANS["mixed"],
                window_keys=window_keys,
                page_tokens=4,
                sinks=True,
                value_dim=value_dim,
                garbage=garbage,
                dtype=dtype,
            )
        )
        for garbage in (0.0, 1.0, HUGE, -HUGE, float("inf"), float("nan"))
    ]
    for result in results[1:]:
        assert torch.equal(results[0], result)


def test_long_rows_do_not_pad_short_ones() -> None:
    case = make_case([(500, 1), (3, 1), (450, 1), (20, 1)], window_keys=None, page_tokens=1)
    plan = reference_attention.plan_attention(case.rows, case.table, case.geometry, None)
    assert sorted(folded.hidden.shape[0] for folded in plan.folded) == [1, 1, 2]
    gathered = sum(folded.hidden.shape[0] * folded.hidden.shape[-1] for folded in plan.folded)
    assert gathered <= 2 * (501 + 4 + 451 + 21)


def test_a_window_layer_gathers_no_context() -> None:
    case = make_case([(900, 60), (900, 1)], window_keys=17, page_tokens=4)
    plan = reference_attention.plan_attention(case.rows, case.table, case.geometry, 17)
    pages = [folded.pages for folded in plan.folded] + [keys.pages for block in plan.blocks for keys in block.keys]
    assert max(index.slab.shape[1] for index in pages) <= (60 + 16) // 4 + 2
