"""Causal attention over whole sequences, full and windowed with sinks, in block-sized products.

torch's own CPU kernel wants equal dims of k and v, takes no sinks and no window, and is slower in bf16 than these
products (41 against 33 core-microseconds a token, forward and backward, at 2,048 tokens), so both are written out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from server.model.spec import AttentionSpec
from tools.train_tiny import passes

Rotation = tuple[Tensor, Tensor]
"""cos and sin [T, 1, rotary_dim / 2]"""

QUERY_BLOCK = 256
"""Queries of a full layer that are multiplied at once: more of them waste products above the diagonal, fewer calls."""
SINK_COLUMNS = 8
"""Columns of a window's scores that stand for the sink. One would do, but then no row of scores were aligned."""


def attention(qkv: Tensor, sinks: Tensor | None, rotation: Rotation, spec: AttentionSpec) -> Tensor:
    """qkv [B, T, H * D + K * D + K * V] as projected -> [B, T, H * V]. The scale of v is left to the caller.

    sinks [H]: a logit that joins the softmax and has no value. Without a window there are none.
    """
    cos, sin = rotation
    if spec.window_keys is None:
        assert sinks is None
        return _Full.apply(qkv, cos, sin, spec)  # type: ignore[no-any-return]
    block = spec.window_keys - 1
    assert qkv.shape[1] % block == 0, f"{qkv.shape[1]} tokens are no whole number of blocks of {block}"
    return _Window.apply(qkv, sinks, cos, sin, spec)  # type: ignore[no-any-return]


def _rotated(qkv: Tensor, cos: Tensor, sin: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, K, G, T, D] by KV head and the query heads of its group, k [B, K, T, D], v [B, K, T, V]: views"""
    heads = spec.heads + spec.kv_heads
    qk = passes.rotate(qkv[..., : heads * spec.head_dim].unflatten(2, (heads, spec.head_dim)), cos, sin)
    q = qk[:, :, : spec.heads].unflatten(2, (spec.kv_heads, -1)).permute(0, 2, 3, 1, 4)
    v = qkv[..., heads * spec.head_dim :].unflatten(2, (spec.kv_heads, spec.value_dim))
    return q, qk[:, :, spec.heads :].transpose(1, 2), v.transpose(1, 2)


def _unrotated(for_q: Tensor, for_k: Tensor, for_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of `_rotated`, from gradients in the shapes that it gives."""
    for_qk = torch.cat((for_q.permute(0, 3, 1, 2, 4).flatten(2, 3), for_k.transpose(1, 2)), 2)
    return torch.cat((passes.rotate(for_qk, cos, -sin).flatten(2), for_v.transpose(1, 2).flatten(2)), 2)


def _softmax_backward(gradient: Tensor, shares: Tensor) -> Tensor:
    return passes.softmax_backward(gradient.flatten(0, 1), shares.flatten(0, 1)).view_as(shares)


def _above_diagonal(size: int, dtype: torch.dtype) -> Tensor:
    return torch.full((size, size), -torch.inf, dtype=dtype).triu_(1)


class _Full(torch.autograd.Function):
    """Blocks of queries against all keys up to their end. The queries of a group of heads are rows of one product."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, spec: AttentionSpec) -> Tensor:
        q, k, v = _rotated(qkv, cos, sin, spec)
        batch, kv_heads, group, count, _ = q.shape
        q = q * spec.scale
        k, v = k.flatten(0, 1), v.flatten(0, 1)  # [B * K, T, D]
        out = v.new_empty(batch, kv_heads, group, count, spec.value_dim)
        above = _above_diagonal(min(QUERY_BLOCK, count), q.dtype)
        shares = []
        for start in range(0, count, QUERY_BLOCK):
            stop = min(count, start + QUERY_BLOCK)
            rows = q[..., start:stop, :].reshape(batch * kv_heads, -1, spec.head_dim)
            scores = rows @ k[:, :stop].transpose(1, 2)
            scores.view(-1, group, stop - start, stop)[..., start:] += above[: stop - start, : stop - start]
            share = scores.softmax(-1)
            out[..., start:stop, :] = (share @ v[:, :stop]).view(batch, kv_heads, group, -1, spec.value_dim)
            shares.append(share)
        ctx.save_for_backward(q, k, v, cos, sin, *shares)
        ctx.scale = spec.scale
        return out.permute(0, 3, 1, 2, 4).flatten(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, cos, sin, *shares = ctx.saved_tensors
        batch, kv_heads, group, count, dim = q.shape
        gradients = gradient.unflatten(2, (kv_heads, group, -1)).permute(0, 2, 3, 1, 4)
        for_q, for_k, for_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for start, share in zip(range(0, count, QUERY_BLOCK), shares, strict=True):
            stop = min(count, start + QUERY_BLOCK)
            rows = q[..., start:stop, :].reshape(batch * kv_heads, -1, dim)
            wanted = gradients[..., start:stop, :].reshape(batch * kv_heads, -1, v.shape[-1])
            for_v[:, :stop] += share.transpose(1, 2) @ wanted
            for_scores = _softmax_backward(wanted @ v[:, :stop].transpose(1, 2), share)
            for_q[..., start:stop, :] = (for_scores @ k[:, :stop]).view(batch, kv_heads, group, -1, dim)
            for_k[:, :stop] += for_scores.transpose(1, 2) @ rows
        for_q *= ctx.scale
        for_k, for_v = (x.unflatten(0, (batch, kv_heads)) for x in (for_k, for_v))
        return _unrotated(for_q, for_k, for_v, cos, sin), None, None, None


class _Window(torch.autograd.Function):
    """Blocks of W queries against the W keys before them and their own W: in all the W + 1 that each of them may see.

    Columns of zeros after the keys stand for the sink: their logit is the sink's in the first and minus infinity in the
    others, and their values are zeros.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, sinks: Tensor | None, cos: Tensor, sin: Tensor, spec: AttentionSpec) -> Tensor:
        q, k, v = _rotated(qkv, cos, sin, spec)
        batch, kv_heads, group, count, _ = q.shape
        assert spec.window_keys is not None
        window = spec.window_keys - 1
        rows = _in_blocks(q * spec.scale, window)
        keys, values = _in_pairs(k, window), _in_pairs(v, window)
        scores = rows @ keys.transpose(1, 2)
        grid = scores.view(batch, kv_heads, count // window, group, window, -1)
        grid += _bias(sinks, kv_heads, group, window).to(q.dtype)
        grid[:, :, 0, ..., :window] = -torch.inf  # nothing is before the first block
        shares = scores.softmax(-1)
        ctx.save_for_backward(rows, keys, values, shares, cos, sin)
        ctx.window, ctx.scale, ctx.q_shape, ctx.has_sinks = window, spec.scale, q.shape, sinks is not None
        out = (shares @ values).view(*grid.shape[:-1], spec.value_dim)
        return out.permute(0, 2, 4, 1, 3, 5).reshape(batch, count, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, keys, values, shares, cos, sin = ctx.saved_tensors
        batch, kv_heads, group, _, dim = ctx.q_shape
        window = ctx.window
        wanted = _in_blocks(gradient.unflatten(2, (kv_heads, group, -1)).permute(0, 2, 3, 1, 4), window)
        for_values = shares.transpose(1, 2) @ wanted
        for_scores = _softmax_backward(wanted @ values.transpose(1, 2), shares)
        for_keys = for_scores.transpose(1, 2) @ rows
        for_rows = (for_scores @ keys).mul_(ctx.scale)
        for_q = for_rows.view(batch, kv_heads, -1, group, window, dim).transpose(2, 3).reshape(ctx.q_shape)
        for_k, for_v = (_from_pairs(x, batch, kv_heads, window) for x in (for_keys, for_values))
        for_sinks = None
        if ctx.has_sinks:
            column = for_scores[..., 2 * window].view(batch, kv_heads, -1, group, window)
            for_sinks = column.float().sum((0, 2, 4)).flatten()
        return _unrotated(for_q, for_k, for_v, cos, sin), for_sinks, None, None, None


def _in_blocks(x: Tensor, window: int) -> Tensor:
    """[B, K, G, T, D] -> [B * K * blocks, G * W, D]"""
    grid = x.unflatten(3, (-1, window)).transpose(2, 3)
    return grid.reshape(-1, grid.shape[3] * window, x.shape[-1])


def _in_pairs(x: Tensor, window: int) -> Tensor:
    """[B, K, T, D] -> [B * K * blocks, 2W + sink columns, D]: the block before, the block itself, zeros"""
    batch, heads, count, dim = x.shape
    blocks = x.unflatten(2, (-1, window))
    pairs = x.new_zeros(batch, heads, count // window, 2 * window + SINK_COLUMNS, dim)
    pairs[:, :, 1:, :window] = blocks[:, :, :-1]
    pairs[:, :, :, window : 2 * window] = blocks
    return pairs.flatten(0, 2)


def _from_pairs(x: Tensor, batch: int, heads: int, window: int) -> Tensor:
    """The gradient of `_in_pairs`"""
    pairs = x.unflatten(0, (batch, heads, -1))
    blocks = pairs[:, :, :, window : 2 * window].clone()
    blocks[:, :, :-1] += pairs[:, :, 1:, :window]
    return blocks.flatten(2, 3)


def _bias(sinks: Tensor | None, kv_heads: int, group: int, window: int) -> Tensor:
    """[K, 1, G, W, 2W + sink columns]"""
    distance = torch.arange(window)[:, None] + window - torch.arange(2 * window)
    bias = torch.full((kv_heads, 1, group, window, 2 * window + SINK_COLUMNS), -torch.inf)
    unseen = (distance < 0) | (distance > window)
    bias[..., : 2 * window] = torch.where(unseen, -torch.inf, 0.0)
    if sinks is not None:
        bias[..., 2 * window] = sinks.view(kv_heads, 1, group, 1)
    return bias
