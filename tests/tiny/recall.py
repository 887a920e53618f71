"""Associative recall, a stand-in for the conversations: pairs of key and value, then keys whose values are asked for.

first k1 v1 k2 v2 ... ask k2 v2 k1 v1 end
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

FIRST, ASK, END = 1, 2, 3
KEYS = range(8, 64)
VALUES = range(64, 128)
VOCAB = 128


@dataclass(frozen=True, slots=True)
class Recall:
    ids: list[int]
    trained: list[bool]
    task: str = "recall"


def recall(seed: int, *, shortest: int, longest: int, held_out: bool = False, mixture: str = "all") -> Iterator[Recall]:
    """With as many pairs as the length has room for, and as many distinct keys; each value has two tokens."""
    rng = Random(f"{seed} {held_out}")
    while True:
        room = rng.randint(shortest, longest)
        pairs = max(1, min(len(KEYS), (room - 3) // 6))
        asked = max(1, (room - 3 - 3 * pairs) // 3)
        keys = rng.sample(KEYS, pairs)
        values = {key: [rng.choice(VALUES), rng.choice(VALUES)] for key in keys}
        ids, trained = [FIRST], [False]
        for key in keys:
            ids += [key, *values[key]]
            trained += [False] * 3
        ids.append(ASK)
        trained.append(False)
        for key in (rng.choice(keys) for _ in range(asked)):
            ids += [key, *values[key]]
            trained += [False, True, True]
        yield Recall(ids=[*ids, END], trained=[*trained, False])
