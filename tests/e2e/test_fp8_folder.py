"""A folder as Xiaomi publishes V2.5, fp8 and fused, served as a process: the answers of the same values in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.model.checkpoints import write_checkpoint
from tests.model.folders import VOCAB, write_companions, write_tokenizer
from tests.model.stored_forms import FP8_CONFIG, V25_CONFIG, exact_tensors, fused_fp8
from tests.processes import serving

CONFIG = {**V25_CONFIG, "vocab_size": VOCAB}
PUBLISHED = {**CONFIG, "attention_projection_layout": "fused_qkv", "quantization_config": FP8_CONFIG}
PROMPT = "You may reproduce and distribute copies of the Work or Derivative Works thereof in any medium"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    plain, fp8 = tmp_path / "plain", tmp_path / "fp8"
    tensors = exact_tensors(CONFIG)
    for folder in (plain, fp8):
        folder.mkdir()
        write_tokenizer(folder)
        write_companions(folder)
    write_checkpoint(plain, CONFIG, tensors)
    write_checkpoint(fp8, PUBLISHED, fused_fp8(tensors, CONFIG, 4))
    return plain, fp8


def answer(folder: Path, log: Path, *flags: str) -> dict[str, Any]:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "logprobs": 3}
    with serving(folder, log, "--served-model-name", "m", "--max-num-seqs", "2", *flags) as served:
        found: dict[str, Any] = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json()
        assert served.stop() == 0, served.output()
    choice: dict[str, Any] = found["choices"][0]
    return choice


def test_fp8_and_fused_is_served_as_the_same_values_in_fp32(folders: tuple[Path, Path], tmp_path: Path) -> None:
    plain, fp8 = folders
    expected = answer(plain, tmp_path / "plain.log", "--dtype", "float32")
    assert len(expected["text"]) > 10
    assert answer(fp8, tmp_path / "fp8.log", "--dtype", "float32") == expected


def test_fp8_is_served_by_whatever_the_processor_has(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """The default backend computes in bf16; what it must not do is stop, or say something else at once."""
    plain, fp8 = folders
    ours, same_format = answer(fp8, tmp_path / "fp8.log"), answer(plain, tmp_path / "plain.log", "--dtype", "bfloat16")
    ours_first, their_first = (choice["logprobs"]["token_logprobs"][0] for choice in (ours, same_format))
    assert ours_first == pytest.approx(their_first, abs=0.3)
