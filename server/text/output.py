"""What becomes of the sampled tokens of one choice: visible text, log-probabilities, and an end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from server.errors import TwinpaneError
from server.request import (
    ChoiceFailed,
    ChoiceFinished,
    Event,
    FinishReason,
    LogprobEntry,
    SampledToken,
    StopRules,
    TextDelta,
)
from server.text.detokenizer import Detokenizer
from server.text.stop_strings import StopStrings
from server.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _Pending:
    """A log-probability that waits for its token's text, characters [start, stop) of the choice's text.

    stop is None while the token ends inside a character.
    """

    entry: LogprobEntry
    start: int
    stop: int | None


class TextOutput:
    """Turns the tokens of one choice into events. Implements `OutputStream`; owner: the engine, on the event loop.

    The rules, in the order in which one token meets them:
      1. A stop id ends the choice (STOP) if at least `min_tokens` tokens came before it. It shows no text, and what
         was held back is shown first. `matched` is the id, unless it is one of the model's own end ids.
      2. The text it completes is shown. A stop string that lies wholly in the text completed by tokens after the
         first `min_tokens` ends the choice (STOP), and hides itself and all behind it. Control tokens are not text
         when they are skipped, so no stop string matches across or inside them.
      3. Token number `max_tokens` ends the choice (LENGTH), and what was held back is shown. A character that the
         limit cuts in two is left out: its beginning would show as U+FFFD. (Before a stop id it does: the model said
         so.)
    Text flushed at an end still meets rule 2, since it belongs to earlier tokens.

    Log-probabilities leave exactly once, each with the text that completes its token (alone, if its token has none).
    Behind a stop string's cut they are dropped with their text: an entry stays if its token's text begins before the
    cut. A stop token's entry is dropped too, as it shows no text. The bytes of all entries, put together, are those of
    the text (to which only a stop string's cut makes an exception): a skipped control token has none, and a character
    that the length limit left out has none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        choice: int,
        stop: StopRules,
        emit: Callable[[Event], None],
        skip_special_tokens: bool = True,
        logprobs: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._choice = choice
        self._rules = stop
        self._emit = emit
        self._logprobs = logprobs
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special_tokens)
        self._stops = StopStrings(stop.stop, include_stop=stop.include_stop)
        self._pending: deque[_Pending] = deque()
        self._tokens = 0
        self._read_chars = 0  # characters that the detokenizer has completed
        self._shown_chars = 0  # characters of them that were emitted
        self._over = False

    def push(self, token: SampledToken) -> FinishReason | None:
        """Take the next token; a returned reason says that the choice is over. After its end, nothing happens."""
        if self._over:
            return None
        self._tokens += 1
        if token.token_id in self._rules.stop_token_ids and self._tokens > self._rules.min_tokens:
            own_end = token.token_id in self._tokenizer.stop_token_ids
            return self._end(FinishReason.STOP, matched=None if own_end else token.token_id)

        start = self._read_chars
        text = self._detokenizer.push(token.token_id)
        self._read_chars += len(text)
        if self._logprobs:
            self._note_logprob(token, start)
        if self._stops.empty or self._tokens <= self._rules.min_tokens:
            self._show(text)
        elif matched := self._show_until_stop(text):
            return self._finish(FinishReason.STOP, matched)
        return self._end(FinishReason.LENGTH, matched=None) if self._tokens >= self._rules.max_tokens else None

    def fail(self, error: TwinpaneError) -> None:
        """End the choice with an error; text that was held back is lost with it."""
        if not self._over:
            self._over = True
            self._emit(ChoiceFailed(choice=self._choice, error=error))

    def cancel(self) -> None:
        """End the choice in silence."""
        self._over = True

    def _end(self, reason: FinishReason, *, matched: int | None) -> FinishReason:
        """No more text comes: show what is held, unless a stop string appears in it."""
        held = self._detokenizer.held_bytes
        text = self._detokenizer.flush()
        if reason is FinishReason.LENGTH and held:
            text = ""
            self._drop_last_bytes(held)
        self._read_chars += len(text)
        for waiting in self._pending:
            waiting.stop = self._read_chars if waiting.stop is None else waiting.stop
        # Text of the first min_tokens tokens does not match, and no later token has been read if so few came.
        if self._tokens <= self._rules.min_tokens:
            self._show(text)
        elif stop := self._show_until_stop(text):
            return self._finish(FinishReason.STOP, stop)
        self._show(self._stops.flush())
        return self._finish(reason, matched)

    def _finish(self, reason: FinishReason, matched: str | int | None) -> FinishReason:
        self._over = True
        self._pending.clear()
        self._emit(ChoiceFinished(choice=self._choice, reason=reason, matched=matched, output_tokens=self._tokens))
        return reason

    def _show_until_stop(self, text: str) -> str | None:
        visible = self._stops.push(text)
        if visible.matched is not None:
            self._cut_logprobs(self._shown_chars + len(visible.text))
        self._show(visible.text)
        return visible.matched

    def _show(self, text: str) -> None:
        self._shown_chars += len(text)
        entries = tuple(self._completed_logprobs()) if self._pending else ()
        if text or entries:
            self._emit(TextDelta(choice=self._choice, text=text, logprobs=entries))

    def _note_logprob(self, token: SampledToken, start: int) -> None:
        """Queue this token's log-probability, and settle where the text of earlier tokens ends."""
        spell = self._tokenizer.token_bytes
        held = self._detokenizer.held_bytes
        if held <= len(self._detokenizer.text_bytes(token.token_id)):  # all bytes of earlier tokens are in the text now
            for waiting in self._pending:
                waiting.stop = self._read_chars if waiting.stop is None else waiting.stop
        if token.logprob is None:
            return
        entry = LogprobEntry(
            token=self._detokenizer.text_bytes(token.token_id),
            logprob=token.logprob,
            top=tuple((spell(index), logprob) for index, logprob in token.top),
        )
        self._pending.append(_Pending(entry, start, None if held else self._read_chars))

    def _completed_logprobs(self) -> list[LogprobEntry]:
        entries = []
        while self._pending and (stop := self._pending[0].stop) is not None and stop <= self._shown_chars:
            entries.append(self._pending.popleft().entry)
        return entries

    def _drop_last_bytes(self, count: int) -> None:
        """The last bytes are not shown after all: take them from the entries of their tokens, which still wait."""
        for waiting in reversed(self._pending):
            token = waiting.entry.token
            kept = max(0, len(token) - count)
            waiting.entry = replace(waiting.entry, token=token[:kept])
            count -= len(token) - kept

    def _cut_logprobs(self, cut: int) -> None:
        """Text ends at character `cut`: entries that begin there or later go, those before are complete by it."""
        kept = [waiting for waiting in self._pending if waiting.start < cut]
        self._pending = deque(_Pending(waiting.entry, waiting.start, min(waiting.stop or cut, cut)) for waiting in kept)
