"""What it takes to get a lost window back: which rows each layer must be fed when a prefix is resumed."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=False, kw_only=True)
class RebuildShape:
    """How far back the layers of a model must be computed so that the window before a resume point is exact.

    is_window: layer by layer, first to last. window_tokens: W, earlier positions that a window layer sees. has_mtp: MTP
    layers are fed the final hidden of the last W positions.

    From the top down: the outputs of the last `out` positions of a window layer need K/V of W positions more, so it is
    fed out + W; a full layer reads what is cached and is fed `out`. Source: DESIGN.md, section 3, "Window rebuild".
    """

    is_window: tuple[bool, ...]
    window_tokens: int
    has_mtp: bool

    @cached_property
    def fed_tokens(self) -> tuple[int, ...]:
        """For each layer how many of the last positions it is fed: never more than the layer below it gave out."""
        fed = []
        out = self.window_tokens if self.has_mtp else 0
        for is_window in reversed(self.is_window):
            out += self.window_tokens * is_window
            fed.append(out)
        return tuple(reversed(fed))

    def out_tokens(self, layer: int) -> int:
        """Of how many of the last positions a layer's output is needed."""
        if layer + 1 < len(self.fed_tokens):
            return self.fed_tokens[layer + 1]
        return self.window_tokens if self.has_mtp else 0

    def drops(self, start: int, stop: int, cached: int) -> list[int]:
        """For each layer how many of positions [start, stop) before `cached` leave with it, fed but not given out."""
        firsts = [max(start, min(stop, cached - self.out_tokens(layer))) for layer in range(len(self.fed_tokens))]
        return [first - before for before, first in zip([start, *firsts], firsts, strict=False)]

    @property
    def span_tokens(self) -> int:
        """How far back the lowest layer goes, and so how many tokens are embedded again."""
        return self.fed_tokens[0] if self.fed_tokens else 0

    def work_tokens(self, safe_tokens: int) -> float:
        """The work in whole tokens' worth of all layers, when the last safe point lies so many tokens below.

        Layers count as equal, and a layer's work for a row as the same whatever is left of it.
        """
        if not self.fed_tokens:
            return 0.0
        ascending, sums = self._fed_sums
        less = bisect.bisect_left(ascending, safe_tokens)
        return (sums[less] + (len(ascending) - less) * safe_tokens) / len(ascending)

    @cached_property
    def _fed_sums(self) -> tuple[list[int], list[int]]:
        """fed_tokens ascending, and the sum of the first n of them for each n."""
        ascending = sorted(self.fed_tokens)
        return ascending, list(itertools.accumulate(ascending, initial=0))


def shape_of(is_window: Sequence[bool], *, window_tokens: int, mtp_layers: int) -> RebuildShape:
    return RebuildShape(is_window=tuple(is_window), window_tokens=window_tokens, has_mtp=mtp_layers > 0)
