"""What a model needs from a backend. Backends know nothing of the server; the torch reference is the specification.

Shape letters: T tokens of the step, H query heads, K KV heads, D head dim of q and k, V value head dim, M hidden size,
E experts, A active experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from kernels.packing import Packing
from kernels.quantized import Matrix

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
RouterKind = Literal["sigmoid", "softmax"]

SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKV:
    """One layer's K and V: k [slabs, pages_per_slab, K, page_tokens, D], v the same with V. Strided views, written in
    place. Page p is at [p // pages_per_slab, p % pages_per_slab]."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rows of a step: row r computes positions [starts[r], starts[r] + counts[r]) of the sequence in slots[r].

    The tokens of the step are the rows' tokens one after another.
    """

    slots: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGeometry:
    page_tokens: int
    pages_per_slab: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteIndex:
    """Where each token's K and V go: slab, page in the slab and offset in the page, each [T] int64."""

    slab: Tensor
    page: Tensor
    offset: Tensor


class Kernels(Protocol):
    """Chosen once, at start. Plans are opaque to callers: built once per step and shared by all layers of a kind."""

    @property
    def description(self) -> str:
        """What runs, and how weights are kept, in a few words."""
        ...

    def plan_attention(self, rows: StepRows, table: Tensor, geometry: PageGeometry, window_keys: int | None) -> Any:
        """What attention over one page table needs, for one window (None: full attention).

        table [slots, max_pages] int32: logical page -> page id. A query at position q sees keys (q - window_keys, q],
        or [0, q]. Entries of pages wholly outside what the rows see may be stale and are never followed.
        """
        ...

    def attention(self, q: Tensor, kv: PagedKV, plan: Any, *, scale: float, sinks: Tensor | None) -> Tensor:
        """q [T, H, D] -> [T, H, V]. All K and V, the rows' own included, are read from pages written before.

        Query head h reads KV head h // (H / K). sinks [H] fp32: exp(sink) joins the softmax denominator.
        """
        ...

    def write_kv(self, kv: PagedKV, k: Tensor, v: Tensor, index: WriteIndex) -> None:
        """Store k [T, K, D] and v [T, K, V]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., M] / sqrt(mean(x^2) + eps) * weight, computed in fp32; weight [M] or broadcastable against x."""
        ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate the first R dims of x [T, heads, D] in place, pairing dim i with i + R / 2.

        cos, sin [T, 1, R], each the half-width table twice, the first half of sin negated.
        """
        ...

    def pack(self, weight: Matrix) -> Matrix:
        """A matrix [out, in] in the form that this backend's `linear` reads; done once, when it is loaded.

        A quantized matrix is never quantized again: it stays as the checkpoint has it, or is laid out anew.
        """
        ...

    def packing(self, shape: Sequence[int]) -> Packing:
        """`pack` for a matrix [N, K] or [E, N, K] that is read a few rows at a time."""
        ...

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        """x [T, in] times weight [out, in] transposed, plus bias [out]. weight is packed or plain; a quantized one
        means its values in x's dtype."""
        ...

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """gate_up [T, 2 * width], gate first -> act(gate) * up [T, width].

        silu: gate * sigmoid(gate) * up. gelu_tanh: the tanh approximation of GELU, times up. clamped_swiglu: with
        g = min(gate, SWIGLU_LIMIT) and u = max(-SWIGLU_LIMIT, min(up, SWIGLU_LIMIT)),
        (u + 1) * g * sigmoid(SWIGLU_ALPHA * g), in fp32 and rounded once. Source: gpt-oss model card,
        arXiv 2508.10925, and `GptOssExperts._apply_gate` of transformers 5.24.
        """
        ...

    def route(
        self,
        x: Tensor,
        router: Tensor,
        bias: Tensor,
        *,
        kind: RouterKind,
        active: int,
        normalize: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Choose a token's experts and their weights, in fp32.

        x [T, M], router [E, M] fp32, bias [E] fp32 -> experts [T, A] int64 in any order, weights [T, A] fp32.

        sigmoid: scores = sigmoid(router x); the A highest of scores + bias are chosen; weights are their scores without
        the bias, divided by their sum if normalize, times scale. Source: arXiv 2412.19437, section 2.1.2. The bias only
        steers load, so it must not reach the weights.

        softmax: logits = router x + bias; the A highest are chosen; weights are the softmax over these A logits alone,
        times scale; normalize changes nothing. Source: `GptOssTopKRouter` of transformers 5.24.
        """
        ...

    def experts(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        gate_up: Matrix,
        down: Matrix,
        activation: Activation,
        *,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor:
        """Sum over a token's chosen experts e of weight * (down_e gated(gate_up_e x + gate_up_bias_e) + down_bias_e).

        x [T, M], chosen and weights [T, A], gate_up [E, 2 * width, M] with gate's rows first, down [E, M, width],
        gate_up_bias [E, 2 * width] and down_bias [E, M] in x's dtype -> [T, M].
        """
        ...
