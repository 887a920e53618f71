"""Where weights come from: one small interface over safetensors folders and GGUF files."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from server.errors import StartupError
from server.model.families.names import TensorNames
from server.model.gguf_file import GGUFFile
from server.model.safetensors_files import TensorInfo, read_header, read_index_metadata, weight_files

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}

_VIEW_BYTES = 2**20
_MAPPED_BYTES = 4 * 2**20
"""What is read of mapped files before they are opened anew."""
_MAPPED_BYTES_PER_TENSOR = 8 * 2**10
"""Opening parses the header, about 1 us for each tensor of the file: as long as reading a few KiB takes."""
_DEQUANTIZED_ELEMENTS = 2**17
"""What of a GGUF tensor is undone at a time: numpy makes several copies of it in fp32, which fit in a core's cache."""
_CODES, _SCALES = ".codes", ".scales"


class Checkpoint(Protocol):
    """Nothing of a tensor is read before it is asked for, and what was read leaves no pages behind. Several threads may
    read at once."""

    is_gguf: bool

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the index of a folder says about the whole."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) of a tensor on the CPU, in the stored dtype (GGUF: float32)."""
        ...

    def read_into(self, target: Tensor, name: str, start: int = 0) -> None:
        """Fill target with the rows from `start` on, in target's dtype and on its device."""
        ...

    def release(self) -> None:
        """Let go of what reading keeps, at the end of a load. More may be read later."""
        ...


class SafetensorsCheckpoint:
    """The safetensors files of a folder, see `weight_files`.

    The library maps a file, and pages of a mapping count as this process's memory for as long as it lives, so files are
    opened anew every few megabytes. A file that was cut short is refused when it is opened; if it is while it is
    mapped, the system ends the process (SIGBUS).
    """

    is_gguf = False

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        self._open: dict[Path, safe_open] = {}
        self._mapped_bytes = 0
        self._limit_bytes = _MAPPED_BYTES
        self._home: dict[str, Path] = {}
        self.tensors: dict[str, TensorInfo] = {}
        files = weight_files(folder)
        if not files:
            raise StartupError(f"{folder}: no .safetensors file is there")
        self.metadata = read_index_metadata(folder)
        for file in files:
            header = read_header(file)
            self._limit_bytes = max(self._limit_bytes, len(header) * _MAPPED_BYTES_PER_TENSOR)
            for name, info in header.items():
                if name in self._home:
                    raise StartupError(f"{file}: tensor {name} is already in {self._home[name].name}")
                self._home[name] = file
                self.tensors[name] = info

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        shape = self.tensors[name].shape
        if start or stop is not None:
            shape = (len(range(*slice(start, stop).indices(shape[0]))), *shape[1:])
        values = torch.empty(shape, dtype=self._dtype(name))
        self.read_into(values, name, start)
        return values

    def read_into(self, target: Tensor, name: str, start: int = 0) -> None:
        info, _ = self.tensors[name], self._dtype(name)
        if not info.shape:
            target.copy_(self._view(name, None, info.stored_bytes))
        elif target.numel():
            row_bytes = info.stored_bytes // info.shape[0]
            step = max(1, _VIEW_BYTES // row_bytes)
            for first in range(0, target.shape[0], step):
                part = target[first : first + step]
                rows = slice(start + first, start + first + part.shape[0])
                part.copy_(self._view(name, rows, part.shape[0] * row_bytes))

    def release(self) -> None:
        with self._lock:
            self._open.clear()
            self._mapped_bytes = 0

    def _dtype(self, name: str) -> torch.dtype:
        stored = self.tensors[name].dtype
        if stored not in DTYPES:
            raise StartupError(f"{self._home[name]}: tensor {name} is {stored}, which is not supported")
        return DTYPES[stored]

    def _view(self, name: str, rows: slice | None, count: int) -> Tensor:
        """`count` bytes of the mapped file, which stays mapped for as long as the view lives."""
        file = self._home[name]
        try:
            with self._lock:
                if self._mapped_bytes >= self._limit_bytes:
                    self._open.clear()
                    self._mapped_bytes = 0
                self._mapped_bytes += count
                if file not in self._open:
                    self._open[file] = safe_open(file, framework="pt")
                opened: Any = self._open[file]
            stored: Tensor = opened.get_tensor(name) if rows is None else opened.get_slice(name)[rows]
        except (OSError, SafetensorError) as error:
            raise StartupError(f"{file}: tensor {name} cannot be read: {error}") from error
        return stored


class GGUFCheckpoint:
    """Values are dequantized a bounded number of rows at a time, and the file's pages given back after each.

    Experts in mxfp4 are not: a tensor NAME of them appears as two of bytes, NAME.codes and NAME.scales.
    """

    is_gguf = True
    metadata: Mapping[str, Any] = {}

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.tensors = {
            name: TensorInfo(
                shape=tensor.shape, dtype=tensor.kind.name, stored_bytes=tensor.raw.nbytes, offset=tensor.offset
            )
            for name, tensor in file.tensors.items()
        }
        for name, tensor in file.tensors.items():
            if tensor.kind.name == "MXFP4" and len(tensor.shape) == 3:
                del self.tensors[name]
                for ending, columns in ((_CODES, tensor.shape[-1] // 2), (_SCALES, tensor.shape[-1] // 32)):
                    shape = (*tensor.shape[:-1], columns)
                    self.tensors[name + ending] = TensorInfo(
                        shape=shape, dtype="U8", stored_bytes=math.prod(shape), offset=tensor.offset
                    )

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        if name.endswith(_CODES):
            tensor = self._file.tensors[name.removesuffix(_CODES)]
            values = tensor.mxfp4_codes(start, stop)
        elif name.endswith(_SCALES):
            tensor = self._file.tensors[name.removesuffix(_SCALES)]
            values = tensor.mxfp4_scales(start, stop)
        else:
            tensor = self._file.tensors[name]
            values = tensor.dequantize(start, stop)
        if not values.flags.writeable:  # a view of the file
            values = values.copy()
        self._file.forget(tensor, start, stop)
        return torch.from_numpy(values)

    def read_into(self, target: Tensor, name: str, start: int = 0) -> None:
        tensor = self._file.tensors[name]
        if len(tensor.shape) != 2:
            target.copy_(self.read(name)[start : start + target.shape[0]])
            return
        step = max(1, _DEQUANTIZED_ELEMENTS // tensor.shape[1])
        for first in range(0, target.shape[0], step):
            part = target[first : first + step]
            part.copy_(self.read(name, start + first, start + first + part.shape[0]))

    def release(self) -> None:
        """Nothing: every read gives its pages back."""


def scales_of(name: str) -> str:
    """The name of an fp8 tensor's scales: weight -> weight_scale_inv."""
    return f"{name}_scale_inv"


def find_names(checkpoint: Checkpoint, canonical: list[str], names: TensorNames) -> dict[str, str]:
    """Canonical name -> checkpoint name; a StartupError names what is missing or what nothing reads.

    Several names may share one tensor, as q, k and v do in a fused projection; scales belong to their tensor.
    """
    present = checkpoint.tensors
    prefix = names.prefix_in(present.keys())
    found, missing = {}, []
    for name in canonical:
        candidates = names.candidates(name, prefix)
        match = next((candidate for candidate in candidates if candidate in present), None)
        if match is None:
            missing.append(candidates[0])
        else:
            found[name] = match
    if missing:
        raise StartupError(f"the checkpoint lacks {_listed(missing)}")
    used = {*found.values(), *map(scales_of, found.values())}
    unused = [name for name in present if name not in used and not names.is_ignored(name)]
    if unused:
        raise StartupError(f"the checkpoint has tensors that this model does not use: {_listed(unused)}")
    return found


def _listed(names: list[str], shown: int = 4) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}: {', '.join(names[:shown])}{more}"
