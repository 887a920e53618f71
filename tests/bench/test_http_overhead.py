from __future__ import annotations

import pytest

from bench.http_overhead import steady_tokens_per_s
from bench.load import Answer


def answer(*stamps_s: float, tokens: int | None = None) -> Answer:
    return Answer(
        sent_s=0.0,
        stamps_s=stamps_s,
        ended_s=stamps_s[-1],
        output_tokens=len(stamps_s) if tokens is None else tokens,
        prompt_tokens=None,
    )


def test_only_the_time_in_which_all_streams_decode_is_counted() -> None:
    early = answer(*[float(at) for at in range(11)])
    late = answer(*[float(at) for at in range(6, 21)])
    # From 6, the late one's first token, to 10, the early one's last: four tokens of each.
    assert steady_tokens_per_s([early, late]) == pytest.approx(8 / 4)


def test_chunks_count_with_the_tokens_that_they_hold() -> None:
    in_pairs = answer(*[float(at) for at in range(11)], tokens=22)
    assert steady_tokens_per_s([in_pairs]) == pytest.approx(2.0)


def test_streams_that_never_run_together_give_no_rate() -> None:
    with pytest.raises(SystemExit, match="no phase"):
        steady_tokens_per_s([answer(0.0, 1.0), answer(2.0, 3.0)])
