"""The text room as others use it: short work inline, long work beside the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from server.errors import BadRequest, TooLong, Unavailable
from server.request import (
    ChoiceFinished,
    Conversation,
    Event,
    FinishReason,
    Message,
    SampledToken,
    StopRules,
    TextDelta,
    ToolCall,
)
from server.text.budget import Abandoned, Budget
from server.text.chat_template import ChatTemplate
from server.text.service import INLINE_CHARS, TextService, _longer_than
from server.text.tokenizer import Tokenizer

SOURCE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def service(gemma3: Tokenizer) -> Iterator[TextService]:
    made = TextService(gemma3, ChatTemplate(SOURCE, gemma3))
    yield made
    made.close()


def says(text: str) -> Conversation:
    return Conversation(messages=(Message(role="user", texts=(text,)),))


async def longest_pause_s(stop: asyncio.Event) -> float:
    longest = 0.0
    while not stop.is_set():
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        longest = max(longest, time.perf_counter() - before)
    return longest


async def test_long_inputs_leave_the_event_loop_free(service: TextService) -> None:
    text = "The quick brown fox, <|no control|> and so on.\n" * 20_000
    stop = asyncio.Event()
    watch = asyncio.create_task(longest_pause_s(stop))
    began = time.perf_counter()
    ids = await service.encode_chat(says(text))
    assert ids[0] == 2
    assert await service.encode_prompt(text) == ids
    took_s = time.perf_counter() - began
    stop.set()
    assert await watch < took_s / 3


async def test_short_and_long_inputs_get_the_same_ids(service: TextService, gemma3: Tokenizer) -> None:
    for count in (1, 1_000):
        text = "Hello <eos>\n" * count
        plain = gemma3.encode(text, parse_special=False, add_bos=True)
        parsed = gemma3.encode(text, parse_special=True, add_bos=True)
        assert await service.encode_chat(says(text)) == tuple(plain)
        assert await service.encode_prompt(text) == tuple(parsed)
        assert await service.encode_prompt(text, add_special_tokens=False) == tuple(parsed[1:])


async def test_a_template_too_slow_for_the_event_loop_is_finished_beside_it(gemma3: Tokenizer) -> None:
    slow = "{% for i in range(400) %}{% for j in range(400) %}{% endfor %}{% endfor %}done"
    service = TextService(gemma3, ChatTemplate(slow, gemma3))
    assert await service.encode_chat(says("")) == tuple(gemma3.encode("done", parse_special=False, add_bos=False))
    service.close()


async def test_a_template_error_is_the_callers(gemma3: Tokenizer) -> None:
    service = TextService(gemma3, ChatTemplate("{{ raise_exception('Not so.') }}", gemma3))
    with pytest.raises(BadRequest, match=r"Not so\."):
        await service.encode_chat(says("Hi"))
    service.close()


async def test_chat_without_a_template_is_refused_and_told_where_to_go(gemma3: Tokenizer) -> None:
    service = TextService(gemma3, None)
    with pytest.raises(BadRequest, match=r"no chat template.*/v1/completions") as caught:
        await service.encode_chat(says("Hi"))
    assert (caught.value.code, caught.value.param) == ("unsupported_value", "messages")
    assert await service.encode_prompt("Hi") == (2, 10979)
    service.close()


def test_outputs_speak_the_models_vocabulary(service: TextService) -> None:
    events: list[Event] = []
    output = service.output(choice=1, stop=StopRules(max_tokens=1), emit=events.append)
    assert output.push(SampledToken(token_id=9259)) is FinishReason.LENGTH
    assert events == [
        TextDelta(choice=1, text="Hello"),
        ChoiceFinished(choice=1, reason=FinishReason.LENGTH, matched=None, output_tokens=1),
    ]


def _large(message: dict[str, Any] | None = None, **options: Any) -> Conversation:
    return Conversation(messages=(Message(role="user", **(message or {"texts": ("Hi",)})),), **options)


def _call(**fields: str) -> ToolCall:
    return ToolCall(**{"id": "1", "name": "f", "arguments": "{}", **fields})


LONG = "<|" * INLINE_CHARS
LARGE = {
    "text": _large({"texts": (LONG,)}),
    "parts": _large({"texts": ("",) * INLINE_CHARS}),
    "name": _large({"name": LONG}),
    "reasoning": _large({"reasoning": LONG}),
    "tool call id": _large({"tool_call_id": LONG}),
    "calls": _large({"tool_calls": (_call(),) * INLINE_CHARS}),
    "call name": _large({"tool_calls": (_call(name=LONG),)}),
    "call id": _large({"tool_calls": (_call(id=LONG),)}),
    "call arguments": _large({"tool_calls": (_call(arguments=LONG),)}),
    "messages": Conversation(messages=(Message(role="user"),) * INLINE_CHARS),
    "argument": _large(template_kwargs={"x": LONG}),
    "argument key": _large(template_kwargs={LONG: 1}),
    "nested argument": _large(template_kwargs={"x": [1, {"y": [{"z": LONG}]}]}),
    "nested key": _large(template_kwargs={"x": [1, {"y": [{LONG: 1}]}]}),
    "list": _large(template_kwargs={"x": [1] * INLINE_CHARS}),
    "object": _large(template_kwargs={"x": dict.fromkeys(map(str, range(INLINE_CHARS)))}),
}


@pytest.mark.parametrize("conversation", LARGE.values(), ids=LARGE)
async def test_whatever_is_large_is_rendered_beside_the_event_loop(
    gemma3: Tokenizer, conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = TextService(gemma3, ChatTemplate("done", gemma3))
    seen = []
    in_worker = service._in_worker

    async def noted(*args: Any, **kwargs: Any) -> tuple[int, ...]:
        seen.append(args)
        return await in_worker(*args, **kwargs)

    monkeypatch.setattr(service, "_in_worker", noted)
    assert await service.encode_chat(conversation) == tuple(gemma3.encode("done", parse_special=False, add_bos=False))
    assert len(seen) == 1
    service.close()


def test_weighing_stops_where_it_knows_enough() -> None:
    def endless() -> Iterator[Any]:
        yield from ("x" * 30, "x" * 30)
        raise AssertionError("looked too far")

    class Endless(tuple[Any, ...]):
        def __iter__(self) -> Iterator[Any]:
            return endless()

    assert _longer_than(100, Conversation(messages=Endless()))
    assert not _longer_than(1_000, _large({"texts": ("x" * 800,)}))


@pytest.mark.parametrize("long", [{"name": "<" * 8_000_000}, {"texts": ("<|",) * 300_000}])
async def test_marking_what_users_wrote_keeps_the_time_limit(smollm2: Tokenizer, long: dict[str, Any]) -> None:
    chat = ChatTemplate("done", smollm2)
    began = time.perf_counter()
    with pytest.raises(BadRequest, match="rendering took longer"):
        chat.encode(_large(long), limit_s=0.02)
    assert time.perf_counter() - began < 1.0


async def test_what_cannot_fit_is_refused_before_it_is_encoded(gemma3: Tokenizer) -> None:
    service = TextService(gemma3, ChatTemplate(SOURCE, gemma3), context_tokens=1_000)
    for text in ("hello world " * 1_000_000, "a" * 10_000_000, "<eos>" * 2_000_000):
        for work, param in ((service.encode_prompt(text), "prompt"), (service.encode_chat(says(text)), "messages")):
            began = time.perf_counter()
            with pytest.raises(TooLong) as caught:
                await work
            assert time.perf_counter() - began < 1.0
            assert caught.value.param == param
            assert caught.value.prompt_tokens > 2_000
    assert len(await service.encode_prompt("a b c " * 300)) == 1 + 900 + 1  # some more tokens are counted
    service.close()


async def test_a_template_that_makes_much_of_little_is_refused_as_too_long(gemma3: Tokenizer) -> None:
    source = "{% for i in range(30000) %}{{ messages[0].content }}{% endfor %}"
    service = TextService(gemma3, ChatTemplate(source, gemma3), context_tokens=1_000)
    with pytest.raises(TooLong):
        await service.encode_chat(says("hello there "))
    service.close()


async def test_a_caller_that_leaves_ends_its_work(smollm2: Tokenizer) -> None:
    service = TextService(smollm2, ChatTemplate(SOURCE, smollm2), workers=1)
    left = [asyncio.create_task(service.encode_prompt("a" * 10_000_000)) for _ in range(4)]
    await asyncio.sleep(0.05)
    for task in left:
        task.cancel()
    began = time.perf_counter()
    assert len(await service.encode_prompt("hello " * 2_000)) > 0
    assert time.perf_counter() - began < 1.0
    service.close()


async def test_closing_gives_up_what_runs(smollm2: Tokenizer) -> None:
    service = TextService(smollm2, ChatTemplate(SOURCE, smollm2), workers=1)
    running = asyncio.create_task(service.encode_prompt("a" * 20_000_000))
    await asyncio.sleep(0.1)
    began = time.perf_counter()
    service.close()
    with pytest.raises(Unavailable):
        await running
    service._workers.shutdown(wait=True)
    assert time.perf_counter() - began < 1.0


async def test_rendering_ends_when_nobody_waits(smollm2: Tokenizer) -> None:
    slow = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    budget = Budget()
    work = asyncio.create_task(asyncio.to_thread(ChatTemplate(slow, smollm2).encode, says("Hi"), budget=budget))
    await asyncio.sleep(0.05)
    budget.abandon()
    with pytest.raises(Abandoned):
        await work


async def test_many_short_prompts_leave_the_event_loop_free(service: TextService) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    for _ in range(50):
        await service.encode_prompt("a b " * 900)
    counting.cancel()
    assert turns >= 49
