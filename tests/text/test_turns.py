"""Turns are found in the tokens of any model's prompt, and nowhere else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from server.request import Conversation, Message
from server.text.chat_template import ChatTemplate
from server.text.family_templates import family_template
from server.text.service import INLINE_TOKENS, TextService
from server.text.tokenizer import Tokenizer
from server.text.turns import TurnFinder

START = 1_000
CALLS = 1_001
SYSTEM, USER, ASSISTANT = range(500, 503)


class Vocabulary:
    """Two spellings are one token each; any other text is a token a character."""

    def encode(self, text: str, *, parse_special: bool, add_bos: bool) -> list[int]:
        assert parse_special and not add_bos
        single = {"<|im_start|>": START, "</tool_call>": CALLS}
        return [single[text]] if text in single else [ord(character) for character in text]


FINDER = TurnFinder(Vocabulary())  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(30))
def test_turns_are_where_they_were_put_together(seed: int) -> None:
    rng = random.Random(seed)
    roles = [SYSTEM] * rng.randint(0, 1)
    asked = [0] * rng.randint(0, 6)  # an answer, of one turn or of several in a row
    for _ in asked:
        roles += [USER] * rng.randint(1, 2) + [ASSISTANT] * rng.randint(1, 3)
    roles += [USER, ASSISTANT]
    tokens: list[int] = []
    starts, answers = [], []
    before = None
    for role in roles:
        starts.append(len(tokens))
        if role == ASSISTANT != before:
            answers.append(len(tokens))
        tokens += [START, role, *(rng.randrange(500) for _ in range(rng.randint(0, 9)))]
        before = role
    hints = FINDER.hints(tokens)
    assert hints.ids.tolist() == tokens
    assert hints.turn_ends.tolist() == starts[1:]
    assert hints.turn == len(answers) == len(asked) + 1
    assert hints.added_tokens == len(tokens) - (answers[-2] if len(answers) > 1 else 0)
    assert hints.call_end_ids == {CALLS}


@pytest.mark.parametrize(
    ("tokens", "ends"), [([], []), ([1, 2, 3], []), ([START], []), ([1, START], [1]), ([START, 5, START], [2])]
)
def test_a_prompt_without_turns_is_a_first_turn_that_adds_all(tokens: list[int], ends: list[int]) -> None:
    hints = FINDER.hints(tokens)
    assert (hints.turn, hints.added_tokens, hints.turn_ends.tolist()) == (1, len(tokens), ends)


def talk(turns: int) -> Conversation:
    messages = []
    for number in range(turns):
        messages += [Message(role="user", texts=(f"question {number}",)), Message(role="assistant", texts=("so",))]
    return Conversation(messages=tuple(messages[:-1]), add_generation_prompt=True)


@pytest.mark.parametrize("family", ["gemma3", "tiny"])
def test_a_real_models_turns_are_those_of_the_conversation(family: str, request: pytest.FixtureRequest) -> None:
    if family == "tiny":
        tokenizer = Tokenizer.from_hf_folder(Path(__file__).parents[2] / "models" / "twinpane-tiny")
        source = family_template("mimo_v2")
    else:
        tokenizer, source = request.getfixturevalue("gemma3"), family_template("gemma3")
    assert source is not None
    template, finder = ChatTemplate(source, tokenizer), TurnFinder(tokenizer)
    before = 0
    for turns in range(1, 6):
        hints = finder.hints(template.encode(talk(turns)))
        assert hints.turn == turns
        assert all("start" in tokenizer.decode([int(hints.ids[end])]) for end in hints.turn_ends)
        text = tokenizer.decode(hints.ids[hints.turn_ends[-2] :].tolist())
        assert f"question {turns - 1}" in text and f"question {turns - 2}" not in text
        asked_before = len(hints.ids) - hints.added_tokens
        assert asked_before == before, "where the prompt before ended, but for the words that ask for an answer"
        before = int(hints.turn_ends[-1])


async def test_a_long_prompt_is_read_beside_the_loop_to_the_same_end() -> None:
    tokenizer = Tokenizer.from_hf_folder(Path(__file__).parents[2] / "models" / "twinpane-tiny")
    service = TextService(tokenizer, None)
    try:
        start = tokenizer.encode_control("<|im_start|>")
        tokens = tuple([start, 7, *range(300)] * (1 + 3 * INLINE_TOKENS // 302))
        assert len(tokens) > 3 * INLINE_TOKENS
        hints = await service.hints(tokens)
        assert tuple(hints.ids.tolist()) == tokens
        assert hints.turn_ends.tolist() == list(range(302, len(tokens), 302))
    finally:
        service.close()
