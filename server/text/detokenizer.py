"""Tokens to text, one at a time, without ever cutting a character.

Why not `tokenizers.decoders.DecodeStream`: over byte-fallback vocabularies it raises on valid id sequences, and a bad
byte there spoils every good one next to it. Bytes have neither problem, and cost one table look-up per token.
"""

from __future__ import annotations

import codecs

from server.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of a growing sequence of tokens. Owner: the TextOutput of one choice, on the event-loop thread.

    What `push` and `flush` return, put together, is `Tokenizer.decode` of the same ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._held = b""  # the beginning of a character

    def push(self, token_id: int) -> str:
        """The characters that this token completes: often none, when it ends inside one."""
        data = self._held + self.text_bytes(token_id)
        text, read = codecs.utf_8_decode(data, "replace", False)
        self._held = data[read:]
        return text

    def text_bytes(self, token_id: int) -> bytes:
        """What this token adds to the text: its bytes, unless it is a control token and those are skipped."""
        skipped = self._skip_special and self._tokenizer.is_special(token_id)
        return b"" if skipped else self._tokenizer.token_bytes(token_id)

    @property
    def held_bytes(self) -> int:
        """Bytes of a character that has begun and not ended: 0 to 3."""
        return len(self._held)

    def flush(self) -> str:
        """The end of the text: what is held turns out to be no character, so it is U+FFFD."""
        text = self._held.decode(errors="replace")
        self._held = b""
        return text
