"""Which kernels a start on a processor gets, and what it is told when it cannot have those it asked for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.native.kernels import NativeKernels
from server import assemble
from server.config import CacheConfig, ModelConfig, SchedulerConfig, ServeConfig
from server.errors import StartupError
from server.model.source import resolve
from tests.model.folders import write_companions, write_tokenizer, write_xiaomi


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_xiaomi(folder, torch_dtype="bfloat16")
    write_tokenizer(folder)
    write_companions(folder)
    return folder


def describe(folder: Path, cache: Path, *, kernels: str = "auto", **model: Any) -> assemble.Model:
    config = ServeConfig(
        model=ModelConfig(model=str(folder), cache_folder=str(cache), **model),
        cache=CacheConfig(kv_bytes=64 * 2**20),
        scheduler=SchedulerConfig(max_sequences=4),
        device="cpu",
        kernels=kernels,  # type: ignore[arg-type]
    )
    return assemble.describe(config, resolve(str(folder), cache_folder="/nonexistent"))


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_auto_takes_torch_and_warns_once(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "twinpane"):
        model = describe(folder, tmp_path)
    assert not isinstance(model.kernels, NativeKernels)
    warnings = [record.getMessage() for record in caplog.records if "native_kernels" in record.getMessage()]
    assert len(warnings) == 1
    assert "install gcc" in warnings[0]


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    ("asked", "flag"),
    [
        ({"kernels": "native"}, "--kernels native"),
        ({"quantization": "int8"}, "--quantization int8"),
        ({"kernels": "native", "quantization": "int8"}, "--quantization int8"),
    ],
)
def test_without_a_compiler_what_needs_one_is_refused(
    folder: Path, tmp_path: Path, asked: dict[str, str], flag: str
) -> None:
    missing = "no C compiler: install gcc, or name another with --c-compiler or CC"
    with pytest.raises(StartupError, match=f"{flag}.*{missing}") as raised:
        describe(folder, tmp_path, **asked)
    assert "\n" not in str(raised.value)


def test_native_kernels_are_refused_where_they_cannot_compute(folder: Path, tmp_path: Path) -> None:
    for dtype in ("float32", "float16"):
        for asked in ({"kernels": "native"}, {"quantization": "int8"}):
            with pytest.raises(StartupError, match=f"they compute in bfloat16, not in {dtype}; add --dtype bfloat16"):
                describe(folder, tmp_path, dtype=dtype, **asked)
    with pytest.raises(StartupError, match="--quantization int8 needs the native kernels: leave out --kernels torch"):
        describe(folder, tmp_path, kernels="torch", quantization="int8")


@pytest.mark.parametrize("library_path", ["this-processor"], indirect=True)
def test_with_a_compiler_auto_is_native_and_compiled_below_the_cache(
    folder: Path, tmp_path: Path, library_path: Path
) -> None:
    (tmp_path / "kernels").symlink_to(library_path.parent)
    model = describe(folder, tmp_path)
    assert isinstance(model.kernels, NativeKernels)
    assert model.dtype is torch.bfloat16
    assert not isinstance(describe(folder, tmp_path, kernels="torch").kernels, NativeKernels)
    int8 = describe(folder, tmp_path, quantization="int8")
    assert isinstance(int8.kernels, NativeKernels) and int8.kernels.int8
    assert int8.memory.weight_bytes < model.memory.weight_bytes
