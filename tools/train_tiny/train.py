"""Trains twinpane-tiny from scratch: docs/twinpane-tiny.md is the recipe.

    python -m tools.train_tiny.train

The same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import csv
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor
from tqdm import tqdm

from tools.train_tiny import passes
from tools.train_tiny.batching import Batch, OneAhead, Pool, Pools, Sample, join
from tools.train_tiny.layers import RouterLoad
from tools.train_tiny.loss import Loss, head_loss
from tools.train_tiny.model import Network
from tools.train_tiny.mtp import ahead
from tools.train_tiny.optimizer import Optimizers, rate_at

DEFAULT_FOLDER = Path.home() / ".cache" / "twinpane" / "train_tiny"
LOG_STEPS = 20
SAVE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Samples of shortest to longest tokens from one of `tasks.MIXTURES`, in batches of `tokens`, until that share of
    the training is done."""

    until: float
    shortest: int
    longest: int
    tokens: int
    mixture: str = "all"


POLISH_FROM = 20 / 31
"""Where the rates have come down to 0 for the first time, and the last stage begins."""

STAGES = (
    Stage(until=POLISH_FROM * 0.10, shortest=40, longest=128, tokens=4096),
    Stage(until=POLISH_FROM * 0.35, shortest=48, longest=256, tokens=4096),
    Stage(until=POLISH_FROM * 0.58, shortest=64, longest=640, tokens=6144),
    Stage(until=POLISH_FROM * 0.78, shortest=96, longest=1408, tokens=6144),
    Stage(until=POLISH_FROM, shortest=128, longest=2560, tokens=8192),
    Stage(until=1.0, shortest=64, longest=512, tokens=4096, mixture="polish"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Training ends after `tokens`, or after `minutes` on a slower machine: the share that is done is the larger of
    the two, and lengths and learning rates follow it.

    Of the tokens that the assistant did not write, a share of prompt_rows is predicted, chosen at random; together they
    weigh as if each had prompt_weight, where one of the assistant's has 1. mtp_weight is that of all MTP losses
    together, beside the main one's 1.
    """

    tokens: int = 31_000_000
    minutes: float = 100.0
    stages: tuple[Stage, ...] = STAGES
    seed: int = 0
    matrix_lr: float = 0.006
    vector_lr: float = 0.003
    weight_decay: float = 0.05
    warmup_steps: int = 50
    decay: float = 0.35
    polish_from: float = POLISH_FROM
    polish_rate: float = 0.5
    prompt_weight: float = 0.1
    prompt_rows: float = 0.25
    mtp_weight: float = 0.5
    balance_step: float = 0.003
    dtype: torch.dtype = torch.bfloat16


@dataclass(slots=True, kw_only=True)
class Progress:
    """tokens: without padding. pool: how many the stage has used up; taken: batches of the one after them."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    stage: int = 0
    pool: int = 0
    taken: int = 0
    log: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """losses and hits: of the next token, then of each MTP layer; hits are the share of the assistant's tokens.

    rate: the share of the learning rates. evenness: mean over max of the experts' load, the mean of all layers.
    """

    tokens: int
    rate: float
    losses: list[float]
    hits: list[float]
    evenness: float


@dataclass(slots=True, kw_only=True)
class Recent:
    """Sums since the last line of the log."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)
    evenness: float = 0.0

    def add(self, step: Step, elapsed: float) -> None:
        self.losses = [a + b for a, b in zip(self.losses or [0.0] * len(step.losses), step.losses, strict=True)]
        self.hits = [a + b for a, b in zip(self.hits or [0.0] * len(step.hits), step.hits, strict=True)]
        self.evenness += step.evenness
        self.steps, self.tokens, self.seconds = self.steps + 1, self.tokens + step.tokens, self.seconds + elapsed


class Trainer:
    """Owner of the network, its optimizers and the progress of one training."""

    def __init__(self, network: Network, recipe: Recipe, pools: Pools) -> None:
        self.network = network
        self.recipe = recipe
        self.pools = pools
        self.optimizers = Optimizers(
            network, matrix_lr=recipe.matrix_lr, vector_lr=recipe.vector_lr, weight_decay=recipe.weight_decay
        )
        self.progress = Progress()
        self._pool: list[list[Sample]] = []
        self._recent = Recent()

    @property
    def share_done(self) -> float:
        return max(self.progress.tokens / self.recipe.tokens, self.progress.seconds / (60 * self.recipe.minutes))

    def run(self, *, max_steps: int | None = None) -> Iterator[Progress]:
        """Step by step until the end, or so many steps more."""
        first, started = self.progress.steps, time.perf_counter()
        while self.share_done < 1.0 and (max_steps is None or self.progress.steps - first < max_steps):
            step = self._step()
            now = time.perf_counter()
            self._note(step, now - started)
            started = now
            yield self.progress

    def _step(self) -> Step:
        recipe = self.recipe
        batch = self._next_batch()
        rate = self._rate()
        load = RouterLoad(counted=batch.counted)
        losses = self.losses(batch, load)
        weight = recipe.mtp_weight / max(1, len(losses) - 1)
        total = losses[0].value + weight * sum(loss.value for loss in losses[1:])
        total.backward()  # type: ignore[no-untyped-call]
        self.optimizers.step(rate)
        for router, tokens in zip(self.network.routers(), load.tokens, strict=True):
            router.balance(tokens, recipe.balance_step * rate)
        return Step(
            tokens=int(batch.counted.sum()),
            rate=rate,
            losses=[loss.value.item() for loss in losses],
            hits=[loss.hits.float().mean().item() for loss in losses],
            evenness=sum(float(tokens.float().mean() / tokens.max()) for tokens in load.tokens) / len(load.tokens),
        )

    def _rate(self) -> float:
        """Up, even and down to 0 until polish_from; from there again down to 0, from polish_rate."""
        recipe, share = self.recipe, self.share_done
        if share >= recipe.polish_from:
            return recipe.polish_rate * (1.0 - share) / (1.0 - recipe.polish_from)
        return rate_at(
            share / recipe.polish_from,
            step=self.progress.steps,
            warmup_steps=recipe.warmup_steps,
            decay=recipe.decay,
        )

    def losses(self, batch: Batch, load: RouterLoad | None = None) -> list[Loss]:
        """Of the next token, then of each MTP layer. The hidden that those get is not detached: they are to be good at
        copying from far above, which only the full layers can look up, so these must learn to look further ahead."""
        hidden = self.network(batch.tokens, dtype=self.recipe.dtype, load=load)
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.progress.steps)
        drawn = torch.rand(batch.tokens.shape, generator=generator) < self.recipe.prompt_rows
        weights = torch.where(batch.written, 1.0, self.recipe.prompt_weight / self.recipe.prompt_rows)
        weights *= batch.counted & (batch.written | drawn)
        hiddens = [hidden, *(self.network.draft(k, batch.tokens, hidden) for k in range(len(self.network.mtp)))]
        return [self._loss(batch, states, weights, count) for count, states in enumerate(hiddens, start=1)]

    def _loss(self, batch: Batch, hidden: Tensor, weights: Tensor, count: int) -> Loss:
        """Of predicting `count` tokens ahead. hits are only the assistant's."""
        wanted = ahead(weights, count)
        rows = wanted.flatten().nonzero()[:, 0]
        targets = ahead(batch.tokens, count).flatten()[rows]
        loss = head_loss(hidden.flatten(0, 1)[rows], self.network.head, targets, wanted.flatten()[rows])
        return Loss(value=loss.value, hits=loss.hits[ahead(batch.written, count).flatten()[rows]])

    def _note(self, step: Step, elapsed: float) -> None:
        recent, progress = self._recent, self.progress
        progress.steps += 1
        progress.tokens += step.tokens
        progress.seconds += elapsed
        recent.add(step, elapsed)
        if progress.steps % LOG_STEPS:
            return
        names = ["next", *(f"mtp{k + 1}" for k in range(len(step.losses) - 1))]
        row: dict[str, float] = {
            "step": progress.steps,
            "tokens": progress.tokens,
            "seconds": round(progress.seconds, 1),
            "stage": progress.stage,
            "rate": round(step.rate, 4),
            "tokens_per_s": round(recent.tokens / recent.seconds, 1),
        }
        row |= {f"loss_{n}": round(v / recent.steps, 4) for n, v in zip(names, recent.losses, strict=True)}
        row |= {f"hits_{n}": round(v / recent.steps, 4) for n, v in zip(names, recent.hits, strict=True)}
        row["load_mean_over_max"] = round(recent.evenness / recent.steps, 3)
        progress.log.append(row)
        self._recent = Recent()

    def _next_batch(self) -> Batch:
        progress = self.progress
        while self.share_done >= self.recipe.stages[progress.stage].until:
            progress.stage, progress.pool, progress.taken, self._pool = progress.stage + 1, 0, 0, []
        if not self._pool:
            self._pool = self._make_pool()
        if progress.taken == len(self._pool):
            progress.pool, progress.taken = progress.pool + 1, 0
            self._pool = self._make_pool()
        progress.taken += 1
        return join(self._pool[progress.taken - 1], self.network.block)

    def _make_pool(self) -> list[list[Sample]]:
        return self.pools(self._pool_at(self.progress.pool), self._pool_at(self.progress.pool + 1))

    def _pool_at(self, index: int) -> Pool:
        stage = self.recipe.stages[self.progress.stage]
        return Pool(
            seed=(self.recipe.seed * 100 + self.progress.stage) * 100_000 + index,
            shortest=stage.shortest,
            longest=stage.longest,
            batch_tokens=stage.tokens,
            block=self.network.block,
            mixture=stage.mixture,
        )

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        state = {
            "recipe": asdict(self.recipe),
            "network": self.network.state_dict(),
            "optimizers": self.optimizers.state_dict(),
            "progress": asdict(self.progress),
            "recent": asdict(self._recent),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".new")
        torch.save(state, beside)
        beside.replace(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint of the same recipe, in the pool where it was."""
        state = torch.load(path, weights_only=True)
        assert state["recipe"] == asdict(self.recipe), f"{path} is of another recipe: {state['recipe']}"
        self.network.load_state_dict(state["network"])
        self.optimizers.load_state_dict(state["optimizers"])
        self.progress = Progress(**state["progress"])
        self._recent = Recent(**state["recent"])
        self._pool = []


def write_log(rows: Sequence[dict[str, float]], folder: Path) -> None:
    """log.csv, and loss.png with the losses and the share of the assistant's tokens that were predicted."""
    if not rows:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 7), layout="constrained")
    tokens = [row["tokens"] / 1e6 for row in rows]
    for name in rows[0]:
        for axis, kind in ((above, "loss_"), (below, "hits_")):
            if name.startswith(kind):
                axis.plot(tokens, [row[name] for row in rows], label=name.removeprefix(kind), linewidth=1)
    for axis in (above, below):
        for earlier, row, position in zip(rows, rows[1:], tokens[1:], strict=False):
            if row["stage"] != earlier["stage"]:
                axis.axvline(position, color="grey", linewidth=0.5, linestyle=":")
        axis.grid(alpha=0.3)
        axis.legend()
    above.set(ylabel="loss (dotted: longer samples)", yscale="log")
    below.set(xlabel="million tokens", ylabel="predicted, of the assistant's tokens", ylim=(0, 1))
    figure.savefig(folder / "loss.png", dpi=120)
    pyplot.close(figure)


class _Stop:
    """Ctrl-C ends the training after the step in which it comes."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGINT, self._ask)
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self.asked = True


def train(trainer: Trainer, folder: Path) -> bool:
    """To the end, with checkpoints and a log in the folder; False if it was interrupted before."""
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        trainer.load(checkpoint)
    stop = _Stop()
    saved = time.perf_counter()
    with tqdm(total=trainer.recipe.tokens, initial=trainer.progress.tokens, unit="tok", unit_scale=True) as bar:
        for progress in trainer.run():
            bar.update(progress.tokens - bar.n)
            if progress.log:
                row = progress.log[-1]
                bar.set_postfix(share=f"{trainer.share_done:.1%}", loss=row["loss_next"], hits=row["hits_next"])
            if stop.asked or time.perf_counter() - saved > SAVE_S:
                trainer.save(checkpoint)
                write_log(progress.log, folder)
                saved = time.perf_counter()
            if stop.asked:
                return False
    trainer.save(checkpoint)
    write_log(trainer.progress.log, folder)
    return True


def main() -> None:
    from tools.train_tiny import data
    from tools.train_tiny.config import tiny_config, tiny_spec
    from tools.train_tiny.export import export

    parser = argparse.ArgumentParser(description="Train twinpane-tiny, or go on with it.")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="checkpoints and log (default %(default)s)")
    parser.add_argument("--export", type=Path, help="where the model goes (default: model/ in the folder)")
    parser.add_argument("--tokens", type=int, default=Recipe().tokens, help="default %(default)s")
    parser.add_argument("--minutes", type=float, default=Recipe().minutes, help="at most so long (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="default %(default)s, with which a training repeats itself bit for bit; 2 are 1.5 times as fast",
    )
    parser.add_argument("--eager", action="store_true", help="compile nothing: slower, needs no C++ compiler")
    wanted = parser.parse_args()
    torch.set_num_threads(wanted.threads)
    passes.keep_products()
    if not wanted.eager:
        passes.compile_passes()
    recipe = Recipe(tokens=wanted.tokens, minutes=wanted.minutes, seed=wanted.seed)
    network = Network(tiny_spec(data.VOCAB), seed=wanted.seed)
    pools = OneAhead(data.samples)
    ended = train(Trainer(network, recipe, pools), wanted.folder)
    pools.close()
    if ended:
        target = wanted.export or wanted.folder / "model"
        export(network, tiny_config(data.VOCAB), target, tokenizer=data.tokenizer_folder())
        print(f"the model is in {target}; python -m tools.train_tiny.evaluate {target} measures it")


if __name__ == "__main__":
    main()
