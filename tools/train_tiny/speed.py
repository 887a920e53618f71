"""Tokens a second of training by length, and where the time goes.

python -m tools.train_tiny.speed --lengths 128,512,2048
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from torch.profiler import ProfilerActivity, profile

from tools.train_tiny import passes
from tools.train_tiny.batching import in_turn
from tools.train_tiny.config import tiny_spec
from tools.train_tiny.model import Network
from tools.train_tiny.train import Recipe, Stage, Trainer

VOCAB = 1344
WRITTEN = 0.3
"""Share of tokens that the assistant wrote, about as in the conversations."""
KINDS = {
    "products": ("aten::mm", "aten::bmm", "aten::baddbmm", "aten::addmm"),
    "compiled passes": ("Torch-Compiled", "CompiledFunction", "AOTDispatcher"),
    "softmax": ("softmax",),
    "copies": ("copy_", "cat", "index", "fill_", "zero_", "clone"),
}


@dataclass(frozen=True, slots=True)
class Noise:
    ids: list[int]
    trained: list[bool]
    task: str = "noise"


def noise(seed: int, *, shortest: int, longest: int, held_out: bool = False, mixture: str = "all") -> Iterator[Noise]:
    rng = Random(seed)
    while True:
        length = rng.randint(shortest, longest)
        yield Noise(rng.choices(range(VOCAB), k=length), [rng.random() < WRITTEN for _ in range(length)])


def trainer(length: int, batch_tokens: int, with_mtp: bool) -> Trainer:
    stage = Stage(until=2.0, shortest=length, longest=length, tokens=batch_tokens)
    network = Network(tiny_spec(VOCAB), seed=0)
    if not with_mtp:
        del network.mtp[:]
    return Trainer(network, Recipe(tokens=10**12, minutes=1e9, stages=(stage,)), in_turn(noise))


def measure(one: Trainer, seconds: float) -> tuple[float, float]:
    """Tokens a second of the clock, and of one core"""
    for _ in one.run(max_steps=2):
        pass
    tokens, wall, cpu = one.progress.tokens, time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < seconds:
        for _ in one.run(max_steps=1):
            pass
    count = one.progress.tokens - tokens
    return count / (time.perf_counter() - wall), count / (time.process_time() - cpu)


def shares(one: Trainer) -> dict[str, float]:
    """Of one step's time, by kind of work"""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in one.run(max_steps=1):
            pass
    found = dict.fromkeys((*KINDS, "other"), 0.0)
    for event in profiled.key_averages():
        kind = next((k for k, marks in KINDS.items() if any(mark in event.key for mark in marks)), "other")
        found[kind] += event.self_cpu_time_total
    total = sum(found.values())
    return {kind: value / total for kind, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure training steps on random tokens.")
    parser.add_argument("--lengths", default="128,512,2048", help="default %(default)s")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="default %(default)s")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each length (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="default %(default)s")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--without-mtp", action="store_true")
    wanted = parser.parse_args()
    torch.set_num_threads(wanted.threads)
    passes.keep_products()
    if not wanted.eager:
        passes.compile_passes()
    for length in map(int, wanted.lengths.split(",")):
        one = trainer(length, wanted.batch_tokens, not wanted.without_mtp)
        by_clock, by_core = measure(one, wanted.seconds)
        parts = ", ".join(f"{kind} {share:.0%}" for kind, share in shares(one).items())
        print(f"length {length}: {by_clock:,.0f} tokens/s, {by_core:,.0f} per core; {parts}", flush=True)


if __name__ == "__main__":
    main()
