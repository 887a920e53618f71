"""Traces through the real cache: what is hit, against a plain account of every prefix that was ever computed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.cache.kv_cache import CachePolicy
from server.errors import StartupError
from server.simulator.command import simulate
from server.simulator.models import PRESETS, shape_named
from server.simulator.replay import Replay, Replayed
from server.simulator.trace import Trace, read_trace
from tests.simulator.traces import Row, random_rows, write_trace
from tools.train_tiny.config import tiny_config

PRO = PRESETS["mimo-v2.5-pro"]


def play(trace: Trace, budget_gb: float, policy: CachePolicy | None = None) -> tuple[Replay, Replayed]:
    layout = PRO.layout(page_tokens=128, budget_bytes=budget_gb * 1e9)
    replay = Replay(trace, layout, PRO.rebuild, policy or CachePolicy(), chunk_tokens=1024)
    result = replay.run()
    replay.cache.check()
    return replay, result


@pytest.mark.parametrize("seed", range(4))
def test_with_memory_for_all_every_block_that_was_ever_computed_is_a_hit(tmp_path: Path, seed: int) -> None:
    trace = read_trace(write_trace(tmp_path / "trace.csv", random_rows(seed)))
    seen: set[tuple[int, ...]] = set()
    equal = 0
    for request in trace.requests:
        path = tuple(request.blocks.tolist())
        equal += next((n for n in range(len(path)) if path[: n + 1] not in seen), len(path)) * 128
        seen |= {path[: n + 1] for n in range(len(path))}
    _, result = play(trace, 2_000)
    assert result.equal_tokens == result.resumed_tokens == equal
    assert 0 < result.hit_tokens <= equal, "rebuilt windows are work"
    assert (result.refused, result.waited) == (0, 0)
    assert result.prompt_tokens == sum(request.input_tokens for request in trace.requests)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", [CachePolicy(), CachePolicy(rebuild=False), CachePolicy(knows_reuse=False)])
def test_in_little_memory_nothing_is_lost_but_hits(tmp_path: Path, seed: int, policy: CachePolicy) -> None:
    trace = read_trace(write_trace(tmp_path / "trace.csv", random_rows(seed)))
    _, all_of_it = play(trace, 2_000, policy)
    replay, result = play(trace, 4, policy)
    assert result.requests == len(trace.requests)
    assert 0 <= result.hit_tokens <= all_of_it.hit_tokens
    assert result.hit_tokens <= result.resumed_tokens <= result.equal_tokens
    assert sum(replay.cache.evicted.values()) > 0


def test_without_snapshots_on_the_way_a_branch_is_resumed_at_the_last_prompts_end(tmp_path: Path) -> None:
    """20 blocks; then 12 of them and others: the window after 12 is gone, and to rebuild it costs as much as all 12."""
    rows: list[Row] = [(0, -1, 0, 20, 2_570, 1, 1), (10, 0, 12, 20, 2_570, 1, 1), (20, 0, 12, 20, 2_570, 1, 1)]
    trace = read_trace(write_trace(tmp_path / "trace.csv", rows))
    _, plain = play(trace, 100, CachePolicy(rebuild=False, branches=False))
    assert plain.hit_tokens == 0
    _, branches = play(trace, 100, CachePolicy(rebuild=False))
    assert branches.hit_tokens == 12 * 128, "the second one saw the branch, the third one resumes there"
    _, rebuilt = play(trace, 100)
    assert rebuilt.hit_tokens == 2 * 12 * 128 - PRO.rebuild.work_tokens(12 * 128)
    assert rebuilt.rebuilds == 1


def test_a_request_without_a_prompt_is_a_request(tmp_path: Path) -> None:
    _, result = play(read_trace(write_trace(tmp_path / "trace.csv", [(0, -1, 0, 0, 0, 3, 1)])), 10)
    assert (result.requests, result.prompt_tokens, result.hit_rate) == (1, 0, 0.0)


def test_what_runs_is_held_and_what_finds_no_room_waits_for_it(tmp_path: Path) -> None:
    rows: list[Row] = [(n * 0.1, -1, 0, 100, 12_801, 1, 50) for n in range(5)]  # 0.66 GB each, two fit at once
    trace = read_trace(write_trace(tmp_path / "trace.csv", rows))
    _, result = play(trace, 2.5)
    assert (result.waited, result.refused) == (3, 0)
    _, result = play(trace, 0.6)
    assert (result.waited, result.refused, result.hit_tokens) == (0, 5, 0)


# --- the command --------------------------------------------------------------------------------------------------


def test_the_command_prints_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "trace.csv", random_rows(1))
    assert simulate([str(path), "--budget-gb", "40", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert err == ""
    assert 0 < report["hit_rate"] <= report["token_equal_rate"] <= report["unlimited_rate"] <= 1
    assert report["model"] == "mimo-v2.5-pro" and report["requests"] == 60


def test_the_command_prints_a_table_and_draws_a_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = write_trace(tmp_path / "trace.csv", random_rows(2, 20)), tmp_path / "curve.png"
    assert simulate([str(path), "--budget-gb", "8", "--plot", str(picture), "--lru", "--no-rebuild"]) == 0
    assert "hit rate" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_config_is_as_good_as_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config(1344)), encoding="utf-8")
    shape = shape_named(str(path))
    assert (shape.window_tokens, shape.mtp_layers) == (32, 3)
    assert shape.is_window == (False, True, True, False, True, False)
    assert shape.full_token_bytes == 3 * 2 * (48 + 32) * 2
    assert shape.window_token_bytes == 6 * 4 * (48 + 32) * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--model-config", "mimo-v2.5-por"], "did you mean mimo-v2.5-pro"),
        (["--budget-gb", "0.001"], "at least"),
        (["--model-config", "~nobody/at/all"], "is no file and no preset"),
        (["--model-config", "x" * 5_000], "is no file and no preset"),
        (["--page-tokens", "100"], "does not divide"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, changes: list[str], message: str) -> None:
    path = write_trace(tmp_path / "trace.csv", random_rows(3, 5))
    with pytest.raises(StartupError, match=message):
        simulate([str(path), "--budget-gb", "8", *changes])


@pytest.mark.parametrize(
    ("plot", "message"), [("no/such/folder/curve.png", "there is no folder"), ("curve.foo", r"must end in one of")]
)
def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_played(
    tmp_path: Path, plot: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_trace(tmp_path / "trace.csv", random_rows(3, 5))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Replay, "run", lambda *_: pytest.fail("played"))
    with pytest.raises(StartupError, match=message):
        simulate([str(path), "--budget-gb", "8", "--plot", plot])


def test_a_trace_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"nosuch.csv: No such file or directory$"):
        simulate([str(tmp_path / "nosuch.csv"), "--budget-gb", "8"])


@pytest.mark.parametrize("budget", ["1e308", "100001", "0", "-1", "nan", "many"])
def test_budgets_beyond_any_machine_are_refused(
    budget: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path / "trace.csv", random_rows(3, 5))
    with pytest.raises(SystemExit, match="2"):
        simulate([str(path), "--budget-gb", budget])
    assert "is not a number above 0 and at most 100,000" in capsys.readouterr().err


@pytest.mark.parametrize("layers", ['"x"', "[1]", "Infinity", "-3", "1000000000", "true", "2.5"])
def test_mtp_layers_that_are_no_number_are_refused(layers: str, tmp_path: Path) -> None:
    config = json.dumps(tiny_config(1344) | {"num_nextn_predict_layers": 0}).replace(
        '"num_nextn_predict_layers": 0', f'"num_nextn_predict_layers": {layers}'
    )
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    with pytest.raises(StartupError, match="num_nextn_predict_layers is no number of layers"):
        shape_named(str(tmp_path))


def test_a_config_nested_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(StartupError, match="cannot be read"):
        shape_named(str(tmp_path))
