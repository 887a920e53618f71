"""A stack of decoder layers that the C library runs in one call."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.interface import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation, PagedKV, RouterKind, StepRows
from kernels.native import library
from kernels.native.packed import PackedMatrix

MOST_HEADS_OF_A_KV_HEAD = 96
"""QUERY_ROWS of csrc/attention.h."""

MOST_GROUPS = 8
"""MAX_GROUPS of csrc/stack.c: different numbers of query heads to a KV head in one model."""

_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}
_ROUTERS: dict[RouterKind, int] = {"sigmoid": 0, "softmax": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class StackRope:
    """frequencies [R / 2] fp32 in radians per position; factor multiplies cos and sin."""

    frequencies: Tensor
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StackDense:
    """gate_up [2 * width, M], gate first; down [M, width]; biases fp32."""

    gate_up: PackedMatrix
    down: PackedMatrix
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class StackMoE:
    """router [E, M] and router_bias [E] fp32; gate_up [E, 2 * width, M]; down [E, M, width]; biases fp32."""

    router: Tensor
    router_bias: Tensor
    gate_up: PackedMatrix
    down: PackedMatrix
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: Activation
    kind: RouterKind
    active: int
    normalize: bool
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLayer:
    """One layer. Norm weights [M], qk_norm [H + K, D], sinks [H] and biases are fp32. table: which page table of the
    step its pages are in. rope: which of the stack's ropes."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window_keys: int | None
    scale: float
    value_scale: float
    rope: int
    table: int
    kv: PagedKV
    attention_norm: Tensor
    qkv: PackedMatrix
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    sinks: Tensor | None
    output: PackedMatrix
    output_bias: Tensor | None
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    mlp: StackDense | StackMoE
    mlp_post_norm: Tensor | None


class Interrupted(Exception):
    """The context was interrupted: the step was not finished."""


class Context:
    """Threads and work space of the C library. One call at a time; others wait. In a forked child, which gets none of
    the threads, the caller does all the work."""

    def __init__(self, lib: ctypes.CDLL, threads: int) -> None:
        self.lib = lib
        handle = lib.tp_new(threads)
        if not handle:
            raise MemoryError("no memory for the threads of the C kernels")
        self.handle = handle
        self._finalizer = weakref.finalize(self, lib.tp_free, handle)

    @property
    def threads(self) -> int:
        return int(self.lib.tp_threads(self.handle))

    def interrupt(self) -> None:
        """From any thread: end the step that runs after the layer that it is in, and every later one at once."""
        self.lib.tp_interrupt(self.handle)

    def take_bytes(self) -> int:
        """Bytes of weights, keys and values that were read since the last call, each once for a product or a block of
        queries: what a step asks memory for at least."""
        return int(self.lib.tp_take_bytes(self.handle))

    def multiply(
        self, x: Tensor, matrix: PackedMatrix, bias: Tensor | None = None, *, into: Tensor | None = None
    ) -> Tensor:
        """x [R, K] bf16 times matrix [N, K] transposed, plus bias [N] fp32 -> [R, N] fp32, in `into` where given."""
        outputs, inputs = matrix.shape
        assert x.dtype is torch.bfloat16 and x.shape[1:] == (inputs,), (x.dtype, x.shape, matrix.shape)
        if bias is not None:
            assert bias.dtype is torch.float32 and bias.shape == (outputs,), (bias.dtype, bias.shape)
            bias = bias.contiguous()
        x = x.contiguous()
        out = torch.empty(x.shape[0], outputs, dtype=torch.float32) if into is None else into
        assert out.dtype is torch.float32 and out.shape == (x.shape[0], outputs) and out.is_contiguous(), out.shape
        struct = matrix.struct()
        failed = self.lib.tp_multiply(
            self.handle, ctypes.byref(struct), _pointer(bias), x.data_ptr(), x.shape[0], out.data_ptr()
        )
        if failed:
            raise MemoryError("no memory for a matrix product")
        return out


class Stack:
    """Layers bound to their weights and pages.

    embedding [N, M] bf16, or None: the rows of head, which must then be in bf16 or int8. The work space grows with the
    largest step and is kept.
    """

    def __init__(
        self,
        context: Context,
        layers: Sequence[StackLayer],
        ropes: Sequence[StackRope],
        *,
        embedding: Tensor | None,
        embedding_scale: float,
        head: PackedMatrix,
        final_norm: Tensor,
        eps: float,
    ) -> None:
        self._context = context
        self._kept: list[Any] = [embedding, head, final_norm]
        self._hidden = int(final_norm.shape[0])
        self._head = head
        self._layers = (library.Layer * len(layers))(*(self._layer(layer) for layer in layers))
        self._ropes = (library.Rope * len(ropes))(*(self._rope(rope) for rope in ropes))
        self._model = library.Model(
            hidden=self._hidden,
            eps=eps,
            embedding_scale=embedding_scale,
            embedding=_pointer(embedding),
            head=head.struct(),
            final_norm=self._fp32(final_norm),
            layers=self._layers,
            ropes=self._ropes,
            layer_count=len(layers),
            rope_count=len(ropes),
        )
        self._finalizer = weakref.finalize(self, _wait_until_unread, context)

    def forward(self, tokens: Tensor, rows: StepRows, tables: Sequence[Tensor]) -> Tensor:
        """tokens [T] int64 -> hidden [T, M] bf16 after the final norm. tables: page tables [slots, pages] int32.

        K and V of the tokens are written to the pages of their rows. The lock of the interpreter is free meanwhile.
        Raises IndexError for a token outside the vocabulary, MemoryError if there is no room to work in, Interrupted.
        """
        out = torch.empty(tokens.shape[0], self._hidden, dtype=torch.bfloat16)
        self._run(tokens, rows, tables, out, None)
        return out

    def rebuild(self, tokens: Tensor, rows: StepRows, tables: Sequence[Tensor], drops: Sequence[int]) -> None:
        """One row of tokens that are cached, run again for K and V of the window layers only.

        drops: for each layer how many of its first tokens that are left go no further than its K and V. Full K and V
        are read and not written. Raises as `forward`.
        """
        assert len(rows.slots) == 1 and len(drops) == self._model.layer_count and sum(drops) <= tokens.shape[0]
        self._run(tokens, rows, tables, None, drops)

    def _run(
        self,
        tokens: Tensor,
        rows: StepRows,
        tables: Sequence[Tensor],
        out: Tensor | None,
        drops: Sequence[int] | None,
    ) -> None:
        count = len(rows.slots)
        leaving = None if drops is None else (ctypes.c_int64 * len(drops))(*drops)
        numbers = ctypes.c_int64 * count
        slots, starts, counts = numbers(*rows.slots), numbers(*rows.starts), numbers(*rows.counts)
        tokens = tokens.contiguous()
        step = library.Step(
            tokens=tokens.shape[0],
            rows=count,
            ids=tokens.data_ptr(),
            slots=ctypes.addressof(slots),
            starts=ctypes.addressof(starts),
            counts=ctypes.addressof(counts),
            tables=(ctypes.c_void_p * 2)(*(table.data_ptr() for table in tables)),
            table_stride=(ctypes.c_int64 * 2)(*(table.stride(0) for table in tables)),
            out=None if out is None else out.data_ptr(),
            drops=None if leaving is None else ctypes.addressof(leaving),
        )
        failed = self._context.lib.tp_forward(self._context.handle, ctypes.byref(self._model), ctypes.byref(step))
        if failed == 2:
            raise IndexError(f"a token is outside the model's vocabulary of {self._head.shape[0]}")
        if failed == 3:
            raise Interrupted
        if failed:
            raise MemoryError("no memory for a step's work space")

    def _layer(self, layer: StackLayer) -> library.Layer:
        mlp, kv = layer.mlp, layer.kv
        self._kept.append(layer)
        assert kv.k.stride()[:2] == kv.v.stride()[:2]
        struct = library.Layer(
            attention_norm=self._fp32(layer.attention_norm),
            attention_post_norm=self._fp32(layer.attention_post_norm),
            mlp_norm=self._fp32(layer.mlp_norm),
            mlp_post_norm=self._fp32(layer.mlp_post_norm),
            qk_norm=self._fp32(layer.qk_norm),
            qkv=layer.qkv.struct(),
            output=layer.output.struct(),
            qkv_bias=self._fp32(layer.qkv_bias),
            output_bias=self._fp32(layer.output_bias),
            shape=library.Shape(
                heads=layer.heads,
                kv_heads=layer.kv_heads,
                dim=layer.head_dim,
                value_dim=layer.value_dim,
                window=layer.window_keys or 0,
                scale=layer.scale,
                sinks=self._fp32(layer.sinks),
            ),
            pages=library.Pages(
                k=kv.k.data_ptr(),
                v=kv.v.data_ptr(),
                slab_stride=kv.k.stride(0),
                page_stride=kv.k.stride(1),
                per_slab=kv.k.shape[1],
                page_tokens=kv.k.shape[3],
            ),
            kind=layer.table,
            rope=layer.rope,
            value_scale=layer.value_scale,
            activation=_ACTIVATIONS[mlp.activation],
            limit=SWIGLU_LIMIT,
            alpha=SWIGLU_ALPHA,
        )
        if isinstance(mlp, StackDense):
            struct.gate_up, struct.down = mlp.gate_up.struct(), mlp.down.struct()
            struct.gate_up_bias, struct.down_bias = self._fp32(mlp.gate_up_bias), self._fp32(mlp.down_bias)
        else:
            experts = mlp.router.shape[0]
            struct.experts, struct.active = experts, mlp.active
            struct.router_kind, struct.normalize, struct.routed_scale = _ROUTERS[mlp.kind], mlp.normalize, mlp.scale
            struct.router, struct.router_bias = self._fp32(mlp.router), self._fp32(mlp.router_bias)
            gate_up = (library.Matrix * experts)(*(mlp.gate_up[e].struct() for e in range(experts)))
            down = (library.Matrix * experts)(*(mlp.down[e].struct() for e in range(experts)))
            self._kept += [gate_up, down]
            struct.expert_gate_up, struct.expert_down = gate_up, down
            struct.expert_gate_up_bias = self._fp32(mlp.gate_up_bias)
            struct.expert_down_bias = self._fp32(mlp.down_bias)
        return struct

    def _rope(self, rope: StackRope) -> library.Rope:
        return library.Rope(
            frequencies=self._fp32(rope.frequencies), dim=2 * rope.frequencies.shape[0], scale=rope.factor
        )

    def _fp32(self, tensor: Tensor | None) -> int | None:
        """The address of a contiguous fp32 tensor, kept alive."""
        if tensor is None:
            return None
        wide = tensor.float().contiguous()
        self._kept.append(wide)
        return wide.data_ptr()


def _wait_until_unread(context: Context) -> None:
    context.lib.tp_quiet(context.handle)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
