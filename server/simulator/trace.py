"""Reads a lineage trace: real requests whose prompts are known only by what they share (`traces/README.md`)."""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from server.errors import StartupError

Blocks = NDArray[np.int64]
"""Block ids of a path, root first. A path holds each id once, and an id has the same parent in every path."""

MOST_TOKENS = 100_000_000
"""Of a prompt or an answer; a path's blocks are held in memory while it is played."""

_COLUMNS = ("t_s", "session", "kind", "src", "lcp", "n", "input", "output", "api_s", "think_s")


class Lineage:
    """Every request's path in O(1) memory a request: the id of its first own block, and whose path it continues.

    Ids are given out in trace order, so the own blocks of a request are consecutive: at position p its id is p plus a
    shift of that request. A path is a few such runs, found by following the links.

    Owner: read_trace, which fills it; afterwards it is only read.
    """

    __slots__ = ("_lengths", "_parents", "_shared", "_shifts", "block_count")

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._shared: list[int] = []
        self._lengths: list[int] = []
        self._shifts: list[int] = []
        self.block_count = 0

    def __repr__(self) -> str:
        return f"<Lineage {len(self._lengths)} paths, {self.block_count} blocks>"

    def append(self, *, source: int, shared_blocks: int, path_blocks: int) -> None:
        """The next request's path: the first `shared_blocks` of an earlier one's (-1: nobody's), then new blocks."""
        # The link goes to the owner of the last shared block, so that every hop of a walk gives a run.
        while shared_blocks and shared_blocks <= self._shared[source]:
            source = self._parents[source]
        self._parents.append(source)
        self._shared.append(shared_blocks)
        self._lengths.append(path_blocks)
        self._shifts.append(self.block_count - shared_blocks)
        self.block_count += path_blocks - shared_blocks

    def length(self, index: int) -> int:
        return self._lengths[index]

    def path(self, index: int) -> Blocks:
        """Block ids of one request's path, made anew by every call: O(its blocks), however long the trace is."""
        total = stop = self._lengths[index]
        shifts: list[int] = []
        lengths: list[int] = []
        while stop:
            start = self._shared[index]
            shifts.append(self._shifts[index])
            lengths.append(stop - start)
            stop, index = start, self._parents[index]
        path = np.arange(total, dtype=np.int64)
        path += np.repeat(np.array(shifts[::-1], dtype=np.int64), lengths[::-1])
        return path

    def check(self) -> None:
        """Assert that links go back to the owner of the last shared block, and that ids leave no gap."""
        given = 0
        for index, (parent, shared) in enumerate(zip(self._parents, self._shared, strict=True)):
            assert shared <= self._lengths[index] and self._shifts[index] + shared == given
            if shared:
                assert self._shared[parent] < shared <= self._lengths[parent] and parent < index
            given += self._lengths[index] - shared
        assert given == self.block_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request of a trace. Its prompt is a path of full blocks and a rest of less than one, shared with nobody.

    source: the earlier request that the first `shared_blocks` blocks are taken from, -1 for none.
    held_s: how long it ran. think_s and stop (of its own answer) are None where the trace does not tell; both are the
    future, for a policy may not look at them when the request arrives.
    """

    index: int
    arrival_s: float
    session: str
    kind: str
    source: int
    shared_blocks: int
    input_tokens: int
    output_tokens: int
    held_s: float
    think_s: float | None
    stop: str | None
    lineage: Lineage = field(repr=False, compare=False)

    @property
    def path_blocks(self) -> int:
        return self.lineage.length(self.index)

    @property
    def blocks(self) -> Blocks:
        """Block ids of the path, made anew by every call: all paths of a long trace do not fit into memory."""
        return self.lineage.path(self.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in order of arrival. Block ids are [0, block_count)."""

    block_tokens: int
    requests: list[Request]
    block_count: int

    def goes_on(self, request: Request) -> bool:
        """Whether its prompt holds all blocks of its source's: the next turn of that conversation."""
        shared = request.shared_blocks
        return request.source >= 0 and 0 < shared == self.requests[request.source].path_blocks


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """Read a lineage trace, `.csv` or `.csv.gz`, or its first `limit` requests.

    Raises StartupError with the file and the line if it cannot be read, or does not say what the format promises.
    """
    lineage = Lineage()
    requests: list[Request] = []
    line = 1
    try:
        with _open(path) as file:
            block_tokens = _block_tokens(file.readline())
            line = 2
            columns = _columns(file.readline())
            while limit is None or len(requests) < limit:
                line += 1
                row = file.readline()
                if not row:
                    break
                request = _request(_fields(row, columns), block_tokens, lineage, len(requests))
                if requests and request.arrival_s < requests[-1].arrival_s:
                    raise ValueError(f"t_s {request.arrival_s} is before that of the row above")
                requests.append(request)
    except (EOFError, OSError, ValueError, zlib.error) as error:
        if isinstance(error, OSError) and error.strerror:  # the file, and not what is in it
            raise StartupError(f"trace {path}: {error.strerror}") from error
        raise StartupError(f"trace {path}, line {line}: {error}") from error
    return Trace(block_tokens=block_tokens, requests=requests, block_count=lineage.block_count)


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _block_tokens(line: str) -> int:
    found = re.match(r"# block_size=([1-9]\d{0,8})\s", line)
    if found is None:
        raise ValueError("expected '# block_size=N', N a number of tokens")
    return int(found[1])


def _columns(line: str) -> tuple[str, ...]:
    columns = tuple(line.rstrip("\r\n").split(","))
    if columns not in (_COLUMNS, (*_COLUMNS, "stop")):
        raise ValueError(f"expected the column names {','.join(_COLUMNS)}[,stop]")
    return columns


def _fields(row: str, columns: tuple[str, ...]) -> dict[str, str]:
    fields = row.rstrip("\r\n").split(",")
    if len(fields) != len(columns):
        raise ValueError(f"{len(fields)} fields, but {len(columns)} columns")
    return dict(zip(columns, fields, strict=True))


def _request(fields: Mapping[str, str], block_tokens: int, lineage: Lineage, index: int) -> Request:
    source = _count(fields, "src", least=-1)
    shared, length = _count(fields, "lcp"), _count(fields, "n")
    input_tokens, output_tokens = _count(fields, "input"), _count(fields, "output")
    arrival_s, api_s = _seconds(fields, "t_s"), _seconds(fields, "api_s")
    if arrival_s is None:
        raise ValueError("t_s is missing")
    if source >= index:
        raise ValueError(f"src {source} is not an earlier request: this one is {index}")
    if shared > (lineage.length(source) if source >= 0 else 0):
        raise ValueError(f"lcp {shared} is more blocks than the prompt of src {source} has")
    if shared > length:
        raise ValueError(f"lcp {shared} is more blocks than n {length}")
    if length * block_tokens > input_tokens:
        raise ValueError(f"n {length} blocks of {block_tokens} tokens are more than input {input_tokens}")
    lineage.append(source=source, shared_blocks=shared, path_blocks=length)
    return Request(
        index=index,
        arrival_s=arrival_s,
        session=fields["session"],
        kind=fields["kind"],
        source=source,
        shared_blocks=shared,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        held_s=1.0 + output_tokens / 60.0 if api_s is None else api_s,
        think_s=_seconds(fields, "think_s"),
        stop=fields.get("stop") or None,
        lineage=lineage,
    )


def _count(fields: Mapping[str, str], name: str, least: int = 0) -> int:
    try:
        count = int(fields[name])
    except ValueError:
        raise ValueError(f"{name} {fields[name][:40]!r} is not a whole number") from None
    if not least <= count <= MOST_TOKENS:
        raise ValueError(f"{name} {count} is not between {least} and {MOST_TOKENS:,}")
    return count


def _seconds(fields: Mapping[str, str], name: str) -> float | None:
    """A time, or None for an empty field and for -1, which both mean that it is not known."""
    text = fields[name]
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError(f"{name} {text!r} is not a number of seconds") from None
    if seconds == -1.0:
        return None
    if not (math.isfinite(seconds) and seconds >= 0.0):
        raise ValueError(f"{name} {text!r} is not a time")
    return seconds
