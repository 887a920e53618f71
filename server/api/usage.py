"""The usage object, the same in every response that has one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class PromptTokens:
    """Of all prompts of a call, and how many of them were cached: known when their requests are admitted. Owner: the
    call's Job."""

    total: int = 0
    cached: int = 0


def usage(prompt: PromptTokens, *, completion_tokens: int) -> dict[str, Any]:
    """A prompt counts once, however many choices were made of it; every sampled token counts.

    The prediction counts belong to the `prediction` parameter of a request, not to speculative decoding.
    """
    return {
        "prompt_tokens": prompt.total,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt.total + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": prompt.cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
