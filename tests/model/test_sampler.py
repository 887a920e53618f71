from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from server.model.sampler import FIRST_CANDIDATES, Sampler, gumbel_noise, noise_key
from server.request import SampledToken, SamplingParams
from server.step import RowPlan, SequenceId, SlotId, SlotOpening

VOCAB = 50


def opening(
    params: SamplingParams,
    *,
    slot: int = 0,
    choice: int = 0,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    stop: frozenset[int] = frozenset(),
) -> SlotOpening:
    return SlotOpening(
        slot=SlotId(slot),
        sequence=SequenceId(slot),
        choice=choice,
        sampling=params,
        stop_token_ids=stop,
        prompt_tokens=prompt,
        output_tokens=output,
    )


def row(position: int, *, slot: int = 0, suppress_stop: bool = False) -> RowPlan:
    """A row whose token lands at `position`."""
    return RowPlan(
        slot=SlotId(slot),
        sequence=SequenceId(slot),
        epoch=1,
        start=position - 1,
        tokens=(0,),
        samples=True,
        suppress_stop=suppress_stop,
    )


def sample_one(
    logits: torch.Tensor, opened: SlotOpening, position: int = 7, *, suppress_stop: bool = False
) -> SampledToken:
    sampler = Sampler(logits.shape[-1], torch.device("cpu"))
    sampler.open(opened)
    (result,) = sampler.sample(logits[None].clone(), [row(position, slot=opened.slot, suppress_stop=suppress_stop)])
    assert result.token is not None, result.failure
    return result.token


def definition(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities [N] fp64 by the plain definition: temperature, top-k, top-p over what is left, min-p."""
    p = torch.softmax(logits.double() / params.temperature, -1)
    if params.top_k > 0:
        kth = p.sort(descending=True).values[min(params.top_k, len(p)) - 1]
        p = torch.where(p >= kth, p, 0.0)
        p /= p.sum()
    if params.top_p < 1:
        order = p.sort(descending=True)
        kept = int((order.values.cumsum(-1) < params.top_p).sum()) + 1
        p = torch.where(p >= order.values[min(kept, len(p)) - 1], p, 0.0)
    if params.min_p > 0:
        p = torch.where(p >= params.min_p * p.max(), p, 0.0)
    return p / p.sum()


def draws(logits: torch.Tensor, params: SamplingParams, count: int) -> torch.Tensor:
    """Counts [N] of `count` draws at as many positions."""
    sampler = Sampler(logits.shape[-1], torch.device("cpu"))
    sampler.open(opening(params))
    counts = torch.zeros(logits.shape[-1])
    for start in range(0, count, 500):
        rows = [row(position + 1) for position in range(start, start + 500)]
        for result in sampler.sample(logits.expand(500, -1).clone(), rows):
            assert result.token is not None
            counts[result.token.token_id] += 1
    return counts


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.7),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.6),
        SamplingParams(top_p=0.9, top_k=10),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.5, top_p=0.95, min_p=0.05, top_k=30),
    ],
)
def test_draws_follow_the_plain_definition(params: SamplingParams) -> None:
    torch.manual_seed(0)
    logits = torch.randn(VOCAB) * 2
    expected = definition(logits, params)
    n = 20_000
    counts = draws(logits, params, n)
    assert counts[expected == 0].sum() == 0, "a filtered token was drawn"
    live = expected > 0
    chi2 = (((counts - n * expected) ** 2) / (n * expected))[live].sum().item()
    freedom = max(1, int(live.sum()) - 1)
    assert chi2 < freedom + 6 * math.sqrt(2 * freedom) + 6


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_mass_beyond_the_first_candidates_is_found(top_p: float) -> None:
    """A flat row needs more than the first candidates for its mass: the whole row is then sorted."""
    torch.manual_seed(1)
    logits = torch.randn(4 * FIRST_CANDIDATES) * 0.01
    params = SamplingParams(top_p=top_p)
    expected = definition(logits, params)
    counts = draws(logits, params, 4000)
    assert counts[expected == 0].sum() == 0
    assert (counts > 0).sum() > 1000


@pytest.mark.parametrize("temperature", [1e-300, 1e-39, 1e-6, 1e-5, 2e-5])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_smallest_temperatures_are_greedy_and_finite(temperature: float, top_p: float) -> None:
    torch.manual_seed(6)
    logits = torch.randn(VOCAB) * 10
    params = SamplingParams(temperature=temperature, top_p=top_p)
    assert all(sample_one(logits, opening(params), position=p).token_id == int(logits.argmax()) for p in range(1, 30))


@pytest.mark.parametrize("top_k", [FIRST_CANDIDATES - 1, FIRST_CANDIDATES, 1500, 2000, 3999])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_a_top_k_beyond_the_first_candidates_bounds_the_mass_of_top_p(top_k: int, top_p: float) -> None:
    torch.manual_seed(7)
    logits = torch.randn(4000) * 0.5
    params = SamplingParams(top_k=top_k, top_p=top_p)
    expected = definition(logits, params)
    counts = draws(logits, params, 4000)
    assert counts[expected == 0].sum() == 0
    kept = int((expected > 0).sum())
    assert (counts > 0).sum() > 0.5 * min(kept, 1500)


def test_ties_that_run_beyond_the_first_candidates_all_survive() -> None:
    logits = torch.full((3000,), 1.0)
    logits[0] = 3.0
    counts = draws(logits, SamplingParams(top_k=FIRST_CANDIDATES - 1, top_p=0.9), 6000)
    assert (counts > 0).sum() > 2000


def test_ties_at_the_border_of_top_k_all_survive() -> None:
    logits = torch.zeros(VOCAB)
    counts = draws(logits, SamplingParams(top_k=3), 5000)
    assert (counts > 0).all()


def test_temperature_zero_is_greedy_and_equal_logits_go_to_the_lowest_id() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0])
    assert sample_one(logits, opening(SamplingParams(temperature=0.0, top_p=0.5))).token_id == 1


def test_a_token_depends_on_logits_seed_choice_and_position_and_on_nothing_else() -> None:
    """A row gives the same token alone, in any batch, in any slot and any order."""
    torch.manual_seed(2)
    rng = random.Random(2)
    population = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.0, 1.3]),
            top_k=rng.choice([0, 0, 3, 20]),
            top_p=rng.choice([1.0, 0.5, 0.95]),
            min_p=rng.choice([0.0, 0.1]),
            presence_penalty=rng.choice([0.0, 0.0, 0.5]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            logprobs=rng.choice([None, None, 3]),
            seed=rng.randrange(2**63),
        )
        for _ in range(40)
    ]
    logits = torch.randn(40, 3000) * 3
    prompts = [tuple(rng.randrange(3000) for _ in range(20)) for _ in population]
    alone = [
        sample_one(logits[i], opening(p, choice=i % 3, prompt=prompts[i]), position=100 + i)
        for i, p in enumerate(population)
    ]
    order = list(range(40))
    rng.shuffle(order)
    sampler = Sampler(3000, torch.device("cpu"))
    for slot, i in enumerate(order):
        sampler.open(opening(population[i], slot=slot, choice=i % 3, prompt=prompts[i]))
    results = sampler.sample(logits[order].clone(), [row(100 + i, slot=slot) for slot, i in enumerate(order)])
    assert [r.token.token_id for r in results if r.token] == [alone[i].token_id for i in order]


def test_seed_choice_and_position_each_change_the_noise() -> None:
    keys = {noise_key(seed, choice, position) for seed in range(20) for choice in range(20) for position in range(20)}
    assert len(keys) == 8000


def test_noise_is_standard_gumbel_and_always_finite() -> None:
    keys = torch.tensor([[noise_key(s, 0, 0) - 2**63] for s in range(50)], dtype=torch.int64)
    noise = gumbel_noise(keys, torch.arange(20_000)).double()
    assert torch.isfinite(noise).all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    flat = noise.flatten()
    for quantile in (0.01, 0.5, 0.99, 0.9999):
        expected = -math.log(-math.log(quantile))
        assert (flat < expected).double().mean().item() == pytest.approx(quantile, abs=2e-3)
    correlation = torch.corrcoef(torch.stack([noise[0], noise[1]]))[0, 1]
    assert abs(correlation.item()) < 0.03


def test_penalties_follow_their_definitions() -> None:
    torch.manual_seed(3)
    logits = torch.randn(VOCAB)
    prompt, output = (1, 2, 2, 3), (3, 4, 4, 4)
    params = SamplingParams(temperature=0.0, repetition_penalty=1.7, presence_penalty=0.3, frequency_penalty=0.2)
    adjusted = logits.clone()
    for token in {*prompt, *output}:
        adjusted[token] = adjusted[token] / 1.7 if adjusted[token] > 0 else adjusted[token] * 1.7
    for token in set(output):
        adjusted[token] -= 0.3 + 0.2 * output.count(token)
    for _ in range(VOCAB):
        best = int(adjusted.argmax())
        token = sample_one(logits, opening(params, prompt=prompt, output=output)).token_id
        assert token == best
        logits[best] = adjusted[best] = -1e9


def test_sampled_tokens_are_counted_once_however_often_a_step_is_run() -> None:
    """Frequency penalty 0.3 and gaps of 0.5: a token that is counted twice, or not at all, gives another text."""
    params = SamplingParams(temperature=0.0, frequency_penalty=0.3)
    logits = torch.tensor([[1.0, 0.75, 0.0]])

    def text(runs: int) -> list[int]:
        sampler, said = Sampler(3, torch.device("cpu")), [2, 2]
        sampler.open(opening(params, prompt=(2, 2)))
        for position in range(2, 10):
            input_row = replace(row(position), tokens=(said[-1],))
            for _ in range(runs):
                token = sampler.sample(logits.clone(), [input_row])[0].token
            assert token is not None
            said.append(token.token_id)
        return said[2:]

    counts = [0, 0, 0]
    expected = []
    for _ in range(8):
        scores = [value - 0.3 * count for value, count in zip((1.0, 0.75, 0.0), counts, strict=True)]
        expected.append(scores.index(max(scores)))
        counts[expected[-1]] += 1
    assert text(1) == text(3) == expected
    assert len(set(expected)) > 1


def test_a_sequence_that_comes_back_brings_its_counts() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    logits = torch.tensor([[1.0, 0.5, 0.0]])
    sampler = Sampler(3, torch.device("cpu"))
    sampler.open(opening(params, prompt=(2, 2), output=(0,)))
    whole = replace(row(3), start=0, tokens=(2, 2, 0))
    token = sampler.sample(logits, [whole])[0].token
    assert token is not None
    assert token.token_id == 1


def test_logit_bias_can_force_and_forbid() -> None:
    logits = torch.zeros(VOCAB)
    forced = SamplingParams(logit_bias=((7, 100.0),))
    assert all(sample_one(logits, opening(forced), position=p).token_id == 7 for p in range(1, 20))
    forbidden = SamplingParams(logit_bias=tuple((i, -100.0) for i in range(VOCAB) if i != 9))
    assert sample_one(logits, opening(forbidden)).token_id == 9


def test_stop_ids_are_not_sampled_while_they_are_suppressed() -> None:
    logits = torch.tensor([0.0, 9.0, 1.0])
    opened = opening(SamplingParams(temperature=0.0), stop=frozenset({1}))
    assert sample_one(logits, opened, suppress_stop=True).token_id == 2
    assert sample_one(logits, opened).token_id == 1


def test_stop_ids_outside_the_vocabulary_are_harmless() -> None:
    logits = torch.tensor([0.0, 9.0, 1.0])
    opened = opening(SamplingParams(temperature=0.0), stop=frozenset({1, 3, 99}))
    assert sample_one(logits, opened, suppress_stop=True).token_id == 2


def test_log_probabilities_are_those_of_the_model_before_any_filter() -> None:
    torch.manual_seed(4)
    logits = torch.randn(VOCAB)
    expected = torch.log_softmax(logits, -1)
    params = SamplingParams(temperature=0.3, top_k=2, logprobs=5, logit_bias=((3, 50.0),), presence_penalty=1.0)
    token = sample_one(logits, opening(params, prompt=(1,), output=(3,)))
    assert token.token_id == 3
    assert token.logprob == pytest.approx(expected[3].item(), abs=1e-5)
    best = expected.topk(5)
    assert [i for i, _ in token.top] == best.indices.tolist()
    assert [p for _, p in token.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert sample_one(logits, opening(SamplingParams(logprobs=0))).top == ()
    assert sample_one(logits, opening(SamplingParams())).logprob is None


def test_a_row_with_broken_logits_fails_alone() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, 4] = math.nan
    sampler = Sampler(VOCAB, torch.device("cpu"))
    for slot in range(3):
        sampler.open(opening(SamplingParams(top_p=0.9), slot=slot))
    results = sampler.sample(logits, [row(5, slot=slot) for slot in range(3)])
    assert results[1].token is None
    assert "not finite" in (results[1].failure or "")
    assert results[0].token is not None
    assert results[2].token is not None
