"""Tiny models of every family with random weights, as plain bf16, widened to fp32, and packed for the C kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from kernels.mxfp4 import Mxfp4
from kernels.native.kernels import NativeKernels
from kernels.quantized import BlockScaled, dense
from server.model.native_decoder import NativeDecoder
from server.model.spec import (
    Activation,
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    RopeSpec,
    Router,
    YarnSpec,
)
from server.model.weights import AttentionWeights, DenseWeights, LayerWeights, MoEWeights, Weights
from tests.model.paged import PagedSequences

VOCAB = 97
MATRICES = ("qkv", "output", "gate_up", "down", "head")

Node = TypeVar("Node")


def model_spec(layers: tuple[LayerSpec, ...], **changes: Any) -> ModelSpec:
    sizes: dict[str, Any] = {"family": "test", "hidden": 48, "vocab": VOCAB, "context_tokens": 8192}
    return ModelSpec(layers=layers, **{**sizes, **changes})


def attention(heads: int, kv_heads: int, head_dim: int, value_dim: int | None = None, **changes: Any) -> AttentionSpec:
    changes.setdefault("rope", RopeSpec(theta=1e4, rotary_dim=head_dim // 2 * 2))
    return AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim if value_dim is None else value_dim,
        scale=changes.pop("scale", head_dim**-0.5),
        **changes,
    )


def llama() -> ModelSpec:
    mlp = DenseSpec(width=64, activation=Activation.SILU)
    return model_spec((LayerSpec(attention=attention(6, 2, 8), mlp=mlp),) * 3)


def llama_uneven() -> ModelSpec:
    """Nothing is a multiple of anything: odd head dims, odd widths, biases everywhere, tied."""
    sizes = attention(5, 5, 5, qkv_bias=True, output_bias=True, rope=RopeSpec(theta=500.0, rotary_dim=4))
    mlp = DenseSpec(width=45, activation=Activation.SILU, bias=True)
    return model_spec((LayerSpec(attention=sizes, mlp=mlp),) * 3, hidden=51, tied_embeddings=True)


def llama_gated_at_once() -> ModelSpec:
    """Widths for which gate and up lie in panels of their own."""
    mlp = DenseSpec(width=96, activation=Activation.SILU, bias=True)
    return model_spec((LayerSpec(attention=attention(8, 1, 32), mlp=mlp),) * 2, hidden=64)


def gemma3() -> ModelSpec:
    layers = []
    for index in range(6):
        is_full = index % 3 == 2
        rope = RopeSpec(theta=1e6 if is_full else 1e4, rotary_dim=20, linear_factor=8.0 if is_full else 1.0)
        layers.append(
            LayerSpec(
                attention=attention(
                    4, 2, 20, qk_norm=True, scale=24**-0.5, rope=rope, window_keys=None if is_full else 20
                ),
                mlp=DenseSpec(width=64, activation=Activation.GELU_TANH),
                post_norms=True,
            )
        )
    return model_spec(tuple(layers), tied_embeddings=True, embedding_scale=48**0.5)


def mimo_flash() -> ModelSpec:
    """Sinks and more KV heads in window layers, keys wider than values, a rotation of a third of a head."""
    rope = RopeSpec(theta=1e4, rotary_dim=8)
    window = attention(8, 4, 24, 16, sinks=True, window_keys=17, value_scale=0.7, rope=rope)
    full = attention(8, 2, 24, 16, value_scale=0.7, rope=replace(rope, theta=5e6))
    experts = MoESpec(experts=10, active=3, width=24, activation=Activation.SILU)
    layers = [LayerSpec(attention=full, mlp=DenseSpec(width=64, activation=Activation.SILU))]
    layers += [LayerSpec(attention=full if index == 3 else window, mlp=experts) for index in range(1, 6)]
    return model_spec(tuple(layers))


def mimo_pro() -> ModelSpec:
    """A window of 128 keys, eight heads to a KV head, experts scaled, values wider than keys in full layers."""
    window = attention(16, 2, 40, 36, sinks=True, window_keys=128, value_scale=0.612)
    full = attention(16, 4, 24, 33, value_scale=0.612)
    experts = MoESpec(experts=12, active=2, width=32, activation=Activation.SILU, normalize=False, routed_scale=2.5)
    return model_spec(tuple(LayerSpec(attention=a, mlp=experts) for a in (full, window, window, full)), hidden=96)


def gpt_oss() -> ModelSpec:
    yarn = YarnSpec(factor=32.0, beta_fast=32.0, beta_slow=1.0, original_context=96, truncate=False)
    rope = RopeSpec(theta=1.5e5, rotary_dim=16, yarn=yarn, attention_factor=1.3466)
    experts = MoESpec(
        experts=9, active=3, width=40, activation=Activation.CLAMPED_SWIGLU, router=Router.SOFTMAX, bias=True
    )

    def layer(window: int | None) -> LayerSpec:
        sizes = attention(8, 2, 16, sinks=True, window_keys=window, rope=rope, qkv_bias=True, output_bias=True)
        return LayerSpec(attention=sizes, mlp=experts)

    return model_spec(tuple(layer(window) for window in (19, None, 19, None)))


def gpt_oss_one_expert() -> ModelSpec:
    """Experts as wide as the hidden state, one chosen; a window of the query's own key alone."""
    experts = MoESpec(
        experts=3, active=1, width=64, activation=Activation.CLAMPED_SWIGLU, router=Router.SOFTMAX, bias=True
    )
    layers = (
        LayerSpec(attention=attention(6, 2, 16, sinks=True, window_keys=1), mlp=experts),
        LayerSpec(attention=attention(7, 1, 16, sinks=True), mlp=experts),
    )
    return model_spec(layers, hidden=64)


SPECS: dict[str, Callable[[], ModelSpec]] = {
    made.__name__: made
    for made in (
        llama,
        llama_uneven,
        llama_gated_at_once,
        gemma3,
        mimo_flash,
        mimo_pro,
        gpt_oss,
        gpt_oss_one_expert,
    )
}


def random_weights(spec: ModelSpec, seed: int = 0) -> Weights:
    """bf16 matrices and biases; norms, routers and sinks in fp32 that matter."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).bfloat16()

    def vector(*shape: int, mean: float = 0.0, spread: float = 0.3) -> Tensor:
        return mean + spread * torch.randn(*shape, generator=generator)

    def bias(wanted: bool, *shape: int) -> Tensor | None:
        return vector(*shape).bfloat16() if wanted else None

    def layer(of: LayerSpec) -> LayerWeights:
        a, mlp, hidden = of.attention, of.mlp, spec.hidden
        rows = (a.heads + a.kv_heads) * a.head_dim + a.kv_heads * a.value_dim
        made: DenseWeights | MoEWeights
        if isinstance(mlp, DenseSpec):
            made = DenseWeights(
                gate_up=matrix(2 * mlp.width, hidden),
                gate_up_bias=bias(mlp.bias, 2 * mlp.width),
                down=matrix(hidden, mlp.width),
                down_bias=bias(mlp.bias, hidden),
            )
        else:
            made = MoEWeights(
                router=vector(mlp.experts, hidden, spread=hidden**-0.5),
                router_bias=vector(mlp.experts),
                gate_up=matrix(mlp.experts, 2 * mlp.width, hidden),
                down=matrix(mlp.experts, hidden, mlp.width),
                gate_up_bias=bias(mlp.bias, mlp.experts, 2 * mlp.width),
                down_bias=bias(mlp.bias, mlp.experts, hidden),
            )
        return LayerWeights(
            attention_norm=vector(hidden, mean=1.0),
            attention=AttentionWeights(
                qkv=matrix(rows, hidden),
                qkv_bias=bias(a.qkv_bias, rows),
                output=matrix(hidden, a.heads * a.value_dim),
                output_bias=bias(a.output_bias, hidden),
                qk_norm=vector(a.heads + a.kv_heads, a.head_dim, mean=1.0) if a.qk_norm else None,
                sinks=vector(a.heads, spread=2.0) if a.sinks else None,
            ),
            attention_post_norm=vector(hidden, mean=1.0) if of.post_norms else None,
            mlp_norm=vector(hidden, mean=1.0),
            mlp=made,
            mlp_post_norm=vector(hidden, mean=1.0) if of.post_norms else None,
        )

    embedding = matrix(spec.vocab, spec.hidden)
    return Weights(
        embedding=embedding,
        layers=tuple(layer(of) for of in spec.layers),
        final_norm=vector(spec.hidden, mean=1.0),
        head=embedding if spec.tied_embeddings else matrix(spec.vocab, spec.hidden),
        mtp=(),
    )


def changed(node: Node, change: Callable[[str, Any], Any], name: str = "") -> Node:
    """Weights with change(name, value) in place of every tensor or matrix."""
    if isinstance(node, tuple):
        return tuple(changed(entry, change, name) for entry in node)  # type: ignore[return-value]
    if is_dataclass(node) and not isinstance(node, (type, BlockScaled, Mxfp4)):
        parts = {f.name: changed(getattr(node, f.name), change, f.name) for f in fields(node)}
        return replace(node, **parts)
    return node if node is None else change(name, node)


def widened(weights: Weights) -> Weights:
    """The same numbers in fp32, codes written out."""
    return changed(weights, lambda _, value: dense(value, torch.float32).float())


def in_fp8(weights: Weights) -> Weights:
    """Every matrix but the ends in blocks of codes, with rows whose scales lie in any order."""
    generator = torch.Generator().manual_seed(1)

    def stored(name: str, value: Any) -> Any:
        if name not in MATRICES or name == "head":
            return value
        *leading, rows, columns = value.shape
        row_scale = torch.randint(3, (rows,), generator=generator, dtype=torch.int32)
        scales = torch.exp2(torch.randint(-8, -5, (*leading, 3, -(-columns // 128)), generator=generator).float())
        codes = (value.float() / scales[..., row_scale.long(), :1]).to(torch.float8_e4m3fn)
        return BlockScaled(codes=codes, scales=scales, row_scale=row_scale)

    return changed(weights, stored)


def in_mxfp4(weights: Weights) -> Weights:
    """Experts in random codes, as gpt-oss is published."""
    generator = torch.Generator().manual_seed(2)

    def stored(name: str, value: Any) -> Any:
        if name not in ("gate_up", "down"):
            return value
        *leading, columns = value.shape
        codes = torch.randint(256, (*leading, columns // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, (*leading, columns // 32), generator=generator, dtype=torch.uint8)
        return Mxfp4(codes=codes, scales=scales)

    return changed(weights, stored)


def packed(weights: Weights, kernels: NativeKernels, *, embeds_from_head: bool = False) -> Weights:
    """As `server.model.weights.load_weights` packs them."""
    result = changed(weights, lambda name, value: kernels.pack(value) if name in MATRICES else value)
    return replace(result, embedding=result.head) if embeds_from_head else result


class HiddenOf:
    """A decoder whose logits are its hidden states, so that tests see every bit of them."""

    def __init__(self, decoder: Any) -> None:
        self.forward = decoder.forward
        self.rebuild = decoder.rebuild

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def native_sequences(
    spec: ModelSpec, weights: Weights, kernels: NativeKernels, *, embeds_from_head: bool = False, **settings: Any
) -> PagedSequences:
    """Sequences whose steps give hidden states [count, M] bf16."""
    sequences = PagedSequences(spec, weights, dtype=torch.bfloat16, **settings)
    ours = packed(weights, kernels, embeds_from_head=embeds_from_head)
    sequences.decoder = HiddenOf(NativeDecoder(spec, ours, kernels))  # type: ignore[assignment]
    return sequences


def reference_sequences(spec: ModelSpec, weights: Weights, dtype: torch.dtype, **settings: Any) -> PagedSequences:
    plain = widened(weights) if dtype is torch.float32 else weights
    sequences = PagedSequences(spec, plain, dtype=dtype, **settings)
    sequences.decoder = HiddenOf(sequences.decoder)  # type: ignore[assignment]
    return sequences
