"""Where a text ends because it contains a stop string, found while the text still grows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from weakref import WeakValueDictionary


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

    A push takes time in proportion to its characters (amortized over the text), whatever the stop strings are.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        kept = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._automaton = _automaton(kept) if kept else None
        self._state = self._automaton.root if self._automaton else None
        self._include_stop = include_stop
        self._held = ""
        self.empty = not kept
        """There is nothing to look for: all text may be shown."""

    def push(self, text: str) -> Visible:
        """Take more text. After a match no more may be pushed."""
        automaton, state = self._automaton, self._state
        if automaton is None or state is None:
            return Visible(text=text)
        whole = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            state = automaton.step(state, character)
            if state.matched is not None:
                self._held = ""
                start = position - len(state.matched)
                return Visible(text=whole[: position if self._include_stop else start], matched=state.matched)
        self._state = state
        cut = len(whole) - state.depth
        self._held = whole[cut:]
        return Visible(text=whole[:cut])

    def flush(self) -> str:
        """The text is over: what was held back is ordinary text."""
        held, self._held = self._held, ""
        self._state = self._automaton.root if self._automaton else None
        return held


class _State:
    """The text ends in the first `depth` characters of the sorted stop strings [low, high), and in none longer.

    shorter: the state of the longest proper end of those characters that begins a stop string too; None until a text
    has reached this state. matched: the longest stop string that ends here.
    """

    __slots__ = ("children", "depth", "high", "low", "matched", "shorter")

    def __init__(self, *, low: int, high: int, depth: int) -> None:
        self.low = low
        self.high = high
        self.depth = depth
        self.children: dict[str, _State] | None = None
        self.shorter: _State | None = None
        self.matched: str | None = None


class _Automaton:
    """Aho and Corasick, "Efficient string matching" (1975), built only as far as the texts go.

    Built whole, 128 stop strings of 4,096 characters would be half a million states before the first token. Here a
    state is linked when a text first reaches it; what that costs is paid for by the characters of the stop string that
    it lies on, as in the original. Shared by all choices of a request; owner: their TextOutputs, on the event loop.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = sorted(stops)
        self.root = _State(low=0, high=len(stops), depth=0)
        self.root.shorter = self.root

    def step(self, state: _State, character: str) -> _State:
        """The state after one more character. `state` was reached before and is none that matched."""
        while (found := self._children(state).get(character)) is None:
            if state is self.root:
                return state
            state = _linked(state.shorter)
        if found.shorter is None:
            self._link(found, parent=state, character=character)
        return found

    def _link(self, made: _State, *, parent: _State, character: str) -> None:
        """Find the shorter state of a new one, which may be new too, and so on."""
        chain = [made]
        while parent is not self.root:
            parent = _linked(parent.shorter)
            found = self._children(parent).get(character)
            if found is not None:
                chain.append(found)
                if found.shorter is not None:
                    break
        else:
            chain.append(self.root)
        for shorter, longer in pairwise(reversed(chain)):
            longer.shorter = shorter
            first = self._stops[longer.low]  # the shortest of those that begin alike
            longer.matched = first if len(first) == longer.depth else shorter.matched

    def _children(self, state: _State) -> dict[str, _State]:
        if state.children is None:
            state.children = {}
            depth, low = state.depth, state.low
            while low < state.high:
                character = self._stops[low][depth]
                high = bisect_right(self._stops, character, low, state.high, key=lambda stop: stop[depth])
                state.children[character] = _State(low=low, high=high, depth=depth + 1)
                low = high
        return state.children


def _linked(state: _State | None) -> _State:
    assert state is not None, "a state that a text has reached is linked"
    return state


_automata: WeakValueDictionary[tuple[str, ...], _Automaton] = WeakValueDictionary()


def _automaton(stops: tuple[str, ...]) -> _Automaton:
    """One for all choices that use it now."""
    found = _automata.get(stops)
    if found is None:
        found = _automata[stops] = _Automaton(stops)
    return found
