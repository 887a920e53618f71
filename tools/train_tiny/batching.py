"""Samples of like length side by side: what one step of training reads."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Protocol

import torch
from torch import Tensor


class Sample(Protocol):
    """What of `tools.train_tiny.data.Sample` is read here."""

    @property
    def ids(self) -> list[int]: ...
    @property
    def trained(self) -> list[bool]: ...
    @property
    def task(self) -> str: ...


class Samples(Protocol):
    """`tools.train_tiny.data.samples`, or what stands in for it."""

    def __call__(
        self, seed: int, *, shortest: int, longest: int, held_out: bool = False, mixture: str = "all"
    ) -> Iterator[Sample]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """tokens [B, T] int64, padded with 0 at the end; written: the assistant's; counted: all but padding."""

    tokens: Tensor
    written: Tensor
    counted: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Samples of shortest to longest tokens for POOL_BATCHES batches of at most batch_tokens, sorted by length and then
    cut: the more, the less padding. Each pool has its own seed, so any of them is made without those before it."""

    seed: int
    shortest: int
    longest: int
    batch_tokens: int
    block: int
    mixture: str = "all"


POOL_BATCHES = 16


class Pools(Protocol):
    """Makes the samples of a pool, batch by batch; `following` will be asked for next, or at least not much later."""

    def __call__(self, wanted: Pool, following: Pool) -> list[list[Sample]]: ...


def in_turn(samples: Samples) -> Pools:
    """Each pool when it is asked for."""
    return lambda wanted, following: make_pool(samples, wanted)


class OneAhead:
    """The following pool is made by a process beside the training, on what time the two leave of their cores."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._process = ProcessPoolExecutor(
            1, mp_context=multiprocessing.get_context("spawn"), initializer=os.nice, initargs=(10,)
        )
        self._made: dict[Pool, Future[list[list[Sample]]]] = {}

    def __call__(self, wanted: Pool, following: Pool) -> list[list[Sample]]:
        made = self._made.pop(wanted, None) or self._start(wanted)
        self._made = {following: self._start(following)}
        return made.result()

    def close(self) -> None:
        self._process.shutdown(cancel_futures=True)

    def _start(self, pool: Pool) -> Future[list[list[Sample]]]:
        return self._process.submit(make_pool, self._samples, pool)


def make_pool(samples: Samples, pool: Pool) -> list[list[Sample]]:
    drawn: list[Sample] = []
    size = 0
    for sample in samples(pool.seed, shortest=pool.shortest, longest=pool.longest, mixture=pool.mixture):
        drawn.append(sample)
        size += len(sample.ids)
        if size >= POOL_BATCHES * pool.batch_tokens:
            break
    groups: list[list[Sample]] = []
    for sample in sorted(drawn, key=lambda sample: len(sample.ids), reverse=True):
        if not groups or (len(groups[-1]) + 1) * padded(len(groups[-1][0].ids), pool.block) > pool.batch_tokens:
            groups.append([])
        groups[-1].append(sample)
    Random(pool.seed).shuffle(groups)
    return groups


def join(samples: Sequence[Sample], block: int) -> Batch:
    """Side by side, padded to a whole number of blocks."""
    count = padded(max(len(sample.ids) for sample in samples), block)
    tokens = torch.zeros(len(samples), count, dtype=torch.int64)
    written, counted = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(tokens, dtype=torch.bool)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample.ids)] = torch.tensor(sample.ids)
        written[row, : len(sample.ids)] = torch.tensor(sample.trained)
        counted[row, : len(sample.ids)] = True
    return Batch(tokens=tokens, written=written, counted=counted)


def padded(count: int, block: int) -> int:
    return -(-count // block) * block
