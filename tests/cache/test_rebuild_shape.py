"""How far back a lost window has to be computed, against the dependencies written down position by position."""

from __future__ import annotations

import random

import pytest

from server.rebuild import shape_of


def needed(is_window: list[bool], window: int, mtp: bool, positions: int) -> list[set[int]]:
    """For each layer the positions whose input it must have, so that K/V of the last W positions are right in every
    window layer and hidden states of the last W are there for MTP. Full layers' K/V are all there."""
    last = set(range(positions - window, positions))
    wanted = last if mtp else set()  # outputs of the top layer
    fed = []
    for each in reversed(is_window):
        inputs = set(wanted)
        if each:
            inputs |= last | {p for q in wanted for p in range(q - window, q + 1)}
        fed.append(inputs)
        wanted = inputs
    return fed[::-1]


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_what_layers_are_fed_is_what_depends_on_it(mtp: bool, seed: int) -> None:
    rng = random.Random(seed)
    pattern, window = [rng.random() < 0.6 for _ in range(rng.randint(1, 9))], rng.randint(1, 5)
    shape = shape_of(pattern, window_tokens=window, mtp_layers=int(mtp))
    sets = needed(pattern, window, mtp, positions=0)
    assert list(shape.fed_tokens) == [-min(positions, default=0) for positions in sets]
    assert all(positions == set(range(-fed, 0)) for fed, positions in zip(shape.fed_tokens, sets, strict=True))


def test_the_published_shapes_cost_what_the_design_says() -> None:
    full = {0, 7, 15, 23, 31, 39, 47, 55, 62, 69}
    pro = shape_of([layer not in full for layer in range(70)], window_tokens=128, mtp_layers=3)
    assert pro.span_tokens == 7_808
    assert round(pro.work_tokens(1_000_000)) == 4_017


def test_a_safe_point_near_by_makes_it_cheaper_and_never_dearer_than_computing_all_since() -> None:
    shape = shape_of([False, True, True, False, True], window_tokens=16, mtp_layers=1)
    assert shape.work_tokens(0) == 0
    work = [shape.work_tokens(tokens) for tokens in range(200)]
    assert work == sorted(work)
    assert all(each <= tokens for tokens, each in enumerate(work))
    assert work[-1] == sum(shape.fed_tokens) / 5


def test_a_model_without_window_layers_has_nothing_to_rebuild() -> None:
    shape = shape_of([False] * 4, window_tokens=0, mtp_layers=0)
    assert (shape.span_tokens, shape.work_tokens(1_000)) == (0, 0)
