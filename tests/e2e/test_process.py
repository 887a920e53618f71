"""Starting and stopping, as an operator sees it."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Served, run_serve, serving


def post(url: str, **body: Any) -> Any:
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"content-type": "application/json"}, method="POST"
    )
    return urllib.request.urlopen(request, timeout=60)


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_port_in_use_is_one_line_before_any_weight_is_read() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        finished = run_serve("smollm2-135m", "--port", str(taken.getsockname()[1]))
    assert finished.returncode == 2
    assert finished.stderr.startswith("twinpane: error: cannot bind to")
    assert finished.stderr.count("\n") == 1
    assert "in use" in finished.stderr
    assert "Loading" not in finished.stderr + finished.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/models/typo"], "Folder /models/typo does not exist"),
        (["smollm2-135m", "--kv-cache-memory-bytes", "1M"], "too little memory"),
        (["smollm2-135m", "--gpu-memory-utilization", "0.001"], "too little memory"),
        (["smollm2-135m", "--kv-cache-memory-bytes", "900T"], "too little memory"),
        (["smollm2-135m", "--max-model-len", "9000"], "more than the model's own limit of 8,192"),
        (["smollm2-135m", "--chat-template", "{% if %}"], "template"),
        (["smollm2-135m", "--tokenizer", "/no/such"], "--tokenizer"),
        (["smollm2-135m", "--override-generation-config", '{"temperature": 9}'], "temperature is 9"),
        (["smollm2-135m", "--device", "cuda"], "CUDA"),
    ],
)
def test_what_must_be_changed_is_one_line_before_any_weight_is_read(arguments: list[str], said: str) -> None:
    finished = run_serve(*arguments, "--port", "0")
    assert finished.returncode == 2, finished.stderr
    assert said in finished.stderr
    (line,) = [line for line in finished.stderr.splitlines() if "event=kernels_compil" not in line]
    assert line.startswith("twinpane: error: ")
    assert "Loading" not in finished.stderr + finished.stdout


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    finished = run_serve(str(tmp_path), "--port", "0")
    assert finished.returncode == 2
    assert "model-00001-of-00002.safetensors" in finished.stderr
    assert finished.stderr.count("\n") == 1


def test_the_start_prints_one_table_of_memory(smollm2_server: Served) -> None:
    output = smollm2_server.output()
    for label in ("weights", "KV arena", "longest request", "fits at once"):
        assert output.count(label) >= 1, output
    assert re.search(r"^  kernels +torch, the plain reference$", output, re.MULTILINE), output
    assert "Application startup complete." in output
    assert f"Uvicorn running on {smollm2_server.url}" in output


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_sigterm_ends_a_long_step_at_once_when_nobody_may_finish(tmp_path: Path, kernels: str) -> None:
    """Steps of 8,000 tokens on one thread take longer than any patience; their requests end once, with an error."""
    flags = ("--kernels", kernels, "--threads", "1", "--shutdown-timeout", "0", "--max-num-batched-tokens", "8192")
    with serving("smollm2-135m", tmp_path / "log", *flags, "--chunked-prefill-size", "8192") as served:
        codes: list[int] = []

        def ask(number: int) -> None:
            prompt = [1000 + number] * 7000
            try:
                with post(
                    f"{served.url}/v1/completions", model="smollm2-135m", prompt=prompt, max_tokens=5
                ) as response:
                    codes.append(response.status)
            except urllib.error.HTTPError as error:
                codes.append(error.code)

        asking = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
        for thread in asking:
            thread.start()
        deadline = time.monotonic() + 30
        while served.output().count("event=accepted") < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)  # the step is under way
        served.process.terminate()
        assert served.process.wait(30) == 0, served.output()
        for thread in asking:
            thread.join(30)
        assert codes == [503] * 3
        assert "step_hangs" not in served.output()


def test_sigterm_lets_a_stream_finish_and_refuses_what_is_new(tmp_path: Path) -> None:
    with serving("smollm2-135m", tmp_path / "log") as served:
        lines: list[bytes] = []
        first = threading.Event()

        def stream() -> None:
            with post(
                f"{served.url}/v1/completions",
                model="smollm2-135m",
                prompt="Once upon a time",
                max_tokens=60,
                ignore_eos=True,
                stream=True,
            ) as response:
                for line in response:
                    lines.append(line)
                    first.set()

        reader = threading.Thread(target=stream)
        reader.start()
        assert first.wait(30)
        served.process.terminate()
        deadline = time.monotonic() + 10
        while status(f"{served.url}/ready") == 200:
            assert time.monotonic() < deadline
        assert status(f"{served.url}/ready") == 503
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(f"{served.url}/v1/completions", model="smollm2-135m", prompt="late", max_tokens=1)
        assert refused.value.code == 503
        assert json.loads(refused.value.read())["error"]["code"] == "server_draining"
        reader.join(60)
        assert served.process.wait(30) == 0
        text = b"".join(lines).decode()
        assert text.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"length"' in text
