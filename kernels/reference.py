"""The torch reference: every kernel in plain torch, on any device. It is the specification of the other backends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.interface import (
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    Activation,
    PagedKV,
    PageGeometry,
    RouterKind,
    StepRows,
    WriteIndex,
)
from kernels.packing import Packing, WholePacking
from kernels.quantized import Matrix, dense
from kernels.reference_attention import AttentionPlan, paged_attention, plan_attention


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    values = x.float()
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True).add_(eps))
    return (values * scale).mul_(weight).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    rotary_dim = cos.shape[-1]
    rotated = x[..., :rotary_dim]
    swapped = torch.roll(rotated, rotary_dim // 2, -1)
    rotated.mul_(cos).addcmul_(swapped, sin)


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate).mul_(up)
    if activation == "clamped_swiglu":
        gate, up = gate.float().clamp(max=SWIGLU_LIMIT), up.float().clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return ((up + 1) * gate * torch.sigmoid(SWIGLU_ALPHA * gate)).to(gate_up.dtype)
    return F.gelu(gate, approximate="tanh").mul_(up)


def route(
    x: Tensor, router: Tensor, bias: Tensor, *, kind: RouterKind, active: int, normalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    if kind == "softmax":
        best = torch.topk(F.linear(x.float(), router, bias), active, dim=-1, sorted=False)
        return best.indices, torch.softmax(best.values, -1) * scale
    scores = torch.sigmoid(F.linear(x.float(), router))
    chosen = torch.topk(scores + bias, active, dim=-1, sorted=False).indices
    weights = scores.gather(1, chosen)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * scale


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Matrix,
    down: Matrix,
    activation: Activation,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Tokens are sorted by expert, so each expert that is hit is one pair of matrix products, dequantized once."""
    active = chosen.shape[1]
    order = torch.argsort(chosen.flatten(), stable=True)
    tokens = order // active
    per_expert = torch.bincount(chosen.flatten(), minlength=gate_up.shape[0]).tolist()
    gathered = x[tokens]
    result = torch.empty_like(gathered)
    start = 0
    for expert, count in enumerate(per_expert):
        if count:
            span = slice(start, start + count)
            inner_bias = None if gate_up_bias is None else gate_up_bias[expert]
            outer_bias = None if down_bias is None else down_bias[expert]
            inner = gated(F.linear(gathered[span], dense(gate_up[expert], x.dtype), inner_bias), activation)
            result[span] = F.linear(inner, dense(down[expert], x.dtype), outer_bias)
            start += count
    weighted = torch.empty_like(result)
    weighted[order] = result * weights.flatten()[order, None].to(result.dtype)
    return weighted.view(x.shape[0], active, -1).sum(1)


class ReferenceKernels:
    """Implements kernels.interface.Kernels."""

    @property
    def description(self) -> str:
        return "torch, the plain reference"

    def plan_attention(
        self, rows: StepRows, table: Tensor, geometry: PageGeometry, window_keys: int | None
    ) -> AttentionPlan:
        return plan_attention(rows, table, geometry, window_keys)

    def attention(self, q: Tensor, kv: PagedKV, plan: AttentionPlan, *, scale: float, sinks: Tensor | None) -> Tensor:
        return paged_attention(q, kv, plan, scale=scale, sinks=sinks)

    def write_kv(self, kv: PagedKV, k: Tensor, v: Tensor, index: WriteIndex) -> None:
        kv.k[index.slab, index.page, :, index.offset] = k
        kv.v[index.slab, index.page, :, index.offset] = v

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        rope(x, cos, sin)

    def pack(self, weight: Matrix) -> Matrix:
        return weight

    def packing(self, shape: Sequence[int]) -> Packing:
        return WholePacking(shape, self.pack)

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, dense(weight, x.dtype), bias)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return gated(gate_up, activation)

    def route(
        self,
        x: Tensor,
        router: Tensor,
        bias: Tensor,
        *,
        kind: RouterKind,
        active: int,
        normalize: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        return route(x, router, bias, kind=kind, active=active, normalize=normalize, scale=scale)

    def experts(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        gate_up: Matrix,
        down: Matrix,
        activation: Activation,
        *,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor:
        return experts(x, chosen, weights, gate_up, down, activation, gate_up_bias=gate_up_bias, down_bias=down_bias)
