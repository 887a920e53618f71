"""Multi-token prediction in MiMo's chain: every layer is given the same hidden of the target, only the tokens move on.

Layer k at position i is given h_i and the token of i + 1 + k, and predicts that of i + 2 + k; RoPE's position stays i.
The released servers draft with these three layers one after another, so nothing else may be trained.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from server.model.spec import LayerSpec
from tools.train_tiny.layers import Layer, Rotations, matrix, norm_weight, rms_norm


class MTP(nn.Module):
    def __init__(self, hidden: int, spec: LayerSpec, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.enorm, self.hnorm, self.final_norm = (norm_weight(hidden) for _ in range(3))
        self.eh_proj = matrix(hidden, 2 * hidden)
        self.layer = Layer(hidden, spec, eps)

    def forward(self, embedded: Tensor, hidden: Tensor, rotations: Rotations) -> Tensor:
        """embedded [B, T, M] of the tokens that the layer is given, hidden [B, T, M] after the target's final norm ->
        [B, T, M] after the layer's final norm"""
        joined = torch.cat((rms_norm(embedded, self.enorm, self.eps), rms_norm(hidden, self.hnorm, self.eps)), -1)
        x = self.layer(F.linear(joined, self.eh_proj.to(joined.dtype)), rotations)
        return rms_norm(x, self.final_norm, self.eps)


def given_tokens(tokens: Tensor, k: int) -> Tensor:
    """tokens [B, T] -> those of i + 1 + k. The last positions have none and get 0: nothing before them sees that."""
    return F.pad(tokens[:, 1 + k :], (0, 1 + k))


def ahead(values: Tensor, count: int) -> Tensor:
    """values [B, T] -> those of i + count, and zeros where there are none."""
    return F.pad(values[:, count:], (0, count))
