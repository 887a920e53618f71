"""The decoder on a processor: the same layers as `server.model.decoder`, run by the C library in one call a step."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.interface import PagedKV, StepRows
from kernels.native.kernels import NativeKernels
from kernels.native.packed import PackedMatrix
from kernels.native.stack import (
    MOST_GROUPS,
    MOST_HEADS_OF_A_KV_HEAD,
    Interrupted,
    Stack,
    StackDense,
    StackLayer,
    StackMoE,
    StackRope,
)
from kernels.quantized import Matrix
from server.errors import StartupError
from server.model.batch import Batch
from server.model.decoder import ACTIVATIONS, ROUTERS, frequencies
from server.model.kv_arena import KVArena
from server.model.spec import DenseSpec, LayerSpec, ModelSpec, MoESpec, RopeSpec
from server.model.weights import DenseWeights, LayerWeights, MoEWeights, Weights
from server.rebuild import shape_of
from server.step import PageKind, StepInterrupted


class NativeDecoder:
    """Stands in for `server.model.decoder.Decoder`; its weights are packed by `kernels`, its K and V are bf16.

    Raises StartupError for a model whose heads share KV heads as the C kernels cannot.
    """

    def __init__(self, spec: ModelSpec, weights: Weights, kernels: NativeKernels) -> None:
        check_native(spec)
        self.spec = spec
        self.weights = weights
        self.kernels = kernels
        self._arena: KVArena | None = None
        self._stack: Stack | None = None
        self._head = _packed(weights.head)
        # MTP layers are loaded and not run yet, so nothing above the last layer needs hidden states.
        self.rebuild = shape_of(
            [layer.is_window for layer in spec.layers], window_tokens=spec.window_tokens, mtp_layers=0
        )

    def forward(self, tokens: Tensor, batch: Batch, arena: KVArena) -> Tensor:
        """tokens [T] int64 -> hidden [T, M] bf16 after the final norm. Writes the tokens' K/V to the batch's pages.

        Positions that are only run for their window K/V go first, row by row; their rows of the result are zeros.
        """
        if arena is not self._arena or self._stack is None:
            self._arena, self._stack = arena, self._bind(arena)
        tables = [batch.tables[PageKind.FULL], batch.tables[PageKind.WINDOW]]
        try:
            if not batch.rebuilds:
                return self._stack.forward(tokens, batch.rows, tables)
            return self._with_rebuilds(self._stack, tokens, batch, tables)
        except Interrupted as error:
            raise StepInterrupted from error

    def _with_rebuilds(self, stack: Stack, tokens: Tensor, batch: Batch, tables: list[Tensor]) -> Tensor:
        first = 0
        for slot, start, count, cached in zip(
            batch.rows.slots, batch.rows.starts, batch.rows.counts, batch.cached, strict=True
        ):
            again = min(count, max(0, cached - start))
            if again:
                rows = StepRows(slots=(slot,), starts=(start,), counts=(again,))
                drops = self.rebuild.drops(start, start + again, cached)
                stack.rebuild(tokens[first : first + again], rows, tables, drops)
            first += count
        rest, places = batch.from_positions(batch.cached)
        hidden = torch.zeros(batch.token_count, self.spec.hidden, dtype=torch.bfloat16)
        if rest.token_count:
            hidden[places] = stack.forward(tokens[places], rest.rows, tables)
        return hidden

    def interrupt(self) -> None:
        """From any thread: a forward pass that runs raises StepInterrupted after its layer, later ones at once."""
        self.kernels.context.interrupt()

    def logits(self, hidden: Tensor, *, into: Tensor | None = None) -> Tensor:
        """hidden [R, M] after the final norm -> [R, N] fp32, in `into` where given: memory for a large vocabulary that
        is asked of the system anew in every step costs as much as a third of the product."""
        return self.kernels.context.multiply(hidden.to(torch.bfloat16), self._head, into=into)

    def _bind(self, arena: KVArena) -> Stack:
        assert arena.dtype is torch.bfloat16, arena.dtype
        spec, weights = self.spec, self.weights
        ropes = list(dict.fromkeys(layer.attention.rope for layer in spec.layers))
        plain = weights.embedding
        return Stack(
            self.kernels.context,
            [
                _layer(layer, layer_weights, kv, ropes)
                for layer, layer_weights, kv in zip(spec.layers, weights.layers, arena.layers, strict=True)
            ],
            [StackRope(frequencies=frequencies(rope), factor=rope.attention_factor) for rope in ropes],
            embedding=plain.contiguous() if isinstance(plain, Tensor) else None,
            embedding_scale=torch.tensor(spec.embedding_scale, dtype=torch.bfloat16).item(),
            head=self._head,
            final_norm=weights.final_norm,
            eps=spec.norm_eps,
        )


def check_native(spec: ModelSpec) -> None:
    """Raises StartupError for a model whose heads the C kernels do not take."""
    groups = {layer.attention.heads // layer.attention.kv_heads for layer in spec.layers}
    if max(groups) > MOST_HEADS_OF_A_KV_HEAD or len(groups) > MOST_GROUPS:
        raise StartupError(
            f"the native kernels take up to {MOST_HEADS_OF_A_KV_HEAD} query heads to a KV head, in up to {MOST_GROUPS} "
            f"different numbers; this model has {sorted(groups)}; use --kernels torch"
        )


def _layer(layer: LayerSpec, weights: LayerWeights, kv: PagedKV, ropes: list[RopeSpec]) -> StackLayer:
    attention, own = layer.attention, weights.attention
    return StackLayer(
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        value_dim=attention.value_dim,
        window_keys=attention.window_keys,
        scale=attention.scale,
        value_scale=attention.value_scale,
        rope=ropes.index(attention.rope),
        table=0 if attention.window_keys is None else 1,
        kv=kv,
        attention_norm=weights.attention_norm,
        qkv=_packed(own.qkv),
        qkv_bias=own.qkv_bias,
        qk_norm=own.qk_norm,
        sinks=own.sinks,
        output=_packed(own.output),
        output_bias=own.output_bias,
        attention_post_norm=weights.attention_post_norm,
        mlp_norm=weights.mlp_norm,
        mlp=_mlp(layer.mlp, weights.mlp),
        mlp_post_norm=weights.mlp_post_norm,
    )


def _mlp(spec: DenseSpec | MoESpec, weights: DenseWeights | MoEWeights) -> StackDense | StackMoE:
    activation = ACTIVATIONS[spec.activation]
    if isinstance(spec, DenseSpec):
        assert isinstance(weights, DenseWeights)
        return StackDense(
            gate_up=_packed(weights.gate_up),
            down=_packed(weights.down),
            gate_up_bias=weights.gate_up_bias,
            down_bias=weights.down_bias,
            activation=activation,
        )
    assert isinstance(weights, MoEWeights)
    return StackMoE(
        router=weights.router,
        router_bias=weights.router_bias,
        gate_up=_packed(weights.gate_up),
        down=_packed(weights.down),
        gate_up_bias=weights.gate_up_bias,
        down_bias=weights.down_bias,
        activation=activation,
        kind=ROUTERS[spec.router],
        active=spec.active,
        normalize=spec.normalize,
        scale=spec.routed_scale,
    )


def _packed(matrix: Matrix) -> PackedMatrix:
    if not isinstance(matrix, PackedMatrix):
        raise TypeError(f"a matrix of this model was not packed: {type(matrix).__name__}")
    return matrix
