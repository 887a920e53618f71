"""The streamed text is the whole text, whatever the ids, and no character is ever cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from server.text.detokenizer import Detokenizer
from server.text.tokenizer import Tokenizer


def streamed(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special: bool = False) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def random_sequences(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Any ids: control tokens and single bytes far more often than chance would have them."""
    random_ = random.Random(5)
    special = [index for index in range(tokenizer.vocab_size) if tokenizer.is_special(index)]
    single = [index for index in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(index)) == 1]
    pools: list[Sequence[int]] = [range(tokenizer.vocab_size), single, single, special]
    return [[random_.choice(random_.choice(pools)) for _ in range(random_.randint(0, 12))] for _ in range(count)]


@pytest.mark.parametrize("skip_special", [False, True])
def test_random_ids_streamed_are_the_same_ids_decoded_at_once(tokenizer: Tokenizer, skip_special: bool) -> None:
    for ids in random_sequences(tokenizer, 5_000):
        whole = tokenizer.decode(ids, skip_special=skip_special)
        assert "".join(streamed(tokenizer, ids, skip_special=skip_special)) == whole


def test_hard_texts_come_back_whole(tokenizer: Tokenizer, hard_texts: Callable[[int], list[str]]) -> None:
    for text in hard_texts(10_000):
        ids = tokenizer.encode(text, parse_special=True, add_bos=False)
        parts = streamed(tokenizer, ids)
        assert "".join(parts) == tokenizer.decode(ids) == (text.replace("▁", " ") if tokenizer.adds_bos else text)
        assert "\ufffd" in text or "\ufffd" not in "".join(parts)


def test_a_character_over_four_tokens_appears_with_the_last(gemma3: Tokenizer) -> None:
    ids = [238 + byte for byte in "😀".encode()]
    assert streamed(gemma3, ids) == ["", "", "", "😀", ""]


def test_bytes_that_are_no_character_become_replacement_characters(gemma3: Tokenizer) -> None:
    lone, begun = 238 + 0x80, 238 + 0xE2
    assert streamed(gemma3, [lone, begun, 9259, begun]) == ["\ufffd", "", "\ufffdHello", "", "\ufffd"]


def test_a_leading_blank_stays_for_the_ids_are_a_piece_of_a_text(gemma3: Tokenizer) -> None:
    ids = gemma3.encode(" world", parse_special=False, add_bos=False)
    assert "".join(streamed(gemma3, ids)) == " world"
