"""The bytes that one vocabulary entry stands for, in the two ways that open models spell their vocabularies."""

from __future__ import annotations

import re

BLANK = "\u2581"
"""How SentencePiece vocabularies spell a blank."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Spelling -> byte: printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards, in order.

    Source: the byte-level BPE of GPT-2 (Radford et al. 2019, section 2.2), which needs a visible character per byte.
    """
    itself = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in itself)
    return {chr(byte): byte for byte in itself} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
SPELLING_OF = {byte: spelling for spelling, byte in BYTE_OF.items()}


def spell_bytes(data: bytes) -> str:
    """Spell bytes in the byte-level alphabet."""
    return "".join(SPELLING_OF[byte] for byte in data)


def byte_level_bytes(spelling: str) -> bytes:
    """The bytes of a byte-level token; a spelling outside the alphabet is plain text (an added token)."""
    try:
        return bytes(BYTE_OF[character] for character in spelling)
    except KeyError:
        return spelling.encode()


def sentencepiece_bytes(spelling: str) -> bytes:
    """The bytes of a SentencePiece token: `<0x41>` is one byte, anything else is text with its blanks spelled out."""
    byte = _BYTE_TOKEN.fullmatch(spelling)
    return bytes.fromhex(byte[1]) if byte else spelling.replace(BLANK, " ").encode()
