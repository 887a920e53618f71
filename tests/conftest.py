"""Fixtures shared by all rooms: the two real models whose weights Python packages ship."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from kernels.native.build import BuildError, build
from server.config import ModelConfig
from server.model.source import resolve
from tests.processes import Served, serving

MODELS_CACHE = ModelConfig().cache_folder


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, byte-level BPE."""
    return resolve("smollm2-135m", cache_folder=MODELS_CACHE).path


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M (base), Q4_K_M, SentencePiece vocabulary: a real hybrid sliding-window model."""
    return resolve("gemma3-270m", cache_folder=MODELS_CACHE).path


@pytest.fixture(scope="session")
def kernels_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the C kernels, compiled for this processor."""
    folder = tmp_path_factory.mktemp("kernels")
    try:
        build(folder)
    except BuildError as error:
        if "install gcc" in str(error):
            pytest.skip(str(error))
        raise
    return folder


@pytest.fixture(scope="session")
def smollm2_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """SmolLM2 in fp32 in a process of its own, shared by tests that leave it as they found it; it must end cleanly."""
    log = tmp_path_factory.mktemp("serve") / "smollm2.log"
    with serving("smollm2-135m", log, "--dtype", "float32", "--max-num-seqs", "16") as served:
        yield served
        assert served.stop() == 0, served.output()
        assert "Traceback" not in served.output()
