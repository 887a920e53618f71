"""`twinpane simulate`: the real prefix cache over a trace, without a device and without torch."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from server.cache.kv_cache import CachePolicy
from server.errors import StartupError
from server.simulator.bounds import Prices, clairvoyant, one_pool, unlimited
from server.simulator.models import PRESETS, shape_named
from server.simulator.replay import Replay, Replayed
from server.simulator.serve_command import EXAMPLES as SERVING_EXAMPLES
from server.simulator.serve_command import add_serving, check_serving, serve
from server.simulator.setting import BYTES_PER_GB, Setting
from server.simulator.trace import Trace, read_trace
from server.step import PageKind

DEFAULT_PRESET = "mimo-v2.5-pro"
MOST_GB = 100_000
MOST_PAGE_TOKENS = 128
CHUNK_TOKENS = 2_048
CURVE = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Budgets of a plot, as multiples of the one that is asked for."""

DESCRIPTION = """\
Play a trace of requests through the server's own prefix cache: the same tree, pages and retention, no device. A
request holds its pages while it runs; the hit rate is the share of all prompt tokens that need not be computed, with
the work of rebuilt windows taken off.
"""
EXAMPLES = """\
A trace's first line is "# block_size=N", the second names the columns, then a row is a request:
  t_s,session,kind,src,lcp,n,input,output,api_s,think_s[,stop]
Its prompt is n whole blocks; the first lcp of them are those of row src (from 0; -1: none). api_s is how long it ran.

What is printed, and its name with --json:
  hit rate (hit_rate)               prompt tokens not computed; the work of rebuilt windows counts as computed
  resumed (resumed_rate)            the same with rebuilds for nothing
  equal tokens (token_equal_rate)   what a match of tokens alone would have found in this cache at that moment;
                                    hit_rate below it is what windows cost (window_safe_loss)
  partly filled slabs (stranded_share)   memory that neither kind of page can use, on average

Examples:
  twinpane simulate agentic.lineage.csv.gz --budget-gb 256
  twinpane simulate chat.csv --budget-gb 64 --model-config ./my-model/config.json --json
  twinpane simulate chat.csv --budget-gb 256 --plot curve.png     at a quarter to four times the budget
"""


def simulate(arguments: Sequence[str]) -> int:
    """The command. Raises StartupError."""
    options = _parser().parse_args(arguments)
    check_serving(options)
    if options.plot:
        _check_plot(options.plot)
    trace = read_trace(options.trace, options.limit)
    setting = Setting(
        trace=trace,
        shape=shape_named(options.model_config),
        page_tokens=page_tokens_of(trace, options.page_tokens),
        chunk_tokens=options.chunk_tokens or CHUNK_TOKENS,
        policy=CachePolicy(
            rebuild=not options.no_rebuild,
            branches=not options.no_branches,
            spacing_tokens=options.spacing_tokens,
            knows_reuse=not options.lru,
        ),
    )
    if options.serve:
        print(serve(setting, options))
        return 0
    report = _report(setting, options.budget_gb, quiet=options.json)
    if options.plot:
        budgets = [options.budget_gb * share for share in CURVE]
        _draw([_report(setting, budget, quiet=options.json) for budget in budgets], setting, options.plot)
    print(json.dumps(report) if options.json else _table(report))
    return 0


def _report(setting: Setting, budget_gb: float, *, quiet: bool) -> dict[str, Any]:
    """Ours, and what it is to be compared with. Rates are from 0 to 1."""
    budget_bytes = budget_gb * BYTES_PER_GB
    layout = setting.layout(budget_gb)
    replay = Replay(setting.trace, layout, setting.shape.rebuild, setting.policy, chunk_tokens=setting.chunk_tokens)
    started = time.perf_counter()
    with tqdm(total=len(setting.trace.requests), desc=f"{budget_gb:g} GB", unit="req", disable=quiet) as bar:
        found = replay.run(bar.update)
    took_s = time.perf_counter() - started
    prices = Prices(
        full_token_bytes=setting.shape.full_token_bytes,
        window_token_bytes=setting.shape.window_token_bytes,
        window_tokens=setting.shape.window_tokens,
    )
    whole = int(budget_bytes)
    return {
        "model": setting.shape.name,
        "budget_gb": budget_gb,
        "page_tokens": setting.page_tokens,
        "requests": found.requests,
        "prompt_tokens": found.prompt_tokens,
        "hit_rate": found.hit_rate,
        "resumed_rate": _share(found.resumed_tokens, found),
        "token_equal_rate": _share(found.equal_tokens, found),
        "window_safe_loss": _share(found.equal_tokens - found.hit_tokens, found),
        "rebuilds": found.rebuilds,
        "waited": found.waited,
        "refused": found.refused,
        "one_pool_rate": one_pool(setting.trace, whole, prices).rate,
        "clairvoyant_rate": clairvoyant(setting.trace, whole, prices, held=True).rate,
        "unlimited_rate": unlimited(setting.trace).rate,
        "evicted_full_pages": replay.cache.evicted[PageKind.FULL],
        "evicted_window_pages": replay.cache.evicted[PageKind.WINDOW],
        "moved_pages": found.moved_pages,
        "stranded_share": found.stranded_bytes / max(1, found.requests) / budget_bytes,
        "requests_per_s": found.requests / took_s,
    }


def _share(tokens: float, found: Replayed) -> float:
    return tokens / found.prompt_tokens if found.prompt_tokens else 0.0


def _table(report: dict[str, Any]) -> str:
    rows = [
        ("hit rate", f"{report['hit_rate']:.2%}"),
        ("resumed, rebuilds not taken off", f"{report['resumed_rate']:.2%} ({report['rebuilds']:,} rebuilds)"),
        ("equal tokens in the cache", f"{report['token_equal_rate']:.2%}"),
        ("one pool for all layers, LRU", f"{report['one_pool_rate']:.2%}"),
        ("an eviction that knows the future", f"{report['clairvoyant_rate']:.2%}"),
        ("a cache without end", f"{report['unlimited_rate']:.2%}"),
        ("had to wait for memory", f"{report['waited']:,} of {report['requests']:,} requests"),
        ("larger than all of it", f"{report['refused']:,}"),
        ("lost to partly filled slabs", f"{report['stranded_share']:.2%} of the budget"),
        ("pages moved", f"{report['moved_pages']:,}"),
        ("speed", f"{report['requests_per_s']:,.0f} requests/s"),
    ]
    head = f"{report['model']}, {report['budget_gb']:g} GB, pages of {report['page_tokens']} tokens"
    return "\n".join([head, *(f"  {name:<34} {value}" for name, value in rows)])


def _draw(reports: Sequence[dict[str, Any]], setting: Setting, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    budgets = [report["budget_gb"] for report in reports]
    for key, label, style in (
        ("clairvoyant_rate", "an eviction that knows the future", "k:"),
        ("token_equal_rate", "equal tokens in our cache", "g--"),
        ("hit_rate", "ours", "go-"),
        ("one_pool_rate", "one pool for all layers, LRU", "rs-"),
    ):
        axes.plot(budgets, [100 * report[key] for report in reports], style, label=label)
    axes.set(xscale="log", xlabel="memory for KV, GB", ylabel="prompt tokens not computed, %", title=setting.shape.name)
    axes.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _check_plot(path: Path) -> None:
    """Now, and not after minutes of work."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise StartupError("--plot needs matplotlib: pip install 'twinpane[plot]'") from None
    formats = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in formats:
        raise StartupError(f"--plot: the name of {path} must end in one of .{', .'.join(sorted(formats))}")
    if not path.parent.is_dir():
        raise StartupError(f"--plot: there is no folder {path.parent}")


def page_tokens_of(trace: Trace, wanted: int | None = None) -> int:
    """Pages that divide the trace's blocks: 128 tokens if they do."""
    if wanted is None:
        return MOST_PAGE_TOKENS if trace.block_tokens % MOST_PAGE_TOKENS == 0 else trace.block_tokens
    if trace.block_tokens % wanted:
        raise StartupError(f"--page-tokens: {wanted} does not divide the trace's blocks of {trace.block_tokens} tokens")
    return wanted


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="twinpane simulate",
        description=DESCRIPTION,
        epilog=f"{EXAMPLES}\n{SERVING_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("trace", type=Path, metavar="TRACE", help="lineage CSV, plain or .gz")
    add("--budget-gb", type=_positive, required=True, metavar="N", help="memory for KV; 1 GB is 10^9 bytes")
    add(
        "--model-config",
        default=DEFAULT_PRESET,
        metavar="MODEL",
        help=f"{', '.join(PRESETS)}, or a config.json (default %(default)s)",
    )
    add("--json", action="store_true", help="one object, with hit_rate from 0 to 1, and no progress bar")
    add("--plot", type=Path, metavar="PATH", help="picture of the hit rate over budgets; with --serve, of TTFTs")
    add("--limit", type=_count, metavar="N", help="only the first N requests")
    add("--page-tokens", type=_count, metavar="N", help="tokens of a page (default: 128, or a block of the trace)")
    add(
        "--chunk-tokens",
        type=_count,
        metavar="N",
        help=f"prompt tokens of a step (default {CHUNK_TOKENS:,}); with --serve, see --long-prefill-token-threshold",
    )
    rules = parser.add_argument_group("to see what a rule is worth, without it")
    rules.add_argument(
        "--no-rebuild", action="store_true", help="a prefix whose window is gone is lost up to a snapshot"
    )
    rules.add_argument("--no-branches", action="store_true", help="no snapshots where paths branch")
    rules.add_argument("--lru", action="store_true", help="the longest unused goes first, whoever it is")
    rules.add_argument("--spacing-tokens", type=_count, metavar="N", help="a snapshot every N tokens, too")
    add_serving(parser)
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MOST_GB:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0 and at most {MOST_GB:,}")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 12 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number from 1")
    return int(text)
