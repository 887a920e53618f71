"""Log-probabilities in the two shapes OpenAI has: a list of entries for chat, four parallel lists for completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from server.request import LogprobEntry

LEAST_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    """JSON has no -Infinity: a token that cannot be sampled gets LEAST_LOGPROB."""
    return max(logprob, LEAST_LOGPROB) if logprob == logprob else LEAST_LOGPROB


def token_text(token: bytes) -> str:
    """The token as text; a piece of a character is spelled out in bytes, because it has no text of its own."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def chat_entries(entries: Sequence[LogprobEntry]) -> list[dict[str, Any]]:
    return [
        {
            **_chat_token(entry.token, entry.logprob),
            "top_logprobs": [_chat_token(token, logprob) for token, logprob in entry.top],
        }
        for entry in entries
    ]


def _chat_token(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token_text(token), "logprob": finite(logprob), "bytes": list(token)}


class LegacyOffsets:
    """Where each token of a choice starts in its text, counted in characters, over any number of deltas.

    Owner: the encoder of the call.
    """

    def __init__(self, start: int = 0) -> None:
        self._offset = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def entries(self, entries: Sequence[LogprobEntry]) -> dict[str, Any]:
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(entry.token))
        return {
            "tokens": [token_text(entry.token) for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [_legacy_top(entry) for entry in entries],
            "text_offset": offsets,
        }


def _legacy_top(entry: LogprobEntry) -> dict[str, float]:
    """The alternatives and the sampled token itself; of two tokens with one text the likelier stays."""
    top: dict[str, float] = {}
    for token, logprob in (*entry.top, (entry.token, entry.logprob)):
        top.setdefault(token_text(token), finite(logprob))
    return top
