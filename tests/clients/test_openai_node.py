"""The openai package for JavaScript."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import Served
from tests.clients.test_openai_python import wait_idle

SOURCE = Path(__file__).parent / "node"

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client with its package installed, kept between runs where TWINPANE_NODE_CACHE names a folder."""
    cache = os.environ.get("TWINPANE_NODE_CACHE")
    folder = Path(cache) if cache else tmp_path_factory.mktemp("node")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json", "client.mjs"):
        shutil.copy(SOURCE / name, folder / name)
    command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--prefer-offline"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def found(folder: Path, served: Served) -> dict[str, Any]:
    command = ["node", "client.mjs", served.base_url, served.model]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_a_whole_answer_and_a_stream_say_the_same(found: dict[str, Any]) -> None:
    whole = found["whole"]
    assert found["text"] == found["helperText"] == whole["choices"][0]["message"]["content"]
    assert found["finishReasons"] == [whole["choices"][0]["finish_reason"]]
    cached = {"prompt_tokens_details": None}  # one of the two found what the other one had computed
    assert {**found["usage"], **cached} == {**whole["usage"], **cached}
    assert whole["id"] == "chatcmpl-" + found["requestId"]


def test_completions_with_logprobs(found: dict[str, Any]) -> None:
    logprobs = found["completion"]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"])


def test_errors_are_parsed_and_not_called_empty(found: dict[str, Any]) -> None:
    assert found["badRequest"]["name"] == "BadRequestError"
    assert (found["badRequest"]["status"], found["badRequest"]["code"]) == (400, "empty_array")
    assert found["badRequest"]["param"] == "messages"
    assert found["badRequest"]["requestID"]
    assert "no body" not in found["badRequest"]["message"]
    assert (found["notFound"]["name"], found["notFound"]["code"]) == ("NotFoundError", "model_not_found")
    assert (found["tooLong"]["status"], found["tooLong"]["code"]) == (400, "context_length_exceeded")


def test_an_aborted_stream_ends_the_work(found: dict[str, Any], served: Served) -> None:
    assert found["seenBeforeAbort"] >= 3
    wait_idle(served, within_s=2.0)
    assert found["models"][0] == served.model


def test_the_lock_file_names_no_registry() -> None:
    assert "resolved" not in (SOURCE / "package-lock.json").read_text()
