"""What the memory plan counts for a step of the C kernels is what they take of the system, and not much more."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from kernels.native.kernels import Draw
from server.model import native_work_space
from server.model.native_work_space import STACK_BYTES, native_step_bytes
from tests.native.models import SPECS, VOCAB, mimo_pro, native_sequences, random_weights
from tests.native.test_threads import fresh

CSRC = Path(__file__).parents[2] / "kernels" / "native" / "csrc"


class MallocInfo(ctypes.Structure):
    """struct mallinfo2 of <malloc.h>; uordblks are bytes in use in arenas, hblkhd those in mappings of their own."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        (name, ctypes.c_size_t)
        for name in (
            *(
                "arena",
                "ordblks",
                "smblks",
                "hblks",
                "hblkhd",
                "usmblks",
                "fsmblks",
                "uordblks",
                "fordblks",
                "keepcost",
            ),
        )
    ]


def taken_bytes() -> int:
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallocInfo
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd)


def test_the_constants_are_those_of_the_sources() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in sorted(CSRC.iterdir()))
    names = {name for name in vars(native_work_space) if name.isupper()} - {"BYTES_OF_A_BLOCK", "STACK_BYTES"}
    assert len(names) == 11
    for name in names:
        (value,) = re.findall(rf"^#define {name} (\d+|\(\d+ << \d+\))(?:\s|$)", sources, re.MULTILINE)
        left, _, shift = value.strip("()").partition(" << ")
        assert getattr(native_work_space, name) == int(left) << int(shift or 0), name


CONTEXT, TOKENS, ROWS = 4096, 512, 8
NOISE_BYTES = 2**16
"""What Python and torch take for themselves meanwhile."""


@torch.inference_mode()
@pytest.mark.parametrize("threads", [1, 16])
@pytest.mark.parametrize("name", SPECS)
def test_what_is_counted_for_a_step_is_what_it_takes(library_path: Path, name: str, threads: int) -> None:
    """The largest step at the end of the longest context, then the head and a draw for every row."""
    spec, kernels = SPECS[name](), fresh(library_path, threads)
    sequences = native_sequences(spec, random_weights(spec), kernels, tokens=CONTEXT * 2, page_tokens=64)
    decoder = sequences.decoder.forward.__self__  # type: ignore[attr-defined]
    decoder._arena, decoder._stack = sequences.arena, decoder._bind(sequences.arena)
    before = taken_bytes()
    text = [position % VOCAB for position in range(CONTEXT)]
    for start in range(0, CONTEXT - TOKENS, TOKENS):
        sequences.step([(0, text[start : start + TOKENS])])
    sequences.step([(0, text[-TOKENS : 1 - ROWS]), *((slot, text[:1]) for slot in range(1, ROWS))])
    sequences.step([(0, text[1 - ROWS :])])
    assert sequences.known[0] == CONTEXT
    logits = decoder.logits(torch.ones(ROWS, spec.hidden, dtype=torch.bfloat16))
    kernels.choose(logits, [Draw(temperature=1.0, top_k=0, top_p=0.9, min_p=0.0, key=row) for row in range(ROWS)])
    del logits
    taken = taken_bytes() - before
    counted = native_step_bytes(spec, tokens=TOKENS, rows=ROWS, context_tokens=CONTEXT, threads=threads)
    counted -= threads * STACK_BYTES
    assert taken - NOISE_BYTES <= counted <= 1.2 * taken


def test_partial_results_of_long_contexts_are_counted_up_to_their_limit() -> None:
    def counted(context_tokens: int, threads: int) -> int:
        return native_step_bytes(mimo_pro(), tokens=1, rows=1, context_tokens=context_tokens, threads=threads)

    for threads in (2, 64):
        of_a_segment = 2 * threads * (64 + 2) * 16 * 4  # values of up to 36 dims take two panels
        grown = counted(2**20, threads) - counted(2**10, threads)
        least = min(4096 * of_a_segment, 64 * 2**20) - 6 * of_a_segment
        assert least <= grown <= 1.3 * least
    assert counted(2**30, 64) == counted(2**24, 64)
