"""What a network can do on held-out conversations: answers, drafts, and how evenly its experts are used."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from tools.train_tiny.batching import Batch, Sample, join
from tools.train_tiny.layers import RouterLoad
from tools.train_tiny.model import Network
from tools.train_tiny.mtp import ahead

BATCH_TOKENS = 8192


@dataclass(slots=True, kw_only=True)
class Report:
    """answers and right: turns of the assistant by task, and those that greedy decoding reproduces to the last token.

    drafts [MTP layers + trials with layer 0 in place of the others]: see `draft_hits`. load [MoE layers, E].
    """

    answers: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    drafted: list[int] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    hits_of_first: list[int] = field(default_factory=list)
    load: Tensor | None = None

    def evenness(self) -> list[float]:
        """Mean over max of the experts' load, layer by layer; 1 is even."""
        assert self.load is not None
        return (self.load.float().mean(-1) / self.load.amax(-1)).tolist()

    def lines(self) -> Iterator[str]:
        width = max((len(task) for task in self.answers), default=0)
        for task in sorted(self.answers):
            right, count = self.right[task], self.answers[task]
            yield f"{task:{width}}  {right / count:7.1%}  of {count} turns"
        for k, count in enumerate(self.drafted):
            yield (
                f"MTP layer {k + 1}: {self.hits[k] / count:.1%} of {count} drafts; "
                f"layer 1 in its place {self.hits_of_first[k] / count:.1%}"
            )
        yield "expert load, mean over max: " + " ".join(f"{value:.2f}" for value in self.evenness())


@torch.inference_mode()
def evaluate(network: Network, samples: Iterable[Sample], *, dtype: torch.dtype = torch.bfloat16) -> Report:
    """Greedy decoding gives exactly the reference if and only if every token of it is the most likely one after those
    before it, so one forward over the conversation judges all its turns; `greedy` is the loop itself.

    A turn is judged after the reference's earlier turns, and where several answers would be right, only the reference
    counts: the task suite judges those over HTTP.
    """
    layers = len(network.mtp)
    report = Report(drafted=[0] * layers, hits=[0] * layers, hits_of_first=[0] * layers)
    for group in _groups(sorted(samples, key=lambda sample: len(sample.ids)), network.block):
        batch = join(group, network.block)
        load = RouterLoad(counted=batch.counted)
        hidden = network(batch.tokens, dtype=dtype, load=load)
        loads = torch.stack(load.tokens)
        report.load = loads if report.load is None else report.load + loads
        best = network.logits(hidden).argmax(-1)
        for row, sample in enumerate(group):
            for start, stop in turns(sample.trained):
                report.answers[sample.task] += 1
                report.right[sample.task] += best[row, start - 1 : stop - 1].tolist() == sample.ids[start:stop]
        for k in range(layers):
            wanted = drafted_positions(batch, k)
            report.drafted[k] += int(wanted.sum())
            for layer, hits in ((k, report.hits), (0, report.hits_of_first)):
                drafts = network.logits(network.draft(k, batch.tokens, hidden, layer=layer)[wanted]).argmax(-1)
                hits[k] += int((drafts == ahead(batch.tokens, k + 2)[wanted]).sum())
    return report


def drafted_positions(batch: Batch, k: int) -> Tensor:
    """[B, T]: where layer k drafts when serving: the tokens that it is given and the one it predicts are all written by
    the assistant."""
    wanted = batch.counted.clone()
    for step in range(1, k + 3):
        wanted &= ahead(batch.written, step)
    return wanted


def turns(trained: Sequence[bool]) -> list[tuple[int, int]]:
    """Spans [start, stop) of tokens that the assistant wrote in one go."""
    edges = [i for i in range(len(trained) + 1) if (i < len(trained) and trained[i]) != (i > 0 and trained[i - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))


@torch.inference_mode()
def greedy(
    network: Network,
    prompt: Sequence[int],
    *,
    limit: int,
    stops: Collection[int],
    guess: Sequence[int] = (),
    dtype: torch.dtype = torch.bfloat16,
) -> list[int]:
    """The most likely continuation, up to `limit` tokens or a stop, which is kept. The whole is computed anew for every
    token: the loop has no cache to be wrong. A guess saves forwards where it is right and changes nothing."""
    out: list[int] = []
    while len(out) < limit and not (out and out[-1] in stops):
        coming = list(guess[len(out) :]) if list(guess[: len(out)]) == out else []
        text = [*prompt, *out, *coming]
        padded = torch.zeros(1, -(-len(text) // network.block) * network.block, dtype=torch.int64)
        padded[0, : len(text)] = torch.tensor(text)
        hidden = network(padded, dtype=dtype)[0, len(prompt) + len(out) - 1 : len(text)]
        for best, guessed in zip(network.logits(hidden).argmax(-1).tolist(), [*coming, None], strict=True):
            out.append(best)
            if best != guessed or best in stops or len(out) == limit:
                break
    return out


def _groups(samples: Sequence[Sample], block: int) -> Iterator[list[Sample]]:
    group: list[Sample] = []
    for sample in samples:  # shortest first
        if group and (len(group) + 1) * (len(sample.ids) + block) > BATCH_TOKENS:
            yield group
            group = []
        group.append(sample)
    if group:
        yield group


def main() -> None:
    from tools.train_tiny.data import samples
    from tools.train_tiny.export import load_network

    parser = argparse.ArgumentParser(description="Measure a trained model's folder on held-out conversations.")
    parser.add_argument("folder", type=Path, help="as the training exports it, or models/twinpane-tiny")
    parser.add_argument("--samples", type=int, default=500, help="conversations (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1_000)
    parser.add_argument("--shortest", type=int, default=64, help="tokens (default %(default)s)")
    parser.add_argument("--longest", type=int, default=2560, help="tokens (default %(default)s)")
    wanted = parser.parse_args()
    if not (wanted.folder / "config.json").is_file():
        parser.error(f"{wanted.folder} holds no model: train one first, or give models/twinpane-tiny")
    held_out = samples(wanted.seed, shortest=wanted.shortest, longest=wanted.longest, held_out=True)
    for line in evaluate(load_network(wanted.folder), islice(held_out, wanted.samples)).lines():
        print(line)


if __name__ == "__main__":
    main()
