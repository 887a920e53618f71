"""Memory of weights: whoever asks for it may write to it."""

from __future__ import annotations

import torch

from kernels.native.memory import ALIGNMENT, BLOCK_BYTES, HUGE_PAGE, HugePages


def test_a_block_begun_in_inference_mode_is_written_outside_of_it() -> None:
    pages = HugePages()
    with torch.inference_mode():
        pages.empty(1)
    for count in (64, BLOCK_BYTES):
        pages.empty(count).fill_(1)


def test_memory_is_zeroed_aligned_and_nobody_elses() -> None:
    pages = HugePages()
    parts = [pages.empty(count) for count in (1, 65, BLOCK_BYTES // 2, HUGE_PAGE, BLOCK_BYTES, 0, 7)]
    for index, part in enumerate(parts, 1):
        assert part.data_ptr() % ALIGNMENT == 0 and not part.any()
        part.fill_(index)
    for index, part in enumerate(parts, 1):
        assert part.eq(index).all()
