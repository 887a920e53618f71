"""The GGUF reader agrees with the gguf package and refuses damaged files with one line."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from server.errors import StartupError
from server.model.gguf_file import GGUFFile

KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Every value type, and a tensor of every type that the gguf package can write."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int64("a.i64", -(2**40))
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "grüße")
    writer.add_array("a.strings", ["x", "", "日本"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, 1.5])
    values = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    for kind in KINDS:
        data = gguf.quants.quantize(values, kind)
        writer.add_tensor(f"t.{kind.name}", data, raw_dtype=None if kind in (Kind.F32, Kind.F16) else kind)
    writer.add_tensor("vector", values[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_are_plain_values(small: Path) -> None:
    metadata = GGUFFile(small).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["a.u8"] == 200
    assert metadata["a.i64"] == -(2**40)
    assert metadata["a.f64"] == 0.1
    assert metadata["a.bool"] is True
    assert metadata["a.string"] == "grüße"
    assert metadata["a.strings"] == ["x", "", "日本"]
    assert metadata["a.ints"] == [1, -2, 3]
    assert metadata["a.floats"] == [0.5, 1.5]


def test_tensors_equal_the_packages_own(small: Path) -> None:
    file = GGUFFile(small)
    expected = {tensor.name: tensor for tensor in gguf.GGUFReader(small).tensors}
    assert file.tensors.keys() == expected.keys()
    for name, tensor in file.tensors.items():
        theirs = gguf.quants.dequantize(expected[name].data, expected[name].tensor_type).reshape(tensor.shape)
        assert np.array_equal(tensor.dequantize(), theirs)
        if len(tensor.shape) == 2:
            assert np.array_equal(tensor.dequantize(2, 5), theirs[2:5])


@pytest.mark.parametrize("kind", gguf.quants._type_traits, ids=lambda kind: kind.name)
def test_every_quantized_type_that_the_package_knows(tmp_path: Path, kind: Kind) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (3, 2 * size), dtype=np.uint8)
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = GGUFFile(path).tensors["t"]
    assert tensor.shape == (3, 2 * block)
    assert np.array_equal(tensor.raw, raw)
    with np.errstate(all="ignore"):
        assert np.array_equal(tensor.dequantize(), gguf.quants.dequantize(raw, kind), equal_nan=True)


def test_a_big_vocabulary_is_read_fast(gemma3_gguf: Path) -> None:
    start = time.perf_counter()
    file = GGUFFile(gemma3_gguf)
    assert time.perf_counter() - start < 2.0
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 262_144
    assert file.vocabulary_rows() == 262_144


def refused(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(StartupError) as caught:
        GGUFFile(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_damaged_files_are_refused_by_name(small: Path, tmp_path: Path) -> None:
    data, path = small.read_bytes(), tmp_path / "bad.gguf"
    assert "cannot be read" in refused(path, b"")
    assert "wrong magic" in refused(path, b"GGML" + data[4:])
    assert "version 1 is not supported" in refused(path, data[:4] + struct.pack("<I", 1) + data[8:])
    assert "version 50331648" in refused(path, data[:4] + struct.pack(">I", 3) + data[8:])
    assert "tensors do not fit" in refused(path, data[:8] + struct.pack("<Q", 2**60) + data[16:])
    assert "metadata keys do not fit" in refused(path, data[:16] + struct.pack("<Q", 2**40) + data[24:])
    assert "outside the file" in refused(path, data[:-64])
    with pytest.raises(StartupError, match="absent: cannot be read"):
        GGUFFile(tmp_path / "absent")


def test_every_truncation_is_refused(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    for length in [*range(0, 1400, 7), len(data) - 400]:
        refused(tmp_path / "cut.gguf", data[:length])


def test_flipped_bytes_never_crash(small: Path, tmp_path: Path) -> None:
    """Any damage to the header either still parses or is one StartupError; nothing is allocated for absurd counts."""
    data, path = small.read_bytes(), tmp_path / "fuzz.gguf"
    generator = random.Random(0)
    for _ in range(1500):
        damaged = bytearray(data)
        for _ in range(generator.randint(1, 3)):
            at = generator.randrange(1400)
            damaged[at] = generator.choice((0, 1, 9, 127, 255, generator.randrange(256)))
        path.write_bytes(damaged)
        try:
            file = GGUFFile(path)
        except StartupError as error:
            assert "\n" not in str(error)  # noqa: PT017
            continue
        for tensor in file.tensors.values():
            assert tensor.raw.nbytes <= len(data)
