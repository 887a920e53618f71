"""The tables in Markdown: absolute numbers, targets, and how near each server comes to what the machine can do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.peers import PEERS
from bench.results import BUSY_CORES, Results


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`peer`'s value divided by `against`'s is at least, or at most, `bound`."""

    metric: str
    peer: str
    against: str
    bound: float
    at_least: bool

    def met(self, ratio: float) -> bool:
        return ratio >= self.bound if self.at_least else ratio <= self.bound

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.bound:g}x"


def target_of(metric: str) -> Target | None:
    """Ours against vLLM-CPU, the target that stands in the row of each metric."""
    kind = metric.partition("/")[0]
    if kind == "single":
        return Target(metric=metric, peer="ours", against="vllm", bound=1.4, at_least=True)
    if kind.startswith("concurrent-"):
        return Target(metric=metric, peer="ours", against="vllm", bound=1.0, at_least=True)
    if kind.startswith("ttft-"):
        return Target(metric=metric, peer="ours", against="vllm", bound=1.1, at_least=False)
    return None


def targets(metrics: Iterable[str]) -> list[Target]:
    """Every target that these metrics have, the ones against llama.cpp after their row's."""
    found = []
    for metric in metrics:
        if (against_vllm := target_of(metric)) is not None:
            found.append(against_vllm)
        if metric.startswith("ttft-6000/"):
            found.append(Target(metric=metric, peer="ours", against="llamacpp", bound=0.5, at_least=False))
        if metric.startswith("single/"):
            found.append(Target(metric=metric, peer="ours-int8", against="llamacpp-q8", bound=1.0, at_least=True))
    return found


def row_name(metric: str) -> str:
    kind, _, detail = metric.partition("/")
    if kind == "single":
        return f"one stream, {detail}, tok/s"
    if kind.startswith("concurrent-"):
        return f"{kind.removeprefix('concurrent-')} streams, {detail}, output tok/s"
    if kind.startswith("ttft-"):
        return f"cold TTFT, {int(kind.removeprefix('ttft-')):,} tokens, {detail}, s"
    return {"ready": "start to ready, s", "first-token": "start to first token, s", "peak-rss": "peak RSS, GiB"}[kind]


KINDS = ("single", "concurrent", "ttft", "ready", "first", "peak")
"""What a metric's name begins with, in the order of the rows."""


def number(value: float) -> str:
    """Three digits, and no more than the measurement has."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def markdown(results: Results) -> str:
    lines = ["# Servers side by side", "", *_machine(results), ""]
    for model in results.models:
        lines += [f"## {model}", "", *_numbers(results, model), "", *_targets(results, model), ""]
        lines += [*_share_of_ceiling(results, model), "", *_missing(results, model)]
    return "\n".join(lines).rstrip() + "\n"


def _machine(results: Results) -> list[str]:
    lines = [f"- {key}: {value}" for key, value in results.machine.items()]
    if results.ceilings:
        rates = {name: number(results.ceiling(name) or 0.0) for name in ("read", "bf16", "int8")}
        lines.append(
            f"- ceilings, the best of {len(results.ceilings)} round(s): reads {rates['read']} GB/s, "
            f"bf16 GEMM {rates['bf16']} GFLOP/s, int8 GEMM {rates['int8']} GOP/s"
        )
    lines.append(
        f"- values are medians of the repeats during which other processes used at most {BUSY_CORES:g} core; "
        "`*`: none was so quiet, so the median is of all; `-`: not measured, the reason is named below the tables"
    )
    return lines


def metrics_of(results: Results, model: str) -> list[str]:
    """In the order of the table, the ones that only failed included."""
    found = {each.metric for each in results.repeats if each.model == model}
    found |= {each.metric for each in results.missing if each.model == model and each.metric is not None}

    def place(metric: str) -> tuple[int, str, int]:
        kind, _, detail = metric.partition("/")
        name, _, size = kind.partition("-")
        return KINDS.index(name), detail, int(size) if size.isdigit() else 0

    return sorted(found, key=place)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _numbers(results: Results, model: str) -> list[str]:
    rows = []
    for metric in metrics_of(results, model):
        row = [row_name(metric)]
        for peer in results.labels:
            cell = results.cell(model, peer, metric)
            row.append("-" if cell is None else number(cell.median) + ("*" if cell.disturbed else ""))
        ours, theirs = (results.cell(model, peer, metric) for peer in ("ours", "vllm"))
        ratio = None if ours is None or theirs is None else ours.median / theirs.median
        target = target_of(metric)
        row += ["-" if ratio is None else f"{ratio:.2f}x", "" if target is None else str(target)]
        row.append("" if target is None else "not measured" if ratio is None else _verdict(target, ratio))
        rows.append(row)
    return _table(["", *_columns(results, model), "ours / vLLM", "target", ""], rows)


def _columns(results: Results, model: str) -> list[str]:
    """The servers' names; of one that was measured in fewer rounds than others, in how many of them."""
    rounds = {peer: results.rounds(model, peer) for peer in results.labels}
    most = max(rounds.values(), default=0)
    return [
        f"{label}, {rounds[peer]} of {most} rounds" if 0 < rounds[peer] < most else label
        for peer, label in results.labels.items()
    ]


def _verdict(target: Target, ratio: float) -> str:
    return "met" if target.met(ratio) else "**missed**"


def _targets(results: Results, model: str) -> list[str]:
    """One line each, those whose servers are not in the run included."""
    lines = []
    for target in targets(metrics_of(results, model)):
        mine, theirs = (results.cell(model, peer, target.metric) for peer in (target.peer, target.against))
        names = f"{PEERS[target.peer].label} / {PEERS[target.against].label}"
        if mine is None or theirs is None:
            absent = target.peer if mine is None else target.against
            known = results.why_missing(model, absent, target.metric) is not None
            why = "is missing, see below" if known else "is not in this run"
            verdict, shown = f"not measured ({PEERS[absent].label} {why})", "-"
        else:
            ratio = mine.median / theirs.median
            disturbed = " (disturbed)" if mine.disturbed or theirs.disturbed else ""
            verdict, shown = _verdict(target, ratio) + disturbed, f"{ratio:.2f}x"
        lines.append([row_name(target.metric), names, shown, str(target), verdict])
    return _table(["target", "servers", "ratio", "wanted", "verdict"], lines) if lines else []


def _share_of_ceiling(results: Results, model: str) -> list[str]:
    """Weight bytes read per second of one stream, FLOPs per second of a cold prompt, each beside the ceiling."""
    cost = results.costs.get(model)
    if cost is None or not results.ceilings:
        return []
    rows = []
    for metric in metrics_of(results, model):
        name, _, size = metric.partition("/")[0].partition("-")
        if name not in ("single", "ttft"):
            continue
        row = [row_name(metric).rpartition(",")[0] + (", GB/s" if name == "single" else ", GFLOP/s")]
        for peer in results.labels:
            cell = results.cell(model, peer, metric)
            if cell is None:
                row.append("-")
                continue
            if name == "single":
                each = results.bytes_per_weight.get(peer, PEERS[peer].bytes_per_weight)
                rate, ceiling = cell.median * cost.weights * each / 1e9, results.ceiling("read")
            else:
                rate, ceiling = cost.prefill_flop[size] / cell.median / 1e9, results.ceiling(PEERS[peer].ceiling)
            assert ceiling is not None
            row.append(f"{number(rate)} ({rate / ceiling:.0%})")
        rows.append(row)
    if not rows:
        return []
    head = "Of what the machine can do (8-bit servers' FLOPs against the int8 ceiling):"
    return [head, "", *_table(["", *results.labels.values()], rows)]


def _missing(results: Results, model: str) -> list[str]:
    """One line for each server and reason."""
    what: dict[tuple[str, str], list[str]] = {}
    for each in results.missing:
        if each.model == model:
            rows = what.setdefault((each.peer, each.reason), [])
            rows += [] if each.metric is None else [row_name(each.metric).rpartition(",")[0]]
    if not what:
        return []
    lines = [
        " ".join([f"- {PEERS[peer].label}", *([f"({'; '.join(rows)})"] if rows else [])]) + f": {reason}"
        for (peer, reason), rows in what.items()
    ]
    return ["Missing:", "", *lines, ""]
