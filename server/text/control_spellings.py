"""Where control tokens are spelled in a text. A vocabulary may have thousands of them, so this is not one regex."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Characters [start, stop) of a text."""

    start: int
    stop: int


class ControlSpellings:
    """A fixed set of spellings and the ways to look for them. Immutable.

    Cost: one regex search for the first characters (nearly always `<`), and a few set look-ups at each hit.
    """

    def __init__(self, spellings: Iterable[str]) -> None:
        self._spellings = frozenset(spelling for spelling in spellings if spelling)
        self._lengths = sorted({len(spelling) for spelling in self._spellings}, reverse=True)
        firsts = "".join(re.escape(first) for first in sorted({spelling[0] for spelling in self._spellings}))
        self._first = re.compile(f"[{firsts}]" if firsts else "(?!)")
        self._beginnings = frozenset(s[:n] for s in self._spellings for n in range(1, len(s)))
        self._endings = frozenset(s[n:] for s in self._spellings for n in range(1, len(s)))
        self._joined = "\0".join(self._spellings)

    def __contains__(self, spelling: str) -> bool:
        return spelling in self._spellings

    def matches(self, text: str) -> Iterator[Span]:
        """Leftmost, longest, not overlapping: how a tokenizer cuts them out."""
        position = 0
        while first := self._first.search(text, position):
            position = first.start()
            stop = self._longest_at(text, position)
            if stop is None:
                position += 1
            else:
                yield Span(start=position, stop=stop)
                position = stop

    def starts(self, text: str) -> Iterator[int]:
        """Every position at which a spelling begins, inside other spellings too."""
        return (hit.start() for hit in self._first.finditer(text) if self._longest_at(text, hit.start()) is not None)

    def open_end(self, text: str) -> int | None:
        """Start of the longest proper beginning of a spelling with which the text ends: more text could complete it."""
        longest = self._lengths[0] if self._lengths else 0
        for start in range(max(0, len(text) - longest + 1), len(text)):
            if text[start:] in self._beginnings:
                return start
        return None

    def open_start(self, text: str) -> bool:
        """Whether the text begins with the end of a spelling, or is a piece of one: text before could complete it."""
        longest = self._lengths[0] if self._lengths else 0
        if any(text[:stop] in self._endings for stop in range(1, min(len(text), longest) + 1)):
            return True
        return 0 < len(text) < longest and "\0" not in text and text in self._joined

    def _longest_at(self, text: str, start: int) -> int | None:
        for length in self._lengths:
            if text[start : start + length] in self._spellings:
                return start + length
        return None
