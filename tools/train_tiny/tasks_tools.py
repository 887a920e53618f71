"""The tasks with tools: which one to call with what, what to make of its results, and that none fits.

What a tool does stands only in its description, since half of the names say nothing, and a request uses the words of a
description: the model has to read the list of every prompt. A request gives values in words; the call has them as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tools.train_tiny.grammar import NO_TOOL, Call, Draw, Exchange, Parameter, Scene, Tool, Turn
from tools.train_tiny.words import ADJECTIVES, CITIES, NAMES, NOUNS, VERBS

PARAMETERS: dict[str, tuple[str, Callable[[Draw], Any]]] = {
    "city": ("string", lambda draw: draw.one(CITIES)),
    "owner": ("string", lambda draw: draw.one(NAMES)),
    "color": ("string", lambda draw: draw.one(ADJECTIVES)),
    "code": ("string", lambda draw: draw.digits(4)),
    "text": ("string", lambda draw: " ".join(draw.one(NOUNS) for _ in range(draw.number(2, 4)))),
    "size": ("integer", lambda draw: draw.number(0, 999)),
    "level": ("integer", lambda draw: draw.number(0, 99)),
    "tags": ("array", lambda draw: draw.some(ADJECTIVES, draw.number(1, 3))),
    "items": ("array", lambda draw: draw.some(NOUNS, draw.number(1, 3))),
    "box": ("object", lambda draw: {"x": draw.number(0, 99), "y": draw.number(0, 99)}),
}
FIELDS: dict[str, tuple[str, Callable[[Draw], Any]]] = {
    "state": ("string", lambda draw: draw.one(ADJECTIVES)),
    "place": ("string", lambda draw: draw.one(CITIES)),
    "user": ("string", lambda draw: draw.one(NAMES)),
    "key": ("string", lambda draw: draw.digits(4)),
    "rate": ("integer", lambda draw: draw.number(0, 99)),
    "width": ("integer", lambda draw: draw.number(100, 999)),
}
TOKENS_PER_TOOL = 75


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing a user wants done. call is None if no declared tool does it. taken: parameter -> field of a result."""

    action: str
    words: str
    call: Call | None


def toolbox(draw: Draw, share: float) -> dict[str, Tool]:
    """Action ("open the lamp") -> tool. Some actions share their verb or their noun, so both have to be read."""
    most = max(2, min(7, int(draw.room * share / TOKENS_PER_TOOL)))
    boxed: dict[str, Tool] = {}
    verb, noun = draw.one(VERBS), draw.one(NOUNS)
    for _ in range(draw.number(1 if most < 3 else 2, most)):
        while _action(verb, noun) in boxed:
            part = draw.rng.random()
            verb = verb if part < 0.15 else draw.one(VERBS)
            noun = noun if 0.15 <= part < 0.3 else draw.one(NOUNS)
        action = _action(verb, noun)
        names = {tool.name for tool in boxed.values()}
        name = _tool_name(draw, verb, noun)
        while name in names:
            name = _tool_name(draw, verb, noun)
        parameters = tuple(
            Parameter(name=each, kind=PARAMETERS[each][0], required=draw.chance(0.75))
            for each in draw.some(tuple(PARAMETERS), draw.number(1, 3))
        )
        boxed[action] = Tool(name=name, description=f"To {action}", parameters=parameters)
    order = list(boxed)
    draw.rng.shuffle(order)
    return {action: boxed[action] for action in order}


def _action(verb: str, noun: str) -> str:
    return f"{verb} the {noun}"


def _tool_name(draw: Draw, verb: str, noun: str) -> str:
    if draw.chance(0.5):
        return f"{verb}_{noun}"
    return f"{draw.one(ADJECTIVES)}_{draw.one(NOUNS)}"


def in_words(value: Any) -> str:
    """How a user says a value: 4821; red, blue; x 3, y 5."""
    if isinstance(value, list):
        return ", ".join(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value)


def wanted(draw: Draw, action: str, tool: Tool) -> Task:
    """A request that the tool answers; some of its optional parameters are left out."""
    used = [each for each in tool.parameters if each.required or draw.chance(0.5)]
    arguments = {each.name: PARAMETERS[each.name][1](draw) for each in used}
    words = "; ".join(f"{name} {in_words(value)}" for name, value in arguments.items())
    return Task(
        action=action,
        words=f"{action}: {words}." if words else f"{action}.",
        call=Call(name=tool.name, arguments=arguments),
    )


def unknown(draw: Draw, boxed: dict[str, Tool]) -> Task:
    """A request that none answers, though a verb or a noun of it may be in the list."""
    declared = [action.split(" the ") for action in boxed]
    while True:
        verb = draw.one(declared)[0] if draw.chance(0.15) else draw.one(VERBS)
        noun = draw.one(declared)[1] if draw.chance(0.15) else draw.one(NOUNS)
        if (action := _action(verb, noun)) not in boxed:
            break
    name = draw.one(tuple(PARAMETERS))
    return Task(action=action, words=f"{action}: {name} {in_words(PARAMETERS[name][1](draw))}.", call=None)


def request(tasks: list[Task]) -> str:
    return " ".join(f"{'Then' if number else 'Please'} {task.words}" for number, task in enumerate(tasks))


def calling(draw: Draw, tasks: list[Task], *, task: str, instance: str) -> Turn:
    calls = tuple(each.call for each in tasks if each.call is not None)
    thought = ", ".join(f"{each.action}: {each.call.name if each.call else 'none'}" for each in tasks)
    answer = draw.reply("" if calls else NO_TOOL, thought, task=task, instance=instance)
    return Turn(role="assistant", text=answer.text, thought=answer.thought, calls=calls, task=task, instance=instance)


def said(tasks: list[Task]) -> str:
    """What decides the calls: the words and the tools' names."""
    return " ".join([request(tasks), *(each.call.name if each.call else "none" for each in tasks)])


def tool_call(draw: Draw) -> Scene:
    """Single requests: one call, two calls back to back, or no tool that fits. A call's result is a short "ok"."""
    boxed = toolbox(draw, 0.45)
    actions = list(boxed)

    def make() -> list[Task]:
        if draw.chance(0.22):
            return [unknown(draw, boxed)]
        number = 2 if len(actions) > 1 and draw.chance(0.2) else 1
        return [wanted(draw, action, boxed[action]) for action in draw.some(actions, number)]

    def exchanges() -> Iterator[Exchange]:
        while True:
            tasks = draw.fresh(make, lambda made: f"tool_call {said(made)}")
            kind = "tool_call" if tasks[0].call else "no_tool"
            instance = f"tool_call {said(tasks)}"
            turn = calling(draw, tasks, task=kind, instance=instance)
            results = [Turn(role="tool", text="ok")] * len(turn.calls)
            ending = [draw.reply("Done.", "ok", task="", instance="")] if results else []
            yield (Turn(role="user", text=request(tasks)), turn, *results, *ending)

    return Scene(task="tool_call", tools=tuple(boxed.values()), exchanges=exchanges())


# --- results ------------------------------------------------------------------------------------------------------


def result(draw: Draw) -> dict[str, Any]:
    return {name: FIELDS[name][1](draw) for name in draw.some(tuple(FIELDS), draw.number(2, 3))}


def _text(fields: dict[str, Any]) -> str:
    return json.dumps(fields)


def tool_result(draw: Draw) -> Scene:
    """Requests that go on after the call: tell a field of the result, pass it to the next tool, say how it ended."""
    boxed = toolbox(draw, 0.35)
    actions = list(boxed)

    def exchanges() -> Iterator[Exchange]:
        last: dict[str, Any] = {}
        told = ""
        while True:
            if (left := [name for name in last if name != told]) and draw.chance(0.35):
                field = draw.one(left)
                instance = f"tool_result {_text(last)} {field} again"
                last_now = last
                last = {}
                # The result is drawn already, so the side is settled by leaving out what falls on the other one.
                if not draw.is_mine(instance):
                    continue
                answer = in_words(last_now[field])
                turn = draw.reply(answer, f"{field} {answer}", task="tool_result", instance=instance)
                yield Turn(role="user", text=f"And the {field}?"), turn
                continue
            kind = draw.rng.random()
            if kind < 0.2 and len(actions) > 1:
                yield both(draw, boxed)
                last = {}
            elif kind < 0.55 and len(actions) > 1 and (chained := chain(draw, boxed)):
                yield chained
                last = {}
            else:
                exchange, last, told = tell(draw, boxed)
                yield exchange

    return Scene(task="tool_result", tools=tuple(boxed.values()), exchanges=exchanges())


def _first(draw: Draw, boxed: dict[str, Tool], actions: list[str], ending: str) -> tuple[list[Task], str, Turn]:
    """Tasks, the user's text and the turn that calls."""

    def make() -> list[Task]:
        return [wanted(draw, action, boxed[action]) for action in actions]

    tasks = draw.fresh(make, lambda made: f"tool_call {said(made)} {ending}")
    instance = f"tool_call {said(tasks)} {ending}"
    return tasks, f"{request(tasks)} {ending}", calling(draw, tasks, task="tool_call", instance=instance)


def tell(draw: Draw, boxed: dict[str, Tool]) -> tuple[Exchange, dict[str, Any], str]:
    """One call and one field of its result. Also returns the result, and which field was told."""
    field = draw.one(tuple(FIELDS))
    _, text, call = _first(draw, boxed, [draw.one(list(boxed))], f"Tell me the {field}.")

    def make() -> dict[str, Any]:
        made = result(draw)
        made[field] = FIELDS[field][1](draw)
        order = list(made)
        draw.rng.shuffle(order)
        return {name: made[name] for name in order}

    got = draw.fresh(make, lambda made: f"tool_result {_text(made)} {field}")
    answer = in_words(got[field])
    told = draw.reply(answer, f"{field} {answer}", task="tool_result", instance=f"tool_result {_text(got)} {field}")
    return (Turn(role="user", text=text), call, Turn(role="tool", text=_text(got)), told), got, field


def both(draw: Draw, boxed: dict[str, Tool]) -> Exchange:
    """Two calls at once and the same field of both results."""
    field = draw.one(tuple(FIELDS))
    _, text, call = _first(draw, boxed, draw.some(list(boxed), 2), f"Tell me each {field}.")

    def make() -> list[dict[str, Any]]:
        pair = [result(draw), result(draw)]
        for each in pair:
            each[field] = FIELDS[field][1](draw)
        return pair

    def instance(made: list[dict[str, Any]]) -> str:
        return f"tool_result {' '.join(map(_text, made))} each {field}"

    got = draw.fresh(make, instance)
    answer = ", ".join(in_words(each[field]) for each in got)
    told = draw.reply(answer, f"{field} {answer}", task="tool_result", instance=instance(got))
    return (
        Turn(role="user", text=text),
        call,
        *(Turn(role="tool", text=_text(each)) for each in got),
        told,
    )


def chain(draw: Draw, boxed: dict[str, Tool]) -> Exchange | None:
    """The first tool's result gives a parameter of the second call; then whether that one worked. None: no two fit."""
    first, second = draw.some(list(boxed), 2)
    tool = boxed[second]
    taking = [each for each in tool.parameters if each.kind in ("string", "integer")]
    if not taking:
        return None
    taken = draw.one(taking)
    field = draw.one([name for name, (kind, _) in FIELDS.items() if kind == taken.kind])
    rest = {
        each.name: PARAMETERS[each.name][1](draw) for each in tool.parameters if each.required and each is not taken
    }
    words = "; ".join([f"{taken.name} from {field}", *(f"{name} {in_words(value)}" for name, value in rest.items())])
    _, text, call = _first(draw, boxed, [first], f"Then {second}: {words}.")

    def make() -> dict[str, Any]:
        made = result(draw)
        made[field] = FIELDS[field][1](draw)
        return made

    def instance(made: dict[str, Any]) -> str:
        return f"tool_result {_text(made)} {second}: {words} {tool.name}"

    got = draw.fresh(make, instance)
    arguments = {taken.name: got[field], **rest}
    following = calling(
        draw,
        [Task(action=second, words="", call=Call(name=tool.name, arguments=arguments))],
        task="tool_result",
        instance=instance(got),
    )

    def outcome() -> dict[str, Any]:
        if draw.chance(0.5):
            return {"ok": True, "key": draw.digits(4)}
        return {"ok": False, "error": draw.one(ADJECTIVES), "key": draw.digits(4)}

    ended = draw.fresh(outcome, lambda made: f"tool_result {_text(made)} {instance(got)}")
    said_last = "Done." if ended["ok"] else f"Failed: {ended['error']}."
    last = draw.reply(
        said_last,
        f"ok {json.dumps(ended['ok'])}",
        task="tool_result",
        instance=f"tool_result {_text(ended)} {instance(got)}",
    )
    return (
        Turn(role="user", text=text),
        call,
        Turn(role="tool", text=_text(got)),
        following,
        Turn(role="tool", text=_text(ended)),
        last,
    )
