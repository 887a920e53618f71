"""What rounding a real model's matrices to int8 costs stays as small as docs/quantization.md says."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from bench.int8_loss import DEFAULT_TEXT, log_probabilities
from kernels.native.kernels import NativeKernels
from server.model.checkpoint import GGUFCheckpoint
from server.model.families import spec_from_gguf
from server.model.gguf_file import GGUFFile
from server.model.native_decoder import NativeDecoder
from server.model.weights import load_weights
from server.text.tokenizer import Tokenizer
from tests.native.conftest import MakeKernels


def test_the_text_that_is_scored_never_changes() -> None:
    """Or the figures of docs/quantization.md, and what the bounds below were chosen from, would move with it."""
    digest = hashlib.sha256(DEFAULT_TEXT.read_bytes()).hexdigest()
    assert digest == "52e1af0155a294c1c92231bc75b5b3cab745bbabc43f6a3e343224fbda2d0d2d"


@torch.inference_mode()
def test_int8_weights_move_a_real_models_text_by_little(smollm2_gguf: Path, make_kernels: MakeKernels) -> None:
    file = GGUFFile(smollm2_gguf)
    spec, checkpoint = spec_from_gguf(file), GGUFCheckpoint(file)
    text = DEFAULT_TEXT.read_text(encoding="utf-8")
    encoded = Tokenizer.from_gguf(file.metadata).encode(text, parse_special=False, add_bos=True)
    tokens = torch.tensor(encoded[:128])

    def scores(kernels: NativeKernels) -> torch.Tensor:
        weights = load_weights(spec, checkpoint, torch.bfloat16, pack=kernels.pack, embeds_from_head=True)
        return log_probabilities(spec, NativeDecoder(spec, weights, kernels), torch.bfloat16, tokens)

    plain, ours = scores(make_kernels(2)), scores(make_kernels(2, int8=True))
    divergence = (plain.exp() * (plain - ours)).sum(-1)
    said = tokens[1:, None]
    surprise = (plain[:-1].gather(1, said) - ours[:-1].gather(1, said)).mean()
    assert divergence.mean() < 0.015
    assert divergence.max() < 0.3
    assert surprise.abs() < 0.03
    assert (plain.argmax(-1) == ours.argmax(-1)).double().mean() > 0.88
