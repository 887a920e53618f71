"""One set of weights in the formats that the servers read: a bf16 folder, a bf16 GGUF and a Q8_0 GGUF.

All three are made from the GGUF behind a short name: its blocks are undone once, to fp32, and rounded to the format, so
that no server runs other numbers than its neighbour. They are made once, in the cache folder, and checked as a whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.constants import GGUFValueType
from gguf.quants import dequantize, quantize

from server.model.checkpoint import GGUFCheckpoint, SafetensorsCheckpoint
from server.model.families import spec_from_config, spec_from_gguf
from server.model.gguf_file import GGUFFile
from server.model.json_file import read_json_object
from server.model.source import resolve
from server.model.spec import ModelSpec
from server.model.weights import load_weights

BF16 = GGMLQuantizationType.BF16
Q8_0 = GGMLQuantizationType.Q8_0
FILE_TYPE = {BF16: 32, Q8_0: 7}
"""general.file_type as llama.cpp numbers it: MOSTLY_BF16 and MOSTLY_Q8_0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The files of one model and the numbers that turn rates into bytes and FLOPs."""

    name: str
    hf_folder: Path
    bf16_gguf: Path
    q8_gguf: Path
    work: Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one token costs. body and head count the weights of the matrices that a token passes; embeddings are looked
    up, not multiplied, so a tied matrix counts once, as the head.

    layers: (heads, q/k head dim, v head dim, keys that a query sees or None for all) of each layer.
    """

    body: int
    head: int
    layers: tuple[tuple[int, int, int, int | None], ...]

    def decode_bytes(self, bytes_per_weight: float) -> float:
        """Weight bytes that one decode step of one stream reads. KV is left out: at 300 positions it is 1 to 5 %."""
        return (self.body + self.head) * bytes_per_weight

    def prefill_flop(self, tokens: int) -> float:
        """Multiply-adds count as two. Only the last position needs the head. Attention is q.k and p.v over the keys
        that are visible: half the square for a full layer, a band for a window layer."""
        pairs_full = tokens * (tokens + 1) / 2
        flop = 2.0 * self.body * tokens + 2.0 * self.head
        for heads, key_dim, value_dim, window in self.layers:
            hidden = 0 if window is None or window >= tokens else (tokens - window) * (tokens - window + 1) / 2
            flop += 2.0 * heads * (key_dim + value_dim) * (pairs_full - hidden)
        return flop


def work_of(spec: ModelSpec, file: GGUFFile) -> Work:
    matrices = {name: tensor.shape for name, tensor in file.tensors.items() if len(tensor.shape) == 2}
    head = matrices.get("output.weight", matrices["token_embd.weight"])
    body = sum(shape[0] * shape[1] for name, shape in matrices.items() if name.startswith("blk."))
    layers = tuple(
        (layer.attention.heads, layer.attention.head_dim, layer.attention.value_dim, layer.attention.window_keys)
        for layer in spec.layers
    )
    return Work(body=body, head=head[0] * head[1], layers=layers)


def prepare(name: str, cache: Path, *, say: Callable[[str], None] = print) -> Weights:
    """The three formats of a short name (or of a GGUF file) under `cache`/bench; what is there already is kept."""
    source = resolve(name, cache_folder=str(cache)).path
    folder = cache / "bench" / Path(name).stem
    weights = Weights(
        name=Path(name).stem,
        hf_folder=folder / "bf16",
        bf16_gguf=folder / "bf16.gguf",
        q8_gguf=folder / "q8_0.gguf",
        work=work_of(spec_from_gguf(file := GGUFFile(source)), file),
    )
    made: tuple[tuple[Path, Callable[[Path], None]], ...] = (
        (weights.hf_folder, lambda path: write_hf_folder(source, path)),
        (weights.bf16_gguf, lambda path: write_gguf(source, path, BF16)),
        (weights.q8_gguf, lambda path: write_gguf(source, path, Q8_0)),
    )
    folder.mkdir(parents=True, exist_ok=True)
    for target, make in made:
        if not target.exists():
            say(f"making {target}")
            _whole_or_not(target, make)
    return weights


def _whole_or_not(target: Path, make: Callable[[Path], None]) -> None:
    """A half-made target never has the target's name."""
    partial = target.with_name(f".{target.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.unlink(missing_ok=True)
    make(partial)
    partial.rename(target)


def write_hf_folder(source: Path, target: Path) -> None:
    """Config, tokenizer and bf16 safetensors, as transformers reads them out of the GGUF; then checked."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    # A model that came out of a GGUF file refuses to be saved, a new one with its tensors does not.
    fresh: Any = type(loaded)(config)
    fresh.load_state_dict(loaded.state_dict())
    fresh = fresh.to(torch.bfloat16)
    fresh.tie_weights()
    fresh.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
    check_hf_folder(source, target)


def check_hf_folder(source: Path, folder: Path) -> int:
    """Every tensor of the folder, as our loader reads it, is that of the GGUF rounded to bf16. Returns how many.

    Our loader knows how both name and permute their tensors and uses nothing of transformers, so the two ways are
    independent; that the GGUF side is gguf.quants.dequantize is checked too, tensor by tensor.
    """
    file = GGUFFile(source)
    for stored in GGUFReader(source).tensors:
        read = GGUFCheckpoint(file).read(stored.name)
        plain = dequantize(stored.data, stored.tensor_type).reshape(read.shape)
        if not np.array_equal(plain, read.numpy()):
            raise ValueError(f"{source}: {stored.name} is read otherwise than gguf.quants.dequantize reads it")
    expected_spec, found_spec = spec_from_gguf(file), spec_from_config(read_json_object(folder / "config.json"))
    if expected_spec.layers != found_spec.layers:
        raise ValueError(f"{folder}: config.json describes other layers than {source}")
    expected = tensors_of(load_weights(expected_spec, GGUFCheckpoint(file), torch.bfloat16))
    found = tensors_of(load_weights(found_spec, SafetensorsCheckpoint(folder), torch.bfloat16))
    if expected.keys() != found.keys():
        raise ValueError(f"{folder}: other tensors than {source}: {sorted(expected.keys() ^ found.keys())}")
    for name, tensor in expected.items():
        if not torch.equal(tensor.bfloat16(), found[name].bfloat16()):  # norms are loaded in fp32
            raise ValueError(f"{folder}: {name} is not that of {source}")
    return len(expected)


def tensors_of(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Every tensor inside nested dataclasses, tuples and dicts, by its path."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    if isinstance(value, (tuple, list)):
        inner = [(str(index), each) for index, each in enumerate(value)]
    elif isinstance(value, dict):
        inner = [(str(key), each) for key, each in value.items()]
    else:
        fields = getattr(type(value), "__dataclass_fields__", {})
        inner = [(name, getattr(value, name)) for name in fields]
    return {key: tensor for name, each in inner for key, tensor in tensors_of(each, f"{path}.{name}").items()}


def write_gguf(source: Path, target: Path, kind: GGMLQuantizationType) -> None:
    """The same model with its matrices in `kind`; vectors stay fp32, as llama.cpp's own converter leaves them."""
    reader = GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue  # the writer makes these itself
        sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    writer.add_file_type(FILE_TYPE[kind])
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape.tolist()))
        plain = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        if len(shape) < 2:
            writer.add_tensor(tensor.name, plain.astype(np.float32))
        else:
            # Q8_0 is made of what bf16 holds: both servers round the same numbers.
            rounded = dequantize(quantize(plain, BF16), BF16).reshape(shape)
            writer.add_tensor(tensor.name, quantize(rounded, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
