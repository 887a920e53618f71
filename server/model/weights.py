"""Weights in the shapes that the decoder multiplies by, and their loading.

q, k and v are rows of one matrix, gate and up of another: fewer and larger products. A matrix is allocated once in its
final dtype and filled part by part from the mapped checkpoint, so there are never two copies of the model in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.quantized import Matrix
from server.errors import StartupError
from server.model.checkpoint import Checkpoint, find_names
from server.model.expert_files import STORED, Stored
from server.model.families import tensor_names
from server.model.families.names import TensorNames
from server.model.spec import AttentionSpec, LayerSpec, ModelSpec, MoESpec

Progress = Callable[[int], None]
Pack = Callable[[Matrix], Matrix]

_CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """qkv [(H + K) * D + K * V, M], output [M, H * V]. qk_norm [H + K, D]: q's weight H times, then k's K times.

    sinks [H] are fp32.
    """

    qkv: Matrix
    qkv_bias: Tensor | None
    output: Matrix
    output_bias: Tensor | None
    qk_norm: Tensor | None
    sinks: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseWeights:
    """gate_up [2 * width, M], gate first; down [M, width]."""

    gate_up: Matrix
    gate_up_bias: Tensor | None
    down: Matrix
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEWeights:
    """router [E, M] and router_bias [E] in fp32; gate_up [E, 2 * width, M]; down [E, M, width].

    gate_up_bias [E, 2 * width]; down_bias [E, M].
    """

    router: Tensor
    router_bias: Tensor
    gate_up: Matrix
    down: Matrix
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    attention_norm: Tensor
    attention: AttentionWeights
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    mlp: DenseWeights | MoEWeights
    mlp_post_norm: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPWeights:
    """enorm, hnorm [M] for the token's embedding and the target's hidden; eh_proj [M, 2 * M], embedding first."""

    enorm: Tensor
    hnorm: Tensor
    eh_proj: Matrix
    layer: LayerWeights
    final_norm: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """embedding and head [N, M], one tensor when tied. Norm weights are fp32 and have spec.norm_offset added."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Matrix
    mtp: tuple[MTPWeights, ...]


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every canonical tensor of a model and its shape."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (spec.vocab, spec.hidden), "final_norm": (spec.hidden,)}
    if not spec.tied_embeddings:
        shapes["head"] = (spec.vocab, spec.hidden)
    for index, layer in enumerate(spec.layers):
        shapes |= {f"layers.{index}.{part}": shape for part, shape in _layer_shapes(spec, layer).items()}
    for index, layer in enumerate(spec.mtp_layers):
        shapes |= {f"mtp.{index}.{part}": shape for part, shape in _layer_shapes(spec, layer).items()}
        shapes |= {f"mtp.{index}.{norm}": (spec.hidden,) for norm in ("enorm", "hnorm", "final_norm")}
        shapes[f"mtp.{index}.eh_proj"] = (spec.hidden, 2 * spec.hidden)
    return shapes


def weight_bytes(spec: ModelSpec, dtype: torch.dtype, *, packed: bool = False) -> int:
    """Memory that the loaded weights take, computed without reading any. Packed, a head that is tied to the embedding
    is a matrix of its own."""
    total = spec.vocab * spec.hidden * dtype.itemsize if packed and spec.tied_embeddings else 0
    for name, shape in tensor_shapes(spec).items():
        total += math.prod(shape) * _stored_dtype(name, dtype).itemsize
    for layer in (*spec.layers, *spec.mtp_layers):
        attention = layer.attention
        if attention.qk_norm:
            # Stored once per head, not once per layer.
            extra_rows = attention.heads + attention.kv_heads - 2
            total += extra_rows * attention.head_dim * _stored_dtype("q_norm", dtype).itemsize
    return total


def _layer_shapes(spec: ModelSpec, layer: LayerSpec) -> dict[str, tuple[int, ...]]:
    attention, mlp, hidden = layer.attention, layer.mlp, spec.hidden
    rows = _qkv_rows(attention)
    shapes: dict[str, tuple[int, ...]] = {"attention_norm": (hidden,), "mlp_norm": (hidden,)}
    shapes |= {part: (count, hidden) for part, count in rows.items()}
    shapes["o"] = (hidden, attention.heads * attention.value_dim)
    if attention.qkv_bias:
        shapes |= {f"{part}_bias": (count,) for part, count in rows.items()}
    if attention.output_bias:
        shapes["o_bias"] = (hidden,)
    if attention.qk_norm:
        shapes |= {"q_norm": (attention.head_dim,), "k_norm": (attention.head_dim,)}
    if attention.sinks:
        shapes["sinks"] = (attention.heads,)
    if layer.post_norms:
        shapes |= {"attention_post_norm": (hidden,), "mlp_post_norm": (hidden,)}
    if isinstance(mlp, MoESpec):
        shapes |= {"router": (mlp.experts, hidden), "router_bias": (mlp.experts,)}
        if mlp.files in STORED:
            return shapes | STORED[mlp.files].shapes(mlp, hidden)
        for expert in range(mlp.experts):
            shapes |= {f"experts.{expert}.{part}": (mlp.width, hidden) for part in ("gate", "up")}
            shapes[f"experts.{expert}.down"] = (hidden, mlp.width)
    else:
        shapes |= {"gate": (mlp.width, hidden), "up": (mlp.width, hidden), "down": (hidden, mlp.width)}
        if mlp.bias:
            shapes |= {"gate_bias": (mlp.width,), "up_bias": (mlp.width,), "down_bias": (hidden,)}
    return shapes


def _qkv_rows(attention: AttentionSpec) -> dict[str, int]:
    return {
        "q": attention.heads * attention.head_dim,
        "k": attention.kv_heads * attention.head_dim,
        "v": attention.kv_heads * attention.value_dim,
    }


def _stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Router, its bias and sinks steer a softmax or a choice: fp32. So are norms, which cost little: where 1 is added
    to w, by us or in the file, bf16 would lose w's low bits. Codes and scales of mxfp4 are bytes."""
    part = name.rsplit(".", 1)[-1]
    if part.endswith(("_codes", "_scales")):
        return torch.uint8
    return torch.float32 if part in ("router", "router_bias", "sinks") or part.endswith("norm") else dtype


def load_weights(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress = lambda read_bytes: None,
    pack: Pack = lambda matrix: matrix,
) -> Weights:
    """Read a whole model. progress is called with the number of checkpoint bytes just read. Every matrix that the
    decoder multiplies by goes through pack as soon as it is complete, see `kernels.interface.Kernels.pack`.

    Raises StartupError that names missing, unused or misshapen tensors, before any weight is read.
    """
    return _Loader(spec, checkpoint, dtype, torch.device(device), progress, pack).load()


def checkpoint_bytes(spec: ModelSpec, checkpoint: Checkpoint) -> int:
    """What `load_weights` will report to progress in all."""
    found = find_names(checkpoint, list(tensor_shapes(spec)), _names(spec, checkpoint))
    return sum(checkpoint.tensors[name].stored_bytes for name in found.values())


def _names(spec: ModelSpec, checkpoint: Checkpoint) -> TensorNames:
    names = tensor_names(spec, gguf=checkpoint.is_gguf)
    if spec.tied_embeddings:
        # Some checkpoints store the embedding a second time under the head's name.
        names = replace(names, ignored=(*names.ignored, r"(.*\.)?lm_head\.weight"))
    return names


class _Loader:
    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
        pack: Pack,
    ) -> None:
        self.spec = spec
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self.progress = progress
        self.pack = pack
        self.shapes = tensor_shapes(spec)
        self.table = _names(spec, checkpoint)
        self.names = find_names(checkpoint, list(self.shapes), self.table)
        self._check_shapes()
        self._check_bytes()

    def load(self) -> Weights:
        spec = self.spec
        embedding = self._matrix("embedding")
        return Weights(
            embedding=embedding,
            layers=tuple(self._layer(f"layers.{index}", layer) for index, layer in enumerate(spec.layers)),
            final_norm=self._matrix("final_norm"),
            head=self.pack(embedding) if spec.tied_embeddings else self._packed("head"),
            mtp=tuple(
                MTPWeights(
                    enorm=self._matrix(f"mtp.{index}.enorm"),
                    hnorm=self._matrix(f"mtp.{index}.hnorm"),
                    eh_proj=self._packed(f"mtp.{index}.eh_proj"),
                    layer=self._layer(f"mtp.{index}", layer),
                    final_norm=self._matrix(f"mtp.{index}.final_norm"),
                )
                for index, layer in enumerate(spec.mtp_layers)
            ),
        )

    def _layer(self, at: str, layer: LayerSpec) -> LayerWeights:
        return LayerWeights(
            attention_norm=self._matrix(f"{at}.attention_norm"),
            attention=self._attention(at, layer.attention),
            attention_post_norm=self._matrix(f"{at}.attention_post_norm") if layer.post_norms else None,
            mlp_norm=self._matrix(f"{at}.mlp_norm"),
            mlp=self._moe(at, layer.mlp) if isinstance(layer.mlp, MoESpec) else self._dense(at, layer.mlp.bias),
            mlp_post_norm=self._matrix(f"{at}.mlp_post_norm") if layer.post_norms else None,
        )

    def _attention(self, at: str, attention: AttentionSpec) -> AttentionWeights:
        qk_norm = None
        if attention.qk_norm:
            q_norm, k_norm = self._matrix(f"{at}.q_norm"), self._matrix(f"{at}.k_norm")
            qk_norm = torch.cat((q_norm.expand(attention.heads, -1), k_norm.expand(attention.kv_heads, -1)))
        return AttentionWeights(
            qkv=self._packed(f"{at}.q", f"{at}.k", f"{at}.v"),
            qkv_bias=self._matrix(f"{at}.q_bias", f"{at}.k_bias", f"{at}.v_bias") if attention.qkv_bias else None,
            output=self._packed(f"{at}.o"),
            output_bias=self._matrix(f"{at}.o_bias") if attention.output_bias else None,
            qk_norm=qk_norm,
            sinks=self._matrix(f"{at}.sinks") if attention.sinks else None,
        )

    def _dense(self, at: str, bias: bool) -> DenseWeights:
        return DenseWeights(
            gate_up=self._packed(f"{at}.gate", f"{at}.up"),
            gate_up_bias=self._matrix(f"{at}.gate_bias", f"{at}.up_bias") if bias else None,
            down=self._packed(f"{at}.down"),
            down_bias=self._matrix(f"{at}.down_bias") if bias else None,
        )

    def _moe(self, at: str, moe: MoESpec) -> MoEWeights:
        hidden, width = self.spec.hidden, moe.width
        if moe.files in STORED:
            return self._moe_stored(at, moe, STORED[moe.files])
        gate_up = torch.empty(moe.experts, 2 * width, hidden, dtype=self.dtype, device=self.device)
        down = torch.empty(moe.experts, hidden, width, dtype=self.dtype, device=self.device)
        for expert in range(moe.experts):
            self._fill(gate_up[expert, :width], f"{at}.experts.{expert}.gate")
            self._fill(gate_up[expert, width:], f"{at}.experts.{expert}.up")
            self._fill(down[expert], f"{at}.experts.{expert}.down")
        return MoEWeights(
            router=self._matrix(f"{at}.router"),
            router_bias=self._matrix(f"{at}.router_bias"),
            gate_up=gate_up,
            down=down,
        )

    def _check_bytes(self) -> None:
        for canonical, name in self.names.items():
            info = self.checkpoint.tensors[name]
            if _stored_dtype(canonical, self.dtype) is torch.uint8 and info.stored_bytes != math.prod(info.shape):
                raise StartupError(f"tensor {name} has {info.stored_bytes} bytes, expected a byte per entry: U8")

    def _moe_stored(self, at: str, moe: MoESpec, files: Stored) -> MoEWeights:
        def read(part: str, entry: int | None) -> Tensor:
            name = self.names[f"{at}.{part}"]
            info = self.checkpoint.tensors[name]
            stored = self.checkpoint.read(name) if entry is None else self.checkpoint.read(name, entry, entry + 1)[0]
            self.progress(info.stored_bytes // (1 if entry is None else info.shape[0]))
            return stored

        experts = files.load(moe, self.spec.hidden, read, self.dtype, self.device)
        return MoEWeights(
            router=self._matrix(f"{at}.router"),
            router_bias=self._matrix(f"{at}.router_bias"),
            gate_up=self.pack(experts.gate_up),
            gate_up_bias=experts.gate_up_bias,
            down=self.pack(experts.down),
            down_bias=experts.down_bias,
        )

    def _packed(self, *parts: str) -> Matrix:
        """A matrix to multiply by. Packing holds this one matrix twice for a moment."""
        return self.pack(self._matrix(*parts))

    def _matrix(self, *parts: str) -> Tensor:
        """One tensor, or several joined along their rows."""
        rows = sum(self.shapes[part][0] for part in parts)
        dtype = _stored_dtype(parts[0], self.dtype)
        joined = torch.empty(rows, *self.shapes[parts[0]][1:], dtype=dtype, device=self.device)
        start = 0
        for part in parts:
            stop = start + self.shapes[part][0]
            self._fill(joined[start:stop], part)
            start = stop
        return joined

    def _fill(self, target: Tensor, canonical: str) -> None:
        """Copy a checkpoint tensor into place, a bounded number of rows at a time."""
        name = self.names[canonical]
        stored_bytes = self.checkpoint.tensors[name].stored_bytes
        rows = target.shape[0]
        row_bytes = max(1, math.prod(target.shape[1:]) * 4)
        step = max(1, _CHUNK_BYTES // row_bytes)
        if step >= rows:
            target.copy_(self.checkpoint.read(name))
            self.progress(stored_bytes)
        else:
            for start in range(0, rows, step):
                stop = min(rows, start + step)
                target[start:stop].copy_(self.checkpoint.read(name, start, stop))
                self.progress(stored_bytes * stop // rows - stored_bytes * start // rows)
        part = canonical.rsplit(".", 1)[-1]
        if self.table.rope_interleaved and part in ("q", "k", "q_bias", "k_bias"):
            self._to_half_split(target, canonical)
        if self.spec.norm_offset and part.endswith("norm"):
            target += self.spec.norm_offset

    def _to_half_split(self, target: Tensor, canonical: str) -> None:
        """Rows of each head are stored as rotary pairs (0, 1), (2, 3) ...; we pair i with i + D / 2."""
        kind, index, _ = canonical.split(".", 2)
        layer = (self.spec.layers if kind == "layers" else self.spec.mtp_layers)[int(index)]
        head_dim = layer.attention.head_dim
        paired = target.reshape(-1, head_dim // 2, 2, *target.shape[1:])
        target.copy_(paired.transpose(1, 2).reshape(target.shape))

    def _check_shapes(self) -> None:
        for canonical, name in self.names.items():
            expected, found = self.shapes[canonical], self.checkpoint.tensors[name].shape
            if expected != found:
                raise StartupError(f"tensor {name} has shape {list(found)}, expected {list(expected)}")
