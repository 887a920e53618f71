"""What is refused, with which path and code; what is tolerated; and that nothing hostile is ever a 5xx."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from server.api import body as body_module
from server.api import limits
from server.api.body import Tally, tally
from server.api.limits import MAX_DEPTH, MAX_PROMPTS, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from server.config import HttpConfig
from server.errors import BadRequest
from server.request import Message, ToolCall
from tests.api.wire import Client, error_of, events
from tests.fakes import MODEL, VOCAB_SIZE, FakeEngine, FakeText, say

Make = Callable[..., Client]
BIG = 10**30


def user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


BAD_SHARED: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"temperature": [1]}, "temperature", "invalid_type"),
    ({"temperature": 2.1}, "temperature", "decimal_above_max_value"),
    ({"temperature": -0.1}, "temperature", "decimal_below_min_value"),
    ({"temperature": BIG}, "temperature", "decimal_above_max_value"),
    ({"top_p": 0}, "top_p", "decimal_below_min_value"),
    ({"top_p": 1.01}, "top_p", "decimal_above_max_value"),
    ({"top_k": -2}, "top_k", "integer_below_min_value"),
    ({"top_k": 1.5}, "top_k", "invalid_type"),
    ({"top_k": BIG}, "top_k", "integer_above_max_value"),
    ({"min_p": -0.01}, "min_p", "decimal_below_min_value"),
    ({"min_p": 1.01}, "min_p", "decimal_above_max_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "decimal_below_min_value"),
    ({"repetition_penalty": 0.0099}, "repetition_penalty", "decimal_below_min_value"),
    ({"presence_penalty": 2.01}, "presence_penalty", "decimal_above_max_value"),
    ({"frequency_penalty": -2.01}, "frequency_penalty", "decimal_below_min_value"),
    ({"seed": 2**63}, "seed", "integer_above_max_value"),
    ({"seed": -(2**63) - 3000}, "seed", "integer_below_min_value"),
    ({"seed": "1"}, "seed", "invalid_type"),
    ({"seed": 1.5}, "seed", "invalid_type"),
    ({"n": 0}, "n", "integer_below_min_value"),
    ({"n": 129}, "n", "integer_above_max_value"),
    ({"n": True}, "n", "invalid_type"),
    ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    ({"max_tokens": -1}, "max_tokens", "integer_below_min_value"),
    ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "integer_below_min_value"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "invalid_value"),
    ({"min_tokens": -1}, "min_tokens", "integer_below_min_value"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": [""]}, "stop[0]", "invalid_value"),
    ({"stop": ["ok", None]}, "stop[1]", "invalid_type"),
    ({"stop": 5}, "stop", "invalid_type"),
    ({"stop": {"a": 1}}, "stop", "invalid_type"),
    ({"stop": ["x"] * (MAX_STOP_STRINGS + 1)}, "stop", "invalid_value"),
    ({"stop": "x" * (MAX_STOP_CHARACTERS + 1)}, "stop", "invalid_value"),
    ({"stop": "x" * 10_000}, "stop", "invalid_value"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids[0]", "integer_above_max_value"),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]", "integer_below_min_value"),
    ({"stop_token_ids": 5}, "stop_token_ids", "invalid_type"),
    ({"stop_token_ids": [1] * 2000}, "stop_token_ids", "invalid_value"),
    ({"logit_bias": {str(VOCAB_SIZE): 1}}, f"logit_bias.{VOCAB_SIZE}", "invalid_value"),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1", "invalid_value"),
    ({"logit_bias": {"1.0": 1}}, "logit_bias.1.0", "invalid_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x", "invalid_value"),
    ({"logit_bias": {"٣": 1}}, "logit_bias.٣", "invalid_value"),
    ({"logit_bias": {"": 1}}, "logit_bias.", "invalid_value"),
    ({"logit_bias": {"9" * 100: 1}}, "logit_bias." + "9" * 64, "invalid_value"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1", "decimal_above_max_value"),
    ({"logit_bias": {"1": None}}, "logit_bias.1", "invalid_type"),
    ({"logit_bias": [[1, 2]]}, "logit_bias", "invalid_type"),
    ({"stream": 1}, "stream", "invalid_type"),
    ({"stream": "true"}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream_options": {}, "stream": False}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": []}, "stream_options", "invalid_type"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type"),
    ({"priority": "high"}, "priority", "invalid_type"),
    ({"ignore_eos": "yes"}, "ignore_eos", "invalid_type"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output", "invalid_type"),
    ({"skip_special_tokens": 0}, "skip_special_tokens", "invalid_type"),
    ({"response_format": {"type": "json_object"}}, "response_format.type", "unsupported_value"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.type", "unsupported_value"),
    ({"response_format": {}}, "response_format.type", "invalid_type"),
    ({"response_format": "json"}, "response_format", "invalid_type"),
    ({"guided_regex": "a+"}, "guided_regex", "unsupported_value"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "unsupported_value"),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "unsupported_value"),
    ({"cache_salt": 5}, "cache_salt", "invalid_type"),
    ({"cache_salt": ""}, "cache_salt", "invalid_value"),
    ({"cache_salt": "s" * 129}, "cache_salt", "invalid_value"),
    ({"use_beam_search": True}, "use_beam_search", "unsupported_value"),
    ({"model": 5}, "model", "invalid_type"),
    ({"model": None}, "model", "invalid_type"),
    ({"model": ["a"]}, "model", "invalid_type"),
]

BAD_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "empty_array"),
    ({"messages": None}, "messages", "invalid_type"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": {"role": "user"}}, "messages", "invalid_type"),
    ({"messages": [None]}, "messages[0]", "invalid_type"),
    ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": None}]}, "messages[0].role", "invalid_type"),
    ({"messages": [{"role": "User", "content": "hi"}]}, "messages[0].role", "invalid_value"),
    ({"messages": user(5)}, "messages[0].content", "invalid_type"),
    ({"messages": user(True)}, "messages[0].content", "invalid_type"),
    ({"messages": user({"type": "text", "text": "hi"})}, "messages[0].content", "invalid_type"),
    ({"messages": user([None])}, "messages[0].content[0]", "invalid_type"),
    ({"messages": user(["hi"])}, "messages[0].content[0]", "invalid_type"),
    ({"messages": user([{"text": "hi"}])}, "messages[0].content[0].type", "missing_required_parameter"),
    ({"messages": user([{"type": 5}])}, "messages[0].content[0].type", "invalid_type"),
    ({"messages": user([{"type": "Text", "text": "hi"}])}, "messages[0].content[0].type", "unsupported_value"),
    ({"messages": user([{"type": "text"}])}, "messages[0].content[0].text", "missing_required_parameter"),
    ({"messages": user([{"type": "text", "text": 5}])}, "messages[0].content[0].text", "invalid_type"),
    ({"messages": user([{"type": "text", "text": None}])}, "messages[0].content[0].text", "invalid_type"),
    (
        {"messages": user([{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:"}}])},
        "messages[0].content[1].type",
        "unsupported_value",
    ),
    ({"messages": user([{"type": "input_audio"}])}, "messages[0].content[0].type", "unsupported_value"),
    ({"messages": user([{"type": "video_url"}])}, "messages[0].content[0].type", "unsupported_value"),
    ({"messages": user([{"type": "file"}])}, "messages[0].content[0].type", "unsupported_value"),
    ({"messages": [*user("a"), {"role": "assistant", "tool_calls": {}}]}, "messages[1].tool_calls", "invalid_type"),
    (
        {"messages": [*user("a"), {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "messages[1].tool_calls[0].function",
        "missing_required_parameter",
    ),
    (
        {"messages": [*user("a"), {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
        "messages[1].tool_calls[0].function.name",
        "missing_required_parameter",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        "invalid_type",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}]},
        "messages[0].tool_calls[0].type",
        "unsupported_value",
    ),
    (
        {"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]},
        "messages[0].tool_calls",
        "unsupported_value",
    ),
    ({"messages": [{"role": "assistant", "reasoning": {}}]}, "messages[0].reasoning", "invalid_type"),
    ({"messages": [{"role": "assistant", "audio": {"id": "x"}}]}, "messages[0].audio", "unsupported_value"),
    ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name", "invalid_type"),
    ({"logprobs": 1}, "logprobs", "invalid_type"),
    ({"top_logprobs": 5}, "top_logprobs", "invalid_value"),
    ({"logprobs": False, "top_logprobs": 5}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
    ({"logprobs": True, "top_logprobs": 10**9}, "top_logprobs", "integer_above_max_value"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "integer_below_min_value"),
    ({"tools": [{"type": "function"}]}, "tools", "unsupported_value"),
    ({"tools": [{"type": "function"}], "tool_choice": "auto"}, "tools", "unsupported_value"),
    ({"tools": {}}, "tools", "invalid_type"),
    ({"tool_choice": "required"}, "tool_choice", "unsupported_value"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "unsupported_value"),
    ({"tool_choice": "any"}, "tool_choice", "invalid_value"),
    ({"tool_choice": 5}, "tool_choice", "invalid_type"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_value"),
    ({"function_call": {"name": "f"}}, "function_call", "unsupported_value"),
    ({"modalities": ["text", "audio"]}, "modalities[1]", "invalid_value"),
    ({"audio": {"voice": "x"}}, "audio", "unsupported_value"),
    ({"echo": True}, "echo", "unsupported_value"),
    ({"chat_template": "{{ messages }}"}, "chat_template", "unsupported_value"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "invalid_type"),
    ({"enable_thinking": "yes"}, "enable_thinking", "invalid_type"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "invalid_value"),
]

BAD_COMPLETION: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "invalid_type"),
    ({"prompt": 5}, "prompt", "invalid_type"),
    ({"prompt": {}}, "prompt", "invalid_type"),
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": [""]}, "prompt[0]", "invalid_value"),
    ({"prompt": []}, "prompt", "empty_array"),
    ({"prompt": [[]]}, "prompt[0]", "empty_array"),
    ({"prompt": [[1], []]}, "prompt[1]", "empty_array"),
    ({"prompt": [VOCAB_SIZE]}, "prompt[0]", "integer_above_max_value"),
    ({"prompt": [999999999, -1]}, "prompt[0]", "integer_above_max_value"),
    ({"prompt": [1, -1]}, "prompt[1]", "integer_below_min_value"),
    ({"prompt": [1, "a"]}, "prompt[1]", "invalid_type"),
    ({"prompt": [True]}, "prompt[0]", "invalid_type"),
    ({"prompt": [1.5]}, "prompt[0]", "invalid_type"),
    ({"prompt": [[1], [2, BIG]]}, "prompt[1][1]", "integer_above_max_value"),
    ({"prompt": ["a", None]}, "prompt[1]", "invalid_type"),
    ({"prompt": ["a"] * (MAX_PROMPTS + 1)}, "prompt", "invalid_value"),
    ({"prompt": ["a"] * 100, "n": 100}, "n", "invalid_value"),
    ({"logprobs": True}, "logprobs", "invalid_type"),
    ({"logprobs": 21}, "logprobs", "integer_above_max_value"),
    ({"echo": True, "logprobs": 1}, "echo", "unsupported_value"),
    ({"echo": True, "prompt": [1, 2]}, "echo", "unsupported_value"),
    ({"suffix": "end"}, "suffix", "unsupported_value"),
    ({"best_of": 2}, "best_of", "unsupported_value"),
    ({"best_of": 1, "n": 2}, "best_of", "invalid_value"),
]


def name_of(value: Any) -> str:
    return json.dumps(value)[:60] if isinstance(value, dict) else ""


class TestFields:
    @pytest.mark.parametrize(("body", "param", "code"), BAD_SHARED + BAD_CHAT, ids=name_of)
    async def test_chat_names_the_field_and_the_fault(
        self, client: Client, body: dict[str, Any], param: str, code: str
    ) -> None:
        await self._refused(await client.chat(**body), param, code, client)

    @pytest.mark.parametrize(("body", "param", "code"), BAD_SHARED + BAD_COMPLETION, ids=name_of)
    async def test_completions_name_the_field_and_the_fault(
        self, client: Client, body: dict[str, Any], param: str, code: str
    ) -> None:
        await self._refused(await client.complete(**body), param, code, client)

    async def _refused(self, response: Any, param: str, code: str, client: Client) -> None:
        assert response.status_code == 400
        error = error_of(response)
        assert (error["param"], error["code"]) == (param, code), error
        assert error["type"] == "invalid_request_error"
        assert len(error["message"]) < 600
        assert client.engine.accepted == []

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ({"temperature": "hot"}, "Invalid type for 'temperature': expected a number, but got a string instead."),
            (
                {"logprobs": True, "top_logprobs": 50},
                "Invalid 'top_logprobs': integer above maximum value. Expected a value <= 20, but got 50 instead.",
            ),
            (
                {"messages": []},
                "Invalid 'messages': empty array. Expected an array with minimum length 1, but got an empty array "
                "instead.",
            ),
            (
                {"temperature": 2.5},
                "Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got 2.5 instead.",
            ),
        ],
    )
    async def test_messages_read_as_openai_words_them(self, client: Client, body: dict[str, Any], message: str) -> None:
        assert error_of(await client.chat(**body))["message"] == message

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
    async def test_missing_fields_are_named(self, client: Client, path: str) -> None:
        required = "messages" if "chat" in path else "prompt"
        for body, param in (({}, "model"), ({"model": MODEL}, required)):
            error = error_of(await client.raw(path, json.dumps(body)))
            assert error["code"] == "missing_required_parameter"
            assert error["param"] == param
            assert error["message"] == f"Missing required parameter: '{param}'."

    async def test_an_unknown_model_is_a_404(self, client: Client) -> None:
        for response in (await client.chat(model="nope"), await client.complete(model="nope\x00" * 99)):
            assert response.status_code == 404
            assert error_of(response)["code"] == "model_not_found"
            assert error_of(response)["param"] == "model"
            message = error_of(response)["message"]
            assert message.startswith("The model `nope")
            assert (
                "` does not exist or you do not have access to it. Available: `fake-model`, `second-name`." in message
            )
        assert (await client.chat(model="second-name")).status_code == 200

    async def test_a_template_that_refuses_is_a_400_of_its_own(self, make_client: Make) -> None:
        text = FakeText()
        text.encode_error = BadRequest("roles must alternate", param="messages", code="chat_template_error")
        response = await make_client(text=text).chat(stream=True)
        assert response.status_code == 400
        assert error_of(response)["code"] == "chat_template_error"

    async def test_a_tokenizer_that_breaks_is_a_500_without_internals(self, make_client: Make) -> None:
        text = FakeText()
        text.encode_error = RuntimeError("/secret/path.py")
        response = await make_client(text=text).chat(stream=True)
        assert response.status_code == 500
        assert "secret" not in response.text

    async def test_a_template_that_gives_no_tokens_is_a_400(self, make_client: Make) -> None:
        class Nothing(FakeText):
            async def _encode(self, text: str) -> tuple[int, ...]:
                return ()

        for response in (
            await make_client(text=Nothing()).chat(),
            await make_client(text=Nothing()).complete(),
        ):
            assert response.status_code == 400


class TestTolerated:
    @pytest.mark.parametrize(
        "body",
        [
            {"tools": []},
            {"tools": None, "tool_choice": None},
            {"tool_choice": "auto"},
            {"tool_choice": "none"},
            {"tools": [{"type": "function"}], "tool_choice": "none"},
            {"functions": [], "function_call": "auto"},
            {"stop": None},
            {"stop": []},
            {"stop": ["x"] * 100},
            {"max_tokens": 5.0},
            {"temperature": 0},
            {"temperature": 2},
            {"temperature": 1e-9, "repetition_penalty": 0.01},
            {"top_k": -1},
            {"top_k": 0},
            {"top_k": 10**12},
            {"top_p": 1},
            {"n": None, "seed": None, "temperature": None, "stream": None, "logit_bias": None, "max_tokens": None},
            {"stream_options": None},
            {"logit_bias": {"0": -100, str(VOCAB_SIZE - 1): 100}},
            {"logprobs": None, "top_logprobs": None},
            {"top_logprobs": 0},
            {"logprobs": True},
            {"response_format": {"type": "text"}},
            {"modalities": ["text"]},
            {"guided_json": None, "structured_outputs": None, "bad_words": []},
            {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "prompt_cache_key": "k"},
            {"parallel_tool_calls": True},
            {"chat_template_kwargs": {"a": [1, {"b": None}]}, "enable_thinking": False},
            {"reasoning_effort": "low"},
            {"skip_special_tokens": False},
            {"priority": -5},
            {"min_tokens": 3},
            {"messages": user(None)},
            {"messages": user("")},
            {"messages": user([])},
            {"messages": user([{"type": "text", "text": ""}])},
            {"messages": user([{"type": "input_text", "text": "hi"}])},
            {"messages": user([{"type": "text", "text": "x"}] * 10_000), "max_tokens": 1},
            {"messages": user("nul \x00 \ufffd \U0010ffff")},
            {"messages": [{"role": "system", "content": "a"}, *user("b"), {"role": "system", "content": "c"}]},
            {"messages": [{"role": "developer", "content": "a"}, *user("b")]},
            {"messages": [*user("b"), {"role": "assistant", "content": "p"}], "continue_final_message": True},
        ],
        ids=name_of,
    )
    async def test_chat_takes_it(self, make_client: Make, body: dict[str, Any]) -> None:
        client = make_client(engine=FakeEngine(script=say("ok"), context_tokens=20_000))
        response = await client.chat(**body)
        assert response.status_code == 200, response.text
        assert "x-ignored-params" not in response.headers

    async def test_unknown_fields_are_named_in_a_header(self, client: Client) -> None:
        response = await client.chat(top_a=0.5, mirostat=2, user="u", **{"evil\r\nx: y": 1, "日本": 1})
        assert response.status_code == 200
        assert response.headers["x-ignored-params"] == "top_a, mirostat, evil??x??y, ??"
        many = await client.complete(**{f"field{i}": i for i in range(500)})
        assert many.headers["x-ignored-params"].endswith(", ...")
        assert len(many.headers["x-ignored-params"]) < 1000

    async def test_of_two_equal_keys_the_last_one_counts(self, client: Client) -> None:
        body = f'{{"model":"{MODEL}","prompt":"a","prompt":"b","max_tokens":1,"max_tokens":2}}'
        response = await client.raw("/v1/completions", body)
        assert response.status_code == 200
        assert client.engine.accepted[-1].prompt_tokens == (ord("b"),)
        assert client.engine.accepted[-1].stop.max_tokens == 2

    async def test_a_top_k_of_the_whole_vocabulary_is_none(self, client: Client) -> None:
        await client.chat(top_k=VOCAB_SIZE)
        assert client.engine.accepted[-1].sampling.top_k == 0


class TestConversation:
    async def _parsed(self, client: Client, messages: list[Any], **body: Any) -> tuple[Message, ...]:
        response = await client.chat(messages=messages, **body)
        assert response.status_code == 200, response.text
        assert client.text.last_conversation is not None
        return client.text.last_conversation.messages

    async def test_every_form_of_content_keeps_its_parts_and_their_order(self, client: Client) -> None:
        parsed = await self._parsed(
            client,
            [
                {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]},
                {"role": "user", "content": "c", "name": "ann"},
                {"role": "assistant", "content": None, "reasoning_content": "hm"},
                {"role": "assistant", "content": "", "reasoning": "first", "reasoning_content": "second"},
                {
                    "role": "assistant",
                    "content": [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "d"}],
                },
                {"role": "assistant", "refusal": "no"},
                {"role": "function", "name": "f", "content": "e"},
                {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "f"}]},
            ],
        )
        assert parsed == (
            Message(role="system", texts=("a", "b")),
            Message(role="user", texts=("c",), name="ann"),
            Message(role="assistant", reasoning="hm"),
            Message(role="assistant", texts=("",), reasoning="first"),
            Message(role="assistant", texts=("d",), reasoning="t"),
            Message(role="assistant", texts=("no",)),
            Message(role="tool", texts=("e",), name="f"),
            Message(role="tool", texts=("f",), tool_call_id="x"),
        )

    async def test_broken_arguments_stay_the_text_they_were(self, client: Client) -> None:
        parsed = await self._parsed(
            client,
            [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"cut": '}},
                        {"id": "2", "function": {"name": "g", "arguments": {"a": 1}}},
                        {"id": "3", "function": {"name": "h", "arguments": None}},
                    ],
                    "function_call": {"name": "i", "arguments": "{}"},
                }
            ],
        )
        assert parsed[0].tool_calls == (
            ToolCall(id="1", name="f", arguments='{"cut": '),
            ToolCall(id="2", name="g", arguments='{"a":1}'),
            ToolCall(id="3", name="h", arguments=""),
            ToolCall(id="", name="i", arguments="{}"),
        )

    async def test_template_arguments_and_flags(self, client: Client) -> None:
        await client.chat(chat_template_kwargs={"enable_thinking": True, "x": [1]}, enable_thinking=False)
        conversation = client.text.last_conversation
        assert conversation is not None
        assert conversation.template_kwargs == {"enable_thinking": True, "x": [1]}
        assert (conversation.add_generation_prompt, conversation.continue_final_message) == (True, False)
        await client.chat(continue_final_message=True)
        conversation = client.text.last_conversation
        assert (conversation.add_generation_prompt, conversation.continue_final_message) == (False, True)
        await client.chat(add_generation_prompt=False)
        conversation = client.text.last_conversation
        assert (conversation.add_generation_prompt, conversation.continue_final_message) == (False, False)


BAD_JSON = [
    b"",
    b" ",
    b"{",
    b'{"model":',
    b"{'model': 1}",
    b'{"model":"m",}',
    b'{"a": NaN}',
    b'{"a": Infinity}',
    b'{"a": -Infinity}',
    b'{"a": 1e999}',
    b'{"a": 01}',
    b'{"a": .5}',
    b'{"a": "\xff\xfe"}',
    b'{"a": "\xed\xa0\x80"}',
    b'{"a": "\\ud800"}',
    b'{"a": "\\udc00\\ud800"}',
    b'{"a": "tab\tinside"}',
    b'{"a": "\x00"}',
    b"\xef\xbb\xbf{}",
    "{}".encode("utf-16"),
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"[" * 2000 + b"]" * 2000,
    b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1),
    b"{} {}",
    b"nul",
    b"\x1f\x8b\x08\x00gzip",
]


class TestBodies:
    @pytest.mark.parametrize("body", BAD_JSON, ids=lambda body: repr(body[:20]))
    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
    async def test_what_is_not_json_is_a_400(self, client: Client, path: str, body: bytes) -> None:
        response = await client.raw(path, body)
        assert response.status_code == 400
        error = error_of(response)
        assert error["code"] == "invalid_json"
        assert error["param"] is None
        assert error["message"].startswith("We could not parse the JSON body of your request: ")

    @pytest.mark.parametrize("body", [b"[]", b"null", b'"x"', b"5", b"true", b"1.5"])
    async def test_what_is_not_an_object_is_a_400(self, client: Client, body: bytes) -> None:
        response = await client.raw("/v1/chat/completions", body)
        assert response.status_code == 400
        assert error_of(response)["code"] == "invalid_type"

    async def test_nesting_up_to_the_cap_passes(self, client: Client) -> None:
        value: Any = 1
        for _ in range(MAX_DEPTH - 1):
            value = [value]
        assert (await client.chat(metadata=value)).status_code == 200
        assert (await client.chat(metadata=[value])).status_code == 400

    @pytest.mark.parametrize(
        ("media", "status"),
        [
            ("application/json", 200),
            ("application/json; charset=utf-8", 200),
            ("APPLICATION/JSON ; charset=latin-1", 200),
            ("application/vnd.api+json", 200),
            ("text/plain", 415),
            ("application/x-www-form-urlencoded", 415),
            ("multipart/form-data; boundary=x", 415),
            ("application/jsonp", 415),
            ("", 415),
            ("+json", 415),
        ],
    )
    async def test_media_types(self, client: Client, media: str, status: int) -> None:
        body = json.dumps({"model": MODEL, "prompt": "a"})
        response = await client.http.post("/v1/completions", content=body, headers={"content-type": media})
        assert response.status_code == status
        if status == 415:
            assert error_of(response)["code"] == "unsupported_media_type"

    async def test_a_missing_media_type_and_a_compressed_body_are_refused(self, client: Client) -> None:
        response = await client.http.post("/v1/completions", content=b"{}")
        assert response.status_code == 415
        response = await client.raw("/v1/completions", b"{}", content_encoding="gzip")
        assert response.status_code == 415

    @pytest.mark.parametrize("chunked", [False, True])
    async def test_a_body_over_the_cap_is_a_413(self, make_client: Make, chunked: bool) -> None:
        client = make_client(http=HttpConfig(max_body_bytes=2048, sse_keep_alive_s=0))
        body = json.dumps({"model": MODEL, "prompt": "a" * 4000}).encode()

        async def parts() -> Any:
            for start in range(0, len(body), 100):
                yield body[start : start + 100]

        response = await client.raw("/v1/completions", parts() if chunked else body)
        assert response.status_code == 413
        assert error_of(response)["code"] == "request_too_large"
        assert "2048 bytes" in error_of(response)["message"]
        small = json.dumps({"model": MODEL, "prompt": "a"}).encode()
        exact = small[:-1] + b" " * (2048 - len(small)) + b"}"
        assert (await client.raw("/v1/completions", exact)).status_code == 200


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**40, 1e308, "", "\x00", "text", "auto", "user", MODEL])
    | st.text(max_size=8)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)
FIELDS = sorted(
    {name for body, _, _ in BAD_SHARED + BAD_CHAT + BAD_COMPLETION for name in body}
    | {"min_p", "user", "metadata", "add_special_tokens", "reasoning_effort", "unknown", "stream_options"}
)
parts = st.fixed_dictionaries({}, optional={"type": scalars, "text": scalars, "image_url": values})
turns = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "function", "developer"]) | scalars},
    optional={
        "content": scalars | st.lists(parts | scalars, max_size=3),
        "tool_calls": values,
        "function_call": values,
        "reasoning": scalars,
        "name": scalars,
    },
)


class TestHostileBodies:
    @hypothesis.given(
        body=st.dictionaries(st.sampled_from(FIELDS), values, max_size=5),
        messages=st.lists(turns, max_size=3),
        prompt=values,
        route=st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
    )
    @hypothesis.settings(
        max_examples=250, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
    )
    async def test_only_an_answer_or_a_4xx(
        self, client: Client, body: dict[str, Any], messages: list[Any], prompt: Any, route: str
    ) -> None:
        base = {"model": MODEL, "max_tokens": 4, "messages": messages, "prompt": prompt}
        try:
            raw = json.dumps(base | body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raw = json.dumps(base | body).encode()
        response = await client.raw(route, raw)
        assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
        if response.status_code != 200:
            error_of(response)
        elif response.headers["content-type"].startswith("text/event-stream"):
            assert events(response)[-1] == "[DONE]"
        assert client.engine.live == 0

    @hypothesis.given(raw=st.binary(max_size=60))
    @hypothesis.settings(
        max_examples=100, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
    )
    async def test_any_bytes(self, client: Client, raw: bytes) -> None:
        response = await client.raw("/v1/chat/completions", raw)
        assert 400 <= response.status_code < 500


class TestSizes:
    """What is too large is refused by its length, and no element of it is looked at."""

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"messages": [None] * (limits.MAX_MESSAGES + 1)}, "messages"),
            ({"messages": user([None] * (limits.MAX_PARTS + 1))}, "messages[0].content"),
            (
                {"messages": [{"role": "assistant", "tool_calls": [None] * (limits.MAX_TOOL_CALLS + 1)}]},
                "messages[0].tool_calls",
            ),
            ({"messages": [{"role": "user", "name": "n" * 1025}]}, "messages[0].name"),
            ({"messages": [{"role": "tool", "tool_call_id": "n" * 1025}]}, "messages[0].tool_call_id"),
            ({"messages": [{"role": "user", "name": "n" * 1024}] * 257}, "messages"),
            ({"tools": [None] * (limits.MAX_TOOLS + 1), "tool_choice": "none"}, "tools"),
            ({"chat_template_kwargs": {str(i): i for i in range(300)}}, "chat_template_kwargs"),
            ({"chat_template_kwargs": {"x": "a" * 300_000}}, "chat_template_kwargs"),
            ({"logit_bias": {str(i): None for i in range(limits.MAX_LOGIT_BIAS + 1)}}, "logit_bias"),
            ({"modalities": [None] * 17}, "modalities"),
            ({str(i): i for i in range(limits.MAX_FIELDS)}, None),
        ],
        ids=name_of,
    )
    async def test_is_refused_by_length(self, client: Client, body: dict[str, Any], param: str | None) -> None:
        response = await client.chat(**body)
        assert response.status_code == 400
        assert error_of(response)["param"] == param
        assert len(response.content) < 1000

    async def test_at_the_bound_passes(self, make_client: Make) -> None:
        client = make_client(engine=FakeEngine(script=say("ok"), context_tokens=100_000))
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": "x"}] * limits.MAX_MESSAGES,
            "max_tokens": 1,
            "logit_bias": {str(i): 1 for i in range(VOCAB_SIZE)},
        }
        assert (await client.chat(**body)).status_code == 200

    @pytest.mark.parametrize(
        "text",
        [
            "[" + "[]," * limits.MAX_CONTAINERS + "1]",
            "{" + ",".join(f'"{i}":1' for i in range(limits.MAX_MEMBERS + 1)) + "}",
            "[" + "1," * (limits.MAX_VALUES + 1) + "1]",
        ],
        ids=["containers", "members", "values"],
    )
    async def test_json_of_too_many_values_is_not_decoded(
        self, client: Client, text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("orjson.loads", None)
        response = await client.raw("/v1/completions", f'{{"model":"{MODEL}","x":{text}}}')
        assert response.status_code == 400
        assert "too many values" in response.json()["error"]["message"]

    async def test_a_large_body_is_answered_like_a_small_one(self, make_client: Make) -> None:
        client = make_client(engine=FakeEngine(context_tokens=4_000_000))
        text = '[{"a\\":[]},' * 200_000  # not JSON of many values but a long text
        response = await client.complete(prompt=text, max_tokens=3)
        assert response.json()["choices"][0]["text"] == text[:3]
        assert (await client.raw("/v1/completions", b"[" * 400_000)).status_code == 400
        assert error_of(await client.complete(model="x" * 400_000))["code"] == "model_not_found"

    async def test_many_unknown_names_are_remembered_up_to_a_bound(self, client: Client) -> None:
        for start in range(0, 3000, 500):
            await client.complete(**{f"u{i}{'x' * 100}": 1 for i in range(start, start + 500)})
        names = client.app._logged_names
        assert len(names) <= 1024
        assert max(map(len, names)) <= 64


def json_values(rng: random.Random, depth: int) -> Any:
    kind = rng.random()
    if depth == 0 or kind < 0.4:
        return "".join(rng.choice('"\\[]{},:aé\n') for _ in range(rng.randint(0, 9)))
    if kind < 0.5:
        return rng.randint(0, 99)
    if kind < 0.75:
        return [json_values(rng, depth - 1) for _ in range(rng.randint(0, 4))]
    return {str(json_values(rng, 0)): json_values(rng, depth - 1) for _ in range(rng.randint(0, 4))}


def plain_tally(value: Any) -> Tally:
    if not isinstance(value, (list, dict)):
        return Tally(0, 0, 0)
    inner = [plain_tally(child) for child in (value.values() if isinstance(value, dict) else value)]
    return Tally(
        1 + sum(each.containers for each in inner),
        (len(value) if isinstance(value, dict) else 0) + sum(each.members for each in inner),
        max(len(value) - 1, 0) + sum(each.values for each in inner),
    )


def test_the_tally_of_json_is_that_of_its_values_wherever_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "SCANNED_BYTES", 7)
    rng = random.Random(1)
    for _ in range(1000):
        value = json_values(rng, 4)
        assert tally(json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()) == plain_tally(value)
