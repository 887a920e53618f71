"""A folder as Xiaomi publishes V2.5, fp8 and fused, served as a process: the answers of the same values in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer

from tests.e2e.scoring import check_bf16, log_probabilities, served_log_probabilities
from tests.model.checkpoints import load_folder, write_checkpoint
from tests.model.folders import VOCAB, write_companions, write_tokenizer
from tests.model.paged import PagedSequences
from tests.model.stored_forms import FP8_CONFIG, V25_CONFIG, exact_tensors, fused_fp8
from tests.processes import ROOT, serving

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


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_fp8_is_served_by_whatever_the_processor_has(folders: tuple[Path, Path], tmp_path: Path, kernels: str) -> None:
    """In bf16, by the C kernels and by torch's: what they give to each of 150 tokens is as near to the plain values
    in fp32 as the plain values in bf16 are, run by the reference."""
    plain, fp8 = folders
    text = Tokenizer.from_file(str(plain / "tokenizer.json")).encode((ROOT / "LICENSE").read_text("utf-8")).ids[:150]
    with serving(
        fp8, tmp_path / "log", "--served-model-name", "m", "--dtype", "bfloat16", "--kernels", kernels
    ) as served:
        ours = served_log_probabilities(served, text)
        assert served.stop() == 0, served.output()
    exact, rounded = (in_process(plain, text, dtype) for dtype in (torch.float32, torch.bfloat16))
    check_bf16(ours, rounded, exact)


def test_the_bound_on_bf16_tells_rounding_from_one_wrong_scale(folders: tuple[Path, Path]) -> None:
    plain, fp8 = folders
    text = Tokenizer.from_file(str(plain / "tokenizer.json")).encode((ROOT / "LICENSE").read_text("utf-8")).ids[:150]
    exact, rounded = (in_process(plain, text, dtype) for dtype in (torch.float32, torch.bfloat16))
    check_bf16(in_process(fp8, text, torch.bfloat16), rounded, exact)
    tensors = fused_fp8(exact_tensors(CONFIG), CONFIG, 4)
    scales = tensors["model.layers.1.self_attn.qkv_proj.weight_scale_inv"]
    scales[0, 0] *= 2
    write_checkpoint(fp8, PUBLISHED, tensors)
    with pytest.raises(AssertionError):
        check_bf16(in_process(fp8, text, torch.bfloat16), rounded, exact)


def in_process(folder: Path, text: list[int], dtype: torch.dtype) -> torch.Tensor:
    spec, weights = load_folder(folder, dtype=dtype)
    sequences = PagedSequences(spec, weights, tokens=256, dtype=dtype)
    return log_probabilities(sequences.step([(0, text)])[0], text)
