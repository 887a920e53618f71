"""How long the device waits between steps, with one step in flight and with two, and what that does to newcomers.

No model: a step sleeps as long as --step-ms says, and each token costs the loop --push-us when it is committed and
--write-us afterwards, as detokenizing and writing to a client do.

    python -m bench.pipeline --step-ms 5 --streams 64
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from server.cache.kv_cache import KVCache
from server.config import KVLayout, SchedulerConfig
from server.engine import InferenceEngine
from server.errors import TwinpaneError
from server.metrics import RequestFacts, StepFacts
from server.request import FinishReason, GenerationRequest, RequestId, SampledToken, SamplingParams, StopRules
from server.scheduler.pace import Pace
from server.scheduler.scheduler import Scheduler
from server.step import RowResult, StepPlan, StepResult

LAYOUT = KVLayout(
    page_tokens=16, window_tokens=128, full_page_bytes=4096, window_page_bytes=4096, slab_bytes=65536, slab_count=4000
)
PROMPT_TOKENS = 64


@dataclass
class SleepingDevice:
    """Implements server.engine.Runner; `spans` are the seconds at which each step began and ended."""

    step_s: float
    spans: list[tuple[float, float]] = field(default_factory=list)

    def run(self, plan: StepPlan, begun: Callable[[], None]) -> StepResult:
        started_s = time.perf_counter()
        begun()
        time.sleep(self.step_s)
        token = RowResult(token=SampledToken(token_id=1))
        rows = tuple(token if row.samples else RowResult() for row in plan.rows)
        self.spans.append((started_s, time.perf_counter()))
        return StepResult(step_id=plan.step_id, rows=rows, device_s=self.step_s)

    def interrupt(self) -> None:
        pass

    def check(self) -> None:
        pass

    def idle_share(self) -> float:
        spans = self.spans[len(self.spans) // 10 :]  # without the first tenth, where requests arrive
        return 1 - sum(ended_s - started_s for started_s, ended_s in spans) / (spans[-1][1] - spans[0][0])


class NoMetrics:
    def step(self, facts: StepFacts) -> None:
        pass

    def request_ended(self, facts: RequestFacts) -> None:
        pass


class CostlyOutput:
    """Implements server.request.OutputStream."""

    def __init__(self, max_tokens: int, push_s: float, write_s: float) -> None:
        self.first = asyncio.Event()
        self._left, self._push_s, self._write_s = max_tokens, push_s, write_s

    def push(self, _token: SampledToken) -> FinishReason | None:
        self.first.set()
        burn(self._push_s)
        if self._write_s:
            asyncio.get_running_loop().call_soon(burn, self._write_s)
        self._left -= 1
        return FinishReason.LENGTH if self._left == 0 else None

    def fail(self, error: TwinpaneError) -> None:
        raise error

    def cancel(self) -> None:
        pass


class AtOnce(Pace):
    """The other rule: plan as soon as the step before is committed."""

    def delay_s(self, step_tokens: int) -> float:
        return 0.0


def burn(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


async def measure(asked: argparse.Namespace, *, depth: int, at_once: bool = False) -> str:
    """One line of numbers: idle share, steps per second, and the first token's delay for probes that come at random."""
    device = SleepingDevice(asked.step_ms / 1e3)
    config = SchedulerConfig(max_sequences=asked.streams + 8)
    engine = InferenceEngine(
        lambda on_end: Scheduler(config, KVCache(LAYOUT), context_tokens=100_000, on_end=on_end),
        device,
        vocab_size=100,
        metrics=NoMetrics(),
        steps_in_flight=depth,
    )
    if at_once:
        engine._pace = AtOnce()
    await engine.start()

    def submit(name: str, tokens: int) -> CostlyOutput:
        output = CostlyOutput(tokens, asked.push_us / 1e6, asked.write_us / 1e6)
        engine.submit(
            GenerationRequest(
                request_id=RequestId(name),
                prompt_tokens=(1,) * PROMPT_TOKENS,
                sampling=SamplingParams(),
                stop=StopRules(max_tokens=tokens),
                outputs=(output,),
                arrival_s=engine.now(),
            )
        )
        return output

    for stream in range(asked.streams):
        submit(f"stream {stream}", asked.tokens)
    rng = random.Random(0)
    first_token_s: list[float] = []
    drained = asyncio.create_task(engine.drained())
    while not drained.done():
        await asyncio.sleep(asked.step_ms / 1e3 * rng.uniform(5, 15))
        if drained.done() or engine.health().running < asked.streams:
            break
        started_s = time.perf_counter()
        await submit(f"probe {len(first_token_s)}", 1).first.wait()
        first_token_s.append(time.perf_counter() - started_s)
    await drained
    await engine.stop()
    spans_s = device.spans[-1][1] - device.spans[0][0]
    return (
        f"idle {device.idle_share():6.1%}   {len(device.spans) / spans_s:6.1f} steps/s   "
        f"first token mean {1e3 * statistics.mean(first_token_s):5.1f} ms, "
        f"median {1e3 * statistics.median(first_token_s):5.1f} ms of {len(first_token_s)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=600, help="per stream")
    parser.add_argument("--push-us", type=float, default=15.0, help="per token, before the next plan")
    parser.add_argument("--write-us", type=float, default=20.0, help="per token, on the loop afterwards")
    asked = parser.parse_args()
    runner: Callable[..., str] = lambda **how: asyncio.run(measure(asked, **how))  # noqa: E731
    with contextlib.suppress(KeyboardInterrupt):
        print(
            f"steps of {asked.step_ms:g} ms, {asked.streams} streams, {asked.push_us:g} + {asked.write_us:g} us a token"
        )
        print("one step in flight         ", runner(depth=1), flush=True)
        print("two, planned late          ", runner(depth=2), flush=True)
        print("two, planned at once       ", runner(depth=2, at_once=True), flush=True)


if __name__ == "__main__":
    main()
