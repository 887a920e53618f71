"""What HTTP, JSON, detokenizing and scheduling cost: 32 streams through the server against the runner alone.

    .venv/bin/python bench/http_overhead.py                      SmolLM2, five rounds: three minutes
    .venv/bin/python bench/http_overhead.py --model gemma3-270m --rounds 3

32 sequences are decoded in turns: here in the process, with the real scheduler, cache and runner stepped by hand and
only the runner's steps timed, and in a server process over 32 HTTP streams. Both count only the steady phase, in which
all streams decode. Each rate over HTTP is held against the mean of the runs before and after it, so that a steady drift
of the machine's speed cancels. The client keeps the bytes with the times of their arrival, and reads them when
the clock has stopped: what it computes would be taken from the server's cores. Exit code 1 below target.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the server sets it, before torch is loaded
sys.path.insert(0, str(Path(__file__).parents[1]))

import orjson
from tqdm import tqdm

from bench.load import REQUEST_LIMIT_S, Answer, Client, Prompts, RequestFailed, open_session
from bench.machine import LoadMeter
from bench.peers import PEERS, SAMPLINGS, Running, end_servers_when_terminated, running
from bench.results import BUSY_CORES
from bench.weights import Weights, prepare
from server import assemble
from server.api.serve import new_event_loop
from server.config import CacheConfig, ModelConfig, SchedulerConfig, ServeConfig
from server.model.source import resolve
from server.request import FinishReason, GenerationRequest, RequestId, SampledToken, SamplingParams, StopRules
from server.scheduler.scheduler import Scheduler

STREAMS = 32
PROMPT_TOKENS = 200
TARGET = 0.95


@dataclass(slots=True)
class CountedOutput:
    """An output stream that throws the tokens away."""

    left: int

    def push(self, token: SampledToken) -> FinishReason | None:
        self.left -= 1
        return None if self.left else FinishReason.LENGTH

    def fail(self, error: Exception) -> None:
        raise error

    def cancel(self) -> None:
        raise AssertionError("nobody cancels here")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """Tokens per second of the steady phase: by the runner's time alone, and with plan and commit between the steps."""

    runner: float
    stepped: float


class InProcess:
    """The parts of a server without its engine loop and HTTP, for one set of streams at a time."""

    def __init__(self, weights: Weights, threads: int) -> None:
        config = ServeConfig(
            model=ModelConfig(model=str(weights.hf_folder), dtype="bfloat16", max_model_tokens=1024),
            cache=CacheConfig(kv_bytes=2 * 2**30),
            threads=threads,
        )
        source = resolve(config.model.model, cache_folder=config.model.cache_folder)
        self._server = assemble.build(config, assemble.describe(config, source))
        self._config: SchedulerConfig = config.scheduler
        self._tokenizer = self._server.text.tokenizer

    def decode(self, prompts: Sequence[str], outputs: int) -> Bare:
        """All prompts to their ends; only steps in which every stream decodes one token are counted."""
        scheduler = Scheduler(self._config, self._server.cache, context_tokens=1024)
        for number, prompt in enumerate(prompts):
            scheduler.submit(
                GenerationRequest(
                    request_id=RequestId(str(number)),
                    prompt_tokens=tuple(self._tokenizer.encode(prompt, parse_special=True, add_bos=True)),
                    sampling=SamplingParams(temperature=0.0),
                    stop=StopRules(max_tokens=outputs),
                    outputs=(CountedOutput(outputs),),
                    arrival_s=0.0,
                )
            )
        run_s = steady_s = 0.0
        steps = 0
        while True:
            started = time.perf_counter()
            plan = scheduler.plan(0.0)
            if plan is None:
                break
            handed = time.perf_counter()
            result = self._server.runner.run(plan)
            ran = time.perf_counter()
            scheduler.commit(plan, result, 0.0)
            if len(plan.rows) == plan.token_count == len(prompts):
                steps += 1
                run_s += ran - handed
                steady_s += time.perf_counter() - started
        assert scheduler.idle and steps
        return Bare(runner=steps * len(prompts) / run_s, stepped=steps * len(prompts) / steady_s)


class Stream(asyncio.Protocol):
    """One streamed answer. Its bytes are kept as they come, and read in `answer`."""

    def __init__(self, request: bytes) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._sent_s = 0.0
        self._pieces: list[bytes] = []
        self._stamps_s: list[float] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._sent_s = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._stamps_s.append(time.perf_counter())
        self._pieces.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def answer(self) -> Answer:
        """Every chunk with text, with the time at which its last byte was here. Raises RequestFailed."""
        raw = b"".join(self._pieces)
        if not raw.startswith(b"HTTP/1.1 200 "):
            raise RequestFailed(f"no answer: {raw[:200]!r}")
        arrived = list(accumulate(map(len, self._pieces)))
        stamps_s, usage = [], None
        for end, event in sse_events(raw):
            if event.get("error"):
                raise RequestFailed(f"error in the stream: {event['error']}")
            stamps_s += [self._stamps_s[bisect_left(arrived, end)] for choice in event["choices"] if choice["text"]]
            usage = event.get("usage") or usage
        if not usage:
            raise RequestFailed("the stream ended without its usage")
        return Answer(
            sent_s=self._sent_s,
            stamps_s=tuple(stamps_s),
            ended_s=self._stamps_s[-1],
            output_tokens=usage["completion_tokens"],
            prompt_tokens=usage["prompt_tokens"],
        )


def sse_events(raw: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """The events of a response in HTTP chunks that hold whole events, as our server writes them: each with how many
    bytes had to arrive for it."""
    start = raw.index(b"\r\n\r\n") + 4
    while True:
        digits, _, _ = raw[start : start + 20].partition(b"\r\n")
        if not digits:
            raise RequestFailed("the stream broke off")
        start += len(digits) + 2
        stop = start + int(digits, 16)
        if stop == start:
            return
        for event in raw[start:stop].split(b"\n\n"):
            if event.startswith(b"data: {"):
                yield stop, orjson.loads(event[6:])
        start = stop + 2


def _itself(stream: Stream) -> Stream:
    return stream


async def ask_all(server: Running, prompts: Sequence[str], outputs: int) -> list[Answer]:
    """All at once, each on a connection of its own."""
    address = urlsplit(server.url)
    assert address.hostname and address.port
    streams = []
    for prompt in prompts:
        fields = {"model": server.model_name, "prompt": prompt, "max_tokens": outputs, "ignore_eos": True}
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        body = orjson.dumps(fields | SAMPLINGS["greedy"].body() | streaming)
        head = (
            f"POST {address.path}/completions HTTP/1.1\r\nhost: {address.netloc}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        streams.append(Stream(head.encode() + body))
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(REQUEST_LIMIT_S):
        for stream in streams:
            await loop.create_connection(partial(_itself, stream), address.hostname, address.port)
        for stream in streams:
            await stream.ended
    return [stream.answer() for stream in streams]


def steady_tokens_per_s(answers: Sequence[Answer]) -> float:
    """From the last stream's first chunk to the first stream's last one. A chunk can hold several tokens or none, so
    each stream's chunks count with its own tokens per chunk."""
    start = max(answer.stamps_s[0] for answer in answers)
    stop = min(answer.stamps_s[-1] for answer in answers)
    if stop <= start:
        raise SystemExit("no phase in which all streams decode: --outputs is too small")
    tokens = 0.0
    for answer in answers:
        inside = sum(start < stamp <= stop for stamp in answer.stamps_s)
        tokens += inside * answer.output_tokens / len(answer.stamps_s)
    return tokens / (stop - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """What one run over HTTP gave. loop_s_per_token: CPU time of the server's event loop by the tokens it delivered,
    with what the requests themselves cost. other_cores: how busy other processes kept the machine."""

    tokens_per_s: float
    loop_s_per_token: float
    other_cores: float


def main_thread_cpu_s(pid: int) -> float:
    """CPU time of a process's first thread; in our server the event loop runs there."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


async def over_http(server: Running, prompts: Sequence[str], outputs: int) -> Over:
    meter, loop_s = LoadMeter(server.pid), main_thread_cpu_s(server.pid)
    answers = await ask_all(server, prompts, outputs)
    loop_s = main_thread_cpu_s(server.pid) - loop_s
    return Over(
        tokens_per_s=steady_tokens_per_s(answers),
        loop_s_per_token=loop_s / sum(answer.output_tokens for answer in answers),
        other_cores=meter.other_cores(),
    )


def median_ratio(alone: Sequence[Bare], over: Sequence[Over]) -> float:
    """alone holds one run more. Disturbed runs count only where there is no other."""
    ratios = ratios_of(alone, over)
    clean = [ratio for ratio, each in zip(ratios, over, strict=True) if each.other_cores <= BUSY_CORES]
    return statistics.median(clean or ratios)


def ratios_of(alone: Sequence[Bare], over: Sequence[Over]) -> list[float]:
    """Each rate over HTTP by the mean of the runner's rates before and after it."""
    return [
        2 * each.tokens_per_s / (before.runner + after.runner)
        for (before, after), each in zip(pairwise(alone), over, strict=True)
    ]


async def compare(weights: Weights, server: Running, bare: InProcess, rounds: int, outputs: int) -> float:
    """The median ratio."""
    prompts = Prompts(weights.hf_folder / "tokenizer.json", seed=time.time_ns())
    async with open_session() as session:
        client = Client(session, server.url, server.model_name, prompts, server.extra)
        await client.calibrate()

    def some() -> list[str]:
        return [client.prompt(PROMPT_TOKENS) for _ in range(STREAMS)]

    await ask_all(server, some(), 8)
    bare.decode(some(), 8)
    alone, over = [bare.decode(some(), outputs)], list[Over]()
    for number in tqdm(range(rounds), desc="rounds", unit="round"):
        over.append(await over_http(server, some(), outputs))
        alone.append(bare.decode(some(), outputs))
        before, after, http = alone[-2], alone[-1], over[-1]
        disturbed = f" (other processes used {http.other_cores:.1f} cores)" if http.other_cores > BUSY_CORES else ""
        tqdm.write(
            f"round {number + 1}: runner alone {before.runner:.1f} and {after.runner:.1f} tok/s, with plan and commit "
            f"{before.stepped:.1f} and {after.stepped:.1f}, through HTTP {http.tokens_per_s:.1f}: "
            f"{ratios_of(alone, over)[-1]:.1%} of the runner{disturbed}; "
            f"the event loop took {http.loop_s_per_token * 1e6:.0f} us of CPU a token"
        )
    return median_ratio(alone, over)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="a short name or a GGUF file [%(default)s]")
    add("--rounds", type=int, default=5, help="the median ratio counts [%(default)s]")
    add("--outputs", type=int, default=192, help="tokens of each stream [%(default)s]")
    add("--threads", type=int, default=os.cpu_count(), help="of both [all cores]")
    add("--cache", type=Path, default=Path("~/.cache/twinpane"), help="for the weights [%(default)s]")
    wanted = parser.parse_args(argv)
    cache = wanted.cache.expanduser()
    weights = prepare(wanted.model, cache)
    bare = InProcess(weights, wanted.threads)
    with (
        running(PEERS["ours"], weights, cache=cache, threads=wanted.threads) as server,
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        ratio = runner.run(compare(weights, server, bare, wanted.rounds, wanted.outputs))
    print(f"through HTTP: {ratio:.1%} of the runner alone (median of {wanted.rounds} rounds; target {TARGET:.0%})")
    return 0 if ratio >= TARGET else 1


if __name__ == "__main__":
    end_servers_when_terminated()
    sys.exit(main(sys.argv[1:]))
