"""The real scheduler on a clock of its own: times that can be worked out by hand, and that nothing is lost."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from server.cache.kv_cache import CachePolicy, KVCache
from server.cache.retention import Ending
from server.config import SchedulerConfig
from server.errors import StartupError
from server.scheduler.step_cost import FixedCost, StepCost, StepShape, shape_of_row
from server.simulator.arrivals import Arrivals, closed_loop, open_loop
from server.simulator.command import simulate
from server.simulator.figures import Figures, figures_of, overtaken_late
from server.simulator.load import least_work_s, time_factor, tokens_left
from server.simulator.models import PRESETS
from server.simulator.replay import Replay
from server.simulator.serving import Answer, Clock, Served, Serving
from server.simulator.step_costs import COST_MODELS
from server.simulator.trace import Trace, read_trace
from server.step import SequenceId, StepId
from tests.house import assert_nothing_left
from tests.simulator.traces import Row, random_rows, write_trace

PRO = PRESETS["mimo-v2.5-pro"]
SECOND_AND_TOKENS = FixedCost(step_s=1.0, row_s=0.0, token_s=0.01, read_s=0.0)
SETTINGS = SchedulerConfig(
    step_token_budget=256,
    prefill_chunk_tokens=256,
    target_itl_ms=0,
    max_queued_requests=1 << 40,
    max_queued_tokens=1 << 40,
)


def serving_of(
    trace: Trace,
    *,
    arrivals: Arrivals | None = None,
    budget_gb: float = 100.0,
    cost: StepCost = SECOND_AND_TOKENS,
    settings: SchedulerConfig = SETTINGS,
) -> Serving:
    return Serving(
        trace,
        PRO.layout(page_tokens=128, budget_bytes=budget_gb * 1e9),
        PRO.rebuild,
        CachePolicy(),
        scheduler=settings,
        cost=cost,
        arrivals=arrivals if arrivals is not None else open_loop(trace),
    )


def play(serving: Serving) -> list[Answer]:
    """Answers in the order of the trace; everybody is over, and nothing is left."""
    served = serving.run()
    assert_nothing_left(serving.scheduler, serving.cache)
    answers = sorted(served.answers, key=lambda answer: answer.request.index)
    indices = [answer.request.index for answer in answers]
    assert len(set(indices)) == len(indices), "a request ended twice"
    for answer in answers:
        assert answer.outcome in ("stop", "length")
        assert answer.output_tokens == answer.wanted_tokens == len(answer.gaps_s) + 1
    return answers


def written(tmp_path: Path, rows: Sequence[Row], **settings: object) -> Trace:
    return read_trace(write_trace(tmp_path / "trace.csv", rows, **settings))  # type: ignore[arg-type]


# --- times ----------------------------------------------------------------------------------------------------------


def test_one_request_takes_its_pieces_and_then_its_tokens(tmp_path: Path) -> None:
    """600 tokens in pieces of 256, 256 and 88: steps of 3.56, 3.56 and 1.88 s; then two more tokens."""
    trace = written(tmp_path, [(5.0, -1, 0, 4, 600, 3, 1)])
    serving = serving_of(trace)
    (answer,) = play(serving)
    assert answer.ttft_s == pytest.approx(3.56 + 3.56 + 1.88)
    assert list(answer.gaps_s) == pytest.approx([1.01, 1.01])
    assert answer.started_s == 5.0
    served = serving.result
    assert (served.steps, served.rows) == (5, 5)
    assert served.busy_s == served.span_s == pytest.approx(9.0 + 2.02)
    assert served.prompt_s == pytest.approx(9.0)


LONG_AND_SHORT: list[Row] = [(0.0, -1, 0, 0, 100, 1, 1), (0.1, -1, 0, 8, 1_024, 1, 1), (0.2, -1, 0, 0, 50, 1, 1)]
"""The long and the short one come while the first is computed, for two seconds."""


def test_first_come_first_served_lets_a_short_prompt_wait_for_a_long_one(tmp_path: Path) -> None:
    answers = play(serving_of(written(tmp_path, LONG_AND_SHORT), settings=replace(SETTINGS, policy="fcfs")))
    assert [answer.order for answer in answers] == [0, 1, 2]
    long_s = 2.0 + 4 * 3.56
    assert [answer.ttft_s for answer in answers] == pytest.approx([2.0, long_s - 0.1, long_s + 1.5 - 0.2])


def test_uncached_first_takes_the_short_one_along(tmp_path: Path) -> None:
    """Beside its 50 tokens, a page of the long one has room; 896 tokens are left of that."""
    answers = play(serving_of(written(tmp_path, LONG_AND_SHORT)))
    assert [answer.order for answer in answers] == [0, 2, 1]
    short_s = 2.0 + 1 + 0.01 * (50 + 128)
    assert [answer.ttft_s for answer in answers] == pytest.approx([2.0, short_s + 3 * 3.56 + 2.28 - 0.1, short_s - 0.2])


def test_what_is_cached_takes_no_time(tmp_path: Path) -> None:
    trace = written(tmp_path, [(0, -1, 0, 4, 513, 1, 1), (100, 0, 4, 4, 513, 1, 1)])
    cold, hit = play(serving_of(trace))
    assert cold.ttft_s == pytest.approx(2 * 3.56 + 1.01)
    assert hit.ttft_s == pytest.approx(1.01)
    assert (cold.cached_tokens, hit.cached_tokens) == (0, 512)
    assert (cold.effective_tokens, hit.effective_tokens) == (513, 1)


# --- when requests come -----------------------------------------------------------------------------------------------

TURNS: list[Row] = [(10.0, -1, 0, 0, 100, 1, 4.0), (20.0, -1, 0, 0, 100, 1, 4.0), (40.0, -1, 0, 0, 100, 1, 4.0)]


def test_in_an_open_loop_requests_come_at_their_times(tmp_path: Path) -> None:
    trace = written(tmp_path, TURNS)
    assert [answer.arrival_s for answer in play(serving_of(trace))] == [10.0, 20.0, 40.0]
    halved = serving_of(trace, arrivals=open_loop(trace, 0.5))
    assert [answer.arrival_s for answer in play(halved)] == [5.0, 10.0, 20.0]


def test_in_a_closed_loop_a_request_comes_when_somebody_has_thought(tmp_path: Path) -> None:
    """An answer takes 2 s here. The second one thought for 3 s; of the third one the trace does not tell, so it thought
    from the end of the one before, at 24 s, to its time."""
    trace = written(tmp_path, TURNS, think_s=[0.0, 3.0, -1])
    answers = play(serving_of(trace, arrivals=closed_loop(trace)))
    assert [answer.arrival_s for answer in answers] == [10.0, 12.0 + 3.0, 17.0 + 16.0]
    doubled = play(serving_of(trace, arrivals=closed_loop(trace, 2.0)))
    assert [answer.arrival_s for answer in doubled] == [20.0, 22.0 + 6.0, 30.0 + 32.0]


def test_a_sub_agent_begins_after_its_parents_request_and_runs_beside_it(tmp_path: Path) -> None:
    rows: list[Row] = [
        (0.0, -1, 0, 0, 100, 1, 4.0),  # the parent, until 4 s
        (5.0, -1, 0, 0, 100, 50, 9.0),  # its agent, a second later
        (6.0, -1, 0, 0, 100, 1, 1.0),  # the parent goes on meanwhile
        (20.0, -1, 0, 0, 100, 1, 1.0),  # the agent, 6 s after its end at 14 s
    ]
    trace = written(tmp_path, rows, sessions=["7", "7/agent", "7", "7/agent"])
    _, agent, parent_2, agent_2 = play(serving_of(trace, arrivals=closed_loop(trace)))
    assert agent.arrival_s == pytest.approx(2.0 + 1.0)
    assert parent_2.arrival_s == pytest.approx(2.0 + 2.0)
    assert agent.last_token_s is not None and parent_2.arrival_s < agent.last_token_s
    assert agent_2.arrival_s == pytest.approx(agent.last_token_s + 6.0)


def test_in_a_closed_loop_who_is_refused_is_followed_all_the_same(tmp_path: Path) -> None:
    rows: list[Row] = [(0.0, -1, 0, 400, 51_200, 1, 1), (5.0, -1, 0, 0, 100, 1, 1)]
    trace = written(tmp_path, rows)
    serving = serving_of(trace, arrivals=closed_loop(trace), budget_gb=1.0)
    (answer,) = play(serving)
    assert (answer.request.index, answer.arrival_s, serving.result.refused) == (1, 4.0, 1)


# --- nothing is lost --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("policy", ["uncached-first", "fcfs", "longest-prefix", "shortest-first"])
def test_every_request_ends_once_however_little_memory_there_is(tmp_path: Path, policy: str, closed: bool) -> None:
    trace = written(tmp_path, random_rows(5))
    serving = serving_of(
        trace,
        arrivals=closed_loop(trace, 0.01) if closed else open_loop(trace, 0.01),
        budget_gb=0.5,
        settings=replace(SETTINGS, policy=policy, max_sequences=20),
    )
    assert len(play(serving)) == 60


def test_who_is_preempted_goes_on_later(tmp_path: Path) -> None:
    trace = written(tmp_path, [(0.0, -1, 0, 0, 100, 700, 1)] * 12)
    serving = serving_of(trace, budget_gb=0.5)
    assert len(play(serving)) == 12
    assert serving.result.preemptions > 0


def test_two_runs_are_alike(tmp_path: Path) -> None:
    trace = written(tmp_path, random_rows(6))
    assert figures(trace) == figures(trace)


def figures(trace: Trace, policy: str = "uncached-first", rate: float = 20.0) -> Figures:
    settings = replace(SETTINGS, policy=policy, forgiven_tokens_per_s=rate)
    served = serving_of(trace, arrivals=open_loop(trace, 0.3), settings=settings).run()
    return figures_of(served, policy, [request.input_tokens for request in trace.requests], rate)


@pytest.mark.parametrize("seed", range(3))
def test_where_each_is_served_alone_as_much_is_hit_as_in_the_replay(tmp_path: Path, seed: int) -> None:
    trace = written(tmp_path, random_rows(seed))
    alone = open_loop(trace, 10_000.0)
    serving = serving_of(trace, arrivals=alone)
    answers = play(serving)
    layout = PRO.layout(page_tokens=128, budget_bytes=100e9)
    replayed = Replay(trace, layout, PRO.rebuild, CachePolicy(), chunk_tokens=256)
    saved, before = [], 0.0
    for result in replayed.steps():
        saved.append(int(result.hit_tokens - before))
        before = result.hit_tokens
    assert [answer.cached_tokens for answer in answers] == pytest.approx(saved, abs=1)
    assert serving.result.hit_rate == pytest.approx(replayed.result.hit_rate, rel=1e-3)


@pytest.mark.parametrize(
    ("stop", "ending"), [("tool_use", Ending.CALLED), ("end_turn", Ending.SAID), ("", Ending.UNKNOWN)]
)
def test_the_cache_learns_at_the_end_how_an_answer_ended(
    tmp_path: Path, stop: str, ending: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    endings: list[Ending] = []
    close = KVCache.close

    def noting(
        self: KVCache, sequence: SequenceId, last_step: StepId | None, now_s: float, ending: Ending = Ending.UNKNOWN
    ) -> None:
        endings.append(ending)
        close(self, sequence, last_step, now_s, ending)

    monkeypatch.setattr(KVCache, "close", noting)
    play(serving_of(written(tmp_path, [(0, -1, 0, 1, 130, 5, 1)], stop=stop)))
    assert endings == [ending]


# --- the promise ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_uncached_first_lets_nobody_be_overtaken_too_late(tmp_path: Path, seed: int) -> None:
    assert figures(written(tmp_path, random_rows(seed, 120))).overtaken_late == 0


def test_who_is_overtaken_too_late_is_counted(tmp_path: Path) -> None:
    requests = written(tmp_path, [(0, -1, 0, 0, 100, 1, 1)] * 4).requests

    def answer(index: int, arrival_s: float, order: int) -> Answer:
        return Answer(
            request=requests[index],
            arrival_s=arrival_s,
            wanted_tokens=1,
            clock=Clock(),
            order=order,
            effective_tokens=20.0,
        )

    answers = [answer(0, 0.0, 3), answer(1, 4.0, 1), answer(2, 9.0, 2), answer(3, 12.0, 0)]
    assert overtaken_late(answers, 10.0, lambda each: each.request.input_tokens) == 1, "only the first: by 12 seconds"
    assert overtaken_late(answers, 10.0, lambda each: each.effective_tokens) == 3


def test_figures_are_the_same_when_they_are_read_back(tmp_path: Path) -> None:
    found = figures(written(tmp_path, random_rows(1, 20)))
    assert Figures.from_json(json.loads(json.dumps(found.as_json()))) == found
    everybody = found.kinds["all"]
    assert everybody.requests == 20 and everybody.ttft_s is not None
    assert everybody.ttft_percentiles_s[50] == pytest.approx(everybody.ttft_s.p50)
    assert found.kinds["64K and more"].ttft_s is None


# --- load -------------------------------------------------------------------------------------------------------------


def test_load_is_the_least_work_a_second(tmp_path: Path) -> None:
    """Two prompts of 1,000 tokens, the second one with 512 of them cached, and 24 tokens of answers: 1,512 tokens in
    six steps of 256, 1 s and 2.52 s each."""
    trace = written(tmp_path, [(0, -1, 0, 4, 1_000, 12, 1), (40, 0, 4, 4, 1_000, 12, 1)])
    layout = PRO.layout(page_tokens=128, budget_bytes=100e9)
    left = tokens_left(trace, layout, PRO.rebuild, CachePolicy(), chunk_tokens=256)
    assert left == [1_000, 488]
    work_s = least_work_s(trace, left, SECOND_AND_TOKENS, SETTINGS)
    assert work_s == pytest.approx(6 * (1 + 0.01 * 252))
    assert time_factor(trace, work_s, 0.5) == pytest.approx(2 * work_s / 40)


def test_steps_of_the_least_work_are_no_fuller_than_there_are_sequences(tmp_path: Path) -> None:
    trace = written(tmp_path, [(0, -1, 0, 0, 10, 100, 1)] * 4)
    two = replace(SETTINGS, max_sequences=2)
    rows = FixedCost(step_s=1.0, row_s=0.1, token_s=0.0, read_s=0.0)
    assert least_work_s(trace, [10.0] * 4, rows, two) == pytest.approx(200 * 1.2)


# --- what steps cost --------------------------------------------------------------------------------------------------


def test_the_estimate_is_of_the_right_size() -> None:
    cost = COST_MODELS["mimo-v2.5-pro-8gpu"].cost
    one = cost.seconds(shape_of_row(1_000, 1))
    many = cost.seconds(StepShape(rows=256, tokens=256, context_reads=256 * 1_000))
    prompt = cost.seconds(shape_of_row(0, 8_192))
    far = cost.seconds(shape_of_row(800_000, 8_192))
    assert 0.004 < one < 0.006, "the weights of one token"
    assert 0.04 < many < 0.06, "all experts, which are read once"
    assert 8_192 / prompt == pytest.approx(64_000, rel=0.05)
    assert far == pytest.approx(prompt + 8_192 * 800_000 * 10 * 2 * 128 * 320 / (8 * 0.4 * 989e12))


@pytest.mark.parametrize("name", COST_MODELS)
def test_more_work_never_takes_less_time(name: str) -> None:
    cost = COST_MODELS[name].cost
    small = shape_of_row(1_000, 16)
    for more in (shape_of_row(0, 1), shape_of_row(5_000, 300)):
        assert cost.seconds(small + more) >= cost.seconds(small) > 0


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_what_happened_under_each_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "trace.csv", random_rows(1))
    asked = [str(path), "--budget-gb", "40", "--serve", "--load", "0.8"]
    assert simulate([*asked, "--policy", "fcfs", "uncached-first", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    report = json.loads(out)
    assert [each["policy"] for each in report["policies"]] == ["fcfs", "uncached-first"]
    assert report["cost_model_is_estimate"] is True and report["load"] == 0.8
    for each in report["policies"]:
        assert Figures.from_json(each).as_json().keys() == each.keys()
        assert each["requests"] == each["kinds"]["all"]["requests"] == 60
        assert each["overtaken_late"] == 0
    assert simulate(asked) == 0
    out = capsys.readouterr().out
    assert "an estimate" in out and "uncached-first" in out and "TTFT" in out


def test_waits_of_any_length_are_printed_in_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(float(t_s), -1, 0, 468, 60_000, 20, 1.0) for t_s in range(40)]
    asked = [str(write_trace(tmp_path / "trace.csv", rows)), "--budget-gb", "40", "--serve", "--max-num-seqs", "1"]
    assert simulate([*asked, "--cost-model", "cpu-smollm2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first, *_ = (line for line in lines if line.startswith("  all (40)"))
    cells = re.split(r" {2,}", first.strip())
    assert len(cells) == 3, first
    assert all(re.fullmatch(r"[\d,]+ / [\d,]{6,} / [\d,]{6,}", cell) for cell in cells[1:]), first
    assert {len(line) for line in lines if "  " in line.strip()} == {len(first)}, "the right edge is one line"
    assert "the queue grows as long as they come" in lines[-1]


def test_a_trace_that_leaves_time_is_not_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "trace.csv", random_rows(1))
    assert simulate([str(path), "--budget-gb", "40", "--serve", "--load", "0.8"]) == 0
    assert "the queue grows" not in capsys.readouterr().out


def test_the_command_draws_how_long_requests_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = write_trace(tmp_path / "trace.csv", random_rows(2, 20)), tmp_path / "waits.png"
    asked = [str(path), "--budget-gb", "8", "--serve", "--closed-loop", "--plot", str(picture)]
    assert simulate([*asked, "--max-num-seqs", "4", "--length-lanes", "1K,8K"]) == 0
    assert "closed loop" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--load", "0.5"], "--load needs --serve"),
        (["--max-num-seqs", "5"], "--max-num-seqs needs --serve"),
        (["--closed-loop"], "--closed-loop needs --serve"),
        (["--serve", "--chunk-tokens", "64"], "--chunk-tokens has no meaning with --serve"),
        (["--serve", "--load", "0.5", "--limit", "1"], "all of them come at the same time"),
    ],
)
def test_what_has_no_meaning_is_refused(tmp_path: Path, changes: list[str], message: str) -> None:
    path = write_trace(tmp_path / "trace.csv", random_rows(3, 5))
    with pytest.raises(StartupError, match=message):
        simulate([str(path), "--budget-gb", "8", *changes])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--load", "0"], "'0' is not a number above 0 and at most 100"),
        (["--load", "much"], "'much' is not a number above 0"),
        (["--policy", "lifo"], "invalid choice: 'lifo'"),
        (["--cost-model", "abacus"], "invalid choice: 'abacus'"),
        (["--forgiven-tokens-per-s", "0"], "0 is not a number of at least 0.001"),
        (["--length-lanes", "8K,1K"], "is not counts from 1 that ascend"),
    ],
)
def test_values_out_of_bounds_are_refused(
    tmp_path: Path, changes: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path / "trace.csv", random_rows(3, 5))
    with pytest.raises(SystemExit, match="2"):
        simulate([str(path), "--budget-gb", "8", "--serve", *changes])
    assert message in capsys.readouterr().err


def test_nothing_is_served_of_an_empty_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "trace.csv", [])
    assert simulate([str(path), "--budget-gb", "8", "--serve"]) == 0
    assert Served().hit_rate == 0.0
    assert "overtaken too late" in capsys.readouterr().out
