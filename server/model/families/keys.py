"""Typed access to config.json and GGUF metadata: a wrong or missing key is a StartupError that names it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from server.errors import StartupError

_REQUIRED: Any = object()
_MAX_INTEGER = 2**31 - 1
T = TypeVar("T")


class Keys:
    """Reads a mapping of untrusted values. Several names mean: the first that is present and not null."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def find(self, *names: str) -> tuple[str, Any] | None:
        for name in names:
            if self.values.get(name) is not None:
                return name, self.values[name]
        return None

    def has(self, *names: str) -> bool:
        return self.find(*names) is not None

    def wrong(self, name: str, expected: str) -> StartupError:
        return StartupError(f"{self.where}: {name} is {str(self.values.get(name))[:80]!r}, expected {expected}")

    def _take(self, names: tuple[str, ...], default: T) -> tuple[str, Any] | T:
        found = self.find(*names)
        if found is not None:
            return found
        if default is _REQUIRED:
            raise StartupError(f"{self.where}: key {' or '.join(names)} is missing")
        return default

    def integer(self, *names: str, default: Any = _REQUIRED, minimum: int = 1) -> int:
        found = self._take(names, default)
        if not isinstance(found, tuple):
            return int(found)
        name, value = found
        if not _is_finite(value) or value != int(value) or not minimum <= value <= _MAX_INTEGER:
            raise self.wrong(name, f"a whole number of at least {minimum}")
        return int(value)

    def number(self, *names: str, default: Any = _REQUIRED, positive: bool = True) -> float:
        found = self._take(names, default)
        if not isinstance(found, tuple):
            return float(found)
        name, value = found
        if not _is_finite(value) or (positive and not value > 0):
            raise self.wrong(name, "a positive number" if positive else "a number")
        return float(value)

    def boolean(self, *names: str, default: Any = _REQUIRED) -> bool:
        found = self._take(names, default)
        if not isinstance(found, tuple):
            return bool(found)
        name, value = found
        if value not in (0, 1):
            raise self.wrong(name, "true or false")
        return bool(value)

    def text(self, *names: str, default: Any = _REQUIRED) -> str:
        found = self._take(names, default)
        if not isinstance(found, tuple):
            return str(found)
        name, value = found
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def choice(self, *names: str, allowed: Mapping[str, T], default: Any = _REQUIRED) -> T:
        name = next((n for n in names if n in self.values), names[0])
        value = self.text(*names, default=default)
        if value not in allowed:
            raise StartupError(f"{self.where}: {name} is {value!r}, supported are {', '.join(sorted(allowed))}")
        return allowed[value]

    def section(self, name: str) -> Keys | None:
        """A nested object, or None when absent or null."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return Keys(value, f"{self.where}: {name}")

    def per_layer(self, name: str, *, layers: int, allowed: Mapping[Any, T]) -> list[T] | None:
        """A list with one entry per layer, translated by `allowed`; None when absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != layers:
            raise self.wrong(name, f"a list of {layers} entries")
        chosen = []
        for layer, entry in enumerate(value):
            if not isinstance(entry, int | str) or entry not in allowed:
                raise StartupError(
                    f"{self.where}: {name}[{layer}] is {entry!r}, expected one of {', '.join(map(str, allowed))}"
                )
            chosen.append(allowed[entry])
        return chosen

    def forbid(self, name: str, *harmless: Any) -> None:
        """A feature that would change the result and is not built: any value but null and the harmless ones."""
        value = self.values.get(name)
        if value is not None and value not in harmless:
            raise StartupError(f"{self.where}: {name} = {str(value)[:80]!r} is not supported")


def _is_finite(value: Any) -> bool:
    """Whether a value is a number that a float can hold; JSON as Python reads it also knows NaN and Infinity."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def read_dtype(keys: Keys) -> str:
    return keys.choice(
        "dtype",
        "torch_dtype",
        allowed={name: name for name in ("bfloat16", "float16", "float32")},
        default="bfloat16",
    )
