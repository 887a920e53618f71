"""All grammars, and how often each is drawn."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tools.train_tiny import tasks_text, tasks_tools
from tools.train_tiny.grammar import Draw, Scene

GRAMMARS: dict[str, Callable[[Draw], Scene]] = {
    "needle": tasks_text.needle,
    "copy": tasks_text.copy,
    "tool_call": tasks_tools.tool_call,
    "tool_result": tasks_tools.tool_result,
    "system": tasks_text.system,
    "count": tasks_text.count,
    "arithmetic": tasks_text.arithmetic,
}

SHORT_TOKENS = 192
LONG_TOKENS = 768

MIXTURE: dict[str, tuple[float, float]] = {
    "needle": (0.30, 0.50),
    "copy": (0.18, 0.14),
    "tool_call": (0.17, 0.14),
    "tool_result": (0.13, 0.12),
    "system": (0.08, 0.04),
    "count": (0.06, 0.03),
    "arithmetic": (0.08, 0.03),
}
"""Share of the conversations at up to SHORT_TOKENS and from LONG_TOKENS on; linear between. Conversations of one length
bring about the same number of tokens whatever their task, so these are shares of the tokens too."""

POLISH: dict[str, tuple[float, float]] = {
    "needle": (0.10, 0.34),
    "copy": (0.06, 0.10),
    "tool_call": (0.50, 0.32),
    "tool_result": (0.16, 0.14),
    "system": (0.02, 0.02),
    "count": (0.05, 0.03),
    "arithmetic": (0.11, 0.05),
}
"""The same for the end of the training: which tool fits, and sums, are what is learned last."""

MIXTURES = {"all": MIXTURE, "polish": POLISH}

TASKS = ("needle", "copy", "tool_call", "no_tool", "tool_result", "system", "count", "arithmetic")
"""What a turn is scored as. Conversations of the grammar tool_call hold both tool_call and no_tool."""

THINKING = 0.4
"""Share of the conversations in which the assistant thinks before each answer."""


def choose(rng: Random, tokens: int, mixture: str = "all") -> str:
    """A grammar for a conversation of so many tokens, from one of MIXTURES."""
    place = min(1.0, max(0.0, (tokens - SHORT_TOKENS) / (LONG_TOKENS - SHORT_TOKENS)))
    shares = MIXTURES[mixture]
    weights = [short + (long - short) * place for short, long in shares.values()]
    return rng.choices(list(shares), weights)[0]
