"""What is measured on one running server, section by section."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from bench.load import Client, RequestFailed
from bench.machine import LoadMeter
from bench.peers import SAMPLINGS, Sampling

SECTIONS = ("single", "concurrent", "ttft")
PROMPT_TOKENS = 200
SETTLE_S = 1.0
"""Before each measurement, so that the threads of the last one are asleep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is asked for."""

    single_outputs: int = 128
    streams: tuple[int, ...] = (8, 16, 32)
    concurrent_outputs: int = 64
    cold_tokens: tuple[int, ...] = (2000, 6000)


QUICK = Sizes(single_outputs=32, streams=(8,), concurrent_outputs=16, cold_tokens=(2000,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One repeat. metric is "single/greedy" or "ttft-2000/sampled" and so on; other_cores is how busy the rest of the
    machine was. value is None where it failed, and `failure` says why."""

    metric: str
    value: float | None
    other_cores: float = 0.0
    failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    metric: str
    run: Callable[[Client], Awaitable[float]]


def tasks(sections: Sequence[str], samplings: Sequence[str], sizes: Sizes, *, batches: bool) -> list[Task]:
    """Everything to measure on a server, each section with every kind of sampling."""
    found: list[Task] = []
    for name in samplings:
        sampling = SAMPLINGS[name]
        if "single" in sections:
            found.append(Task(metric=f"single/{name}", run=_single(sizes.single_outputs, sampling)))
        if "concurrent" in sections and batches:
            found += [
                Task(metric=f"concurrent-{count}/{name}", run=_concurrent(count, sizes.concurrent_outputs, sampling))
                for count in sizes.streams
            ]
        if "ttft" in sections:
            found += [Task(metric=f"ttft-{tokens}/{name}", run=_cold(tokens, sampling)) for tokens in sizes.cold_tokens]
    return found


async def warm_up(client: Client, *, batches: bool) -> None:
    """Let the server allocate and compile what it does at first use, in each shape of load."""
    await client.ask(client.prompt(PROMPT_TOKENS), 16)
    if batches:
        await client.ask_all([client.prompt(PROMPT_TOKENS) for _ in range(4)], 4, SAMPLINGS["sampled"])
    await client.ask(client.prompt(1000), 2)


async def measure(task: Task, client: Client, pid: int) -> Measure:
    """One repeat of one task; a failure is a result too."""
    await asyncio.sleep(SETTLE_S)
    meter = LoadMeter(pid)
    try:
        value = await task.run(client)
    except (RequestFailed, ExceptionGroup) as error:
        cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        if not isinstance(cause, RequestFailed):
            raise
        return Measure(metric=task.metric, value=None, failure=str(cause))
    return Measure(metric=task.metric, value=value, other_cores=meter.other_cores())


async def first_token_s(client: Client, started_s: float) -> float:
    """From the start of the process to the first token of the first answer, on the clock of `started_s`."""
    await client.ask(client.prompt(16), 1)
    return time.monotonic() - started_s


def _single(outputs: int, sampling: Sampling) -> Callable[[Client], Awaitable[float]]:
    async def run(client: Client) -> float:
        return (await client.ask(client.prompt(PROMPT_TOKENS), outputs, sampling)).decode_tokens_per_s

    return run


def _concurrent(streams: int, outputs: int, sampling: Sampling) -> Callable[[Client], Awaitable[float]]:
    """Output tokens of all by the time from the first send to the last end: prompts are paid for too."""

    async def run(client: Client) -> float:
        prompts = [client.prompt(PROMPT_TOKENS) for _ in range(streams)]
        answers = await client.ask_all(prompts, outputs, sampling)
        wall_s = max(answer.ended_s for answer in answers) - min(answer.sent_s for answer in answers)
        return sum(answer.output_tokens for answer in answers) / wall_s

    return run


def _cold(tokens: int, sampling: Sampling) -> Callable[[Client], Awaitable[float]]:
    async def run(client: Client) -> float:
        return (await client.ask(client.prompt(tokens), 1, sampling)).ttft_s

    return run
