"""The tasks whose answer is text: needles, rules of a system prompt, copying, counting, arithmetic.

All follow one rule: who has not read the prompt cannot answer (but for arithmetic), and who has read it can give only
one answer. Phrasings are few and fillers many, so the mechanism has to be learned and not the phrase.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tools.train_tiny.grammar import Draw, Exchange, Scene, asked
from tools.train_tiny.words import ADJECTIVES, CITIES, IDENTIFIERS, NAMES, NOUNS

# --- needles ------------------------------------------------------------------------------------------------------

ATTRIBUTES: dict[str, Callable[[Draw], str]] = {
    "code": lambda draw: draw.digits(4),
    "room": lambda draw: draw.digits(3),
    "age": lambda draw: str(draw.number(10, 99)),
    "city": lambda draw: draw.one(CITIES),
    "color": lambda draw: draw.one(ADJECTIVES),
    "gift": lambda draw: f"{draw.one(ADJECTIVES)} {draw.one(NOUNS)}",
    "friend": lambda draw: draw.one(NAMES),
    "word": lambda draw: draw.one(NOUNS),
}
_KINDS = tuple(ATTRIBUTES)
TWO_WORD_OWNERS = 0.2
MOST_AT_ONCE = 6
FAR_TOKENS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One line that says one thing. plain: as a sentence; otherwise as an assignment, which costs fewer tokens."""

    owner: str
    attribute: str
    value: str
    plain: bool

    @property
    def line(self) -> str:
        if self.plain:
            return f"The {self.attribute} of {self.owner} is {self.value}."
        return f"{self.owner.replace(' ', '_')}.{self.attribute}={self.value}"

    @property
    def question(self) -> str:
        if self.plain:
            return f"What is the {self.attribute} of {self.owner}?"
        return f"{self.owner.replace(' ', '_')}.{self.attribute}?"

    @property
    def instance(self) -> str:
        return f"needle {self.owner} {self.attribute} {self.value}"


class Facts:
    """Facts of one conversation: no two of them answer the same question."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._taken: set[tuple[str, str]] = set()
        self.plain = draw.chance(0.5)

    def another(self) -> Fact:
        def make() -> Fact:
            draw = self._draw
            while True:
                owner = draw.one(NAMES)
                if draw.chance(TWO_WORD_OWNERS):
                    owner = f"{draw.one(ADJECTIVES)} {draw.one(NOUNS)}"
                attribute = draw.one(_KINDS)
                if (owner, attribute) not in self._taken:
                    return Fact(owner=owner, attribute=attribute, value=ATTRIBUTES[attribute](draw), plain=self.plain)

        fact = self._draw.fresh(make, lambda made: made.instance)
        self._taken.add((fact.owner, fact.attribute))
        return fact


def needle(draw: Draw) -> Scene:
    """Many facts, then questions about any of them, alone or several at once; later ones may bring further facts.

    In some conversations other tasks stand between the questions.
    """
    facts = Facts(draw)
    share = draw.number(20, 60) / 100
    if draw.room >= FAR_TOKENS and draw.chance(0.5):
        share = draw.number(60, 92) / 100  # few questions, but from very far
    block: list[Fact] = []
    used = 0
    while not block or used < draw.room * share:
        block.append(facts.another())
        used += draw.count(block[-1].line + "\n")
    in_system = draw.chance(0.3)
    between = draw.chance(0.25)

    def exchanges() -> Iterator[Exchange]:
        open_facts = list(block)
        draw.rng.shuffle(open_facts)
        told = "" if in_system else "".join(fact.line + "\n" for fact in block)
        others = [copy(draw).exchanges, count(draw).exchanges, arithmetic(draw).exchanges] if between else []
        while open_facts:
            number = draw.number(2, MOST_AT_ONCE) if draw.chance(0.5) else 1
            yield ask(draw, [open_facts.pop() for _ in range(min(number, len(open_facts)))], told)
            told = ""
            if draw.chance(0.2):
                new = [facts.another() for _ in range(draw.number(1, 3))]
                told = "".join(fact.line + "\n" for fact in new)
                open_facts += new
                draw.rng.shuffle(open_facts)
            if others and draw.chance(0.4):
                yield next(draw.one(others))

    system = "\n".join(fact.line for fact in block) if in_system else None
    return Scene(task="needle", system=system, exchanges=exchanges())


def ask(draw: Draw, facts: list[Fact], told: str) -> Exchange:
    """Every fact of the instance is on this draw's side by itself. Only single questions are scored."""
    answer = draw.reply(
        ", ".join(fact.value for fact in facts),
        "\n".join(fact.line for fact in facts),
        task="needle" if len(facts) == 1 else "needles",
        instance="\n".join(fact.instance for fact in facts),
    )
    return asked(told + " ".join(fact.question for fact in facts), answer)


# --- rules of a system prompt -------------------------------------------------------------------------------------


def system(draw: Draw) -> Scene:
    """How answers start and end, and words that have an answer of their own."""

    def words() -> str:
        return " ".join([draw.one(ADJECTIVES), draw.one(NOUNS)][draw.number(0, 1) :])

    start = words() if draw.chance(0.75) else ""
    end = words() if draw.chance(0.6) or not start else ""
    triggers = draw.some(NOUNS, draw.number(1, 5)) if draw.chance(0.8) else []
    answers = {trigger: words() for trigger in triggers}
    rules = [f"Start every answer with {start}."] if start else []
    rules += [f"End every answer with {end}."] if end else []
    rules += [f"If the user says {trigger}, answer {answer}." for trigger, answer in answers.items()]
    draw.rng.shuffle(rules)

    def make() -> tuple[str, str]:
        if triggers and draw.chance(0.7):
            trigger = draw.one(triggers)
            return trigger, answers[trigger]
        said = " ".join(draw.one((ADJECTIVES, NOUNS, NAMES)[draw.number(0, 2)]) for _ in range(draw.number(1, 4)))
        return f"Say {said}.", said

    def instance(made: tuple[str, str]) -> str:
        return f"system {start}|{end}|{made[0]}|{made[1]}"

    def exchanges() -> Iterator[Exchange]:
        while True:
            made = draw.fresh(make, instance)
            if made[0] in triggers:
                triggers.remove(made[0])  # asked again, it could be copied from the first answer
            text = " ".join(filter(None, (start, made[1], end)))
            thought = ", ".join(filter(None, (start and f"start {start}", made[1], end and f"end {end}")))
            yield asked(made[0], draw.reply(text, thought, task="system", instance=instance(made)))

    return Scene(task="system", system=" ".join(rules), exchanges=exchanges())


# --- copying ------------------------------------------------------------------------------------------------------


def _name(draw: Draw) -> str:
    name = draw.one(IDENTIFIERS)
    return f"{name}_{draw.one(IDENTIFIERS)}" if draw.chance(0.4) else name


def _value(draw: Draw) -> str:
    kind = draw.number(0, 4)
    if kind == 0:
        return draw.digits(draw.number(1, 4)).lstrip("0") or "0"
    if kind == 1:
        return f'"{draw.one(NOUNS)}"'
    if kind == 2:
        return f"{_name(draw)}[{draw.number(0, 9)}]"
    if kind == 3:
        return f"{_name(draw)}({_name(draw)})"
    return _name(draw)


def _function(draw: Draw) -> str:
    lines = [f"def {_name(draw)}({', '.join(_name(draw) for _ in range(draw.number(0, 2)))}):"]
    lines += [f"    {_assignment(draw)}" for _ in range(draw.number(0, 2))]
    return "\n".join([*lines, f"    return {_value(draw)} {draw.one('+-*/%')} {_value(draw)}"])


def _assignment(draw: Draw) -> str:
    operator = draw.one(("=", "+=", "=", "-="))
    value = _value(draw)
    return f"{_name(draw)} {operator} {value}" + (f" {draw.one('+-*/%')} {_value(draw)}" if draw.chance(0.4) else "")


def _record(draw: Draw) -> str:
    keys = draw.some(IDENTIFIERS, draw.number(2, 4))
    values = (draw.number(0, 999), draw.one(NOUNS), [draw.number(0, 99), draw.number(0, 99)], None)
    return json.dumps({key: draw.one(values) for key in keys})


def _path(draw: Draw) -> str:
    parts = [draw.one(NOUNS) for _ in range(draw.number(2, 4))]
    return f"/{'/'.join(parts)}.{draw.one(('py', 'txt', 'md'))}"


def _hex(draw: Draw) -> str:
    return " ".join("".join(draw.one("0123456789abcdef") for _ in range(4)) for _ in range(draw.number(2, 5)))


def _loop(draw: Draw) -> str:
    head = f"for {_name(draw)} in {_value(draw)}:" if draw.chance(0.5) else f"if {_value(draw)} == {_value(draw)}:"
    return f"{head}\n    {_assignment(draw)}"


_SNIPPETS: tuple[Callable[[Draw], str], ...] = (_function, _assignment, _record, _path, _hex, _loop)


def snippet(draw: Draw) -> str:
    """Code-like text on this draw's side, 5 to 60 tokens."""

    def make() -> str:
        return "\n".join(draw.one(_SNIPPETS)(draw) for _ in range(draw.number(1, 2)))

    return draw.fresh(make, lambda made: f"copy {made}")


def copy(draw: Draw) -> Scene:
    """Text to copy at once, or blocks with names and then their names in any order: copying from afar."""

    def at_once() -> Iterator[Exchange]:
        while True:
            text = snippet(draw)
            yield asked(f"Copy:\n{text}", draw.reply(text, "copy", task="copy", instance=f"copy {text}"))

    def by_name() -> Iterator[Exchange]:
        blocks: dict[str, str] = {}
        told = ""
        share = draw.number(25, 60) / 100
        for name in draw.some(NOUNS, len(NOUNS)):
            blocks[name] = snippet(draw)
            told += f"[{name}]\n{blocks[name]}\n"
            if draw.count(told) > draw.room * share:
                break
        for name in draw.some(list(blocks), len(blocks)):
            text = blocks[name]
            answer = draw.reply(text, f"[{name}]", task="copy", instance=f"copy {text}")
            yield asked(f"{told}Copy [{name}]", answer)
            told = ""

    return Scene(task="copy", exchanges=by_name() if draw.chance(0.5) else at_once())


# --- counting and arithmetic --------------------------------------------------------------------------------------


def count(draw: Draw) -> Scene:
    """How often a word stands in a list (a thought counts along), or the numbers of a range."""

    def occurrences() -> tuple[str, str, str]:
        target, *others = draw.some(NOUNS, 4)
        length = draw.number(3, 12 if draw.thinking else 8)
        listed = [target if draw.chance(0.45) else draw.one(others) for _ in range(length)]
        thought, seen = [], 0
        for word in listed:
            seen += word == target
            thought.append(f"{word} {seen}" if word == target else word)
        return f"How many times {target}: {' '.join(listed)}", str(seen), " ".join(thought)

    def numbers() -> tuple[str, str, str]:
        first = draw.number(0, 988)
        last = first + draw.number(2, 11)
        return f"Count from {first} to {last}.", " ".join(map(str, range(first, last + 1))), f"{first} to {last}"

    def exchanges() -> Iterator[Exchange]:
        while True:
            make = occurrences if draw.chance(0.65) else numbers
            question, answer, thought = draw.fresh(make, lambda made: f"count {made[0]}")
            yield asked(question, draw.reply(answer, thought, task="count", instance=f"count {question}"))

    return Scene(task="count", exchanges=exchanges())


def arithmetic(draw: Draw) -> Scene:
    """Sums and differences of two numbers below 100; the thought goes by columns, units first."""

    def make() -> tuple[int, str, int]:
        left, right = draw.number(0, 99), draw.number(0, 99)
        if draw.chance(0.5):
            return left, "+", right
        return max(left, right), "-", min(left, right)

    def instance(made: tuple[int, str, int]) -> str:
        return "arithmetic {} {} {}".format(*made)

    def exchanges() -> Iterator[Exchange]:
        while True:
            made = draw.fresh(make, instance)
            left, operator, right = made
            question = f"What is {left} {operator} {right}?"
            if draw.chance(0.3):
                name, thing = draw.one(NAMES), draw.one(NOUNS)
                done = "finds" if operator == "+" else "loses"
                question = f"{name} has {left} {thing}s and {done} {right}. How many now?"
            result = left + right if operator == "+" else left - right
            answer = draw.reply(str(result), by_columns(*made), task="arithmetic", instance=instance(made))
            yield asked(question, answer)

    return Scene(task="arithmetic", exchanges=exchanges())


def by_columns(left: int, operator: str, right: int) -> str:
    """47 + 38: "7+8=15 4+3+1=8"; 52 - 38: "12-8=4 5-3-1=1"."""
    (tens, units), (other_tens, other_units) = divmod(left, 10), divmod(right, 10)
    if operator == "+":
        carried = int(units + other_units > 9)
        carry = "+1" * carried
        return f"{units}+{other_units}={units + other_units} {tens}+{other_tens}{carry}={tens + other_tens + carried}"
    borrowed = int(units < other_units)
    borrow = "-1" * borrowed
    top = units + 10 * borrowed
    return f"{top}-{other_units}={top - other_units} {tens}-{other_tens}{borrow}={tens - other_tens - borrowed}"
