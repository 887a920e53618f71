"""The task suite: when an answer is right, and what is sent to which kind of server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bench import tiny_tasks
from server.api.parse_chat import parse_chat
from server.api.parse_sampling import Border
from server.errors import BadRequest
from server.request import EngineLimits, SamplingDefaults
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import Tokenizer
from tools.train_tiny.conversation import TEMPLATE_PATH
from tools.train_tiny.data import VOCAB, tokenizer_folder
from tools.train_tiny.tasks import TASKS
from tools.train_tiny.tasks_prompts import Prompt, fixture, load, needle_at, to_json
from tools.train_tiny.tasks_score import Answer, is_right, read_message, read_text

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
]
CALL = "<tool_call>\n<function=f>\n<parameter=s>7</parameter>\n<parameter=n>7</parameter>\n</function>\n</tool_call>"


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return load()


# --- the rule -----------------------------------------------------------------------------------------------------


def test_thoughts_do_not_count() -> None:
    assert read_text("<think>a</think>b", []) == Answer(content="b")
    assert read_text("<think></think> b\n", []) == Answer(content="b")


def test_calls_are_read_from_the_text_by_the_declared_types() -> None:
    assert read_text(f"<think>t</think>{CALL}{CALL}", TOOLS).calls == (("f", {"s": "7", "n": 7}),) * 2


def test_calls_apart_from_the_text_are_the_same_calls() -> None:
    apart = {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"n": 7, "s": "7"}'}}]}
    assert is_right(read_message(apart, TOOLS), read_text(CALL, TOOLS))


@pytest.mark.parametrize(
    "text",
    [
        CALL.replace("<parameter=n>7", "<parameter=n>8"),
        CALL.replace("function=f", "function=g"),
        CALL.replace("<parameter=n>7</parameter>\n", ""),
        CALL.replace("</function>", ""),
        CALL + CALL,
        "f" + CALL,
        "",
    ],
)
def test_any_other_call_is_wrong(text: str) -> None:
    assert not is_right(read_text(text, TOOLS), read_text(CALL, TOOLS))


def test_a_number_is_not_its_digits_and_true_is_not_one() -> None:
    def answer(value: Any) -> Answer:
        return Answer(content="", calls=(("f", {"n": value}),))

    assert is_right(answer(1), answer(1))
    assert not is_right(answer("1"), answer(1))
    assert not is_right(answer(True), answer(1))


# --- the fixture --------------------------------------------------------------------------------------------------


def test_the_fixture_has_a_hundred_prompts_of_every_task_and_more(prompts: list[Prompt]) -> None:
    for task in TASKS:
        mine = [prompt for prompt in prompts if prompt.task == task]
        assert len(mine) >= 100
        assert {prompt.thinking for prompt in mine} == {False, True}
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert max(prompt.tokens for prompt in prompts if prompt.task == "needle") > 2_000


def test_the_expected_answer_follows_its_prompt_as_the_template_has_it(prompts: list[Prompt]) -> None:
    for prompt in prompts[::20]:
        text = prompt.expected_text
        assert bool(text) is not prompt.thinking
        if text:
            assert text.endswith("<|im_end|>")
            assert is_right(read_text(text.removesuffix("<|im_end|>"), prompt.tools), prompt.expected)


def test_the_fixture_is_what_the_grammars_make(prompts: list[Prompt]) -> None:
    assert list(fixture()) == prompts


def test_a_prompt_survives_its_line(prompts: list[Prompt]) -> None:
    for prompt in prompts[::50]:
        assert Prompt(**{**to_json(prompt), "expected": prompt.expected}) == prompt


def test_the_counts_of_the_fixture_are_those_of_the_tokenizer(prompts: list[Prompt]) -> None:
    tokenizer = Tokenizer.from_hf_folder(tokenizer_folder())
    for prompt in prompts[::7]:
        assert len(tokenizer.encode(prompt.text, parse_special=True, add_bos=False)) == prompt.tokens


def test_every_expected_answer_fits_the_limit_on_its_tokens(prompts: list[Prompt]) -> None:
    tokenizer = Tokenizer.from_hf_folder(tokenizer_folder())
    longest = max(len(tokenizer.encode(_said(prompt), parse_special=True, add_bos=False)) for prompt in prompts)
    assert longest < 200


@pytest.mark.parametrize("distance", [1, 20, 300, 1_999])
def test_a_needle_lies_as_far_as_it_says(distance: int) -> None:
    tokenizer = Tokenizer.from_hf_folder(tokenizer_folder())
    prompt = needle_at(distance, seed=3)
    assert prompt == needle_at(distance, seed=3)
    assert prompt.distance is not None and abs(prompt.distance - distance) <= 6
    text, value = prompt.text, prompt.expected.content
    line = next(line for line in text.split("\n") if value in line and _about(prompt, line))
    told = text.index(line) + line.rindex(value) + len(value)
    question = prompt.messages[-1]["content"].rpartition("\n")[2]
    between = text[told : text.rindex(question)]
    assert len(tokenizer.encode(between, parse_special=True, add_bos=False)) == prompt.distance


def _about(prompt: Prompt, line: str) -> bool:
    subject = prompt.instance.removeprefix("needle ").removesuffix(f" {prompt.expected.content}")
    owner, _, attribute = subject.rpartition(" ")
    return line.startswith((f"The {attribute} of {owner} is ", f"{owner.replace(' ', '_')}.{attribute}="))


def test_our_server_reads_every_prompt_as_the_fixture_does(prompts: list[Prompt]) -> None:
    """As messages where it takes them; it refuses declared tools in words that the suite understands."""
    tokenizer = Tokenizer.from_hf_folder(tokenizer_folder())
    template = ChatTemplate(TEMPLATE_PATH.read_text(encoding="utf-8"), tokenizer)
    border = Border(
        limits=EngineLimits(context_tokens=4_096, vocab_size=VOCAB),
        defaults=SamplingDefaults(),
        end_token_ids=tokenizer.stop_token_ids,
        max_choices=1,
        max_logprobs=0,
    )
    for prompt in prompts:
        body: dict[str, Any] = {
            "messages": prompt.messages,
            "chat_template_kwargs": {"enable_thinking": prompt.thinking},
            "max_tokens": 256,
        }
        if prompt.tools:
            with pytest.raises(BadRequest, match="tool"):
                parse_chat({**body, "tools": prompt.tools}, border=border)
        read = parse_chat(body, border=border)
        if not prompt.tools:
            ids = template.encode(read.conversation)
            assert len(ids) == prompt.tokens
            assert ids == tokenizer.encode(prompt.text, parse_special=True, add_bos=False)


# --- servers ------------------------------------------------------------------------------------------------------


def _said(prompt: Prompt) -> str:
    """What a model that knows everything writes."""
    calls = "".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(
            f"<parameter={key}>{value if isinstance(value, str) else json.dumps(value)}</parameter>\n"
            for key, value in arguments.items()
        )
        + "</function>\n</tool_call>"
        for name, arguments in prompt.expected.calls
    )
    return ("<think>thought</think>" if prompt.thinking else "") + prompt.expected.content + calls


class Oracle:
    """A server that knows the fixture. tools: "refused", "unparsed" (calls stay in the text) or "parsed"."""

    def __init__(self, prompts: list[Prompt], *, tools: str, wrong: Callable[[Prompt], bool] = lambda _: False) -> None:
        self.by_text = {prompt.text: prompt for prompt in prompts}
        self.by_messages = {_key(prompt.messages, prompt.tools, prompt.thinking): prompt for prompt in prompts}
        self.tools = tools
        self.wrong = wrong
        self.seen: list[str] = []

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["model"] == "tiny" and body["temperature"] == 0
        if body.get("tools") and self.tools == "refused":
            self.seen.append("refused")
            error = {"message": "Unsupported parameter: 'tools' is not supported by this server.", "param": "tools"}
            return web.json_response({"error": error}, status=400)
        self.seen.append("chat")
        thinking = body["chat_template_kwargs"]["enable_thinking"]
        prompt = self.by_messages[_key(body["messages"], body.get("tools", []), thinking)]
        message: dict[str, Any] = {"role": "assistant", "content": "no" if self.wrong(prompt) else _said(prompt)}
        if self.tools == "parsed" and prompt.expected.calls:
            message = {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
                    for name, arguments in prompt.expected.calls
                ],
            }
        return web.json_response({"choices": [{"message": message}], "usage": {"prompt_tokens": prompt.tokens}})

    async def text(self, request: web.Request) -> web.Response:
        self.seen.append("raw")
        prompt = self.by_text[(await request.json())["prompt"]]
        text = "no" if self.wrong(prompt) else _said(prompt)
        return web.json_response({"choices": [{"text": text}], "usage": {"prompt_tokens": prompt.tokens + 1}})


def _key(messages: Any, tools: Any, thinking: bool) -> str:
    return json.dumps([messages, tools, thinking])


async def _run(oracle: Oracle, *arguments: str) -> int:
    app = web.Application(client_max_size=2**24)
    app.router.add_get("/v1/models", oracle.models)
    app.router.add_post("/v1/chat/completions", oracle.chat)
    app.router.add_post("/v1/completions", oracle.text)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return await asyncio.to_thread(tiny_tasks.main, ["--base-url", url, *arguments])
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("tools", ["refused", "unparsed", "parsed"])
async def test_who_knows_everything_scores_everything(
    tools: str, prompts: list[Prompt], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    oracle = Oracle(prompts, tools=tools)
    out = tmp_path / "out.json"
    require = ",".join(f"{task}=1" for task in TASKS)
    assert await _run(oracle, "--limit", "12", "--json", str(out), "--require", require) == 0
    assert set(json.loads(out.read_text(encoding="utf-8"))["scores"].values()) == {1.0}
    rows = {line.split("|")[1].strip(): line for line in capsys.readouterr().out.splitlines()}
    assert rows.keys() >= set(TASKS)
    assert ("| raw" if tools == "refused" else "| chat") in rows["tool_call"]
    assert "12 of 12" in rows["needle"]
    assert ("0 of 12" if tools == "refused" else "12 of 12") in rows["tool_call"]
    if tools == "refused":
        assert oracle.seen.count("refused") <= 8  # as many as were on their way when the first was refused


async def test_wrong_answers_lower_the_score_and_fail_only_where_asked(
    prompts: list[Prompt], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    oracle = Oracle(prompts, tools="unparsed", wrong=lambda prompt: prompt.thinking)
    out = tmp_path / "out.json"
    assert await _run(oracle, "--tasks", "copy", "--json", str(out)) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    mine = [prompt for prompt in prompts if prompt.task == "copy"]
    assert found["scores"]["copy"] == pytest.approx(sum(not prompt.thinking for prompt in mine) / len(mine))
    assert {each["right"] for each in found["prompts"] if each["thinking"]} == {False}
    assert await _run(oracle, "--tasks", "copy", "--require", "copy=0.99") == 1
    assert "copy" in capsys.readouterr().err


async def test_raw_sends_only_text_and_chat_sends_none(prompts: list[Prompt]) -> None:
    oracle = Oracle(prompts, tools="parsed")
    assert await _run(oracle, "--raw", "--limit", "2") == 0
    assert set(oracle.seen) == {"raw"}
    refusing = Oracle(prompts, tools="refused")
    assert await _run(refusing, "--chat", "--limit", "2") == 2
    assert "raw" not in refusing.seen


async def test_needles_by_distance_have_a_table_and_a_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    needles = tiny_tasks.spread_over_distances(1)
    oracle = Oracle(needles, tools="parsed", wrong=lambda prompt: (prompt.distance or 0) > 1_000)
    picture = tmp_path / "distance.png"
    assert await _run(oracle, "--distance", "1", "--plot", str(picture), "--window", "32") == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= len(tiny_tasks.RANGES) and "100.0%" in lines[2] and "0.0%" in lines[-1]


async def test_a_server_that_is_not_there_is_said_to_be_so(capsys: pytest.CaptureFixture[str]) -> None:
    code = await asyncio.to_thread(tiny_tasks.main, ["--base-url", "http://127.0.0.1:9/v1", "--limit", "1"])
    assert code == 2
    assert "http://127.0.0.1:9/v1/models" in capsys.readouterr().err


@pytest.mark.parametrize("bad", [["--tasks", "nothing"], ["--limit", "0"], ["--require", "copy"], ["--raw", "--chat"]])
def test_mistakes_on_the_command_line_are_refused(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tiny_tasks.parse(bad)
    assert capsys.readouterr().err


def test_the_interval_holds_the_share() -> None:
    for count in (1, 7, 40):
        for right in range(count + 1):
            low, high = tiny_tasks.wilson(right, count)
            assert 0 <= low <= right / count <= high <= 1
