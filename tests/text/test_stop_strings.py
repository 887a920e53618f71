"""The incremental matcher against the plain definition, for every way to cut a text into chunks."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text import stop_strings
from server.text.stop_strings import StopStrings, Visible

TEXT = st.text(alphabet="abé", max_size=14)
STOPS = st.lists(st.text(alphabet="abé", min_size=1, max_size=5), max_size=4)


def plain_definition(text: str, stops: list[str], *, include_stop: bool) -> Visible:
    """The stop string complete first, the longest of those; over the whole text at once."""
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return Visible(text=text)
    end, start, stop = min(found)
    return Visible(text=text[: end if include_stop else start], matched=stop)


def run(chunks: list[str], stops: list[str], *, include_stop: bool) -> tuple[Visible, list[str]]:
    matcher = StopStrings(stops, include_stop=include_stop)
    shown = []
    for chunk in chunks:
        visible = matcher.push(chunk)
        shown.append(visible.text)
        if visible.matched is not None:
            return Visible(text="".join(shown), matched=visible.matched), shown
    shown.append(matcher.flush())
    return Visible(text="".join(shown)), shown


@given(text=TEXT, stops=STOPS, include_stop=st.booleans())
def test_every_cut_in_two_gives_the_plain_answer(text: str, stops: list[str], include_stop: bool) -> None:
    expected = plain_definition(text, stops, include_stop=include_stop)
    for cut in range(len(text) + 1):
        found, _ = run([text[:cut], text[cut:]], stops, include_stop=include_stop)
        assert found == expected


@given(text=TEXT, stops=STOPS, include_stop=st.booleans(), data=st.data())
def test_any_chunks_give_the_plain_answer(text: str, stops: list[str], include_stop: bool, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    chunks = [text[start:stop] for start, stop in pairwise(cuts)]
    found, _ = run(chunks, stops, include_stop=include_stop)
    assert found == plain_definition(text, stops, include_stop=include_stop)


@given(text=TEXT, stops=STOPS)
def test_only_the_longest_real_beginning_of_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    if any(stop in text for stop in stops):
        return
    matcher = StopStrings(stops)
    shown = "".join(matcher.push(character).text for character in text)
    beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
    longest = max((n for n in range(len(text) + 1) if text[len(text) - n :] in beginnings), default=0)
    assert len(text) - len(shown) == longest


def lines_run(work: Callable[[], None]) -> int:
    """How many lines of the matcher's code `work` runs: a measure of its cost that no other process disturbs."""
    count = 0

    def inside(_: FrameType, event: str, __: Any) -> Any:
        nonlocal count
        count += event == "line"
        return inside

    def enter(frame: FrameType, _: str, __: Any) -> Any:
        return inside if frame.f_code.co_filename == stop_strings.__file__ else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


HARD_STOPS = {
    "one long run": ["-" * 4_095 + "X"],
    "long common beginnings": ["-" * 4_095 + "X", *("--" + "x" * 4_000 + chr(0x100 + n) for n in range(127))],
    "every length of a run": ["-" * (32 * n) + "X" for n in range(1, 129)],
    "every end of a run": [("-" * n + "X").rjust(2_000, "x") for n in range(1, 129)],
    "runs of runs": [("-" * n + "x") * (4_000 // (n + 1)) for n in range(1, 129)],
    "a period": ["-x" * 2_000 + "--"],
}


@pytest.mark.parametrize("stops", HARD_STOPS.values(), ids=HARD_STOPS)
def test_the_cost_of_a_text_does_not_grow_with_the_stop_strings(stops: list[str]) -> None:
    random_ = random.Random(4)
    texts = ["-" * 20_000, "-x" * 10_000, ("-" * 63 + "x") * 300, "".join(random_.choices("-x", k=20_000))]
    for text in texts:
        if any(stop in text for stop in stops):
            continue
        matcher = StopStrings(stops)
        shown: list[str] = []

        def push(text: str = text, matcher: StopStrings = matcher, shown: list[str] = shown) -> None:
            shown.extend(matcher.push(text[start : start + 64]).text for start in range(0, len(text), 64))

        assert lines_run(push) < 60 * len(text)
        assert "".join(shown) + matcher.flush() == text


@given(
    text=st.text(alphabet="ab", max_size=60),
    stops=st.lists(st.text(alphabet="ab", min_size=3, max_size=12), max_size=8),
    include_stop=st.booleans(),
)
def test_choices_that_share_their_stop_strings_do_not_disturb_each_other(
    text: str, stops: list[str], include_stop: bool
) -> None:
    ahead = StopStrings(stops, include_stop=include_stop)  # keeps what the others have built
    for start in range(len(text)):
        found, _ = run(list(text[start:]), stops, include_stop=include_stop)
        assert found == plain_definition(text[start:], stops, include_stop=include_stop)
    assert ahead.push("") == Visible(text="")


def test_the_first_stop_string_to_be_complete_wins_and_then_the_longest() -> None:
    assert run(["xabcd"], ["abcd", "bc"], include_stop=False)[0] == Visible(text="xa", matched="bc")
    assert run(["xabc"], ["c", "abc", "bc"], include_stop=False)[0] == Visible(text="x", matched="abc")


def test_text_that_only_looked_like_a_stop_string_is_shown_as_soon_as_it_does_not() -> None:
    found, shown = run(["Hi ST", "O", "R", "E"], ["STOP"], include_stop=False)
    assert (found.text, shown) == ("Hi STORE", ["Hi ", "", "STOR", "E", ""])


def test_no_stop_strings_means_nothing_is_held() -> None:
    assert StopStrings([""]).push("anything") == Visible(text="anything")
