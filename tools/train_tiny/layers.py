"""One decoder layer with gradients, built from the `LayerSpec` that the server builds its own from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from server.model.fused_qkv import qkv_rows
from server.model.spec import AttentionSpec, DenseSpec, LayerSpec, MoESpec, RopeSpec
from tools.train_tiny import passes
from tools.train_tiny.attention import Rotation, attention
from tools.train_tiny.experts import glu, routed_experts

Rotations = dict[RopeSpec, Rotation]


@dataclass(slots=True, kw_only=True)
class RouterLoad:
    """counted [B, T]: all tokens but padding. tokens: how many of them chose each expert [E], layer by layer."""

    counted: Tensor
    tokens: list[Tensor] = field(default_factory=list)


class Attention(nn.Module):
    def __init__(self, hidden: int, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec
        rows = qkv_rows(spec)
        self.q, self.k, self.v = (matrix(rows[part], hidden) for part in "qkv")
        self.o = matrix(hidden, spec.heads * spec.value_dim)
        self.sinks = nn.Parameter(torch.zeros(spec.heads)) if spec.sinks else None

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """x [B, T, M] -> [B, T, M]"""
        qkv = F.linear(x, torch.cat((self.q, self.k, self.v)).to(x.dtype))
        attended = attention(qkv, self.sinks, rotation, self.spec)
        # The scale of v is a factor of the result as much as of v.
        return F.linear(attended * self.spec.value_scale, self.o.to(x.dtype))


class Dense(nn.Module):
    def __init__(self, hidden: int, spec: DenseSpec) -> None:
        super().__init__()
        self.gate, self.up = matrix(spec.width, hidden), matrix(spec.width, hidden)
        self.down = matrix(hidden, spec.width)

    def forward(self, x: Tensor, load: RouterLoad | None) -> Tensor:
        inner = F.linear(x, torch.cat((self.gate, self.up)).to(x.dtype))
        return F.linear(glu(inner), self.down.to(x.dtype))


class MoE(nn.Module):
    """router_bias steers which experts are chosen. It is moved by their load, not by gradients."""

    router_bias: Tensor

    def __init__(self, hidden: int, spec: MoESpec) -> None:
        super().__init__()
        self.spec = spec
        self.router = matrix(spec.experts, hidden)
        self.register_buffer("router_bias", torch.zeros(spec.experts))
        self.gate, self.up = (matrix(spec.width, hidden, spec.experts) for _ in range(2))
        self.down = matrix(hidden, spec.width, spec.experts)

    def forward(self, x: Tensor, load: RouterLoad | None) -> Tensor:
        flat = x.flatten(0, -2)
        chosen, shares = self.route(flat)
        if load is not None:
            load.tokens.append(chosen[load.counted.flatten()].flatten().bincount(minlength=self.spec.experts))
        gate_up = torch.cat((self.gate, self.up), 1).to(x.dtype)
        return routed_experts(flat, chosen, shares, gate_up, self.down.to(x.dtype)).view_as(x)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, M] -> chosen [T, A], shares [T, A] fp32. Source: arXiv 2412.19437, section 2.1.2."""
        scores = F.linear(x.float(), self.router).sigmoid()
        chosen = (scores.detach() + self.router_bias).topk(self.spec.active, -1).indices
        shares = scores.gather(-1, chosen)
        if self.spec.normalize:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
        return chosen, shares * self.spec.routed_scale

    @torch.no_grad()
    def balance(self, tokens: Tensor, step: float) -> None:
        """Experts with more than the mean load become less likely to be chosen, the others more. Source: arXiv
        2408.15664, algorithm 1. The mean is taken out: it chooses nothing."""
        self.router_bias += step * (tokens.float().mean() - tokens).sign()
        self.router_bias -= self.router_bias.mean()


class Layer(nn.Module):
    def __init__(self, hidden: int, spec: LayerSpec, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.rope = spec.attention.rope
        self.attention_norm, self.mlp_norm = norm_weight(hidden), norm_weight(hidden)
        self.attention = Attention(hidden, spec.attention)
        self.mlp = MoE(hidden, spec.mlp) if isinstance(spec.mlp, MoESpec) else Dense(hidden, spec.mlp)

    def forward(self, x: Tensor, rotations: Rotations, load: RouterLoad | None = None) -> Tensor:
        x = x + self.attention(rms_norm(x, self.attention_norm, self.eps), rotations[self.rope])
        return x + self.mlp(rms_norm(x, self.mlp_norm, self.eps), load)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In fp32, rounded at the end, as `kernels.interface.Kernels.rms_norm`."""
    return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        normed, inverse = passes.norm_forward(rows, weight, eps)
        ctx.save_for_backward(rows, weight, inverse)
        return normed.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        for_x, for_weight = passes.norm_backward(gradient.reshape(-1, gradient.shape[-1]), *ctx.saved_tensors)
        return for_x.view_as(gradient), for_weight, None


def matrix(rows: int, columns: int, *stack: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*stack, rows, columns))


def norm_weight(hidden: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(hidden))
