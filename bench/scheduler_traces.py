"""How long requests of real traces wait under each policy of the scheduler.

    python -m bench.scheduler_traces
    python -m bench.scheduler_traces --cases conversation-70 --ways uncached-first fcfs --output /tmp/waits

Serves `bench/data/traces` with the server's own scheduler and cache, on the clock of a cost model, once in each way,
and writes tables (.md), a picture (.png) and all figures (.json). The whole takes about twenty minutes of one core;
figures of an earlier run stay until they are measured anew, so it may be done in parts. All ways of a case have the
same cache, the same arrivals (in a closed loop, the same times to think) and the same sizes of steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from server.cache.kv_cache import CachePolicy
from server.config import SchedulerConfig
from server.simulator.command import page_tokens_of
from server.simulator.figures import COLD, EVERYBODY, KINDS, LONG, SHORT, Figures, draw, spread
from server.simulator.models import PRESETS
from server.simulator.serve_command import Plan, compare
from server.simulator.setting import Setting
from server.simulator.step_costs import COST_MODELS
from server.simulator.trace import read_trace

HERE = Path(__file__).parent
MODEL = PRESETS["mimo-v2.5-pro"]
COST_MODEL = COST_MODELS["mimo-v2.5-pro-8gpu"]
FCFS, OURS = "fcfs", "uncached-first"
PLAIN_FCFS = "fcfs, one lane"
"""As servers without lanes do it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A trace, its first `limit` requests, and how they come."""

    trace: str
    limit: int
    budget_gb: float
    load: float
    closed: bool

    def __str__(self) -> str:
        loop = "closed loop" if self.closed else "open loop"
        return f"{self.trace}, the first {self.limit:,} requests, {self.budget_gb:g} GB, {loop}, load {self.load:g}"


AGENTIC, CONVERSATION = "agentic_cc_local", "mooncake_conversation"
CASES: Mapping[str, Case] = {
    "agentic-50": Case(trace=AGENTIC, limit=3_000, budget_gb=256, load=0.5, closed=True),
    "conversation-70": Case(trace=CONVERSATION, limit=4_000, budget_gb=1_024, load=0.7, closed=False),
    "conversation-110": Case(trace=CONVERSATION, limit=4_000, budget_gb=1_024, load=1.1, closed=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A policy, whether prompts are divided into lanes by their length, and what a second of waiting forgives; None is
    as much as by default, which follows from what is computed in it."""

    policy: str
    lanes: bool = True
    forgiven_tokens_per_s: float | None = None

    def settings(self) -> SchedulerConfig:
        given = COST_MODEL.scheduler
        lanes = given.lane_tokens if self.lanes else ()
        return replace(given, lane_tokens=lanes, forgiven_tokens_per_s=self.forgiven_tokens_per_s)


WAYS: Mapping[str, Way] = {
    OURS: Way(policy=OURS),
    FCFS: Way(policy=FCFS),
    "longest-prefix": Way(policy="longest-prefix"),
    "shortest-first": Way(policy="shortest-first"),
    "uncached-first, 32,000 tokens/s": Way(policy=OURS, forgiven_tokens_per_s=32_000),
    PLAIN_FCFS: Way(policy=FCFS, lanes=False),
}
"""In one lane, the first in line has all of a step's prompt tokens; so fcfs is as plain as it can be. tokens/s: what
waiting forgives, half of what the cost model computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Ours is to be at most so many times what fcfs is."""

    case: str
    kind: str
    quantile: str
    most: float


TARGETS = (
    Target(case="agentic-50", kind=LONG, quantile="p90", most=0.7),
    Target(case="agentic-50", kind=SHORT, quantile="p50", most=1.0),
    Target(case="agentic-50", kind=SHORT, quantile="p90", most=1.0),
    Target(case="conversation-70", kind=SHORT, quantile="p50", most=0.5),
    Target(case="conversation-70", kind=EVERYBODY, quantile="p90", most=0.7),
    Target(case="conversation-70", kind=COLD, quantile="p90", most=2.0),
)
SHOWN = (EVERYBODY, SHORT, COLD, LONG)

Found = dict[str, dict[str, Figures]]
"""Case -> way -> figures."""


def measure(case: Case, ways: Sequence[str]) -> dict[str, Figures]:
    trace = read_trace(HERE / "data" / "traces" / f"{case.trace}.lineage.csv.gz", case.limit)
    setting = Setting(
        trace=trace,
        shape=MODEL,
        page_tokens=page_tokens_of(trace),
        chunk_tokens=COST_MODEL.scheduler.prefill_chunk_tokens,
        policy=CachePolicy(),
    )
    found: dict[str, Figures] = {}
    for scheduler in dict.fromkeys(WAYS[name].settings() for name in ways):
        wanted = {name: WAYS[name].policy for name in ways if WAYS[name].settings() == scheduler}
        plan = Plan(cost_model=COST_MODEL, scheduler=scheduler, closed=case.closed, load=case.load)
        compared = compare(setting, case.budget_gb, plan, tuple(wanted.values()))
        found |= zip(wanted, compared.figures, strict=True)
    return found


def table(figures: Mapping[str, Figures]) -> str:
    """A row a way: TTFT of each kind of requests, and the rest."""
    first = next(iter(figures.values()))
    kinds = [kind for kind in SHOWN if first.kinds[kind].requests]
    heads = [f"{kind} ({first.kinds[kind].requests:,})" for kind in kinds]
    lines = [
        f"| TTFT in s: P50 / P90 / P99 | {' | '.join(heads)} | ITL in ms | hits | preempted | overtaken too late |",
        "|---|" + "---|" * (len(kinds) + 4),
    ]
    for name, each in figures.items():
        cells = [
            *(spread(each.kinds[kind].ttft_s, 1.0) for kind in kinds),
            spread(each.kinds[EVERYBODY].itl_s, 1e3),
            f"{each.hit_rate:.1%}",
            f"{each.preemptions:,}",
            f"{each.overtaken_late:,} ({each.overtaken_late_at_arrival:,})",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def targets(found: Found) -> str:
    lines = ["| ours against first come, first served | target | without lanes | with our lanes |", "|---|---|---|---|"]
    for target in TARGETS:
        ours = found.get(target.case, {}).get(OURS)
        if ours is not None:
            against = [_ratio(ours, found[target.case].get(name), target) for name in (PLAIN_FCFS, FCFS)]
            lines.append(
                f"| {target.case}: {target.quantile.upper()} TTFT, {KINDS[target.kind]} | at most x {target.most:g} | "
                f"{' | '.join(against)} |"
            )
    for case, ways in found.items():
        if OURS in ways:
            late = ways[OURS].overtaken_late
            lines.append(f"| {case}: overtaken too late | 0 | {late} | |")
    return "\n".join(lines)


def _ratio(ours: Figures, theirs: Figures | None, target: Target) -> str:
    if theirs is None:
        return "-"
    mine, base = (getattr(each.kinds[target.kind].ttft_s, target.quantile) for each in (ours, theirs))
    return f"x {mine / base:.2f}{'' if mine <= target.most * base else ' (missed)'}"


def picture(found: Found, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        len(found), len(SHOWN), figsize=(4.2 * len(SHOWN), 3.4 * len(found)), squeeze=False, layout="constrained"
    )
    for row, (case, ways) in zip(grid, found.items(), strict=True):
        for axes, kind in zip(row, SHOWN, strict=True):
            draw([replace(each, policy=name) for name, each in ways.items()], f"{case}: {kind}", axes, kind)
        row[0].set_ylabel("% of requests")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument(
        "--output",
        type=Path,
        default=HERE / "results" / "scheduler" / "traces",
        help="path without suffix (%(default)s)",
    )
    options = parser.parse_args(arguments)
    found = _earlier(options.output.with_suffix(".json"))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for name in options.cases:
        print(f"{name}: {CASES[name]}", flush=True)
        measured = found.get(name, {}) | measure(CASES[name], options.ways)
        found[name] = {way: measured[way] for way in WAYS if way in measured}
        found = {each: found[each] for each in CASES if each in found}
        _write(found, options.output)
        print(table(found[name]), flush=True)
    print(targets(found))


def _write(found: Found, output: Path) -> None:
    scheduler = COST_MODEL.scheduler
    report: dict[str, Any] = {
        "model": MODEL.name,
        "cost_model": COST_MODEL.name,
        "cases": {case: {way: each.as_json() for way, each in ways.items()} for case, ways in found.items()},
    }
    output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    lines = [
        "# How long requests of real traces wait",
        "",
        f"{MODEL.name} in time that is an **estimate** from {COST_MODEL.source} (`{COST_MODEL.name}`, see "
        "`server/simulator/step_costs.py`): nothing was measured on such a machine. The scheduler and the cache are "
        f"the server's own: {scheduler.max_sequences} sequences, {scheduler.step_token_budget:,} tokens a step, "
        f"{scheduler.target_itl_ms:g} ms for a step in which answers go on. `python -m bench.scheduler_traces`; what "
        "the words mean: `twinpane simulate --help`.",
        "",
        *(f"- {kind}: {KINDS[kind]}" for kind in SHOWN),
        "",
        targets(found),
        "",
    ]
    for case, ways in found.items():
        lines += [f"## {case}", "", f"{CASES[case]}.", "", table(ways), ""]
    output.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")
    picture(found, output.with_suffix(".png"))


def _earlier(path: Path) -> Found:
    if not path.exists():
        return {}
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    return {case: {way: Figures.from_json(each) for way, each in ways.items()} for case, ways in cases.items()}


if __name__ == "__main__":
    main()
