from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest

from bench.environments import ENVIRONMENTS, CouldNotRun, write_alias
from bench.machine import LoadMeter, process_tree, tree_cpu_s, tree_peak_rss_bytes
from bench.peers import PEERS, Peer, Place, running
from bench.serving import parse
from bench.weights import Weights, Work

WORK = Work(body=1, head=1, layers=())

ANSWERS = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    return Weights(name="tiny", hf_folder=tmp_path, bf16_gguf=tmp_path / "b", q8_gguf=tmp_path / "q", work=WORK)


def peer_that(program: str) -> Peer:
    def command(place: Place) -> list[str]:
        return [sys.executable, "-c", program, str(place.port)]

    return dataclasses.replace(PEERS["ours"], command=command)


def test_a_server_runs_while_it_is_measured_and_is_gone_afterwards(weights: Weights, tmp_path: Path) -> None:
    with running(peer_that(ANSWERS), weights, cache=tmp_path, threads=1) as server:
        assert server.ready_s > 0
        assert tree_peak_rss_bytes(server.pid) > 2**20
        assert server.pid in process_tree(os.getpid())
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


def test_a_server_that_ends_at_start_is_named_with_its_last_words(weights: Weights, tmp_path: Path) -> None:
    program = "print('Loading'); print('error: unknown flag --shiny'); print('bye'); raise SystemExit(2)"
    with (
        pytest.raises(CouldNotRun, match="exit code 2 at start: error: unknown flag --shiny"),
        running(peer_that(program), weights, cache=tmp_path, threads=1),
    ):
        pass


def test_a_program_that_is_not_there_is_a_reason_too(weights: Weights, tmp_path: Path) -> None:
    absent = dataclasses.replace(PEERS["ours"], command=lambda place: [str(tmp_path / "nothing")])
    with (
        pytest.raises(CouldNotRun, match="nothing"),
        running(absent, weights, cache=tmp_path, threads=1),
    ):
        pass


def test_what_others_compute_is_told_from_what_the_server_and_the_client_do() -> None:
    meter = LoadMeter(os.getpid())
    before = tree_cpu_s(os.getpid())
    while tree_cpu_s(os.getpid()) - before < 0.2:
        pass
    assert 0 <= meter.other_cores() < (os.cpu_count() or 1)


def test_an_environment_is_made_anew_when_its_recipe_changes() -> None:
    recipe = ENVIRONMENTS["llama-cpp"]
    assert recipe.digest == dataclasses.replace(recipe).digest
    assert recipe.digest != dataclasses.replace(recipe, requirements=("llama-cpp-python[server]==0.0.1",)).digest


def test_an_alias_is_found_by_the_name_that_a_program_looks_for(tmp_path: Path) -> None:
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    write_alias(tmp_path, "vllm", "1.2.3+cpu")
    from importlib.metadata import distributions

    (found,) = distributions(path=[str(site)])
    assert (found.name, found.version) == ("vllm", "1.2.3+cpu")


def test_the_command_line_chooses_what_is_measured() -> None:
    wanted = parse(["--peers", "ours,vllm", "--sections", "ttft", "--rounds", "5", "--sampling", "greedy"])
    assert (wanted.peers, wanted.sections, wanted.rounds) == (("ours", "vllm"), ("ttft",), 5)
    assert wanted.samplings == ("greedy",)
    assert parse(["--quick"]).rounds == 1


def test_a_slow_server_may_take_part_with_fewer_rounds_and_sections() -> None:
    """What it leaves out is named with the reason, as what a server cannot do is."""
    wanted = parse(["--rounds-of", "transformers=1", "--sections-of", "transformers=single,ttft"])
    slow, ours, alone = PEERS["transformers"], PEERS["ours"], PEERS["llamacpp"]
    assert [wanted.rounds_with(peer) for peer in (slow, ours, alone)] == [1, 3, 3]
    assert {task.metric.partition("/")[0] for task in wanted.tasks_of(slow)} == {"single", "ttft-2000", "ttft-6000"}
    concurrent = [task.metric for task in wanted.tasks_of(ours) if task.metric.startswith("concurrent-")]
    assert len(concurrent) == 6
    assert wanted.left_out(slow) == dict.fromkeys(concurrent, "left out by --sections-of")
    assert wanted.left_out(alone) == dict.fromkeys(concurrent, "it runs one request at a time")
    assert wanted.left_out(ours) == {}
    assert wanted.steps() == 3 + 2 * (3 * 3 * 13 + 7 + 2 * 3 * 7)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--peers", "sglang"],
        ["--rounds", "0"],
        ["--sections", ""],
        ["--rounds-of", "sglang=1"],
        ["--rounds-of", "ours=0"],
        ["--rounds-of", "ours=4"],
        ["--rounds-of", "ours"],
        ["--sections-of", "ours=all"],
        ["--peers", "ours", "--rounds-of", "vllm=1"],
        ["--sections", "single", "--sections-of", "vllm=ttft"],
    ],
)
def test_what_is_unknown_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert "error:" in capsys.readouterr().err
