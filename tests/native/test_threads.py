"""Threads of the C kernels: as many as asked, gone when their owner is, and no danger to each other."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from kernels.interface import StepRows
from kernels.native.kernels import NativeKernels
from kernels.native.packed import pack
from server.config import MOST_THREADS
from server.step import StepInterrupted
from tests.native.conftest import MakeKernels
from tests.native.models import SPECS, VOCAB, llama, native_sequences, random_weights

ROOT = Path(__file__).parents[2]


PATCHING = threading.Lock()
"""Kernels are made in threads here, and of patches that overlap one would stay."""


def fresh(library_path: Path, threads: int) -> NativeKernels:
    with PATCHING, mock.patch("kernels.native.kernels.build", return_value=library_path):
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


@pytest.mark.parametrize("threads", [1, 3])
def test_an_interrupted_step_ends_soon_and_no_other_begins(library_path: Path, threads: int) -> None:
    spec = SPECS["gemma3"]()
    kernels = fresh(library_path, threads)
    sequences = native_sequences(spec, random_weights(spec), kernels, tokens=8000)
    text = [random.Random(1).randrange(VOCAB) for _ in range(7000)]
    raised_after_s: list[float] = []

    def step() -> None:
        started_s = time.perf_counter()
        with pytest.raises(StepInterrupted):
            sequences.step([(0, text)], last_only=True)
        raised_after_s.append(time.perf_counter() - started_s)

    thread = threading.Thread(target=step)
    thread.start()
    time.sleep(0.05)
    kernels.context.interrupt()
    thread.join(30)
    assert len(raised_after_s) == 1
    with pytest.raises(StepInterrupted):
        sequences.step([(1, text[:5])])


def test_one_context_serves_threads_one_after_the_other(library_path: Path) -> None:
    kernels = fresh(library_path, 2)
    matrices = [pack(torch.randn(size, 64).bfloat16()) for size in (40, 500, 96)]
    x = torch.randn(5, 64).bfloat16()
    expected = [kernels.context.multiply(x, matrix) for matrix in matrices]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(200):
            if not torch.equal(kernels.context.multiply(x, matrices[index]), expected[index]):
                wrong.append(index)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    assert wrong == []


def in_child(work: Callable[[], bool]) -> None:
    """Whether `work` is true in a forked child, which must end by itself."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if work() else 2
        finally:
            os._exit(status)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")


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

    def work() -> bool:
        same = torch.equal(kernels.context.multiply(x, packed), product)
        same &= torch.equal(sequences.step([(1, text)])[0], expected)
        kernels.context._finalizer()  # as the interpreter's exit would
        return same

    in_child(work)
    assert torch.equal(kernels.context.multiply(x, packed), product)


def test_threads_that_were_not_made_are_said_in_the_log(library_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A machine may have more processors than the pool holds. The command line refuses to ask for more than that."""
    with caplog.at_level(logging.WARNING, "twinpane.kernels"):
        assert fresh(library_path, 2).context.threads == 2
        assert caplog.messages == []
        assert fresh(library_path, MOST_THREADS + 1).context.threads == MOST_THREADS
    assert caplog.messages == [f"event=fewer_threads wanted={MOST_THREADS + 1} made={MOST_THREADS}"]


WITH_LITTLE_MEMORY = """
import os, resource, sys
from pathlib import Path
import torch
from kernels.native import kernels as module
from kernels.native.kernels import Draw, NativeKernels
from kernels.native.packed import pack
from tests.native.models import VOCAB, llama, native_sequences, random_weights
module.build = lambda *_: Path(sys.argv[1])
kernels = NativeKernels(Path("unused"), 2)
sequences = native_sequences(llama(), random_weights(llama()), kernels, tokens=20_000, page_tokens=64)
text = [token % VOCAB for token in range(10_000)]
sequences.step([(0, text[:8])])
packed, x = pack(torch.randn(8, 64).bfloat16()), torch.randn(200_000, 64).bfloat16()
logits = torch.randn(2, 4_000_000)
draws = [Draw(temperature=1.0, top_k=0, top_p=0.9, min_p=0.0, key=key) for key in (1, 2)]
for call in (
    lambda: kernels.context.multiply(x, packed),
    lambda: kernels.choose(logits, draws),
    lambda: sequences.step([(1, text)], last_only=True),
):
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (taken + 8 * 2**20, resource.RLIM_INFINITY))
    try:
        call()
        print("enough?")
    except MemoryError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    sequences.known[1] = 0
    call()
"""


@pytest.mark.parametrize("library_path", ["this-processor"], indirect=True)
def test_memory_that_is_not_there_is_an_error_after_which_work_goes_on(library_path: Path) -> None:
    command = [sys.executable, "-c", WITH_LITTLE_MEMORY, str(library_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "no memory for a matrix product",
        "no memory to sample",
        "no memory for a step's work space",
    ]


def test_a_step_of_no_tokens_does_nothing(make_kernels: MakeKernels) -> None:
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
