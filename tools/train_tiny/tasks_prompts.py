"""Held-out prompts to score: a fixed set, and needles at any distance.

    python -m tools.train_tiny.tasks_prompts      makes bench/data/tiny_tasks.jsonl again

A prompt is a held-out conversation up to a turn of the assistant, which is the expected answer. `text` renders it by
the shipped template and `tokens` counts that, so it can be checked whether a server sees the same prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from server.text.template_sandbox import CompiledTemplate, Deadline
from tools.train_tiny.conversation import TEMPLATE_PATH, Talk, with_argument_objects
from tools.train_tiny.data import shared_renderer, talks
from tools.train_tiny.grammar import Draw
from tools.train_tiny.tasks import TASKS
from tools.train_tiny.tasks_score import Answer
from tools.train_tiny.tasks_text import Fact, Facts, ask
from tools.train_tiny.tokenizer import load_tokenizer

FIXTURE = Path(__file__).parents[2] / "bench" / "data" / "tiny_tasks.jsonl"
PROMPTS_PER_TASK = 120
NEEDLE_TOKENS = (64, 2_300)
OTHER_TOKENS = (120, 420)
FARTHEST_TOKENS = 2_000
_GRAMMAR_OF = {"no_tool": "tool_call"}
_SEED = 20_261_130
_RENDER_LIMIT_S = 60.0
_BEFORE_TOKENS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """messages and tools: as the API takes them. distance: tokens between a needle's value and the question about it.

    instance: what the held-out split is made by.
    """

    id: str
    task: str
    thinking: bool
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    expected: Answer
    tokens: int
    instance: str
    distance: int | None = None

    @property
    def text(self) -> str:
        """The prompt as the shipped template renders it, with the start of the assistant's turn."""
        return _rendered(self.messages, self.tools, self.thinking)

    @property
    def expected_text(self) -> str:
        """The expected answer as the model is to write it after `text`; "" where a thought comes first, which the
        fixture does not tell."""
        if self.thinking:
            return ""
        calls = [
            {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for name, arguments in self.expected.calls
        ]
        answer = {"role": "assistant", "content": self.expected.content, **({"tool_calls": calls} if calls else {})}
        whole = _rendered([*self.messages, answer], self.tools, self.thinking, goes_on=False)
        assert whole.startswith(self.text), "the template renders a prompt and its answer as two texts"
        return whole.removeprefix(self.text)


def load(path: Path = FIXTURE) -> list[Prompt]:
    return [_from_json(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def fixture() -> Iterator[Prompt]:
    for task in TASKS:
        yield from held_out(task, PROMPTS_PER_TASK, seed=_SEED)


def held_out(task: str, count: int, *, seed: int) -> Iterator[Prompt]:
    """Prompts of one task, no two of the same instance. Needles get longer from the first to the last."""
    rng = Random(f"{seed} {task}")
    seen: set[str] = set()
    while len(seen) < count:
        shortest, longest = OTHER_TOKENS
        if task == "needle":
            low, high = NEEDLE_TOKENS
            longest = low + (high - low) * (len(seen) + 1) // count
            shortest, longest = max(low, longest * 3 // 4), max(longest, 2 * low)
        made = talks(
            rng.getrandbits(32),
            shortest=shortest,
            longest=longest,
            held_out=True,
            grammar=_GRAMMAR_OF.get(task, task),
        )
        talk, _ = next(made)
        fitting = [index for index, turn in enumerate(talk.turns) if turn.task == task and turn.instance not in seen]
        if not fitting:
            continue
        index = fitting[-1] if task == "needle" else rng.choice(fitting[len(fitting) // 2 :])
        seen.add(talk.turns[index].instance)
        yield _prompt(talk, index, id=f"{task}-{len(seen):03d}", distance=_distance(talk, index))


def needle_at(distance: int, *, seed: int) -> Prompt:
    """A question about a fact with about so many tokens between its value and the question; `distance` tells how many.

    Held out. Not every small distance can be met: behind the fact stand whole lines only.
    """
    rng = Random(f"{seed} {distance}")
    tokenizer = load_tokenizer()

    def count(text: str) -> int:
        return len(tokenizer.encode(text, parse_special=False, add_bos=False))

    draw = Draw(rng, held_out=True, thinking=rng.random() < 0.5, room=distance, count=count)
    facts = Facts(draw)
    before = _lines(facts, rng.randint(0, _BEFORE_TOKENS), count)
    needle = facts.another()
    after = _lines(facts, distance - 1, count)
    told = "".join(fact.line + "\n" for fact in (*before, needle, *after))
    talk = Talk(shared_renderer(), [ask(draw, [needle], told)], system=None, tools=(), thinking=draw.thinking)
    met = count("".join(fact.line + "\n" for fact in (needle, *after))) - _until_value(needle, count)
    return _prompt(talk, 1, id=f"distance-{met}-{seed}", distance=met)


def _lines(facts: Facts, tokens: int, count: Any) -> list[Fact]:
    """Facts of about so many tokens: the last one is the best of some."""
    made: list[Fact] = []
    left = tokens
    while left > 0:
        drawn = [facts.another() for _ in range(1 if left > 24 else 8)]
        best = min(drawn, key=lambda fact: abs(left - count(fact.line + "\n")) if left <= 24 else 0)
        cost = count(best.line + "\n")
        if cost - left > left:
            break
        made.append(best)
        left -= cost
    return made


def _until_value(fact: Fact, count: Any) -> int:
    """Tokens of a fact's line up to the end of its value."""
    line = fact.line
    return int(count(line[: line.rindex(fact.value) + len(fact.value)]))


def _distance(talk: Talk, index: int) -> int | None:
    """For a needle, counted in the rendered prompt; None for other tasks."""
    turn = talk.turns[index]
    if turn.task != "needle":
        return None
    text = _rendered(talk.messages(index), talk.tools, talk.thinking)
    _, owner_attribute = turn.instance.split(" ", 1)
    value = turn.text
    subject = owner_attribute[: -len(value) - 1]
    owner, attribute = subject.rsplit(" ", 1)
    lines = [Fact(owner=owner, attribute=attribute, value=value, plain=plain).line for plain in (True, False)]
    line = next(line for line in lines if line in text)
    told = text.index(line) + line.rindex(value) + len(value)
    question = talk.turns[index - 1].text.rpartition("\n")[2]
    encode = load_tokenizer().encode
    return len(encode(text[told : text.rindex(question)], parse_special=True, add_bos=False))


def _prompt(talk: Talk, index: int, *, id: str, distance: int | None) -> Prompt:
    turn = talk.turns[index]
    messages = talk.messages(index)
    text = _rendered(messages, talk.tools, talk.thinking)
    return Prompt(
        id=id,
        task=turn.task,
        thinking=talk.thinking,
        messages=messages,
        tools=talk.tools,
        expected=Answer(content=turn.text, calls=tuple((call.name, call.arguments) for call in turn.calls)),
        tokens=len(load_tokenizer().encode(text, parse_special=True, add_bos=False)),
        instance=turn.instance,
        distance=distance,
    )


@lru_cache(maxsize=1)
def _template() -> CompiledTemplate:
    return CompiledTemplate(TEMPLATE_PATH.read_text(encoding="utf-8"))


def _rendered(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], thinking: bool, *, goes_on: bool = True
) -> str:
    variables = {
        "messages": [with_argument_objects(message) for message in messages],
        "tools": tools or None,
        "add_generation_prompt": goes_on,
        "enable_thinking": thinking,
    }
    return _template().render(variables, Deadline(limit_s=_RENDER_LIMIT_S))


def to_json(prompt: Prompt) -> dict[str, Any]:
    return {
        "id": prompt.id,
        "task": prompt.task,
        "thinking": prompt.thinking,
        "tokens": prompt.tokens,
        "distance": prompt.distance,
        "instance": prompt.instance,
        "expected": {"content": prompt.expected.content, "calls": list(map(list, prompt.expected.calls))},
        "messages": prompt.messages,
        "tools": prompt.tools,
    }


def _from_json(line: Mapping[str, Any]) -> Prompt:
    expected = line["expected"]
    calls = tuple((name, arguments) for name, arguments in expected["calls"])
    return Prompt(**{**line, "expected": Answer(content=expected["content"], calls=calls)})


if __name__ == "__main__":
    with FIXTURE.open("w", encoding="utf-8") as out:
        for each in fixture():
            out.write(json.dumps(to_json(each), separators=(",", ":")) + "\n")
