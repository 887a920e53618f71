"""The draw in C is the torch sampler's, and both are the plain definition's."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.native.kernels import Draw
from server.model.sampler import Sampler, noise_key
from server.request import SamplingParams
from server.step import RowPlan, SequenceId, SlotId, SlotOpening
from tests.native.conftest import MakeKernels

PLAIN = Draw(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, key=0)


def noise(key: int, count: int) -> Tensor:
    """Gumbel noise [count] fp64 by the definition of `server.model.sampler.gumbel_noise`, in Python's own numbers."""
    mask, values = (1 << 64) - 1, []
    for token in range(count):
        h = (key + (token + 1) * 0x9E3779B97F4A7C15) & mask
        h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9 & mask
        h = (h ^ (h >> 27)) * 0x94D049BB133111EB & mask
        values.append((h ^ (h >> 31)) >> 11)
    v = ((torch.tensor(values, dtype=torch.int64).float() + 0.5) * 2.0**-53).clamp(max=1 - 2.0**-24).double()
    return -torch.log(-torch.log1p(-v))


def survivors(logits: Tensor, draw: Draw) -> Tensor:
    """Which tokens [N] may be drawn: top-k, top-p over what that left, min-p; ties with the last survivor survive."""
    p = torch.softmax(logits.double() / draw.temperature, -1)
    if 0 < draw.top_k < len(p):
        p = torch.where(p >= p.sort(descending=True).values[draw.top_k - 1], p, 0.0)
        p = p / p.sum()
    best = p.max()
    if draw.top_p < 1:
        order = p.sort(descending=True).values
        kept = int((order.cumsum(-1) < draw.top_p).sum())
        p = torch.where(p >= order[min(kept, len(p) - 1)], p, 0.0)
    return (p > 0) & (p >= draw.min_p * best)


def row(slot: int, position: int) -> RowPlan:
    return RowPlan(
        slot=SlotId(slot),
        sequence=SequenceId(slot),
        epoch=1,
        start=position - 1,
        tokens=(0,),
        samples=True,
        suppress_stop=False,
    )


def both(
    make_kernels: MakeKernels, logits: Tensor, params: list[SamplingParams], threads: int = 2
) -> tuple[list[int | None], list[int | None]]:
    """Tokens of the torch sampler and of the one that draws in C; None for a row that failed."""
    results = []
    for native in (None, make_kernels(threads)):
        sampler = Sampler(logits.shape[1], torch.device("cpu"), native)
        for slot, wanted in enumerate(params):
            sampler.open(
                SlotOpening(
                    slot=SlotId(slot),
                    sequence=SequenceId(slot),
                    choice=slot % 3,
                    sampling=wanted,
                    stop_token_ids=frozenset(),
                    prompt_tokens=(0,),
                    output_tokens=(),
                )
            )
        rows = [row(slot, 5 + slot) for slot in range(len(params))]
        sampled = sampler.sample(logits.clone(), rows)
        results.append([None if result.token is None else result.token.token_id for result in sampled])
    return results[0], results[1]


def random_params(generator: random.Random, vocab: int) -> SamplingParams:
    return SamplingParams(
        temperature=generator.choice([0.0, 1e-6, 0.02, 0.7, 1.0, 1.0, 1.5, 2.0, 50.0]),
        top_k=generator.choice([0, 0, 0, 1, 3, 20, vocab // 2 + 1, vocab, vocab + 5, 10**9]),
        top_p=generator.choice([1.0, 1.0, 0.95, 0.5, 0.1, 1e-3, 1e-9]),
        min_p=generator.choice([0.0, 0.0, 0.05, 0.5, 1.0]),
        repetition_penalty=generator.choice([1.0, 1.0, 1.3]),
        logprobs=generator.choice([None, None, min(2, vocab)]),
        seed=generator.randrange(2**63),
    )


@pytest.mark.parametrize("vocab", [1, 2, 3, 17, 1000, 1024, 1025, 50_000])
def test_it_draws_what_torch_draws(make_kernels: MakeKernels, vocab: int) -> None:
    """But for ties within the last bits of two logarithms or of a sum of 50,000 shares, which are counted."""
    generator = random.Random(vocab)
    torch.manual_seed(vocab)
    different = total = 0
    for spread in (0.0, 0.01, 1.0, 4.0, 60.0):
        count = 24 if vocab > 10_000 else 60
        logits = torch.randn(count, vocab) * spread
        logits[::3] = logits[::3].round()  # ties, many of them
        if vocab > 2:
            logits[1::4, torch.randperm(vocab)[: vocab // 2]] = -math.inf
        plain, ours = both(make_kernels, logits, [random_params(generator, vocab) for _ in range(count)])
        assert None not in ours
        different += sum(a != b for a, b in zip(plain, ours, strict=True))
        total += count
    assert different <= total // 100, f"{different} of {total}"


def test_a_vocabulary_of_300_thousand_is_drawn_from(make_kernels: MakeKernels) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 300_000) * 3
    logits[1] = 0.0
    logits[2] = torch.linspace(0, 1e-3, 300_000)
    settings = [{}, {}, {}, {"top_p": 0.9}, {"top_k": 100_000, "top_p": 0.99}, {"min_p": 0.01}]
    plain, ours = both(make_kernels, logits, [SamplingParams(seed=i, **s) for i, s in enumerate(settings)])  # type: ignore[arg-type]
    assert ours == plain


def test_the_token_is_the_best_survivor_with_its_noise(make_kernels: MakeKernels) -> None:
    generator = random.Random(0)
    torch.manual_seed(0)
    kernels = make_kernels()
    close = 0
    for _ in range(300):
        vocab = generator.choice([5, 40, 257])
        logits = torch.randn(vocab) * generator.choice([0.3, 2.0, 9.0])
        draw = Draw(
            temperature=generator.choice([0.3, 1.0, 1.8]),
            top_k=generator.choice([0, 1, 4, 30, 400]),
            top_p=generator.choice([1.0, 0.9, 0.4, 0.01]),
            min_p=generator.choice([0.0, 0.1]),
            key=generator.randrange(2**64),
        )
        allowed = survivors(logits, draw)
        scores = (logits.double() / draw.temperature + noise(draw.key, vocab)).masked_fill(~allowed, -math.inf)
        (token,) = kernels.choose(logits[None], [draw])
        assert allowed[token]
        assert scores[token] >= scores.max() - 1e-5
        close += int(token != int(scores.argmax()))
    assert close <= 1


@pytest.mark.parametrize(
    "draw",
    [
        replace(PLAIN, top_k=7),
        replace(PLAIN, top_p=0.6),
        replace(PLAIN, min_p=0.2),
        replace(PLAIN, temperature=1.5, top_p=0.95, min_p=0.05, top_k=30),
        replace(PLAIN, temperature=0.4),
        PLAIN,
    ],
)
def test_frequencies_are_those_of_the_softmax_over_the_survivors(make_kernels: MakeKernels, draw: Draw) -> None:
    torch.manual_seed(1)
    logits = torch.randn(50) * 2
    logits[10:14] = logits.sort().values[-7]  # ties at the border of seven
    allowed = survivors(logits, draw)
    expected = torch.softmax((logits.double() / draw.temperature).masked_fill(~allowed, -math.inf), -1)
    n = 30_000
    draws = [replace(draw, key=noise_key(seed, 0, 3)) for seed in range(n)]
    tokens = torch.tensor(make_kernels(2).choose(logits.expand(n, -1), draws))
    counts = torch.bincount(tokens, minlength=50).double()
    assert counts[~allowed].sum() == 0
    likely = allowed & (n * expected >= 3)
    chi2 = ((counts - n * expected) ** 2 / (n * expected))[likely].sum().item()
    freedom = max(1, int(likely.sum()) - 1)
    assert chi2 < freedom + 6 * math.sqrt(2 * freedom) + 6


def test_all_that_tie_with_the_last_survivor_are_drawn(make_kernels: MakeKernels) -> None:
    logits = torch.zeros(200)
    logits[77] = 1.0
    draws = [replace(PLAIN, top_k=2, key=noise_key(seed, 0, 0)) for seed in range(6000)]
    tokens = torch.tensor(make_kernels().choose(logits.expand(6000, -1), draws))
    assert (torch.bincount(tokens, minlength=200) > 0).all()
    logits[100:] = -math.inf
    tokens = torch.tensor(make_kernels().choose(logits.expand(6000, -1), [replace(d, top_k=150) for d in draws]))
    assert tokens.max() == 99


def test_greedy_takes_the_first_of_the_best(make_kernels: MakeKernels) -> None:
    logits = torch.tensor([[0.0, 3.0, -math.inf, 3.0], [-5.0, -5.0, -6.0, -5.0], [-math.inf, -math.inf, -3e38, 0.0]])
    for draw in (replace(PLAIN, temperature=0.0), replace(PLAIN, top_k=1, temperature=1e-4), replace(PLAIN, top_p=0.0)):
        tokens = make_kernels().choose(logits, [draw] * 3)
        assert tokens[2] == 3
        if draw.temperature == 0.0:
            assert tokens == [1, 0, 3]
        assert tokens[0] in (1, 3)
        assert tokens[1] in (0, 1, 3)


def test_rows_that_are_not_finite_fail_and_no_others(make_kernels: MakeKernels) -> None:
    """-inf is a token that cannot be drawn; NaN and +inf are faults, and so is a row of nothing but -inf."""
    for vocab in (1, 5, 100, 2000):
        for place in (0, vocab // 2, vocab - 1):
            logits = torch.randn(7, vocab)
            logits[1, place] = math.nan
            logits[2, place] = math.inf
            logits[3] = -math.inf
            logits[4] = math.nan
            if vocab > 1:
                logits[5, place] = -math.inf
            for draw in (PLAIN, replace(PLAIN, temperature=0.0), replace(PLAIN, top_p=0.5, top_k=3, min_p=0.1)):
                tokens = make_kernels(3).choose(logits, [draw] * 7)
                assert [token == -1 for token in tokens] == [False, True, True, True, True, False, False]
                assert vocab == 1 or tokens[5] != place
            failed = both(make_kernels, logits, [SamplingParams(temperature=0.5, top_p=0.9)] * 7)
            assert [[token is None for token in tokens] for tokens in failed] == [
                [False, True, True, True, True, False, False]
            ] * 2


def test_a_row_is_drawn_alike_alone_in_any_batch_and_by_any_thread(make_kernels: MakeKernels) -> None:
    torch.manual_seed(4)
    logits = torch.randn(70, 3000) * 3
    draws = [replace(PLAIN, top_p=0.9 if i % 2 else 1.0, key=noise_key(i, 0, 9)) for i in range(70)]
    alone = [make_kernels().choose(logits[i : i + 1], [draws[i]])[0] for i in range(70)]
    for threads in (1, 2, 3):
        assert make_kernels(threads).choose(logits, draws) == alone


def test_no_rows_and_strided_rows(make_kernels: MakeKernels) -> None:
    kernels = make_kernels(2)
    assert kernels.choose(torch.empty(0, 50), []) == []
    logits = torch.randn(3, 50)
    wide = torch.randn(3, 100)
    wide[:, ::2] = logits
    draws = [PLAIN] * 3
    assert kernels.choose(wide[:, ::2], draws) == kernels.choose(logits, draws)
    assert kernels.choose(logits.T.contiguous().T, draws) == kernels.choose(logits, draws)
    with pytest.raises(AssertionError):
        kernels.choose(logits.double(), draws)
    with pytest.raises(AssertionError):
        kernels.choose(logits, draws[:2])
