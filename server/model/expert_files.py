"""How checkpoints store the experts of a layer, and how they become the matrices that `Kernels.experts` takes.

One class per way to store them: the tensors it expects and their shapes, and the reading. Experts of the plainest way,
a matrix per expert and projection, are read in `weights`. Letters: E experts, M hidden size, W inner width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.quantized import Matrix
from server.model.spec import ExpertFiles, MoESpec

Entries = Callable[[str], Iterator[Tensor]]
"""The entries of a stored tensor along its leading axis, one after another, so that no layer is held twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """gate_up [E, 2 * W, M], gate's rows first, and its bias [E, 2 * W]; down [E, M, W] and its bias [E, M]."""

    gate_up: Matrix
    gate_up_bias: Tensor | None
    down: Matrix
    down_bias: Tensor | None


class Stored(Protocol):
    def shapes(self, moe: MoESpec, hidden: int) -> dict[str, tuple[int, ...]]:
        """Canonical parts of a layer and the shapes in the file."""
        ...

    def load(
        self, moe: MoESpec, hidden: int, entries: Entries, dtype: torch.dtype, device: torch.device
    ) -> Experts: ...


class Interleaved:
    """gpt-oss in bf16: matrices [E, in, out], as transformers 5.24 keeps and saves them; columns of gate and up, and
    the entries of their bias, take turns, gate first."""

    def shapes(self, moe: MoESpec, hidden: int) -> dict[str, tuple[int, ...]]:
        return {
            "experts_gate_up": (moe.experts, hidden, 2 * moe.width),
            "experts_down": (moe.experts, moe.width, hidden),
            **_bias_shapes(moe, hidden),
        }

    def load(self, moe: MoESpec, hidden: int, entries: Entries, dtype: torch.dtype, device: torch.device) -> Experts:
        gate_up = torch.empty(moe.experts, 2 * moe.width, hidden, dtype=dtype, device=device)
        down = torch.empty(moe.experts, hidden, moe.width, dtype=dtype, device=device)
        for expert, stored in enumerate(entries("experts_gate_up")):
            _in_halves(stored.T, gate_up[expert])
        for expert, stored in enumerate(entries("experts_down")):
            down[expert] = stored.T
        return Experts(gate_up=gate_up, down=down, **_biases(moe, hidden, entries, dtype, device))


STORED: dict[ExpertFiles, Stored] = {ExpertFiles.INTERLEAVED: Interleaved()}


def _bias_shapes(moe: MoESpec, hidden: int) -> dict[str, tuple[int, ...]]:
    return {"experts_gate_up_bias": (moe.experts, 2 * moe.width), "experts_down_bias": (moe.experts, hidden)}


def _biases(moe: MoESpec, hidden: int, entries: Entries, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    gate_up = torch.empty(moe.experts, 2 * moe.width, dtype=dtype, device=device)
    down = torch.empty(moe.experts, hidden, dtype=dtype, device=device)
    for expert, stored in enumerate(entries("experts_gate_up_bias")):
        _in_halves(stored, gate_up[expert])
    for expert, stored in enumerate(entries("experts_down_bias")):
        down[expert] = stored
    return {"gate_up_bias": gate_up, "down_bias": down}


def _in_halves(stored: Tensor, target: Tensor) -> None:
    """Rows of gate and up that take turns [2 * W, ...] become gate's rows and then up's; nothing else changes."""
    width = target.shape[0] // 2
    target[:width].copy_(stored[::2])
    target[width:].copy_(stored[1::2])
