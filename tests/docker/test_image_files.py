"""The Dockerfile keeps what its users rely on, and its linter is content. A real build is in docs/docker.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from server import __version__
from server.config import BY_ENV

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def instructions() -> list[tuple[str, str]]:
    """(keyword, rest) of the last stage, continuation lines joined and comments dropped."""
    lines = "\n".join(line for line in DOCKERFILE.splitlines() if not line.startswith("#")).replace("\\\n", " ")
    found = [tuple(line.split(None, 1)) for line in lines.splitlines() if line.strip()]
    last = max(index for index, (keyword, *_) in enumerate(found) if keyword == "FROM")
    return [(keyword, rest) for keyword, rest in found[last:]]


def only(keyword: str) -> str:
    (rest,) = (rest for found, rest in instructions() if found == keyword)
    return rest


def environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in only("ENV").split())


def test_the_arguments_of_docker_run_are_those_of_serve() -> None:
    assert json.loads(only("ENTRYPOINT")) == ["twinpane", "serve"]
    assert json.loads(only("CMD")) == ["--help"]


def test_it_listens_for_the_outside_and_stops_on_sigterm() -> None:
    assert environment()["TWINPANE_HOST"] == "0.0.0.0"
    assert only("EXPOSE") == "8000"
    assert only("STOPSIGNAL") == "SIGTERM"


def test_the_health_check_needs_no_curl_and_waits_for_a_model_to_load() -> None:
    options, command = only("HEALTHCHECK").split(" CMD ")
    assert json.loads(command) == ["python", "-m", "server.healthcheck"]
    assert "--start-period=600s" in options


def test_all_that_is_worth_keeping_is_in_one_volume_that_group_0_may_write() -> None:
    folders = [value for name, value in environment().items() if name.endswith(("_HOME", "_DIR"))]
    assert len(folders) == 3
    assert all(folder.startswith("/root/.cache/") for folder in folders)
    assert environment()["HOME"] == "/root"
    assert any("chmod -R g=u /root" in rest for keyword, rest in instructions() if keyword == "RUN")


def test_every_variable_of_ours_that_it_sets_exists() -> None:
    assert {name for name in environment() if name.startswith("TWINPANE_")} <= set(BY_ENV)


def test_it_carries_the_labels_of_the_image_specification() -> None:
    labels = only("LABEL")
    for name in ("title", "description", "version", "revision", "source", "licenses"):
        assert f"org.opencontainers.image.{name}=" in labels
    assert f"ARG VERSION={__version__}\n" in DOCKERFILE


def test_bases_are_exact_releases() -> None:
    bases = re.findall(r"BASE=(\S+:\S+)", DOCKERFILE)
    assert len(bases) >= 2
    assert not any(base.endswith(":latest") for base in bases)
    assert all(re.search(r":.*\d+\.\d+|:tag@", base) for base in bases)


def test_the_builder_gets_what_the_dockerfile_copies_and_nothing_more() -> None:
    copied = [
        line.split()[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY") and "--from" not in line
    ]
    wanted = {name.split("/")[0] for names in copied for name in names}
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == wanted
    assert all((ROOT / name).exists() for name in wanted)


def test_the_linter_is_content() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint is not installed")
    run = subprocess.run([hadolint, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "")


def test_the_script_for_machines_without_an_engine_is_valid_and_uses_the_documented_base() -> None:
    script = ROOT / "tests/docker/without_engine.sh"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    base = re.search(r"^BASE=docker\.io/library/(\S+)$", script.read_text(), re.MULTILINE)
    assert base is not None
    assert f"BASE={base[1]}" in DOCKERFILE
    assert f"BASE={base[1]}" in (ROOT / "docs/docker.md").read_text()
