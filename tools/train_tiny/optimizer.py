"""Muon for matrices, AdamW for the rest, and the schedule of their rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from tools.train_tiny.model import Network

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


class Muon(Optimizer):
    """Momentum whose matrices are made orthogonal: every direction of a gradient is followed equally far.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024): Nesterov momentum, then the
    quintic Newton-Schulz iteration with these coefficients, in bf16. The update is then scaled to an AdamW's size,
    0.2 * sqrt(max(rows, columns)), with decoupled weight decay: arXiv 2502.16982, section 2.2.

    A parameter [..., rows, columns] is a stack of matrices. All of one shape are made orthogonal in one go.
    """

    def __init__(self, matrices: Iterable[Tensor], *, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(momentum, group["momentum"])
                by_shape[_shape(update)].append((parameter, update.reshape(-1, *update.shape[-2:])))
            for (rows, columns), pairs in by_shape.items():
                together = orthogonal(torch.cat([update for _, update in pairs]))
                together *= 0.2 * max(rows, columns) ** 0.5
                for (parameter, _), update in zip(pairs, together.split([len(u) for _, u in pairs]), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update.view_as(parameter), alpha=-group["lr"])


def orthogonal(matrices: Tensor) -> Tensor:
    """[S, rows, columns] -> the same singular vectors, with singular values of about 0.7 to 1.2. fp32"""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:
        x = x.transpose(1, 2)
    x = x / (x.float().norm(dim=(1, 2), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(STEPS):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.transpose(1, 2) if is_tall else x).float()


def _shape(x: Tensor) -> tuple[int, int]:
    return x.shape[-2], x.shape[-1]


class Optimizers:
    """Owner of both, for one network. Routers are AdamW's: eight rows that steer a choice are no map to make
    orthogonal. So are the embedding and the head, as in Muon's source."""

    def __init__(self, network: Network, *, matrix_lr: float, vector_lr: float, weight_decay: float) -> None:
        matrices, tables, vectors = [], [], []
        for name, parameter in network.named_parameters():
            if name in ("embedding", "head") or name.endswith("router"):
                tables.append(parameter)
            elif parameter.dim() < 2:
                vectors.append(parameter)
            else:
                matrices.append(parameter)
        self.muon = Muon(matrices, lr=matrix_lr, momentum=0.95, weight_decay=weight_decay)
        self.adamw = AdamW(
            [{"params": tables, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=vector_lr,
            betas=(0.9, 0.95),
            eps=1e-10,
            fused=True,
        )
        self._rates = [(group, group["lr"]) for group in (*self.muon.param_groups, *self.adamw.param_groups)]

    def step(self, rate: float) -> None:
        """rate: what share of the learning rates this step has"""
        for group, lr in self._rates:
            group["lr"] = lr * rate
        self.muon.step()
        self.adamw.step()
        for optimizer in (self.muon, self.adamw):
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])
        rates = [lr for _, lr in self._rates]
        groups = (*self.muon.param_groups, *self.adamw.param_groups)
        self._rates = list(zip(groups, rates, strict=True))


def rate_at(progress: float, *, step: int, warmup_steps: int, decay: float) -> float:
    """Warm up by steps, stay, and fall to zero over the last `decay` of the training. progress: 0 to 1.

    Source: the trapezoid of arXiv 2405.18392. It needs no plan of how long to stay, so a longer training can go on
    from any checkpoint before the fall.
    """
    return min(1.0, (step + 1) / warmup_steps, max(0.0, 1.0 - progress) / decay)
