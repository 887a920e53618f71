"""Batches, the optimizer, interruptions, and that something is learned."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch

from tests.tiny.networks import network_of, small_config
from tests.tiny.recall import VOCAB, Recall, recall
from tools.train_tiny.batching import Batch, Pool, in_turn, join, make_pool
from tools.train_tiny.evaluate import drafted_positions, evaluate, greedy, turns
from tools.train_tiny.layers import RouterLoad
from tools.train_tiny.mtp import ahead
from tools.train_tiny.optimizer import Muon, orthogonal, rate_at
from tools.train_tiny.tasks import MIXTURES, choose
from tools.train_tiny.train import LOG_STEPS, Recipe, Stage, Trainer, write_log

SMALL = small_config(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, hybrid_layer_pattern=[0, 1, 0], moe_layer_freq=[0, 1, 1]
)
STAGES = (
    Stage(until=0.5, shortest=16, longest=40, tokens=256),
    Stage(until=1.0, shortest=30, longest=90, tokens=384),
)
RECIPE = Recipe(tokens=5_000, minutes=1e6, stages=STAGES, warmup_steps=4, dtype=torch.float32)


def trainer(recipe: Recipe = RECIPE) -> Trainer:
    return Trainer(network_of(SMALL), recipe, in_turn(recall))


def batch_of(tokens: int) -> Batch:
    pool = Pool(seed=0, shortest=60, longest=90, batch_tokens=tokens, block=32)
    return join(make_pool(recall, pool)[0], 32)


def test_batches_hold_every_sample_once_and_pad_at_the_end() -> None:
    pool = Pool(seed=3, shortest=10, longest=100, batch_tokens=512, block=32)
    groups = make_pool(recall, pool)
    assert groups == make_pool(recall, pool)
    count = sum(len(group) for group in groups)
    drawn = list(islice(recall(3, shortest=10, longest=100), count))
    seen, places = [], 0
    for group in groups:
        batch = join(group, 32)
        assert batch.tokens.shape[1] % 32 == 0 and batch.tokens.numel() <= 512
        places += batch.tokens.numel()
        for sample, tokens, written, counted in zip(group, batch.tokens, batch.written, batch.counted, strict=True):
            length = len(sample.ids)
            assert counted[:length].all() and not counted[length:].any()
            assert tokens[counted].tolist() == sample.ids
            assert written[:length].tolist() == sample.trained and not written[length:].any()
            seen.append(sample)
    assert sorted(seen, key=str) == sorted(drawn, key=str)
    assert sum(len(sample.ids) for sample in drawn) > 0.6 * places


def test_an_interrupted_training_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole, part = trainer(), trainer()
    for _ in whole.run():
        pass
    assert whole.progress.stage == 1 and whole.progress.steps > LOG_STEPS
    for cut in (7, 100):
        for progress in part.run(max_steps=cut):
            if cut == 100 and progress.taken == len(part._pool):
                break  # the pool is used up, and the next one not begun
        part.save(tmp_path / "checkpoint.pt")
        part = trainer()
        part.load(tmp_path / "checkpoint.pt")
    for _ in part.run():
        pass
    assert part.progress.steps == whole.progress.steps
    one, other = part.network.state_dict(), whole.network.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in other)
    timed = ("seconds", "tokens_per_s")
    logs = [[{k: v for k, v in row.items() if k not in timed} for row in t.progress.log] for t in (part, whole)]
    assert logs[0] == logs[1] and len(logs[0]) == 1


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path: Path) -> None:
    trainer().save(tmp_path / "checkpoint.pt")
    with pytest.raises(AssertionError, match="another recipe"):
        trainer(replace(RECIPE, seed=1)).load(tmp_path / "checkpoint.pt")


def test_training_ends_in_time_on_a_slow_machine() -> None:
    slow = trainer(replace(RECIPE, tokens=10**12, minutes=1.0))
    slow.progress.seconds = 59.9999
    assert len(list(slow.run())) == 1
    assert slow.share_done >= 1.0


def test_weights_are_the_assistants_and_a_few_of_the_prompts() -> None:
    """Each head predicts so far ahead: the assistant's tokens all have a target, whoever wrote those before."""
    one = trainer()
    batch = batch_of(512)
    losses = one.losses(batch)
    assert len(losses) == 4
    for count, loss in enumerate(losses, start=1):
        assert len(loss.hits) == int(ahead(batch.written, count).sum())


def test_every_parameter_learns() -> None:
    one = trainer()
    batch = batch_of(2048)
    load = RouterLoad(counted=batch.counted)
    sum(loss.value for loss in one.losses(batch, load)).backward()
    still = [name for name, p in one.network.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert still == []


def test_orthogonal_keeps_directions_and_evens_sizes() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((2, 24, 60), (2, 60, 24)):
        matrices = torch.randn(shape, generator=generator)
        u, _, v = torch.linalg.svd(matrices, full_matrices=False)
        made = orthogonal(matrices)
        assert (torch.linalg.svdvals(made) - 1).abs().max() < 0.4
        assert (made - u @ v).norm() / (u @ v).norm() < 0.35


def test_muon_finds_a_matrix() -> None:
    target = torch.randn(3, 16, 24, generator=torch.Generator().manual_seed(0))
    found = torch.zeros(3, 16, 24, requires_grad=True)
    muon = Muon([found], lr=0.1, momentum=0.9, weight_decay=0.0)
    for step in range(200):
        muon.param_groups[0]["lr"] = 0.1 * (1 - step / 200)
        (found - target).square().sum().backward()
        muon.step()
        muon.zero_grad()
    assert (found - target).abs().max() < 0.05


def test_the_rate_rises_stays_and_falls() -> None:
    rates = [rate_at(step / 100, step=step, warmup_steps=10, decay=0.5) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[50] == 1.0
    assert rates[75] == pytest.approx(0.5) and rates[100] == 0.0


def test_the_rate_falls_twice_and_the_second_time_from_less() -> None:
    one = trainer(replace(RECIPE, tokens=1_000, warmup_steps=1, decay=0.5, polish_from=0.8, polish_rate=0.25))
    rates = []
    for tokens in range(0, 1_000, 100):
        one.progress.tokens = tokens
        rates.append(one._rate())
    assert rates == pytest.approx([1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.25, 0.125])


def test_each_stage_draws_from_its_mixture() -> None:
    assert {stage.mixture for stage in Recipe().stages} == MIXTURES.keys()
    for mixture, wanted in MIXTURES.items():
        assert sum(short for short, _ in wanted.values()) == pytest.approx(1)
        assert sum(long for _, long in wanted.values()) == pytest.approx(1)
        rng = Random(1)
        drawn = Counter(choose(rng, 100, mixture) for _ in range(4_000))
        for name, (short, _) in wanted.items():
            assert drawn[name] / 4_000 == pytest.approx(short, abs=0.03)


def test_the_log_is_a_table_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.train_tiny.train.LOG_STEPS", 2)
    one = trainer()
    for _ in one.run(max_steps=6):
        pass
    write_log(one.progress.log, tmp_path)
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert lines[0].startswith("step,tokens,seconds,stage") and "loss_mtp3" in lines[0]
    assert len(lines) == 1 + len(one.progress.log) == 4
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_turns_are_the_spans_that_the_assistant_wrote() -> None:
    assert turns([False, True, True, False, True]) == [(1, 3), (4, 5)]
    assert turns([False]) == []


def test_drafts_are_judged_where_the_assistant_writes() -> None:
    sample = Recall(ids=[1, 8, 64, 65, 66, 67, 3], trained=[False, False, True, True, True, True, False])
    batch = join([sample], 8)
    assert drafted_positions(batch, 0)[0].nonzero()[:, 0].tolist() == [1, 2, 3]
    assert drafted_positions(batch, 2)[0].nonzero()[:, 0].tolist() == [1]


def test_the_judgement_of_all_turns_at_once_is_that_of_the_greedy_loop() -> None:
    """Some turns are what the network says of itself, some are that but for one token, and some are anything."""
    network = network_of(SMALL)
    rng = Random(0)
    samples, right, total = [], 0, 0
    for sample in islice(recall(5, shortest=16, longest=30), 8):
        ids = list(sample.ids)
        for start, stop in turns(sample.trained):
            own = greedy(network, ids[:start], limit=stop - start, stops=(), dtype=torch.float32)
            ids[start:stop] = rng.choice([own, [*own[:-1], (own[-1] + 1) % VOCAB], ids[start:stop]])
            guess = ids[start:stop]
            guessed = greedy(network, ids[:start], limit=stop - start, stops=(), guess=guess, dtype=torch.float32)
            assert guessed == own
            right, total = right + (own == guess), total + 1
        samples.append(Recall(ids=ids, trained=sample.trained))
    report = evaluate(network, samples, dtype=torch.float32)
    assert 0 < right < total
    assert (report.right["recall"], report.answers["recall"]) == (right, total)
    assert len(report.evenness()) == 2


@torch.no_grad()
def test_the_greedy_loop_ends_at_a_stop_and_at_its_limit() -> None:
    network = network_of(SMALL)
    free = greedy(network, [1, 9, 70], limit=6, stops=())
    assert len(free) == 6
    stopped = greedy(network, [1, 9, 70], limit=6, stops=(free[2],))
    assert stopped == free[: free.index(free[2]) + 1]
