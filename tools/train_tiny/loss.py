"""Next-token loss over chosen rows, with the head's product inside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train_tiny import passes

ROWS = 2048
"""Rows whose logits exist at once: they stay in the cache between the product, the softmax and the next product."""
FILL = 128
"""Rows are filled up to a whole number of these, with weight 0: see `tools.train_tiny.experts.ROWS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """value: the mean of the rows by weight, with a gradient. hits: which rows' largest logit is the target's."""

    value: Tensor
    hits: Tensor


def head_loss(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Loss:
    """hidden [R, M], head [N, M] fp32, targets [R], weights [R]"""
    count = targets.numel()
    fill = -count % FILL
    filled = F.pad(hidden, (0, 0, 0, fill)), head, F.pad(targets, (0, fill)), F.pad(weights / weights.sum(), (0, fill))
    value, hits = _HeadLoss.apply(*filled)
    return Loss(value=value, hits=hits[:count])


class _HeadLoss(torch.autograd.Function):
    """Gradients are made on the way forward, while the logits are there, and scaled on the way back."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        matrix = head.to(hidden.dtype)
        value = torch.zeros(())
        hits = torch.empty(hidden.shape[0], dtype=torch.bool)
        for_hidden, for_head = torch.empty_like(hidden), torch.zeros_like(head)
        for start in range(0, hidden.shape[0], ROWS):
            span = slice(start, start + ROWS)
            part, hits[span], gradient = passes.cross_entropy(hidden[span] @ matrix.T, targets[span], weights[span])
            value += part
            torch.mm(gradient, matrix, out=for_hidden[span])
            for_head += gradient.T @ hidden[span]
        ctx.save_for_backward(for_hidden, for_head)
        ctx.mark_non_differentiable(hits)
        return value, hits

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        for_hidden, for_head = ctx.saved_tensors
        return for_hidden * gradient.to(for_hidden.dtype), for_head * gradient, None, None
