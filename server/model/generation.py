"""What a model's authors recommend for sampling, and the ids that end its text. Loads without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.errors import StartupError
from server.model.json_file import read_json_object
from server.request import SamplingDefaults

_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (0, 2**31),
    "repetition_penalty": (0.01, 100.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """sampling: what a request that does not say gets. end_token_ids: what ends a text."""

    sampling: SamplingDefaults
    end_token_ids: frozenset[int] = frozenset()


def read_generation_config(
    folder: Path | None, *, source: str, override: str | None, config: Mapping[str, Any]
) -> GenerationConfig:
    """Recommended sampling and end ids. `folder` is the model's own, None if it has none (GGUF).

    source: "auto" takes the model's own file, "none" and "vllm" no recommendation, anything else is a folder. override
    is a JSON object whose entries win. End ids come from the model's own files whatever `source` says, since they are
    no matter of taste. `do_sample` is ignored: published files contradict their own temperature with it.
    """
    own = _read(folder) if folder is not None else {}
    chosen: Mapping[str, Any] = own
    if source in ("none", "vllm"):
        chosen = {}
    elif source != "auto":
        if not Path(source).expanduser().is_dir():
            raise StartupError(f"--generation-config: {source!r} is neither auto, none, vllm nor a folder")
        chosen = _read(Path(source).expanduser())
    merged = {**chosen, **_parse_override(override)}
    values: dict[str, Any] = {}
    for name, (low, high) in _RANGES.items():
        value = merged.get(name)
        if value is None:
            continue
        if name == "top_k" and value == -1:
            value = 0  # vLLM's word for no limit
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise StartupError(f"generation config: {name} is {value!r}, expected a number from {low:g} to {high:g}")
        if name == "top_k" and not isinstance(value, int):
            raise StartupError(f"generation config: top_k is {value!r}, expected a whole number")
        values[name] = value
    return GenerationConfig(sampling=SamplingDefaults(**values), end_token_ids=_ids(own) | _ids(config))


def _parse_override(override: str | None) -> Mapping[str, Any]:
    if override is None:
        return {}
    try:
        parsed = json.loads(override)
    except ValueError as error:
        raise StartupError(f"--override-generation-config is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise StartupError("--override-generation-config must be a JSON object")
    unknown = sorted(set(parsed) - set(_RANGES))
    if unknown:
        raise StartupError(
            f"--override-generation-config: {', '.join(unknown)} cannot be set; known are {', '.join(_RANGES)}"
        )
    return parsed


def _read(folder: Path) -> Mapping[str, Any]:
    path = folder / "generation_config.json"
    return read_json_object(path) if path.is_file() else {}


def _ids(config: Mapping[str, Any]) -> frozenset[int]:
    value = config.get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return frozenset(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)
