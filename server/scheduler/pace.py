"""When to plan the step behind the one on the device: late, so that newcomers join it, but before the device waits."""

from __future__ import annotations

from collections import deque

FIRST_LEAD_S = 0.002
LEAST_LEAD_S = 0.001
"""Timers of an event loop count milliseconds."""

LEAD_GROWTH = 2.0
LEAD_DECAY = 0.99
STEPS_REMEMBERED = 4


class Pace:
    """A step is expected to take as long as the shortest of the last few steps of about as many tokens (the same power
    of two); the next one is planned `lead` before its end. The lead doubles when that was too late, and shrinks by one
    per cent when it was not: so one hand-over in seventy is late at most, once the lead is right.

    A size of step that was never measured is expected to take no time: the next one is planned at once. So it is where
    the lead is longer than the steps, for instance when the loop has much text to send.

    Owner: the engine, on the event-loop thread.
    """

    def __init__(self) -> None:
        self._lead_s = FIRST_LEAD_S
        self._durations_s: dict[int, deque[float]] = {}

    def __repr__(self) -> str:
        return f"<Pace lead {self._lead_s:.4f} s>"

    def delay_s(self, step_tokens: int) -> float:
        """How long after the start of such a step the next one is planned."""
        durations_s = self._durations_s.get(step_tokens.bit_length())
        return max(0.0, min(durations_s) - self._lead_s) if durations_s else 0.0

    def note_step(self, step_tokens: int, duration_s: float) -> None:
        self._durations_s.setdefault(step_tokens.bit_length(), deque(maxlen=STEPS_REMEMBERED)).append(duration_s)

    def note_hand_over(self, *, slack_s: float, delayed: bool) -> None:
        """slack_s: how long before the end of a step the next one was handed over; negative if the device waited.
        Only a hand-over that was delayed could have come earlier."""
        if slack_s >= 0:
            self._lead_s = max(LEAST_LEAD_S, self._lead_s * LEAD_DECAY)
        elif delayed:
            self._lead_s *= LEAD_GROWTH
