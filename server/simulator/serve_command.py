"""`twinpane simulate --serve`: the real scheduler over a trace, once for each policy, on a virtual clock."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from server.config import BY_NAME, Flag, SchedulerConfig
from server.errors import StartupError
from server.scheduler.priority import POLICIES
from server.simulator.arrivals import closed_loop, open_loop
from server.simulator.figures import KINDS, Figures, Quantiles, draw, figures_of, spread
from server.simulator.load import least_work_s, span_s, time_factor, tokens_left
from server.simulator.serving import Serving
from server.simulator.setting import Setting
from server.simulator.step_costs import COST_MODELS, CostModel

DEFAULT_COST_MODEL = "mimo-v2.5-pro-8gpu"
DEFAULT_POLICIES = ("uncached-first", "fcfs")
MOST_LOAD = 100.0
NO_LIMIT = 1 << 50

FLAGS = tuple(
    BY_NAME[name]
    for name in (
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--long-prefill-token-threshold",
        "--forgiven-tokens-per-s",
        "--length-lanes",
        "--target-itl-ms",
    )
)
"""Of `twinpane serve`, and they mean the same."""

EXAMPLES = """\
With --serve, the server's own scheduler serves the trace on a virtual clock, which each step moves by what the cost
model says. All policies have the same cache, pieces and lanes. What is printed, and its name with --json:
  TTFT, ITL (ttft_s, itl_s)         time to first token and between tokens: half, 90 % and 99 % wait at most so long
  kinds of requests (kinds)         by length of prompt; "short" (fewer than 4K) and "cold-long" (more than 16K) by the
                                    tokens that are left to compute when the trace is served in its own order and at
                                    its own times, so they are the same for every policy
  hit rate (hit_rate)               prompt tokens that were not computed
  busy (busy_share)                 of the time in which the device computed; with one answer it computes all the time,
                                    so this says little of what it could do: see --load. Steps need not be full
  overtaken too late (overtaken_late)   how many requests were overtaken by one that came more than its tokens divided
                                    by --forgiven-tokens-per-s after it; uncached-first promises 0. In brackets
                                    (overtaken_late_at_arrival): by the tokens it had to compute when it came; they
                                    can grow while it waits, so this is not promised

  twinpane simulate chat.csv --budget-gb 1024 --serve --load 0.7
  twinpane simulate agentic.lineage.csv.gz --budget-gb 256 --serve --closed-loop --load 0.5 --limit 2000 \\
      --policy uncached-first fcfs longest-prefix shortest-first --plot waits.png
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a trace is served. load None leaves its times as they are."""

    cost_model: CostModel
    scheduler: SchedulerConfig
    closed: bool
    load: float | None

    @property
    def loop(self) -> str:
        return "closed loop" if self.closed else "open loop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A trace served under several policies. work_s: see load.least_work_s; factor: of the trace's times; offered_load:
    seconds of work a second, in an open loop; 0 where all come at once."""

    plan: Plan
    work_s: float
    factor: float
    offered_load: float
    figures: tuple[Figures, ...]


def add_serving(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("to serve the trace with the server's scheduler, and see how long requests wait")
    add = group.add_argument
    add("--serve", action="store_true", help="and print waits instead of what the cache hits")
    add(
        "--policy",
        nargs="+",
        choices=POLICIES,
        metavar="POLICY",
        help=f"to compare, one or more of {', '.join(POLICIES)} (default {' '.join(DEFAULT_POLICIES)})",
    )
    add(
        "--cost-model",
        choices=COST_MODELS,
        metavar="NAME",
        help="how long steps take, and the defaults of the settings below: "
        f"{', '.join(map(_named, COST_MODELS.values()))} (default {DEFAULT_COST_MODEL})",
    )
    add(
        "--load",
        type=_load,
        metavar="X",
        help="multiply the trace's times so that its requests bring X seconds of work a second. Work is what is left "
        "after the cache (as it hits when the trace is served in its own order and at its own times), in steps as full "
        "as --max-num-batched-tokens or --max-num-seqs let them be: 1 is the most that any order could keep up with, "
        "0.7 leaves some room, 1.1 means a queue that grows. In a closed loop, sessions stretch where answers take "
        "longer than in the trace, so the load is at most X. Without it, times are those of the trace",
    )
    add(
        "--closed-loop",
        action="store_true",
        default=None,
        help="a request comes think_s after the end of the one before it in its session (or what lay between them in "
        "the trace), times the factor of --load, instead of at its t_s. A sub-agent, session P/NAME, begins after the "
        "request of P that came before it, and runs beside P",
    )
    for flag in FLAGS:
        add(flag.names[0], type=_checked(flag), metavar=flag.kind.metavar, help=flag.help)


def check_serving(options: argparse.Namespace) -> None:
    """Raises StartupError for what has no meaning with --serve, or without it."""
    if options.serve:
        if options.chunk_tokens is not None:
            raise StartupError("--chunk-tokens has no meaning with --serve: use --long-prefill-token-threshold")
        return
    for name in ("--policy", "--cost-model", "--load", "--closed-loop", *(flag.names[0] for flag in FLAGS)):
        if getattr(options, name.removeprefix("--").replace("-", "_")) is not None:
            raise StartupError(f"{name} needs --serve")


def serve(setting: Setting, options: argparse.Namespace) -> str:
    """What the command prints."""
    cost_model = COST_MODELS[options.cost_model or DEFAULT_COST_MODEL]
    given = {flag.field: getattr(options, flag.names[0].removeprefix("--").replace("-", "_")) for flag in FLAGS}
    plan = Plan(
        cost_model=cost_model,
        scheduler=replace(cost_model.scheduler, **{name: value for name, value in given.items() if value is not None}),
        closed=bool(options.closed_loop),
        load=options.load,
    )
    policies = tuple(dict.fromkeys(options.policy or DEFAULT_POLICIES))
    found = compare(setting, options.budget_gb, plan, policies, quiet=options.json)
    if options.plot:
        _draw(found, setting, options.plot)
    return json.dumps(_report(found, setting, options.budget_gb)) if options.json else _page(found, setting, options)


def compare(
    setting: Setting, budget_gb: float, plan: Plan, policies: Sequence[str], *, quiet: bool = False
) -> Comparison:
    """Serve a trace once for each policy. Raises StartupError."""
    trace, layout, rebuild = setting.trace, setting.layout(budget_gb), setting.shape.rebuild
    cost = plan.cost_model.cost
    with tqdm(total=(1 + len(policies)) * len(trace.requests), unit="req", disable=quiet) as bar:
        bar.set_description("what is left")
        left = tokens_left(
            trace,
            layout,
            rebuild,
            setting.policy,
            chunk_tokens=plan.scheduler.prefill_chunk_tokens,
            progress=bar.update,
        )
        work_s = least_work_s(trace, left, cost, plan.scheduler)
        factor = 1.0 if plan.load is None else time_factor(trace, work_s, plan.load)
        figures = []
        for policy in policies:
            bar.set_description(policy)
            scheduler = replace(plan.scheduler, policy=policy, max_queued_requests=NO_LIMIT, max_queued_tokens=NO_LIMIT)
            serving = Serving(
                trace,
                layout,
                rebuild,
                setting.policy,
                scheduler=scheduler,
                cost=cost,
                arrivals=closed_loop(trace, factor) if plan.closed else open_loop(trace, factor),
            )
            served = serving.run(bar.update)
            figures.append(figures_of(served, policy, left, serving.scheduler.forgiven_tokens_per_s))
    offered_s = factor * span_s(trace)
    return Comparison(
        plan=plan,
        work_s=work_s,
        factor=factor,
        offered_load=work_s / offered_s if offered_s else 0.0,
        figures=tuple(figures),
    )


def _report(found: Comparison, setting: Setting, budget_gb: float) -> dict[str, Any]:
    plan = found.plan
    return {
        "model": setting.shape.name,
        "budget_gb": budget_gb,
        "page_tokens": setting.page_tokens,
        "cost_model": plan.cost_model.name,
        "cost_model_is_estimate": plan.cost_model.is_estimate,
        "closed_loop": plan.closed,
        "load": plan.load,
        "least_work_s": found.work_s,
        "time_factor": found.factor,
        "scheduler": {flag.field: getattr(plan.scheduler, flag.field) for flag in FLAGS},
        "policies": [each.as_json() for each in found.figures],
    }


def _page(found: Comparison, setting: Setting, options: argparse.Namespace) -> str:
    plan, figures = found.plan, found.figures
    load = "the trace's own times" if plan.load is None else f"load {plan.load:g} (times x {found.factor:.3g})"
    rows: list[tuple[str, ...]] = [("", *(each.policy for each in figures))]
    first = figures[0]
    for title, of, scale in (("TTFT, s", _ttft, 1.0), ("ITL, ms", _itl, 1e3)):
        rows.append((f"{title}: half / 90 % / 99 % wait at most",))
        for kind in KINDS:
            if requests := first.kinds[kind].requests:
                rows.append((f"  {kind} ({requests:,})", *(spread(of(each, kind), scale) for each in figures)))
    rows += [
        ("hit rate", *(f"{each.hit_rate:.2%}" for each in figures)),
        ("preemptions", *(f"{each.preemptions:,}" for each in figures)),
        ("device busy", *(f"{each.busy_share:.1%}" for each in figures)),
        ("... with prompts", *(f"{each.prompt_share:.1%}" for each in figures)),
        (
            "overtaken too late",
            *(f"{each.overtaken_late:,} ({each.overtaken_late_at_arrival:,})" for each in figures),
        ),
        ("... tokens forgiven a s", *(f"{each.forgiven_tokens_per_s:,.0f}" for each in figures)),
        ("larger than all memory", *(f"{each.refused:,}" for each in figures)),
        ("time served", *(f"{each.span_s:,.0f} s" for each in figures)),
    ]
    lines = [
        f"{setting.shape.name}, {options.budget_gb:g} GB, {_named(plan.cost_model)}, {plan.loop}, {load}",
        *_columns(rows),
    ]
    if not plan.closed and found.offered_load > 1:
        lines.append(
            f"Its requests bring {found.offered_load:.2g} seconds of work a second: the queue grows as long as they "
            "come, so waits say how long the trace is (see --load)."
        )
    return "\n".join(lines)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of one cell are titles, and as wide as they like."""
    cells = [row for row in rows if len(row) > 1]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        row[0].ljust(widths[0])
        + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=False))
        for row in rows
    ]


def _ttft(figures: Figures, kind: str) -> Quantiles | None:
    return figures.kinds[kind].ttft_s


def _itl(figures: Figures, kind: str) -> Quantiles | None:
    return figures.kinds[kind].itl_s


def _named(model: CostModel) -> str:
    return f"{model.name} ({'an estimate from' if model.is_estimate else 'measured:'} {model.source})"


def _draw(found: Comparison, setting: Setting, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    kinds = [kind for kind in KINDS if found.figures[0].kinds[kind].requests]
    columns = min(3, max(1, len(kinds)))
    rows = max(1, math.ceil(len(kinds) / columns))
    figure, grid = pyplot.subplots(rows, columns, figsize=(4.5 * columns, 3.4 * rows), squeeze=False)
    for axes, kind in zip(grid.flat, kinds, strict=False):
        draw(found.figures, KINDS[kind], axes, kind)
    grid[0][0].legend(fontsize="small")
    figure.suptitle(f"{setting.shape.name} on {_named(found.plan.cost_model)}: % of requests", fontsize="medium")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _checked(flag: Flag) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = flag.kind.parse(text)
            flag.kind.check(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return value

    return parse


def _load(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MOST_LOAD:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0 and at most {MOST_LOAD:g}")
    return value
