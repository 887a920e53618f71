"""Where a long text may be cut, so that its pieces, encoded one by one, have the ids of the whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from server.text.control_spellings import ControlSpellings

PIECE_CHARS = 32_768
"""A piece is at least that long, so it takes some 20 ms and 15 MB; the whole of a long text may take gigabytes."""

LONGEST_PIECE_CHARS = 4 * PIECE_CHARS
"""A text that goes on for that long without a place to cut it is cut anyway."""

_PROBE = (
    "It's a Test of\nthe 42nd kind, isn't IT? A (b c), d+ e.\nDo WE agree, Ärger und\nélan and\n中文 with words\r\nend."
    "\n\nnext one;\ndef f(x):\n  return x  and y\nA\n\n\nB\n/ Z i'll say: 'tis\n'x' 7 days\na"
)
_WITHOUT_BLANKS = ("abcdefgh", "中文中文", "....", "12345678")


class Cuts:
    """The places to cut that suit one vocabulary. Immutable.

    Between two words, or two lines, no merge joins characters if no token of the vocabulary holds such a place, and
    then both sides are encoded independently, if only the steps before the merges are as local as they are in all
    tokenizers we know. That is tried out, on a text with such places, before they are used.
    """

    def __init__(
        self,
        encoders: Sequence[Callable[[str], list[int]]],
        token_bytes: Sequence[bytes],
        control: ControlSpellings,
    ) -> None:
        """encoders: all ways in which texts will be encoded."""
        self._control = control
        joined = b"\0".join(token_bytes)
        rules = (
            (r"(?<=[A-Za-z])(?= [A-Za-z])", rb"[A-Za-z] "),  # between words
            (r"(?<=\S\n)(?=[^\W\d_])", rb"\n[^\s\0]"),  # between lines
        )
        usable = [
            place
            for place, inside in rules
            if not re.search(inside, joined) and all(_same_ids(encode, place) for encode in encoders)
        ]
        self._place = re.compile("|".join(usable) or "(?!)")
        self._anywhere = all(_same_text(encode, token_bytes) for encode in encoders)

    def pieces(self, text: str) -> Iterator[str]:
        """The text in pieces. Those of up to PIECE_CHARS characters are not cut."""
        start = 0
        while len(text) - start > PIECE_CHARS:
            stop = self._next(text, start)
            yield text[start:stop]
            start = stop
        yield text[start:]

    def _next(self, text: str, start: int) -> int:
        end = start + LONGEST_PIECE_CHARS
        found = self._place.search(text, start + PIECE_CHARS, end if self._anywhere else len(text))
        if found:
            return found.start()
        return self._outside_control(text, end) if self._anywhere and end < len(text) else len(text)

    def _outside_control(self, text: str, position: int) -> int:
        """The position, or the beginning of a control spelling in which it lies."""
        low = position - 16 * self._control.longest
        for span in self._control.matches(text[low : position + self._control.longest]):
            if low + span.start < position < low + span.stop:
                return low + span.start
        return position


def _same_ids(encode: Callable[[str], list[int]], place: str) -> bool:
    cuts = [0, *(found.start() for found in re.finditer(place, _PROBE)), len(_PROBE)]
    return encode(_PROBE) == [index for start, stop in pairwise(cuts) for index in encode(_PROBE[start:stop])]


def _same_text(encode: Callable[[str], list[int]], token_bytes: Sequence[bytes]) -> bool:
    """Whether pieces that begin in a word say what the whole says: some vocabularies put a blank before each text."""

    def spelled(text: str) -> bytes:
        return b"".join(token_bytes[index] for index in encode(text))

    return all(spelled(text) == spelled(text[:2]) + spelled(text[2:]) for text in _WITHOUT_BLANKS)
