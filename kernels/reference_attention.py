"""Attention over page tables in plain torch.

A plan is built once per step and window and shared by the layers. Short rows (decode, verify) are folded: rows of
similar length go through one padded gather, with the queries of a KV head's group on one axis. Long rows (prefill
chunks) go block by block; a block reads only the keys that it sees, so a window layer never gathers a context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from kernels.interface import PagedKV, PageGeometry, StepRows

Role = Literal["k", "v"]

FOLDED_TOKENS = 16
"""Rows of up to this many tokens are folded together."""

WINDOW_BLOCK = 256
"""Queries of a window layer that share one gather of keys."""

KEY_BLOCK = 2048
"""Keys of a full layer that are gathered at a time; blocks are merged by their log-sum-exp."""

SHORT_PAGES = 8
"""Rows of up to this many pages share a bucket whatever their ratio."""


@dataclass(slots=True, kw_only=True)
class PageIndex:
    """Pages [N, P] as slab and index in the slab. Gathers them from a view as [N, K, P * page_tokens, D]."""

    slab: Tensor
    page: Tensor
    _units: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    _scratch: dict[tuple[Role, int], Tensor] = field(default_factory=dict)

    def gather(self, view: Tensor, role: Role) -> Tensor:
        """One index_select over overlapping rows of page_tokens * D elements, several times faster than view[a, b, c].

        view [slabs, pages_per_slab, K, page_tokens, D]. The result is good until the next gather for the same role:
        layers share the memory, as fresh pages from the system cost more than the copy.
        """
        slab_stride, page_stride, head_stride, _, _ = view.stride()
        kv_heads, page_tokens, dim = view.shape[2:]
        row = page_tokens * dim
        unit = math.gcd(slab_stride, page_stride, head_stride, row)
        key = (slab_stride, page_stride, head_stride, kv_heads, unit)
        index = self._units.get(key)
        if index is None:
            page = (self.slab * slab_stride + self.page * page_stride) // unit
            head = torch.arange(kv_heads, device=page.device) * (head_stride // unit)
            index = self._units[key] = (page[:, None, :] + head[None, :, None]).flatten()
        last = (view.shape[0] - 1) * slab_stride + (view.shape[1] - 1) * page_stride + (kv_heads - 1) * head_stride
        rows = view.as_strided((last // unit + 1, row), (unit, 1), view.storage_offset())
        scratch = self._scratch.get((role, row))
        if scratch is None or scratch.shape[0] != index.shape[0]:
            scratch = self._scratch[role, row] = view.new_empty(index.shape[0], row)
        return torch.index_select(rows, 0, index, out=scratch).view(self.slab.shape[0], kv_heads, -1, dim)


@dataclass(slots=True, kw_only=True)
class FoldedRows:
    """N short rows of up to R tokens. tokens [N * R] indexes the step's tokens; a row with fewer repeats its last, and
    kept then lists the entries that count. hidden [N, 1, R, S] marks keys that a query does not see.

    blank lists the gathered keys (n, s) that no query of row n sees: they may be unwritten memory, and 0 times an
    infinite V is not 0, so their V is zeroed.
    """

    pages: PageIndex
    tokens: Tensor
    kept: Tensor | None
    hidden: Tensor
    blank: tuple[Tensor, Tensor]
    _blank_rows: dict[int, Tensor] = field(default_factory=dict)

    def gather_k(self, view: Tensor) -> Tensor:
        """Scores of blank keys are overwritten by the mask, so K stays as it is."""
        return self.pages.gather(view, "k")

    def gather_v(self, view: Tensor) -> Tensor:
        gathered = self.pages.gather(view, "v")
        kv_heads, keys = gathered.shape[1:3]
        rows = self._blank_rows.get(kv_heads)
        if rows is None:
            row, key = self.blank
            head = torch.arange(kv_heads, device=row.device)
            rows = self._blank_rows[kv_heads] = ((row[:, None] * kv_heads + head) * keys + key[:, None]).flatten()
        gathered.view(-1, gathered.shape[-1]).index_fill_(0, rows, 0)
        return gathered


@dataclass(slots=True, kw_only=True)
class KeyBlock:
    """Keys [first, last) of the gathered pages of one row. hidden [R, S], or None when every query sees every key."""

    pages: PageIndex
    first: int
    last: int
    hidden: Tensor | None
    _additive: Tensor | None = None

    def additive(self, dtype: torch.dtype) -> Tensor | None:
        """The mask as [1, 1, R, S] to add to scores."""
        if self._additive is None and self.hidden is not None:
            zeros = torch.zeros(self.hidden.shape, dtype=dtype, device=self.hidden.device)
            self._additive = zeros.masked_fill_(self.hidden, -math.inf)[None, None]
        return self._additive


@dataclass(slots=True, kw_only=True)
class QueryBlock:
    """Tokens [start, stop) of the step, all of one row, and the keys they see."""

    start: int
    stop: int
    keys: list[KeyBlock]


@dataclass(slots=True, kw_only=True)
class AttentionPlan:
    folded: list[FoldedRows]
    blocks: list[QueryBlock]


def plan_attention(rows: StepRows, table: Tensor, geometry: PageGeometry, window_keys: int | None) -> AttentionPlan:
    plan = AttentionPlan(folded=[], blocks=[])
    short: dict[bool, list[tuple[int, int, int, int]]] = {False: [], True: []}
    token = 0
    for slot, start, count in zip(rows.slots, rows.starts, rows.counts, strict=True):
        if count <= FOLDED_TOKENS:
            short[count > 1].append((token, slot, start, count))
        elif window_keys is None:
            plan.blocks.append(_full_block(table[slot], token, start, count, geometry))
        else:
            plan.blocks += _window_blocks(table[slot], token, start, count, geometry, window_keys)
        token += count
    for group in short.values():
        for bucket in _buckets(group, geometry.page_tokens, window_keys):
            plan.folded.append(_fold(bucket, table, geometry, window_keys))
    return plan


def paged_attention(q: Tensor, kv: PagedKV, plan: AttentionPlan, *, scale: float, sinks: Tensor | None) -> Tensor:
    """q [T, H, D] -> [T, H, V]"""
    kv_heads = kv.k.shape[2]
    out = q.new_empty(q.shape[0], q.shape[1], kv.v.shape[-1])
    for folded in plan.folded:
        _attend_folded(out, q, kv, folded, scale, sinks)
    for block in plan.blocks:
        span = slice(block.start, block.stop)
        grouped = q[span].view(block.stop - block.start, kv_heads, -1, q.shape[-1]).permute(1, 2, 0, 3)  # [K, G, R, D]
        attended = _attend_block(grouped, kv, block, scale, sinks)
        out[span] = attended.permute(2, 0, 1, 3).flatten(1, 2)
    return out


def _first_key(position: int, window_keys: int | None) -> int:
    return 0 if window_keys is None else max(0, position - window_keys + 1)


def _buckets(
    rows: list[tuple[int, int, int, int]], page_tokens: int, window_keys: int | None
) -> list[list[tuple[int, int, int, int]]]:
    """Rows by the pages they read: the longest of a bucket reads at most twice as many as the shortest."""

    def pages(row: tuple[int, int, int, int]) -> int:
        _, _, start, count = row
        return (start + count - 1) // page_tokens - _first_key(start, window_keys) // page_tokens + 1

    buckets: list[list[tuple[int, int, int, int]]] = []
    longest = 0
    for row in sorted(rows, key=pages, reverse=True):
        if buckets and (longest <= SHORT_PAGES or 2 * pages(row) >= longest):
            buckets[-1].append(row)
        else:
            buckets.append([row])
            longest = pages(row)
    return buckets


def _fold(
    rows: list[tuple[int, int, int, int]], table: Tensor, geometry: PageGeometry, window_keys: int | None
) -> FoldedRows:
    device, page_tokens = table.device, geometry.page_tokens
    token, slot, start, count = torch.tensor(rows, device=device).unbind(1)  # [N]
    stop = start + count
    first_key = torch.zeros_like(start) if window_keys is None else (start - window_keys + 1).clamp_(min=0)
    first_page = first_key // page_tokens
    last_page = (stop - 1) // page_tokens
    longest_row = max(row[3] for row in rows)
    most_pages = max((s + c - 1) // page_tokens - _first_key(s, window_keys) // page_tokens + 1 for _, _, s, c in rows)
    numbers = first_page[:, None] + torch.arange(most_pages, device=device)  # [N, P]
    # A shorter row repeats its last page rather than follow entries that are not its own.
    ids = table[slot[:, None], torch.minimum(numbers, last_page[:, None])].long()
    key_at = (numbers[:, :, None] * page_tokens + torch.arange(page_tokens, device=device)).flatten(1)  # [N, S]
    step = torch.minimum(torch.arange(longest_row, device=device), count[:, None] - 1)  # [N, R]
    query_at = start[:, None] + step
    hidden = key_at[:, None, :] > query_at[:, :, None]
    if window_keys is not None:
        hidden |= key_at[:, None, :] <= query_at[:, :, None] - window_keys
    blank = (key_at >= stop[:, None]) | (key_at < first_key[:, None])
    padded = any(row[3] != longest_row for row in rows)
    real = torch.arange(longest_row, device=device) < count[:, None]
    return FoldedRows(
        pages=_page_index(ids, geometry),
        tokens=(token[:, None] + step).flatten(),
        kept=real.flatten().nonzero()[:, 0] if padded else None,
        hidden=hidden[:, None],
        blank=tuple(blank.nonzero().unbind(1)),  # type: ignore[arg-type]
    )


def _page_index(ids: Tensor, geometry: PageGeometry) -> PageIndex:
    slab = ids // geometry.pages_per_slab
    return PageIndex(slab=slab, page=ids - slab * geometry.pages_per_slab)


def _key_block(entries: Tensor, first: int, last: int, geometry: PageGeometry, hidden: Tensor | None) -> KeyBlock:
    """Keys at positions [first, last) of the row whose page table is `entries`."""
    first_page = first // geometry.page_tokens
    ids = entries[first_page : -(-last // geometry.page_tokens)].long()[None]
    origin = first_page * geometry.page_tokens
    return KeyBlock(pages=_page_index(ids, geometry), first=first - origin, last=last - origin, hidden=hidden)


def _full_block(entries: Tensor, token: int, start: int, count: int, geometry: PageGeometry) -> QueryBlock:
    """Earlier keys need no mask; only the chunk's own keys do."""
    keys = [
        _key_block(entries, first, min(first + KEY_BLOCK, start), geometry, None)
        for first in range(0, start, KEY_BLOCK)
    ]
    own = torch.ones(count, count, dtype=torch.bool, device=entries.device).triu_(1)
    keys.append(_key_block(entries, start, start + count, geometry, own))
    return QueryBlock(start=token, stop=token + count, keys=keys)


def _window_blocks(
    entries: Tensor, token: int, start: int, count: int, geometry: PageGeometry, window_keys: int
) -> list[QueryBlock]:
    blocks = []
    for done in range(0, count, WINDOW_BLOCK):
        queries = min(WINDOW_BLOCK, count - done)
        position = start + done
        first = _first_key(position, window_keys)
        query_at = torch.arange(position, position + queries, device=entries.device)[:, None]
        key_at = torch.arange(first, position + queries, device=entries.device)
        hidden = (key_at > query_at) | (key_at <= query_at - window_keys)
        keys = [_key_block(entries, first, position + queries, geometry, hidden)]
        blocks.append(QueryBlock(start=token + done, stop=token + done + queries, keys=keys))
    return blocks


def _attend_folded(out: Tensor, q: Tensor, kv: PagedKV, folded: FoldedRows, scale: float, sinks: Tensor | None) -> None:
    k, v = folded.gather_k(kv.k), folded.gather_v(kv.v)  # [N, K, S, D], [N, K, S, V]
    rows, kv_heads = k.shape[:2]
    tokens = folded.hidden.shape[2]
    queries = q[folded.tokens].view(rows, tokens, kv_heads, -1, q.shape[-1])  # [N, R, K, G, D]
    group = queries.shape[3]
    queries = queries.permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, group * tokens, -1)
    # The products stay in K's dtype, so bf16 scores are rounded once before the fp32 softmax: torch has no bf16 product
    # with an fp32 result on CPU, and widening K and V first takes three times as long.
    scores = torch.matmul(queries, k.transpose(-1, -2)).float().mul_(scale)
    scores = scores.view(rows, kv_heads, group, tokens, -1).masked_fill_(folded.hidden[:, :, None], -math.inf)
    shares = _softmax(scores, sinks)
    attended = torch.matmul(shares.view(rows, kv_heads, group * tokens, -1).to(v.dtype), v)
    attended = attended.view(rows, kv_heads, group, tokens, -1).permute(0, 3, 1, 2, 4).reshape(rows * tokens, -1)
    flat = out.view(out.shape[0], -1)
    if folded.kept is None:
        flat[folded.tokens] = attended
    else:
        flat[folded.tokens[folded.kept]] = attended[folded.kept]


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the last axis of scores [N, K, G, R, S] fp32; a sink adds exp(sink) to the denominator and no value."""
    if sinks is None:
        return torch.softmax(scores, -1)
    sink = sinks.view(scores.shape[1], scores.shape[2], 1, 1)
    top = torch.maximum(scores.amax(-1, keepdim=True), sink)
    weights = torch.exp(scores - top)
    return weights / (weights.sum(-1, keepdim=True) + torch.exp(sink - top))


def _attend_block(queries: Tensor, kv: PagedKV, block: QueryBlock, scale: float, sinks: Tensor | None) -> Tensor:
    """queries [K, G, R, D] -> [K, G, R, V], over key blocks merged by their log-sum-exp."""
    parts = [_attend_keys(queries, kv, keys, scale) for keys in block.keys]
    total = parts[0][1] if len(parts) == 1 else torch.logsumexp(torch.stack([lse for _, lse in parts]), 0)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.view(*queries.shape[:2], 1))
    elif len(parts) == 1:
        return parts[0][0]
    merged = sum(attended.float() * torch.exp(lse - total)[..., None] for attended, lse in parts)
    return merged.to(queries.dtype)  # type: ignore[union-attr]


def _attend_keys(queries: Tensor, kv: PagedKV, keys: KeyBlock, scale: float) -> tuple[Tensor, Tensor]:
    """Attention over one key block and the log-sum-exp of its scores: [K, G, R, V], [K, G, R] fp32."""
    k = keys.pages.gather(kv.k, "k")[0, :, None, keys.first : keys.last]  # [K, 1, S, D]
    v = keys.pages.gather(kv.v, "v")[0, :, None, keys.first : keys.last]
    if queries.device.type == "cpu" and k.shape[-1] == v.shape[-1]:
        return _flash_on_cpu(queries, k, v, keys, scale)
    scores = torch.matmul(queries.float(), k.float().transpose(-1, -2)).mul_(scale)
    if keys.hidden is not None:
        scores.masked_fill_(keys.hidden, -math.inf)
    lse = torch.logsumexp(scores, -1)
    return torch.matmul(torch.exp(scores - lse[..., None]), v.float()), lse


def _flash_on_cpu(queries: Tensor, k: Tensor, v: Tensor, keys: KeyBlock, scale: float) -> tuple[Tensor, Tensor]:
    """torch's own tiled kernel behind scaled_dot_product_attention, called directly for its log-sum-exp."""
    shape = (queries.shape[0], queries.shape[1], k.shape[2], k.shape[3])
    attended, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, k.expand(shape), v.expand(shape), attn_mask=keys.additive(queries.dtype), scale=scale
    )
    return attended, lse
