"""The one decoder: runs any tuple of layers over a batch of rows, reading and writing K/V in pages."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.interface import Activation as KernelActivation
from kernels.interface import Kernels, PagedKV, RouterKind
from server.model.batch import Batch, LayerRows, rows_by_layer
from server.model.kv_arena import KVArena
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
from server.rebuild import shape_of
from server.step import PageKind, StepInterrupted

ACTIVATIONS: dict[Activation, KernelActivation] = {
    Activation.SILU: "silu",
    Activation.GELU_TANH: "gelu_tanh",
    Activation.CLAMPED_SWIGLU: "clamped_swiglu",
}
ROUTERS: dict[Router, RouterKind] = {Router.SIGMOID: "sigmoid", Router.SOFTMAX: "softmax"}


class Decoder:
    """Stateless between steps: all state is in the arena and the page tables."""

    def __init__(self, spec: ModelSpec, weights: Weights, kernels: Kernels) -> None:
        self.spec = spec
        self.weights = weights
        self.kernels = kernels
        assert isinstance(weights.embedding, Tensor)
        self._embedding = weights.embedding
        self._frequencies = {
            rope: frequencies(rope).to(weights.embedding.device)
            for rope in {layer.attention.rope for layer in spec.layers}
        }
        # MTP layers are loaded and not run yet, so nothing above the last layer needs hidden states.
        self.rebuild = shape_of(
            [layer.is_window for layer in spec.layers], window_tokens=spec.window_tokens, mtp_layers=0
        )
        self._interrupted = False
        # Rounded as the weights are: the models were trained with the rounded factor.
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=weights.embedding.dtype).item()

    @torch.inference_mode()
    def forward(self, tokens: Tensor, batch: Batch, arena: KVArena) -> Tensor:
        """tokens [T] int64 -> hidden [T, M] after the final norm. Writes the tokens' K/V into the batch's pages.

        Positions that are only run for their window K/V leave the pass where nothing above depends on them; their rows
        of the result are zeros.
        """
        hidden = torch.nn.functional.embedding(tokens, self._embedding)
        if self._embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        rotary = {
            rope: rotation(angle_per_position, batch.positions, hidden.dtype, rope.attention_factor)
            for rope, angle_per_position in self._frequencies.items()
        }
        views = rows_by_layer(batch, self.rebuild)
        left: Tensor | None = None  # where the tokens that are still there are in the batch
        for layer, weights, kv, rows in zip(self.spec.layers, self.weights.layers, arena.layers, views, strict=True):
            if self._interrupted:
                raise StepInterrupted
            if not rows.fed.token_count:
                break
            hidden = self._layer(hidden, layer, weights, kv, rows, arena, rotary[layer.attention.rope])
            if rows.going is not None:
                rotary = {rope: (cos[rows.going], sin[rows.going]) for rope, (cos, sin) in rotary.items()}
                left = rows.going if left is None else left[rows.going]
        normed = self.kernels.rms_norm(hidden, self.weights.final_norm, self.spec.norm_eps)
        if left is None:
            return normed
        return normed.new_zeros(batch.token_count, normed.shape[1]).index_copy_(0, left, normed)

    def interrupt(self) -> None:
        """From any thread: a forward pass that runs raises StepInterrupted after its layer, later ones at once."""
        self._interrupted = True

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, M] after the final norm -> [R, N] fp32"""
        return self.kernels.linear(hidden, self.weights.head).float()

    def _layer(
        self,
        hidden: Tensor,
        layer: LayerSpec,
        weights: LayerWeights,
        kv: PagedKV,
        rows: LayerRows,
        arena: KVArena,
        rotary: tuple[Tensor, Tensor],
    ) -> Tensor:
        eps, norm = self.spec.norm_eps, self.kernels.rms_norm
        attended = self._attention(
            norm(hidden, weights.attention_norm, eps), layer.attention, weights.attention, kv, rows, arena, rotary
        )
        if rows.going is not None:
            hidden = hidden[rows.going]
        if not rows.out.token_count:
            return hidden  # the layer was fed for its K and V only
        if weights.attention_post_norm is not None:
            attended = norm(attended, weights.attention_post_norm, eps)
        hidden = hidden + attended
        outcome = self._mlp(norm(hidden, weights.mlp_norm, eps), layer.mlp, weights.mlp)
        if weights.mlp_post_norm is not None:
            outcome = norm(outcome, weights.mlp_post_norm, eps)
        return hidden + outcome

    def _attention(
        self,
        x: Tensor,
        spec: AttentionSpec,
        weights: AttentionWeights,
        kv: PagedKV,
        rows: LayerRows,
        arena: KVArena,
        rotary: tuple[Tensor, Tensor],
    ) -> Tensor:
        kernels = self.kernels
        tokens, rotated_heads = x.shape[0], spec.heads + spec.kv_heads
        qkv = kernels.linear(x, weights.qkv, weights.qkv_bias)
        qk = qkv[:, : rotated_heads * spec.head_dim].view(tokens, rotated_heads, spec.head_dim)
        v = qkv[:, rotated_heads * spec.head_dim :].view(tokens, spec.kv_heads, spec.value_dim)
        if weights.qk_norm is not None:
            qk = kernels.rms_norm(qk, weights.qk_norm, self.spec.norm_eps)
        kernels.rope(qk, *rotary)
        if spec.value_scale != 1.0:
            v = v * spec.value_scale
        q, k = qk[:, : spec.heads], qk[:, spec.heads :]
        kind = PageKind.FULL if spec.window_keys is None else PageKind.WINDOW
        if kind is PageKind.FULL and (new := rows.fed.new_full()) is not None:
            k, v = k[new], v[new]
        kernels.write_kv(kv, k, v, rows.fed.write_index(arena, kind))
        if rows.going is not None:
            q = q[rows.going]
        if not rows.out.token_count:
            return x.new_zeros(0, self.spec.hidden)
        plan = rows.out.attention_plan(kernels, arena, spec.window_keys)
        attended = kernels.attention(q, kv, plan, scale=spec.scale, sinks=weights.sinks)
        return kernels.linear(attended.flatten(1), weights.output, weights.output_bias)

    def _mlp(self, x: Tensor, spec: DenseSpec | MoESpec, weights: DenseWeights | MoEWeights) -> Tensor:
        kernels, activation = self.kernels, ACTIVATIONS[spec.activation]
        if isinstance(spec, MoESpec):
            assert isinstance(weights, MoEWeights)
            chosen, shares = kernels.route(
                x,
                weights.router,
                weights.router_bias,
                kind=ROUTERS[spec.router],
                active=spec.active,
                normalize=spec.normalize,
                scale=spec.routed_scale,
            )
            return kernels.experts(
                x,
                chosen,
                shares,
                weights.gate_up,
                weights.down,
                activation,
                gate_up_bias=weights.gate_up_bias,
                down_bias=weights.down_bias,
            )
        assert isinstance(weights, DenseWeights)
        inner = kernels.gated(kernels.linear(x, weights.gate_up, weights.gate_up_bias), activation)
        return kernels.linear(inner, weights.down, weights.down_bias)


def rotation(
    angle_per_position: Tensor, positions: Tensor, dtype: torch.dtype, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, rotary_dim] times factor, as `Kernels.rope` takes them: twice the half width, sin negated in
    the first half.

    Computed for the step's positions and not looked up: it is a few small operations a step, and a table for a million
    positions would take half a gigabyte.
    """
    angle = positions[:, None, None].float() * angle_per_position  # [T, 1, rotary_dim / 2]
    cos, sin = angle.cos().mul_(factor), angle.sin().mul_(factor)
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def frequencies(rope: RopeSpec) -> Tensor:
    """Radians per position [rotary_dim / 2] fp32. Source: RoFormer, arXiv 2104.09864; the llama3 rule is Meta's
    published `apply_scaling` of Llama 3.1; YaRN is arXiv 2309.00071."""
    exponent = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    plain = 1.0 / rope.theta**exponent
    if rope.divisors is not None:
        plain = plain / torch.tensor(rope.divisors)
    if rope.llama3 is not None:
        factor, low, high, original = rope.llama3
        wavelength = 2 * math.pi / plain
        smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
        plain = (1 - smooth) * plain / factor + smooth * plain
    if rope.yarn is not None:
        slowed = _yarn_share_slowed(rope, rope.yarn)
        plain = slowed * plain / rope.yarn.factor + (1 - slowed) * plain
    return plain / rope.linear_factor


def _yarn_share_slowed(rope: RopeSpec, yarn: YarnSpec) -> Tensor:
    """How much of each frequency [rotary_dim / 2] is divided by the factor: 0 none, 1 all. See `YarnSpec`."""

    def index_of(turns: float) -> float:
        """Which frequency, counted in fractions, turns that often within the original context."""
        wavelengths = yarn.original_context / (2 * math.pi * turns)
        return rope.rotary_dim * math.log(wavelengths) / (2 * math.log(rope.theta))

    start, stop = index_of(yarn.beta_fast), index_of(yarn.beta_slow)
    if yarn.truncate:
        start, stop = math.floor(start), math.ceil(stop)
    start, stop = max(start, 0), min(stop, rope.rotary_dim - 1)
    if start == stop:
        stop += 0.001  # a step instead of a ramp
    return ((torch.arange(rope.rotary_dim // 2) - start) / (stop - start)).clamp(0.0, 1.0)
