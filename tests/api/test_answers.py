"""What answers look like, whole and streamed, and that the two say the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from server.api.events import Endings
from server.api.logprobs import LegacyOffsets, chat_entries, token_text
from server.config import HttpConfig
from server.errors import Unavailable
from server.metrics import Metrics
from server.request import ChoiceFinished, FinishReason, GenerationRequest, LogprobEntry, TextDelta
from tests.api.wire import Client, error_of, events
from tests.fakes import CONTROL_ID, EOS_ID, FakeEngine, forever, say

Make = Callable[..., Client]


def deltas(chunks: list[Any], choice: int = 0) -> str:
    """The text of one choice, from the chunks of either route."""
    said = []
    for chunk in chunks[:-1]:
        for entry in chunk["choices"]:
            if entry["index"] == choice:
                said.append(entry["delta"].get("content", "") if "delta" in entry else entry["text"])
    return "".join(said)


class TestChat:
    async def test_a_whole_answer_has_every_field(self, make_client: Make) -> None:
        client = make_client(engine=FakeEngine(script=say("Hi 👋")))
        response = await client.chat()
        assert response.status_code == 200
        ChatCompletion.model_validate(response.json(), strict=False)
        assert response.json() == {
            "id": "chatcmpl-" + response.headers["x-request-id"],
            "object": "chat.completion",
            "created": 1_800_000_000,
            "model": "fake-model",
            "system_fingerprint": "fp_twinpane",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "Hi 👋", "refusal": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": None,
                }
            ],
            "usage": {
                "prompt_tokens": 19,
                "completion_tokens": 8,
                "total_tokens": 27,
                "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
                "completion_tokens_details": {
                    "reasoning_tokens": 0,
                    "audio_tokens": 0,
                    "accepted_prediction_tokens": 0,
                    "rejected_prediction_tokens": 0,
                },
            },
        }

    async def test_a_stream_is_a_role_then_text_then_an_empty_finish_then_done(self, make_client: Make) -> None:
        client = make_client(engine=FakeEngine(script=say("Hi")))
        response = await client.chat(stream=True)
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        *chunks, done = events(response)
        assert done == "[DONE]"
        for chunk in chunks:
            ChatCompletionChunk.model_validate(chunk)
            assert list(chunk) == ["id", "object", "created", "model", "system_fingerprint", "choices"]
            assert chunk["id"] == "chatcmpl-" + response.headers["x-request-id"]
            assert chunk["object"] == "chat.completion.chunk"
        first, *texts, last = [chunk["choices"][0] for chunk in chunks]
        assert first == {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        assert [text["delta"] for text in texts] == [{"content": "H"}, {"content": "i"}]
        assert all(text["finish_reason"] is None for text in texts)
        assert last == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}

    async def test_usage_comes_last_without_choices_and_only_when_asked(self, make_client: Make) -> None:
        client = make_client(engine=FakeEngine(script=say("one", "twelve", "three")))
        options = {"n": 3, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, usage, _ = events(await client.chat(**options))
        whole = (await client.chat(n=3)).json()
        ChatCompletionChunk.model_validate(usage)
        assert usage["choices"] == []
        assert usage["usage"] == whole["usage"]
        assert usage["usage"]["completion_tokens"] == 4 + 7 + 6
        assert all(chunk["usage"] is None for chunk in chunks)
        assert not any("usage" in chunk for chunk in events(await client.chat(n=3, stream=True))[:-1])

    @pytest.mark.parametrize("route", ["chat", "complete"])
    async def test_usage_tells_how_much_of_the_prompts_was_cached(self, client: Client, route: str) -> None:
        client.engine.cached_tokens = 2
        ask = client.chat if route == "chat" else partial(client.complete, prompt=["hello", "hey"])
        wanted = 2 if route == "chat" else 4
        whole = (await ask(n=2)).json()["usage"]
        *_, usage, _ = events(await ask(n=2, stream=True, stream_options={"include_usage": True}))
        assert whole["prompt_tokens_details"]["cached_tokens"] == wanted
        assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == wanted

    async def test_a_cache_salt_goes_with_the_request(self, client: Client) -> None:
        await client.chat(cache_salt="tenant")
        await client.chat()
        assert [request.cache_salt for request in client.engine.accepted] == ["tenant", None]

    async def test_running_usage_counts_every_token_so_far(self, make_client: Make) -> None:
        client = make_client(engine=FakeEngine(script=say("abc")))
        options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        *chunks, usage, _ = events(await client.chat(**options))
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == usage["usage"]["completion_tokens"] == 4
        assert all(chunk["usage"]["prompt_tokens"] == 19 for chunk in chunks)

    @pytest.mark.parametrize(
        "body",
        [
            {},
            {"n": 3},
            {"max_tokens": 5},
            {"stop": ["wor"]},
            {"stop": ["wor"], "include_stop_str_in_output": True},
            {"stop": "@@@@@@"},
            {"stop_token_ids": [ord("w")]},
            {"logprobs": True, "top_logprobs": 2},
            {"logprobs": True, "n": 2, "stop": "world"},
            {"ignore_eos": True, "max_tokens": 40},
            {"min_tokens": 12, "stop": "h"},
        ],
    )
    async def test_a_stream_says_what_the_whole_answer_says(self, make_client: Make, body: dict[str, Any]) -> None:
        client = make_client(engine=FakeEngine(script=say("héllo 🌍 world", "日本語 world", "")))
        whole = (await client.chat(**body)).json()
        chunks = events(await client.chat(**body, stream=True, stream_options={"include_usage": True}))
        assert chunks[-2]["usage"] == whole["usage"]
        for choice in whole["choices"]:
            index = choice["index"]
            mine = [e for c in chunks[:-1] for e in c["choices"] if e["index"] == index]
            assert deltas(chunks, index) == choice["message"]["content"]
            assert (mine[-1]["finish_reason"], mine[-1]["stop_reason"]) == (
                choice["finish_reason"],
                choice["stop_reason"],
            )
            entries = [entry for e in mine if e["logprobs"] for entry in e["logprobs"]["content"]]
            assert entries == ((choice["logprobs"] or {}).get("content") or [])
            if "logprobs" in body:
                assert len(entries) > 0

    async def test_choices_are_interleaved_and_each_ends_once(self, make_client: Make) -> None:
        client = make_client(engine=FakeEngine(script=say("aaaa", "bb", "c")))
        chunks = events(await client.chat(n=3, stream=True))
        indices = [e["index"] for c in chunks[:-1] for e in c["choices"] if e.get("delta", {}).get("content")]
        assert indices == [0, 1, 2, 0, 1, 0, 0]
        finishes = [e["index"] for c in chunks[:-1] for e in c["choices"] if e["finish_reason"]]
        assert sorted(finishes) == [0, 1, 2]

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_limit_is_length_and_an_end_is_stop(self, make_client: Make, stream: bool) -> None:
        client = make_client(engine=FakeEngine(script=say("abcdef")))

        async def reason(**body: Any) -> tuple[str, Any]:
            response = await client.chat(**body, stream=stream)
            entry = (events(response)[-2] if stream else response.json())["choices"][0]
            return entry["finish_reason"], entry["stop_reason"]

        assert await reason(max_tokens=3) == ("length", None)
        assert await reason() == ("stop", None)
        assert await reason(stop="cd") == ("stop", "cd")
        assert await reason(stop_token_ids=[ord("e")]) == ("stop", ord("e"))

    async def test_nothing_is_sent_while_there_is_nothing_to_say(self, make_client: Make) -> None:
        client = make_client(engine=FakeEngine(script=say("@@@@@@@!")))
        chunks = events(await client.chat(stream=True, stop=["@@@@@@@@"]))
        contents = [c["choices"][0]["delta"].get("content") for c in chunks[:-1]]
        assert contents == ["", "@@@@@@@!", None]

    async def test_logprobs_carry_the_true_bytes_of_each_token(self, make_client: Make) -> None:
        client = make_client(engine=FakeEngine(script=say("é👋")))
        response = await client.chat(logprobs=True, top_logprobs=1)
        choice = response.json()["choices"][0]
        joined = bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"])
        assert joined.decode() == choice["message"]["content"] == "é👋"
        assert not any("\ufffd" in entry["token"] for entry in choice["logprobs"]["content"])
        assert all(len(entry["top_logprobs"]) == 1 for entry in choice["logprobs"]["content"])

    def test_a_token_that_cannot_be_sampled_has_a_finite_logprob(self) -> None:
        (entry,) = chat_entries([LogprobEntry(token=b"\xf0\x9f", logprob=float("-inf"), top=((b"a", float("nan")),))])
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0
        assert entry["token"] == "bytes:\\xf0\\x9f"
        assert entry["bytes"] == [0xF0, 0x9F]


class TestCompletions:
    async def test_a_whole_answer(self, make_client: Make) -> None:
        client = make_client(engine=FakeEngine(script=say("there")))
        response = await client.complete()
        Completion.model_validate(response.json())
        assert response.json()["id"] == "cmpl-" + response.headers["x-request-id"]
        assert response.json()["object"] == "text_completion"
        assert response.json()["choices"] == [
            {"index": 0, "text": "there", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ]

    @pytest.mark.parametrize(
        "body",
        [
            {},
            {"n": 2},
            {"echo": True},
            {"prompt": ["a", "bc"], "n": 2},
            {"prompt": ["a", "bc"], "echo": True, "n": 2},
            {"logprobs": 2},
            {"prompt": [[1, 2], [3]]},
            {"prompt": [1, 2]},
        ],
    )
    async def test_a_stream_says_what_the_whole_answer_says(self, make_client: Make, body: dict[str, Any]) -> None:
        client = make_client(engine=FakeEngine(script=say("héllo", "wörld")))
        whole = (await client.complete(**body)).json()
        chunks = events(await client.complete(**body, stream=True, stream_options={"include_usage": True}))
        for chunk in chunks[:-1]:
            assert chunk["object"] == "text_completion"
            if chunk["choices"]:
                Completion.model_validate(chunk | {"choices": []})
        assert chunks[-2]["usage"] == whole["usage"]
        for choice in whole["choices"]:
            mine = [e for c in chunks[:-1] for e in c["choices"] if e["index"] == choice["index"]]
            assert "".join(e["text"] for e in mine) == choice["text"]
            assert [e["finish_reason"] for e in mine].count(choice["finish_reason"]) == 1
            for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                streamed = [entry for e in mine if e["logprobs"] for entry in e["logprobs"][key]]
                assert streamed == ((choice["logprobs"] or {}).get(key) or [])

    async def test_many_prompts_count_through_and_echo_their_own_text(self, make_client: Make) -> None:
        client = make_client(engine=FakeEngine(script=say("X", "Y")))
        response = await client.complete(prompt=["one ", "two "], n=2, echo=True)
        texts = [(choice["index"], choice["text"]) for choice in response.json()["choices"]]
        assert texts == [(0, "one X"), (1, "one Y"), (2, "two X"), (3, "two Y")]
        assert response.json()["usage"]["prompt_tokens"] == 8

    async def test_absent_max_tokens_is_sixteen_here_and_the_rest_of_the_context_in_chat(
        self, make_client: Make
    ) -> None:
        client = make_client(engine=FakeEngine(script=forever, context_tokens=100))
        assert (await client.complete()).json()["usage"]["completion_tokens"] == 16
        usage = (await client.chat()).json()["usage"]
        assert usage["total_tokens"] == 100

    def test_legacy_offsets_count_characters(self) -> None:
        pieces = ["é".encode()[:1], "é".encode()[1:], b"ab", b"c"]
        offsets = LegacyOffsets()
        entries = [LogprobEntry(token=piece, logprob=-1.0) for piece in pieces]
        first, second = offsets.entries("éab", entries[:3]), offsets.entries("c", entries[3:])
        assert first["text_offset"] + second["text_offset"] == [0, 0, 1, 3]
        assert first["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "ab"]
        assert second["top_logprobs"] == [{"c": -1.0}]

    @pytest.mark.parametrize("deltas", [["a", "", "b é", "f"], ["ab é", "f"], ["a", "b éf"]])
    def test_legacy_offsets_count_visible_text_only(self, deltas: list[str]) -> None:
        """Skipped control tokens have no width, however the text is cut into deltas."""
        tokens = [b"a", b"<|im_end|>", b"b", b" ", "é".encode()[:1], "é".encode()[1:], b"<s>", b"f"]
        entries = [LogprobEntry(token=token, logprob=-1.0) for token in tokens]
        offsets, seen = LegacyOffsets(), []
        for i, text in enumerate(deltas):
            last = i == len(deltas) - 1
            seen += offsets.entries(text, entries if last else ())["text_offset"]
        assert seen == [0, 1, 1, 2, 3, 3, 4, 4]

    def test_legacy_offsets_of_visible_control_tokens_and_of_a_dropped_space(self) -> None:
        entries = [LogprobEntry(token=token, logprob=-1.0) for token in (b" Hi", b"<s>", b"!")]
        assert LegacyOffsets().entries("Hi<s>!", entries)["text_offset"] == [0, 2, 5]

    def test_a_whole_token_is_its_own_text(self) -> None:
        assert token_text("👋".encode()) == "👋"


class TestEndings:
    @pytest.mark.parametrize("n", [1, 3])
    async def test_a_failing_stream_ends_with_one_error_and_done(self, make_client: Make, n: int) -> None:
        engine = FakeEngine(script=forever)
        engine.fail_after = 4
        client = make_client(engine=engine)
        response = await client.chat(stream=True, n=n)
        assert response.status_code == 200
        *chunks, error, done = events(response)
        assert done == "[DONE]"
        assert list(error) == ["error"]
        assert error["error"]["type"] == "server_error"
        assert error["error"]["code"] == "internal_error"
        assert "secret" not in response.text
        assert not any("error" in chunk for chunk in chunks)
        assert not any(entry["finish_reason"] for chunk in chunks for entry in chunk["choices"])
        assert engine.live == 0

    async def test_a_failing_whole_answer_is_a_500_without_internals(self, make_client: Make) -> None:
        engine = FakeEngine(script=forever)
        engine.fail_after = 4
        response = await make_client(engine=engine).chat()
        assert response.status_code == 500
        error = error_of(response)
        assert error["code"] == "internal_error"
        assert response.headers["x-request-id"] in error["message"]
        assert "secret" not in response.text
        assert "Traceback" not in response.text

    async def test_an_engine_that_gives_up_in_mid_answer_is_a_503(self, make_client: Make) -> None:
        engine = FakeEngine(script=forever)
        engine.fail_after = 2
        engine.fail_with = Unavailable("The engine has stopped.", code="engine_unavailable")
        response = await make_client(engine=engine).chat()
        assert response.status_code == 503
        assert error_of(response)["code"] == "engine_unavailable"

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_bug_in_an_output_ends_in_one_way(self, make_client: Make, stream: bool) -> None:
        """A detokenizer that emits what cannot be encoded is our bug; the client gets an ending all the same."""

        class Broken(FakeEngine):
            def step(self) -> None:
                for live in list(self._live.values()):
                    live.request.outputs[0]._emit(TextDelta(choice=0, text="\ud800"))  # type: ignore[attr-defined]
                super().step()

        client = make_client(engine=Broken(script=forever))
        response = await client.chat(stream=stream, max_tokens=3)
        if stream:
            assert events(response)[-2]["error"]["code"] == "internal_error"
            assert events(response)[-1] == "[DONE]"
            assert b"twinpane:stream_ending_violations_total" in client.ctx.metrics.render()
        else:
            assert response.status_code == 500
            assert error_of(response)["code"] == "internal_error"
        assert client.engine.live == 0

    def test_what_comes_after_an_end_is_dropped_and_counted(self) -> None:
        metrics = Metrics("m")
        endings = Endings(choices=2, metrics=metrics, request_id="r")
        end = ChoiceFinished(choice=0, reason=FinishReason.STOP, matched=None, output_tokens=1)
        late = TextDelta(choice=0, text="late")
        shown, error = endings.admit([end, late, end, TextDelta(choice=1, text="fine")])
        assert shown == [end, TextDelta(choice=1, text="fine")]
        assert error is None
        assert not endings.finished
        assert b'twinpane:stream_ending_violations_total{engine="0",model_name="m"} 2.0' in metrics.render()

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_refusal_comes_before_any_header(self, make_client: Make, stream: bool) -> None:
        client = make_client(engine=FakeEngine(context_tokens=64))
        response = await client.chat(stream=stream, messages=[{"role": "user", "content": "x" * 100}])
        assert response.status_code == 400
        error = error_of(response)
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "messages"
        assert error["n_ctx"] == 64
        assert error["n_prompt_tokens"] == 117
        assert "maximum context length is 64 tokens" in error["message"]

    async def test_the_second_of_two_prompts_refused_leaves_nothing_of_the_first(self, make_client: Make) -> None:
        client = make_client(engine=FakeEngine(script=forever, max_requests=1))
        response = await client.complete(prompt=["a", "b"])
        assert response.status_code == 429
        assert client.engine.live == 0
        assert len(client.engine.cancelled) == 1

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_silent_stream_is_kept_alive(self, make_client: Make, stream: bool) -> None:
        engine = FakeEngine(script=say("ab"), step_s=0.12)
        client = make_client(engine=engine, http=HttpConfig(sse_keep_alive_s=0.05))
        response = await client.chat(stream=stream)
        if not stream:
            assert response.json()["choices"][0]["message"]["content"] == "ab"
            return
        seen = events(response)
        assert seen.count(": keep-alive") >= 3
        assert seen[0] == ": keep-alive"
        chunks = [event for event in seen if event != ": keep-alive"]
        assert deltas(chunks) == "ab"

    async def test_keep_alive_can_be_off(self, make_client: Make) -> None:
        engine = FakeEngine(script=say("ab"), step_s=0.05)
        response = await make_client(engine=engine, http=HttpConfig(sse_keep_alive_s=0.0)).chat(stream=True)
        assert ": keep-alive" not in response.text

    async def test_a_producer_far_ahead_of_the_client_gives_disjoint_deltas(self, make_client: Make) -> None:
        text = "".join(f"{i} " for i in range(60))
        engine = FakeEngine(script=say(text), step_s=0.0)
        client = make_client(engine=engine)
        answers = await asyncio.gather(*(client.chat(stream=True) for _ in range(20)))
        for answer in answers:
            assert deltas(events(answer)) == text

    async def test_a_stop_in_a_stream_of_one_burst(self, make_client: Make) -> None:
        """All events of a choice may be there before the handler runs once."""

        class Burst(FakeEngine):
            def submit(self, request: GenerationRequest) -> None:
                super().submit(request)
                while self._live:
                    self.step()

        client = make_client(engine=Burst(script=say("all at once")))
        assert deltas(events(await client.chat(stream=True))) == "all at once"
        assert (await client.chat()).json()["choices"][0]["message"]["content"] == "all at once"


class TestSeeds:
    async def test_a_request_without_a_seed_gets_one_and_a_given_one_is_kept(self, make_client: Make) -> None:
        client = make_client()
        for body, seed in (({}, 7), ({"seed": 0}, 0), ({"seed": -1}, 2**63 - 1), ({"seed": 2**63 - 1}, 2**63 - 1)):
            await client.chat(**body)
            assert client.engine.accepted[-1].sampling.seed == seed

    async def test_defaults_of_the_model_apply_where_a_request_says_nothing(self, make_client: Make) -> None:
        from server.request import SamplingDefaults

        client = make_client(defaults=SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1))
        await client.chat(top_p=0.5)
        sampling = client.engine.accepted[-1].sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.6, 20, 0.5, 0.1)


class TestLimits:
    @pytest.mark.parametrize(("asked", "given"), [(10, 10), (45, 45), (46, 45), (32_000, 45), (None, 45)])
    async def test_max_tokens_is_cut_to_what_the_context_leaves(
        self, make_client: Make, asked: int | None, given: int
    ) -> None:
        client = make_client(engine=FakeEngine(script=forever, context_tokens=64))
        usage = (await client.chat(max_tokens=asked)).json()["usage"]
        assert usage["prompt_tokens"] == 19
        assert usage["completion_tokens"] == given

    @pytest.mark.parametrize(("length", "status"), [(63, 200), (64, 400), (65, 400)])
    async def test_a_prompt_must_leave_room_for_one_token(self, make_client: Make, length: int, status: int) -> None:
        client = make_client(engine=FakeEngine(context_tokens=64))
        response = await client.complete(prompt=[5] * length)
        assert response.status_code == status
        if status == 400:
            assert error_of(response)["param"] == "prompt"

    async def test_max_completion_tokens_wins(self, make_client: Make) -> None:
        client = make_client(engine=FakeEngine(script=forever))
        usage = (await client.chat(max_tokens=9, max_completion_tokens=4)).json()["usage"]
        assert usage["completion_tokens"] == 4

    async def test_control_tokens_show_only_when_asked_for(self, make_client: Make) -> None:
        def script(request: GenerationRequest, choice: int) -> list[int]:
            return [ord("a"), CONTROL_ID, ord("b"), EOS_ID]

        client = make_client(engine=FakeEngine(script=script))
        for body, said in (({}, "ab"), ({"skip_special_tokens": False}, f"a<{CONTROL_ID}>b")):
            assert (await client.complete(**body)).json()["choices"][0]["text"] == said

    async def test_end_ids_are_not_stop_ids_when_ignored(self, make_client: Make) -> None:
        client = make_client(engine=FakeEngine(script=forever))
        await client.chat(ignore_eos=True, max_tokens=1, stop_token_ids=[5])
        assert client.engine.accepted[-1].stop.stop_token_ids == {5}
        await client.chat(max_tokens=1)
        assert client.engine.accepted[-1].stop.stop_token_ids == {EOS_ID}
