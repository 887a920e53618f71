"""What HTTP, JSON, detokenizing and scheduling cost: 32 streams through the server against the runner alone.

    .venv/bin/python bench/http_overhead.py                      SmolLM2, three rounds: two minutes
    .venv/bin/python bench/http_overhead.py --model gemma3-270m --rounds 5

Each round decodes 32 sequences twice: here in the process, with the real scheduler, cache and runner stepped by hand
and only the runner's steps timed, and then in a server process over 32 HTTP streams. Both count only the steady phase,
in which all streams decode. The two take turns, so what else the machine does falls on both. Exit code 1 below target.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the server sets it, before torch is loaded
sys.path.insert(0, str(Path(__file__).parents[1]))

from tqdm import tqdm

from bench.load import Answer, Client, Prompts, open_session
from bench.machine import LoadMeter
from bench.peers import PEERS, SAMPLINGS, Running, end_servers_when_terminated, running
from bench.results import BUSY_CORES
from bench.weights import Weights, prepare
from server import assemble
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


async def compare(weights: Weights, server: Running, bare: InProcess, rounds: int, outputs: int) -> list[float]:
    """The ratio of each round."""
    prompts = Prompts(weights.hf_folder / "tokenizer.json", seed=time.time_ns())
    ratios = []
    async with open_session() as session:
        client = Client(session, server.url, server.model_name, prompts, server.extra)
        await client.calibrate()

        def some() -> list[str]:
            return [client.prompt(PROMPT_TOKENS) for _ in range(STREAMS)]

        await client.ask_all(some(), 8, SAMPLINGS["greedy"])
        bare.decode(some(), 8)
        for number in tqdm(range(rounds), desc="rounds", unit="round"):
            meter = LoadMeter(server.pid)
            alone = bare.decode(some(), outputs)
            http = steady_tokens_per_s(await client.ask_all(some(), outputs, SAMPLINGS["greedy"]))
            other = meter.other_cores()
            ratios.append(http / alone.runner)
            tqdm.write(
                f"round {number + 1}: runner alone {alone.runner:.1f} tok/s, with plan and commit {alone.stepped:.1f}, "
                f"through HTTP {http:.1f}: {ratios[-1]:.1%} of the runner"
                + (f" (other processes used {other:.1f} cores)" if other > BUSY_CORES else "")
            )
    return ratios


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="a short name or a GGUF file [%(default)s]")
    add("--rounds", type=int, default=3, help="the median ratio counts [%(default)s]")
    add("--outputs", type=int, default=192, help="tokens of each stream [%(default)s]")
    add("--threads", type=int, default=os.cpu_count(), help="of both [all cores]")
    add("--cache", type=Path, default=Path("~/.cache/twinpane"), help="for the weights [%(default)s]")
    wanted = parser.parse_args(argv)
    cache = wanted.cache.expanduser()
    weights = prepare(wanted.model, cache)
    bare = InProcess(weights, wanted.threads)
    with running(PEERS["ours"], weights, cache=cache, threads=wanted.threads) as server:
        ratios = asyncio.run(compare(weights, server, bare, wanted.rounds, wanted.outputs))
    ratio = statistics.median(ratios)
    print(f"through HTTP: {ratio:.1%} of the runner alone (median of {len(ratios)}; target {TARGET:.0%})")
    return 0 if ratio >= TARGET else 1


if __name__ == "__main__":
    end_servers_when_terminated()
    sys.exit(main(sys.argv[1:]))
