"""What a run found: plain values, to and from JSON, and the medians that every table and plot is made of."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

BUSY_CORES = 0.3
"""A repeat during which other processes used more than this is not clean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """One measured value of one server. other_cores: how busy the rest of the machine was."""

    model: str
    peer: str
    round: int
    metric: str
    value: float
    other_cores: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """What could not be measured, and why. metric None is the whole server."""

    model: str
    peer: str
    reason: str
    metric: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What turns rates of one model into bytes and FLOPs: see bench.weights.Work. prefill_flop is by prompt tokens."""

    weights: int
    prefill_flop: dict[str, float]


@dataclass(slots=True, kw_only=True)
class Results:
    """Owner: the run, which appends. labels gives the servers in the order of the tables' columns."""

    machine: dict[str, str]
    labels: dict[str, str]
    costs: dict[str, Cost] = field(default_factory=dict)
    bytes_per_weight: dict[str, float] = field(default_factory=dict)  # of servers for which the processor decides it
    ceilings: list[dict[str, float]] = field(default_factory=list)
    repeats: list[Repeat] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys([each.model for each in self.repeats] + [each.model for each in self.missing]))

    def cell(self, model: str, peer: str, metric: str) -> Cell | None:
        """The median of the clean repeats; of all of them where none was clean, and then marked so."""
        found = [r for r in self.repeats if (r.model, r.peer, r.metric) == (model, peer, metric)]
        if not found:
            return None
        clean = [repeat for repeat in found if repeat.other_cores <= BUSY_CORES]
        values = [repeat.value for repeat in clean or found]
        return Cell(median=statistics.median(values), low=min(values), high=max(values), disturbed=not clean)

    def why_missing(self, model: str, peer: str, metric: str) -> str | None:
        """The reason for an empty cell, the metric's own before the server's."""
        reasons = [m for m in self.missing if (m.model, m.peer) == (model, peer) and m.metric in (metric, None)]
        return next((m.reason for m in sorted(reasons, key=lambda m: m.metric is None)), None)

    def rounds(self, model: str, peer: str) -> int:
        """In how many rounds something of a server was measured."""
        return len({repeat.round for repeat in self.repeats if (repeat.model, repeat.peer) == (model, peer)})

    def ceiling(self, name: str) -> float | None:
        """The best of all rounds: others can only take away from it."""
        return max((each[name] for each in self.ceilings), default=None)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    median: float
    low: float
    high: float
    disturbed: bool


def _now_called(metric: str) -> str:
    """Files of before cold prompts were sampled too say "ttft/2000" for what is now "ttft-2000/greedy"."""
    kind, _, detail = metric.partition("/")
    return f"ttft-{detail}/greedy" if kind == "ttft" else metric


def read(path: Path) -> Results:
    """What `Results.write` wrote, by this version or an earlier one."""
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return Results(
        machine=loaded["machine"],
        labels=loaded["labels"],
        costs={model: Cost(**cost) for model, cost in loaded["costs"].items()},
        bytes_per_weight=loaded.get("bytes_per_weight", {}),
        ceilings=loaded["ceilings"],
        repeats=[Repeat(**{**each, "metric": _now_called(each["metric"])}) for each in loaded["repeats"]],
        missing=[
            Missing(**{**each, "metric": _now_called(each["metric"] or "") or None}) for each in loaded["missing"]
        ],
    )
