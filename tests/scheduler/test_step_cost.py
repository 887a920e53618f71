from __future__ import annotations

import itertools
import math
import random

import pytest

from server.scheduler.step_cost import (
    NO_ROWS,
    ChunkSizer,
    FittedCost,
    FixedCost,
    StepShape,
    chunk_sizes,
    shape_of_row,
    shape_of_rows,
)

LINE = FixedCost(step_s=0.010, row_s=0.0005, token_s=0.001, read_s=1e-6)


def decoding(rows: int, context: int = 1_000) -> StepShape:
    shape = NO_ROWS
    for _ in range(rows):
        shape += shape_of_row(context, 1)
    return shape


def test_a_row_reads_on_average_the_positions_up_to_its_middle() -> None:
    assert shape_of_row(100, 10).context_reads == pytest.approx(sum(range(100, 110)) + 5, abs=1)


def test_rows_are_as_much_as_each_of_them_together() -> None:
    rng = random.Random(0)
    rows = [(rng.randrange(9_000), rng.choice([1, 1, 16, 500])) for _ in range(50)]
    together = sum((shape_of_row(start, tokens) for start, tokens in rows), NO_ROWS)
    assert shape_of_rows(rows) == together and shape_of_rows([]) == NO_ROWS


@pytest.mark.parametrize("seed", range(5))
def test_the_fitted_line_is_the_one_that_steps_were_made_of(seed: int) -> None:
    rng = random.Random(seed)
    fitted = FittedCost()
    for _ in range(400):
        shape = decoding(rng.randrange(12), rng.randrange(8_000))
        if rng.random() < 0.5 or not shape.rows:
            shape += shape_of_row(rng.randrange(8_000), rng.choice([16, 64, 256, 512]))
        fitted.note(shape, LINE.seconds(shape) * rng.lognormvariate(0, 0.03))
    for shape in (decoding(1), decoding(8), decoding(3) + shape_of_row(4_000, 512), shape_of_row(0, 64)):
        assert fitted.seconds(shape) == pytest.approx(LINE.seconds(shape), rel=0.1)


def mixed(rng: random.Random) -> StepShape:
    shape = decoding(rng.randint(1, 8), rng.randrange(2_000))
    return shape + shape_of_row(rng.randrange(2_000), rng.choice([16, 64, 256])) if rng.random() < 0.5 else shape


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rows", [1, 4, 16, 64])
def test_the_line_is_found_though_few_steps_have_prompts_and_all_have_as_many_answers(rows: int, seed: int) -> None:
    """What rows and the step itself cost cannot be told apart there, and need not be."""
    rng, fitted = random.Random(seed), FittedCost()
    for _ in range(800):
        shape = decoding(rows, 2_000)
        if rng.random() < 0.1:
            shape += shape_of_row(rng.randrange(2_000), rng.choice([64, 512, 1_000]))
        fitted.note(shape, LINE.seconds(shape) * rng.lognormvariate(0, 0.02))
    for shape in (decoding(rows, 2_000), decoding(rows, 2_000) + shape_of_row(500, 500)):
        assert fitted.seconds(shape) == pytest.approx(LINE.seconds(shape), rel=0.5)


def test_a_step_without_a_time_teaches_nothing() -> None:
    rng, fitted = random.Random(0), FittedCost()
    for _ in range(500):
        shape = mixed(rng)
        fitted.note(shape, LINE.seconds(shape))
    before = repr(fitted)
    for seconds in (math.nan, math.inf, 0.0, -1.0):
        fitted.note(mixed(rng), seconds)
    assert repr(fitted) == before


@pytest.mark.parametrize("start", [1_000, 70_000, 131_071])
def test_what_fits_far_into_a_prompt_does_not_depend_on_who_asked_before(start: int) -> None:
    sizer = sizer_of(100)
    sizer.begin(decoding(2))
    alone = sizer.weight(start)
    for other in (start // 2 + 1, start - 1, start + 1, 2 * start):
        sizer.begin(decoding(2))
        sizer.weight(other)
        assert sizer.weight(start) == alone
    fits = int(sizer.begin(decoding(2)) / alone)
    assert fits == 1 or LINE.seconds(decoding(2) + shape_of_row(start, fits)) <= 0.101


def test_nothing_is_expected_before_a_few_steps_were_seen() -> None:
    fitted = FittedCost()
    fitted.note(decoding(1), 0.01)
    assert fitted.seconds(decoding(1)) == 0.0


def test_steps_that_are_all_alike_do_not_make_the_line_run_away() -> None:
    fitted = FittedCost()
    rng = random.Random(0)
    for _ in range(20_000):
        fitted.note(decoding(2), 0.013 * rng.lognormvariate(0, 0.05))
    assert fitted.seconds(decoding(2)) == pytest.approx(0.013, rel=0.1)
    shape = decoding(2) + shape_of_row(0, 512)
    for _ in range(30):
        fitted.note(shape, LINE.seconds(shape))
    assert fitted.seconds(shape) == pytest.approx(LINE.seconds(shape), rel=0.2)


def test_pieces_have_few_sizes() -> None:
    assert chunk_sizes(16, 300) == [*range(16, 257, 16), 288, 300]
    assert chunk_sizes(16, 9) == [9]
    assert chunk_sizes(1, 40) == [*range(1, 17), 18, 20, 22, 24, 26, 28, 30, 32, 36, 40]
    assert len(chunk_sizes(128, 1 << 20)) == 16 + 9 * 8


def piece(sizer: ChunkSizer, decoding: StepShape, start: int = 0, last: int = 0) -> int:
    """The size of a piece that has all of a step to itself."""
    return sizer.size(int(sizer.begin(decoding) / sizer.weight(start)), last)


def sizer_of(target_ms: float, cost: FixedCost = LINE, most_tokens: int = 1_024) -> ChunkSizer:
    return ChunkSizer(cost, target_s=target_ms / 1_000, page_tokens=16, most_tokens=most_tokens)


def test_a_piece_of_prompt_is_as_large_as_the_target_allows() -> None:
    for target_ms in (45, 60, 100, 137, 200, 250):
        fits = [n for n in range(16, 257, 16) if LINE.seconds(decoding(2) + shape_of_row(0, n)) <= target_ms / 1_000]
        assert piece(sizer_of(target_ms), decoding(2)) == max(fits) < 256, target_ms
    assert piece(sizer_of(25), decoding(2)) == 14, "less than a page"
    assert piece(sizer_of(5_000), decoding(2)) == 1_024, "all that a step may have"


def test_far_into_a_prompt_the_pieces_become_smaller() -> None:
    sizes = [piece(sizer_of(300), decoding(1), start) for start in (0, 2_000, 8_000, 100_000)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1] > 0


@pytest.mark.parametrize("start", [0, 500, 9_000])
def test_a_piece_with_all_of_a_step_takes_the_target_or_a_little_less(start: int) -> None:
    shape = decoding(3)
    for target_ms in (100, 200, 400):
        tokens = piece(sizer_of(target_ms), shape, start)
        took_s = LINE.seconds(shape + shape_of_row(start, tokens))
        assert 0.5 <= took_s / (target_ms / 1_000) <= 1.05


def test_where_nobody_decodes_or_there_is_no_target_a_piece_is_as_large_as_can_be() -> None:
    assert piece(sizer_of(10, most_tokens=700), NO_ROWS, 5_000) == 700
    assert piece(sizer_of(0, most_tokens=700), decoding(3), 5_000) == 700


def test_prompts_have_half_of_a_step_where_answers_alone_take_longer_than_the_target() -> None:
    slow = FixedCost(step_s=0.2, row_s=0.0, token_s=0.001, read_s=0.0)
    assert piece(sizer_of(50, slow), decoding(1)) == 192


def test_a_size_is_not_taken_back_and_forth_by_steps_near_the_target() -> None:
    """There is room for 65 tokens, and for 63 in every other step: the size changes once."""
    sizer = sizer_of(100)
    sizer.begin(decoding(1))
    sizes = [64]
    for number in range(20):
        sizes.append(sizer.size(65 if number % 2 else 63, sizes[-1]))
    assert set(sizes) == {48, 64}
    assert sum(one != other for one, other in itertools.pairwise(sizes)) == 1


def test_a_piece_that_was_small_for_once_is_followed_by_a_large_one() -> None:
    """A short prompt took part of one step: the one behind it has the next."""
    sizer = sizer_of(100)
    sizer.begin(decoding(1))
    assert [sizer.size(65, last) for last in (64, 48, 32, 16)] == [64, 48, 64, 64]


def test_a_piece_never_has_more_tokens_than_there_is_room_for() -> None:
    sizer, rng = sizer_of(100), random.Random(0)
    sizer.begin(decoding(1))
    for _ in range(2_000):
        tokens = rng.randrange(1, 3_000)
        assert 1 <= sizer.size(tokens, rng.randrange(2_000)) <= tokens


class ExpertsFirst:
    """Steps of a mixture of experts: the first tokens bring the reading of all weights, and the others little more."""

    def seconds(self, shape: StepShape) -> float:
        return 0.005 + 0.040 * (1 - 0.98**shape.tokens) + 1e-5 * shape.tokens + 1e-10 * shape.context_reads

    def note(self, shape: StepShape, seconds: float) -> None:
        pass


@pytest.mark.parametrize("start", [0, 10_000, 500_000])
def test_a_target_is_used_up_where_the_first_tokens_cost_most(start: int) -> None:
    cost = ExpertsFirst()
    sizer = ChunkSizer(cost, target_s=0.1, page_tokens=16, most_tokens=8_192)
    shape = decoding(1)
    tokens = int(sizer.begin(shape) / sizer.weight(start))
    assert 0.08 <= cost.seconds(shape + shape_of_row(start, tokens)) <= 0.101
