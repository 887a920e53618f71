"""The openai package for Python, synchronous and asynchronous, whole and streamed."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.clients.conftest import Served

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Say hello."}],
    "max_tokens": 12,
    "temperature": 0,
    "seed": 1,
}
TOO_LONG = [{"role": "user", "content": "word " * 200_000}]


@pytest.fixture
def client(served: Served) -> OpenAI:
    return OpenAI(base_url=served.base_url, api_key="unused", max_retries=0)


@pytest.fixture
def async_client(served: Served) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=served.base_url, api_key="unused", max_retries=0)


def wait_idle(served: Served, *, within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    while served.running():
        assert time.monotonic() < deadline_s, "the engine still works for a client that left"
        time.sleep(0.02)


class TestSync:
    def test_chat_whole_and_streamed_say_the_same(self, client: OpenAI, served: Served) -> None:
        whole = client.chat.completions.create(model=served.model, **CHAT)
        assert whole.choices[0].finish_reason in ("length", "stop")
        assert whole.usage is not None
        assert whole.usage.completion_tokens <= 12
        assert whole.usage.prompt_tokens_details is not None
        assert whole._request_id
        assert whole.id == "chatcmpl-" + whole._request_id
        with client.chat.completions.create(
            model=served.model, stream=True, stream_options={"include_usage": True}, **CHAT
        ) as stream:
            chunks = list(stream)
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].choices == []
        assert chunks[-1].usage == whole.usage
        assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == [
            whole.choices[0].finish_reason
        ]

    def test_the_streaming_helper_collects_the_answer(self, client: OpenAI, served: Served) -> None:
        whole = client.chat.completions.create(model=served.model, **CHAT)
        with client.chat.completions.stream(model=served.model, **CHAT) as stream:
            try:
                for _ in stream:
                    pass
                final: Any = stream.get_final_completion()
            except openai.LengthFinishReasonError as error:
                final = error.completion
        assert final.choices[0].message.content == whole.choices[0].message.content

    def test_several_choices_with_logprobs(self, client: OpenAI, served: Served) -> None:
        answer = client.chat.completions.create(
            model=served.model, n=2, logprobs=True, top_logprobs=2, **(CHAT | {"temperature": 1})
        )
        assert [choice.index for choice in answer.choices] == [0, 1]
        for choice in answer.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.content
            for entry in choice.logprobs.content:
                assert len(entry.top_logprobs) == 2
                assert entry.logprob <= 0
            assert choice.message.content is not None

    def test_completions(self, client: OpenAI, served: Served) -> None:
        answer = client.completions.create(
            model=served.model, prompt=["Once", "upon"], max_tokens=3, n=2, echo=True, temperature=0
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert [choice.text[:4] for choice in answer.choices] == ["Once", "Once", "upon", "upon"]
        chunks = list(
            client.completions.create(model=served.model, prompt="Once", max_tokens=3, stream=True, temperature=0)
        )
        whole = client.completions.create(model=served.model, prompt="Once", max_tokens=3, temperature=0)
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text

    def test_errors_are_the_classes_of_the_package(self, client: OpenAI, served: Served) -> None:
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model=served.model, messages=[])
        assert (bad.value.code, bad.value.param) == ("empty_array", "messages")
        assert bad.value.type == "invalid_request_error"
        assert bad.value.request_id
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="no-such-model", messages=CHAT["messages"])
        assert missing.value.code == "model_not_found"
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as long:
                client.chat.completions.create(model=served.model, messages=TOO_LONG, stream=stream)  # type: ignore[call-overload]
            assert long.value.code == "context_length_exceeded"
            assert "maximum context length" in str(long.value)

    def test_models(self, client: OpenAI, served: Served) -> None:
        listed = client.models.list().data
        assert listed[0].id == served.model
        assert client.models.retrieve(served.model) == listed[0]
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("no/such/model")

    def test_a_stream_closed_early_ends_the_work(self, client: OpenAI, served: Served) -> None:
        stream = client.chat.completions.create(
            model=served.model, stream=True, extra_body={"ignore_eos": True}, **(CHAT | {"max_tokens": 2000})
        )
        for i, _ in enumerate(stream):
            if i == 3:
                break
        stream.close()
        wait_idle(served, within_s=2.0)


class TestAsync:
    async def test_chat_whole_and_streamed_say_the_same(self, async_client: AsyncOpenAI, served: Served) -> None:
        async with async_client as client:
            whole = await client.chat.completions.create(model=served.model, **CHAT)
            stream = await client.chat.completions.create(model=served.model, stream=True, **CHAT)
            text = "".join([c.delta.content or "" async for chunk in stream for c in chunk.choices])
        assert text == whole.choices[0].message.content

    async def test_many_at_once(self, async_client: AsyncOpenAI, served: Served) -> None:
        async with async_client as client:
            answers = await asyncio.gather(
                *(client.chat.completions.create(model=served.model, **CHAT) for _ in range(12))
            )
        assert len({answer.id for answer in answers}) == 12
        assert all(answer.choices[0].message.content is not None for answer in answers)

    @pytest.mark.parametrize("stream", [True, False])
    async def test_a_cancelled_call_ends_the_work(
        self, async_client: AsyncOpenAI, served: Served, stream: bool
    ) -> None:
        body = CHAT | {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}

        async def call() -> None:
            answer = await async_client.chat.completions.create(model=served.model, stream=stream, **body)
            if stream:
                async for _ in answer:
                    pass

        task = asyncio.create_task(call())
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await async_client.close()
        await asyncio.to_thread(wait_idle, served, within_s=2.0)

    async def test_errors(self, async_client: AsyncOpenAI, served: Served) -> None:
        async with async_client as client:
            with pytest.raises(openai.BadRequestError) as bad:
                await client.chat.completions.create(model=served.model, temperature=5, messages=CHAT["messages"])
        assert bad.value.code == "decimal_above_max_value"
