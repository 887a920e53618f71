"""The text room as others use it: short work inline, long work beside the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from server.errors import BadRequest
from server.request import (
    ChoiceFinished,
    Conversation,
    Event,
    FinishReason,
    Message,
    SampledToken,
    StopRules,
    TextDelta,
)
from server.text.chat_template import ChatTemplate
from server.text.service import TextService
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
