"""What every grammar makes (conversations of exchanges), and the chance it makes them with, which keeps a side.

Every scored turn has an instance: the filled-in words that decide its answer. A hash of the instance puts it on one
of two sides, training or held out, and a `Draw` makes instances of its own side only. So the split holds for whatever
is drawn, with whatever seed, and needs no list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

HELD_OUT_ONE_IN = 16
"""One of that many instances is never trained on."""

NO_TOOL = "No tool fits."

T = TypeVar("T")

_TRIES = 400
"""Draws for one instance. One in 16 is held out, so where there are many, this misses once in 10^11."""


class NothingLeft(Exception):
    """What was drawn so far (a tool with one parameter of few values, say) leaves no instance on this side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """kind: "string", "integer", "array" (of strings) or "object" (of integers)."""

    name: str
    kind: str
    required: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    name: str
    description: str
    parameters: tuple[Parameter, ...]

    def declared(self) -> dict[str, Any]:
        """As the OpenAI API takes it."""
        properties = {each.name: {"type": each.kind} for each in self.parameters}
        required = [each.name for each in self.parameters if each.required]
        schema = {"type": "object", "properties": properties, "required": required}
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """role: "user", "assistant" or "tool". What an assistant's turn is scored as, and its instance, if it is scored."""

    role: str
    text: str = ""
    thought: str = ""
    calls: tuple[Call, ...] = ()
    task: str = ""
    instance: str = ""


Exchange = tuple[Turn, ...]
"""A user's turn and all that follows until the next one; it ends with the assistant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A conversation that goes on: `exchanges` may end, and any number of them from the first is a whole."""

    task: str
    exchanges: Iterator[Exchange]
    system: str | None = None
    tools: tuple[Tool, ...] = ()


def is_held_out(instance: str) -> bool:
    digest = hashlib.blake2b(instance.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


class Draw:
    """Seeded chance for one conversation. `room` is how many tokens it is to fill, by the measure `count`."""

    def __init__(self, rng: Random, *, held_out: bool, thinking: bool, room: int, count: Callable[[str], int]) -> None:
        self.rng = rng
        self.held_out = held_out
        self.thinking = thinking
        self.room = room
        self.count = count
        self._used: set[str] = set()

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def one(self, words: Sequence[T]) -> T:
        return words[int(self.rng.random() * len(words))]

    def some(self, words: Sequence[T], number: int) -> list[T]:
        """Different ones."""
        return self.rng.sample(words, number)

    def number(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return low + int(self.rng.random() * (high - low + 1))

    def digits(self, number: int) -> str:
        return "".join(self.one("0123456789") for _ in range(number))

    def fresh(self, make: Callable[[], T], instance: Callable[[T], str]) -> T:
        """Make until the instance is on this draw's side and new to the conversation, so that its answer cannot be
        copied from an earlier one. Raises NothingLeft if there seems to be none."""
        for _ in range(_TRIES):
            made = make()
            words = instance(made)
            if words not in self._used and self.is_mine(words):
                self._used.add(words)
                return made
        raise NothingLeft

    def is_mine(self, instance: str) -> bool:
        return is_held_out(instance) is self.held_out

    def reply(self, text: str, thought: str, *, task: str, instance: str) -> Turn:
        """The assistant's answer, with the thought where this conversation has thinking on."""
        return Turn(role="assistant", text=text, thought=thought if self.thinking else "", task=task, instance=instance)


def asked(question: str, answer: Turn) -> Exchange:
    return Turn(role="user", text=question), answer
