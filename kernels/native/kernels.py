"""The backend that is chosen on a processor when the C library could be compiled."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.native import library
from kernels.native.build import BuildError, build
from kernels.native.packed import PackedMatrix, PanelPacking, pack
from kernels.native.stack import Context
from kernels.quantized import Matrix
from kernels.reference import ReferenceKernels

log = logging.getLogger("twinpane.kernels")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How one token is drawn; key is 64 bits of noise. temperature 0 takes the best token; top_k 0, top_p 1 and min_p 0
    cut nothing."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    key: int


class NativeKernels(ReferenceKernels):
    """Implements kernels.interface.Kernels for bf16 on a processor; single operations are the reference's.

    What makes it fast is `kernels.native.stack.Stack`, which runs a whole step with `context`. int8: plain matrices are
    rounded to int8 when they are packed, with one scale a row. bf12: other plain matrices are kept in 12 bits a weight,
    without loss; by default where the processor unpacks them faster than memory gives them.
    """

    def __init__(
        self,
        cache: Path,
        threads: int | None = None,
        *,
        int8: bool = False,
        bf12: bool | None = None,
        defines: Sequence[str] = (),
        compiler: str | None = None,
    ) -> None:
        """compiler: see `kernels.native.build.build`.

        Raises `kernels.native.build.BuildError` if the library cannot be made or loaded, MemoryError if its threads
        cannot.
        """
        path = build(cache, defines, compiler)
        try:
            lib = library.load(path)
        except (OSError, AttributeError) as error:
            path.unlink(missing_ok=True)  # whatever the compiler did, it may do better next time
            raise BuildError(f"cannot load {path}: {error}") from error
        wanted = threads or torch.get_num_threads() or os.cpu_count() or 1
        self.context = Context(lib, wanted)
        if self.context.threads < wanted:
            log.warning("event=fewer_threads wanted=%d made=%d", wanted, self.context.threads)
        self.int8 = int8
        self.bf12 = not int8 and (bool(lib.tp_has_bf12()) if bf12 is None else bf12)

    @property
    def description(self) -> str:
        if self.int8:
            return "native, weights in int8"
        return "native, weights in bf16 of 12 bits without loss" if self.bf12 else "native, weights in bf16"

    def pack(self, weight: Matrix) -> Matrix:
        return pack(weight, int8=self.int8, bf12=self._bf12_library)

    def packing(self, shape: Sequence[int]) -> PanelPacking:
        return PanelPacking(shape, int8=self.int8, bf12=self._bf12_library)

    @property
    def _bf12_library(self) -> ctypes.CDLL | None:
        return self.context.lib if self.bf12 else None

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, PackedMatrix) and x.dtype is torch.bfloat16:
            return self.context.multiply(x, weight, None if bias is None else bias.float()).to(x.dtype)
        return super().linear(x, weight, bias)

    def choose(self, logits: Tensor, draws: Sequence[Draw]) -> list[int]:
        """The next token of each row of logits [R, N] fp32; -1 where they are not finite."""
        rows, vocab = logits.shape
        assert logits.dtype is torch.float32 and len(draws) == rows, (logits.dtype, rows, len(draws))
        logits = logits.contiguous()
        structs = (library.Draw * rows)(*(library.Draw(d.temperature, d.top_p, d.min_p, d.top_k, d.key) for d in draws))
        tokens = (ctypes.c_int64 * rows)()
        if self.context.lib.tp_choose(self.context.handle, logits.data_ptr(), rows, vocab, structs, tokens):
            raise MemoryError("no memory to sample")
        return list(tokens)
