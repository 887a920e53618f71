"""How checkpoints store the experts of a layer, and how they become the matrices that `Kernels.experts` takes.

One class per way to store them: the tensors it expects and their shapes, and the reading. Experts of the plainest way,
a matrix per expert and projection, are read in `weights`. Letters: E experts, M hidden size, W inner width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.mxfp4 import BLOCK_COLUMNS, Mxfp4
from kernels.packing import Packing
from kernels.quantized import Matrix
from server.model.spec import ExpertFiles, MoESpec

MakePacking = Callable[[Sequence[int]], Packing]
Shapes = dict[str, tuple[int, ...]]
Read = Callable[[str, int | None], Tensor]
"""(part of the layer, entry of its leading axis or None for all of it) -> the stored tensor. One entry after another is
asked for, so that no layer is held twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """gate_up [E, 2 * W, M], gate's rows first, and its bias [E, 2 * W]; down [E, M, W] and its bias [E, M]."""

    gate_up: Matrix
    down: Matrix
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class Stored(Protocol):
    def shapes(self, moe: MoESpec, hidden: int) -> Shapes:
        """Canonical parts of a layer and their shapes in the file. Parts that end in _codes or _scales are bytes."""
        ...

    def load(
        self, moe: MoESpec, hidden: int, read: Read, dtype: torch.dtype, device: torch.device, packing: MakePacking
    ) -> Experts:
        """Plain matrices and biases become dtype; codes and scales stay what they are. One expert is held at a time."""
        ...


class Interleaved:
    """gpt-oss in bf16: matrices [E, in, out], as transformers 5.24 keeps and saves them; columns of gate and up, and
    the entries of their bias, take turns, gate first."""

    def shapes(self, moe: MoESpec, hidden: int) -> Shapes:
        return {
            "experts_gate_up": (moe.experts, hidden, 2 * moe.width),
            "experts_down": (moe.experts, moe.width, hidden),
            **_bias_shapes(moe, hidden),
        }

    def load(
        self, moe: MoESpec, hidden: int, read: Read, dtype: torch.dtype, device: torch.device, packing: MakePacking
    ) -> Experts:
        stacks, gate_up, down = _Stacks(moe, hidden, packing), *_empty(moe, hidden, dtype, device)
        for expert in range(moe.experts):
            _in_halves(read("experts_gate_up", expert).T, gate_up)
            down.copy_(read("experts_down", expert).T)
            stacks.put(expert, gate_up, down)
        gate_up_bias, down_bias = _biases(moe, hidden, read, dtype, device)
        return stacks.done(gate_up_bias, down_bias)


class InterleavedMxfp4:
    """gpt-oss as published: codes [E, out, in / 32, 16] and scales [E, out, in / 32], rows of gate and up taking turns,
    gate first; the bytes of a block one after another are the codes of `Mxfp4`."""

    def shapes(self, moe: MoESpec, hidden: int) -> Shapes:
        inner, outer = hidden // BLOCK_COLUMNS, moe.width // BLOCK_COLUMNS
        return {
            "experts_gate_up_codes": (moe.experts, 2 * moe.width, inner, BLOCK_COLUMNS // 2),
            "experts_gate_up_scales": (moe.experts, 2 * moe.width, inner),
            "experts_down_codes": (moe.experts, hidden, outer, BLOCK_COLUMNS // 2),
            "experts_down_scales": (moe.experts, hidden, outer),
            **_bias_shapes(moe, hidden),
        }

    def load(
        self, moe: MoESpec, hidden: int, read: Read, dtype: torch.dtype, device: torch.device, packing: MakePacking
    ) -> Experts:
        stacks, gate_up, down = _Stacks(moe, hidden, packing), *_empty_mxfp4(moe, hidden, device)
        for expert in range(moe.experts):
            _in_halves(read("experts_gate_up_codes", expert).flatten(1), gate_up.codes)
            _in_halves(read("experts_gate_up_scales", expert), gate_up.scales)
            down.codes.copy_(read("experts_down_codes", expert).flatten(1))
            down.scales.copy_(read("experts_down_scales", expert))
            stacks.put(expert, gate_up, down)
        gate_up_bias, down_bias = _biases(moe, hidden, read, dtype, device)
        return stacks.done(gate_up_bias, down_bias)


def _mxfp4_stacks(
    moe: MoESpec, hidden: int, device: torch.device, packing: MakePacking, read: Callable[[int, str], Tensor]
) -> _Stacks:
    """Every expert packed from its projections' codes and scales; read gives one of them, such as (3, "up_scales")."""
    stacks, gate_up, down = _Stacks(moe, hidden, packing), *_empty_mxfp4(moe, hidden, device)
    for expert in range(moe.experts):
        for part, target in _parts(moe, gate_up, down).items():
            target.codes.copy_(read(expert, f"{part}_codes"))
            target.scales.copy_(read(expert, f"{part}_scales"))
        stacks.put(expert, gate_up, down)
    return stacks


class SplitMxfp4:
    """MiMo's store_dtype mxfp4: for each expert and projection codes [out, in / 2] and scales [out, in / 32]."""

    def shapes(self, moe: MoESpec, hidden: int) -> Shapes:
        found: Shapes = {}
        for expert in range(moe.experts):
            for part, (rows, columns) in _projections(moe, hidden).items():
                found[f"experts.{expert}.{part}_codes"] = (rows, columns // 2)
                found[f"experts.{expert}.{part}_scales"] = (rows, columns // BLOCK_COLUMNS)
        return found

    def load(
        self, moe: MoESpec, hidden: int, read: Read, dtype: torch.dtype, device: torch.device, packing: MakePacking
    ) -> Experts:
        stacks = _mxfp4_stacks(
            moe, hidden, device, packing, lambda expert, name: read(f"experts.{expert}.{name}", None)
        )
        return stacks.done()


class Stacked:
    """GGUF: matrices [E, out, in] and biases [E, out] of each projection."""

    def shapes(self, moe: MoESpec, hidden: int) -> Shapes:
        matrices = {f"experts_{part}": (moe.experts, *shape) for part, shape in _projections(moe, hidden).items()}
        return matrices | _stacked_bias_shapes(moe, hidden)

    def load(
        self, moe: MoESpec, hidden: int, read: Read, dtype: torch.dtype, device: torch.device, packing: MakePacking
    ) -> Experts:
        stacks, gate_up, down = _Stacks(moe, hidden, packing), *_empty(moe, hidden, dtype, device)
        for expert in range(moe.experts):
            gate_up[: moe.width] = read("experts_gate", expert)
            gate_up[moe.width :] = read("experts_up", expert)
            down.copy_(read("experts_down", expert))
            stacks.put(expert, gate_up, down)
        gate_up_bias, down_bias = _stacked_biases(moe, read, dtype, device)
        return stacks.done(gate_up_bias, down_bias)


class StackedMxfp4:
    """The same, as codes and scales; see `server.model.checkpoint.GGUFCheckpoint`."""

    def shapes(self, moe: MoESpec, hidden: int) -> Shapes:
        found = _stacked_bias_shapes(moe, hidden)
        for part, (rows, columns) in _projections(moe, hidden).items():
            found[f"experts_{part}_codes"] = (moe.experts, rows, columns // 2)
            found[f"experts_{part}_scales"] = (moe.experts, rows, columns // BLOCK_COLUMNS)
        return found

    def load(
        self, moe: MoESpec, hidden: int, read: Read, dtype: torch.dtype, device: torch.device, packing: MakePacking
    ) -> Experts:
        stacks = _mxfp4_stacks(moe, hidden, device, packing, lambda expert, name: read(f"experts_{name}", expert))
        gate_up_bias, down_bias = _stacked_biases(moe, read, dtype, device)
        return stacks.done(gate_up_bias, down_bias)


STORED: dict[ExpertFiles, Stored] = {
    ExpertFiles.INTERLEAVED: Interleaved(),
    ExpertFiles.INTERLEAVED_MXFP4: InterleavedMxfp4(),
    ExpertFiles.SPLIT_MXFP4: SplitMxfp4(),
    ExpertFiles.STACKED: Stacked(),
    ExpertFiles.STACKED_MXFP4: StackedMxfp4(),
}


def _projections(moe: MoESpec, hidden: int) -> dict[str, tuple[int, int]]:
    return {"gate": (moe.width, hidden), "up": (moe.width, hidden), "down": (hidden, moe.width)}


class _Stacks:
    """The matrices of all experts, packed one expert after another."""

    def __init__(self, moe: MoESpec, hidden: int, packing: MakePacking) -> None:
        self.gate_up = packing((moe.experts, 2 * moe.width, hidden))
        self.down = packing((moe.experts, hidden, moe.width))

    def put(self, expert: int, gate_up: Matrix, down: Matrix) -> None:
        self.gate_up.put(0, gate_up, expert)
        self.down.put(0, down, expert)

    def done(self, gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None) -> Experts:
        return Experts(
            gate_up=self.gate_up.done(), gate_up_bias=gate_up_bias, down=self.down.done(), down_bias=down_bias
        )


def _empty(moe: MoESpec, hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """gate_up and down of one expert."""
    gate_up = torch.empty(2 * moe.width, hidden, dtype=dtype, device=device)
    return gate_up, torch.empty(hidden, moe.width, dtype=dtype, device=device)


def _empty_mxfp4(moe: MoESpec, hidden: int, device: torch.device) -> tuple[Mxfp4, Mxfp4]:
    """gate_up and down of one expert."""

    def empty(rows: int, columns: int) -> Mxfp4:
        return Mxfp4(
            codes=torch.empty(rows, columns // 2, dtype=torch.uint8, device=device),
            scales=torch.empty(rows, columns // BLOCK_COLUMNS, dtype=torch.uint8, device=device),
        )

    return empty(2 * moe.width, hidden), empty(hidden, moe.width)


def _parts(moe: MoESpec, gate_up: Mxfp4, down: Mxfp4) -> dict[str, Mxfp4]:
    """The projections of one expert, as views."""
    return {"gate": gate_up[: moe.width], "up": gate_up[moe.width :], "down": down}


def _stacked_bias_shapes(moe: MoESpec, hidden: int) -> Shapes:
    rows = {part: shape[0] for part, shape in _projections(moe, hidden).items()}
    return {f"experts_{part}_bias": (moe.experts, count) for part, count in rows.items()} if moe.bias else {}


def _stacked_biases(
    moe: MoESpec, read: Read, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    if not moe.bias:
        return None, None
    gate, up, down = (read(f"experts_{part}_bias", None).to(device, dtype) for part in ("gate", "up", "down"))
    return torch.cat((gate, up), 1), down


def _bias_shapes(moe: MoESpec, hidden: int) -> Shapes:
    return {"experts_gate_up_bias": (moe.experts, 2 * moe.width), "experts_down_bias": (moe.experts, hidden)}


def _biases(moe: MoESpec, hidden: int, read: Read, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    gate_up = torch.empty(moe.experts, 2 * moe.width, dtype=dtype, device=device)
    down = torch.empty(moe.experts, hidden, dtype=dtype, device=device)
    _in_halves(read("experts_gate_up_bias", None).T, gate_up.T)
    down.copy_(read("experts_down_bias", None))
    return gate_up, down


def _in_halves(stored: Tensor, target: Tensor) -> None:
    """Rows of gate and up that take turns [2 * W, ...] become gate's rows and then up's; nothing else changes."""
    width = target.shape[0] // 2
    target[:width].copy_(stored[::2])
    target[width:].copy_(stored[1::2])
