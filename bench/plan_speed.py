"""How long a plan takes while ten thousand requests wait, and how often their prompts are compared for it.

    .venv/bin/python -m bench.plan_speed

Times are CPU time of the loop's thread. Nothing is computed: steps are planned and committed with made-up tokens.
"apart": every prompt is another one; "alike": all begin with one document, which is computed meanwhile, so that what is
cached of everybody changes with every step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from server.cache.kv_cache import KVCache
from server.config import KVLayout, SchedulerConfig
from server.rebuild import shape_of
from server.request import (
    FinishReason,
    GenerationRequest,
    PrefixHints,
    RequestId,
    SampledToken,
    SamplingParams,
    StopRules,
)
from server.scheduler.scheduler import Scheduler
from server.step import RowResult, StepPlan, StepResult

PAGE_TOKENS = 16
LAYOUT = KVLayout(
    page_tokens=PAGE_TOKENS,
    window_tokens=128,
    full_page_bytes=PAGE_TOKENS * 10,
    window_page_bytes=PAGE_TOKENS * 60,
    slab_bytes=PAGE_TOKENS * 240,
    slab_count=60_000,
)


class Counting:
    """An answer of so many tokens."""

    def __init__(self, tokens: int) -> None:
        self._left = tokens

    def push(self, token: SampledToken) -> FinishReason | None:
        self._left -= 1
        return None if self._left > 0 else FinishReason.LENGTH

    def fail(self, error: Exception) -> None:
        raise error

    def cancel(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Step:
    """CPU time of its plan and its commit, how many it took from the queue, and how often prompts were compared."""

    plan_s: float
    commit_s: float
    taken: int
    matches: int


@dataclass
class Load:
    """A scheduler with many who wait."""

    waiting: int
    alike: bool
    shared_tokens: int = 20_000
    own_tokens: int = 2_000

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(0)
        shape = shape_of((False, *[True] * 6), window_tokens=128, mtp_layers=0)
        self.scheduler = Scheduler(
            SchedulerConfig(max_queued_requests=1_000_000, max_queued_tokens=1 << 40, max_sequences=64),
            KVCache(LAYOUT, rebuild=shape),
            context_tokens=1 << 20,
        )
        self.now = 0.0
        self.shared = self.rng.integers(0, 1_000, self.shared_tokens if self.alike else 0)
        self.submitted = 0
        with tqdm(total=self.waiting, desc="requests", leave=False) as bar:
            while self.scheduler.waiting < self.waiting:
                self.submit()
                bar.update()

    def submit(self) -> None:
        own = self.rng.integers(0, 1_000, int(self.rng.integers(1, 2 * self.own_tokens)))
        ids = np.concatenate((self.shared, own))
        self.scheduler.submit(
            GenerationRequest(
                request_id=RequestId(f"{self.submitted}"),
                prompt_tokens=tuple(ids.tolist()),
                sampling=SamplingParams(),
                stop=StopRules(max_tokens=200),
                outputs=(Counting(200),),
                arrival_s=self.now,
                hints=PrefixHints(
                    ids=ids,
                    turn_ends=np.empty(0, dtype=np.int64),
                    turn=1,
                    added_tokens=len(ids),
                    call_end_ids=frozenset(),
                ),
            )
        )
        self.submitted += 1
        self.now += 1e-4

    def step(self) -> Step:
        while self.scheduler.waiting < self.waiting:
            self.submit()
        started = time.thread_time()
        plan = self.scheduler.plan(self.now)
        planned = time.thread_time()
        assert plan is not None
        facts = self.scheduler.commit(plan, sampled(plan), self.now)
        committed = time.thread_time()
        self.now += 0.03
        return Step(planned - started, committed - planned, len(plan.opened), facts.prefix_matches)


def sampled(plan: StepPlan) -> StepResult:
    token = SampledToken(token_id=1)
    rows = tuple(RowResult(token=token if row.samples else None) for row in plan.rows)
    return StepResult(step_id=plan.step_id, rows=rows, device_s=0.03)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=10_000, help="default %(default)s")
    parser.add_argument("--steps", type=int, default=500, help="default %(default)s")
    wanted = parser.parse_args()
    print("| prompts | waiting | plan | 99 % | commit | 99 % | for each taken from the queue | comparisons a plan |")
    print("|---|---|---|---|---|---|---|---|")
    for alike in (False, True):
        for waiting in (wanted.waiting // 100, wanted.waiting):
            load = Load(waiting, alike)
            seen = [load.step() for _ in tqdm(range(wanted.steps), desc="steps", leave=False)]
            plain = [each for each in seen if not each.taken]
            plans, commits = [each.plan_s for each in plain], [each.commit_s for each in plain]
            taken = sum(each.taken for each in seen)
            extra_s = sum(each.plan_s - statistics.median(plans) for each in seen if each.taken) / taken
            times = (statistics.median(plans), p99(plans), statistics.median(commits), p99(commits), extra_s)
            cells = " | ".join(f"{1e3 * each:.2f} ms" for each in times)
            matches = statistics.mean(each.matches for each in seen)
            print(f"| {'alike' if alike else 'apart'} | {waiting:,} | {cells} | {matches:.1f} |", flush=True)


def p99(times_s: list[float]) -> float:
    return float(np.quantile(times_s, 0.99))


if __name__ == "__main__":
    main()
