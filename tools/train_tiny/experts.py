"""Gated MLPs: one for all tokens, and the experts that each token chose."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from tools.train_tiny import passes

ROWS = 64
"""Each expert's rows are filled up to a whole number of these. A product of a size that was not seen before is compiled
first, which takes as long as the product itself, and the experts' loads never come to an end of sizes."""


def glu(inner: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2W], gate first"""
    return _GLU.apply(inner)  # type: ignore[no-any-return]


def routed_experts(x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """x [T, M], chosen and shares [T, A], gate_up [E, 2W, M], down [E, M, W] -> [T, M]"""
    return _Experts.apply(x, chosen, shares, gate_up, down)  # type: ignore[no-any-return]


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: Tensor) -> Tensor:
        ctx.save_for_backward(inner)
        return passes.glu_forward(inner.flatten(0, -2)).unflatten(0, inner.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (inner,) = ctx.saved_tensors
        return passes.glu_backward(gradient.flatten(0, -2), inner.flatten(0, -2)).view_as(inner)


class _Experts(torch.autograd.Function):
    """Rows are sorted by expert, so each expert is a few dense products. Written out because autograd would scatter
    rows back with index_add, which is slow, where a gather by the inverse order does the same.

    Rows that fill up are copies of token 0 with a share of 0: nothing reads them, and their gradients are zeros.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        active, experts = chosen.shape[1], down.shape[0]
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=experts)
        filled = -(-counts // ROWS) * ROWS
        ends = [0, *accumulate(filled.tolist())]
        place = torch.empty_like(order)
        shift = (filled - counts).cumsum(0) - (filled - counts)
        place[order] = torch.arange(order.numel()) + shift.repeat_interleave(counts)
        source, row_shares = order.new_zeros(ends[-1]), shares.new_zeros(ends[-1])
        source[place] = torch.arange(order.numel()) // active
        row_shares[place] = shares.flatten()
        rows = x[source]
        inner, out = x.new_empty(rows.shape[0], gate_up.shape[1]), torch.empty_like(rows)
        for e, (start, stop) in enumerate(pairwise(ends)):
            torch.mm(rows[start:stop], gate_up[e].T, out=inner[start:stop])
        product = passes.glu_forward(inner)
        for e, (start, stop) in enumerate(pairwise(ends)):
            torch.mm(product[start:stop], down[e].T, out=out[start:stop])
        ctx.save_for_backward(rows, inner, product, out, source, row_shares, place, gate_up, down)
        ctx.ends, ctx.chosen_shape = ends, chosen.shape
        return torch.bmm(shares.to(x.dtype)[:, None], out[place].view(-1, active, x.shape[1]))[:, 0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, inner, product, out, source, row_shares, place, gate_up, down = ctx.saved_tensors
        ends = ctx.ends
        gathered = gradient[source]
        for_shares = (gathered * out).sum(-1, dtype=torch.float32)[place].view(ctx.chosen_shape)
        for_out = gathered * row_shares[:, None].to(gradient.dtype)
        for_product, for_rows = torch.empty_like(product), torch.empty_like(rows)
        for_gate_up, for_down = torch.zeros_like(gate_up), torch.zeros_like(down)
        for e, (start, stop) in enumerate(pairwise(ends)):
            torch.mm(for_out[start:stop], down[e], out=for_product[start:stop])
            torch.mm(for_out[start:stop].T, product[start:stop], out=for_down[e])
        for_inner = passes.glu_backward(for_product, inner)
        for e, (start, stop) in enumerate(pairwise(ends)):
            torch.mm(for_inner[start:stop], gate_up[e], out=for_rows[start:stop])
            torch.mm(for_inner[start:stop].T, rows[start:stop], out=for_gate_up[e])
        for_x = for_rows[place].view(*ctx.chosen_shape, rows.shape[1]).sum(1)
        return for_x, None, for_shares, for_gate_up, for_down
