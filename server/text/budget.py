"""What the encoding of one prompt may cost, and its end when nobody waits for it any more."""

from __future__ import annotations

from server.errors import TooLong

_GENEROUS = 2
"""Prompts of up to this many contexts are counted to their end, so that their refusal tells the real number."""


class Abandoned(Exception):
    """Nobody waits for the tokens."""


class Budget:
    """Refuses a prompt while it is encoded, as soon as it cannot fit by a good margin.

    Owner: the thread that encodes; only `abandon` is called from another one, and it sets one flag.
    """

    def __init__(self, context_tokens: int | None = None, *, param: str = "messages") -> None:
        """context_tokens None: no prompt is too long. param: what the refusal names."""
        self._context_tokens = context_tokens
        self._param = param
        self._tokens = 0
        self._abandoned = False

    def abandon(self) -> None:
        """Make the next check raise."""
        self._abandoned = True

    def check(self) -> None:
        """Raise Abandoned if nobody waits any more."""
        if self._abandoned:
            raise Abandoned

    def spend(self, tokens: int) -> None:
        """Count tokens of the prompt. Raises TooLong, or Abandoned."""
        self._tokens += tokens
        self.foresee(0)

    def foresee(self, tokens: int) -> None:
        """The prompt has at least this many tokens more than were counted. Raises as `spend`."""
        self.check()
        least = self._tokens + tokens
        if self._context_tokens is not None and least > _GENEROUS * self._context_tokens:
            raise TooLong(prompt_tokens=least, context_tokens=self._context_tokens, param=self._param)
