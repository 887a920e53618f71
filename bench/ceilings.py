"""What the machine can do at most: bytes read per second, bf16 and int8 multiply-adds per second.

    python -m bench.ceilings --threads 2

prints one JSON object. Each number is the best of several ways and repeats, since a ceiling is what was ever reached;
a process of its own, so that the gigabyte it reads is gone before a server starts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

READ_ELEMENTS = 1 << 28
"""Of fp32: 1 GiB, far beyond every cache."""

GEMM_SIZES = (1024, 2048, 4096)
REPEATS = 5


def best_s(work: Callable[[], object], repeats: int = REPEATS) -> float:
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def read_bytes_per_s() -> float:
    """A sum, and the product of a tall bf16 matrix with a vector: both read each byte once."""
    numbers = torch.ones(READ_ELEMENTS)
    fastest = best_s(lambda: numbers.sum())
    matrix, vector = numbers.view(torch.bfloat16).view(-1, 4096), torch.ones(4096, dtype=torch.bfloat16)
    fastest = min(fastest, best_s(lambda: torch.mv(matrix, vector)))
    return 4 * READ_ELEMENTS / fastest


def bf16_flop_per_s(size: int) -> float:
    left, right = torch.randn(size, size).bfloat16(), torch.randn(size, size).bfloat16().t()
    return 2 * size**3 / best_s(lambda: torch.mm(left, right))


def int8_op_per_s(size: int) -> float:
    """torch._int_mm, and oneDNN's packed linear layer where this build has it."""
    left = torch.randint(-127, 127, (size, size), dtype=torch.int8)
    right = torch.randint(-127, 127, (size, size), dtype=torch.int8)
    fastest = best_s(lambda: torch._int_mm(left, right.t()))
    try:
        packed = torch.ops.onednn.qlinear_prepack(right, [size, size])
        unsigned = left.abs().to(torch.uint8)
        scales, zeros = torch.full((size,), 0.01), torch.zeros(size, dtype=torch.int64)
        fastest = min(
            fastest,
            best_s(
                lambda: torch.ops.onednn.qlinear_pointwise(
                    *(unsigned, 0.01, 0, packed, scales, zeros, None, 1.0, 0, torch.bfloat16, "none", [], "")
                )
            ),
        )
    except (RuntimeError, AttributeError):
        pass  # not on this processor, or not in this build
    return 2 * size**3 / fastest


def measure(threads: int) -> dict[str, float]:
    """GB/s, GFLOP/s and GOP/s (10^9)."""
    torch.set_num_threads(threads)
    return {
        "read": read_bytes_per_s() / 1e9,
        "bf16": max(bf16_flop_per_s(size) for size in GEMM_SIZES) / 1e9,
        "int8": max(int8_op_per_s(size) for size in GEMM_SIZES) / 1e9,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="[%(default)s]")
    print(json.dumps(measure(parser.parse_args().threads)))
