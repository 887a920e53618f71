"""One choice's events against the answer computed all at once."""

from __future__ import annotations

import codecs
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from server.errors import EngineFailed
from server.request import (
    ChoiceFailed,
    ChoiceFinished,
    Event,
    FinishReason,
    OutputStream,
    SampledToken,
    StopRules,
    TextDelta,
)
from server.text.output import TextOutput
from server.text.tokenizer import Tokenizer


def output(
    tokenizer: Tokenizer, rules: StopRules, *, logprobs: bool = False, skip: bool = True
) -> tuple[TextOutput, list[Event]]:
    events: list[Event] = []
    made = TextOutput(tokenizer, choice=3, stop=rules, emit=events.append, skip_special_tokens=skip, logprobs=logprobs)
    return made, events


def push_all(stream: OutputStream, ids: Sequence[int]) -> FinishReason | None:
    for position, index in enumerate(ids):
        reason = stream.push(SampledToken(token_id=index, logprob=-float(position), top=((index, -0.5),)))
        if reason is not None:
            return reason
    return None


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def without_begun_character(data: bytes) -> str:
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def bytes_of(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool) -> bytes:
    return b"".join(tokenizer.token_bytes(i) for i in ids if not (skip and tokenizer.is_special(i)))


def at_once(
    tokenizer: Tokenizer, ids: Sequence[int], rules: StopRules
) -> tuple[str, FinishReason, str | int | None, int]:
    """The rules of `TextOutput` read off the whole sequence: the shortest prefix of it that ends the choice."""
    free = tokenizer.decode(ids[: rules.min_tokens], skip_special=True).rstrip("\ufffd")
    for count in range(1, len(ids) + 1):
        *before, last = ids[:count]
        ended = last in rules.stop_token_ids and count > rules.min_tokens
        over = ended or count == rules.max_tokens
        text = tokenizer.decode(before if ended else ids[:count], skip_special=True)
        if over and not ended:
            text = without_begun_character(bytes_of(tokenizer, ids[:count], skip=True))
        stable = text if over else text.rstrip("\ufffd")
        searched = stable[len(free) :] if count > rules.min_tokens else ""
        found = [(searched.find(s) + len(s), searched.find(s), s) for s in rules.stop if s in searched]
        if found:
            end, start, stop = min(found)
            return free + searched[: end if rules.include_stop else start], FinishReason.STOP, stop, count
        if ended:
            matched = None if last in tokenizer.stop_token_ids else last
            return text, FinishReason.STOP, matched, count
        if over:
            return text, FinishReason.LENGTH, None, count
    raise AssertionError("the sequence must end")


def case(tokenizer: Tokenizer, random_: random.Random, texts: Sequence[str]) -> tuple[list[int], StopRules]:
    text = "".join(random_.choices(texts, k=4)) + "".join(random_.choices("abc 👍é", k=random_.randint(0, 12)))
    ids = tokenizer.encode(text, parse_special=True, add_bos=False) + [random_.choice([1, 2, 7, 40])] * 2
    whole = tokenizer.decode(ids, skip_special=True)
    stops = []
    for _ in range(random_.choice([0, 0, 1, 3])):
        start = random_.randrange(len(whole) + 1)
        stops.append(whole[start : start + random_.randint(1, 6)] or "a")
    return ids, StopRules(
        max_tokens=random_.randint(1, len(ids)),
        min_tokens=random_.choice([0, 0, 1, 3, 8]),
        stop_token_ids=frozenset(random_.choice([(), (2,), (1, 7, 106), (ids[len(ids) // 2],)])),
        stop=tuple(stops),
        include_stop=random_.random() < 0.5,
    )


def test_streaming_token_by_token_gives_the_answer_computed_at_once(
    tokenizer: Tokenizer, hard_texts: Callable[[int], list[str]]
) -> None:
    random_ = random.Random(11)
    texts = [text for text in hard_texts(300) if "\ufffd" not in text]
    reasons = set()
    for _ in range(1_500):
        ids, rules = case(tokenizer, random_, texts)
        made, events = output(tokenizer, rules)
        reason = push_all(made, ids)
        text, expected, matched, count = at_once(tokenizer, ids, rules)
        assert text_of(events) == text
        assert events[-1] == ChoiceFinished(choice=3, reason=expected, matched=matched, output_tokens=count)
        assert reason is expected
        assert all(isinstance(event, TextDelta) and event.text for event in events[:-1])
        reasons.add((reason, type(matched)))
    assert len(reasons) == 4  # length, end of sequence, another stop id, a stop string


def test_each_logprob_leaves_once_in_order_with_the_text_that_completes_it(
    tokenizer: Tokenizer, hard_texts: Callable[[int], list[str]]
) -> None:
    random_ = random.Random(12)
    texts = hard_texts(300)
    for _ in range(1_000):
        ids, rules = case(tokenizer, random_, texts)
        made, events = output(tokenizer, rules, logprobs=True, skip=False)
        push_all(made, ids)
        finished = events[-1]
        assert isinstance(finished, ChoiceFinished)
        shown, spelled, delivered = "", b"", 0
        for event in events[:-1]:
            assert isinstance(event, TextDelta)
            assert event.text or event.logprobs
            shown += event.text
            for entry in event.logprobs:
                assert entry.logprob == -float(delivered)
                assert tokenizer.token_bytes(ids[delivered]).startswith(entry.token)
                delivered += 1
                spelled += entry.token
            # No token is reported before its text; only a cut stop string can hide the end of one.
            if not isinstance(finished.matched, str):
                assert shown.startswith(spelled.decode(errors="ignore").rstrip("\ufffd")) or "\ufffd" in shown
        if not isinstance(finished.matched, str):
            assert delivered == finished.output_tokens - (finished.reason is FinishReason.STOP)
        else:
            assert len(tokenizer.decode(ids[:delivered])) >= len(shown)
            assert len(tokenizer.decode(ids[: max(0, delivered - 1)]).rstrip("\ufffd")) <= len(shown)


def test_a_token_of_which_a_stop_string_hides_the_end_keeps_its_logprob(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("Hello there friend", parse_special=False, add_bos=False)
    assert [smollm2.token_bytes(index) for index in ids] == [b"Hello", b" there", b" friend"]
    made, events = output(smollm2, StopRules(max_tokens=9, stop=("ere fr",)), logprobs=True)
    assert push_all(made, ids) is FinishReason.STOP
    assert text_of(events) == "Hello th"
    entries = [entry.token for event in events if isinstance(event, TextDelta) for entry in event.logprobs]
    assert entries == [b"Hello", b" there"]


def test_a_split_character_delivers_all_its_logprobs_when_it_is_complete(gemma3: Tokenizer) -> None:
    made, events = output(gemma3, StopRules(max_tokens=9), logprobs=True)
    push_all(made, [238 + byte for byte in "é".encode()])
    (delta,) = events
    assert isinstance(delta, TextDelta)
    assert (delta.text, [entry.token for entry in delta.logprobs]) == ("é", [b"\xc3", b"\xa9"])
    assert delta.logprobs[0].top == ((b"\xc3", -0.5),)


def test_a_skipped_control_token_shows_no_text_but_its_logprob(smollm2: Tokenizer) -> None:
    made, events = output(smollm2, StopRules(max_tokens=2), logprobs=True)
    push_all(made, [4, 4])
    deltas = [event for event in events if isinstance(event, TextDelta)]
    assert [(delta.text, [entry.token for entry in delta.logprobs]) for delta in deltas] == [("", [b""])] * 2
    assert deltas[0].logprobs[0].top == ((smollm2.token_bytes(4), -0.5),)
    made, events = output(smollm2, StopRules(max_tokens=2))
    push_all(made, [4, 4])
    assert len(events) == 1


def test_held_text_is_shown_at_the_end_of_sequence_and_at_the_length_limit(gemma3: Tokenizer) -> None:
    for rules, ids in (
        (StopRules(max_tokens=9, stop=("Hello!",), stop_token_ids=frozenset({1})), [9259, 1]),
        (StopRules(max_tokens=1, stop=("Hello!",)), [9259]),
    ):
        made, events = output(gemma3, rules)
        assert push_all(made, ids) is not None
        assert text_of(events) == "Hello"


def test_the_length_limit_never_cuts_a_character(gemma3: Tokenizer, smollm2: Tokenizer) -> None:
    """What it leaves of one is not shown, and is in no log-probability; what the model itself leaves off is shown."""
    for stop in ((), ("Hello!",), ("\ufffd",)):
        for begun in (b"\xf0", b"\xf0\x9f", b"\xf0\x9f\x91", b"\xc3"):
            ids = [9259, *(238 + byte for byte in begun)]
            made, events = output(gemma3, StopRules(max_tokens=len(ids), stop=stop), logprobs=True)
            assert push_all(made, ids) is FinishReason.LENGTH
            assert text_of(events) == "Hello"
            entries = [entry for event in events if isinstance(event, TextDelta) for entry in event.logprobs]
            assert [entry.token for entry in entries] == [b"Hello", *[b""] * len(begun)]
            assert entries[-1].top == ((begun[-1:], -0.5),)

            made, events = output(gemma3, StopRules(max_tokens=99, stop_token_ids=frozenset({1})))
            assert push_all(made, [*ids, 1]) is FinishReason.STOP
            assert text_of(events) == "Hello\ufffd"
    part = next(i for i in range(smollm2.vocab_size) if smollm2.token_bytes(i) == b" \xf0\x9f")
    made, events = output(smollm2, StopRules(max_tokens=1), logprobs=True)
    push_all(made, [part])
    assert text_of(events) == " "
    assert [e.token for event in events if isinstance(event, TextDelta) for e in event.logprobs] == [b" "]


@pytest.mark.parametrize("skip", [True, False])
def test_the_bytes_of_the_logprobs_are_those_of_the_text(
    tokenizer: Tokenizer, hard_texts: Callable[[int], list[str]], skip: bool
) -> None:
    random_ = random.Random(13)
    texts = hard_texts(300)
    for _ in range(500):
        ids, rules = case(tokenizer, random_, texts)
        for place in random_.choices(range(len(ids)), k=random_.choice([0, 1, 3])):
            ids.insert(place, random_.choice([0, 1, 2]))
        made, events = output(tokenizer, replace(rules, stop=()), logprobs=True, skip=skip)
        push_all(made, ids)
        entries = [entry for event in events if isinstance(event, TextDelta) for entry in event.logprobs]
        assert b"".join(entry.token for entry in entries).decode(errors="replace") == text_of(events)


def test_a_stop_string_beats_the_length_limit_at_the_same_token(smollm2: Tokenizer) -> None:
    (hello,) = smollm2.encode("Hello", parse_special=False, add_bos=False)
    made, events = output(smollm2, StopRules(max_tokens=1, stop=("lo",)))
    assert push_all(made, [hello]) is FinishReason.STOP
    assert events == [
        TextDelta(choice=3, text="Hel"),
        ChoiceFinished(choice=3, reason=FinishReason.STOP, matched="lo", output_tokens=1),
    ]


@pytest.mark.parametrize("end", ["finish", "fail", "cancel"])
def test_nothing_happens_after_the_end(smollm2: Tokenizer, end: str) -> None:
    made, events = output(smollm2, StopRules(max_tokens=1))
    error = EngineFailed("x")
    if end == "finish":
        push_all(made, [40])
    elif end == "fail":
        made.fail(error)
        assert events == [ChoiceFailed(choice=3, error=error)]
    else:
        made.cancel()
        assert events == []
    seen = list(events)
    assert made.push(SampledToken(token_id=40)) is None
    made.fail(error)
    made.cancel()
    assert events == seen
