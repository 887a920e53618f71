"""What each tensor of a model is called in a checkpoint.

Canonical names are `embedding`, `final_norm`, `head`, `layers.3.q`, `layers.3.experts.5.gate`, `mtp.0.enorm`. Parts of
a layer: attention_norm, q, k, v, o and their biases (q_bias ...), q_norm, k_norm, sinks, attention_post_norm, mlp_norm,
gate, up, down and their biases, router, router_bias, experts.N.{gate,up,down}, mlp_post_norm. An MTP layer adds enorm,
hnorm, eh_proj and final_norm.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

Names = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Templates with {prefix}, {layer} and {expert}, tried in order; the prefix is the one that holds the embedding.

    ignored are regular expressions for whole names of tensors that this server leaves unread on purpose.
    rope_interleaved: rows of q and k are stored for interleaved rotary pairs and must be put back in half-split order.
    """

    prefixes: tuple[str, ...]
    top: Names
    layer: Names
    mtp: Names = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    rope_interleaved: bool = False

    def prefix_in(self, present: Collection[str]) -> str:
        for prefix in self.prefixes:
            if any(template.format(prefix=prefix) in present for template in self.top["embedding"]):
                return prefix
        return self.prefixes[0]

    def candidates(self, canonical: str, prefix: str) -> tuple[str, ...]:
        """Checkpoint names of one canonical tensor, best first."""
        if canonical in self.top:
            return tuple(template.format(prefix=prefix) for template in self.top[canonical])
        kind, layer, part = canonical.split(".", 2)
        expert = ""
        if part.startswith("experts."):
            _, expert, matrix = part.split(".")
            part = f"expert_{matrix}"
        table = self.layer if kind == "layers" else self.mtp
        return tuple(template.format(prefix=prefix, layer=layer, expert=expert) for template in table[part])

    def is_ignored(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)


GGUF_NAMES = {
    "attention_norm": ("blk.{layer}.attn_norm.weight",),
    **{part: (f"blk.{{layer}}.attn_{part}.weight",) for part in ("q", "k", "v")},
    **{f"{part}_bias": (f"blk.{{layer}}.attn_{part}.bias",) for part in ("q", "k", "v")},
    "o": ("blk.{layer}.attn_output.weight",),
    "o_bias": ("blk.{layer}.attn_output.bias",),
    **{part: (f"blk.{{layer}}.ffn_{part}.weight",) for part in ("gate", "up", "down")},
    **{f"{part}_bias": (f"blk.{{layer}}.ffn_{part}.bias",) for part in ("gate", "up", "down")},
    "mlp_norm": ("blk.{layer}.ffn_norm.weight",),
}
GGUF_TOP = {"embedding": ("token_embd.weight",), "final_norm": ("output_norm.weight",), "head": ("output.weight",)}

HF_TOP = {
    "embedding": ("{prefix}embed_tokens.weight",),
    "final_norm": ("{prefix}norm.weight",),
    "head": ("lm_head.weight",),
}


def hf_layer(prefix: str) -> dict[str, tuple[str, ...]]:
    """The names that nearly all decoders on the hub share, below `prefix`."""
    return {
        "attention_norm": (f"{prefix}input_layernorm.weight",),
        **{part: (f"{prefix}self_attn.{part}_proj.weight",) for part in ("q", "k", "v", "o")},
        **{f"{part}_bias": (f"{prefix}self_attn.{part}_proj.bias",) for part in ("q", "k", "v", "o")},
        "mlp_norm": (f"{prefix}post_attention_layernorm.weight",),
        **{part: (f"{prefix}mlp.{part}_proj.weight",) for part in ("gate", "up", "down")},
        **{f"{part}_bias": (f"{prefix}mlp.{part}_proj.bias",) for part in ("gate", "up", "down")},
    }
