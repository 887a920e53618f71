"""Element-wise passes, each compiled into one loop.

Between the products of so small a model torch spends more time on these than on the products: the backward of one norm
is eight passes over memory, and one when compiled (2.1 and 0.1 core-microseconds a token, 192 wide). `compile_passes`
needs a C++ compiler and half a minute; without it the same functions run as they are.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import config as dynamo
from torch.fx.experimental import _config as shapes

PRODUCTS_KEPT = 65_536
"""Products of bf16 are compiled for their sizes, in half a millisecond each. oneDNN keeps 1,024 of them unless told,
and batches of all lengths have more: with room for all of them training is 1.4 times as fast."""


def norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [T, M] -> normed [T, M], and 1 / rms [T, 1] fp32"""
    wide = x.float()
    inverse = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * inverse * weight).to(x.dtype), inverse


def norm_backward(gradient: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """For x and for the weight"""
    normed, wide = x.float() * inverse, gradient.float()
    for_weight = (wide * normed).sum(0)
    wide = wide * weight
    shift = (wide * normed).mean(-1, keepdim=True)
    return ((wide - normed * shift) * inverse).to(x.dtype), for_weight


def glu_forward(inner: Tensor) -> Tensor:
    """[T, 2W] -> [T, W]"""
    gate, up = inner.chunk(2, -1)
    return (F.silu(gate.float()) * up).to(inner.dtype)


def glu_backward(gradient: Tensor, inner: Tensor) -> Tensor:
    gate, up = inner.float().chunk(2, -1)
    wide, sigmoid = gradient.float(), gate.sigmoid()
    for_gate = wide * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((for_gate, wide * gate * sigmoid), -1).to(inner.dtype)


def rotate(qk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """qk [B, T, H, D], cos and sin [T, 1, rotary_dim / 2]: its first dims turned, half-split. -sin turns them back."""
    half = cos.shape[-1]
    first, second, rest = qk[..., :half], qk[..., half : 2 * half], qk[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logits [R, N], targets and weights [R] -> the weighted sum, which rows' largest logit is the target's, and the
    gradient of the sum [R, N]"""
    wide = logits.float()
    largest = wide.amax(-1, keepdim=True)
    exponents = (wide - largest).exp()
    total = exponents.sum(-1, keepdim=True)
    wanted = wide.gather(-1, targets[:, None])
    loss = ((total.log() + largest - wanted)[:, 0] * weights).sum()
    is_target = torch.arange(logits.shape[1])[None] == targets[:, None]
    gradient = (exponents / total - is_target.float()) * weights[:, None]
    return loss, (wanted >= largest)[:, 0], gradient.to(logits.dtype)


def softmax_backward(gradient: Tensor, shares: Tensor) -> Tensor:
    """Both [rows, keys]"""
    wide = gradient.float() * shares
    return (wide - shares * wide.sum(-1, keepdim=True)).to(shares.dtype)


def keep_products() -> None:
    """For the rest of the process, before its first product."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(PRODUCTS_KEPT))


def compile_passes() -> None:
    """For the rest of the process. A size that changes from step to step becomes a symbol the first time it does, and
    sizes that are equal by chance are different ones. A pass that is compiled too often raises: it would run as it is.
    """
    shapes.use_duck_shape = False
    dynamo.recompile_limit = 32
    dynamo.fail_on_recompile_limit_hit = True
    module: dict[str, Any] = globals()
    for name in (
        "norm_forward",
        "norm_backward",
        "glu_forward",
        "glu_backward",
        "rotate",
        "cross_entropy",
        "softmax_backward",
    ):
        module[name] = torch.compile(module[name])
