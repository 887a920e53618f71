"""What a model is, as data: one decoder runs any tuple of `LayerSpec`s. Loads without torch.

Shape legend for the whole project: T tokens in the batch, S sequences, H query heads, K KV heads, D head dim (q and k),
V value head dim, E experts, A active experts, P pages, L layers, M hidden size, N vocabulary size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Activation(StrEnum):
    """The gate's activation in a gated MLP: silu (SwiGLU), gelu_tanh (GeGLU, tanh approximation) or clamped_swiglu
    (gpt-oss; formula in `kernels.interface.Kernels.gated`)."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    CLAMPED_SWIGLU = "clamped_swiglu"


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnSpec:
    """YaRN (Peng et al., arXiv 2309.00071, section 3.2): a frequency that turns more than beta_fast times within
    original_context tokens is kept, one that turns less than beta_slow times is divided by factor, linear between.

    truncate: whether the two ends of that ramp, counted in frequencies, are rounded outwards to whole ones.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_context: int
    truncate: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding, half-split (GPT-NeoX) pairing over the first `rotary_dim` dims of each head.

    linear_factor divides every frequency (Chen et al., arXiv 2306.15595). llama3, if set, is (factor, low_freq_factor,
    high_freq_factor, original_context): long wavelengths are divided by factor, short ones kept, smooth between.
    divisors, if set, has one entry per frequency and divides it (GGUF stores llama3 scaling this way).
    attention_factor multiplies cos and sin (YaRN's correction of the softmax's temperature).
    """

    theta: float
    rotary_dim: int
    linear_factor: float = 1.0
    llama3: tuple[float, float, float, int] | None = None
    divisors: tuple[float, ...] | None = None
    yarn: YarnSpec | None = None
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """window_keys: how many keys, the query's own included, a query sees; None is full attention.

    sinks: a learned logit per query head joins the softmax denominator. value_scale multiplies v before it is cached.
    qk_norm: RMSNorm over each head of q and k before RoPE. scale multiplies q.k.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    rope: RopeSpec
    scale: float
    window_keys: int | None = None
    sinks: bool = False
    value_scale: float = 1.0
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False

    @property
    def kv_elements_per_token(self) -> int:
        return self.kv_heads * (self.head_dim + self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """down(act(gate(x)) * up(x)) with `width` inner features."""

    width: int
    activation: Activation
    bias: bool = False


class Router(StrEnum):
    """How a token's experts are chosen and weighted; formulas in `kernels.interface.Kernels.route`.

    SIGMOID: the bias steers the choice only (DeepSeek-V3, MiMo). SOFTMAX: the bias belongs to the logits, and the
    weights are a softmax over the chosen ones (gpt-oss).
    """

    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


class ExpertFiles(StrEnum):
    """How a checkpoint stores the experts of a layer; shapes in `server.model.expert_files`.

    SPLIT: one matrix per expert and projection. INTERLEAVED: all experts of a layer in one tensor, rows of gate and up
    taking turns (gpt-oss). STACKED: all experts of a layer in one tensor per projection (GGUF). The MXFP4 ones stay in
    that format in memory.
    """

    SPLIT = "split"
    SPLIT_MXFP4 = "split_mxfp4"
    INTERLEAVED = "interleaved"
    INTERLEAVED_MXFP4 = "interleaved_mxfp4"
    STACKED = "stacked"
    STACKED_MXFP4 = "stacked_mxfp4"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """`active` of `experts` gated MLPs of `width` inner features each, with biases if bias. normalize and routed_scale
    are for the weights of the sigmoid router, see `kernels.interface.Kernels.route`."""

    experts: int
    active: int
    width: int
    activation: Activation
    router: Router = Router.SIGMOID
    normalize: bool = True
    routed_scale: float = 1.0
    bias: bool = False
    files: ExpertFiles = ExpertFiles.SPLIT


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer. post_norms: extra norms on the attention and MLP outputs before each residual add (Gemma)."""

    attention: AttentionSpec
    mlp: DenseSpec | MoESpec
    post_norms: bool = False

    @property
    def is_window(self) -> bool:
        return self.attention.window_keys is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A whole model. norm_offset is added to every norm weight (1 for Gemma, which stores w - 1).

    embedding_scale multiplies embeddings, rounded in the weights' dtype first. mtp_layers are multi-token-prediction
    layers: window layers with their own projections whose K/V shares the window page.
    """

    family: str
    hidden: int
    vocab: int
    context_tokens: int
    layers: tuple[LayerSpec, ...]
    mtp_layers: tuple[LayerSpec, ...] = ()
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    tied_embeddings: bool = False
    dtype: str = "bfloat16"

    @property
    def window_tokens(self) -> int:
        """W: the most earlier positions that any window layer sees; 0 without window layers."""
        windows = [
            layer.attention.window_keys - 1
            for layer in (*self.layers, *self.mtp_layers)
            if layer.attention.window_keys is not None
        ]
        return max(windows, default=0)

    def kv_elements_per_token(self, *, window: bool) -> int:
        """K and V elements that one position costs in full layers, or in window and MTP layers."""
        chosen = [layer for layer in self.layers if layer.is_window == window]
        if window:
            chosen += self.mtp_layers
        return sum(layer.attention.kv_elements_per_token for layer in chosen)


def head_scale(head_dim: int) -> float:
    """The usual softmax scale, 1 / sqrt(head dim)."""
    return 1.0 / math.sqrt(head_dim)
