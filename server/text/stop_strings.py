"""Where a text ends because it contains a stop string, found while the text still grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """Text that may be shown now. `matched` is the stop string that ended the text, if one did."""

    text: str
    matched: str | None = None


class StopStrings:
    """Looks for any number of stop strings across the borders of chunks. Owner: the TextOutput of one choice.

    The stop string that is complete first wins: generation ends at the first character that completes one. Of several
    that end at the same character the longest wins, so nothing of it is shown. The outcome is the same for every way
    to cut the text into chunks. Only the longest end of the text that could still become a stop string is held back.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> Visible:
        """Take more text. After a match no more may be pushed."""
        if not self._stops:
            return Visible(text=text)
        text = self._held + text
        if found := self._first_match(text):
            stop, start = found
            self._held = ""
            return Visible(text=text[: start + len(stop) if self._include_stop else start], matched=stop)
        cut = min(self._open_from(stop, text) for stop in self._stops)
        self._held = text[cut:]
        return Visible(text=text[:cut])

    def flush(self) -> str:
        """The text is over: what was held back is ordinary text."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[str, int] | None:
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return stop, start

    @staticmethod
    def _open_from(stop: str, text: str) -> int:
        """Start of the longest end of `text` that is a proper beginning of `stop`; the text's length if none is."""
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while start >= 0:
            if stop.startswith(text[start:]):
                return start
            start = text.find(stop[0], start + 1)
        return len(text)
