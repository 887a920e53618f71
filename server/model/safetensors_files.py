"""Which safetensors files hold a model, and what their headers say. Loads without torch.

Format of a file: the header's length as 8 bytes, little-endian, the JSON header, then the data that its offsets count
from, without holes and to the end of the file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.errors import StartupError
from server.model.json_file import read_json_object

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")

ELEMENT_BYTES = {
    "BOOL": 1,
    **dict.fromkeys(("U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """shape in torch order; dtype as the file spells it (BF16, F8_E4M3; GGUF: Q4_K); stored_bytes is what reading the
    whole tensor reads, from byte `offset` of the file on."""

    shape: tuple[int, ...]
    dtype: str
    stored_bytes: int
    offset: int


def weight_files(folder: Path) -> list[Path]:
    """The files that must be there: what the index says, model.safetensors, or every shard of a series begun here.

    Empty if the folder holds none of these. Whether the files exist is not looked at.
    """
    if (folder / _INDEX).is_file():
        return [folder / name for name in _index_names(folder / _INDEX)]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    wanted: set[str] = set()
    for file in folder.glob("*.safetensors"):
        if file.name.startswith("consolidated"):
            continue  # the same weights again under their trainer's names
        wanted.add(file.name)
        if shard := _SHARD.fullmatch(file.name):
            count = int(shard["count"])
            wanted |= {f"{shard['stem']}-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)}
    return [folder / name for name in sorted(wanted)]


def read_header(file: Path) -> Mapping[str, TensorInfo]:
    """Names and sizes of a file's tensors without touching data.

    A file that is not exactly as long as its header says is refused: a download was cut short, or two were mixed up.
    """
    try:
        size_bytes = file.stat().st_size
        with file.open("rb") as handle:
            start = handle.read(8)
            refuse_pointer(file, start)
            header_bytes = int.from_bytes(start, "little")
            if len(start) < 8 or header_bytes > size_bytes - 8:
                raise StartupError(f"{file} is cut short or no safetensors file ({size_bytes} bytes)")
            header = json.loads(handle.read(header_bytes))
        header.pop("__metadata__", None)
        tensors = {
            name: TensorInfo(
                shape=tuple(map(int, entry["shape"])),
                dtype=str(entry["dtype"]),
                stored_bytes=int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]),
                offset=8 + header_bytes + int(entry["data_offsets"][0]),
            )
            for name, entry in header.items()
        }
        data_bytes = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except OSError as error:
        raise StartupError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError):
        raise StartupError(f"{file} has no valid safetensors header") from None
    for name, info in tensors.items():
        element_bytes = ELEMENT_BYTES.get(info.dtype)  # of a dtype that we do not know nothing is read
        wanted = info.stored_bytes if element_bytes is None else math.prod(info.shape) * element_bytes
        if min(info.shape, default=0) < 0 or info.offset < 8 + header_bytes or info.stored_bytes != wanted:
            raise StartupError(
                f"{file}: tensor {name} has {info.stored_bytes} bytes at {info.offset} for {info.dtype} "
                f"{list(info.shape)}: the header is damaged"
            )
    expected = 8 + header_bytes + data_bytes
    if size_bytes != expected:
        raise StartupError(f"{file} has {size_bytes} bytes where its header says {expected}: fetch it again")
    return tensors


def refuse_pointer(path: Path, start: bytes) -> None:
    """Git LFS leaves a small text file where the real one was not fetched."""
    if start.startswith(b"version "):
        raise StartupError(f"{path} is a Git LFS pointer, not the file itself; fetch it with: git lfs pull")


def read_index_metadata(folder: Path) -> Mapping[str, Any]:
    """What the index says about the whole, beside which tensor is where; empty without one."""
    index = folder / _INDEX
    metadata = read_json_object(index).get("metadata") if index.is_file() else None
    return metadata if isinstance(metadata, dict) else {}


def _index_names(index: Path) -> list[str]:
    content = read_json_object(index)
    try:
        names = sorted(set(content["weight_map"].values()))
        outside = [name for name in names if Path(name).name != name]
    except (KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"{index} is not an index of weights ({type(error).__name__}: {error})") from None
    if not names:
        raise StartupError(f"{index} is not an index of weights (it names no file)")
    if outside:
        raise StartupError(f"{index} names a file outside its folder: {outside[0]}")
    return names
