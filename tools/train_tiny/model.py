"""The network of `server.model.decoder` once more, for training: whole sequences in one forward, with gradients.

It is built from the same `ModelSpec`, so the shape that is trained is the shape that is served. Shape letters as in
`server.model.spec`, with B sequences of T tokens each. Weights are fp32; matrices are multiplied in the dtype that the
forward is given: on processors with AVX512-BF16, bf16 is twice to three times as fast, and serving rounds the same way.
Inside norms, softmax and loss, and in the router, it is fp32, as when serving.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from server.model.decoder import frequencies
from server.model.spec import ModelSpec
from tools.train_tiny.layers import Layer, MoE, Rotations, RouterLoad, matrix, norm_weight, rms_norm
from tools.train_tiny.mtp import MTP, given_tokens


class Network(nn.Module):
    """T must be a multiple of `block`: window layers work in blocks of their window. Padding goes to the end, where
    nothing sees it."""

    def __init__(self, spec: ModelSpec, *, seed: int) -> None:
        super().__init__()
        self.spec = spec
        self.block = max(1, spec.window_tokens)
        self.embedding, self.head = matrix(spec.vocab, spec.hidden), matrix(spec.vocab, spec.hidden)
        self.layers = nn.ModuleList(Layer(spec.hidden, layer, spec.norm_eps) for layer in spec.layers)
        self.final_norm = norm_weight(spec.hidden)
        self.mtp = nn.ModuleList(MTP(spec.hidden, layer, spec.norm_eps) for layer in spec.mtp_layers)
        self._frequencies = {
            rope: frequencies(rope) for rope in {layer.attention.rope for layer in (*spec.layers, *spec.mtp_layers)}
        }
        self._start(seed)

    def forward(self, tokens: Tensor, *, dtype: torch.dtype = torch.float32, load: RouterLoad | None = None) -> Tensor:
        """tokens [B, T] int64 -> hidden [B, T, M] after the final norm"""
        x = F.embedding(tokens, self.embedding).to(dtype)
        rotations = self._rotations(tokens.shape[1], dtype)
        for layer in self.layers:
            x = layer(x, rotations, load)
        return rms_norm(x, self.final_norm, self.spec.norm_eps)

    def draft(self, k: int, tokens: Tensor, hidden: Tensor, *, layer: int | None = None) -> Tensor:
        """The hidden [B, T, M] that predicts the token of i + 2 + k at position i; by MTP layer k unless told."""
        embedded = F.embedding(given_tokens(tokens, k), self.embedding).to(hidden.dtype)
        module = self.mtp[k if layer is None else layer]
        return module(embedded, hidden, self._rotations(tokens.shape[1], hidden.dtype))  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., M] -> [..., N] fp32"""
        return F.linear(hidden, self.head.to(hidden.dtype)).float()

    def routers(self) -> Iterator[MoE]:
        return (layer.mlp for layer in self.layers if isinstance(layer.mlp, MoE))

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def _rotations(self, count: int, dtype: torch.dtype) -> Rotations:
        positions = torch.arange(count, dtype=torch.float32)[:, None, None]
        angles = {rope: positions * per_position for rope, per_position in self._frequencies.items()}
        return {rope: (angle.cos().to(dtype), angle.sin().to(dtype)) for rope, angle in angles.items()}

    @torch.no_grad()
    def _start(self, seed: int) -> None:
        """Matrices N(0, 1 / columns), those that write to the residual stream divided by the root of how many do, as
        in GPT-2. Embeddings of the size that the stream then grows to; a head that begins undecided."""
        generator = torch.Generator().manual_seed(seed)
        writers = 2 * max(1, len(self.layers))
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            spread = 0.5 if name == "embedding" else parameter.shape[-1] ** -0.5
            if name.endswith((".o", ".down", "head")):
                spread /= math.sqrt(writers)
            parameter.normal_(0.0, spread, generator=generator)
