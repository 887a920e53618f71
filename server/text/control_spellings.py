"""Where control tokens are spelled in a text. A vocabulary may have thousands of them, so this is not one regex."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

_HITS_PER_CHECK = 256


def unhurried() -> None:
    """A check for work that has no end to keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Characters [start, stop) of a text."""

    start: int
    stop: int


class ControlSpellings:
    """A fixed set of spellings and the ways to look for them. Immutable.

    Cost: one regex search for their first two characters, and a few set look-ups at each hit. Searches call `check`
    now and then, which may raise to end them.
    """

    def __init__(self, spellings: Iterable[str]) -> None:
        self._spellings = frozenset(spelling for spelling in spellings if spelling)
        self._lengths = sorted({len(spelling) for spelling in self._spellings}, reverse=True)
        self.longest = max(self._lengths, default=0)
        """Characters of the longest spelling."""
        self._first = _first_of(self._spellings)
        self._heads = frozenset(s[:n] for s in self._spellings for n in range(1, len(s)))
        self._tails = frozenset(s[n:] for s in self._spellings for n in range(1, len(s)))
        self._pairs = {s[n : n + size] for s in self._spellings for n in range(len(s)) for size in (1, 2)}
        self._joined = "\0".join(self._spellings)

    def matches(self, text: str, check: Callable[[], None] = unhurried) -> Iterator[Span]:
        """Leftmost, longest, not overlapping: how a tokenizer cuts them out."""
        position = hits = 0
        while first := self._first.search(text, position):
            hits += 1
            if hits % _HITS_PER_CHECK == 0:
                check()
            position = first.start()
            stop = self._longest_at(text, position)
            if stop is None:
                position += 1
            else:
                yield Span(start=position, stop=stop)
                position = stop

    def starts(self, text: str, check: Callable[[], None] = unhurried) -> Iterator[int]:
        """Every position at which a spelling begins, inside other spellings too."""
        for hits, hit in enumerate(self._first.finditer(text), start=1):
            if hits % _HITS_PER_CHECK == 0:
                check()
            if self._longest_at(text, hit.start()) is not None:
                yield hit.start()

    def open_ends(self, text: str) -> Iterator[int]:
        """Every start of an end of the text that is a proper beginning of a spelling: more text could complete it."""
        return (
            start for start in range(max(0, len(text) - self.longest + 1), len(text)) if text[start:] in self._heads
        )

    def open_start(self, text: str) -> bool:
        """Whether the text begins with the end of a spelling, or is a piece of one: text before could complete it."""
        if any(text[:stop] in self._tails for stop in range(1, min(len(text), self.longest) + 1)):
            return True
        return text[:2] in self._pairs and len(text) < self.longest and "\0" not in text and text in self._joined

    def _longest_at(self, text: str, start: int) -> int | None:
        for length in self._lengths:
            spelling = text[start : start + length]
            if spelling in self._spellings:
                return start + len(spelling)  # a shorter one, where the text ends before `length`
        return None


def _first_of(spellings: Iterable[str]) -> re.Pattern[str]:
    """Matches the first character of any spelling, where the second one follows."""
    seconds: dict[str, set[str]] = {}
    for spelling in spellings:
        seconds.setdefault(spelling[0], set()).add(spelling[1:2])
    options = [
        re.escape(first) + ("" if "" in after else f"(?=[{''.join(map(re.escape, sorted(after)))}])")
        for first, after in sorted(seconds.items())
    ]
    return re.compile("|".join(options) or "(?!)")
