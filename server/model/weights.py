"""Weights in the shapes that the decoder multiplies by, and their loading.

q, k and v are rows of one matrix, gate and up of another: fewer and larger products. A matrix is read and packed a few
rows at a time, so none is ever in memory twice, unless a backend wants it whole (`kernels.packing`). fp8 matrices keep
their codes and scales, see `kernels.quantized.BlockScaled`.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.packing import Packing, WholePacking
from kernels.quantized import BlockScaled, Matrix, QuantizedMatrix
from server.errors import StartupError
from server.model.checkpoint import Checkpoint
from server.model.expert_files import STORED, Stored
from server.model.families import tensor_names
from server.model.families.names import TensorNames
from server.model.fused_qkv import qkv_rows
from server.model.spec import AttentionSpec, LayerSpec, ModelSpec, MoESpec
from server.model.stored_rows import SCALE_COLUMNS, Scales, StoredRows, locate, stored_tensors

Progress = Callable[[int], None]
Pack = Callable[[Matrix], Matrix]
MakePacking = Callable[[Sequence[int]], Packing]
Copy = Callable[[Tensor, str, int], None]
"""(target, the checkpoint's tensor, its first row): fills target."""

_CHUNK_BYTES = 16 * 2**20
"""What is read between two reports of progress, at most."""
_PACKED_BYTES = 2**18
"""Rows that are packed at a time: few enough to stay in a core's cache."""

_WORKERS = 4
_IN_FLIGHT_BYTES = 256 * 2**20
"""Matrices that are held whole until they are packed, unless one alone is larger."""

_MULTIPLIED = ("q", "k", "v", "o", "gate", "up", "down", "head", "eh_proj")
_JOINED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """qkv [(H + K) * D + K * V, M], output [M, H * V]. qk_norm [H + K, D]: q's weight H times, then k's K times.

    sinks [H] are fp32.
    """

    qkv: Matrix
    qkv_bias: Tensor | None
    output: Matrix
    output_bias: Tensor | None
    qk_norm: Tensor | None
    sinks: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseWeights:
    """gate_up [2 * width, M], gate first; down [M, width]."""

    gate_up: Matrix
    gate_up_bias: Tensor | None
    down: Matrix
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEWeights:
    """router [E, M] and router_bias [E] in fp32; gate_up [E, 2 * width, M]; down [E, M, width].

    gate_up_bias [E, 2 * width]; down_bias [E, M].
    """

    router: Tensor
    router_bias: Tensor
    gate_up: Matrix
    down: Matrix
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    attention_norm: Tensor
    attention: AttentionWeights
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    mlp: DenseWeights | MoEWeights
    mlp_post_norm: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPWeights:
    """enorm, hnorm [M] for the token's embedding and the target's hidden; eh_proj [M, 2 * M], embedding first."""

    enorm: Tensor
    hnorm: Tensor
    eh_proj: Matrix
    layer: LayerWeights
    final_norm: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """embedding and head [N, M], one tensor when tied. Norm weights are fp32 and have spec.norm_offset added."""

    embedding: Matrix
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Matrix
    mtp: tuple[MTPWeights, ...]


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every canonical tensor of a model and its shape."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (spec.vocab, spec.hidden), "final_norm": (spec.hidden,)}
    if not spec.tied_embeddings:
        shapes["head"] = (spec.vocab, spec.hidden)
    for index, layer in enumerate(spec.layers):
        shapes |= {f"layers.{index}.{part}": shape for part, shape in _layer_shapes(spec, layer).items()}
    for index, layer in enumerate(spec.mtp_layers):
        shapes |= {f"mtp.{index}.{part}": shape for part, shape in _layer_shapes(spec, layer).items()}
        shapes |= {f"mtp.{index}.{norm}": (spec.hidden,) for norm in ("enorm", "hnorm", "final_norm")}
        shapes[f"mtp.{index}.eh_proj"] = (spec.hidden, 2 * spec.hidden)
    return shapes


def weight_bytes(
    spec: ModelSpec,
    dtype: torch.dtype,
    *,
    packed: bool = False,
    panels: bool = False,
    int8: bool = False,
    bf12: bool = False,
    checkpoint: Checkpoint | None = None,
) -> int:
    """Memory that the loaded weights take, computed without reading any. Packed, a head that is tied to the embedding
    is a matrix of its own. In panels, every row of an fp8 matrix has its own copy of its scales. int8: plain matrices
    take a byte an element and an fp32 scale a row. bf12: they take twelve bits an element and a byte a row, for tables
    and escapes. Without a checkpoint nothing is quantized."""
    total = spec.vocab * spec.hidden * dtype.itemsize if packed and spec.tied_embeddings else 0
    shapes = tensor_shapes(spec)
    located = {} if checkpoint is None else locate(spec, shapes, checkpoint, _names(spec, checkpoint))
    quantized = _quantized(located)
    for name, shape in shapes.items():
        if name not in quantized:
            looked_up = name == "embedding" and not spec.tied_embeddings
            kept = looked_up or name.endswith(("router", "_bias", "_codes", "_scales"))
            if int8 and len(shape) > 1 and not kept:
                total += math.prod(shape) + math.prod(shape[:-1]) * torch.float32.itemsize
            elif bf12 and len(shape) > 1 and not kept:
                total += math.prod(shape) * 3 // 2 + math.prod(shape[:-1])
            else:
                total += math.prod(shape) * _stored_dtype(name, dtype).itemsize
            continue
        total += math.prod(shape)
        if panels:
            total += shape[0] * _scales(located[name]).columns * torch.float32.itemsize
        elif not re.search(r"\.experts\.[1-9]", name):  # all experts of a layer share one map of rows to scales
            total += shape[0] * torch.int32.itemsize
    if not panels:
        stored = {_scales(located[name]) for name in quantized}
        total += sum(scales.rows * scales.columns * torch.float32.itemsize for scales in stored)
    for layer in (*spec.layers, *spec.mtp_layers):
        attention = layer.attention
        if attention.qk_norm:
            # Stored once per head, not once per layer.
            extra_rows = attention.heads + attention.kv_heads - 2
            total += extra_rows * attention.head_dim * _stored_dtype("q_norm", dtype).itemsize
    return total


def held_bytes(weights: Weights) -> int:
    """Memory that loaded weights take; what two places share counts once."""
    found: dict[int, int] = {}

    def visit(value: object) -> None:
        if isinstance(value, Tensor | QuantizedMatrix):
            found[id(value)] = value.nbytes
        elif isinstance(value, tuple):
            for entry in value:
                visit(entry)
        elif is_dataclass(value):
            for each in fields(value):
                visit(getattr(value, each.name))

    visit(weights)
    return sum(found.values())


def _layer_shapes(spec: ModelSpec, layer: LayerSpec) -> dict[str, tuple[int, ...]]:
    attention, mlp, hidden = layer.attention, layer.mlp, spec.hidden
    rows = qkv_rows(attention)
    shapes: dict[str, tuple[int, ...]] = {"attention_norm": (hidden,), "mlp_norm": (hidden,)}
    shapes |= {part: (count, hidden) for part, count in rows.items()}
    shapes["o"] = (hidden, attention.heads * attention.value_dim)
    if attention.qkv_bias:
        shapes |= {f"{part}_bias": (count,) for part, count in rows.items()}
    if attention.output_bias:
        shapes["o_bias"] = (hidden,)
    if attention.qk_norm:
        shapes |= {"q_norm": (attention.head_dim,), "k_norm": (attention.head_dim,)}
    if attention.sinks:
        shapes["sinks"] = (attention.heads,)
    if layer.post_norms:
        shapes |= {"attention_post_norm": (hidden,), "mlp_post_norm": (hidden,)}
    if isinstance(mlp, MoESpec):
        shapes |= {"router": (mlp.experts, hidden), "router_bias": (mlp.experts,)}
        if mlp.files in STORED:
            return shapes | STORED[mlp.files].shapes(mlp, hidden)
        for expert in range(mlp.experts):
            shapes |= {f"experts.{expert}.{part}": (mlp.width, hidden) for part in ("gate", "up")}
            shapes[f"experts.{expert}.down"] = (hidden, mlp.width)
    else:
        shapes |= {"gate": (mlp.width, hidden), "up": (mlp.width, hidden), "down": (hidden, mlp.width)}
        if mlp.bias:
            shapes |= {"gate_bias": (mlp.width,), "up_bias": (mlp.width,), "down_bias": (hidden,)}
    return shapes


def _stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Router, its bias and sinks steer a softmax or a choice: fp32. So are norms, which cost little: where 1 is added
    to w, by us or in the file, bf16 would lose w's low bits. Codes and scales of mxfp4 are bytes."""
    part = name.rsplit(".", 1)[-1]
    if part.endswith(("_codes", "_scales")):
        return torch.uint8
    return torch.float32 if part in ("router", "router_bias", "sinks") or part.endswith("norm") else dtype


def load_weights(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress = lambda read_bytes: None,
    pack: Pack = lambda matrix: matrix,
    *,
    packing: MakePacking | None = None,
    embeds_from_head: bool = False,
) -> Weights:
    """Read a whole model. progress is called with the number of checkpoint bytes just read. Every matrix that the
    decoder multiplies by goes through pack as soon as it is complete, or through packing while it is read, see
    `kernels.interface.Kernels`. embeds_from_head: where the embedding is tied, only the packed head is kept.

    A few layers at a time are loaded, each in a thread of its own, so one is read while another is packed: pack must
    bear that. progress is called by one thread at a time.

    Raises StartupError that names missing, unused or misshapen tensors, before any weight is read.
    """
    return _Loader(spec, checkpoint, dtype, torch.device(device), progress, pack, packing, embeds_from_head).load()


def checkpoint_bytes(spec: ModelSpec, checkpoint: Checkpoint) -> int:
    """What `load_weights` will report to progress in all."""
    located = locate(spec, tensor_shapes(spec), checkpoint, _names(spec, checkpoint))
    return sum(checkpoint.tensors[name].stored_bytes for name in stored_tensors(located))


def _names(spec: ModelSpec, checkpoint: Checkpoint) -> TensorNames:
    names = tensor_names(spec, gguf=checkpoint.is_gguf)
    if spec.tied_embeddings:
        # Some checkpoints store the embedding a second time under the head's name.
        names = replace(names, ignored=(*names.ignored, r"(.*\.)?lm_head\.weight"))
    return names


class _Loader:
    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
        pack: Pack,
        packing: MakePacking | None,
        embeds_from_head: bool,
    ) -> None:
        self.spec = spec
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self.report = progress
        self.reporting = threading.Lock()
        self.abandoned = False
        self.pack = pack
        self.packing = packing or (lambda shape: WholePacking(shape, pack))
        self.holds_whole = packing is None
        self.scratch = threading.local()
        self.embeds_from_head = embeds_from_head
        self.shapes = tensor_shapes(spec)
        self.table = _names(spec, checkpoint)
        self.located = locate(spec, self.shapes, checkpoint, self.table)
        self.quantized = _quantized(self.located)
        self.names = {canonical: stored.tensor for canonical, stored in self.located.items()}
        self._check_bytes()
        self.in_flight = _Budget(_IN_FLIGHT_BYTES)

    def load(self) -> Weights:
        spec = self.spec
        pool = ThreadPoolExecutor(min(_WORKERS, os.cpu_count() or 1), "twinpane-load")
        try:
            ends = pool.submit(self._embedding_and_head)
            layers = [pool.submit(self._layer, f"layers.{index}", layer) for index, layer in enumerate(spec.layers)]
            mtp = [pool.submit(self._mtp, f"mtp.{index}", layer) for index, layer in enumerate(spec.mtp_layers)]
            _raise_first([ends, *layers, *mtp])
            embedding, head = ends.result()
            return Weights(
                embedding=embedding,
                layers=tuple(layer.result() for layer in layers),
                final_norm=self._matrix("final_norm"),
                head=head,
                mtp=tuple(layer.result() for layer in mtp),
            )
        except BaseException:
            self.abandoned = True
            raise
        finally:
            pool.shutdown(cancel_futures=True)
            self.checkpoint.release()
            _return_freed_memory()

    def progress(self, read_bytes: int) -> None:
        """Called for every piece that is read; ends a thread whose loading is over."""
        if self.abandoned:
            raise CancelledError
        with self.reporting:
            self.report(read_bytes)

    def _embedding_and_head(self) -> tuple[Matrix, Matrix]:
        if not self.spec.tied_embeddings:
            return self._matrix("embedding"), self._packed("head")
        if self.embeds_from_head:
            head = self._packed("embedding")
            return head, head
        with self.in_flight.take(self._bytes(["embedding"])):
            embedding = self._matrix("embedding")
            return embedding, self.pack(embedding)

    def _mtp(self, at: str, layer: LayerSpec) -> MTPWeights:
        return MTPWeights(
            enorm=self._matrix(f"{at}.enorm"),
            hnorm=self._matrix(f"{at}.hnorm"),
            eh_proj=self._packed(f"{at}.eh_proj"),
            layer=self._layer(at, layer),
            final_norm=self._matrix(f"{at}.final_norm"),
        )

    def _layer(self, at: str, layer: LayerSpec) -> LayerWeights:
        return LayerWeights(
            attention_norm=self._matrix(f"{at}.attention_norm"),
            attention=self._attention(at, layer.attention),
            attention_post_norm=self._matrix(f"{at}.attention_post_norm") if layer.post_norms else None,
            mlp_norm=self._matrix(f"{at}.mlp_norm"),
            mlp=self._moe(at, layer.mlp) if isinstance(layer.mlp, MoESpec) else self._dense(at, layer.mlp.bias),
            mlp_post_norm=self._matrix(f"{at}.mlp_post_norm") if layer.post_norms else None,
        )

    def _attention(self, at: str, attention: AttentionSpec) -> AttentionWeights:
        qk_norm = None
        if attention.qk_norm:
            q_norm, k_norm = self._matrix(f"{at}.q_norm"), self._matrix(f"{at}.k_norm")
            qk_norm = torch.cat((q_norm.expand(attention.heads, -1), k_norm.expand(attention.kv_heads, -1)))
        return AttentionWeights(
            qkv=self._packed(f"{at}.q", f"{at}.k", f"{at}.v"),
            qkv_bias=self._matrix(f"{at}.q_bias", f"{at}.k_bias", f"{at}.v_bias") if attention.qkv_bias else None,
            output=self._packed(f"{at}.o"),
            output_bias=self._matrix(f"{at}.o_bias") if attention.output_bias else None,
            qk_norm=qk_norm,
            sinks=self._matrix(f"{at}.sinks") if attention.sinks else None,
        )

    def _dense(self, at: str, bias: bool) -> DenseWeights:
        return DenseWeights(
            gate_up=self._packed(f"{at}.gate", f"{at}.up"),
            gate_up_bias=self._matrix(f"{at}.gate_bias", f"{at}.up_bias") if bias else None,
            down=self._packed(f"{at}.down"),
            down_bias=self._matrix(f"{at}.down_bias") if bias else None,
        )

    def _moe(self, at: str, moe: MoESpec) -> MoEWeights:
        if moe.files in STORED:
            return self._moe_stored(at, moe, STORED[moe.files])
        experts = [f"{at}.experts.{expert}" for expert in range(moe.experts)]
        return MoEWeights(
            router=self._matrix(f"{at}.router"),
            router_bias=self._matrix(f"{at}.router_bias"),
            gate_up=self._packed_stack([(f"{expert}.gate", f"{expert}.up") for expert in experts]),
            down=self._packed_stack([(f"{expert}.down",) for expert in experts]),
        )

    def _check_bytes(self) -> None:
        for canonical, name in self.names.items():
            info = self.checkpoint.tensors[name]
            if _stored_dtype(canonical, self.dtype) is torch.uint8 and info.stored_bytes != math.prod(info.shape):
                raise StartupError(f"tensor {name} has {info.stored_bytes} bytes, expected a byte per entry: U8")

    def _moe_stored(self, at: str, moe: MoESpec, files: Stored) -> MoEWeights:
        def read(part: str, entry: int | None) -> Tensor:
            name = self.names[f"{at}.{part}"]
            info = self.checkpoint.tensors[name]
            stored = self.checkpoint.read(name) if entry is None else self.checkpoint.read(name, entry, entry + 1)[0]
            self.progress(info.stored_bytes // (1 if entry is None else info.shape[0]))
            return stored

        sizes = [
            math.prod(shape) * _stored_dtype(part, self.dtype).itemsize
            for part, shape in files.shapes(moe, self.spec.hidden).items()
        ]
        with self._held(sum(sizes)):
            experts = files.load(moe, self.spec.hidden, read, self.dtype, self.device, self.packing)
            return MoEWeights(
                router=self._matrix(f"{at}.router"),
                router_bias=self._matrix(f"{at}.router_bias"),
                gate_up=experts.gate_up,
                gate_up_bias=experts.gate_up_bias,
                down=experts.down,
                down_bias=experts.down_bias,
            )

    @contextmanager
    def _held(self, count: int) -> Iterator[None]:
        """Around the making of a packed matrix: where it is held whole first, only so many bytes are at once."""
        if not self.holds_whole:
            yield
            return
        with self.in_flight.take(count):
            yield

    def _packed(self, *parts: str) -> Matrix:
        """A matrix to multiply by."""
        with self._held(self._bytes(parts)):
            packing = self.packing(self._joined_shape(parts))
            self._put(packing, parts, self._scaled([parts]), None)
            return packing.done()

    def _packed_stack(self, groups: list[tuple[str, ...]]) -> Matrix:
        """[groups, rows, columns]: the parts of a group joined along their rows. All groups have the same shapes."""
        with self._held(len(groups) * self._bytes(groups[0])):
            packing = self.packing((len(groups), *self._joined_shape(groups[0])))
            scaled = self._scaled(groups)
            for group, parts in enumerate(groups):
                self._put(packing, parts, scaled, group)
            return packing.done()

    def _joined_shape(self, parts: Sequence[str]) -> tuple[int, int]:
        return sum(self.shapes[part][0] for part in parts), self.shapes[parts[0]][1]

    def _bytes(self, parts: Collection[str]) -> int:
        itemsize = 1 if next(iter(parts)) in self.quantized else self.dtype.itemsize
        return sum(math.prod(self.shapes[part]) for part in parts) * itemsize

    def _put(
        self, packing: Packing, parts: Sequence[str], scaled: tuple[Tensor, Tensor] | None, group: int | None
    ) -> None:
        """Read the parts, one below the other, and pack them."""
        dtype = self.dtype if scaled is None else torch.float8_e4m3fn
        start = 0
        for part in parts:
            rows, columns = self.shapes[part]
            copy = self._copy(part, dtype)
            unit = self._head_dim(part) if self._is_interleaved(part) else 1
            step = max(1, _PACKED_BYTES // (columns * dtype.itemsize * unit)) * unit
            for first in range(0, rows, step):
                chunk = self._chunk((min(step, rows - first), columns), dtype)
                self._fill(chunk, part, first, copy)
                put: Matrix = chunk
                if scaled is not None:
                    scales, row_scale = scaled
                    span = slice(start + first, start + first + chunk.shape[0])
                    put = BlockScaled(codes=chunk, scales=scales[group or 0], row_scale=row_scale[span])
                packing.put(start + first, put, group)
            start += rows

    def _chunk(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Memory for rows, one piece a thread: many of them, freed between matrices that stay, leave holes."""
        count = math.prod(shape) * dtype.itemsize
        buffer: Tensor | None = getattr(self.scratch, "buffer", None)
        if buffer is None or buffer.numel() < count:
            buffer = self.scratch.buffer = torch.empty(count, dtype=torch.uint8, device=self.device)
        return buffer[:count].view(dtype).view(shape)

    def _scaled(self, groups: list[tuple[str, ...]]) -> tuple[Tensor, Tensor] | None:
        """Scales [groups, R, columns] of joined parts and the row of scales of each of their rows, None for plain ones.

        Parts of one tensor share its scales; different ones lie one below the other.
        """
        if groups[0][0] not in self.quantized:
            return None
        layouts = [{s.tensor: s for s in map(self._scales, parts)} for parts in groups]
        offsets, scale_rows = {}, 0
        for name, scales in layouts[0].items():
            offsets[name] = scale_rows
            scale_rows += scales.rows
        columns = -(-self.shapes[groups[0][0]][1] // SCALE_COLUMNS)
        values = torch.empty(len(groups), scale_rows, columns, device=self.device)
        for group, layout in enumerate(layouts):
            start = 0
            for scales in layout.values():
                self.checkpoint.read_into(values[group, start : start + scales.rows], scales.tensor)
                self.progress(self.checkpoint.tensors[scales.tensor].stored_bytes)
                start += scales.rows
        maps = [_row_scale(self.located[part]) + offsets[self._scales(part).tensor] for part in groups[0]]
        return values, torch.cat(maps).to(self.device)

    def _scales(self, part: str) -> Scales:
        return _scales(self.located[part])

    def _matrix(self, *parts: str) -> Tensor:
        """One plain tensor, or several joined along their rows."""
        rows = sum(self.shapes[part][0] for part in parts)
        dtype = _stored_dtype(parts[0], self.dtype)
        joined = torch.empty(rows, *self.shapes[parts[0]][1:], dtype=dtype, device=self.device)
        start = 0
        for part in parts:
            stop = start + self.shapes[part][0]
            self._fill(joined[start:stop], part, 0, self._copy(part, dtype))
            start = stop
        return joined

    def _copy(self, canonical: str, dtype: torch.dtype) -> Copy:
        """How rows of a tensor are read into dtype."""
        scales = self.located[canonical].scales
        if scales is None or dtype is torch.float8_e4m3fn:
            return self.checkpoint.read_into
        values = self.checkpoint.read(scales.tensor).float()
        self.progress(self.checkpoint.tensors[scales.tensor].stored_bytes)
        return partial(self._dequantize_into, scales, values)

    def _fill(self, target: Tensor, canonical: str, begin: int, copy: Copy) -> None:
        """Read our rows from `begin` on into place, a bounded number of bytes at a time. Where rotary pairs are stored
        one after another, whole heads are read."""
        stored = self.located[canonical]
        info = self.checkpoint.tensors[stored.tensor]
        row_bytes = info.stored_bytes // info.shape[0]
        step = max(1, _CHUNK_BYTES // max(1, row_bytes))
        for ours, (first, last) in stored.pieces(begin, begin + target.shape[0]):
            for start in range(first, last, step):
                stop = min(last, start + step)
                at = ours - begin + start - first
                copy(target[at : at + stop - start], stored.tensor, start)
                self.progress((stop - start) * row_bytes)
        if self._is_interleaved(canonical):
            self._to_half_split(target, canonical)
        if self.spec.norm_offset and canonical.endswith("norm"):
            target += self.spec.norm_offset

    def _dequantize_into(self, scales: Scales, values: Tensor, target: Tensor, name: str, start: int) -> None:
        """fp8 that cannot stay: the embedding, or a part of a matrix whose other parts are plain."""
        rows = torch.arange(start, start + target.shape[0])
        codes = self.checkpoint.read(name, start, start + target.shape[0])
        matrix = BlockScaled(codes=codes, scales=values, row_scale=scales.row(rows).int())
        target.copy_(matrix.dequantize(target.dtype))

    def _to_half_split(self, target: Tensor, canonical: str) -> None:
        """Rows of each head are stored as rotary pairs (0, 1), (2, 3) ...; we pair i with i + D / 2."""
        paired = target.reshape(-1, self._head_dim(canonical) // 2, 2, *target.shape[1:])
        target.copy_(paired.transpose(1, 2).reshape(target.shape))

    def _is_interleaved(self, canonical: str) -> bool:
        return self.table.rope_interleaved and canonical.rsplit(".", 1)[-1] in ("q", "k", "q_bias", "k_bias")

    def _head_dim(self, canonical: str) -> int:
        kind, index, _ = canonical.split(".", 2)
        return (self.spec.layers if kind == "layers" else self.spec.mtp_layers)[int(index)].attention.head_dim


class _Budget:
    """Bytes that threads may hold at once. Whoever asks for more than all of them waits until he is alone."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0
        self.changed = threading.Condition()

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        with self.changed:
            self.changed.wait_for(lambda: self.taken_bytes == 0 or self.taken_bytes + count <= self.limit_bytes)
            self.taken_bytes += count
        try:
            yield
        finally:
            with self.changed:
                self.taken_bytes -= count
                self.changed.notify_all()


def _raise_first(futures: Sequence[Future[Any]]) -> None:
    """Wait for all, or raise what the first of them raised, whatever the others do."""
    for done in wait(futures, return_when=FIRST_EXCEPTION).done:
        done.result()


def _return_freed_memory() -> None:
    """What was freed stays with the process until glibc is asked to give it back; other allocators do it themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _quantized(located: Mapping[str, StoredRows]) -> set[str]:
    """Canonical names of what stays in codes: matrices to multiply by, all of whose parts and experts are fp8."""
    groups = defaultdict(list)
    for name in located:
        at, _, part = name.rpartition(".")
        if part in _MULTIPLIED:
            groups[re.sub(r"experts\.\d+$", "experts", at), _JOINED.get(part, part)].append(name)
    return {name for names in groups.values() if all(located[n].scales is not None for n in names) for name in names}


def _scales(stored: StoredRows) -> Scales:
    assert stored.scales is not None
    return stored.scales


def _row_scale(stored: StoredRows) -> Tensor:
    """int32 [rows]: which row of its tensor's scales each row has."""
    rows = torch.cat([torch.arange(first, last) for first, last in stored.spans])
    return _scales(stored).row(rows).int()
