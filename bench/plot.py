"""The picture of a run: one row a model; decode of one stream, output at 8 to 32 streams, and time to first token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers import PEERS
from bench.results import Cell, Results

COLOURS = ("#0b6e4f", "#6fb98f", "#c1440e", "#8d99ae", "#264653", "#7a9cc6")


def draw(results: Results, path: Path) -> None:
    """Bars and lines are medians; the thin lines on them reach from the lowest to the highest repeat."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    models = results.models
    figure, grid = pyplot.subplots(len(models), 3, figsize=(15, 4 * len(models)), squeeze=False, layout="constrained")
    for axes, model in zip(grid, models, strict=True):
        metrics = list(dict.fromkeys(each.metric for each in results.repeats if each.model == model))
        _bars(axes[0], results, model, [metric for metric in metrics if metric.startswith("single/")])
        axes[0].set_title(f"{model}: one stream, tok/s")
        _lines(axes[1], results, model, [metric for metric in metrics if metric.startswith("concurrent-")])
        axes[1].set_title("many streams, output tok/s (dashed: sampled)")
        _bars(axes[2], results, model, [metric for metric in metrics if metric.startswith("ttft-")])
        axes[2].set_title("cold TTFT, s (less is better)")
    handles = [Patch(color=colour) for _, colour in _coloured(results)]
    figure.legend(handles, list(results.labels.values()), loc="outside lower center", ncols=len(handles))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _coloured(results: Results) -> list[tuple[str, str]]:
    """The servers of this run; a server has the same colour in every run."""
    colours = dict(zip(PEERS, COLOURS, strict=False))
    return [(peer, colours[peer]) for peer in results.labels]


def _bars(axes: Any, results: Results, model: str, metrics: list[str]) -> None:
    width = 0.8 / max(1, len(results.labels))
    for index, (peer, colour) in enumerate(_coloured(results)):
        for group, metric in enumerate(metrics):
            cell = results.cell(model, peer, metric)
            if cell is None:
                continue
            at = group + (index - (len(results.labels) - 1) / 2) * width
            axes.bar(at, cell.median, width * 0.9, color=colour, yerr=_reach([cell]), ecolor="black", capsize=2)
    axes.set_xticks(range(len(metrics)), [_tick(metric) for metric in metrics])
    axes.set_xlim(-0.5, max(0.5, len(metrics) - 0.5))


def _tick(metric: str) -> str:
    """What stands under a group of bars: the sampling, below the prompt's length where there are several."""
    kind, _, sampling = metric.partition("/")
    size = kind.partition("-")[2]
    return f"{int(size):,}\n{sampling}" if size else sampling


def _lines(axes: Any, results: Results, model: str, metrics: list[str]) -> None:
    for peer, colour in _coloured(results):
        for sampling, style in (("greedy", "-"), ("sampled", "--")):
            points = []
            for metric in metrics:
                cell = results.cell(model, peer, metric)
                kind, _, name = metric.partition("/")
                if cell is not None and name == sampling:
                    points.append((int(kind.removeprefix("concurrent-")), cell))
            if points:
                streams, cells = zip(*points, strict=True)
                heights = [cell.median for cell in cells]
                axes.errorbar(
                    streams,
                    heights,
                    yerr=_reach(cells),
                    color=colour,
                    linestyle=style,
                    marker="o",
                    capsize=2,
                )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("streams")


def _reach(cells: Sequence[Cell]) -> list[list[float]]:
    return [[cell.median - cell.low for cell in cells], [cell.high - cell.median for cell in cells]]
