"""What a served model gives to every token of a text, and how far from fp32 a server in bf16 may be."""

from __future__ import annotations

from collections.abc import Sequence

import httpx
import torch
from torch import Tensor

from tests.processes import Served


def served_log_probabilities(served: Served, text: Sequence[int]) -> Tensor:
    """[T - 1] fp32: of each token after the first, given those before it, in requests of one token each. Which token it
    is decides a bias, which what is reported knows nothing of."""
    found = []
    with httpx.Client(timeout=60) as client:
        for position in range(1, len(text)):
            body = {
                "model": "m",
                "prompt": text[:position],
                "max_tokens": 1,
                "temperature": 0,
                "logprobs": 0,
                "logit_bias": {str(text[position]): 100},
            }
            response = client.post(f"{served.url}/v1/completions", json=body)
            assert response.status_code == 200, response.text
            (value,) = response.json()["choices"][0]["logprobs"]["token_logprobs"]
            found.append(value)
    return torch.tensor(found)


def log_probabilities(logits: Tensor, text: Sequence[int]) -> Tensor:
    """The same of logits [T, N]."""
    return torch.log_softmax(logits[:-1].float(), -1).gather(1, torch.tensor(text)[1:, None])[:, 0]


def check_bf16(ours: Tensor, reference: Tensor, exact: Tensor) -> None:
    """ours, reference: of a server and of a plain implementation whose every operation rounds to bf16; exact: fp32.

    bf16 has 8 significant bits, so one rounding moves a value by up to 2^-8 of itself, and what a model's hundred of
    them make of the answer the reference shows: some 5 x 2^-8 in the middle, ten times as much for the few tokens for
    which rounding changes the choice of experts. Ours may err as much, with a fifth more for chance, and in those few
    with half as much again.
    """
    errors, allowed = (ours - exact).abs(), (reference - exact).abs()
    assert allowed.median() <= 8 * 2**-8, "the reference does no more than round"
    for share in (0.5, 0.75, 0.9):
        assert errors.quantile(share) <= 1.2 * allowed.quantile(share), share
    assert _rms(errors) <= 1.5 * _rms(allowed), (_rms(errors), _rms(allowed))


def _rms(errors: Tensor) -> float:
    return errors.double().square().mean().sqrt().item()
