from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from bench.load import Client, Prompts, RequestFailed, open_session
from bench.peers import PEERS, SAMPLINGS
from bench.sections import Sizes, Task, measure, tasks
from tests.bench.fake_sse import BOS_TOKENS, FakeServer, serving

GREEDY = SAMPLINGS["greedy"]
CLOCK_SLACK_S = 0.25
"""How late a busy machine may be."""


@pytest.fixture(autouse=True)
def _no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.sections.SETTLE_S", 0.0)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    """Over a vocabulary of made-up words, and of entries that must not be taken for words."""
    letters = "abcdefghij"
    words = [f"Ġ{a}{b}{c}" for a in letters for b in letters for c in letters]
    vocabulary = {token: index for index, token in enumerate([*words, "abc", "Ġx", "Ġ12345", "ĠUpper", "<s>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return Prompts(path, seed=1)


def test_words_are_entries_that_texts_lead_to(tmp_path: Path) -> None:
    """`Ġfox` stands in the vocabulary, but no merges make it."""
    merges = [("Ġ", "c"), ("Ġc", "a"), ("Ġca", "t")]
    entries = ["Ġ", *"acfotx", *("".join(merge) for merge in merges), "Ġfox"]
    tokenizer = Tokenizer(models.BPE({entry: index for index, entry in enumerate(entries)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Prompts(tmp_path / "tokenizer.json", seed=1).of_words(3) == " cat cat cat"


@asynccontextmanager
async def client_of(server: FakeServer, prompts: Prompts) -> AsyncIterator[Client]:
    async with serving(server), open_session() as session:
        yield Client(session, server.url, "m", prompts)


async def test_ttft_is_the_time_to_the_first_text_and_decode_counts_the_tokens_after_it(prompts: Prompts) -> None:
    chunks = [(0.2, ""), (0.1, " a"), *[(0.05, " b")] * 10]
    async with client_of(FakeServer(chunks=chunks, output_tokens=11), prompts) as client:
        answer = await client.ask("x", 11)
    assert 0.3 <= answer.ttft_s < 0.3 + CLOCK_SLACK_S
    assert answer.output_tokens == 11
    assert len(answer.stamps_s) == 11
    assert 10 / (0.5 + CLOCK_SLACK_S) < answer.decode_tokens_per_s <= 10 / 0.5 * 1.05


async def test_usage_counts_tokens_where_chunks_hold_several(prompts: Prompts) -> None:
    async with client_of(FakeServer(chunks=[(0, " a b"), (0.02, " c d")], output_tokens=4), prompts) as client:
        assert (await client.ask("x", 4)).output_tokens == 4


async def test_without_usage_chunks_with_text_are_counted(prompts: Prompts) -> None:
    server = FakeServer(chunks=[(0, " a"), (0, ""), (0.01, " b")], usage=False)
    async with client_of(server, prompts) as client:
        answer = await client.ask("x", 2)
    assert (answer.output_tokens, answer.prompt_tokens) == (2, None)


async def test_one_token_gives_no_decode_rate(prompts: Prompts) -> None:
    async with client_of(FakeServer(), prompts) as client:
        answer = await client.ask("x", 1)
    with pytest.raises(RequestFailed, match="no decode rate"):
        _ = answer.decode_tokens_per_s


async def test_a_calibrated_prompt_is_counted_by_the_server_as_asked(prompts: Prompts) -> None:
    async with client_of(FakeServer(), prompts) as client:
        await client.calibrate()
        assert client.overhead_tokens == BOS_TOKENS
        answer = await client.ask(client.prompt(200), 1)
    assert answer.prompt_tokens == 200


async def test_a_server_that_counts_otherwise_is_refused(prompts: Prompts) -> None:
    async with client_of(FakeServer(words_per_token=2), prompts) as client:
        with pytest.raises(RequestFailed, match="counted as"):
            await client.calibrate()


async def test_no_two_prompts_begin_alike(prompts: Prompts) -> None:
    starts = [prompts.of_words(50).split()[:16] for _ in range(200)]
    assert len({tuple(start) for start in starts}) == 200


async def test_every_request_asks_for_the_same_work(prompts: Prompts) -> None:
    server = FakeServer()
    async with client_of(server, prompts) as client:
        await client.ask("x", 7, SAMPLINGS["sampled"])
    (body,) = server.bodies
    assert {key: body[key] for key in ("prompt", "max_tokens", "ignore_eos")} == {
        "prompt": "x",
        "max_tokens": 7,
        "ignore_eos": True,
    }
    assert [body[key] for key in ("temperature", "top_p", "top_k", "min_p")] == [0.8, 0.95, 0, 0.0]
    assert body["stream_options"] == {"include_usage": True}


async def test_a_field_that_a_server_refuses_is_left_out(prompts: Prompts) -> None:
    server = FakeServer()
    async with serving(server), open_session() as session:
        client = Client(session, server.url, "m", prompts, PEERS["transformers"].extra)
        await client.ask("x", 7, SAMPLINGS["sampled"])
    (body,) = server.bodies
    assert not {"ignore_eos", "top_k", "min_p"} & body.keys()
    assert json.loads(body["generation_config"])["do_sample"] is True


@pytest.mark.parametrize("fails", [503, "stream"])
async def test_a_failed_request_names_the_servers_words(prompts: Prompts, fails: int | str) -> None:
    async with client_of(FakeServer(fails=fails), prompts) as client:
        with pytest.raises(RequestFailed, match="luck"):
            await client.ask("x", 1)


def task_named(metric: str) -> Task:
    sizes = Sizes(streams=(4,), concurrent_outputs=5)
    found = tasks(("single", "concurrent", "ttft"), ("greedy",), sizes, batches=True)
    return next(task for task in found if task.metric == metric)


async def test_concurrent_streams_run_at_once_and_their_tokens_are_added_up(prompts: Prompts) -> None:
    server = FakeServer(chunks=[(0.1, " a")] * 5, output_tokens=5)
    async with client_of(server, prompts) as client:
        found = await measure(task_named("concurrent-4/greedy"), client, os.getpid())
    assert server.most_in_flight == 4
    assert found.value is not None
    assert 4 * 5 / (0.5 + CLOCK_SLACK_S) < found.value <= 4 * 5 / 0.5


@pytest.mark.parametrize("metric", ["concurrent-4/greedy", "ttft-2000/greedy"])
async def test_a_failure_is_a_result_with_a_reason(prompts: Prompts, metric: str) -> None:
    async with client_of(FakeServer(fails=500), prompts) as client:
        found = await measure(task_named(metric), client, os.getpid())
    assert found.value is None
    assert found.failure is not None and "no such luck" in found.failure


def test_what_a_server_cannot_do_at_once_is_not_asked_of_it() -> None:
    found = tasks(("single", "concurrent", "ttft"), ("greedy", "sampled"), Sizes(), batches=False)
    assert [task.metric for task in found] == [
        f"{kind}/{name}" for name in ("greedy", "sampled") for kind in ("single", "ttft-2000", "ttft-6000")
    ]


async def test_a_cold_prompt_is_sent_greedy_and_sampled(prompts: Prompts) -> None:
    server = FakeServer()
    async with client_of(server, prompts) as client:
        for task in tasks(("ttft",), ("greedy", "sampled"), Sizes(cold_tokens=(2000,)), batches=True):
            assert await task.run(client) > 0
    asked = [(body["temperature"], body["top_p"], body["max_tokens"]) for body in server.bodies]
    assert asked == [(0.0, 1.0, 1), (0.8, 0.95, 1)]


def test_a_vocabulary_whose_words_are_several_tokens_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({"Ġabc": 0, "Ġ": 1, "a": 2, "b": 3, "c": 4}, []))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="no word of its vocabulary is one token in a text"):
        Prompts(tmp_path / "tokenizer.json", seed=1)
