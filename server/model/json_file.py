"""The JSON files that describe a model. Loads without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from server.errors import StartupError


def read_json_object(path: Path) -> Mapping[str, Any]:
    """The object that a file holds. Raises StartupError with one line that names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise StartupError(f"{path} is not a JSON object")
    return content
