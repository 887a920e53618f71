"""Conversations as tokens, endless and by seed: what training and the held-out measurements read.

The mixture of tasks and its change with length are in `tasks.MIXTURE`; lengths are uniform between the bounds. Look at
some with

    python -m tools.train_tiny.data --each 2
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from random import Random

from tools.train_tiny import tokenizer
from tools.train_tiny.conversation import DEFAULT_SYSTEM, Renderer, Talk
from tools.train_tiny.grammar import Draw, Exchange, NothingLeft, Scene, Turn
from tools.train_tiny.tasks import GRAMMARS, THINKING, choose

VOCAB = tokenizer.VOCAB
_SYSTEM_TOKENS = 4
_TURN_TOKENS = {"user": 4, "assistant": 6, "tool": 6}
_CALL_TOKENS = 12
_ARGUMENT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Sample:
    """ids: the rendered conversation, control tokens included, without padding.

    trained: for every id, whether the assistant wrote it; it is then a target with full weight. The end of its turn is
    the assistant's, and so is `<think>` with thinking on; the empty thought of a prompt with thinking off is not.
    """

    ids: list[int]
    trained: list[bool]
    task: str


def tokenizer_folder() -> Path:
    return tokenizer.tokenizer_folder()


def samples(
    seed: int, *, shortest: int, longest: int, held_out: bool = False, mixture: str = "all"
) -> Iterator[Sample]:
    """Endless, the same for the same arguments; each has from `shortest` to `longest` tokens, both included."""
    for talk, task in talks(seed, shortest=shortest, longest=longest, held_out=held_out, mixture=mixture):
        yield Sample(ids=talk.ids, trained=trained(talk), task=task)


def talks(
    seed: int,
    *,
    shortest: int,
    longest: int,
    held_out: bool = False,
    grammar: str | None = None,
    mixture: str = "all",
) -> Iterator[tuple[Talk, str]]:
    """The conversations behind the samples, with the names of their grammars; of one grammar only, if it is given."""
    rng = Random(f"{seed} {shortest} {longest} {held_out} {grammar}")
    renderer = shared_renderer()
    while True:
        room = rng.randint(shortest, longest)
        name = grammar or choose(rng, room, mixture)
        draw = Draw(rng, held_out=held_out, thinking=rng.random() < THINKING, room=room, count=_count)
        try:
            talk = _filled(renderer, GRAMMARS[name](draw), draw, longest)
        except NothingLeft:
            continue
        if talk is not None and shortest <= len(talk.ids) <= longest:
            yield talk, name


@lru_cache(maxsize=1)
def shared_renderer() -> Renderer:
    return Renderer(tokenizer.load_tokenizer())


def trained(talk: Talk) -> list[bool]:
    """By the characters that the tokens stand for. Edges of turns are control tokens, so no token lies across one."""
    spell = shared_renderer().tokenizer.token_bytes
    spelled = [spell(index) for index in talk.ids]
    assert talk.text.isascii() and b"".join(spelled).decode() == talk.text  # so characters are bytes
    edges = list(accumulate(map(len, spelled), initial=0))
    at = {edge: token for token, edge in enumerate(edges)}
    marks = [False] * len(talk.ids)
    for span in talk.written():
        start, stop = at[span.start], at[span.stop]
        marks[start:stop] = [True] * (stop - start)
    return marks


def _count(text: str) -> int:
    return len(shared_renderer().tokenizer.encode(text, parse_special=False, add_bos=False))


def _filled(renderer: Renderer, scene: Scene, draw: Draw, longest: int) -> Talk | None:
    """Exchanges until the room is full; none that would make the whole longer than `longest`. None: nothing fitted."""
    section = renderer.section(scene.tools)
    used = _SYSTEM_TOKENS + _count((scene.system or DEFAULT_SYSTEM) + section)
    kept: list[Exchange] = []
    for exchange in _until_nothing_is_left(scene):
        used += sum(_cost(turn) for turn in exchange)
        if used > longest:
            break  # later ones may build on this one, so none is skipped
        kept.append(exchange)
        if used >= draw.room:
            break
    if not kept:
        return None
    return Talk(renderer, kept, system=scene.system, tools=scene.tools, thinking=draw.thinking, section=section)


def _until_nothing_is_left(scene: Scene) -> Iterator[Exchange]:
    with suppress(NothingLeft):
        yield from scene.exchanges


def _cost(turn: Turn) -> int:
    """About how many tokens a turn takes; the conversation's are counted in the end."""
    cost = _TURN_TOKENS[turn.role] + _count(turn.thought) + _count(turn.text)
    for call in turn.calls:
        cost += _CALL_TOKENS + _count(call.name)
        cost += sum(_ARGUMENT_TOKENS + _count(json.dumps(value)) for value in call.arguments.values())
    return cost


def main() -> None:
    parser = argparse.ArgumentParser(description="Print conversations of every grammar, and how they measure.")
    parser.add_argument("--each", type=int, default=2, help="conversations of each grammar (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shortest", type=int, default=128, help="tokens (default %(default)s)")
    parser.add_argument("--longest", type=int, default=256, help="tokens (default %(default)s)")
    parser.add_argument("--held-out", action="store_true", help="conversations that training never sees")
    wanted = parser.parse_args()
    for grammar in GRAMMARS:
        made = talks(
            wanted.seed,
            shortest=wanted.shortest,
            longest=wanted.longest,
            held_out=wanted.held_out,
            grammar=grammar,
        )
        for talk, _ in islice(made, wanted.each):
            marks = trained(talk)
            print(f"--- {grammar}: {len(talk.ids)} tokens, {sum(marks)} written by the assistant\n{talk.text}\n")


if __name__ == "__main__":
    main()
