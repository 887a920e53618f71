"""Rotary parameters in every spelling that config.json files use."""

from __future__ import annotations

from server.errors import StartupError
from server.model.families.keys import Keys
from server.model.spec import RopeSpec


def read_rope(scaling: Keys | None, *, theta: float, rotary_dim: int, context_tokens: int) -> RopeSpec:
    """RoPE from a rope_scaling or rope_parameters object; None is plain RoPE."""
    if rotary_dim <= 0 or rotary_dim % 2:
        raise StartupError(f"rotary dimension {rotary_dim} is not a positive even number")
    if scaling is None:
        return RopeSpec(theta=theta, rotary_dim=rotary_dim)
    kind = scaling.choice(
        "rope_type", "type", allowed={name: name for name in ("default", "linear", "llama3")}, default="default"
    )
    if kind == "linear":
        return RopeSpec(theta=theta, rotary_dim=rotary_dim, linear_factor=scaling.number("factor"))
    if kind == "llama3":
        llama3 = (
            scaling.number("factor"),
            scaling.number("low_freq_factor"),
            scaling.number("high_freq_factor"),
            scaling.integer("original_max_position_embeddings", default=context_tokens),
        )
        return RopeSpec(theta=theta, rotary_dim=rotary_dim, llama3=llama3)
    return RopeSpec(theta=theta, rotary_dim=rotary_dim)
