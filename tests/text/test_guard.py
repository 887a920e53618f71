"""The guard against its definition: in a prompt, only the template's own text holds control tokens."""

from __future__ import annotations

import random
import re

from server.text.control_spellings import ControlSpellings, Span
from server.text.guard import ESCAPE, MARK, RESERVED, Guard, unmarked

ALPHABET = "<|a>"


def word(random_: random.Random, low: int, high: int, alphabet: str = ALPHABET) -> str:
    return "".join(random_.choices(alphabet, k=random_.randint(low, high)))


def plain_matches(spellings: set[str], text: str) -> list[Span]:
    pattern = "|".join(map(re.escape, sorted(spellings, key=len, reverse=True)))
    return [Span(start=found.start(), stop=found.end()) for found in re.finditer(pattern, text)]


def test_matches_and_starts_are_those_of_the_plain_definition() -> None:
    random_ = random.Random(1)
    for _ in range(5_000):
        spellings = {word(random_, 1, 4) for _ in range(random_.randint(1, 4))}
        text = word(random_, 0, 12)
        control = ControlSpellings(spellings)
        assert list(control.matches(text)) == plain_matches(spellings, text)
        assert list(control.starts(text)) == [
            start for start in range(len(text)) if any(text.startswith(spelling, start) for spelling in spellings)
        ]
        assert list(control.open_ends(text)) == [
            start
            for start in range(len(text))
            if any(s != text[start:] and s.startswith(text[start:]) for s in spellings)
        ]


def test_only_control_tokens_of_the_templates_own_text_are_found_wherever_user_text_stands() -> None:
    random_ = random.Random(2)
    found = 0
    for _ in range(20_000):
        spellings = {word(random_, 2, 5) for _ in range(random_.randint(1, 4))}
        guard = Guard(ControlSpellings(spellings))
        rendered, plain, expected = "", "", []
        for _ in range(random_.randint(1, 4)):
            own, users = word(random_, 0, 6), word(random_, 1, 5, ALPHABET + "".join(RESERVED))
            expected += [
                Span(start=len(plain) + span.start, stop=len(plain) + span.stop)
                for span in plain_matches(spellings, own)
            ]
            rendered += own + guard.user_text(users)
            plain += own + users
        prompt = guard.read(rendered)
        assert prompt.text == plain
        assert list(prompt.control) == expected
        found += len(expected)
    assert found > 4_000


def test_blanks_at_the_ends_of_a_user_text_stay_at_its_ends() -> None:
    guard = Guard(ControlSpellings(["<|im_end|>", "<s>"]))
    random_ = random.Random(3)
    for _ in range(2_000):
        text = word(random_, 0, 3, " \n") + word(random_, 0, 6, "<|s>a") + word(random_, 0, 3, " \n")
        assert unmarked(guard.user_text(text).strip()) == text.strip()


def test_text_far_from_any_control_spelling_is_not_touched() -> None:
    guard = Guard(ControlSpellings(["<|im_end|>", "<s>"]))
    for text in ("Hello", "a < b and b > a", "", "<div>x</div>", "Grüße"):
        assert guard.user_text(text) == text


def test_marks_and_escapes_from_a_user_are_text() -> None:
    guard = Guard(ControlSpellings(["<s>"]))
    text = f"{MARK}<s>{ESCAPE}0{RESERVED[2]}"
    assert unmarked(guard.user_text(text)) == text
    assert unmarked(guard.option({"k": [text, 1, None]})["k"][0]) == text


def test_words_that_templates_compare_with_stay_comparable() -> None:
    guard = Guard(ControlSpellings(["<|high|>"]))
    assert guard.option({"effort": "high", "deep": ["<|", "<|high|>"]}) == {
        "effort": "high",
        "deep": ["<|", f"<{MARK}|high|>"],
    }
