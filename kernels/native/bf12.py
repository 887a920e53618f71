"""bf16 matrices in 12 bits a weight, without loss: the layout and the reason are told in csrc/bf12.h."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.native.memory import WEIGHTS

PANEL = 32
QUAD = 4
QUAD_BYTES = 192
CODES = 16

MOST_ESCAPES = 1 / 512
"""Of the weights of a matrix. With one in 64 a product takes twice as long as of plain bf16, with one in a thousand it
takes no longer; trained matrices have fewer."""

_ROOM = 1024
"""Escapes that a call has room for besides MOST_ESCAPES of its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bf12Panels:
    """With P panels and Q = ceil(K / 4) quads: data uint8 [..., P, Q, 192], tables uint8 [..., P, 16], escapes int32
    [count, 2] of place and value, starts int64 [panels of all + 1] into them."""

    data: Tensor
    tables: Tensor
    escapes: Tensor
    starts: Tensor


class Bf12Packing:
    """A plain matrix [..., N, K] whose panels are written as its rows come. Owner: the thread that fills it."""

    def __init__(self, lib: ctypes.CDLL, shape: Sequence[int]) -> None:
        *leading, self._rows, self._columns = shape
        self._lib = lib
        self._panels = -(-self._rows // PANEL)
        count = math.prod(leading) * self._panels
        size = (*leading, self._panels, -(-self._columns // QUAD), QUAD_BYTES)
        self._data = WEIGHTS.empty(math.prod(size)).view(size)
        self._tables = WEIGHTS.empty(count * CODES).view(*leading, self._panels, CODES)
        self._counts = torch.zeros(count, dtype=torch.int64)
        self._packed: dict[int, tuple[int, Tensor]] = {}  # by first panel: panels of one call, and their escapes
        self._parts: dict[int, list[tuple[int, Tensor]]] = {}  # rows of panels of which some are missing, by lane
        self._left = int(math.prod(shape) * MOST_ESCAPES)

    @property
    def is_worth_it(self) -> bool:
        """Whether there are few enough escapes so far. Once it is false it stays so, in whichever order rows come."""
        return self._left >= 0

    def put(self, start: int, rows: Tensor, expert: int | None = None) -> None:
        """rows [n, K] bf16; of all experts [E, n, K] where `expert` is None and the matrix has experts."""
        if rows.dim() == 3:
            for index, of_one in enumerate(rows):
                self.put(start, of_one, index)
            return
        done, count, first_panel = 0, rows.shape[0], (expert or 0) * self._panels
        while done < count:
            panel, lane = divmod(start + done, PANEL)
            lanes = self._lanes(panel)
            if lane or count - done < lanes:
                taken = min(lanes - lane, count - done)
                self._put_part(first_panel + panel, lane, rows[done : done + taken])
            else:
                taken = max(lanes, (count - done) // PANEL * PANEL)
                self._pack(first_panel + panel, rows[done : done + taken])
            done += taken

    def done(self) -> Bf12Panels:
        assert not self._parts, "rows are missing"
        escapes = torch.cat([self._packed[first][1] for first in sorted(self._packed)])
        return Bf12Panels(data=self._data, tables=self._tables, escapes=escapes, starts=_starts(self._counts))

    def put_so_far(self) -> Iterator[tuple[int, Tensor, int]]:
        """What was put: the first row within its expert, rows [n, K] bf16, and the expert."""
        data, tables = self._data.view(-1, *self._data.shape[-2:]), self._tables.view(-1, CODES)
        for first, (count, escapes) in self._packed.items():
            expert, panel = divmod(first, self._panels)
            span = slice(first, first + count)
            starts = _starts(self._counts[span])
            rows = unpack(Bf12Panels(data=data[span], tables=tables[span], escapes=escapes, starts=starts))
            left = self._rows - panel * PANEL
            yield panel * PANEL, rows[:left, : self._columns], expert
        for key, parts in self._parts.items():
            expert, panel = divmod(key, self._panels)
            for lane, rows in parts:
                yield panel * PANEL + lane, rows, expert

    def _lanes(self, panel: int) -> int:
        """Rows of a panel of an expert: the last may have fewer."""
        return min(PANEL, self._rows - panel * PANEL)

    def _put_part(self, key: int, lane: int, rows: Tensor) -> None:
        parts = self._parts.setdefault(key, [])
        parts.append((lane, rows.clone()))
        if sum(each.shape[0] for _, each in parts) == self._lanes(key % self._panels):
            del self._parts[key]
            self._pack(key, torch.cat([each for _, each in sorted(parts, key=lambda part: part[0])]))

    def _pack(self, first: int, rows: Tensor) -> None:
        panels = slice(first, first + -(-rows.shape[0] // PANEL))
        escapes = pack_rows(
            self._lib,
            rows,
            self._data.view(-1, *self._data.shape[-2:])[panels],
            self._tables.view(-1, CODES)[panels],
            self._counts[panels],
        )
        self._packed[first] = panels.stop - first, escapes
        self._left -= len(escapes)


def pack_rows(lib: ctypes.CDLL, rows: Tensor, data: Tensor, tables: Tensor, counts: Tensor) -> Tensor:
    """Packs rows [n, K] bf16 into zeroed panels [ceil(n / 32), Q, 192]. counts gets how many escapes each has; returns
    them."""
    assert rows.dtype is torch.bfloat16 and all(t.is_contiguous() for t in (data, tables, counts))
    rows = rows.contiguous()
    n, k = rows.shape
    room = int(n * k * MOST_ESCAPES) + _ROOM
    while True:
        escapes = torch.empty(room, 2, dtype=torch.int32)
        found = lib.tp_pack_bf12(
            *(rows.data_ptr(), n, k, data.data_ptr(), tables.data_ptr(), counts.data_ptr(), escapes.data_ptr(), room)
        )
        if found <= room:
            return escapes[:found].clone()
        data.zero_()
        room = found


def _starts(counts: Tensor) -> Tensor:
    """[n] -> [n + 1]: where each of parts that follow each other begins, and where the last ends."""
    return torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))


def unpack(panels: Bf12Panels) -> Tensor:
    """[..., P * 32, Q * 4] bf16."""
    *leading, count, quads, _ = panels.data.shape
    codes, *low_bytes = panels.data.reshape(-1, quads, 3, 64).unbind(2)
    tables = panels.tables.reshape(-1, 1, CODES).expand(-1, quads, -1)
    pairs = []
    for second, low in enumerate(low_bytes):
        high = tables.gather(2, (codes >> 4 * second & 15).long())
        weights = torch.stack((low, high), -1).view(torch.int16)  # in order of bytes
        pairs.append(weights.view(-1, quads, 4, 2, 8))  # lane of 128 bits, half of the outputs, word
    # [panels, quads, pair of the quad, lane, half, 4 outputs of a lane, 2 inputs]
    values = torch.stack(pairs, 2).view(-1, quads, 2, 4, 2, 4, 2)
    whole = values.permute(0, 4, 3, 5, 1, 2, 6).reshape(-1, PANEL, quads * QUAD)
    if len(panels.escapes):
        counts = panels.starts.diff()
        panel = torch.arange(len(counts)).repeat_interleave(counts)
        at, value = panels.escapes[:, 0].long(), panels.escapes[:, 1].to(torch.int16)
        whole[panel, at % PANEL, at // PANEL] = value
    return whole.view(torch.bfloat16).view(*leading, count * PANEL, quads * QUAD)
