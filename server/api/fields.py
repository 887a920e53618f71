"""One JSON value, checked and typed, or refused with its path. The words every parser of this folder is made of.

A parser takes (value, path) and returns the typed value or raises BadRequest. `null` and absent mean the same for an
optional field. JSON has one number type, so 16.0 is the integer 16; true is not the number 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from server.api.limits import MAX_NAME_CHARACTERS
from server.errors import BadRequest

T = TypeVar("T")
Json = Any
Parser = Callable[[Json, str], T]

MAX_EXACT_INTEGER = 2**63 - 1
SHOWN_CHARACTERS = 64


def kind_of(value: Json) -> str:
    """How error messages name the JSON type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a decimal number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"


def shown(value: Json) -> str:
    """A value inside a message: short, whatever the caller sent."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def at(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def wrong_type(path: str, expected: str, value: Json) -> NoReturn:
    raise BadRequest(
        f"Invalid type for '{path}': expected {expected}, but got {kind_of(value)} instead.",
        param=path,
        code="invalid_type",
    )


def missing(path: str) -> NoReturn:
    raise BadRequest(f"Missing required parameter: '{path}'.", param=path, code="missing_required_parameter")


def unsupported(path: str, message: str) -> NoReturn:
    raise BadRequest(message, param=path, code="unsupported_value")


def invalid(path: str, message: str) -> NoReturn:
    raise BadRequest(message, param=path, code="invalid_value")


# --- scalars ------------------------------------------------------------------------------------------------------


def boolean(value: Json, path: str) -> bool:
    if not isinstance(value, bool):
        wrong_type(path, "a boolean", value)
    return value


def string(value: Json, path: str) -> str:
    if not isinstance(value, str):
        wrong_type(path, "a string", value)
    return value


def integer(*, minimum: int = -MAX_EXACT_INTEGER - 1, maximum: int = MAX_EXACT_INTEGER) -> Parser[int]:
    def parse(value: Json, path: str) -> int:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            wrong_type(path, "an integer", value)
        if isinstance(value, float):
            if not value.is_integer():
                wrong_type(path, "an integer", value)
            value = int(value)
        if value > maximum:
            _out_of_range(path, "integer", "above", f"<= {maximum}", value)
        if value < minimum:
            _out_of_range(path, "integer", "below", f">= {minimum}", value)
        return int(value)

    return parse


def number(*, minimum: float = -math.inf, maximum: float = math.inf, above: float | None = None) -> Parser[float]:
    """A finite number in [minimum, maximum]; `above` excludes its own value."""

    def parse(value: Json, path: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            wrong_type(path, "a number", value)
        if not math.isfinite(value):
            invalid(path, f"Invalid '{path}': expected a finite number.")
        if value > maximum:
            _out_of_range(path, "decimal", "above", f"<= {maximum:g}", value)
        if value < minimum:
            _out_of_range(path, "decimal", "below", f">= {minimum:g}", value)
        if above is not None and value <= above:
            _out_of_range(path, "decimal", "below", f"> {above:g}", value)
        return float(value)

    return parse


def name(value: Json, path: str) -> str:
    """A name or an id: a string of moderate length."""
    text = string(value, path)
    if len(text) > MAX_NAME_CHARACTERS:
        too_long(path, MAX_NAME_CHARACTERS)
    return text


def one_of(*choices: str) -> Parser[str]:
    def parse(value: Json, path: str) -> str:
        if string(value, path) not in choices:
            names = [f"'{choice}'" for choice in choices]
            listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
            invalid(path, f"Invalid value: '{shown(value)}'. Supported values are: {listed}.")
        return str(value)

    return parse


def _out_of_range(path: str, kind: str, side: str, expected: str, value: float) -> NoReturn:
    bound = "maximum" if side == "above" else "minimum"
    raise BadRequest(
        f"Invalid '{path}': {kind} {side} {bound} value. Expected a value {expected}, but got {shown(value)} instead.",
        param=path,
        code=f"{kind}_{side}_{bound[:3]}_value",
    )


# --- containers ---------------------------------------------------------------------------------------------------


def json_object(value: Json, path: str) -> dict[str, Json]:
    if not isinstance(value, dict):
        wrong_type(path, "an object", value)
    return value


def array(
    item: Parser[T], *, of: str = "values", minimum: int = 0, maximum: int | None = None
) -> Parser[tuple[T, ...]]:
    def parse(value: Json, path: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            wrong_type(path, f"an array of {of}", value)
        if len(value) < minimum:
            empty_array(path)
        if maximum is not None and len(value) > maximum:
            too_many(path, len(value), maximum)
        return elements(item, value, path)

    return parse


def elements(item: Parser[T], values: list[Json], path: str) -> tuple[T, ...]:
    """Every element of an array, parsed. Only the path of one that is refused is spelled out, by a second look."""
    parsed: list[T] = []
    try:
        for entry in values:
            parsed.append(item(entry, path))
    except BadRequest:
        i = len(parsed)
        item(values[i], f"{path}[{i}]")
        raise
    return tuple(parsed)


def empty_array(path: str) -> NoReturn:
    raise BadRequest(
        f"Invalid '{path}': empty array. Expected an array with minimum length 1, but got an empty array instead.",
        param=path,
        code="empty_array",
    )


def empty_string(path: str) -> NoReturn:
    invalid(
        path,
        f"Invalid '{path}': empty string. Expected a string with minimum length 1, but got an empty string instead.",
    )


def too_many(path: str, length: int, maximum: int) -> NoReturn:
    invalid(
        path,
        f"Invalid '{path}': array too long. Expected an array with maximum length {maximum}, but got an array with "
        f"length {length} instead.",
    )


def too_many_keys(path: str, length: int, maximum: int) -> NoReturn:
    invalid(path, f"Invalid '{path}': too many keys. Expected at most {maximum}, but got {length}.")


def too_long(path: str, maximum: int) -> NoReturn:
    invalid(path, f"Invalid '{path}': string too long. Expected a string with maximum length {maximum}.")


# --- tables -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Field(Generic[T]):
    """One row of a table of fields: how to parse it, and what absent means. A required field has no default."""

    parse: Parser[T]
    default: T | None = None
    required: bool = False


Table = Mapping[str, Field[Any]]


def read(table: Table, source: Mapping[str, Json], path: str = "") -> dict[str, Any]:
    """Every field of the table, parsed in the table's order."""
    return {name: _read_one(row, name, source, path) for name, row in table.items()}


def _read_one(row: Field[Any], name: str, source: Mapping[str, Json], path: str) -> Any:
    value = source.get(name)
    if value is not None:
        return row.parse(value, at(path, name))
    if row.required:
        if name not in source:
            missing(at(path, name))
        return row.parse(None, at(path, name))
    return row.default
