"""GGUF kinds that the two real models do not have, against the reference conversion of the same metadata."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.model.gguf_file import GGUFFile
from server.text.tokenizer import Tokenizer

REFERENCE_NAMES = {
    "tokenizer.ggml.model": "tokenizer_type",
    "tokenizer.ggml.pre": "pre_tokenizer_type",
    "tokenizer.ggml.tokens": "tokens",
    "tokenizer.ggml.token_type": "token_type",
    "tokenizer.ggml.scores": "scores",
    "tokenizer.ggml.merges": "merges",
}


def reference(metadata: dict[str, Any]) -> Any:
    from transformers.integrations.gguf import convert_gguf_tokenizer

    backend, _ = convert_gguf_tokenizer(
        "llama", {name: metadata[key] for key, name in REFERENCE_NAMES.items() if key in metadata}
    )
    return backend


@pytest.mark.parametrize("pre", ["default", "gpt-2", "qwen2", "llama-bpe", "gpt-4o"])
def test_each_way_to_split_words_is_that_of_the_reference(
    pre: str, smollm2_gguf: Path, hard_texts: Callable[[int], list[str]]
) -> None:
    metadata = {**GGUFFile(smollm2_gguf).metadata, "tokenizer.ggml.pre": pre}
    ours, theirs = Tokenizer.from_gguf(metadata), reference(metadata)
    texts = hard_texts(3_000)
    expected = [encoded.ids for encoded in theirs.encode_batch_fast(texts, add_special_tokens=False)]
    assert [ours.encode(text, parse_special=True, add_bos=False) for text in texts] == expected


def sentencepiece(random_: random.Random) -> dict[str, Any]:
    """A vocabulary of 150 random words with tied scores, whose merges have to be worked out."""
    letters = "abc▁é"
    drawn = ("".join(random_.choices(letters, k=random_.randint(2, 4))) for _ in range(150))
    words = list(dict.fromkeys([*letters, *drawn]))
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(words)],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(random_.randint(0, 60)) for _ in words],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_merges_by_score_are_those_of_the_reference() -> None:
    random_ = random.Random(2)
    for _ in range(5):
        metadata = sentencepiece(random_)
        ours, theirs = Tokenizer.from_gguf(metadata), reference(metadata)
        for _ in range(1_000):
            pieces = ["a", "b", "c", " ", "é", "x", "漢", "<s>", "</s>"]
            text = "".join(random_.choices(pieces, weights=[5, 5, 5, 4, 3, 1, 1, 0.3, 0.3], k=random_.randint(0, 20)))
            expected = theirs.encode(text, add_special_tokens=False).ids
            assert ours.encode(text, parse_special=True, add_bos=False) == expected


def test_a_sentencepiece_file_that_says_nothing_adds_bos_and_guards_the_unknown_token() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece(random.Random(2)))
    assert tokenizer.adds_bos
    assert tokenizer.is_special(0)  # its type is "unknown", but the file gives it that role
    assert tokenizer.stop_token_ids == {2}  # </s>
    assert tokenizer.decode(tokenizer.encode("a 漢", parse_special=False, add_bos=False)) == " a 漢"
