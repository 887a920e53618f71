"""Where weights come from: one small interface over safetensors folders and GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from server.errors import StartupError
from server.model.families.names import TensorNames
from server.model.gguf_file import GGUFFile
from server.model.safetensors_files import TensorInfo, read_header, weight_files


class Checkpoint(Protocol):
    """Read-only and memory-mapped: nothing is read before `read` asks for it."""

    is_gguf: bool

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) of a tensor on the CPU, in the stored dtype (GGUF: float32)."""
        ...


class SafetensorsCheckpoint:
    """The safetensors files of a folder, see `weight_files`."""

    is_gguf = False

    def __init__(self, folder: Path) -> None:
        self._handles: dict[Path, Any] = {}
        self._home: dict[str, Path] = {}
        self.tensors: dict[str, TensorInfo] = {}
        files = weight_files(folder)
        if not files:
            raise StartupError(f"{folder}: no .safetensors file is there")
        for file in files:
            for name, info in read_header(file).items():
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
