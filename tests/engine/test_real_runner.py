"""The whole engine but HTTP, with real tensors: what memory is held, read and mixed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from server.errors import EngineFailed
from server.model.sampler import gumbel_noise, noise_key
from server.model.spec import ModelSpec
from server.model.weights import Weights
from server.request import FinishReason, RequestId, SamplingParams
from server.step import PageKind, RowPlan, RowResult, SequenceId, StepPlan
from tests.engine.real import RealHouse, load_gguf, load_mimo
from tests.fake_device import CollectedOutput


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSpec, Weights]:
    """Window layers with 32 keys, MoE, sinks, three MTP layers in the window page; vocabulary of 128."""
    return load_mimo(tmp_path_factory.mktemp("mimo"), window=31)


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> tuple[ModelSpec, Weights]:
    return load_gguf(smollm2_gguf)


def random_sampling(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.6, 1.0, 1.2]),
        top_k=rng.choice([0, 0, 40]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.4]),
        seed=rng.randrange(2**63),
        logprobs=2,
    )


DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def busy_run(house: RealHouse, poison: float | None) -> list[list[object]]:
    """Mixed traffic with a cancel and preemptions; returns everything that came out, floats included."""
    rng = random.Random(1)
    ids: list[RequestId] = []
    cancelled = RequestId("r3")
    for number in range(10):
        prompt = [rng.randrange(128) for _ in range(rng.choice([3, 20, 70, 150]))]
        ids.append(house.submit(f"r{number}", prompt, outputs=rng.randint(5, 60), sampling=random_sampling(rng)))
        for _ in range(rng.randint(0, 3)):
            if poison is not None:
                house.poison(poison)
            house.step()
        if number == 6:
            house.scheduler.cancel(cancelled, house.now)
    while True:
        if poison is not None:
            house.poison(poison)
        if not house.step():
            break
    house.assert_empty()
    return [[output.ending, *output.sampled] for request_id in ids for output in house.outputs[request_id]]


@DEPTHS
def test_nothing_reads_a_released_page(mimo: tuple[ModelSpec, Weights], depth: int) -> None:
    """Bytes that nobody owns hold one huge value, then another: every bit that comes out is the same."""
    settings = {"depth": depth, "slabs": 16, "max_sequences": 5, "prefill_chunk_tokens": 16, "step_token_budget": 40}
    clean = RealHouse(*mimo, **settings)
    expected = busy_run(clean, None)
    assert clean.preemptions > 0, "the test is to walk through preemption"
    for value in (1e30, -3e20):
        assert busy_run(RealHouse(*mimo, **settings), value) == expected


def test_a_long_sequence_never_holds_more_window_pages_than_window_plus_chunk(
    mimo: tuple[ModelSpec, Weights],
) -> None:
    """4,000 prompt tokens and 1,000 decoded ones, window of 32 keys; the arena is read in and after every step."""
    chunk, page = 64, 16
    house = RealHouse(*mimo, page_tokens=page, slabs=400, prefill_chunk_tokens=chunk, step_token_budget=chunk)
    rng = random.Random(0)
    house.submit("long", [rng.randrange(128) for _ in range(4000)], outputs=1000)
    in_step: list[tuple[int, int]] = []

    def look(plan: StepPlan) -> None:
        in_step.append((len(plan.rows[0].tokens), house.cache.held_pages(PageKind.WINDOW)))

    after_step = []
    while house.step(before=look):
        after_step.append(house.cache.held_pages(PageKind.WINDOW))
    assert len(in_step) == 4000 // chunk + 1 + 999
    for tokens, held in in_step:
        assert held <= math.ceil((31 + tokens - 1) / page) + 1
    assert max(after_step) <= math.ceil((31 - 1) / page) + 1
    assert len(house.texts(RequestId("long"))[0]) == 1000
    house.assert_empty()


def test_preemption_and_page_moves_change_no_text(mimo: tuple[ModelSpec, Weights]) -> None:
    """The same requests in plenty of memory and in so little that they take each other's place."""
    rng = random.Random(5)
    asks = [
        ([rng.randrange(128) for _ in range(rng.randint(3, 20))], rng.randint(60, 140), random_sampling(rng))
        for _ in range(12)
    ]

    def run(slabs: int) -> tuple[RealHouse, int]:
        house, moves = RealHouse(*mimo, slabs=slabs, prefill_chunk_tokens=8, step_token_budget=32), 0

        def count(plan: StepPlan) -> None:
            nonlocal moves
            moves += len(plan.moves)

        for number, (prompt, outputs, sampling) in enumerate(asks):
            house.submit(f"{number}", prompt, outputs=outputs, sampling=sampling)
        house.run(before=count)
        house.assert_empty()
        return house, moves

    plenty, _ = run(400)
    little, moves = run(12)
    assert plenty.preemptions == 0
    assert little.preemptions > 3
    assert moves > 0
    for number in range(len(asks)):
        assert little.texts(RequestId(f"{number}")) == plenty.texts(RequestId(f"{number}"))


def test_planning_ahead_changes_no_text(mimo: tuple[ModelSpec, Weights]) -> None:
    """Sampling, penalties, log-probabilities, stop ids and two choices each, in memory that is short now and then."""
    rng = random.Random(11)
    asks = [
        ([rng.randrange(128) for _ in range(rng.randint(1, 40))], rng.randint(20, 90), random_sampling(rng))
        for _ in range(14)
    ]

    def run(depth: int, eager: bool = False) -> RealHouse:
        house = RealHouse(
            *mimo, slabs=26, depth=depth, eager=eager, max_sequences=8, prefill_chunk_tokens=8, step_token_budget=32
        )
        for number, (prompt, outputs, sampling) in enumerate(asks):
            stop_ids = frozenset({5, 77}) if number % 2 else frozenset[int]()
            house.submit(
                f"{number}",
                prompt,
                outputs=outputs,
                choices=2,
                sampling=sampling,
                stop_token_ids=stop_ids,
                min_tokens=number % 3,
            )
            house.step()
        house.run()
        house.assert_empty()
        return house

    plain = run(1)
    endings = [output.ending for outputs in plain.outputs.values() for output in outputs]
    assert {FinishReason.STOP, FinishReason.LENGTH} == set(endings)
    assert plain.preemptions > 0
    for house in (run(2), run(2, eager=True)):
        assert house.scheduler.most_in_flight == 2
        for request_id in plain.outputs:
            assert house.texts(request_id) == plain.texts(request_id)
            for mine, theirs in zip(house.outputs[request_id], plain.outputs[request_id], strict=True):
                assert mine.ending is theirs.ending
                for a, b in zip(mine.sampled, theirs.sampled, strict=True):
                    assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


@pytest.mark.parametrize("eager", [False, True])
def test_a_failing_row_takes_no_other_along_though_its_next_row_is_handed_over(
    mimo: tuple[ModelSpec, Weights], eager: bool
) -> None:
    """In the middle of its answer: its slot holds a token of the step before, which must not be taken for the next."""
    prompts = {
        name: [at * 7 % 128 for at in range(first, first + 12)] for name, first in (("a", 1), ("bad", 2), ("b", 3))
    }
    sampling = SamplingParams(seed=4, frequency_penalty=0.3)

    def run(depth: int, chokes_at: int | None) -> RealHouse:
        house = RealHouse(*mimo, slabs=60, depth=depth, eager=eager)
        for name, prompt in prompts.items():
            house.submit(name, prompt, outputs=20, sampling=sampling)
        compute = house.device._compute  # type: ignore[attr-defined]

        def choking(rows: list[RowPlan], begun: Callable[[], None]) -> list[RowResult]:
            assert not any(row.follows is not None for row in rows)
            computed.extend((row.sequence, row.start) for row in rows)
            if any(row.sequence == 1 and row.start == chokes_at for row in rows):
                raise RuntimeError("the device choked")
            return compute(rows, begun)

        house.device._compute = choking  # type: ignore[attr-defined]
        house.run()
        house.assert_empty()
        return house

    computed: list[tuple[int, int]] = []
    plain = run(1, None)
    computed.clear()
    house = run(2, 17)
    assert max(start for sequence, start in computed if sequence == 1) == 17, "nothing goes on from a failed row"
    for name in ("a", "b"):
        assert house.texts(RequestId(name)) == plain.texts(RequestId(name))
    assert house.texts(RequestId("bad")) == [plain.texts(RequestId("bad"))[0][:6]]
    assert isinstance(house.outputs[RequestId("bad")][0].ending, EngineFailed)


def score(
    token: int,
    model_logprobs: dict[int, float],
    output: CollectedOutput,
    at: int,
    sampling: SamplingParams,
    position: int,
) -> float:
    """What the sampler compares: scaled, penalized log-probability plus noise."""
    value = model_logprobs[token] - sampling.frequency_penalty * output.tokens[:at].count(token)
    if sampling.temperature == 0:
        return value
    key = noise_key(sampling.seed, 0, position)
    signed = key - 2**64 if key >= 2**63 else key
    noise = gumbel_noise(torch.tensor([[signed]]), torch.tensor([token])).item()
    return value / sampling.temperature + noise


def test_thirty_two_concurrent_requests_each_get_the_text_they_get_alone(smollm2: tuple[ModelSpec, Weights]) -> None:
    """Where a text parts from the one alone, the two best scores must lie within 1e-3: a near tie in fp32."""
    rng = random.Random(3)
    spec, weights = smollm2
    asks = []
    for _ in range(32):
        prompt = [rng.randrange(20, spec.vocab) for _ in range(rng.choice([4, 17, 60, 200]))]
        asks.append((prompt, rng.randint(12, 40), random_sampling(rng)))
    together = RealHouse(spec, weights, page_tokens=16, slabs=800, prefill_chunk_tokens=48, step_token_budget=160)
    ids = [together.submit(f"{n}", p, outputs=o, sampling=s) for n, (p, o, s) in enumerate(asks)]
    together.run()
    together.assert_empty()
    flips = compared = 0
    for request_id, (prompt, outputs, sampling) in zip(ids, asks, strict=True):
        alone = RealHouse(spec, weights, page_tokens=16, slabs=40)
        alone_id = alone.submit("alone", prompt, outputs=outputs, sampling=sampling)
        alone.run()
        (mine,), (theirs,) = alone.outputs[alone_id], together.outputs[request_id]
        assert mine.ending is theirs.ending is FinishReason.LENGTH
        for at, (a, b) in enumerate(zip(mine.sampled, theirs.sampled, strict=True)):
            compared += 1
            if a.token_id != b.token_id:
                flips += 1
                logprobs = {a.token_id: a.logprob or 0.0, b.token_id: b.logprob or 0.0}
                position = len(prompt) + at
                scores = [score(t.token_id, logprobs, mine, at, sampling, position) for t in (a, b)]
                assert abs(scores[0] - scores[1]) < 1e-3
                break
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
    print(f"{flips} near-tie flips in {compared} positions")
    assert compared > 700
    assert flips <= compared / 1000


def test_n_choices_of_one_seed_are_four_different_texts(smollm2: tuple[ModelSpec, Weights]) -> None:
    spec, weights = smollm2
    house = RealHouse(spec, weights, page_tokens=16, slabs=40)
    request_id = house.submit("n", list(range(50, 70)), outputs=12, choices=4, sampling=SamplingParams(seed=7))
    house.run()
    texts = house.texts(request_id)
    assert len({tuple(text) for text in texts}) == 4
    again = RealHouse(spec, weights, page_tokens=16, slabs=40)
    again.submit("n", list(range(50, 70)), outputs=12, choices=4, sampling=SamplingParams(seed=7))
    again.run()
    assert again.texts(RequestId("n")) == texts


def test_the_arena_is_all_there_is(mimo: tuple[ModelSpec, Weights]) -> None:
    """A request that needs every slab runs, and one token more is clamped away by what the engine says of itself."""
    house = RealHouse(*mimo, slabs=8, prefill_chunk_tokens=8)
    most = house.scheduler.context_tokens
    house.submit("all", [5] * (most - 10), outputs=10)
    house.run()
    assert house.outputs[RequestId("all")][0].ending is FinishReason.LENGTH
    assert SequenceId(0) not in house.scheduler._running
    house.assert_empty()
