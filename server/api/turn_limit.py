"""How many calls begin in one turn of the event loop: who comes with hundreds of others keeps nobody else waiting."""

from __future__ import annotations

import asyncio
from collections import deque


class TurnLimit:
    """Lets so many through in a turn of the loop, and the others in the turns that follow, in the order in which they
    came. Owner: Api.
    """

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_due = False

    async def enter(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._is_due:
            self._is_due = True
            loop.call_soon(self._next_turn, loop)
        if self._left > 0 and not self._waiting:
            self._left -= 1
            return
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        let_in = 0
        while self._waiting and let_in < self._per_turn:
            first = self._waiting.popleft()
            if not first.done():  # else its task was cancelled
                first.set_result(None)
                let_in += 1
        # Those run in the turn that follows. Who comes meanwhile is behind them.
        self._left = 0 if let_in else self._per_turn
        self._is_due = let_in > 0
        if self._is_due:
            loop.call_soon(self._next_turn, loop)
