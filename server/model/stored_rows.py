"""Where each tensor of a model lies in its checkpoint: whose rows they are, and which scales they have.

An fp8 matrix NAME (e4m3) has scales NAME_scale_inv [R, ceil(K / 128)], one for 128 x 128 codes; they multiply the codes
in spite of their name. R is not always ceil(N / 128): the grid can start anew at every head (MiMo-V2-Flash's k_proj) or
at every chunk of a fused tensor, so it is derived from the R that is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from server.errors import StartupError
from server.model.checkpoint import Checkpoint, find_names, scales_of
from server.model.families.names import TensorNames
from server.model.fused_qkv import SCALE_ROWS, FusedTensor, Span, choose_chunks, grid_rows, qkv_rows, spans
from server.model.safetensors_files import TensorInfo
from server.model.spec import AttentionSpec, ModelSpec

FP8 = "F8_E4M3"
SCALE_COLUMNS = 128
_SCALE_DTYPES = ("F32", "BF16")

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """A tensor of scales [rows, columns] whose grid of 128 rows starts anew every `period` rows of the codes."""

    tensor: str
    rows: int
    columns: int
    period: int

    def row(self, code_rows: Tensor) -> Tensor:
        """Which rows of scales belong to rows of the codes' tensor."""
        return code_rows // self.period * grid_rows(self.period, self.period) + code_rows % self.period // SCALE_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRows:
    """The rows of one tensor of ours: `spans` of the checkpoint's `tensor`, one after another."""

    tensor: str
    spans: tuple[Span, ...]
    scales: Scales | None = None

    @property
    def rows(self) -> int:
        return sum(stop - start for start, stop in self.spans)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Span]]:
        """Our rows [start, stop) in order, as (our first row, rows of the checkpoint's tensor)."""
        ours = 0
        for first, last in self.spans:
            begin, end = max(start, ours), min(stop, ours + last - first)
            if begin < end:
                yield begin, (first + begin - ours, first + end - ours)
            ours += last - first


def locate(
    spec: ModelSpec, shapes: Mapping[str, Shape], checkpoint: Checkpoint, table: TensorNames
) -> dict[str, StoredRows]:
    """Where all the tensors of `shapes` (canonical name -> shape) are.

    Raises StartupError that names missing, unused or misshapen tensors and scales. Nothing is read.
    """
    names = find_names(checkpoint, list(shapes), table)
    fused = {at: name for at, _ in _layers(spec) if (name := _fused_name(names, at)) is not None}
    located = _fused_rows(spec, fused, shapes, checkpoint) if fused else {}
    heads = dict(_layers(spec))
    for canonical, name in names.items():
        if canonical in located:
            continue
        info = checkpoint.tensors[name]
        _check_shape(name, info, shapes[canonical])
        at, _, part = canonical.rpartition(".")
        restarts = _head_dim(heads[at], part) if at in heads and part in ("q", "k", "v") else None
        located[canonical] = StoredRows(
            tensor=name,
            spans=((0, info.shape[0]),),
            scales=_scales(name, info, checkpoint, [info.shape[0], restarts or info.shape[0]]),
        )
    return located


def stored_tensors(located: Mapping[str, StoredRows]) -> set[str]:
    """The checkpoint's names of everything that is read, scales included."""
    names = {rows.tensor for rows in located.values()}
    return names | {rows.scales.tensor for rows in located.values() if rows.scales is not None}


def _layers(spec: ModelSpec) -> Iterator[tuple[str, AttentionSpec]]:
    for kind, layers in (("layers", spec.layers), ("mtp", spec.mtp_layers)):
        for index, layer in enumerate(layers):
            yield f"{kind}.{index}", layer.attention


def _fused_name(names: Mapping[str, str], at: str) -> str | None:
    parts = {names[f"{at}.{part}"] for part in ("q", "k", "v")}
    return parts.pop() if len(parts) == 1 else None


def _fused_rows(
    spec: ModelSpec, fused: Mapping[str, str], shapes: Mapping[str, Shape], checkpoint: Checkpoint
) -> dict[str, StoredRows]:
    attention = dict(_layers(spec))
    tensors = []
    for at, name in fused.items():
        info = checkpoint.tensors[name]
        rows = sum(qkv_rows(attention[at]).values())
        _check_shape(name, info, (rows, *shapes[f"{at}.q"][1:]))
        found = _scale_shape(name, info, checkpoint)
        tensors.append(FusedTensor(name=name, attention=attention[at], scale_rows=None if found is None else found[0]))
    full = [layer.attention.kv_heads for layer in spec.layers if not layer.is_window]
    chunks = choose_chunks(tensors, checkpoint.metadata, full[0] if full else spec.layers[0].attention.kv_heads)
    located = {}
    for at, name in fused.items():
        info = checkpoint.tensors[name]
        scales = _scales(name, info, checkpoint, [info.shape[0] // chunks])
        for part, chosen in spans(attention[at], chunks).items():
            located[f"{at}.{part}"] = StoredRows(tensor=name, spans=chosen, scales=scales)
    return located


def _head_dim(attention: AttentionSpec, part: str) -> int:
    return attention.value_dim if part == "v" else attention.head_dim


def _scale_shape(name: str, info: TensorInfo, checkpoint: Checkpoint) -> tuple[int, int] | None:
    """The shape of a tensor's scales, None for one without; refused if what is there is no scaled fp8 matrix."""
    scales = checkpoint.tensors.get(scales_of(name))
    if not info.dtype.startswith("F8"):
        if scales is not None:
            raise StartupError(f"tensor {name} is {info.dtype} and has scales, which only {FP8} has")
        return None
    if info.dtype != FP8:
        raise StartupError(f"tensor {name} is {info.dtype}; of the fp8 formats only {FP8} is supported")
    if scales is None:
        raise StartupError(
            f"tensor {name} is fp8 without {scales_of(name)}; only fp8 with a scale for 128 x 128 values is supported, "
            "not one scale for a tensor or a channel"
        )
    if scales.dtype not in _SCALE_DTYPES:
        raise StartupError(f"tensor {scales_of(name)} is {scales.dtype}, expected {' or '.join(_SCALE_DTYPES)}")
    columns = -(-math.prod(info.shape[1:]) // SCALE_COLUMNS)
    if len(info.shape) != 2 or len(scales.shape) != 2 or scales.shape[1] != columns:
        raise StartupError(
            f"tensor {scales_of(name)} has shape {list(scales.shape)}, expected {columns} columns for "
            f"{name} with shape {list(info.shape)}"
        )
    return scales.shape[0], columns


def _scales(name: str, info: TensorInfo, checkpoint: Checkpoint, periods: list[int]) -> Scales | None:
    """The scales of a tensor, with the first of `periods` that explains how many rows they have."""
    found = _scale_shape(name, info, checkpoint)
    if found is None:
        return None
    rows, columns = found
    for period in periods:
        if rows == grid_rows(info.shape[0], period):
            return Scales(tensor=scales_of(name), rows=rows, columns=columns, period=period)
    expected = " or ".join(str(count) for count in dict.fromkeys(grid_rows(info.shape[0], p) for p in periods))
    raise StartupError(
        f"tensor {scales_of(name)} has {rows} rows, expected {expected} for the {info.shape[0]} rows of {name}"
    )


def _check_shape(name: str, info: TensorInfo, expected: Shape) -> None:
    if info.shape != expected:
        raise StartupError(f"tensor {name} has shape {list(info.shape)}, expected {list(expected)}")
