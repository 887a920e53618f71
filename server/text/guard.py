"""Keeps the text of a user from becoming control tokens once a chat template has mixed it into a prompt.

Before a template renders, a mark goes inside every control spelling of the user's strings, and inside every piece of
one at their ends, which the template's own text could complete. In the rendered prompt a control spelling without a
mark in it is therefore the template's own. A mark stands after the first character of a spelling, so blanks at the
ends of a string stay at its ends and templates may trim, split and compare as ever.

The marks are noncharacters, which Unicode keeps for internal use. A user who sends one gets it back: it is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from server.text.control_spellings import ControlSpellings, Span, unhurried

MARK = "\ufdd0"
ESCAPE = "\ufdd1"
END_MARK = "\ufdd2"
"""Where the text of the final message ends, when the model is to continue it."""

RESERVED = (MARK, ESCAPE, END_MARK)
_RESERVED = re.compile(f"[{''.join(RESERVED)}]")
_MARKS_AND_ESCAPES = re.compile(f"{MARK}|{END_MARK}|{ESCAPE}(.)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A rendered prompt without marks. `control` are the template's own control spellings, in order."""

    text: str
    control: tuple[Span, ...]


class Guard:
    """Marks what users wrote and reads marked prompts, for one vocabulary. Immutable.

    Every method calls `check` at least once per string and per value, which may raise to end it.
    """

    def __init__(self, control: ControlSpellings) -> None:
        self._control = control

    def user_text(self, text: str, check: Callable[[], None] = unhurried) -> str:
        """A string from a user, safe wherever the template puts it."""
        check()
        text = _escaped(text)
        cuts = {start + 1 for start in self._control.starts(text, check)}
        cuts.update(start + 1 for start in self._control.open_ends(text))
        if self._control.open_start(text):
            cuts.add(0)
        return _marked(text, cuts)

    def user_value(self, value: Any, check: Callable[[], None] = unhurried) -> Any:
        """A JSON value from a user, every string and key of it safe."""
        return _map_strings(value, self.user_text, check)

    def option(self, value: Any, check: Callable[[], None] = unhurried) -> Any:
        """A template argument: its strings may be compared with words, so only whole control spellings are marked."""
        return _map_strings(value, self._whole_spellings, check)

    def read(self, rendered: str, check: Callable[[], None] = unhurried) -> Prompt:
        """Take the marks out of a rendered prompt and find the control spellings that had none."""
        parts: list[str] = []
        spans: list[Span] = []
        length = position = 0
        for found in self._control.matches(rendered, check):
            before, own = unmarked(rendered[position : found.start]), rendered[found.start : found.stop]
            start = length + len(before)
            length = start + len(own)
            spans.append(Span(start=start, stop=length))
            parts += (before, own)
            position = found.stop
        return Prompt(text="".join((*parts, unmarked(rendered[position:]))), control=tuple(spans))

    def _whole_spellings(self, text: str, check: Callable[[], None]) -> str:
        check()
        text = _escaped(text)
        return _marked(text, {start + 1 for start in self._control.starts(text, check)})


def unmarked(text: str) -> str:
    """The text as its writer wrote it."""
    if not _RESERVED.search(text):
        return text
    return _MARKS_AND_ESCAPES.sub(lambda found: RESERVED[int(found[1])] if found[1] in {"0", "1", "2"} else "", text)


def _escaped(text: str) -> str:
    return _RESERVED.sub(lambda found: f"{ESCAPE}{RESERVED.index(found[0])}", text)


def _marked(text: str, cuts: set[int]) -> str:
    if not cuts:
        return text
    edges = [0, *sorted(cuts), len(text)]
    return MARK.join(text[start:stop] for start, stop in pairwise(edges))


def _map_strings(value: Any, change: Callable[[str, Callable[[], None]], str], check: Callable[[], None]) -> Any:
    if isinstance(value, str):
        return change(value, check)
    check()
    if isinstance(value, Mapping):
        return {change(str(key), check): _map_strings(item, change, check) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change, check) for item in value]
    return value
