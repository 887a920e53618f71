"""The two real vocabularies, and texts that are hard on a tokenizer."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.model.gguf_file import GGUFFile
from server.text.tokenizer import Tokenizer

CONTROL_SPELLINGS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<eos>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
)
_RANGES = (
    (0x20, 0x7E), (0xA0, 0x17F), (0x300, 0x36F), (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F),
    (0x1100, 0x11FF), (0x2000, 0x206F), (0x2190, 0x22FF), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3),
    (0xE000, 0xE0FF), (0xFE00, 0xFE0F), (0xFF00, 0xFFEF), (0x1D400, 0x1D7FF), (0x1F300, 0x1FAFF), (0x20000, 0x2A6DF),
)  # fmt: skip
_PIECES = (
    "the", " quick", "Brown", "'ll", "don't", " I'M", "1", "2024", " 3", ".5", "٣", "½", "Ⅷ", "²",
    " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\t\t\t", "\u00a0", "\u3000", "\u200b", "\u2028", " \n ",
    "👨‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪", "e\u0301", "a\u0308\u0323", "\u0e01\u0e33", "नि", "▁", "▁▁", "Ġ", "Ċ",
    "<", ">", "|", "<|", "|>", "<0x0A>", "<unused7>", "<table>", "</table>", "[multimodal]", "<start_of_image>",
    "<repo_name>", "<|im_", "im_end|>", "def f(x):", "\\n", "\x00", "\x7f", "\ufeff", "\U0010ffff", "http://a.b/c?d=e",
    *CONTROL_SPELLINGS,
)  # fmt: skip


def hard_text(random_: random.Random) -> str:
    """A text of up to 24 pieces: words, digits, runs of blanks, emoji, control spellings, any script."""

    def piece() -> str:
        choice = random_.random()
        if choice < 0.6:
            return random_.choice(_PIECES)
        if choice < 0.7:
            return random_.choice((" ", "\n", "\t", "0", "=")) * random_.randint(1, 40)
        low, high = random_.choice(_RANGES)
        return "".join(chr(random_.randint(low, high)) for _ in range(random_.randint(1, 6)))

    return "".join(piece() for _ in range(random_.randint(0, 24)))


@pytest.fixture(scope="session")
def hard_texts() -> Callable[[int], list[str]]:
    """count -> that many hard texts, always the same ones."""

    def make(count: int) -> list[str]:
        random_ = random.Random(20240607)
        return [hard_text(random_) for _ in range(count)]

    return make


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile(smollm2_gguf).metadata)


@pytest.fixture(scope="session")
def gemma3(gemma3_gguf: Path) -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile(gemma3_gguf).metadata)


def reference(gguf: Path) -> Any:
    """What transformers makes of a GGUF file: the oracle of this room."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_gguf: Path) -> Any:
    return reference(smollm2_gguf)


@pytest.fixture(scope="session")
def gemma3_reference(gemma3_gguf: Path) -> Any:
    return reference(gemma3_gguf)


@pytest.fixture(scope="session", params=["smollm2", "gemma3"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each of the two vocabularies in turn: byte-level BPE and SentencePiece."""
    found: Tokenizer = request.getfixturevalue(request.param)
    return found
