"""Rotary parameters in every spelling that config.json files use."""

from __future__ import annotations

import math
from dataclasses import replace

from server.errors import StartupError
from server.model.families.keys import Keys
from server.model.spec import RopeSpec, YarnSpec

KINDS = ("default", "linear", "llama3", "yarn")


def read_rope(scaling: Keys | None, *, theta: float, rotary_dim: int, context_tokens: int) -> RopeSpec:
    """RoPE from a rope_scaling or rope_parameters object; None is plain RoPE."""
    if rotary_dim <= 0 or rotary_dim % 2:
        raise StartupError(f"rotary dimension {rotary_dim} is not a positive even number")
    plain = RopeSpec(theta=theta, rotary_dim=rotary_dim)
    if scaling is None:
        return plain
    kind = scaling.choice("rope_type", "type", allowed={name: name for name in KINDS}, default="default")
    if kind == "linear":
        return replace(plain, linear_factor=scaling.number("factor"))
    if kind == "llama3":
        llama3 = (
            scaling.number("factor"),
            scaling.number("low_freq_factor"),
            scaling.number("high_freq_factor"),
            scaling.integer("original_max_position_embeddings", default=context_tokens),
        )
        return replace(plain, llama3=llama3)
    if kind == "yarn":
        return _yarn(scaling, plain, context_tokens)
    return plain


def _yarn(scaling: Keys, plain: RopeSpec, context_tokens: int) -> RopeSpec:
    """Defaults are those of transformers 5.24; a factor that is left out is how far the context was extended."""
    if plain.theta <= 1.0:
        raise StartupError(f"{scaling.where}: yarn needs a rope_theta above 1, found {plain.theta:g}")
    original = scaling.integer("original_max_position_embeddings", default=context_tokens)
    factor = scaling.number("factor", default=context_tokens / original)
    yarn = YarnSpec(
        factor=factor,
        beta_fast=scaling.number("beta_fast", default=32.0),
        beta_slow=scaling.number("beta_slow", default=1.0),
        original_context=original,
        truncate=scaling.boolean("truncate", default=True),
    )
    if scaling.has("attention_factor"):
        attention_factor = scaling.number("attention_factor")
    elif scaling.has("mscale") and scaling.has("mscale_all_dim"):
        attention_factor = magnitude(factor, scaling.number("mscale")) / magnitude(
            factor, scaling.number("mscale_all_dim")
        )
    else:
        attention_factor = magnitude(factor)
    return replace(plain, yarn=yarn, attention_factor=attention_factor)


def magnitude(factor: float, scale: float = 1.0) -> float:
    """What cos and sin are multiplied by where positions are stretched. Source: YaRN, arXiv 2309.00071, equation 22."""
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0
