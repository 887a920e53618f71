"""Where weights come from: one small interface over safetensors folders and GGUF files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from server.errors import StartupError
from server.model.families.names import TensorNames
from server.model.gguf_file import GGUFFile

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """shape in torch order; stored_bytes is what reading the whole tensor reads from the file."""

    shape: tuple[int, ...]
    stored_bytes: int


class Checkpoint(Protocol):
    """Read-only and memory-mapped: nothing is read before `read` asks for it."""

    is_gguf: bool

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) of a tensor on the CPU, in the stored dtype (GGUF: float32)."""
        ...


class SafetensorsCheckpoint:
    """A folder with shards named by model.safetensors.index.json, with model.safetensors, or with other such files."""

    is_gguf = False

    def __init__(self, folder: Path) -> None:
        self._files = _shards(folder)
        self._handles: dict[Path, Any] = {}
        self._home: dict[str, Path] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for file in self._files:
            for name, info in _safetensors_header(file).items():
                if name in self._home:
                    raise StartupError(f"{file}: tensor {name} is already in {self._home[name].name}")
                self._home[name] = file
                self.tensors[name] = info

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        file = self._home[name]
        try:
            if file not in self._handles:
                self._handles[file] = safe_open(file, framework="pt")
            handle = self._handles[file]
            if start == 0 and stop is None:
                whole: Tensor = handle.get_tensor(name)
                return whole
            part: Tensor = handle.get_slice(name)[start:stop]
            return part
        except (SafetensorError, OSError) as error:
            raise StartupError(f"{file}: tensor {name} cannot be read: {error}") from error


class GGUFCheckpoint:
    is_gguf = True

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.tensors = {
            name: TensorInfo(shape=tensor.shape, stored_bytes=tensor.raw.nbytes)
            for name, tensor in file.tensors.items()
        }

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        tensor = self._file.tensors[name]
        values = tensor.dequantize(start, stop)
        return torch.from_numpy(values if values.flags.writeable else values.copy())


def find_names(checkpoint: Checkpoint, canonical: list[str], names: TensorNames) -> dict[str, str]:
    """Canonical name -> checkpoint name; a StartupError names what is missing or what nothing reads."""
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
    used = set(found.values())
    unused = [name for name in present if name not in used and not names.is_ignored(name)]
    if unused:
        raise StartupError(f"the checkpoint has tensors that this model does not use: {_listed(unused)}")
    return found


def _listed(names: list[str], shown: int = 4) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}: {', '.join(names[:shown])}{more}"


def _shards(folder: Path) -> list[Path]:
    index_file = folder / _INDEX
    if not index_file.exists():
        if (folder / _SINGLE).exists():
            return [folder / _SINGLE]
        # "consolidated" files hold the same weights again under their trainer's names.
        files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))
        if not files:
            raise StartupError(f"{folder}: no .safetensors file is there")
        return files
    try:
        index = json.loads(index_file.read_text())
        shards = sorted(set(index["weight_map"].values()))
        missing = [shard for shard in shards if not (folder / shard).is_file()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"{index_file}: not a safetensors index: {error!r}") from error
    if missing:
        raise StartupError(f"{folder}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing[:4])}")
    return [folder / shard for shard in shards]


def _safetensors_header(file: Path) -> dict[str, TensorInfo]:
    """Names and shapes without touching data: 8 bytes of header length, then JSON (the safetensors format)."""
    try:
        with file.open("rb") as handle:
            size = file.stat().st_size
            length = int.from_bytes(handle.read(8), "little")
            if length > size - 8:
                raise ValueError(f"its header of {length} bytes does not fit in the file")
            header = json.loads(handle.read(length))
        tensors = {
            name: TensorInfo(
                shape=tuple(entry["shape"]), stored_bytes=entry["data_offsets"][1] - entry["data_offsets"][0]
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
        last = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        if 8 + length + last > size:
            raise ValueError(f"it is truncated: {size} of {8 + length + last} bytes")
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise StartupError(f"{file}: not a readable safetensors file: {error}") from error
    return tensors
