"""What steps cost on this machine: the line that the simulator's `cpu-*` models are.

    .venv/bin/python -m bench.step_costs
    .venv/bin/python -m bench.step_costs --model smollm2-135m --steps 300 --json line.json

Loads a model as the server does and runs plans of every mix of prompts and answers on its runner, with nothing else in
the way: no engine, no HTTP. To the seconds that they took, the server's own FittedCost is fitted, and then tried on as
many others. The device's waits between steps are no part of it: `python -m bench.pipeline`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from bench.machine import busy_s, cpu_model
from server.assemble import build, describe
from server.cache.kv_cache import KVCache
from server.config import CacheConfig, ModelConfig, SchedulerConfig, ServeConfig
from server.model.runner import ModelRunner
from server.model.source import resolve
from server.request import SamplingParams
from server.scheduler.step_cost import FittedCost, FixedCost, StepShape, shape_of_rows
from server.step import RowPlan, SequenceId, SlotId, SlotOpening, StepId, StepPlan, TableWrite

CACHE = Path("~/.cache/twinpane").expanduser()
MOST_ROWS = 16
MOST_CONTEXT = 4_096
CHUNKS = (16, 32, 64, 128, 256, 512)
WARM_UP_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One step."""

    shape: StepShape
    seconds: float


class Steps:
    """Plans of random shape on a runner, over pages that hold whatever was there: time does not depend on it."""

    def __init__(self, runner: ModelRunner, cache: KVCache, rng: random.Random, vocab: int) -> None:
        self._runner = runner
        self._cache = cache
        self._rng = rng
        self._vocab = vocab
        self._next_step = 0

    def measure(self, repeats: int) -> Measured:
        """One step, the fastest of so many times: up to MOST_ROWS answers that go on, and a prompt's piece in two of
        three."""
        spans = [(self._rng.randrange(MOST_CONTEXT), 1) for _ in range(self._rng.randint(0, MOST_ROWS))]
        if not spans or self._rng.random() < 2 / 3:
            spans.append((self._rng.randrange(MOST_CONTEXT), self._rng.choice(CHUNKS)))
        plan = self._plan(spans)
        seconds = min(self._runner.run(plan).device_s for _ in range(repeats))
        self._cache.end_step(plan.step_id)
        for row in plan.rows:
            self._cache.close(row.sequence, None, 0.0)
        return Measured(shape=shape_of_rows((row.start, row.count) for row in plan.rows), seconds=seconds)

    def _plan(self, spans: Sequence[tuple[int, int]]) -> StepPlan:
        step, writes, rows = StepId(self._next_step), list[TableWrite](), list[RowPlan]()
        self._next_step += 1
        self._cache.begin_step(step)
        for index, (start, tokens) in enumerate(spans):
            sequence, slot = SequenceId(index), SlotId(index)
            self._cache.open(sequence, slot)
            reservation = self._cache.reserve(sequence, start + tokens, 0.0)
            assert reservation.granted, "memory was taken for all of them"
            writes += reservation.writes
            ids = tuple(self._rng.randrange(self._vocab) for _ in range(tokens))
            rows.append(RowPlan(slot=slot, sequence=sequence, epoch=1, start=start, tokens=ids, samples=True))
        opened = tuple(
            SlotOpening(
                slot=row.slot,
                sequence=row.sequence,
                choice=0,
                sampling=SamplingParams(temperature=0.0),
                stop_token_ids=frozenset(),
            )
            for row in rows
        )
        return StepPlan(step_id=step, moves=(), writes=tuple(writes), opened=opened, rows=tuple(rows))


def fit(measured: Sequence[Measured]) -> FixedCost:
    cost = FittedCost()
    for each in measured:
        cost.note(each.shape, each.seconds)
    return cost.line


def relative_errors(line: FixedCost, measured: Sequence[Measured]) -> list[float]:
    return sorted(abs(line.seconds(each.shape) / each.seconds - 1) for each in measured)


def _read() -> tuple[float, float]:
    """The clock, and the CPU seconds that others have used."""
    return time.monotonic(), busy_s() - time.process_time()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="as for `twinpane serve` (default %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="to fit, and as many to try (default %(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="the fastest counts: others disturb (default %(default)s)"
    )
    parser.add_argument("--threads", type=int, help="default: what the server takes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the line and the steps there")
    options = parser.parse_args(arguments)
    config = ServeConfig(
        model=ModelConfig(model=options.model, max_model_tokens=2 * MOST_CONTEXT),
        cache=CacheConfig(kv_bytes=4 << 30),
        scheduler=SchedulerConfig(max_sequences=MOST_ROWS + 1, prefix_caching="off"),
        threads=options.threads,
    )
    model = describe(config, resolve(options.model, cache_folder=str(CACHE)))
    server = build(config, model)
    steps = Steps(server.runner, server.cache, random.Random(options.seed), model.spec.vocab)
    for _ in range(WARM_UP_STEPS):
        steps.measure(1)
    before_s = _read()
    measured = [steps.measure(options.repeats) for _ in tqdm(range(2 * options.steps), unit="step")]
    after_s = _read()
    fitted, tried = measured[::2], measured[1::2]
    line = fit(fitted)
    errors = relative_errors(line, tried)
    wall_s, others_s = (after - before for after, before in zip(after_s, before_s, strict=True))
    print(f"{options.model} on {cpu_model()}, {os.cpu_count()} cores; others kept {others_s / wall_s:.1f} busy")
    print(
        f"  step_s={line.step_s:.3g}, row_s={line.row_s:.3g}, token_s={line.token_s:.3g}, read_s={line.read_s:.3g}\n"
        f"  off by {statistics.median(errors):.0%} (median), {errors[int(0.9 * len(errors))]:.0%} (90 % of steps) on "
        f"{len(tried)} steps that it was not fitted to"
    )
    if options.json:
        report = {"model": options.model, "line": asdict(line), "steps": [asdict(each) for each in measured]}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
