"""Many calls that begin at once leave room for others between them."""

from __future__ import annotations

import asyncio
import random

import pytest

from server.api.turn_limit import TurnLimit


@pytest.mark.parametrize("per_turn", [1, 3, 16])
async def test_no_more_than_so_many_enter_in_one_turn_and_in_their_order(per_turn: int) -> None:
    limit = TurnLimit(per_turn)
    turn = 0
    entered: list[tuple[int, int]] = []

    async def call(number: int) -> None:
        await limit.enter()
        entered.append((turn, number))

    async with asyncio.TaskGroup() as tasks:
        for number in range(100):
            tasks.create_task(call(number))
        while len(entered) < 100:
            turn += 1
            await asyncio.sleep(0)
    assert [number for _, number in entered] == list(range(100))
    in_turn = [sum(each == turn for each, _ in entered) for turn in range(1, turn + 1)]
    assert max(in_turn) == per_turn
    assert sum(count > 0 for count in in_turn) == -(-100 // per_turn)


async def test_somebody_else_runs_between_them() -> None:
    limit = TurnLimit(4)
    entered = 0

    async def call() -> None:
        nonlocal entered
        await limit.enter()
        entered += 1

    calls = [asyncio.create_task(call()) for _ in range(400)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert entered <= 8, "who comes last has its turn long before they are through"
    await asyncio.gather(*calls)


async def test_who_is_alone_enters_at_once() -> None:
    limit = TurnLimit(1)
    for _ in range(3):
        entering = limit.enter()
        with pytest.raises(StopIteration):
            entering.send(None)
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(20))
async def test_whoever_leaves_the_line_takes_nobodys_place(seed: int) -> None:
    rng = random.Random(seed)
    limit = TurnLimit(rng.randint(1, 5))
    entered: list[int] = []

    async def call(number: int) -> None:
        await limit.enter()
        entered.append(number)

    calls = []
    for number in range(200):
        calls.append(asyncio.create_task(call(number)))
        if rng.random() < 0.2:
            await asyncio.sleep(0)
        if rng.random() < 0.3:
            rng.choice(calls).cancel()
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert entered == [number for number, each in enumerate(ended) if each is None]
    assert len(entered) > 50
