"""The way from the engine's events to the handlers of calls."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from server.api import limits
from server.api.call import WRITE_NOW, Call
from server.api.events import EventChannel, Turn
from server.request import ChoiceFinished, Event, FinishReason, TextDelta
from tests.api.wire import Client
from tests.fakes import FakeEngine, fake_context, say

FINISH = ChoiceFinished(choice=0, reason=FinishReason.STOP, matched=None, output_tokens=1)


def text(words: object) -> TextDelta:
    return TextDelta(choice=0, text=str(words))


def new_channel(turn: Turn) -> EventChannel:
    return EventChannel(turn, max_bytes=1 << 20, on_overflow=lambda: None)


def dealing(channel: EventChannel, turn: Turn, written: list[object]) -> Callable[[], bool]:
    """Deals with whatever is only text, as the writer of a stream does."""

    def deal() -> bool:
        if not channel.only_text(8):
            return False
        events = channel.take(8)
        written.append("read")
        turn.behind(lambda: written.extend(events))
        return True

    return deal


async def test_the_texts_of_a_step_are_read_and_then_written_in_one_turn_and_no_handler_wakes() -> None:
    turn, written = Turn(), list[object]()
    channels = [new_channel(turn) for _ in range(3)]
    handlers = [asyncio.create_task(channel.wait(dealing(channel, turn, written))) for channel in channels]
    await asyncio.sleep(0)
    for step in range(2):
        for number, channel in enumerate(channels):
            channel.emit(text((step, number)))
            channel.emit(text((step, number, "more")))
        await asyncio.sleep(0)
        expected = [text((step, number, *more)) for number in range(3) for more in ((), ("more",))]
        assert written == ["read"] * 3 + expected
        written.clear()
    assert not any(handler.done() for handler in handlers)
    channels[1].emit(FINISH)
    await asyncio.wait_for(handlers[1], 1)
    assert channels[1].take(8) == [FINISH]
    assert not handlers[0].done()
    for handler in handlers:
        handler.cancel()


async def test_what_dealing_raises_reaches_its_own_handler_and_no_other_call() -> None:
    turn, written = Turn(), list[object]()
    bad, good = new_channel(turn), new_channel(turn)

    def broken() -> bool:
        raise ValueError("a bug")

    handlers = [asyncio.create_task(bad.wait(broken)), asyncio.create_task(good.wait(dealing(good, turn, written)))]
    await asyncio.sleep(0)
    bad.emit(text("a"))
    good.emit(text("b"))
    with pytest.raises(ValueError, match="a bug"):
        await asyncio.wait_for(handlers[0], 1)
    assert written == ["read", text("b")]
    assert not handlers[1].done()
    handlers[1].cancel()


@pytest.mark.parametrize("error", [BrokenPipeError(), RuntimeError("the transport is closed")])
async def test_a_connection_that_cannot_be_written_ends_its_own_call_only(error: Exception) -> None:
    class Broken:
        def takes_more(self) -> bool:
            return True

        def write(self, data: bytes) -> None:
            raise error

    async def nothing(*_: object) -> None:
        raise AssertionError("not used")

    scope = {"method": "POST", "path": "/", "headers": [], "extensions": {WRITE_NOW: Broken()}}
    call, turn, written = Call(scope, nothing, nothing), Turn(), list[object]()
    assert call.takes_more
    turn.add(new_channel(turn))
    turn.behind(lambda: call.write_now(b"a"))
    turn.behind(lambda: written.append("b"))
    await asyncio.sleep(0)
    assert call.gone and not call.takes_more
    assert written == ["b"]


async def test_a_handler_that_is_woken_for_another_reason_finds_what_came_meanwhile() -> None:
    turn = Turn()
    channel = new_channel(turn)
    handler = asyncio.create_task(channel.wait(lambda: True))
    await asyncio.sleep(0)
    channel.wake()
    await asyncio.wait_for(handler, 1)
    assert channel.take(8) == []
    channel.emit(text("a"))  # the handler is at work: nobody deals with it in the turn
    await asyncio.sleep(0)
    await asyncio.wait_for(channel.wait(lambda: False), 1)
    assert channel.take(8) == [text("a")]


async def test_an_error_of_dealing_is_not_lost_behind_a_handler_that_was_woken_in_the_same_turn() -> None:
    channel = new_channel(Turn())
    dealt: list[Event] = []

    def deal() -> bool:
        dealt.extend(channel.take(8))
        raise ValueError("a bug")

    handler = asyncio.create_task(channel.wait(deal))
    await asyncio.sleep(0)
    channel.emit(text("a"))
    channel.wake()
    await asyncio.wait_for(handler, 1)
    assert not dealt
    assert channel.take(8) == [text("a")]


async def test_a_handler_that_waits_for_more_is_woken_long_before_the_channel_is_full() -> None:
    overflowed: list[bool] = []
    channel = EventChannel(Turn(), max_bytes=80_000, on_overflow=lambda: overflowed.append(True))
    handler = asyncio.create_task(channel.wait(lambda: channel.only_text(128)))
    await asyncio.sleep(0)
    sent = 0
    while not handler.done():
        channel.emit(text("x" * 2_000))
        sent += 1
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert len(channel.take(128)) == sent < 10
    assert not overflowed


async def test_a_whole_answer_whose_events_are_large_is_not_taken_for_a_slow_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_BACKLOG_BYTES", 8 * 1024)
    client = Client(fake_context(FakeEngine(script=say("x" * 100))))
    response = await client.complete(max_tokens=200, logprobs=2)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == "x" * 100


@pytest.mark.parametrize("seed", range(20))
async def test_every_event_arrives_once_and_in_order_whoever_deals_with_it(seed: int) -> None:
    rng, turn = random.Random(seed), Turn()
    channel = new_channel(turn)
    arrived: list[Event] = []
    by_handler = 0

    def deal() -> bool:
        if rng.random() < 0.3:
            return False
        events = channel.take(rng.randint(1, 3))
        turn.behind(lambda: arrived.extend(events))
        return not channel.more

    async def handle() -> None:
        nonlocal by_handler
        while FINISH not in arrived:
            await channel.wait(deal)
            events = channel.take(rng.randint(1, 5))
            by_handler += len(events)
            arrived.extend(events)
            if rng.random() < 0.5:
                await asyncio.sleep(0)

    handler = asyncio.create_task(handle())
    sent: list[Event] = []
    for number in range(300):
        sent.append(text(number))
        channel.emit(sent[-1])
        if rng.random() < 0.5:
            await asyncio.sleep(0)
        if rng.random() < 0.1:
            channel.wake()
    channel.emit(FINISH)
    if not handler.done():
        channel.wake()
    await asyncio.wait_for(handler, 5)
    assert arrived == [*sent, FINISH]
    assert 0 < by_handler < 301, "both ways were taken"
