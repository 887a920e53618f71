"""What the prefix cache hits on real traces, and what each of its rules is worth.

    python -m bench.cache_traces
    python -m bench.cache_traces --traces conversation --output /tmp/cache

Plays `bench/data/traces` through the server's own cache in the shape of MiMo-V2.5-Pro, once for each rule that is added
to the ones before it, and writes a table (.md), a picture (.png) and all figures (.json). The whole takes about an hour
of one core; figures of an earlier run stay in the table until they are measured anew, so it may be done in parts:

    python -m bench.cache_traces --traces agentic --budgets-gb 256 --rules one-pool ours
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tqdm import tqdm

from server.cache.kv_cache import CachePolicy
from server.simulator.bounds import Prices, clairvoyant, one_pool, unlimited
from server.simulator.command import page_tokens_of
from server.simulator.models import PRESETS
from server.simulator.replay import Replay
from server.simulator.setting import BYTES_PER_GB
from server.simulator.trace import Trace, read_trace

HERE = Path(__file__).parent
MODEL = PRESETS["mimo-v2.5-pro"]
CHUNK_TOKENS = 2048

FILES = {
    "agentic": "agentic_cc_local.lineage.csv.gz",
    "conversation": "mooncake_conversation.lineage.csv.gz",
    "synthetic": "mooncake_synthetic.lineage.csv.gz",
}
BUDGETS_GB = {"agentic": (128, 256, 1024), "conversation": (256, 512, 1024), "synthetic": (256, 512, 1024)}

ONE_POOL, FORESIGHT, NO_END, OURS = "one-pool", "foresight", "no-end", "ours"
POLICIES = {
    "tails": CachePolicy(rebuild=False, branches=False, spacing_tokens=0, knows_reuse=False),
    "spaced-16k": CachePolicy(rebuild=False, spacing_tokens=16_384, knows_reuse=False),
    "spaced-1k": CachePolicy(rebuild=False, spacing_tokens=1_024, knows_reuse=False),
    "rebuilt": CachePolicy(knows_reuse=False),
    OURS: CachePolicy(),
}
RULES = {
    ONE_POOL: "one pool for all layers, LRU",
    "tails": "two kinds of page, windows kept at prompt ends, LRU",
    "spaced-16k": "+ windows at branch points, and every 16 K tokens",
    "spaced-1k": "the same, every 1 K tokens",
    "rebuilt": "prompt ends, branch points, lost windows rebuilt, LRU",
    OURS: "+ who comes back, and when (ours)",
    FORESIGHT: "an eviction that knows the future",
    NO_END: "a cache without end",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One rule on one trace with one budget. loss: of the rule that a window must be there or be rebuilt, against a
    match of equal tokens in the same cache; both rates from 0 to 1. loss is None where there is no such rule."""

    trace: str
    budget_gb: float
    rule: str
    hit_rate: float
    loss: float | None = None
    requests_per_s: float | None = None


@cache
def _trace(name: str) -> Trace:
    return read_trace(HERE / "data" / "traces" / FILES[name])


def measure(name: str, budget_gb: float, rule: str) -> Figure:
    trace, budget_bytes = _trace(name), int(budget_gb * BYTES_PER_GB)
    if rule == NO_END:
        return Figure(trace=name, budget_gb=budget_gb, rule=rule, hit_rate=unlimited(trace).rate)
    if rule in (ONE_POOL, FORESIGHT):
        prices = Prices(
            full_token_bytes=MODEL.full_token_bytes,
            window_token_bytes=MODEL.window_token_bytes,
            window_tokens=MODEL.window_tokens,
        )
        bound = one_pool if rule == ONE_POOL else clairvoyant
        rate = bound(trace, budget_bytes, prices, held=True).rate
        return Figure(trace=name, budget_gb=budget_gb, rule=rule, hit_rate=rate)
    layout = MODEL.layout(page_tokens=page_tokens_of(trace), budget_bytes=budget_bytes)
    started = time.process_time()
    found = Replay(trace, layout, MODEL.rebuild, POLICIES[rule], chunk_tokens=CHUNK_TOKENS).run()
    took_s = time.process_time() - started
    return Figure(
        trace=name,
        budget_gb=budget_gb,
        rule=rule,
        hit_rate=found.hit_rate,
        loss=(found.equal_tokens - found.hit_tokens) / found.prompt_tokens,
        requests_per_s=found.requests / took_s,
    )


def table(figures: Sequence[Figure]) -> str:
    """A row a rule, a column a trace and budget: hit rate in percent, and the window-safe rule's loss in points."""
    columns = sorted({(figure.trace, figure.budget_gb) for figure in figures})
    found = {(figure.trace, figure.budget_gb, figure.rule): figure for figure in figures}
    lines = ["| hit rate in % (loss in points) | " + " | ".join(f"{trace} {gb:g} GB" for trace, gb in columns) + " |"]
    lines.append("|---|" + "---|" * len(columns))
    for rule, name in RULES.items():
        cells = []
        for column in columns:
            figure = found.get((*column, rule))
            loss = f" ({100 * figure.loss:.1f})" if figure is not None and figure.loss is not None else ""
            cells.append(f"{100 * figure.hit_rate:.1f}{loss}" if figure is not None else "-")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(figures: Sequence[Figure], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    traces = sorted({figure.trace for figure in figures})
    picture, grid = pyplot.subplots(1, len(traces), figsize=(5 * len(traces), 4.4), squeeze=False, layout="constrained")
    colours = ("#8d99ae", "#7a9cc6", "#c1a04e", "#c1440e", "#6fb98f", "#0b6e4f", "black", "black")
    for axes, trace in zip(grid[0], traces, strict=True):
        for rule, colour in zip(RULES, colours, strict=True):
            points = sorted((f.budget_gb, 100 * f.hit_rate) for f in figures if f.trace == trace and f.rule == rule)
            style = {FORESIGHT: "--", NO_END: ":"}.get(rule, "o-")
            width = 2.5 if rule == OURS else 1.2
            axes.plot(
                [gb for gb, _ in points], [rate for _, rate in points], style, color=colour, lw=width, label=RULES[rule]
            )
        budgets = sorted({figure.budget_gb for figure in figures if figure.trace == trace})
        axes.set(xscale="log", xlabel="memory for KV, GB", title=trace)
        axes.set_xticks(budgets, [f"{gb:g}" for gb in budgets])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    grid[0][0].set_ylabel("prompt tokens not computed, %")
    handles, labels = grid[0][0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=2, fontsize="small")
    picture.savefig(path, dpi=110)
    pyplot.close(picture)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", nargs="+", choices=FILES, default=list(FILES))
    parser.add_argument("--budgets-gb", type=float, nargs="+", metavar="N", help="only these of each trace's budgets")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES), metavar="RULE", help=", ".join(RULES))
    parser.add_argument("--workers", type=int, default=1, help="processes (default %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=HERE / "results" / "cache" / "traces", help="path without suffix (%(default)s)"
    )
    options = parser.parse_args(arguments)
    wanted = [
        (name, gb, rule)
        for name in options.traces
        for gb in BUDGETS_GB[name]
        for rule in options.rules
        if not options.budgets_gb or gb in options.budgets_gb
    ]
    known = {(each.trace, each.budget_gb, each.rule): each for each in _earlier(options.output.with_suffix(".json"))}
    with ProcessPoolExecutor(options.workers) as pool, tqdm(total=len(wanted), unit="replay") as bar:
        waiting: list[Future[Figure]] = [pool.submit(measure, *each) for each in wanted]
        for done in as_completed(waiting):
            figure = done.result()
            known[figure.trace, figure.budget_gb, figure.rule] = figure
            bar.update()
    order = list(RULES)
    figures = sorted(known.values(), key=lambda each: (each.trace, each.budget_gb, order.index(each.rule)))
    report: dict[str, Any] = {
        "model": MODEL.name,
        "chunk_tokens": CHUNK_TOKENS,
        "figures": [asdict(figure) for figure in figures],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    options.output.with_suffix(".md").write_text(_page(figures), encoding="utf-8")
    draw(figures, options.output.with_suffix(".png"))
    print(table(figures))


def _earlier(path: Path) -> list[Figure]:
    if not path.exists():
        return []
    return [Figure(**each) for each in json.loads(path.read_text(encoding="utf-8"))["figures"]]


def _page(figures: Sequence[Figure]) -> str:
    speeds = {
        figure.trace: f"{figure.trace} {figure.requests_per_s:,.0f}"
        for figure in figures
        if figure.requests_per_s is not None
    }
    return (
        f"# The prefix cache on real traces\n\n"
        f"{MODEL.name}: {MODEL.is_window.count(False)} full layers, "
        f"{MODEL.is_window.count(True)} window layers and {MODEL.mtp_layers} MTP layers, 16-bit KV. "
        f"A request holds its pages while it runs. Rebuilt windows count as computed. "
        f"`python -m bench.cache_traces`.\n\n"
        f"{table(figures)}\n\n"
        f"In brackets: what the rule that a window must be there, or be rebuilt, loses against a match of equal tokens "
        f"in the same cache.\nRequests a second of CPU time: {', '.join(speeds.values())}.\n"
    )


if __name__ == "__main__":
    main()
