"""Threads of the C kernels: as many as asked, gone when their owner is, and no danger to each other."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from kernels.native.kernels import NativeKernels
from kernels.native.packed import pack
from tests.native.conftest import MakeKernels
from tests.native.models import SPECS, VOCAB, llama, native_sequences, random_weights


def fresh(library_path: Path, threads: int) -> NativeKernels:
    with mock.patch("kernels.native.kernels.build", return_value=library_path):
        return NativeKernels(library_path.parent, threads)


def thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def test_contexts_that_are_dropped_leave_no_threads(library_path: Path) -> None:
    gc.collect()
    before = thread_count()
    packed, x = pack(torch.randn(64, 64).bfloat16()), torch.randn(3, 64).bfloat16()
    for turn in range(100):
        kernels = fresh(library_path, 3)
        assert kernels.context.threads == 3
        if turn % 2:
            kernels.context.multiply(x, packed)
        del kernels
    deadline = time.monotonic() + 5
    while thread_count() > before and time.monotonic() < deadline:  # a joined thread leaves /proc a moment later
        time.sleep(0.01)
    assert thread_count() <= before


def test_any_number_of_threads_is_served(library_path: Path) -> None:
    """More than there are processors, and more than the library has room for."""
    packed, x = pack(torch.randn(64, 64).bfloat16()), torch.randn(3, 64).bfloat16()
    expected = fresh(library_path, 1).context.multiply(x, packed)
    for threads in (17, 64, 1000):
        kernels = fresh(library_path, threads)
        assert kernels.context.threads == min(threads, 256)
        assert torch.equal(kernels.context.multiply(x, packed), expected)


def test_two_contexts_work_at_the_same_time(library_path: Path) -> None:
    spec = SPECS["mimo_flash"]()
    weights = random_weights(spec)
    text = [random.Random(0).randrange(VOCAB) for _ in range(200)]
    expected = native_sequences(spec, weights, fresh(library_path, 1), tokens=512).step([(0, text)])[0]
    results: list[torch.Tensor] = []

    def work(threads: int) -> None:
        sequences = native_sequences(spec, weights, fresh(library_path, threads), tokens=512)
        parts = [sequences.step([(0, text[:150])])[0], *(sequences.step([(0, [token])])[0] for token in text[150:])]
        results.append(torch.cat(parts))

    workers = [threading.Thread(target=work, args=(threads,)) for threads in (2, 3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert len(results) == 2
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mimo_flash"])
def test_many_short_steps_with_more_threads_than_processors_change_no_bit(library_path: Path, name: str) -> None:
    """Threads are put aside by the system at any point of a step, and come back in a later one; steps of one token, and
    of some, follow each other, beside products and draws."""
    spec = SPECS[name]()
    weights = random_weights(spec)
    generator = random.Random(1)
    texts = [[generator.randrange(VOCAB) for _ in range(330)] for _ in range(2)]
    alone = native_sequences(spec, weights, fresh(library_path, 1), tokens=1024)
    expected = [alone.step([(slot, text)])[0] for slot, text in enumerate(texts)]
    kernels = fresh(library_path, 7)
    sequences = native_sequences(spec, weights, kernels, tokens=1024)
    packed, x = pack(torch.randn(300, 64).bfloat16()), torch.randn(3, 64).bfloat16()
    product = fresh(library_path, 1).context.multiply(x, packed)
    sequences.step([(slot, text[:200]) for slot, text in enumerate(texts)])
    while sequences.known[0] < len(texts[0]):
        chosen = [slot for slot in (0, 1) if generator.random() < 0.7 and sequences.known[slot] < 330] or [0]
        rows = []
        for slot in chosen:
            start = sequences.known[slot]
            rows.append((slot, texts[slot][start : start + generator.choice((1, 1, 1, 1, 2, 5))]))
        for (slot, tokens), ours in zip(rows, sequences.step(rows), strict=True):
            stop = sequences.known[slot]
            assert torch.equal(ours, expected[slot][stop - len(tokens) : stop]), (slot, stop)
        if generator.random() < 0.3:
            assert torch.equal(kernels.context.multiply(x, packed), product)


def test_two_models_take_turns_on_one_context(library_path: Path) -> None:
    """Models of other depths, widths and groups of heads; the first is dropped while the threads still stand ready."""
    kernels = fresh(library_path, 5)
    made = []
    for name in ("gemma3", "gpt_oss_one_expert", "llama"):
        spec = SPECS[name]()
        weights = random_weights(spec)
        text = [random.Random(2).randrange(VOCAB) for _ in range(60)]
        expected = native_sequences(spec, weights, fresh(library_path, 1), tokens=128).step([(0, text)])[0]
        made.append((native_sequences(spec, weights, kernels, tokens=128), text, expected))
    for position in range(60):
        for sequences, text, expected in made:
            ours = sequences.step([(0, text[position : position + 1])])[0]
            assert torch.equal(ours[0], expected[position])
        if position == 40:
            made.pop(0)
            gc.collect()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes_alone_and_ends(library_path: Path) -> None:
    """Threads do not come along into a child: whatever it calls must not wait for them, and neither must its end."""
    kernels = fresh(library_path, 3)
    spec = llama()
    sequences = native_sequences(spec, random_weights(spec), kernels, tokens=128)
    text = list(range(40))
    expected = sequences.step([(0, text)])[0]
    packed, x = pack(torch.randn(64, 64).bfloat16()), torch.randn(3, 64).bfloat16()
    product = kernels.context.multiply(x, packed)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            same = torch.equal(kernels.context.multiply(x, packed), product)
            same &= torch.equal(sequences.step([(1, text)])[0], expected)
            kernels.context._finalizer()  # as the interpreter's exit would
            status = 0 if same else 2
        finally:
            os._exit(status)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.02)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(kernels.context.multiply(x, packed), product)


def test_a_step_of_no_tokens_does_nothing(make_kernels: MakeKernels) -> None:
    from kernels.interface import StepRows

    spec = llama()
    sequences = native_sequences(spec, random_weights(spec), make_kernels(2), tokens=64)
    sequences.step([(0, [1, 2, 3])])
    decoder = sequences.decoder.forward.__self__  # type: ignore[attr-defined]
    before = sequences.arena.memory.clone()
    tables = list(sequences.tables.values())
    out = decoder._stack.forward(torch.empty(0, dtype=torch.int64), StepRows(slots=(), starts=(), counts=()), tables)
    assert out.shape == (0, spec.hidden)
    assert torch.equal(sequences.arena.memory, before)


def test_tokens_that_the_model_does_not_have_are_refused(make_kernels: MakeKernels) -> None:
    """The reference raises, too; C would read whatever lies there."""
    spec = llama()
    sequences = native_sequences(spec, random_weights(spec), make_kernels(2), tokens=64)
    for token in (VOCAB, -1, 2**40):
        with pytest.raises(IndexError):
            sequences.step([(0, [1, token])])
