"""Pieces of long texts against the whole: the same ids, small pieces, and an early end for what cannot fit."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from server.errors import TooLong
from server.text import cuts
from server.text.budget import Abandoned, Budget
from server.text.cuts import LONGEST_PIECE_CHARS, PIECE_CHARS
from server.text.tokenizer import Tokenizer


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "PIECE_CHARS", 16)
    monkeypatch.setattr(cuts, "LONGEST_PIECE_CHARS", 10**9)


def whole(tokenizer: Tokenizer, text: str, *, parse_special: bool) -> list[int]:
    ids: list[int] = tokenizer._run(tokenizer._whole, text) if parse_special else tokenizer._encode_plain(text)
    return ids


@pytest.mark.usefixtures("small_pieces")
def test_pieces_have_the_ids_of_the_whole(tokenizer: Tokenizer, hard_texts: Callable[[int], list[str]]) -> None:
    random_ = random.Random(5)
    words = [
        "the",
        "Fox's",
        "don't",
        "I'LL",
        "x+y",
        "42",
        "é",
        "中文。",
        "<eos>",
        "<|im_end|>",
        "/etc",
        "'s",
        "_a",
        "<table>",
    ]
    blanks = [" ", "\n", "\n", "\n\n", "  ", "\t", " \n ", "\r\n", ""]
    hard = hard_texts(3_000)
    cut = 0
    for number in range(3_000):
        text = "".join(random_.choice(words) + random_.choice(blanks) for _ in range(random_.randint(5, 40)))
        text = random_.choice(["", hard[number]]) + text + hard[-number]
        pieces = list(tokenizer._cuts.pieces(text))
        assert "".join(pieces) == text
        cut += len(pieces) - 1
        for parse_special in (True, False):
            ids = tokenizer.encode(text, parse_special=parse_special, add_bos=False)
            if parse_special or not any(True for _ in tokenizer.control.starts(text)):
                assert ids == whole(tokenizer, text, parse_special=parse_special)
            assert parse_special or not any(map(tokenizer.is_special, ids))
    assert cut > 6_000


def test_text_without_words_or_lines_is_cut_anyway_but_never_inside_a_control_token(tokenizer: Tokenizer) -> None:
    spelling = next(spelling for spelling in ("<|im_end|>", "<end_of_turn>") if spelling in tokenizer._control_ids)
    index = tokenizer.encode_control(spelling)
    for text in ("a" * 400_000, " " * 400_000, "中" * 400_000, "x" + spelling * 40_000):
        pieces = list(tokenizer._cuts.pieces(text))
        assert "".join(pieces) == text
        assert max(map(len, pieces)) <= LONGEST_PIECE_CHARS
        ids = tokenizer.encode(text, parse_special=True, add_bos=False)
        assert tokenizer.decode(ids) == text
    assert ids[1:] == [index] * 40_000


def _bpe(merges: list[str], text: str) -> models.BPE:
    characters = sorted({*text, "▁", *"".join(chr(n) for n in range(0x21, 0x7F))})
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokens = [*characters, *(left + right for left, right in pairs)]
    return models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs)


def _sentencepiece(*, merges: list[str]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(_bpe(merges, cuts._PROBE))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _made(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(backend, bos_token_id=None, adds_bos=False)


def test_vocabularies_whose_tokens_reach_over_words_are_not_cut_between_words() -> None:
    tokenizer = _made(_sentencepiece(merges=["s ▁", "s▁ a"]))
    text = "as a " * PIECE_CHARS
    assert len(list(tokenizer._cuts.pieces(text))) == len(text) // LONGEST_PIECE_CHARS + 1
    assert len(list(_made(_sentencepiece(merges=["a s"]))._cuts.pieces(text))) >= len(text) // PIECE_CHARS - 1


@pytest.mark.parametrize("how", ["prepend", "metaspace"])
def test_vocabularies_that_begin_each_text_with_a_blank_are_cut_only_where_one_is(how: str) -> None:
    backend = _sentencepiece(merges=["▁ a", "a a"])
    if how == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.normalizer = None
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer = _made(backend)
    for text in ("a" * 300_000, "a a" * 100_000, "a\n" * 100_000):
        assert tokenizer.encode(text, parse_special=True, add_bos=False) == whole(tokenizer, text, parse_special=True)


def test_steps_that_look_across_words_are_found_out() -> None:
    backend = _sentencepiece(merges=[])
    backend.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex("a Test"), "b"), normalizers.Replace(" ", "▁"), normalizers.Strip()]
    )
    text = "a Test " * 50_000
    tokenizer = _made(backend)
    assert tokenizer._cuts._place.pattern == "(?!)"
    assert max(map(len, tokenizer._cuts.pieces(text))) == LONGEST_PIECE_CHARS


def test_no_text_has_fewer_tokens_than_the_bound(tokenizer: Tokenizer, hard_texts: Callable[[int], list[str]]) -> None:
    for text in (*hard_texts(500), "\n" + " " * 80, "-" * 640, "\n" * 310):
        ids = tokenizer.encode(text, parse_special=True, add_bos=False)
        assert tokenizer.least_tokens(len(text)) <= len(ids)
    assert tokenizer.least_tokens(81_000) >= 1_000


def test_a_vocabulary_with_tokens_that_swallow_blanks_has_no_bound() -> None:
    backend = _sentencepiece(merges=[])
    backend.add_special_tokens([tokenizers.AddedToken("<s>", lstrip=True, special=True)])
    assert _made(backend).least_tokens(10**9) == 0
    backend = _sentencepiece(merges=[])
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")])
    assert _made(backend).least_tokens(10**9) == 0


def test_a_prompt_that_exceeds_the_context_by_far_is_not_encoded_to_its_end(tokenizer: Tokenizer) -> None:
    for text in ("hello world " * 300_000, "a" * 3_000_000):
        with pytest.raises(TooLong) as caught:
            tokenizer.encode(text, parse_special=True, add_bos=False, budget=Budget(100, param="prompt"))
        assert 200 < caught.value.prompt_tokens <= len(text) // 48
        assert (caught.value.context_tokens, caught.value.param) == (100, "prompt")

    counted: list[int] = []

    class Watched(Budget):
        def spend(self, tokens: int) -> None:
            counted.append(tokens)
            super().spend(tokens)

    with pytest.raises(TooLong):
        tokenizer.encode("hello world " * 300_000, parse_special=True, add_bos=False, budget=Watched(40_000))
    assert sum(counted) < 100_000  # of 600,000


def test_a_prompt_somewhat_too_long_is_counted_to_its_end(smollm2: Tokenizer) -> None:
    text = "hello world " * 50_000
    budget = Budget(60_000)
    assert len(smollm2.encode(text, parse_special=True, add_bos=False, budget=budget)) == 100_001


def test_an_abandoned_encoding_ends_at_its_next_piece(smollm2: Tokenizer) -> None:
    class Leaves(Budget):
        pieces = 0

        def spend(self, tokens: int) -> None:
            self.pieces += 1
            if self.pieces == 3:
                self.abandon()
            super().spend(tokens)

    budget = Leaves()
    with pytest.raises(Abandoned):
        smollm2.encode("hello world " * 50_000, parse_special=True, add_bos=False, budget=budget)
    assert budget.pieces == 3


def test_texts_that_fit_one_piece_are_not_cut(tokenizer: Tokenizer) -> None:
    text = ("ab " * PIECE_CHARS)[:PIECE_CHARS]
    assert list(tokenizer._cuts.pieces(text)) == [text]
