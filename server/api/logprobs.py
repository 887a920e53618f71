"""Log-probabilities in the two shapes OpenAI has: a list of entries for chat, four parallel lists for completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

import orjson

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
    """Where each token of a choice starts in its visible text, counted in characters, over any number of deltas.

    Owner: the encoder of the call. A token that is not part of the text (a skipped control token) has no width, which
    only the text itself tells: a token is part of it if the text goes on with the token's characters.
    """

    def __init__(self) -> None:
        self._offset = 0
        self._text = ""  # visible, and not yet taken by a token
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def entries(self, text: str, entries: Sequence[LogprobEntry]) -> dict[str, Any]:
        """The next delta's text, and the four lists of its entries."""
        self._text += text
        return {
            "tokens": [token_text(entry.token) for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [_legacy_top(entry) for entry in entries],
            "text_offset": [self._place(entry.token) for entry in entries],
        }

    def _place(self, token: bytes) -> int:
        start = self._offset
        before = self._decoder.getstate()
        piece = self._decoder.decode(token)
        if not self._text.startswith(piece):
            if start == 0 and piece[:1] == " " and self._text.startswith(piece[1:]):
                piece = piece[1:]  # some tokenizers drop the space in front of a text
            else:
                self._decoder.setstate(before)
                piece = ""
        self._offset += len(piece)
        self._text = self._text[len(piece) :]
        return start


class Report(Protocol):
    """The log-probabilities of one choice of an answer as a whole, as JSON that grows with every event."""

    @property
    def size_bytes(self) -> int: ...

    def add(self, text: str, entries: Sequence[LogprobEntry]) -> None: ...

    def whole(self) -> orjson.Fragment: ...


class NoReport:
    """For a request that asked for none."""

    size_bytes = 0

    def add(self, text: str, entries: Sequence[LogprobEntry]) -> None:
        pass

    def whole(self) -> orjson.Fragment:
        return orjson.Fragment(b"null")


class ChatReport:
    def __init__(self) -> None:
        self.size_bytes = 0
        self._entries: list[bytes] = []

    def add(self, text: str, entries: Sequence[LogprobEntry]) -> None:
        del text
        if entries:
            self._entries.append(orjson.dumps(chat_entries(entries))[1:-1])
            self.size_bytes += len(self._entries[-1])

    def whole(self) -> orjson.Fragment:
        return orjson.Fragment(b'{"content":[%b],"refusal":null}' % b",".join(self._entries))


class LegacyReport:
    def __init__(self) -> None:
        self.size_bytes = 0
        self._offsets = LegacyOffsets()
        self._lists: dict[str, list[bytes]] = {key: [] for key in self._offsets.entries("", ())}

    def add(self, text: str, entries: Sequence[LogprobEntry]) -> None:
        lists = self._offsets.entries(text, entries)
        if not entries:
            return
        for key, values in lists.items():
            self._lists[key].append(orjson.dumps(values)[1:-1])
            self.size_bytes += len(self._lists[key][-1])

    def whole(self) -> orjson.Fragment:
        members = [b'"%b":[%b]' % (key.encode(), b",".join(parts)) for key, parts in self._lists.items()]
        return orjson.Fragment(b"{%b}" % b",".join(members))


def _legacy_top(entry: LogprobEntry) -> dict[str, float]:
    """The alternatives and the sampled token itself; of two tokens with one text the likelier stays."""
    top: dict[str, float] = {}
    for token, logprob in (*entry.top, (entry.token, entry.logprob)):
        top.setdefault(token_text(token), finite(logprob))
    return top
